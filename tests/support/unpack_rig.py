"""A model of row states in plain Python, and a rig that holds `unpack` against it, buffer by buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.buffers import COPIED, STOP_TOKENS, Capacity, PageGroup, StaticBuffers
from graphrt.kernels.metadata.unpack import unpack
from graphrt.kernels.types import NO_TOKEN, TOKEN_FROM_DEVICE, FinishReason

CPU = torch.device("cpu")
SENTINEL = -(1 << 31)
INT_MAX = (1 << 31) - 1
POISON = -77
GUARD = 16  # values before and behind every buffer that unpack writes; 64 bytes keep its alignment
WRITTEN = ("inputs", "order", "req_values", "end_lengths", "end_tokens")

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
    end: FinishReason = FinishReason.RUNNING
    values: tuple[int, ...] = (0,) * len(COPIED)
    limit: int = 0
    stops: tuple[int, ...] = (NO_TOKEN,) * STOP_TOKENS
    pages_to: list[int] = field(default_factory=list)  # per group


@dataclass(frozen=True)
class Request:
    """A row of a full slot."""

    req_index: int
    seq_len: int
    tokens: tuple[int, ...] = (TOKEN_FROM_DEVICE,)
    sample: int = 1
    values: tuple[int, ...] = copied(7, 8)
    pages: tuple[List, ...] = ()
    limit: int = 0
    stops: tuple[int, ...] = (NO_TOKEN,) * STOP_TOKENS


@dataclass(frozen=True)
class Full:
    rows: tuple[Request, ...]
    keep: bool = True

    steps = 1

    @property
    def kind(self) -> int:
        return layout.KEEP if self.keep else layout.FULL


@dataclass(frozen=True)
class BatchDelta:
    """`lists` by place; `order` None: as before."""

    num_reqs: int
    order: tuple[int, ...] | None = None
    lists: dict[int, tuple[List, ...]] = field(default_factory=dict)
    steps: int = 1
    loops: bool = False

    @property
    def kind(self) -> int:
        new_order = 0 if self.order is None else layout.NEW_ORDER
        lists = layout.LISTS if self.lists else 0
        return layout.DELTA | new_order | lists | (layout.LOOPS if self.loops else 0)


Word = int | None  # None: nobody reads it


def header(step: int, reqs: int, tokens: int, pages: int, kind: int, steps: int) -> list[Word]:
    low, high = step % 2**32, step // 2**32
    return [low if low < 2**31 else low - 2**32, high, reqs, tokens, pages, kind, steps, 0]


def full_words(rows: Sequence[Request], groups: int, step: int, kind: int) -> list[int]:
    """A full slot without its ends: what the record has to be, too."""
    tokens, pages = [t for row in rows for t in row.tokens], []
    starts = [sum(len(other.tokens) for other in rows[:place]) for place in range(len(rows))]
    columns = [[], [], [], [], [], *([] for _ in COPIED), *([] for _ in range(3 * groups))]
    for start, row in zip(starts, rows, strict=True):
        fields = [row.req_index, row.seq_len, start, len(row.tokens), row.sample, *row.values]
        for first, listed in row.pages or (NO_LIST,) * groups:
            fields += [first, len(pages), len(listed)]
            pages += listed
        for column, value in zip(columns, fields, strict=True):
            column.append(value)
    head = header(step, len(rows), len(tokens), len(pages), kind, 1)
    return [*head, *(word for column in columns for word in column), *tokens, *pages]


def end_words(rows: Sequence[Request]) -> list[int]:
    """The ends of a full slot: a run per field."""
    return [row.limit for row in rows] + [row.stops[i] for i in range(STOP_TOKENS) for row in rows]


class Model:
    """A runtime's row states by row id, its order of rows, and where the cursor stands."""

    def __init__(self, groups: tuple[PageGroup, ...], rows: int, req_indices: int) -> None:
        self.groups = groups
        self.states = {
            i: State(
                100 + i,
                FinishReason.RUNNING,
                tuple(10 * field + i for field in range(len(COPIED))),
                30 + i,
                (40 + i,) * STOP_TOKENS,
                [99] * len(groups),
            )
            for i in range(req_indices)
        }
        self.order = [-1] * rows
        self.slot = self.step_of_slot = 0
        self.step = -1  # the last one that ran

    def pack(self, slot: Full | BatchDelta, step: int) -> list[int]:
        """The words of a slot."""
        if isinstance(slot, Full):
            words = full_words(slot.rows, len(self.groups), step, slot.kind)
            return words + (end_words(slot.rows) if slot.keep else [])
        lists, pages = self._lists(slot)
        words = [*header(step, slot.num_reqs, 0, len(pages), slot.kind, slot.steps), *(slot.order or ())]
        none = [0] * (3 * len(self.groups))
        of_places = [lists.get(place, none) for place in range(slot.num_reqs)]
        if lists:
            words += [fields[i] for i in range(len(none)) for fields in of_places]
        return [*words, *pages]

    @staticmethod
    def _lists(slot: BatchDelta) -> tuple[dict[int, list[int]], list[int]]:
        """Words of each list by place, and all pages."""
        lists: dict[int, list[int]] = {}
        pages: list[int] = []
        for place, of_groups in slot.lists.items():
            lists[place] = []
            for first, listed in of_groups:
                lists[place] += [first, len(pages), len(listed)]
                pages += listed
        return lists, pages

    def unpack(self, slot: Full | BatchDelta) -> list[Word]:
        """The record that the next step must find; what a slot says of rows is kept."""
        self.step += 1
        return self._full(slot) if isinstance(slot, Full) else self._delta(slot)

    def _full(self, slot: Full) -> list[Word]:
        rows = list(slot.rows)
        for place, row in enumerate(slot.rows if slot.keep else ()):
            self.order[place] = row.req_index
            if (state := self.states.get(row.req_index)) is None:
                continue
            state.values, state.limit, state.stops = row.values, row.limit, row.stops
            if row.seq_len == SENTINEL:
                req_index = SENTINEL if state.end else row.req_index
                rows[place] = replace(row, req_index=req_index, seq_len=state.length + len(row.tokens))
        return [*full_words(rows, len(self.groups), self.step, slot.kind)]

    def _delta(self, slot: BatchDelta) -> list[Word]:
        n, first_step = slot.num_reqs, self.step_of_slot == 0
        lists, pages = self._lists(slot) if first_step else ({}, [])
        if first_step and slot.order is not None:
            self.order[:n] = slot.order
        columns: list[list[Word]] = []
        for place in range(n):
            req_index, listed = self.order[place], lists.get(place, [0] * (3 * len(self.groups)))
            state = self.states.get(req_index)
            if state is not None and not state.end and self._has_page(state, listed):
                columns.append([req_index, state.length + 1, place, 1, 1, *state.values, *listed])
            else:
                columns.append([SENTINEL, None, place, 1, None, *([None] * len(COPIED)), *([None] * len(listed))])
        head = header(self.step, n, n, len(pages), slot.kind, slot.steps)
        fields = [word for of_field in zip(*columns, strict=True) for word in of_field]
        return [*head, *fields, *([TOKEN_FROM_DEVICE] * n), *pages]

    def _has_page(self, state: State, listed: list[int]) -> bool:
        """Whether the page of the token at position `length` is there, in every group of the rows' own tokens."""
        for g, group in enumerate(self.groups):
            first, _, count = listed[3 * g : 3 * g + 3]
            held = set(range(state.pages_to[g])) | set(range(first, first + count))
            if not group.max_encoder_len and state.length // group.page_size not in held:
                return False
        return True

    def advance(
        self, slot: Full | BatchDelta, record: Sequence[Word], ends: dict[int, FinishReason] | None = None
    ) -> None:
        """What refresh and write_outputs do: rows of the record have its lengths and pages. `ends` by row id."""
        n = len(slot.rows) if isinstance(slot, Full) else slot.num_reqs
        fields = record[layout.HEADER_SIZE :]
        for place in range(n):
            state = self.states.get(fields[place])
            if state is None:
                continue
            state.length, state.end = fields[n + place], (ends or {}).get(fields[place], FinishReason.RUNNING)
            for g in range(len(self.groups)):
                first, _, count = (fields[(layout.REQ_PAGES + 3 * g + i) * n + place] for i in range(3))
                state.pages_to[g] = (
                    max(state.pages_to[g] if first else 0, first + count) if count else state.pages_to[g]
                )
        self.step_of_slot += 1
        if self.step_of_slot >= slot.steps:
            self.slot, self.step_of_slot = self.slot + 1, 0


