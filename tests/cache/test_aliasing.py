"""Overlapping K and V tensors: compared with every byte of random tensors, and as a caller makes them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from graphrt.cache.aliasing import CacheTensor, check_disjoint
from graphrt.cache.groups import kv_groups
from graphrt.cache.kv_cache import KVCache
from graphrt.kernels.checks import check_no_overlap, span_bytes
from graphrt.kernels.errors import ConfigError, ShapeError
from graphrt.spec import AttentionSpec, KVCacheSpec

PAGES, SIZE, HEADS, DIM = 6, 4, 2, 8
ONE, TWO = (KVCacheSpec(layers, HEADS, DIM, SIZE, dtype=torch.float32) for layers in (1, 2))


def fresh() -> torch.Tensor:
    return torch.zeros(PAGES, SIZE, HEADS, DIM)


def at(pool: torch.Tensor, offset: int) -> torch.Tensor:
    return pool[offset : offset + PAGES * SIZE * HEADS * DIM].view(PAGES, SIZE, HEADS, DIM)


LINE = torch.zeros(2 * PAGES * SIZE * HEADS * DIM)
ROWS = torch.zeros(PAGES, SIZE, HEADS, 2 * DIM)
OVERLAPPING = {
    "one tensor": (LAYER := fresh(), LAYER),
    "a view": (LAYER, LAYER.view(-1).view(PAGES, SIZE, HEADS, DIM)),
    "a page later": (at(LINE, 0), at(LINE, SIZE * HEADS * DIM)),
    "the last element": (at(LINE, 0), at(LINE, LINE.numel() // 2 - 1)),
    "half a head": (ROWS[..., :DIM], ROWS[..., DIM // 2 : DIM // 2 + DIM]),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_overlapping_views_raise(name: str) -> None:
    one, other = OVERLAPPING[name]
    with pytest.raises(ConfigError, match=r"v\[0\]: shares elements with k\[0\], .*kv_shared_with"):
        KVCache(ONE, [one], [other])
    with pytest.raises(ConfigError, match=r"k\[1\]: shares elements with k\[0\]"):
        KVCache(TWO, [one, other], [fresh(), fresh()])


def test_groups_of_one_pool_may_share_pages_only() -> None:
    memory, layers = LINE[: PAGES * SIZE * HEADS * DIM], ((0,), (1,))
    groups = [KVCacheSpec(1, HEADS, DIM, SIZE, dtype=torch.float32, layers=x) for x in layers]
    same, values = at(memory, 0), fresh()
    assert KVCache(groups, [same, same], [values, values]).num_pages == PAGES
    shifted = at(LINE, SIZE * HEADS * DIM)
    with pytest.raises(ConfigError, match=r"k\[1\]: shares elements with k\[0\]"):
        KVCache(groups, [same, shifted], [fresh(), fresh()])  # page 1 of a group is page 0 of the other
    with pytest.raises(ConfigError, match=r"v\[1\]: shares elements with k\[0\]"):
        KVCache([groups[0], KVCacheSpec(1, HEADS, DIM, SIZE, dtype=torch.float32, layers=(1,), pool=1)],
                [same, fresh()], [fresh(), same])  # fmt: skip


@pytest.mark.parametrize("dims", [(16, 16), (16, 8), (8, 24)], ids=str)
def test_allocated_tensors_do_not_overlap(dims: tuple[int, int]) -> None:
    head, value = dims
    specs = [
        AttentionSpec(4, heads, head, torch.float32, sliding_window=window, v_head_dim=value)
        for heads, window in [(2, 5), (4, 5), (2, None), (2, 5), (4, None)]
    ]
    assert KVCache.allocate(kv_groups(specs, page_size=4), 9, "cpu").num_pages >= 9


POOL = torch.zeros(1200, dtype=torch.uint8)


def drawn(rnd: random.Random) -> torch.Tensor:
    """Return a tensor of a few pages in the pool, with random dimension order, gaps and element size."""
    while True:
        memory = POOL.view(rnd.choice([torch.uint8, torch.float16, torch.float32]))
        shape = (rnd.randint(2, 4), rnd.randint(1, 3), rnd.randint(1, 3), rnd.randint(1, 4))
        strides, reach = [0, 0, 0], shape[3] + rnd.choice([0, 0, 1, shape[3]])
        for dim in rnd.sample(range(3), 3):
            strides[dim], reach = reach, reach * shape[dim] + rnd.choice([0, 0, 1, reach])
        if rnd.random() < 0.5:
            strides[0] = max(strides[0], 64 // memory.dtype.itemsize)
        tensor = torch.as_strided(POOL[:0].view(memory.dtype), shape, (*strides, 1), rnd.randint(0, 40))
        try:
            check_no_overlap("tensor", tensor)
        except ShapeError:
            continue
        if tensor.data_ptr() + span_bytes(tensor) <= POOL.data_ptr() + len(POOL):
            return tensor


def pages_by_byte(tensor: torch.Tensor) -> dict[int, int]:
    size = tensor.dtype.itemsize
    found = {}
    for index in itertools.product(*map(range, tensor.shape)):
        first = tensor.data_ptr() + size * sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        found.update({first + byte: index[0] for byte in range(size)})
    return found


def test_overlap_agrees_with_a_comparison_of_every_byte() -> None:
    rnd = random.Random(5)
    tensors = [drawn(rnd) for _ in range(60)]
    bytes_of = [pages_by_byte(tensor) for tensor in tensors]
    counts = [0, 0]
    for (one, a), (other, b) in itertools.combinations(zip(tensors, bytes_of, strict=True), 2):
        pages_alike = one.stride(0) * one.dtype.itemsize == other.stride(0) * other.dtype.itemsize
        for groups in ((0, 0), (0, 1)):
            common = a.keys() & b.keys()
            if groups[0] != groups[1] and pages_alike:
                common = {byte for byte in common if a[byte] != b[byte]}
            counts[bool(common)] += 1
            pair = [
                CacheTensor(i, "kv"[i] + "[0]", t, group, 0)
                for i, (t, group) in enumerate(zip((one, other), groups, strict=True))
            ]
            if common:
                with pytest.raises(ConfigError):
                    check_disjoint(pair)
            else:
                check_disjoint(pair)
    assert min(counts) > 500
