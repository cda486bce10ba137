"""Attention over the paged KV cache: split-KV decode, varlen for mixed batches, and a torch reference for both."""
