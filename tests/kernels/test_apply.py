"""The first kernel of a graph, and its reference, against a model of row states in plain Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata import apply as apply_module
from graphrt.kernels.metadata import record as layout
from graphrt.kernels.metadata.apply import apply
from graphrt.kernels.metadata.buffers import COPIED, STOP_TOKENS, Capacity, PageGroup, StaticBuffers
from graphrt.kernels.types import NO_TOKEN, TOKEN_FROM_ROW, RowEnd

CPU = torch.device("cpu")
SENTINEL = -(1 << 31)
INT_MAX = (1 << 31) - 1
POISON = -77
GUARD = 16  # values before and behind every buffer that apply writes; 64 bytes keep its alignment
WRITTEN = ("record", "order", "row_values", "end_lengths", "end_tokens")

OWN = PageGroup(page_size=4, num_pages=64, null_page=0, max_pages=10)
WINDOW = PageGroup(page_size=2, num_pages=64, null_page=0, max_pages=20, window=5, claims_at=64)
CROSS = PageGroup(page_size=2, num_pages=64, null_page=0, max_pages=6, claims_at=128, max_encoder_len=11)
CHUNK = PageGroup(page_size=8, num_pages=64, null_page=0, max_pages=5, chunk=8, claims_at=192)
ONE, SEVERAL = (OWN,), (OWN, WINDOW, CROSS, CHUNK)

List = tuple[int, tuple[int, ...]]  # place of the first page in the sequence, and the pages
NO_LIST: List = (0, ())


def copied(*values: int) -> tuple[int, ...]:
    """A value of each copied field: these, then zeros."""
    return (*values, *[0] * len(COPIED))[: len(COPIED)]


@dataclass
class State:
    """What the device knows of a row id."""

    length: int = 0
    end: RowEnd = RowEnd.GOES_ON
    values: tuple[int, ...] = (0,) * len(COPIED)
    limit: int = 0
    stops: tuple[int, ...] = (NO_TOKEN,) * STOP_TOKENS
    pages_to: list[int] = field(default_factory=list)  # per group


@dataclass(frozen=True)
class Row:
    """A row of a full slot."""

    row_id: int
    seq_len: int
    tokens: tuple[int, ...] = (TOKEN_FROM_ROW,)
    sample: int = 1
    values: tuple[int, ...] = copied(7, 8)
    pages: tuple[List, ...] = ()
    limit: int = 0
    stops: tuple[int, ...] = (NO_TOKEN,) * STOP_TOKENS


@dataclass(frozen=True)
class Full:
    rows: tuple[Row, ...]
    keep: bool = True

    steps = 1

    @property
    def kind(self) -> int:
        return layout.KEEP if self.keep else layout.FULL


@dataclass(frozen=True)
class News:
    """`lists` by place; `order` None: as before."""

    num_reqs: int
    order: tuple[int, ...] | None = None
    lists: dict[int, tuple[List, ...]] = field(default_factory=dict)
    steps: int = 1
    loops: bool = False

    @property
    def kind(self) -> int:
        new_order = 0 if self.order is None else layout.NEW_ORDER
        return layout.NEWS | new_order | (layout.LOOPS if self.loops else 0)


Word = int | None  # None: nobody reads it


def header(step: int, reqs: int, tokens: int, pages: int, kind: int, steps: int, lists: int) -> list[Word]:
    low, high = step % 2**32, step // 2**32
    return [low if low < 2**31 else low - 2**32, high, reqs, tokens, pages, kind, steps, lists]


def full_words(rows: Sequence[Row], groups: int, step: int, kind: int) -> list[int]:
    """A full slot without its ends: what the record has to be, too."""
    tokens, pages = [t for row in rows for t in row.tokens], []
    starts = [sum(len(other.tokens) for other in rows[:place]) for place in range(len(rows))]
    columns = [[], [], [], [], [], *([] for _ in COPIED), *([] for _ in range(3 * groups))]
    for start, row in zip(starts, rows, strict=True):
        fields = [row.row_id, row.seq_len, start, len(row.tokens), row.sample, *row.values]
        for first, listed in row.pages or (NO_LIST,) * groups:
            fields += [first, len(pages), len(listed)]
            pages += listed
        for column, value in zip(columns, fields, strict=True):
            column.append(value)
    head = header(step, len(rows), len(tokens), len(pages), kind, 1, 0)
    return [*head, *(word for column in columns for word in column), *tokens, *pages]


def end_words(rows: Sequence[Row]) -> list[int]:
    """The ends of a full slot: a run per field."""
    return [row.limit for row in rows] + [row.stops[i] for i in range(STOP_TOKENS) for row in rows]


class Model:
    """A runtime's row states by row id, its order of rows, and where the cursor stands."""

    def __init__(self, groups: tuple[PageGroup, ...], rows: int, row_ids: int) -> None:
        self.groups = groups
        self.states = {
            i: State(
                100 + i,
                RowEnd.GOES_ON,
                tuple(10 * field + i for field in range(len(COPIED))),
                30 + i,
                (40 + i,) * STOP_TOKENS,
                [99] * len(groups),
            )
            for i in range(row_ids)
        }
        self.order = [-1] * rows
        self.slot = self.step_of_slot = 0
        self.step = -1  # the last one that ran

    def pack(self, slot: Full | News, step: int) -> list[int]:
        """The words of a slot."""
        if isinstance(slot, Full):
            words = full_words(slot.rows, len(self.groups), step, slot.kind)
            return words + (end_words(slot.rows) if slot.keep else [])
        lists, pages = self._lists(slot)
        words = header(step, slot.num_reqs, 0, len(pages), slot.kind, slot.steps, len(lists))
        for place, fields in lists.items():
            words += [place, *fields]
        return [*words, *(slot.order or ()), *pages]

    @staticmethod
    def _lists(slot: News) -> tuple[dict[int, list[int]], list[int]]:
        """Words of each list by place, and all pages."""
        lists: dict[int, list[int]] = {}
        pages: list[int] = []
        for place, of_groups in slot.lists.items():
            lists[place] = []
            for first, listed in of_groups:
                lists[place] += [first, len(pages), len(listed)]
                pages += listed
        return lists, pages

    def apply(self, slot: Full | News) -> list[Word]:
        """The record that the next step must find; what a slot says of rows is kept."""
        self.step += 1
        return self._full(slot) if isinstance(slot, Full) else self._news(slot)

    def _full(self, slot: Full) -> list[Word]:
        rows = list(slot.rows)
        for place, row in enumerate(slot.rows if slot.keep else ()):
            self.order[place] = row.row_id
            if (state := self.states.get(row.row_id)) is None:
                continue
            state.values, state.limit, state.stops = row.values, row.limit, row.stops
            if row.seq_len == SENTINEL:
                row_id = SENTINEL if state.end else row.row_id
                rows[place] = replace(row, row_id=row_id, seq_len=state.length + len(row.tokens))
        return [*full_words(rows, len(self.groups), self.step, slot.kind)]

    def _news(self, slot: News) -> list[Word]:
        n, first_step = slot.num_reqs, self.step_of_slot == 0
        lists, pages = self._lists(slot) if first_step else ({}, [])
        if first_step and slot.order is not None:
            self.order[:n] = slot.order
        columns: list[list[Word]] = []
        for place in range(n):
            row_id, listed = self.order[place], lists.get(place, [0] * (3 * len(self.groups)))
            state = self.states.get(row_id)
            if state is not None and not state.end and self._has_page(state, listed):
                columns.append([row_id, state.length + 1, place, 1, 1, *state.values, *listed])
            else:
                columns.append([SENTINEL, None, place, 1, None, *([None] * len(COPIED)), *([None] * len(listed))])
        head = header(self.step, n, n, len(pages), slot.kind, slot.steps, len(lists))
        fields = [word for of_field in zip(*columns, strict=True) for word in of_field]
        return [*head, *fields, *([TOKEN_FROM_ROW] * n), *pages]

    def _has_page(self, state: State, listed: list[int]) -> bool:
        """Whether the page of the token at position `length` is there, in every group of the rows' own tokens."""
        for g, group in enumerate(self.groups):
            first, _, count = listed[3 * g : 3 * g + 3]
            held = set(range(state.pages_to[g])) | set(range(first, first + count))
            if not group.max_encoder_len and state.length // group.page_size not in held:
                return False
        return True

    def advance(self, slot: Full | News, record: Sequence[Word], ends: dict[int, RowEnd] | None = None) -> None:
        """What refresh and publish do: rows of the record have its lengths and pages. `ends` by row id."""
        n = len(slot.rows) if isinstance(slot, Full) else slot.num_reqs
        fields = record[layout.HEADER_SIZE :]
        for place in range(n):
            state = self.states.get(fields[place])
            if state is None:
                continue
            state.length, state.end = fields[n + place], (ends or {}).get(fields[place], RowEnd.GOES_ON)
            for g in range(len(self.groups)):
                first, _, count = (fields[(layout.ROW_PAGES + 3 * g + i) * n + place] for i in range(3))
                state.pages_to[g] = (
                    max(state.pages_to[g] if first else 0, first + count) if count else state.pages_to[g]
                )
        self.step_of_slot += 1
        if self.step_of_slot >= slot.steps:
            self.slot, self.step_of_slot = self.slot + 1, 0


