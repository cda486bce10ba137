"""Decoders of Hugging Face `transformers`, unmodified: runtime.py has `from_transformers`."""
