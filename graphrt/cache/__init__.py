"""The paged KV cache: pages, KV groups, page tables and swap space."""
