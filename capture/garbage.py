"""Keep Python's garbage collector away from objects that existed before a block."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FROZEN_BY_PYTHON = 1000
"""Python 3.12 counts its immortal objects as frozen, 375 of them, also after `gc.unfreeze()`. A `gc.freeze()` of the
caller freezes all objects: more than 4,000 in an interpreter that has imported nothing."""


@contextmanager
def older_objects_set_aside() -> Iterator[None]:
    """Freeze all existing objects, so that a collection in the block visits only objects made in the block.

    A full collection takes tenths of a second once torch and Triton are loaded. If the caller already called
    `gc.freeze()`, nothing is changed. A freeze made in the block ends with the block.
    """
    if gc.get_freeze_count() > _FROZEN_BY_PYTHON:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
