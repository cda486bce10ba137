"""Canaries: guards around a buffer that show writes beyond it."""

from __future__ import annotations

import pytest
import torch

from graphrt.testing.canary import GUARD_BYTES, Canaries
from graphrt.testing.poison import poisoned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_write_to_a_guard_is_reported(dtype: torch.dtype) -> None:
    canaries = Canaries()
    buffer = canaries.full("b", (3, 5), dtype, "cpu", 1)
    assert buffer.shape == (3, 5)
    assert buffer.dtype == dtype
    assert bool((buffer == 1).all())
    buffer.zero_()
    assert canaries.broken() == []
    whole = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
    whole[GUARD_BYTES - 1] ^= 1
    whole[-1] ^= 1
    front, back = canaries.broken()
    assert (front.name, front.is_after, back.is_after) == ("b", False, True)
    assert 1 <= front.offset <= 8
    assert "before its start" in str(front)
    canaries.repair()
    assert canaries.broken() == []
    if dtype is torch.float32:
        assert poisoned(torch.as_strided(buffer, (19,), (1,))).tolist() == [False] * 15 + [True] * 4
