"""The refresh of cross groups, whose pages an encoder writes: kernel and reference against plain Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt.batch import Batch, Request
from graphrt.kernels.library import interpreted
from graphrt.kernels.metadata.buffers import BufferKind, Capacity, PageGroup, StaticBuffers
from graphrt.kernels.metadata.refresh import refresh
from graphrt.kernels.metadata.step_inputs import inputs_size
from graphrt.kernels.types import FAULT_GROUP_SHIFT, FaultCode, RequestStatus
from graphrt.testing.poison import poison

OWN = PageGroup(page_size=4, num_pages=32, null_page=0, max_pages=5)
CROSS = PageGroup(page_size=2, num_pages=32, null_page=0, max_pages=6, max_encoder_len=11)
WINDOW = replace(OWN, window=3)
CHUNKS = replace(OWN, chunk=4)
GROUPS = {"own_first": (OWN, CROSS), "cross_first": (CROSS, WINDOW), "two_crosses": (CROSS, CHUNKS, CROSS)}
ROWS, TOKENS, MAX_SEQ_LEN = 4, 8, 20


@dataclass
class Sequence:
    """The state of a request index: lengths, and pages in each group."""

    length: int
    encoder_len: int
    pages: list[list[int]] = field(default_factory=list)


class Rig:
    """The buffers of one runtime, and their expected contents after each step."""

    def __init__(self, groups: tuple[PageGroup, ...], device: torch.device) -> None:
        self.groups, self.device, self.count = groups, device, 0
        words = inputs_size(ROWS, TOKENS, 99, len(groups))
        self.buffers = StaticBuffers.allocate(Capacity(ROWS, TOKENS, ROWS, words, 2, groups), device)

    def run(self, requests: list[Request], *, spoil: Callable[[Batch], None] | None = None, mixed: bool = True) -> None:
        batch = Batch.from_requests(requests)
        if spoil is not None:
            spoil(batch)
        for _, tensor in self.buffers.named(BufferKind.DERIVED):
            poison(tensor)
        record = torch.full((self.buffers.inputs.numel(),), 77, dtype=torch.int32)
        batch.write_inputs(record.numpy(), self.count, len(self.groups))
        self.buffers.inputs.copy_(record)
        self.count += 1
        self.tokens = TOKENS if mixed else ROWS
        cut = self.buffers.cut(ROWS, self.tokens)
        refresh(cut, max_seq_len=MAX_SEQ_LEN, vocab_size=9, query_len=0 if mixed else 1, seq_len_fill=0)

    def step(
        self,
        requests: list[Request],
        known: dict[int, Sequence],
        faulty: dict[int, tuple[FaultCode, int, int]] | None = None,
        **options: Any,
    ) -> None:
        """Run one step and compare every buffer; `known` are the sequences by request index."""
        self.run(requests, **options)
        b, at, faulty = self.buffers, 0, faulty or {}
        for index, request in enumerate(requests):
            code, value, group = faulty.get(index, (FaultCode.NONE, 0, 0))
            assert int(b.fault_code[index]) == code | group << FAULT_GROUP_SHIFT
            assert int(b.fault_value[index]) == value
            count, ok = len(request.tokens), index not in faulty
            assert int(b.req_status[index]) == (RequestStatus.SAMPLES if ok else RequestStatus.INVALID)
            assert int(b.encoder_lens[index]) == (request.encoder_len if ok else 0)
            sequence = known[request.req_index] if ok else Sequence(0, 0, [[] for _ in self.groups])
            for g, spec in enumerate(self.groups):
                pages = sequence.pages[g]
                position, first = request.seq_len - count, 0
                if ok and (spec.window or spec.chunk):
                    seen = position - position % spec.chunk if spec.chunk else max(0, position + 1 - spec.window)
                    first = seen // spec.page_size
                want = [spec.null_page] * first + pages[first:] + [spec.null_page] * (spec.max_pages - len(pages))
                assert b.block_table[g, index, : spec.max_pages].tolist() == want, (g, index)
                holds = (first, len(pages)) if pages else (2**30, 0)
                assert (int(b.table_from[g, index]), int(b.table_to[g, index])) == holds, (g, index)
                slots = [-1] * count
                if ok and not spec.max_encoder_len:
                    places = range(position, request.seq_len)
                    slots = [pages[p // spec.page_size] * spec.page_size + p % spec.page_size for p in places]
                assert b.slot_mapping[g, at : at + count].tolist() == slots
            at += count
        assert b.slot_mapping[:, at : self.tokens].eq(-1).all()
        assert b.req_status[len(requests) : ROWS].tolist() == [RequestStatus.PAD] * (ROWS - len(requests))
        assert not b.encoder_lens[len(requests) : ROWS].any()
        for g, spec in enumerate(self.groups):
            assert b.block_table[g, len(requests) : ROWS].eq(spec.null_page).all()


def lists(rig: Rig, own: list[int], crossing: list[int]) -> list[list[int]]:
    return [crossing if group.max_encoder_len else own for group in rig.groups]


@pytest.mark.parametrize("name", GROUPS)
def test_requests_share_encoder_pages_and_list_them_once(name: str, op_device: torch.device) -> None:
    rig = Rig(GROUPS[name], op_device)
    a, b, c = lists(rig, [20], [3, 9, 4]), lists(rig, [21, 22], [3, 9, 4]), lists(rig, [23], [])
    known = {0: Sequence(1, 5, a), 2: Sequence(5, 6, b), 3: Sequence(1, 0, c)}
    rig.step(
        [Request(0, [1], 1, a, encoder_len=5), Request(2, [1] * 5, 5, b, encoder_len=6), Request(3, [1], 1, c)], known
    )
    # The next steps list no encoder pages; order and number of requests change.
    for step in (1, 2, 3):
        nothing = lists(rig, [], [])
        requests = [
            Request(2, [2], 5 + step, nothing, encoder_len=6),
            Request(0, [2], 1 + step, nothing, encoder_len=5),
        ]
        requests = requests[: 1 + (step != 2)] if step != 2 else [requests[0]]
        if step == 3:  # request 0 skipped a step
            requests[1] = replace(requests[1], seq_len=3)
        rig.step(requests, known, mixed=step % 2 == 0)
    # A new sequence keeps nothing of the previous one, and may have fewer encoder tokens.
    d = lists(rig, [24], [11])
    rig.step(
        [Request(2, [1], 1, d, encoder_len=1), Request(0, [1], 4, lists(rig, [], []), encoder_len=5)],
        known | {2: Sequence(1, 1, d)},
    )


@pytest.mark.parametrize("name", ["own_first", "cross_first"])
def test_faults(name: str, op_device: torch.device) -> None:
    groups = GROUPS[name]
    rig, g = Rig(groups, op_device), next(i for i, group in enumerate(groups) if group.max_encoder_len)
    good = lists(rig, [20], [3, 9])
    known = {1: Sequence(1, 3, good)}
    for crossing, encoder_len, fault in (
        ([3], 3, (FaultCode.LENGTH_EXCEEDS_PAGES, 3, g)),
        ([], 1, (FaultCode.LENGTH_EXCEEDS_PAGES, 1, g)),
        ([3, 32], 3, (FaultCode.PAGE_OUT_OF_RANGE, 32, g)),
        ([0, 3], 3, (FaultCode.PAGE_OUT_OF_RANGE, 0, g)),
        ([3], 0, (FaultCode.BAD_ENCODER_LEN, 0, g)),
        ([3, 4, 5, 6, 7, 8], 12, (FaultCode.BAD_ENCODER_LEN, 12, g)),
        ([3, 4, 5, 6, 7, 8], -(2**31), (FaultCode.BAD_ENCODER_LEN, -(2**31), g)),
        ([3, 4, 5, 6, 7, 8], 2**31 - 1, (FaultCode.BAD_ENCODER_LEN, 2**31 - 1, g)),
    ):
        bad = Request(0, [1], 1, lists(rig, [21], crossing))

        def spoil(batch: Batch, encoder_len: int = encoder_len) -> None:
            batch.encoder_lens[0] = encoder_len

        rig.step([bad, Request(1, [1], 1, good, encoder_len=3)], known, {0: fault}, spoil=spoil)
        # A faulty first step leaves no state to continue from.
        fault = (FaultCode.LENGTH_EXCEEDS_PAGES, 2, 0) if g else (FaultCode.ENCODER_LEN_CHANGED, 1, 0)
        rig.step([Request(0, [1], 2, lists(rig, [], []), encoder_len=1)], known, {0: fault})


@pytest.mark.parametrize("name", GROUPS)
def test_a_continuing_request_must_repeat_its_encoder_len(name: str, op_device: torch.device) -> None:
    """A wrong length is a fault with that value, and does not change the request's state."""
    rig = Rig(GROUPS[name], op_device)
    g = next(i for i, group in enumerate(rig.groups) if group.max_encoder_len)
    begins, goes_on = lists(rig, [20], [3, 9, 4]), lists(rig, [], [])
    known = {2: Sequence(1, 5, begins)}
    rig.step([Request(2, [1], 1, begins, encoder_len=5)], known)
    for wrong in (0, 4, 6, 3):
        fault = (FaultCode.ENCODER_LEN_CHANGED, wrong, g)
        rig.step([Request(2, [1], 2, goes_on, encoder_len=wrong)], known, {0: fault})
    later = [Request(2, [1], 2, lists(rig, [], [7]), first_page=3, encoder_len=6)]  # more encoder pages
    rig.step(later, known, {0: (FaultCode.ENCODER_LEN_CHANGED, 6, g)})
    rig.step([Request(2, [1], 2, goes_on, encoder_len=5)], known)
    # A list of all encoder pages may change the length.
    known = {2: Sequence(3, 4, lists(rig, [20], [7, 8]))}
    rig.step([Request(2, [1], 3, lists(rig, [], [7, 8]), encoder_len=4)], known)
    for length, fault in ((5, (FaultCode.ENCODER_LEN_CHANGED, 5, g)), (4, None)):
        rig.step([Request(2, [1], 4, goes_on, encoder_len=length)], known, {0: fault} if fault else {})


