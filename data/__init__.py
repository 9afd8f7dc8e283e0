"""Data: text -> tokens on disk (prepare.py) -> batches (dataset.py)."""
