"""The text model in readable PyTorch, its configuration and its checkpoints: the oracle."""