@pytest.mark.parametrize("name", GROUPS)
def test_a_prefix_hit_reads_no_page_of_the_previous_sequence(name: str, op_device: torch.device) -> None:
    """A sequence that starts in its middle on a used request index lists its pages from page 0; none are kept."""
    rig = Rig(GROUPS[name], op_device)
    g = next(i for i, group in enumerate(rig.groups) if group.max_encoder_len)
    requests = [Request(2, [1], 1, lists(rig, [20], [3, 9, 4]), encoder_len=5)]
    rig.step(requests, {2: Sequence(1, 5, requests[0].pages)})
    rig.step(
        [Request(2, [1], 6, lists(rig, [21, 22], []), encoder_len=5)], {}, {0: (FaultCode.LENGTH_EXCEEDS_PAGES, 5, g)}
    )
    for own, crossing, encoder_len in (([21, 22], [7, 8], 3), ([23, 24], [], 0)):
        requests = [Request(2, [1], 6, lists(rig, own, crossing), encoder_len=encoder_len)]
        rig.step(requests, {2: Sequence(6, encoder_len, requests[0].pages)})
    rig.step([Request(2, [1], 7, lists(rig, [], []), encoder_len=3)], {}, {0: (FaultCode.ENCODER_LEN_CHANGED, 3, g)})


