"""A model of the request state in plain Python, and a rig that compares `unpack` with it, buffer by buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.buffers import COPIED, STOP_TOKENS, Capacity, PageGroup, StaticBuffers
from graphrt.kernels.metadata.unpack import unpack
from graphrt.kernels.types import NO_TOKEN, TOKEN_FROM_DEVICE, FinishReason

CPU = torch.device("cpu")
SENTINEL = -(1 << 31)
INT_MAX = (1 << 31) - 1
POISON = -77
GUARD = 16  # values before and after every buffer that unpack writes; 64 bytes keep its alignment
WRITTEN = ("inputs", "order", "req_values", "length_limits", "stop_tokens")
UNWRITTEN = ("input_ring", "cursor", "req_seq_lens", "finish_reasons", "page_spans", "step_counter", "page_groups")

OWN = PageGroup(page_size=4, num_pages=64, null_page=0, max_pages=10)
WINDOW = PageGroup(page_size=2, num_pages=64, null_page=0, max_pages=20, window=5, writers_at=64)
CROSS = PageGroup(page_size=2, num_pages=64, null_page=0, max_pages=6, writers_at=128, max_encoder_len=11)
CHUNK = PageGroup(page_size=8, num_pages=64, null_page=0, max_pages=5, chunk=8, writers_at=192)
ONE, SEVERAL = (OWN,), (OWN, WINDOW, CROSS, CHUNK)

List = tuple[int, tuple[int, ...]]  # index of the first page in the sequence, and the pages
NO_LIST: List = (0, ())


def copied(*values: int) -> tuple[int, ...]:
    """Return a value for each copied field: `values`, then zeros."""
    return (*values, *[0] * len(COPIED))[: len(COPIED)]


@dataclass
class State:
    """The persistent state of a request index."""

    length: int = 0
    finish_reason: FinishReason = FinishReason.RUNNING
    values: tuple[int, ...] = (0,) * len(COPIED)
    length_limit: int = 0
    stop_tokens: tuple[int, ...] = (NO_TOKEN,) * STOP_TOKENS
    pages_to: list[int] = field(default_factory=list)  # per group


@dataclass(frozen=True)
class Request:
    """A request of a full entry."""

    req_index: int
    seq_len: int
    tokens: tuple[int, ...] = (TOKEN_FROM_DEVICE,)
    sample: int = 1
    values: tuple[int, ...] = copied(7, 8)
    pages: tuple[List, ...] = ()
    length_limit: int = 0
    stop_tokens: tuple[int, ...] = (NO_TOKEN,) * STOP_TOKENS


@dataclass(frozen=True)
class Full:
    requests: tuple[Request, ...]
    keep: bool = True

    steps = 1

    @property
    def kind(self) -> int:
        return layout.KEEP if self.keep else layout.FULL


@dataclass(frozen=True)
class BatchDelta:
    """`lists` by batch position; `order` None: unchanged."""

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


Word = int | None  # None: any value, the word is never read


def header(step: int, reqs: int, tokens: int, pages: int, kind: int, steps: int) -> list[Word]:
    low, high = step % 2**32, step // 2**32
    return [low if low < 2**31 else low - 2**32, high, reqs, tokens, pages, kind, steps, 0]


def full_words(requests: Sequence[Request], groups: int, step: int, kind: int) -> list[int]:
    """Return the words of a full entry without stop conditions, which are also the expected step inputs."""
    tokens, pages = [t for request in requests for t in request.tokens], []
    starts = [sum(len(other.tokens) for other in requests[:position]) for position in range(len(requests))]
    columns = [[], [], [], [], [], *([] for _ in COPIED), *([] for _ in range(3 * groups))]
    for start, request in zip(starts, requests, strict=True):
        fields = [request.req_index, request.seq_len, start, len(request.tokens), request.sample, *request.values]
        for first, listed in request.pages or (NO_LIST,) * groups:
            fields += [first, len(pages), len(listed)]
            pages += listed
        for column, value in zip(columns, fields, strict=True):
            column.append(value)
    head = header(step, len(requests), len(tokens), len(pages), kind, 1)
    return [*head, *(word for column in columns for word in column), *tokens, *pages]


def stop_words(requests: Sequence[Request]) -> list[int]:
    """Return the stop conditions of a full entry: one run per field."""
    return [request.length_limit for request in requests] + [
        request.stop_tokens[i] for i in range(STOP_TOKENS) for request in requests
    ]


class Model:
    """The state of a runtime by request index, its batch order, and its cursor."""

    def __init__(self, groups: tuple[PageGroup, ...], requests: int, req_indices: int) -> None:
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
        self.order = [-1] * requests
        self.entry = self.step_of_entry = 0
        self.step = -1  # the last step that ran

    def pack(self, entry: Full | BatchDelta, step: int) -> list[int]:
        """Return the words of an entry."""
        if isinstance(entry, Full):
            words = full_words(entry.requests, len(self.groups), step, entry.kind)
            return words + (stop_words(entry.requests) if entry.keep else [])
        lists, pages = self._lists(entry)
        words = [*header(step, entry.num_reqs, 0, len(pages), entry.kind, entry.steps), *(entry.order or ())]
        none = [0] * (3 * len(self.groups))
        by_position = [lists.get(position, none) for position in range(entry.num_reqs)]
        if lists:
            words += [fields[i] for i in range(len(none)) for fields in by_position]
        return [*words, *pages]

    @staticmethod
    def _lists(entry: BatchDelta) -> tuple[dict[int, list[int]], list[int]]:
        """Return the words of each list by batch position, and all pages."""
        lists: dict[int, list[int]] = {}
        pages: list[int] = []
        for position, of_groups in entry.lists.items():
            lists[position] = []
            for first, listed in of_groups:
                lists[position] += [first, len(pages), len(listed)]
                pages += listed
        return lists, pages

    def unpack(self, entry: Full | BatchDelta) -> list[Word]:
        """Return the step inputs that the next step must find, and store the request values of the entry."""
        self.step += 1
        return self._full(entry) if isinstance(entry, Full) else self._delta(entry)

    def _full(self, entry: Full) -> list[Word]:
        requests = list(entry.requests)
        for position, request in enumerate(entry.requests if entry.keep else ()):
            self.order[position] = request.req_index
            if (state := self.states.get(request.req_index)) is None:
                continue
            state.values, state.length_limit = request.values, request.length_limit
            state.stop_tokens = request.stop_tokens
            if request.seq_len == SENTINEL:
                req_index = SENTINEL if state.finish_reason else request.req_index
                requests[position] = replace(request, req_index=req_index, seq_len=state.length + len(request.tokens))
        return [*full_words(requests, len(self.groups), self.step, entry.kind)]

    def _delta(self, entry: BatchDelta) -> list[Word]:
        n, first_step = entry.num_reqs, self.step_of_entry == 0
        lists, pages = self._lists(entry) if first_step else ({}, [])
        if first_step and entry.order is not None:
            self.order[:n] = entry.order
        columns: list[list[Word]] = []
        for position in range(n):
            req_index, listed = self.order[position], lists.get(position, [0] * (3 * len(self.groups)))
            state = self.states.get(req_index)
            if state is not None and not state.finish_reason and self._has_page(state, listed):
                columns.append([req_index, state.length + 1, position, 1, 1, *state.values, *listed])
            else:
                columns.append([SENTINEL, None, position, 1, None, *([None] * len(COPIED)), *([None] * len(listed))])
        head = header(self.step, n, n, len(pages), entry.kind, entry.steps)
        fields = [word for of_field in zip(*columns, strict=True) for word in of_field]
        return [*head, *fields, *([TOKEN_FROM_DEVICE] * n), *pages]

    def _has_page(self, state: State, listed: list[int]) -> bool:
        """Whether every group of the sequences' own tokens has the page of the token at position `length`."""
        for g, group in enumerate(self.groups):
            first, _, count = listed[3 * g : 3 * g + 3]
            held = set(range(state.pages_to[g])) | set(range(first, first + count))
            if not group.max_encoder_len and state.length // group.page_size not in held:
                return False
        return True

    def advance(
        self, entry: Full | BatchDelta, inputs: Sequence[Word], finished: dict[int, FinishReason] | None = None
    ) -> None:
        """Do what refresh and write_outputs do: store lengths and pages, and finish the requests in `finished`."""
        n = len(entry.requests) if isinstance(entry, Full) else entry.num_reqs
        fields = inputs[layout.HEADER_SIZE :]
        for position in range(n):
            state = self.states.get(fields[position])
            if state is None:
                continue
            state.length = fields[n + position]
            state.finish_reason = (finished or {}).get(fields[position], FinishReason.RUNNING)
            for g in range(len(self.groups)):
                first, _, count = (fields[(layout.REQ_PAGES + 3 * g + i) * n + position] for i in range(3))
                if count:
                    state.pages_to[g] = max(state.pages_to[g] if first else 0, first + count)
        self.step_of_entry += 1
        if self.step_of_entry >= entry.steps:
            self.entry, self.step_of_entry = self.entry + 1, 0


