"""The operators at the start and end of every graph: unpack inputs, derive buffers, write outputs."""
