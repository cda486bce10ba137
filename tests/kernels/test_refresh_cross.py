"""The refresh of groups whose pages an encoder wrote: kernel and reference against an expectation in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

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
GROUPS = {"own_first": (OWN, CROSS), "cross_first": (CROSS, WINDOW), "two_crosses": (CROSS, OWN, CROSS)}
ROWS, TOKENS, MAX_SEQ_LEN = 4, 8, 20


@dataclass
class Sequence:
    """What is known of a row id: its length, and its pages in each group."""

    length: int
    encoder_len: int
    pages: list[list[int]] = field(default_factory=list)


class Rig:
    """Buffers of one runtime, and what they must hold after each step."""

    def __init__(self, groups: tuple[PageGroup, ...], device: torch.device) -> None:
        self.groups, self.device, self.step = groups, device, 0
        words = inputs_size(ROWS, TOKENS, 99, len(groups))
        self.buffers = StaticBuffers.allocate(Capacity(ROWS, TOKENS, ROWS, words, 2, groups), device)

    def run(self, rows: list[Request], *, spoil: Callable[[Batch], None] | None = None, mixed: bool = True) -> None:
        batch = Batch.from_requests(rows)
        if spoil is not None:
            spoil(batch)
        for _, tensor in self.buffers.named(BufferKind.DERIVED):
            poison(tensor)
        record = torch.full((self.buffers.inputs.numel(),), 77, dtype=torch.int32)
        batch.write_inputs(record.numpy(), self.step, len(self.groups))
        self.buffers.inputs.copy_(record)
        self.step += 1
        self.tokens = TOKENS if mixed else ROWS
        refresh(
            self.buffers.cut(ROWS, self.tokens),
            max_seq_len=MAX_SEQ_LEN,
            vocab_size=9,
            query_len=0 if mixed else 1,
            seq_len_fill=0,
        )

    def check(
        self, rows: list[Request], known: dict[int, Sequence], faulty: dict[int, tuple[FaultCode, int, int]]
    ) -> None:
        b, at = self.buffers, 0
        for index, row in enumerate(rows):
            code, value, group = faulty.get(index, (FaultCode.NONE, 0, 0))
            assert int(b.fault_code[index]) == code | group << FAULT_GROUP_SHIFT
            assert int(b.fault_value[index]) == value
            count, ok = len(row.tokens), index not in faulty
            assert int(b.req_status[index]) == (RequestStatus.SAMPLES if ok else RequestStatus.INVALID)
            assert int(b.encoder_lens[index]) == (row.encoder_len if ok else 0)
            sequence = known[row.req_index] if ok else Sequence(0, 0, [[] for _ in self.groups])
            for g, spec in enumerate(self.groups):
                pages = sequence.pages[g]
                first = max(0, row.seq_len - count + 1 - spec.window) // spec.page_size if spec.window and ok else 0
                want = [spec.null_page] * first + pages[first:] + [spec.null_page] * (spec.max_pages - len(pages))
                assert b.block_table[g, index, : spec.max_pages].tolist() == want, (g, index)
                holds = (first, len(pages)) if pages else (2**30, 0)
                assert (int(b.table_from[g, index]), int(b.table_to[g, index])) == holds, (g, index)
                slots = [-1] * count
                if ok and not spec.max_encoder_len:
                    places = range(row.seq_len - count, row.seq_len)
                    slots = [pages[p // spec.page_size] * spec.page_size + p % spec.page_size for p in places]
                assert b.slot_mapping[g, at : at + count].tolist() == slots
            at += count
        assert b.slot_mapping[:, at : self.tokens].eq(-1).all()
        assert b.req_status[len(rows) : ROWS].tolist() == [RequestStatus.PAD] * (ROWS - len(rows))
        assert not b.encoder_lens[len(rows) : ROWS].any()
        for g, spec in enumerate(self.groups):
            assert b.block_table[g, len(rows) : ROWS].eq(spec.null_page).all()


@pytest.fixture(params=["reference", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def runner(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where steps run: by the reference, by interpreted kernels, by kernels on a device."""
    with interpreted() if request.param == "interpreter" else nullcontext():
        yield torch.device("cuda" if request.param == "cuda" else "cpu")


def lists(rig: Rig, own: list[int], crossing: list[int]) -> list[list[int]]:
    return [crossing if group.max_encoder_len else own for group in rig.groups]