class Rig:
    """The buffers of one runtime, with guards around the buffers that unpack writes, and their model."""

    def __init__(
        self,
        device: torch.device,
        groups: tuple[PageGroup, ...] = ONE,
        requests: int = 6,
        req_indices: int = 8,
        ring: int = 3,
        padded: int | None = None,
        words: int = 0,
        input_ring: int = 0,
    ) -> None:
        self.device, self.ring, self.requests, self.req_indices = device, ring, requests, req_indices
        self.model = Model(groups, requests, req_indices)
        words = words or layout.inputs_size(requests, 3 * requests, 12 * requests * len(groups), len(groups))
        capacity = Capacity(requests, requests, req_indices, words, ring, groups)
        tensors = dict(StaticBuffers.allocate(capacity, device).cut(padded or requests, padded or requests).named())
        if input_ring:
            size = (ring, layout.INPUTS_AT + input_ring)
            tensors["input_ring"] = torch.full(size, POISON, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.whole: dict[str, torch.Tensor] = {}
        for name in WRITTEN:
            numel, shape = tensors[name].numel(), tensors[name].shape
            self.whole[name] = torch.full((numel + 2 * GUARD,), POISON, dtype=torch.int32, device=device)
            tensors[name] = self.whole[name][GUARD : numel + GUARD].view(shape)
        self.buffers = StaticBuffers(**tensors)
        self.launch = partial(unpack, self.buffers)
        self._load(*self._contents())

    def _contents(self) -> dict[str, list[object]]:
        """Return the contents of the request state buffers as the model has them."""
        m = self.model
        states = [m.states[i] for i in range(self.req_indices)]
        return {
            "order": m.order,
            "req_values": [[s.values[i] for s in states] for i in range(len(COPIED))],
            "length_limits": [s.length_limit for s in states],
            "stop_tokens": [[s.stop_tokens[i] for s in states] for i in range(STOP_TOKENS)],
            "req_seq_lens": [s.length for s in states],
            "finish_reasons": [int(s.finish_reason) for s in states],
            # unpack does not read the first column of a span.
            "page_spans": [[[POISON, s.pages_to[g]] for s in states] for g in range(len(m.groups))],
            "step_counter": [m.step],
        }

    def _load(self, *names: str) -> None:
        contents = self._contents()
        for name in names:
            tensor = getattr(self.buffers, name)
            tensor.copy_(torch.tensor(contents[name], dtype=tensor.dtype))

    def put(self, words: Sequence[int]) -> None:
        """Write the current entry as the host does: its words from the last header on, and the header copies."""
        entry = self.buffers.input_ring[self.model.entry % self.ring]
        entry[layout.INPUTS_AT :][: len(words)] = torch.tensor(words, dtype=torch.int32)
        entry[: layout.INPUTS_AT].view(-1, layout.HEADER_SIZE)[:] = entry[layout.INPUTS_AT :][: layout.HEADER_SIZE]

    def run(self, words: Sequence[int] | None, expected: Sequence[Word], *, cursor: Sequence[int] = (0, 0, 0)) -> None:
        """Run with `words` in the entry that the cursor selects (None: garbage), and check every buffer."""
        b, m = self.buffers, self.model
        b.input_ring.fill_(POISON - 1)
        if words is not None:
            self.put(words)
        b.inputs.fill_(POISON)
        b.cursor.copy_(torch.tensor([m.entry, m.step_of_entry, *cursor]))
        before = {name: getattr(b, name).clone() for name in UNWRITTEN}
        self.launch()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        inputs = b.inputs.tolist()
        got = [word if known is not None else None for word, known in zip(inputs, expected, strict=False)]
        assert got == list(expected)
        assert set(inputs[len(expected) :]) <= {POISON}, "words after the step inputs were written"
        contents = self._contents()
        for name in WRITTEN[1:]:
            assert getattr(b, name).tolist() == contents[name], name
        for name, whole in self.whole.items():
            guards = torch.cat((whole[:GUARD], whole[-GUARD:]))
            assert bool((guards == POISON).all()), f"{name} was written out of bounds"
        for name, tensor in before.items():
            assert torch.equal(getattr(b, name), tensor), f"{name} was written"

    def run_entry(self, entry: Full | BatchDelta, *finished: dict[int, FinishReason]) -> list[list[Word]]:
        """Run all steps of an entry and return their inputs. `finished[i]` are the requests that finish in step i."""
        step_inputs = []
        n = len(entry.requests) if isinstance(entry, Full) else entry.num_reqs
        for index in range(entry.steps):
            self._load(*self._contents())
            words = None if index else self.model.pack(entry, self.model.step + 1)
            step_inputs.append(self.model.unpack(entry))
            cursor = (n, entry.steps, entry.kind) if index else (POISON, POISON, POISON)
            self.run(words, step_inputs[-1], cursor=cursor)
            self.model.advance(entry, step_inputs[-1], finished[index] if index < len(finished) else None)
        return step_inputs


def req_indices_of(inputs: Sequence[Word], n: int) -> list[Word]:
    return list(inputs[layout.HEADER_SIZE : layout.HEADER_SIZE + n])
