"""The operators at the head and tail of every graph: unpack the inputs, derive the buffers, write the outputs."""
