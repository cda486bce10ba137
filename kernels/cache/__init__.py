"""Operators on the paged KV cache: write new tokens, and copy pages."""