class Rig:
    """The buffers of one runtime, with guards around what apply writes, beside the model of them."""

    def __init__(
        self,
        device: torch.device,
        groups: tuple[PageGroup, ...] = ONE,
        rows: int = 6,
        row_ids: int = 8,
        ring: int = 3,
        padded: int | None = None,
        words: int = 0,
        inbox: int = 0,
    ) -> None:
        self.device, self.ring, self.rows, self.row_ids = device, ring, rows, row_ids
        self.model = Model(groups, rows, row_ids)
        words = words or layout.record_size(rows, 3 * rows, 12 * rows * len(groups), len(groups))
        capacity = Capacity(rows, rows, row_ids, words, ring, groups)
        tensors = dict(StaticBuffers.allocate(capacity, device).cut(padded or rows, padded or rows).named())
        if inbox:
            tensors["inbox"] = torch.full((ring, inbox), POISON, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.whole: dict[str, torch.Tensor] = {}
        for name in WRITTEN:
            numel, shape = tensors[name].numel(), tensors[name].shape
            self.whole[name] = torch.full((numel + 2 * GUARD,), POISON, dtype=torch.int32, device=device)
            tensors[name] = self.whole[name][GUARD : numel + GUARD].view(shape)
        self.buffers = StaticBuffers(**tensors)
        self._load(*self._contents())

    def _contents(self) -> dict[str, list[object]]:
        """What the model says is in the buffers of rows."""
        m = self.model
        states = [m.states[i] for i in range(self.row_ids)]
        return {
            "order": m.order,
            "row_values": [[s.values[i] for s in states] for i in range(len(COPIED))],
            "end_lengths": [s.limit for s in states],
            "end_tokens": [[s.stops[i] for s in states] for i in range(STOP_TOKENS)],
            "row_lens": [s.length for s in states],
            "row_ends": [int(s.end) for s in states],
            # Where a row's pages begin is the refresh's business.
            "page_spans": [[[POISON, s.pages_to[g]] for s in states] for g in range(len(m.groups))],
            "step_counter": [m.step],
        }

    def _load(self, *names: str) -> None:
        contents = self._contents()
        for name in names:
            tensor = getattr(self.buffers, name)
            tensor.copy_(torch.tensor(contents[name], dtype=tensor.dtype))

    def run(self, words: Sequence[int] | None, expected: Sequence[Word], *, cursor: Sequence[int] = (0, 0, 0)) -> None:
        """Run with these words in the slot that the cursor says, and check every buffer. None: the slot is garbage."""
        b, m = self.buffers, self.model
        b.inbox.fill_(POISON - 1)
        if words is not None:
            b.inbox[m.slot % self.ring, : len(words)] = torch.tensor(words, dtype=torch.int32)
        b.record.fill_(POISON)
        b.cursor.copy_(torch.tensor([m.slot, m.step_of_slot, *cursor]))
        unwritten = ("inbox", "cursor", "row_lens", "row_ends", "page_spans", "step_counter", "page_groups")
        before = {name: getattr(b, name).clone() for name in unwritten}
        apply(b)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        record = b.record.tolist()
        got = [word if known is not None else None for word, known in zip(record, expected, strict=False)]
        assert got == list(expected)
        assert set(record[len(expected) :]) <= {POISON}, "words behind the record were written"
        contents = self._contents()
        for name in WRITTEN[1:]:
            assert getattr(b, name).tolist() == contents[name], name
        for name, whole in self.whole.items():
            guards = torch.cat((whole[:GUARD], whole[-GUARD:]))
            assert bool((guards == POISON).all()), f"{name} was written out of bounds"
        for name, tensor in before.items():
            assert torch.equal(getattr(b, name), tensor), f"{name} was written"

    def slot(self, slot: Full | News, *ends: dict[int, RowEnd]) -> list[list[Word]]:
        """Run all steps of a slot; `ends` says which row ids end in each. Returns the records."""
        records = []
        n = len(slot.rows) if isinstance(slot, Full) else slot.num_reqs
        for index in range(slot.steps):
            self._load(*self._contents())
            words = None if index else self.model.pack(slot, self.model.step + 1)
            records.append(self.model.apply(slot))
            cursor = (n, slot.steps, slot.kind) if index else (POISON, POISON, POISON)
            self.run(words, records[-1], cursor=cursor)
            self.model.advance(slot, records[-1], ends[index] if index < len(ends) else None)
        return records


def ids_of(record: Sequence[Word], n: int) -> list[Word]:
    return list(record[layout.HEADER_SIZE : layout.HEADER_SIZE + n])


def lying(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, reason=reason)


class Cases:
    """What either implementation has to do."""

    def test_full_slot_is_copied_word_for_word(self, device):
        rig, chance = Rig(device, SEVERAL, rows=20, row_ids=24), random.Random(1)
        n, tokens, pages = 19, 23, 31
        words = [chance.randint(SENTINEL, INT_MAX) for _ in range(layout.row_fields(4) * n + tokens + pages)]
        words[: 2 * n] = [SENTINEL if i % 3 == 0 else i % 30 for i in range(2 * n)]  # means nothing without KEEP
        words = [*header(0, n, tokens, pages, layout.FULL, 1, 5), *words]
        rig.model.step = 0
        rig.run(words, words)

    def test_full_slot_is_kept(self, device):
        rig = Rig(device, SEVERAL)
        lists = ((0, (3, 4)), (1, (5,)), (0, (6, 7, 8)), NO_LIST)
        stops = tuple(range(60, 60 + STOP_TOKENS))
        rows = (
            Row(5, 3, (11, 12, 13), 0, copied(-1, SENTINEL, 4), lists, 9, stops),
            Row(2, SENTINEL, limit=INT_MAX),
            Row(0, 2, (14, 15), limit=0, stops=(9, *(NO_TOKEN,) * (STOP_TOKENS - 1))),
            Row(7, SENTINEL, (16, 17), values=copied(1, 2, 3)),
        )
        rig.model.states[2].length = 0
        (record,) = rig.slot(Full(rows))
        assert ids_of(record, 4) == [5, 2, 0, 7]
        assert record[layout.HEADER_SIZE + 4 :][:4] == [3, 1, 2, 109]
        rig.slot(Full(rows[1:2], keep=True))  # other places stay in the order
        assert rig.model.order[:4] == [2, 2, 0, 7]

    def test_kept_row_that_ended_is_nobody(self, device):
        rig = Rig(device)
        for row_id, end in enumerate(RowEnd):
            rig.model.states[row_id].end = end
        (record,) = rig.slot(Full((*(Row(i, SENTINEL) for i in range(4)), Row(2, 5, (1, 2)))))
        assert ids_of(record, 5) == [0, SENTINEL, SENTINEL, SENTINEL, 2]  # the last one says its length: it begins anew
        assert rig.model.order == [0, 1, 2, 3, 2, -1]

    def test_sentinels_mean_nothing_without_keep(self, device):
        rig = Rig(device)
        rig.model.states[1].end = RowEnd.LENGTH
        rows = (Row(1, SENTINEL), Row(SENTINEL, SENTINEL), Row(3, SENTINEL, (SENTINEL, SENTINEL)))
        (record,) = rig.slot(Full(rows, keep=False))
        assert record[layout.HEADER_SIZE :][:6] == [1, SENTINEL, 3, SENTINEL, SENTINEL, SENTINEL]

    def test_kept_row_ids_out_of_range_keep_nothing(self, device):
        rig = Rig(device, SEVERAL)
        rows = tuple(
            Row(i, SENTINEL, values=copied(5, 5, 5), limit=5) for i in (-1, 8, INT_MAX, SENTINEL, SENTINEL + 1, 3)
        )
        (record,) = rig.slot(Full(rows))
        assert ids_of(record, 6) == [-1, 8, INT_MAX, SENTINEL, SENTINEL + 1, 3]  # the refresh finds the fault
        (record,) = rig.slot(News(6))
        assert ids_of(record, 6) == [SENTINEL] * 5 + [3]

    def test_rows_go_on_by_a_token_a_step(self, device):
        rig = Rig(device, SEVERAL)
        rig.slot(News(3, (4, 0, 6), steps=3))
        (record,) = rig.slot(News(2))  # the first two of the old order
        assert record[layout.HEADER_SIZE :][:4] == [4, 0, 104 + 4, 100 + 4]
        (record,) = rig.slot(News(3))
        assert record[layout.HEADER_SIZE + 3 :][:3] == [109, 105, 110]
        (record,) = rig.slot(News(1, (6,)))
        assert record[layout.HEADER_SIZE :][:2] == [6, 111]
        assert rig.model.order == [6, 0, 6, -1, -1, -1]

    def test_rows_that_end_on_the_way_are_nobody(self, device):
        rig = Rig(device, SEVERAL)
        ends = ({5: RowEnd.STOP_TOKEN}, {1: RowEnd.LENGTH}, {2: RowEnd.FAULT})
        records = rig.slot(News(4, (5, 1, 2, 3), steps=4, loops=True), *ends)
        nobody = [[i for i in range(4) if ids_of(record, 4)[i] == SENTINEL] for record in records]
        assert nobody == [[], [0], [0, 1], [0, 1, 2]]

    def test_order_with_row_ids_out_of_range(self, device):
        rig = Rig(device, SEVERAL)
        for order in ((-1, 8, INT_MAX), (SENTINEL, 7, -2), (0, 9, SENTINEL + 1)):
            rig.slot(News(3, order, steps=2))
        (record,) = rig.slot(News(6))  # places that no order has named
        assert ids_of(record, 6) == [0, *[SENTINEL] * 5]

    @pytest.mark.parametrize("waits_for", [0, 1, 3], ids=["own", "window", "chunk"])
    def test_row_waits_for_a_page_of_any_group(self, device, waits_for):
        """Tokens 0 to 7 are there: four pages of a window, two of the first group, one of the last."""
        rig = Rig(device, SEVERAL)
        enough = [3, 5, 0, 2]  # for a ninth one; the encoder's pages do not matter
        for row_id in range(4):
            rig.model.states[row_id] = State(8, pages_to=[2, 4, 0, 1] if row_id != 3 else enough.copy())
        missing: tuple[List, ...] = ((2, (50,)), (4, (51,)), (0, (52, 53)), (1, (54,)))
        partly = tuple(NO_LIST if g == waits_for else of_group for g, of_group in enumerate(missing))
        (record,) = rig.slot(News(4, (0, 1, 2, 3), {1: missing, 0: partly}))
        assert ids_of(record, 4) == [SENTINEL, 1, SENTINEL, 3]
        # Row 0 did not run: nothing was kept of its list.
        (record,) = rig.slot(News(4, None, {2: missing, 0: partly}))
        assert ids_of(record, 4) == [SENTINEL, 1, 2, 3]
        # Of those that ran twice the window's pages are full now.
        (record,) = rig.slot(News(4, None, {0: missing}))
        assert ids_of(record, 4) == [0, SENTINEL, 2, SENTINEL]

    def test_row_runs_until_its_last_page_is_full(self, device):
        rig = Rig(device)
        for row_id, (length, pages) in enumerate([(0, 0), (0, 1), (3, 1), (4, 1), (7, 2), (8, 2)]):
            rig.model.states[row_id] = State(length, pages_to=[pages])
        (record,) = rig.slot(News(6, tuple(range(6))))
        assert ids_of(record, 6) == [SENTINEL, 1, 2, SENTINEL, 4, SENTINEL]
        records = rig.slot(News(6, None, {0: ((0, (9,)),), 3: ((1, (8, 7)),)}, steps=6))
        assert [ids_of(record, 6)[0] for record in records] == [0, 0, 0, 0, SENTINEL, SENTINEL]
        assert [ids_of(record, 6)[3] for record in records] == [3] * 6

    def test_pages_of_an_encoder_are_all_there(self, device):
        rig = Rig(device, (CROSS, OWN))
        rig.model.states[0] = State(30, pages_to=[0, 8])
        (record,) = rig.slot(News(1, (0,), {0: ((0, (3, 4)), NO_LIST)}))
        assert ids_of(record, 1) == [0]

    def test_slot_is_chosen_by_the_cursor(self, device):
        rig = Rig(device, ring=3)
        for slot in (0, 1, 2, 3, 7, 2**31 + 1, 2**32, 2**40 + 2):
            rig.model.slot = slot
            rig.slot(News(2, (slot % 8, 7 - slot % 8)))
            assert rig.model.slot == slot + 1

    @pytest.mark.parametrize("step", [2**31 - 2, 2**31, 2**32 - 2, 2**32, 2**33 + 2**31, 2**50 - 1])
    def test_step_numbers(self, device, step):
        rig = Rig(device, SEVERAL)
        rig.model.step = step
        first, second, _ = rig.slot(News(1, (0,), steps=3))
        assert [w % 2**32 for w in first[:1] + second[:1]] == [(step + 1) % 2**32, (step + 2) % 2**32]
        rig.slot(Full((Row(0, 5),)))

    @pytest.mark.parametrize("kind", [layout.FULL, layout.KEEP, layout.NEWS, layout.NEWS | layout.NEW_ORDER])
    def test_slots_that_lie_count_as_empty(self, device, kind):
        rig = Rig(device, ONE)
        words, inbox = rig.buffers.record.shape[0], rig.buffers.inbox.shape[1]
        lies = [
            {"reqs": 7}, {"reqs": -1}, {"reqs": INT_MAX}, {"reqs": SENTINEL}, {"reqs": 2**28},
            {"pages": -1}, {"pages": words}, {"pages": INT_MAX}, {"lists": -1}, {"reqs": 0, "pages": INT_MAX - 10},
        ]  # fmt: skip
        if kind & layout.NEWS:
            lies += [{"lists": n} for n in (inbox, INT_MAX, 2**28, 2**29, 2**30, 2**30 + 1)]
            lies += [{"lists": (inbox - 8) // 4 + 1, "reqs": 0}]
        else:
            lies += [{"tokens": n} for n in (-1, words, INT_MAX, SENTINEL)]
            lies += [{"tokens": INT_MAX, "pages": INT_MAX}, {"tokens": INT_MAX, "pages": INT_MAX, "lists": INT_MAX}]
            lies += [{"tokens": 2 * words, "pages": -words}]
        for step, lie in enumerate(lies):
            counts = {"reqs": 2, "tokens": 2, "pages": 3, "lists": 1} | lie
            rig.model.step = step - 1
            head = header(step, counts["reqs"], counts["tokens"], counts["pages"], kind, 4, counts["lists"])
            rig.run([*head, *([1] * (inbox - 8))], header(step, 0, 0, 0, kind, 4, 0))

    def test_cursor_that_lies_counts_as_empty(self, device):
        rig = Rig(device)
        rig.model.step_of_slot = 1
        for reqs in (-1, 7, INT_MAX, SENTINEL):
            rig.run(None, header(0, 0, 0, 0, layout.NEWS, 4, 0), cursor=(reqs, 4, layout.NEWS))

    def test_slot_may_be_as_long_as_the_record(self, device):
        n, pages = 2, 5
        words = layout.record_size(n, n, pages, 1)
        rows = (Row(3, 6, pages=((0, (1, 2, 3)),)), Row(4, 3, pages=((0, (9, 8)),)))
        for inbox, keep in ((words, False), (words + 9 * n, True)):
            Rig(device, rows=n, words=words, inbox=inbox).slot(Full(rows, keep))
        rig = Rig(device, rows=n, words=words, inbox=words + 9 * n - 1)  # its ends are not all there
        rig.run(rig.model.pack(Full(rows), 0)[:-1], header(0, 0, 0, 0, layout.KEEP, 1, 0))
        rig = Rig(device, rows=n, words=words - 1, inbox=words)
        rig.run(rig.model.pack(Full(rows, keep=False), 0), header(0, 0, 0, 0, layout.FULL, 1, 0))
        news = News(n, (3, 4), {0: ((26, (1, 2, 3)),), 1: ((27, (9, 8)),)})
        size = 8 + 4 * 2 + n + pages
        Rig(device, rows=n, words=words, inbox=size).slot(news)
        for record, inbox in ((words - 1, words), (words, size - 1)):  # the last word, or a page, would be beyond
            rig = Rig(device, rows=n, words=record, inbox=inbox)
            rig.run(rig.model.pack(news, 0)[:inbox], header(0, 0, 0, 0, news.kind, 1, 0))

    def check_lists(self, device, fields, pages_to=99):
        """Lists that lie, for place 0, and more for places that there are not. All go to the record as they are."""
        rig = Rig(device, SEVERAL)
        rig.model.states[6].pages_to = [pages_to] * len(SEVERAL)
        listed = [word for of_group in fields for word in of_group]
        nowhere = [[place, *[0] * len(listed)] for place in (SENTINEL, -1, 2, INT_MAX)]
        lists = [word for words in ([0, *listed], *nowhere) for word in words]
        words = [*header(0, 2, 0, 1, layout.NEWS | layout.NEW_ORDER, 1, 5), *lists, 6, 7, 55]
        rig._load("page_spans")
        rig.model.states[6].pages_to = [99] * len(SEVERAL)  # row 6 runs
        expected = rig.model.apply(News(2, (6, 7)))
        rig.model.states[6].pages_to = [pages_to] * len(SEVERAL)
        expected[4], expected[7] = 1, 5
        expected[layout.HEADER_SIZE + 2 * layout.ROW_PAGES : -2 : 2] = listed
        rig.model.step = -1
        rig._load("step_counter")
        rig.run(words, [*expected, 55])

    def test_lists_that_lie_are_for_the_refresh_to_judge(self, device):
        self.check_lists(device, [(INT_MAX, INT_MAX, SENTINEL), (-5, -1, 8), (3, SENTINEL, -1), (0, 77, 66)])

    @lying("apply.py reads a full slot in each of its steps, however many it says it is for")
    @pytest.mark.parametrize("kind", [layout.FULL, layout.KEEP])
    def test_full_slot_is_read_once(self, device, kind):
        rig = Rig(device)
        rig.model.step_of_slot = 1
        rig.run(None, [None] * layout.HEADER_SIZE, cursor=(2, 4, kind))

    def test_more_rows_than_captured(self, device):
        """Rows of a slot may be more than a graph serves, and more than 32 programs take."""
        rig = Rig(device, rows=300, row_ids=300, padded=8)
        rig.slot(Full(tuple(Row(i, SENTINEL) for i in range(300))))

    def test_lists_whose_sums_overflow_are_for_the_refresh_to_judge(self, device):
        self.check_lists(device, [(INT_MAX, 0, 1), (-5, -1, INT_MAX), (2**29 - 1, 0, 2), (2**30, 0, 2**30)])

    def test_list_that_ends_beyond_32_bits_is_for_the_refresh_to_judge(self, device):
        self.check_lists(device, [(INT_MAX, 0, 1)] * 4, pages_to=0)

    def test_no_rows(self, device):
        rig = Rig(device, SEVERAL)
        for slot in (Full((), keep=False), Full(()), News(0), News(0, ()), News(0, steps=3)):
            for record in rig.slot(slot):
                assert len(record) == layout.HEADER_SIZE

    def test_more_rows_and_lists_than_a_program_takes(self, device):
        rows, row_ids = 75, 80
        rig, chance = Rig(device, (OWN, WINDOW), rows=rows, row_ids=row_ids), random.Random(2)
        order = tuple(chance.sample(range(row_ids), rows))
        for row_id, state in rig.model.states.items():
            state.length, state.pages_to = 12, [3 + row_id % 2, 6 + row_id % 3 // 2]
            state.end = RowEnd.LENGTH if row_id % 11 == 5 else RowEnd.GOES_ON
        places = chance.sample(range(rows), 70)  # in no order
        lists = {at: ((3, (1 + at % 60,)), (6, (2, 3)[: 1 + at % 2])) for at in places}
        rig.slot(News(rows, order, lists))
        rig.slot(News(rows))
        rig.slot(Full(tuple(Row(i, SENTINEL, values=copied(i, 2 * i), limit=i) for i in order[::-1])))
        rig.slot(News(rows))

    def test_more_words_than_a_program_takes(self, device):
        pages = tuple(range(1, 3000))
        rig = Rig(device, rows=20, row_ids=24, words=5000)
        rig.slot(Full((Row(1, 5, tuple(range(700)), pages=((0, pages),)), Row(2, 5, pages=((0, pages[:9]),)))))
        rig.slot(News(2, (2, 1), {0: ((3, (4,)),), 1: ((0, pages[::-1]),)}))

    @pytest.mark.parametrize("seed", range(2))
    def test_sequences_of_slots(self, device, seed):
        chance = random.Random(seed)
        groups = SEVERAL if seed else (WINDOW,)
        rig = Rig(device, groups, rows=11, row_ids=13)
        rig.model.step = 2**32 - 20
        for _ in range(30):
            slot = _draw_slot(chance, rig.model, 11, 13)
            ends = [
                {i: chance.choice(list(RowEnd)[1:]) for i in range(13) if chance.random() < 0.1}
                for _ in range(slot.steps)
            ]
            rig.slot(slot, *ends)


def _draw_lists(chance: random.Random, model: Model, row_id: int) -> tuple[List, ...]:
    """Pages behind those that a row has, enough for it or not."""
    state = model.states.get(row_id)
    lists = []
    for g in range(len(model.groups)):
        count = chance.choice((0, 1, 1, 2))
        first = state.pages_to[g] if state is not None else chance.randint(0, 4)
        lists.append((first, tuple(chance.randint(1, 63) for _ in range(count))) if count else NO_LIST)
    return tuple(lists)


def _draw_slot(chance: random.Random, model: Model, rows: int, row_ids: int) -> Full | News:
    n = chance.randint(0, rows)
    order = chance.sample([*range(row_ids), -1, row_ids], n)
    if chance.random() < 0.35:
        drawn = []
        for row_id in order:
            tokens = tuple(chance.randint(0, 9) for _ in range(chance.randint(1, 3)))
            seq_len = SENTINEL if chance.random() < 0.5 else chance.randint(len(tokens), 20)
            pages = tuple((0, tuple(chance.choices(range(1, 64), k=-(-24 // g.page_size)))) for g in model.groups)
            values = tuple(chance.randint(SENTINEL, INT_MAX) for _ in COPIED)
            stops = tuple(chance.randint(-1, 9) for _ in range(STOP_TOKENS))
            drawn.append(
                Row(row_id, seq_len, tokens, chance.randint(0, 1), values, pages, chance.randint(0, 30), stops)
            )
        keep = chance.random() < 0.8 or any(row.seq_len == SENTINEL for row in drawn)
        return Full(tuple(drawn), keep)
    new_order = chance.random() < 0.5
    places = [at for at in range(n) if chance.random() < 0.5]
    chance.shuffle(places)
    lists = {at: _draw_lists(chance, model, order[at] if new_order else model.order[at]) for at in places}
    return News(n, tuple(order) if new_order else None, lists, chance.choice((1, 1, 1, 2, 3)), chance.random() < 0.5)


class TestKernel(Cases):
    @pytest.fixture
    def device(self, kernel_device, monkeypatch):
        if kernel_device.type == "cpu":
            monkeypatch.setattr(apply_module, "_PROGRAMS", 1)  # the interpreter runs one after the other
        return kernel_device

    @lying("apply.py adds a list's first page and its count in 32 bits: the row waits, and no fault is told")
    def test_list_that_ends_beyond_32_bits_is_for_the_refresh_to_judge(self, device):
        super().test_list_that_ends_beyond_32_bits_is_for_the_refresh_to_judge(device)

    @lying("apply.py has programs for the captured rows, and for 256 at least: the others of a slot stay unwritten")
    def test_more_rows_than_captured(self, device, monkeypatch):
        monkeypatch.undo()  # all the programs there are
        super().test_more_rows_than_captured(device)


class TestReference(Cases):
    @pytest.fixture
    def device(self):
        return CPU


@pytest.mark.gpu
def test_a_graph_takes_one_slot_after_the_other():
    rig = Rig(torch.device("cuda"), SEVERAL, ring=3)
    b, m = rig.buffers, rig.model
    apply(b)  # compiles
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        apply(b)
    lists = {1: ((26, (3,)), NO_LIST, NO_LIST, NO_LIST)}
    slots = (Full((Row(3, 4, (5, 6)), Row(2, SENTINEL))), News(2, (2, 3), lists, steps=2), News(2), News(1, (7,)))
    for slot in slots:
        for index in range(slot.steps):
            rig._load(*rig._contents())
            words = m.pack(slot, m.step + 1)
            b.inbox.fill_(POISON)
            if not index:
                b.inbox[m.slot % 3, : len(words)] = torch.tensor(words, dtype=torch.int32)
            n = len(slot.rows) if isinstance(slot, Full) else slot.num_reqs
            b.cursor.copy_(torch.tensor([m.slot, m.step_of_slot, n, slot.steps, slot.kind]))
            b.record.fill_(POISON)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            expected = m.apply(slot)
            got = [w if e is not None else None for w, e in zip(b.record.tolist(), expected, strict=False)]
            assert got == expected
            m.advance(slot, expected)


BAD = {
    "cursor": (lambda b: b.cursor[:4], "cursor: expected shape"),
    "row_ends": (lambda b: b.row_ends[:3], "row_ends: expected shape"),
    "row_values": (lambda b: b.row_values[:1], "row_values: expected shape"),
    "end_lengths": (lambda b: b.end_lengths[1:], "end_lengths: expected shape"),
    "end_tokens": (lambda b: torch.cat((b.end_tokens, b.end_tokens), 1)[:, ::2], "end_tokens: expected"),
    "page_spans": (lambda b: b.page_spans[:, :2], "page_spans: expected shape"),
    "order": (lambda b: b.order[:1], "order: expected at least 6 columns"),
    "inbox": (lambda b: b.inbox[:, :7], "inbox: expected at least 8 words"),
    "record": (lambda b: b.record[:7], "record: expected at least 8 words"),
}


@pytest.mark.parametrize("name", BAD)
def test_buffers_that_do_not_fit_are_named(name):
    spoil, message = BAD[name]
    buffers = Rig(CPU).buffers
    with pytest.raises(ShapeError, match=message):
        apply(replace(buffers, **{name: spoil(buffers)}))
