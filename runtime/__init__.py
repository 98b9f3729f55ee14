"""The runtime: opens an artifact and generates tokens from it; numpy, ctypes and nothing larger."""
