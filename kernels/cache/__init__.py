"""Writing new tokens to the paged KV cache, and copying its pages."""
