"""From the PyTorch model to the IR: custom ops and the importer."""
