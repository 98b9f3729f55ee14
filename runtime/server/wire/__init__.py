"""What stands on the wire: the tokenizer."""
