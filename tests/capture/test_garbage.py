"""Collections of garbage while a graph is captured or verified."""

from __future__ import annotations

import contextlib
import gc
import weakref

from graphrt.capture.garbage import older_objects_set_aside


class Ring:
    """Garbage that a collection alone finds."""

    def __init__(self) -> None:
        self.own = self


def test_a_collection_within_takes_what_the_block_made() -> None:
    old = Ring()
    before, old_one = gc.get_freeze_count(), weakref.ref(old)
    with older_objects_set_aside():
        del old
        young = weakref.ref(Ring())
        gc.collect()
        assert young() is None
        assert old_one() is not None
    assert gc.get_freeze_count() == before == 0
    gc.collect()
    assert old_one() is None


def test_a_block_that_raises_sets_nothing_aside_for_good() -> None:
    with contextlib.suppress(ValueError), older_objects_set_aside():
        raise ValueError
    assert gc.get_freeze_count() == 0


def test_what_the_caller_froze_stays_so() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with older_objects_set_aside():
            assert gc.get_freeze_count() == before
        assert gc.get_freeze_count() == before
    finally:
        gc.unfreeze()
