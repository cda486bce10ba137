"""Python's collection of garbage around work that must not wait for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def older_objects_set_aside() -> Iterator[None]:
    """A block in which a collection looks at objects of the block alone.

    A collection of all that a process holds takes tenths of a second once torch and Triton are loaded. Where the caller
    has called `gc.freeze()`, nothing is changed. A freeze within the block ends with it.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