@pytest.mark.parametrize("name", GROUPS)
def test_rows_share_pages_and_list_them_once(name: str, runner: torch.device) -> None:
    rig = Rig(GROUPS[name], runner)
    a, b, c = lists(rig, [20], [3, 9, 4]), lists(rig, [21, 22], [3, 9, 4]), lists(rig, [23], [])
    known = {0: Sequence(1, 5, a), 2: Sequence(5, 6, b), 3: Sequence(1, 0, c)}
    rows = [Request(0, [1], 1, a, encoder_len=5), Request(2, [1] * 5, 5, b, encoder_len=6), Request(3, [1], 1, c)]
    rig.run(rows)
    rig.check(rows, known, {})
    # The next steps list nothing of the encoder's, in another order, fewer rows, then more again.
    for step in (1, 2, 3):
        nothing = lists(rig, [], [])
        rows = [Request(2, [2], 5 + step, nothing, encoder_len=6), Request(0, [2], 1 + step, nothing, encoder_len=5)]
        rows = rows[: 1 + (step != 2)] if step != 2 else [rows[0]]
        if step == 3:  # row 0 missed a step
            rows[1] = replace(rows[1], seq_len=3)
        rig.run(rows, mixed=step % 2 == 0)
        rig.check(rows, known, {})
    # A sequence that begins keeps nothing of the one before, and may be fed by fewer tokens.
    d = lists(rig, [24], [11])
    rows = [Request(2, [1], 1, d, encoder_len=1), Request(0, [1], 4, lists(rig, [], []), encoder_len=5)]
    rig.run(rows)
    rig.check(rows, known | {2: Sequence(1, 1, d)}, {})


@pytest.mark.parametrize("name", ["own_first", "cross_first"])
def test_faults(name: str, runner: torch.device) -> None:
    groups = GROUPS[name]
    rig, g = Rig(groups, runner), next(i for i, group in enumerate(groups) if group.max_encoder_len)
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

        rows = [bad, Request(1, [1], 1, good, encoder_len=3)]
        rig.run(rows, spoil=spoil)
        rig.check(rows, known, {0: fault})
        begins = lists(rig, [], [])
        rows = [Request(0, [1], 2, begins, encoder_len=1)]  # a faulty step leaves nothing to go on from
        rig.run(rows)
        own_first = (FaultCode.LENGTH_EXCEEDS_PAGES, 2, 0)
        rig.check(rows, known, {0: (FaultCode.ENCODER_LEN_CHANGED, 1, 0) if g == 0 else own_first})


@pytest.mark.parametrize("name", GROUPS)
def test_a_row_that_goes_on_states_the_length_of_its_encoder(name: str, runner: torch.device) -> None:
    """Each wrong length is a fault that names it, and leaves the row as it was."""
    rig = Rig(GROUPS[name], runner)
    g = next(i for i, group in enumerate(rig.groups) if group.max_encoder_len)
    begins, goes_on = lists(rig, [20], [3, 9, 4]), lists(rig, [], [])
    known = {2: Sequence(1, 5, begins)}
    rows = [Request(2, [1], 1, begins, encoder_len=5)]
    rig.run(rows)
    rig.check(rows, known, {})
    for wrong in (0, 4, 6, 3):
        rows = [Request(2, [1], 2, goes_on, encoder_len=wrong)]
        rig.run(rows)
        rig.check(rows, known, {0: (FaultCode.ENCODER_LEN_CHANGED, wrong, g)})
    later = [Request(2, [1], 2, lists(rig, [], [7]), first_page=3, encoder_len=6)]  # more of the encoder's pages
    rig.run(later)
    rig.check(later, known, {0: (FaultCode.ENCODER_LEN_CHANGED, 6, g)})
    rows = [Request(2, [1], 2, goes_on, encoder_len=5)]
    rig.run(rows)
    rig.check(rows, known, {})
    # All of the encoder's pages anew: any length that they hold.
    other = lists(rig, [], [7, 8])
    rows = [Request(2, [1], 3, other, encoder_len=4)]
    rig.run(rows)
    known = {2: Sequence(3, 4, lists(rig, [20], [7, 8]))}
    rig.check(rows, known, {})
    for length, fault in ((5, (FaultCode.ENCODER_LEN_CHANGED, 5, g)), (4, None)):
        rows = [Request(2, [1], 4, goes_on, encoder_len=length)]
        rig.run(rows)
        rig.check(rows, known, {0: fault} if fault else {})


