"""MemoryMap and memory_of(): lookups, tensors, snapshots and op traces."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.pool import memory_of
from graphrt.kernels.errors import ConfigError
from tests.support.audit_examples import segment
from tests.support.capture_rig import op_trace_of

SMALL = st.integers(0, 40)
ROWS = st.lists(st.tuples(SMALL, SMALL, st.sampled_from(list(Owner)), st.booleans()), max_size=12)


def first_that_holds(regions: list[Region], address: int) -> Region | None:
    return next((r for r in regions if r.address <= address < r.address + r.nbytes), None)


# -- the map


@given(ROWS)
def test_lookups_agree_with_a_search_over_all_regions(rows) -> None:
    regions = [Region(f"r{i}", owner, start, size, live) for i, (start, size, owner, live) in enumerate(rows)]
    memory, addresses = MemoryMap(regions), range(85)
    truth = [first_that_holds(regions, address) for address in addresses]
    assert [memory.find(address) for address in addresses] == truth
    many = memory.find_many(np.array(addresses, np.uint64)).tolist()
    assert [memory.regions[index] if index >= 0 else None for index in many] == truth


@given(ROWS, SMALL, SMALL)
def test_ranges_cover_all_bytes_in_order(rows, start: int, nbytes: int) -> None:
    regions = [Region(f"r{i}", owner, at, size, live) for i, (at, size, owner, live) in enumerate(rows)]
    parts = list(MemoryMap(regions).ranges(start, nbytes))
    ends = [at for at, _ in parts[1:]] + [start + nbytes]
    by_byte = [region for (at, region), end in zip(parts, ends, strict=False) for _ in range(at, end)]
    assert by_byte == [first_that_holds(regions, address) for address in range(start, start + nbytes)]


def test_64_bit_addresses_and_the_region_before_one() -> None:
    top = (1 << 64) - 16
    memory = MemoryMap([Region("top", Owner.STATIC, top, 8), Region("low", Owner.STATIC, 0, 8)])
    found = memory.find_many(np.array([0, 7, 8, top - 1, top, top + 7, top + 8], np.uint64)).tolist()
    assert found == [1, 1, -1, -1, 0, 0, -1]
    assert MemoryMap([]).find_many(np.array([5], np.uint64)).tolist() == [-1]
    a, b = Region("a", Owner.STATIC, 100, 10), Region("b", Owner.ALLOCATOR, 100, 50)
    memory = MemoryMap([a, b])
    assert memory.before(120) is a
    assert memory.before(100) is memory.before(5) is None


# -- named tensors


def test_a_static_view_covers_its_span_and_a_weight_its_storage() -> None:
    base = torch.zeros(10, 8)
    view = base[2:4, :3]
    (static,) = memory_of(static={"v": view}).regions
    assert (static.owner, static.address, static.nbytes) == (Owner.STATIC, base.data_ptr() + 64, 4 * (8 + 3))
    (weight,) = memory_of(weights={"w": view}).regions
    assert (weight.owner, weight.address, weight.nbytes) == (Owner.WEIGHT, base.data_ptr(), 320)
    layers = [torch.zeros(3), torch.zeros(3)]
    regions = memory_of(cache={"k": layers}, static=[("x", torch.zeros(2)), ("none", torch.zeros(0, 4))]).regions
    assert [(r.name, r.owner) for r in regions] == [
        ("x", Owner.STATIC), ("k.0", Owner.CACHE), ("k.1", Owner.CACHE)
    ], "lists are numbered, and empty tensors have no region"  # fmt: skip


def test_a_module_has_parameters_and_buffers_and_tied_ones_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4))
    model.tied = torch.nn.Linear(4, 4, bias=False)
    model.tied.weight = torch.nn.Parameter(model[0].weight.data.t())
    names = [region.name for region in memory_of(weights=model).regions]
    assert names == ["0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]


def emptied() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


INVALID = {
    "bare": ({"static": [torch.zeros(1)]}, "static: expected named tensors, got tensor"),
    "number": ({"static": {"x": 3}}, "static: expected dense tensors, got <class 'int'> as 'x'"),
    "list": ({"cache": {"x": [3]}}, "cache: expected dense tensors, got <class 'int'> as 'x.0'"),
    "meta": ({"weights": {"x": torch.zeros(2, device="meta")}}, "weights: expected dense tensors"),
    "sparse": ({"static": {"x": torch.zeros(2).to_sparse()}}, "static: expected dense tensors"),
    "key": ({"static": {7: torch.zeros(2)}}, "static: expected named tensors"),
    "lazy": ({"weights": {"w": torch.nn.LazyLinear(4).weight}}, "weights: 'w' of type UninitializedParameter has no"),
    "emptied": ({"library": {"w": emptied()}}, "library: 'w' of type Tensor has no memory"),
    "pool": ({"pool": "pool"}, "pool: expected a graph, a pool or its id, got 'pool'"),
    "bools": ({"pool": (True, False)}, "pool: expected a graph"),
    "default pool": ({"pool": (0, 0)}, "is torch's default pool"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_arguments_raise(case: str) -> None:
    options, message = INVALID[case]
    with pytest.raises(ConfigError, match=message):
        memory_of(**options, snapshot=[])


def test_a_view_by_dlpack_does_not_hide_its_base() -> None:
    whole = torch.zeros(64, 64)
    part = torch.from_dlpack(whole[:4])
    for named in ({"part": part, "whole": whole}, {"whole": whole, "part": part}):
        (region,) = memory_of(weights=named).regions
        assert (region.name, region.nbytes) == ("whole", whole.nbytes)


# -- torch's snapshot


FRAMES = (
    {"filename": "/lib/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"},
    {"filename": "c10/core.cpp", "line": 3, "name": "alloc"},
    {"filename": "model.py", "line": 31, "name": "forward"},
)


def test_blocks_of_a_snapshot() -> None:
    rows = [
        segment(
            0x7F00_0000_0000, (512, "active_allocated"), (1024, "inactive"), (512, "active_pending_free"), pool=(0, 7)
        ),
        segment(0x7F10_0000_0000, (2048, "active_allocated"), (512, "active_pending_free"), (4096, "inactive")),
        segment(0x7F20_0000_0000, (512, "active_allocated"), pool=(0, 8), frames=FRAMES),
    ]
    memory = memory_of(pool=(0, 7), snapshot=rows)
    assert memory_of(pool=SimpleNamespace(pool=lambda: (0, 7)), snapshot=rows).regions == memory.regions
    found = [(r.owner, r.live, r.address, r.nbytes, r.name) for r in memory.regions]
    pool, block, freed = "pool of the graph", "block of torch's allocator", "freed block of torch's allocator"
    assert found == [
        (Owner.POOL, True, 0x7F00_0000_0000, 512, pool),
        (Owner.POOL, False, 0x7F00_0000_0200, 1024, pool),
        (Owner.POOL, False, 0x7F00_0000_0600, 512, pool),
        (Owner.ALLOCATOR, True, 0x7F10_0000_0000, 2048, block),
        (Owner.ALLOCATOR, False, 0x7F10_0000_0800, 512, freed),
        (Owner.ALLOCATOR, False, 0x7F10_0000_0A00, 4096, freed),
        (Owner.ALLOCATOR, True, 0x7F20_0000_0000, 512, f"{block}, allocated at model.py:31 in forward"),
    ]


def test_named_tensors_precede_the_block_that_contains_them() -> None:
    x = torch.zeros(4)
    block = x.data_ptr() - 64
    memory = memory_of(static={"x": x}, snapshot=[segment(block, (512, "active_allocated"))])
    names = [memory.find(at).name for at in (block, x.data_ptr(), x.data_ptr() + 15, x.data_ptr() + 16)]
    assert names == ["block of torch's allocator", "x", "x", "block of torch's allocator"]


# -- op traces


def test_memory_allocated_by_the_step_is_in_the_pool() -> None:
    x = torch.ones(4)

    def step() -> torch.Tensor:
        scratch = torch.empty(4)
        torch.mul(x, torch.tensor([1.0, 2.0, 3.0, 4.0]), out=scratch)
        return torch.zeros(4).add_(scratch).view(2, 2)

    regions = memory_of(pool=op_trace_of(step), static={"x": x}).regions
    assert {(r.name, r.owner) for r in regions} == {
        ("x", Owner.STATIC), ("pool of the graph", Owner.POOL), ("memory from outside of the capture", Owner.ALLOCATOR)
    }, "x's own storage lies beneath its name"  # fmt: skip
    unnamed = [r for r in memory_of(pool=op_trace_of(step)).regions if r.owner is Owner.ALLOCATOR]
    assert [(r.address, r.nbytes) for r in unnamed] == [(x.data_ptr(), 16)]


@pytest.mark.parametrize("keep", ["tensor", "view", "parameter", "op trace", "none"])
def test_earlier_memory_is_live_while_another_tensor_refers_to_it(keep: str) -> None:
    held = {"x": torch.ones(4)}
    op_trace = op_trace_of(lambda: (held["x"].view(2, 2) @ held["x"].view(2, 2)).reshape(-1) + held["x"])
    other = op_trace_of(lambda: held["x"] + 2) if keep == "op trace" else None
    x = held.pop("x")
    kept = {"tensor": x, "view": x[1:], "parameter": torch.nn.Parameter(x), "op trace": other, "none": None}[keep]
    del x
    (region,) = (r for r in memory_of(pool=op_trace).regions if r.owner is Owner.ALLOCATOR)
    assert region.live == (kept is not None)
