"""Models of Hugging Face, in (llama.py) and out (export.py). Needs transformers, which is imported at first use."""

from data.huggingface.export import save_pretrained
from data.huggingface.llama import from_llama, from_pretrained, llama_names, load_llama, to_llama
