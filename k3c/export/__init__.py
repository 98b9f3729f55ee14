"""From the PyTorch modules to the IR: `k3c::` ops, torch.export per block kind, the importer."""
