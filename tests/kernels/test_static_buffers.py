"""Static buffers: poison, reset, kinds."""

from __future__ import annotations

import torch

from graphrt.kernels.metadata.buffers import BufferKind, Capacity, PageGroup, StaticBuffers
from graphrt.testing.poison import poison_derived, poisoned

CPU = torch.device("cpu")
GROUPS = (PageGroup(4, 11, 0, 5), PageGroup(2, 6, 5, 9, window=3, writers_at=11))
CAPACITY = Capacity(reqs=3, tokens=7, req_indices=6, inputs=100, ring=2, page_groups=GROUPS)


def test_poison_reaches_derived_buffers_only_and_reset_undoes_it() -> None:
    buffers = StaticBuffers.allocate(CAPACITY, CPU)
    before = {name: tensor.clone() for name, tensor in buffers.named()}
    derived = {name for name, _ in buffers.named(BufferKind.DERIVED)}
    poison_derived(buffers)
    for name, tensor in buffers.named():
        assert poisoned(tensor).all() if name in derived else torch.equal(tensor, before[name]), name
    buffers.reset()
    assert all(torch.equal(tensor, before[name]) for name, tensor in buffers.named())


def test_buffers_are_listed_by_kind() -> None:
    buffers = StaticBuffers.allocate(CAPACITY, CPU)
    every = [name for name, _ in buffers.named()]
    assert every == list(StaticBuffers.specs())
    parts = {kind: [name for name, _ in buffers.named(kind)] for kind in BufferKind}
    assert sorted(name for part in parts.values() for name in part) == sorted(every)
    assert parts[BufferKind.INPUT] == ["input_ring"]
    assert parts[BufferKind.CONSTANT] == ["page_groups"]
    both = [name for name, _ in buffers.named(BufferKind.INPUT, BufferKind.OUTPUT)]
    assert both == [name for name in every if name in parts[BufferKind.INPUT] or name in parts[BufferKind.OUTPUT]]
    assert all(tensor is getattr(buffers, name) for name, tensor in buffers.named())
