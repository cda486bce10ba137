"""KVCache.slots and KVCache.write: encoder outputs in listed pages, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt.cache.kv_cache import KVCache
from graphrt.kernels.errors import ConfigError, ShapeError
from graphrt.spec import KVCacheSpec

CPU, F32, PAGE = torch.device("cpu"), torch.float32, 4


WRITES: dict[str, tuple[Callable[[KVCache], Any], type[Exception], str]] = {
    "null_page": (lambda c: c.slots([1, 0], 5), ShapeError, "or the null page"),
    "twice": (lambda c: c.slots([1, 1], 5), ShapeError, r"\[1, 1\] lists a page twice"),
    "outside": (lambda c: c.slots([1, 9], 5), ShapeError, r"pages\[1\]: expected an int from 0 to 8, got 9"),
    "too_few": (lambda c: c.slots([1], 5), ShapeError, "pages: expected at least 2 pages for 5 tokens, got 1"),
    "layer": (lambda c: c.slots([1], 1, layer=1), ConfigError, "layer: expected an int from 0 to 0"),
    "tokens": (lambda c: c.slots([1], -1), ConfigError, "num_tokens"),
    "heads": (
        lambda c: c.write(0, *torch.zeros(2, 3, 4, 16), c.slots([1], 3)),
        ShapeError,
        r"^k: expected shape \[\*, 2, 16\], got \[3, 4, 16\]",
    ),
    "slots": (lambda c: c.write(0, *torch.zeros(2, 3, 2, 16), c.slots([1], 2)), ShapeError, "slot_mapping"),
    "slots_dtype": (lambda c: c.write(0, *torch.zeros(2, 2, 2, 16), c.slots([1], 2).int()), ShapeError, "slot_mapping"),
    "strides": (
        lambda c: c.write(0, torch.zeros(2, 16, 2).mT, torch.zeros(2, 2, 16), c.slots([1], 2)),
        ShapeError,
        "k: expected stride 1 in the last dimension",
    ),
    "write_layer": (lambda c: c.write(1, *torch.zeros(2, 2, 2, 16), c.slots([1], 2)), ConfigError, "layer"),
}


@pytest.mark.parametrize("name", WRITES)
def test_wrong_writes_raise_and_change_nothing(name: str) -> None:
    call, error, message = WRITES[name]
    cache = KVCache.allocate(KVCacheSpec(1, 2, 16, PAGE, dtype=F32, cross=True), 9, CPU)
    with pytest.raises(error, match=message):
        call(cache)
    assert not cache.k[0].any()
    assert not cache.v[0].any()


def test_writes_change_only_the_listed_pages() -> None:
    cache = KVCache.allocate(KVCacheSpec(1, 2, 16, PAGE, dtype=F32, cross=True), 9, CPU)
    assert cache.slots([7, 2], 2 * PAGE).tolist() == [28, 29, 30, 31, 8, 9, 10, 11], "tokens may fill all pages"
    first, second = torch.randn(2, 6, 2, 16), torch.randn(2, 3, 2, 16)
    slots = torch.cat([cache.slots([7, 2], 6), cache.slots([5], 3)])
    cache.write(0, *torch.cat([first, second], 1), slots)
    for kind, tensor in enumerate((cache.k[0], cache.v[0])):
        assert torch.equal(tensor[[7, 2]].flatten(0, 1)[:6], first[kind])
        assert torch.equal(tensor[5, :3], second[kind])
        assert not tensor[2, 2:].any()
        assert not tensor[5, 3:].any()
        assert not tensor[[0, 1, 3, 4, 6, 8]].any()
