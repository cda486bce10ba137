"""Inspect captured graphs: list their nodes, audit their memory, compare and draw them. Independent of the runtime."""
