"""Attention over the paged KV cache: split-KV decode, varlen for mixed batches, and the torch reference of both."""
