"""Kernel templates, one folder per backend."""
