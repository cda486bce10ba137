"""Keep graphs that other code captures, such as torch.compile or a serving stack, for inspection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def kept_graphs() -> Iterator[list[torch.cuda.CUDAGraph]]:
    """Return a context in which torch keeps every new CUDA graph. It yields the list of these graphs.

        with kept_graphs() as graphs:
            compiled = torch.compile(model, mode="reduce-overhead")
            for _ in range(3):
                compiled(x)                      # captures
        print(inspect_graph(graphs[-1]))

    torch frees a captured graph after instantiation unless it was created with `keep_graph=True`. The context sets
    this argument for all graphs. A kept graph is instantiated by its first replay, not at the end of its capture, and
    needs host memory. The list keeps the graphs and their memory pools alive. The context applies to all threads and
    can be nested.
    """
    cls: Any = torch.cuda.CUDAGraph
    before = vars(cls).get("__init__")  # None if torch's class inherits __init__
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