def test_a_prefix_hit_lists_its_pages_in_every_group(op_device: torch.device) -> None:
    """This includes other groups of its own tokens: if one list starts at page 0, an empty list keeps no pages."""
    rig = Rig((OWN, replace(OWN, page_size=2, max_pages=10)), op_device)
    rig.step([Request(2, [1] * 5, 5, ([20, 21], [3, 4, 5]))], {2: Sequence(5, 0, [[20, 21], [3, 4, 5]])})
    rig.step([Request(2, [1], 6, ([22, 23], []))], {}, {0: (FaultCode.LENGTH_EXCEEDS_PAGES, 6, 1)})
    rig.step([Request(2, [1], 6, ([22, 23], [6, 7, 8]))], {2: Sequence(6, 0, [[22, 23], [6, 7, 8]])})


def test_requests_of_a_runtime_without_kv_groups_need_no_pages(op_device: torch.device) -> None:
    rig = Rig((PageGroup(1, 1, 0, 1, max_encoder_len=1),), op_device)
    rig.step([Request(3, [1, 2, 3], 3), Request(0, [4], 1)], {3: Sequence(3, 0, [[]]), 0: Sequence(1, 0, [[]])})
    assert rig.buffers.input_ids.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert rig.buffers.positions.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert rig.buffers.query_start_loc.tolist() == [0, 3, 4, 4, 4]
    rig.step(
        [Request(3, [1], 1), Request(3, [1], 1)],
        {},
        {0: (FaultCode.DUPLICATE_REQUEST, 3, 0), 1: (FaultCode.DUPLICATE_REQUEST, 3, 0)},
    )


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_kernel_and_reference_agree_on_any_step(data: st.DataObject) -> None:
    """Every buffer is equal after consecutive steps with any lengths and lists, valid or not."""
    groups = GROUPS[data.draw(st.sampled_from(sorted(GROUPS)))]
    rigs = [Rig(groups, torch.device("cpu")) for _ in range(2)]
    lengths = [0] * ROWS
    for _ in range(3):
        requests = []
        for req_index in data.draw(st.lists(st.integers(0, ROWS - 1), max_size=ROWS)):
            count = data.draw(st.integers(1, 2))
            begins = lengths[req_index] == 0 or data.draw(st.booleans())
            lengths[req_index] = count if begins else lengths[req_index] + count
            pages = [data.draw(st.lists(st.integers(-1, 32), max_size=6)) for _ in groups]
            firsts = [data.draw(st.integers(0, 2)) for _ in groups]
            encoder_len = data.draw(st.integers(0, 13))
            requests.append(
                Request(req_index, [1] * count, lengths[req_index], pages, first_page=firsts, encoder_len=encoder_len)
            )
        rigs[0].run(requests)
        with interpreted():
            rigs[1].run(requests)
        (got, want) = (dict(rig.buffers.named()) for rig in rigs)
        for name in set(got) - {"last_writers", "write_conflicts", "inputs"}:
            assert torch.equal(got[name], want[name]) or got[name].is_floating_point(), name
