"""Devices that k3c compiles for, and the catalogue of kernel templates that a target brings."""
