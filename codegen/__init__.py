"""Kernels: templates, their keys, and how they become one shared object."""
