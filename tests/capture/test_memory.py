"""Static buffers and the staging ring."""

from __future__ import annotations

from functools import partial

import torch

from graphrt.capture.staging import StagingRing
from graphrt.kernels.metadata.buffers import BufferKind, Capacity, PageGroup, StaticBuffers
from graphrt.testing.poison import poison_derived, poisoned

CAPACITY = Capacity(reqs=4, tokens=8, req_indices=5, inputs=100, ring=2, page_groups=(PageGroup(4, 8, 0, 3),))


def initial(name: str) -> torch.Tensor:
    """What a buffer holds from the start: its declared value, or what CAPACITY says of the KV groups."""
    return torch.tensor([[4, 8, 0, 3, 0, 0, 0, 0]] if name == "page_groups" else StaticBuffers.specs()[name].initial)


def test_every_buffer_has_its_declared_shape_dtype_and_contents() -> None:
    buffers = StaticBuffers.allocate(CAPACITY, torch.device("cpu"))
    expected = {
        "page_groups": (1, 8),
        "page_table": (1, 5, 3),
        "block_table": (1, 4, 3),
        "slot_mapping": (1, 8),
        "query_start_loc": (5,),
        "last_writers": (13,),
        "token_ring": (2, 4),
        "input_ids": (8,),
    }
    for name, spec in StaticBuffers.specs().items():
        tensor = getattr(buffers, name)
        assert tensor.dtype == spec.dtype
        assert (tensor == initial(name)).all(), name
        if name in expected:
            assert tuple(tensor.shape) == expected[name]
    assert buffers.nbytes == sum(t.numel() * t.element_size() for _, t in buffers.named())


def test_poison_reaches_derived_buffers_only_and_reset_undoes_it() -> None:
    buffers = StaticBuffers.allocate(CAPACITY, torch.device("cpu"))
    poison_derived(buffers)
    for name, spec in StaticBuffers.specs().items():
        tensor = getattr(buffers, name)
        if spec.kind is BufferKind.DERIVED:
            assert poisoned(tensor).all(), name
        else:
            assert (tensor == initial(name)).all(), name
    buffers.reset()
    assert all((getattr(buffers, name) == initial(name)).all() for name in StaticBuffers.specs())


def test_the_ring_hands_results_over_before_a_slot_is_reused() -> None:
    input_ring = torch.zeros(2, 16, dtype=torch.int32)
    ring = StagingRing(input_ring, torch.device("cpu"))
    done = []
    for launch in range(5):
        slot = ring.acquire(launch)
        assert done == list(range(max(0, launch - 1))), "the launch two before has been handed over, no later one"
        slot.inputs[:3] = launch
        with slot.in_flight(None):
            assert input_ring[launch % 2].tolist() == [launch] * 3 + [0] * 13
        slot.on_done = partial(done.append, launch)
    ring.drain()
    assert sorted(done) == [0, 1, 2, 3, 4]