class Rig:
    """The buffers of one runtime, with guards around what unpack writes, beside the model of them."""

    def __init__(
        self,
        device: torch.device,
        groups: tuple[PageGroup, ...] = ONE,
        rows: int = 6,
        req_indices: int = 8,
        ring: int = 3,
        padded: int | None = None,
        words: int = 0,
        input_ring: int = 0,
    ) -> None:
        self.device, self.ring, self.rows, self.req_indices = device, ring, rows, req_indices
        self.model = Model(groups, rows, req_indices)
        words = words or layout.inputs_size(rows, 3 * rows, 12 * rows * len(groups), len(groups))
        capacity = Capacity(rows, rows, req_indices, words, ring, groups)
        tensors = dict(StaticBuffers.allocate(capacity, device).cut(padded or rows, padded or rows).named())
        if input_ring:
            size = (ring, layout.INPUTS_AT + input_ring)
            tensors["input_ring"] = torch.full(size, POISON, dtype=torch.int32, pin_memory=device.type == "cuda")
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
        states = [m.states[i] for i in range(self.req_indices)]
        return {
            "order": m.order,
            "req_values": [[s.values[i] for s in states] for i in range(len(COPIED))],
            "end_lengths": [s.limit for s in states],
            "end_tokens": [[s.stops[i] for s in states] for i in range(STOP_TOKENS)],
            "req_lens": [s.length for s in states],
            "finish_reasons": [int(s.end) for s in states],
            # Where a row's pages begin is the refresh's business.
            "page_spans": [[[POISON, s.pages_to[g]] for s in states] for g in range(len(m.groups))],
            "step_counter": [m.step],
        }

    def _load(self, *names: str) -> None:
        contents = self._contents()
        for name in names:
            tensor = getattr(self.buffers, name)
            tensor.copy_(torch.tensor(contents[name], dtype=tensor.dtype))

    def put(self, words: Sequence[int]) -> None:
        """Write the slot that is next as the host does: its words from the last header on, and the header's copies."""
        slot = self.buffers.input_ring[self.model.slot % self.ring]
        slot[layout.INPUTS_AT :][: len(words)] = torch.tensor(words, dtype=torch.int32)
        slot[: layout.INPUTS_AT].view(-1, layout.HEADER_SIZE)[:] = slot[layout.INPUTS_AT :][: layout.HEADER_SIZE]

    def run(self, words: Sequence[int] | None, expected: Sequence[Word], *, cursor: Sequence[int] = (0, 0, 0)) -> None:
        """Run with these words in the slot that the cursor says, and check every buffer. None: the slot is garbage."""
        b, m = self.buffers, self.model
        b.input_ring.fill_(POISON - 1)
        if words is not None:
            self.put(words)
        b.inputs.fill_(POISON)
        b.cursor.copy_(torch.tensor([m.slot, m.step_of_slot, *cursor]))
        unwritten = ("input_ring", "cursor", "req_lens", "finish_reasons", "page_spans", "step_counter", "page_groups")
        before = {name: getattr(b, name).clone() for name in unwritten}
        unpack(b)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        record = b.inputs.tolist()
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

    def slot(self, slot: Full | BatchDelta, *ends: dict[int, FinishReason]) -> list[list[Word]]:
        """Run all steps of a slot; `ends` says which row ids end in each. Returns the records."""
        records = []
        n = len(slot.rows) if isinstance(slot, Full) else slot.num_reqs
        for index in range(slot.steps):
            self._load(*self._contents())
            words = None if index else self.model.pack(slot, self.model.step + 1)
            records.append(self.model.unpack(slot))
            cursor = (n, slot.steps, slot.kind) if index else (POISON, POISON, POISON)
            self.run(words, records[-1], cursor=cursor)
            self.model.advance(slot, records[-1], ends[index] if index < len(ends) else None)
        return records


def ids_of(record: Sequence[Word], n: int) -> list[Word]:
    return list(record[layout.HEADER_SIZE : layout.HEADER_SIZE + n])
