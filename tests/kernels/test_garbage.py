"""Garbage collection while a graph is captured or verified."""

from __future__ import annotations

import contextlib
import gc
import weakref

from graphrt.kernels.garbage import older_objects_set_aside


class Cycle:
    """An object that only a garbage collection frees."""

    def __init__(self) -> None:
        self.own = self


def test_a_collection_in_the_block_frees_only_objects_made_in_the_block() -> None:
    old = Cycle()
    old_one = weakref.ref(old)
    with contextlib.suppress(ValueError), older_objects_set_aside():
        del old
        young = weakref.ref(Cycle())
        gc.collect()
        assert young() is None
        assert old_one() is not None
        raise ValueError
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old_one() is None


def test_objects_frozen_by_the_caller_stay_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with older_objects_set_aside():
            assert gc.get_freeze_count() == before
        assert gc.get_freeze_count() == before
    finally:
        gc.unfreeze()
