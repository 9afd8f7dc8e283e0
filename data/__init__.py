"""Data: text -> tokens on disk (prepare.py) -> batches (dataset.py), and Llama models in and out (huggingface/)."""
