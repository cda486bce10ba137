"""Blocks without Python's garbage collection, or in which it excludes existing objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FROZEN_BY_PYTHON = 1000
"""Python 3.12 counts 375 immortal objects as frozen, even after `gc.unfreeze()`. A caller's `gc.freeze()` freezes all
objects, which are more than 4,000 in an interpreter without imports."""


@contextmanager
def no_collections() -> Iterator[None]:
    """Turn automatic garbage collection off in the block."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def older_objects_set_aside() -> Iterator[None]:
    """Freeze all existing objects, so that a collection in the block visits only objects made in the block.

    A full collection takes tenths of a second once torch and Triton are loaded. If the caller has already called
    `gc.freeze()`, this collects the few younger objects instead. The end of the block also undoes a freeze that code in
    the block made.
    """
    if gc.get_freeze_count() > _FROZEN_BY_PYTHON:
        gc.collect()
        yield
        return
    try:
        gc.freeze()
        yield
    finally:
        gc.unfreeze()
