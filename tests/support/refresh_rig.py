"""A rig for tests of the refresh: packs step inputs word by word, and computes every derived buffer of a step."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.buffers import COPIED, Capacity, PageGroup, StaticBuffers
from graphrt.kernels.metadata.refresh import refresh
from graphrt.kernels.types import TOKEN_FROM_DEVICE, FaultCode, RequestStatus

LAST = TOKEN_FROM_DEVICE
POISON = UNTOUCHED = -77

GUARD = 5  # values after every buffer that must not be written
LAST_TOKENS = (50, 51, 52, -1, 54, 55, 56, 777)  # request index 3 has none; that of 7 is outside the vocabulary
OUTPUTS = (
    "fault_code", "fault_value", "step_counter", "input_ids", "positions", "slot_mapping", "query_start_loc",
    "seq_lens", "block_table", "logits_indices", "req_indices", "req_status", "void_req_indices", "temperatures",
    "seeds", "encoder_lens", "top_ks", "top_ps", "min_ps", "repetition_penalties", "presence_penalties",
    "frequency_penalties", "prompt_lens", "token_masks", "logprobs", "logprob_tokens", "buffer_rows",
    "decode_seq_lens", "prompt_seq_lens", "decode_start_loc", "prompt_start_loc", "sample_lens", "drafts_left",
)  # fmt: skip
MORE: dict[str, tuple[float, float]] = {
    "repetition_penalties": (1.25, 1.0), "presence_penalties": (-0.5, 0.0), "frequency_penalties": (0.625, 0.0),
    "prompt_lens": (3, 0), "token_masks": (2, -1), "logprobs": (1, -1), "logprob_tokens": (4, -1),
}  # fmt: skip
"""Copied values without meaning for the refresh: value of request index 0 (each further index adds 1), and pad."""

PADS: dict[str, float] = {
    "fault_code": 0, "fault_value": 0, "sample_lens": 0, "drafts_left": -1, "req_indices": -1,
    "req_status": int(RequestStatus.PAD),
    "void_req_indices": -1, "temperatures": 0.0, "seeds": 0, "encoder_lens": 0, "top_ks": 0, "top_ps": 1.0,
    "min_ps": 0.0,
}  # fmt: skip
COPIED_FIELDS = {
    "temperatures": "temperature", "seeds": "seed", "encoder_lens": "encoder_len", "top_ks": "top_k",
    "top_ps": "top_p", "min_ps": "min_p",
}  # fmt: skip
OF_GROUPS = ("slot_mapping", "block_table")  # their first dimension is the KV group
SCRATCH = {"new_spans", "check_code", "check_value", "table_from", "table_to"}  # passed from one kernel to the other


@dataclass(frozen=True)
class Request:
    req_index: int
    tokens: Sequence[int]
    seq_len: int
    pages: Sequence[int]
    sample: int = 1
    temperature: float = 0.0
    seed: int = 0
    start: int | None = None  # wrong first token
    query_len: int | None = None  # wrong number of tokens
    page_count: int | None = None  # wrong number of pages
    first_page: int = 0
    encoder_len: int = 0
    top_k: int = 7
    top_p: float = 0.75
    min_p: float = 0.125


@dataclass(frozen=True)
class Sizes:
    """A captured size and the constants of its runtime."""

    reqs: int = 4
    tokens: int = 4
    query_len: int = 1
    page_size: int = 4
    num_pages: int = 32
    null_page: int = 0
    max_seq_len: int = 40
    max_pages: int = 10
    vocab_size: int = 100
    seq_len_fill: int = 0
    ring: int = 3
    decode_len: int = 0


MIXED = Sizes(reqs=4, tokens=14, query_len=0)
GOOD = Request(2, [LAST], 7, [5, 6], temperature=0.5, seed=-3)
ALSO = Request(0, [17], 1, [9], seed=2**31)
THIRD = Request(5, [0], 8, [11, 12], sample=0)
CHUNK = Request(1, [3, 4, 5, 6, 7], 11, [7, 3, 8], sample=0)
SPEC = replace(Sizes(), tokens=12, query_len=3)


@dataclass(frozen=True)
class Case:
    """The requests of one step, and their expected faults by batch position."""

    id: str
    requests: tuple[Request, ...]
    sizes: Sizes = field(default_factory=Sizes)
    faults: dict[int, tuple[FaultCode, int]] = field(default_factory=dict)


def pack(requests: Sequence[Request], step: int) -> list[int]:
    """Return the step inputs of `requests`, packed word by word."""
    words = [0] * layout.HEADER_SIZE
    words[layout.HEADER_STEP_LOW] = word_of(step)
    words[layout.HEADER_STEP_HIGH] = step >> 32
    tokens = [t for request in requests for t in request.tokens]
    pages = [p for request in requests for p in request.pages]
    words[layout.HEADER_NUM_REQS] = len(requests)
    words[layout.HEADER_NUM_TOKENS] = len(tokens)
    words[layout.HEADER_NUM_PAGES] = len(pages)
    fields = []
    token_at = page_at = 0
    for request in requests:
        copied = {name: getattr(request, field) for name, field in COPIED_FIELDS.items()}
        copied |= {name: value + request.req_index % 100 for name, (value, _) in MORE.items()}
        fields.append([
            request.req_index,
            request.seq_len,
            token_at if request.start is None else request.start,
            len(request.tokens) if request.query_len is None else request.query_len,
            request.sample,
            *(word_of(copied[name]) for name in COPIED),
            request.first_page,
            page_at,
            len(request.pages) if request.page_count is None else request.page_count,
        ])  # fmt: skip
        token_at += len(request.tokens)
        page_at += len(request.pages)
    return words + [word for column in zip(*fields, strict=True) for word in column] + tokens + pages


def word_of(value: float) -> int:
    """The int32 with the bits of a float32 or of the low half of an int."""
    data = struct.pack("<f", value) if isinstance(value, float) else struct.pack("<I", value & 0xFFFFFFFF)
    return struct.unpack("<i", data)[0]


def expect(
    requests: Sequence[Request], sizes: Sizes, faults: dict[int, tuple[FaultCode, int]], step: int
) -> dict[str, list[object]]:
    """Return every derived buffer after a step of `requests`."""
    s, n = sizes, len(requests)
    query_lens = [s.query_len or len(request.tokens) for request in requests]
    decodes = [r for r in range(n) if s.decode_len and query_lens[r] == s.decode_len]
    order = decodes + [r for r in range(n) if r not in decodes]
    starts = [sum(query_lens[r] for r in order[:at]) for at in range(n + 1)]
    bounds = [starts[min(at, n)] for at in range(s.reqs + 1)]
    prompts_from = len(decodes) * s.decode_len
    out: dict[str, list[object]] = {
        **{name: [pad] * s.reqs for name, pad in PADS.items()},
        **{name: [pad] * s.reqs for name, (_, pad) in MORE.items()},
        **{name: [s.seq_len_fill] * s.reqs for name in ("seq_lens", "decode_seq_lens", "prompt_seq_lens")},
        "step_counter": [step],
        "input_ids": [0] * s.tokens,
        "positions": [0] * s.tokens,
        "slot_mapping": [[-1] * s.tokens],
        "query_start_loc": bounds,
        "buffer_rows": [order.index(r) if r < n else r for r in range(s.reqs)],
        "decode_start_loc": [min(start, prompts_from) for start in bounds],
        "prompt_start_loc": [max(start, prompts_from) for start in bounds],
        "block_table": [[[s.null_page] * s.max_pages for _ in range(s.reqs)]],
        "logits_indices": [0] * (s.reqs * max(s.query_len, 1)),
    }
    for at, r in enumerate(order):
        request = requests[r]
        if r in faults:
            out["req_status"][at] = int(RequestStatus.INVALID)
            out["fault_code"][at], out["fault_value"][at] = int(faults[r][0]), faults[r][1]
            starts_sequence = request.seq_len == (
                len(request.tokens) if request.query_len is None else request.query_len
            )
            if starts_sequence and 0 <= request.req_index < len(LAST_TOKENS):
                out["void_req_indices"][at] = request.req_index
            continue
        for j, token in enumerate(request.tokens):
            position = request.seq_len - len(request.tokens) + j
            out["input_ids"][starts[at] + j] = LAST_TOKENS[request.req_index] if token == LAST else token
            out["positions"][starts[at] + j] = position
            slot = request.pages[position // s.page_size] * s.page_size + position % s.page_size
            out["slot_mapping"][0][starts[at] + j] = slot
        for j in range(len(request.tokens), query_lens[r]):  # missing drafts, as far as there are pages
            place = request.seq_len - len(request.tokens) + j
            if place < len(request.pages) * s.page_size:
                slot = request.pages[place // s.page_size] * s.page_size + place % s.page_size
                out["slot_mapping"][0][starts[at] + j] = slot
        for column, page in enumerate(request.pages):
            out["block_table"][0][at][column] = page
        kv_len = request.seq_len + query_lens[r] - len(request.tokens)  # including missing drafts
        out["seq_lens"][at] = kv_len
        out["decode_seq_lens" if r in decodes else "prompt_seq_lens"][at] = kv_len
        drafts = max(request.sample - 1, 0) if s.query_len > 1 else 0
        out["sample_lens"][at] = request.seq_len - drafts
        out["drafts_left"][at] = drafts if request.sample else -1
        out["req_indices"][at] = request.req_index
        out["req_status"][at] = int(RequestStatus.SAMPLES if request.sample else RequestStatus.LIVE)
        for position in range(max(s.query_len, 1)):
            index = starts[at] + len(request.tokens) - 1 - drafts + min(position, drafts)
            out["logits_indices"][position * s.reqs + at] = index
        out["temperatures"][at] = request.temperature
        out["seeds"][at] = request.seed & 0xFFFFFFFF
        out["encoder_lens"][at] = request.encoder_len
        out["top_ks"][at], out["top_ps"][at], out["min_ps"][at] = request.top_k, request.top_p, request.min_p
        for name, (value, _) in MORE.items():
            out[name][at] = value + request.req_index % 100
    return out


class Rig:
    """The tensors of one captured size, each followed by a guard, poisoned before every step."""

    def __init__(self, sizes: Sizes, device: torch.device, *, keeps_tables: bool = False) -> None:
        self.sizes, self.device = sizes, device
        s, requests = sizes, sizes.reqs + 2  # more requests than this size uses
        capacity = Capacity(
            reqs=requests, tokens=s.tokens, req_indices=len(LAST_TOKENS),
            inputs=layout.inputs_size(requests, 3 * s.tokens, requests * s.max_pages, 1), ring=s.ring,
            page_groups=(PageGroup(s.page_size, s.num_pages, s.null_page, s.max_pages),),
            drafts=max(s.query_len - 1, 0),
        )  # fmt: skip
        tensors = dict(StaticBuffers.allocate(capacity, device).cut(s.reqs, s.tokens, max(s.query_len, 1)).named())
        tensors["last_token"] = torch.tensor(LAST_TOKENS, dtype=torch.int32, device=device)
        self.whole: dict[str, torch.Tensor] = {}
        for name in OUTPUTS:
            shape, dtype, at = tensors[name].shape, tensors[name].dtype, int(name in OF_GROUPS)
            shape = (*shape[:at], shape[at] + GUARD, *shape[at + 1 :])
            self.whole[name] = torch.full(shape, POISON, dtype=dtype, device=device)
            tensors[name] = self.whole[name].narrow(at, 0, shape[at] - GUARD)
        self.tensors = StaticBuffers(**tensors)
        self.tables = torch.full_like(self.tensors.page_table, POISON) if keeps_tables else None

    def run(self, words: Sequence[int]) -> None:
        """Poison the outputs, upload the inputs followed by garbage, and refresh."""
        t, s = self.tensors, self.sizes
        for name in set(OUTPUTS) - {"block_table"}:  # the refresh writes only the differences of a table
            whole = self.whole[name]
            whole.fill_(float("nan") if whole.is_floating_point() else POISON)
        t.inputs.fill_(99)
        t.inputs[: len(words)] = torch.tensor(words, dtype=torch.int32)
        refresh(
            t, max_seq_len=s.max_seq_len, vocab_size=s.vocab_size, query_len=s.query_len, seq_len_fill=s.seq_len_fill,
            decode_len=s.decode_len, tables=self.tables,
        )  # fmt: skip
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(
        self, requests: Sequence[Request], faults: dict[int, tuple[FaultCode, int]] | None = None, step: int = 0
    ) -> None:
        """Run one step and compare every buffer."""
        self.run(pack(requests, step))
        self.check(expect(requests, self.sizes, faults or {}, step))

    def step_with_tables(
        self, requests: Sequence[Request], faults: dict[int, tuple[FaultCode, int]] | None = None, step: int = 0
    ) -> None:
        """As `step`, with tables that the caller owns: lists in the inputs are garbage; spare pages are not read."""
        assert self.tables is not None
        held = []
        for request in requests:
            pages = list(request.pages)[: -(-max(request.seq_len, 0) // self.sizes.page_size)]
            held.append(replace(request, pages=pages))
            if 0 <= request.req_index < self.tables.shape[1] and request.seq_len <= self.sizes.max_seq_len:
                self.tables[0, request.req_index, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        before = self.tables.clone()
        self.run(pack([replace(request, pages=[31, 7], first_page=3) for request in requests], step))
        self.check(expect(held, self.sizes, faults or {}, step))
        assert torch.equal(self.tables, before), "the caller's tables were written"

    def check(self, expected: dict[str, list[object]]) -> None:
        for name in OUTPUTS:
            assert getattr(self.tensors, name).tolist() == expected[name], name
            at = int(name in OF_GROUPS)
            guard = self.whole[name].narrow(at, self.whole[name].shape[at] - GUARD, GUARD)
            untouched = guard.isnan() if guard.is_floating_point() else guard == POISON
            assert bool(untouched.all()), f"{name} was written out of bounds"


def make_buffers(device: torch.device, rows: int, req_indices: int, ring: int = 3) -> StaticBuffers:
    """Return buffers in batch order, with last tokens from 100 on, and output rings full of UNTOUCHED."""
    buffers = StaticBuffers.allocate(Capacity(rows, rows, req_indices, 100, ring, (PageGroup(1, 2, 0, 1),)), device)
    for name in ("step_ring", "token_ring", "fault_code_ring", "fault_value_ring"):
        getattr(buffers, name).fill_(UNTOUCHED)
    buffers.last_token.copy_(torch.arange(100, 100 + req_indices))
    buffers.buffer_rows.copy_(torch.arange(rows))
    return buffers
