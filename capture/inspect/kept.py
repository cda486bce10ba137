"""Graphs that other code captures, kept so that they can be read: torch.compile's, a serving stack's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def kept_graphs() -> Iterator[list[torch.cuda.CUDAGraph]]:
    """Have torch keep every CUDA graph that is made inside, whoever makes it, and list them in that order.

        with kept_graphs() as graphs:
            compiled = torch.compile(model, mode="reduce-overhead")
            for _ in range(3):
                compiled(x)                      captures somewhere inside
        print(inspect_graph(graphs[-1]))

    torch drops a captured graph once it can be launched, unless its maker asks for `keep_graph=True`; here all are made
    so. A kept graph is instantiated by its first replay, not when its capture ends, and takes host memory.
    The list keeps graphs alive, and their memory pools with them. Applies to all threads; contexts may be nested.
    """
    cls: Any = torch.cuda.CUDAGraph
    before = vars(cls).get("__init__")  # torch's class has none of its own: that of its base makes the graph
    init, made = cls.__init__, []

    def keep(self: torch.cuda.CUDAGraph, keep_graph: bool = True) -> None:
        init(self, keep_graph=True)
        made.append(self)

    cls.__init__ = keep
    try:
        yield made
    finally:
        if before is None:
            del cls.__init__
        else:
            cls.__init__ = before