@pytest.mark.parametrize("name", GROUPS)
def test_a_prefix_hit_reads_no_page_of_the_row_id_before(name: str, runner: torch.device) -> None:
    """Another sequence takes over a row id in its middle: its own pages are listed from page 0, and nothing is kept."""
    rig = Rig(GROUPS[name], runner)
    g = next(i for i, group in enumerate(rig.groups) if group.max_encoder_len)
    rows = [Request(2, [1], 1, lists(rig, [20], [3, 9, 4]), encoder_len=5)]
    rig.run(rows)
    rig.check(rows, {2: Sequence(1, 5, rows[0].pages)}, {})
    rows = [Request(2, [1], 6, lists(rig, [21, 22], []), encoder_len=5)]
    rig.run(rows)
    rig.check(rows, {}, {0: (FaultCode.LENGTH_EXCEEDS_PAGES, 5, g)})
    for own, crossing, encoder_len in (([21, 22], [7, 8], 3), ([23, 24], [], 0)):
        rows = [Request(2, [1], 6, lists(rig, own, crossing), encoder_len=encoder_len)]
        rig.run(rows)
        rig.check(rows, {2: Sequence(6, encoder_len, rows[0].pages)}, {})
    rows = [Request(2, [1], 7, lists(rig, [], []), encoder_len=3)]
    rig.run(rows)
    rig.check(rows, {}, {0: (FaultCode.ENCODER_LEN_CHANGED, 3, g)})


def test_a_prefix_hit_lists_its_pages_in_every_group(runner: torch.device) -> None:
    """Groups of the row's own tokens too: an empty list beside one from page 0 keeps nothing."""
    rig = Rig((OWN, replace(OWN, page_size=2, max_pages=10)), runner)
    rows = [Request(2, [1] * 5, 5, ([20, 21], [3, 4, 5]))]
    rig.run(rows)
    rig.check(rows, {2: Sequence(5, 0, [[20, 21], [3, 4, 5]])}, {})
    rows = [Request(2, [1], 6, ([22, 23], []))]
    rig.run(rows)
    rig.check(rows, {}, {0: (FaultCode.LENGTH_EXCEEDS_PAGES, 6, 1)})
    rows = [Request(2, [1], 6, ([22, 23], [6, 7, 8]))]
    rig.run(rows)
    rig.check(rows, {2: Sequence(6, 0, [[22, 23], [6, 7, 8]])}, {})


def test_a_group_that_keeps_nothing_needs_no_pages(runner: torch.device) -> None:
    """What a runtime without KV groups has."""
    rig = Rig((PageGroup(1, 1, 0, 1, max_encoder_len=1),), runner)
    rows = [Request(3, [1, 2, 3], 3), Request(0, [4], 1)]
    rig.run(rows)
    rig.check(rows, {3: Sequence(3, 0, [[]]), 0: Sequence(1, 0, [[]])}, {})
    assert rig.buffers.input_ids.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert rig.buffers.positions.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert rig.buffers.query_start_loc.tolist() == [0, 3, 4, 4, 4]
    rows = [Request(3, [1], 1), Request(3, [1], 1)]
    rig.run(rows)
    rig.check(rows, {}, {0: (FaultCode.DUPLICATE_REQUEST, 3, 0), 1: (FaultCode.DUPLICATE_REQUEST, 3, 0)})


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_kernel_and_reference_agree_on_any_step(data: st.DataObject) -> None:
    """Any lengths and lists, right or wrong, over steps that go on: every buffer alike."""
    groups = GROUPS[data.draw(st.sampled_from(sorted(GROUPS)))]
    rigs = [Rig(groups, torch.device("cpu")) for _ in range(2)]
    lengths = [0] * ROWS
    for _ in range(3):
        rows = []
        for req_index in data.draw(st.lists(st.integers(0, ROWS - 1), max_size=ROWS)):
            count = data.draw(st.integers(1, 2))
            begins = lengths[req_index] == 0 or data.draw(st.booleans())
            lengths[req_index] = count if begins else lengths[req_index] + count
            pages = [data.draw(st.lists(st.integers(-1, 32), max_size=6)) for _ in groups]
            firsts = [data.draw(st.integers(0, 2)) for _ in groups]
            encoder_len = data.draw(st.integers(0, 13))
            rows.append(
                Request(req_index, [1] * count, lengths[req_index], pages, first_page=firsts, encoder_len=encoder_len)
            )
        rigs[0].run(rows)
        with interpreted():
            rigs[1].run(rows)
        (got, want) = (dict(rig.buffers.named()) for rig in rigs)
        for name in set(got) - {"claims", "duplicates", "inputs"}:
            assert torch.equal(got[name], want[name]) or got[name].is_floating_point(), name
