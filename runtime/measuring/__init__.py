"""Measures artifacts on a GPU: workloads, candidates, single launches. Nothing here serves."""
