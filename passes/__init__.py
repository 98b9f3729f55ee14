"""The passes: one file, one job; `pipeline.py` is the ordered list."""
