"""Drivers: what the executors need of a device; one module per kind of device."""
