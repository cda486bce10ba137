"""A rig for tests of the refresh: records made word by word, and what every derived buffer must hold after a step."""

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
POISON = -77

GUARD = 5  # values behind every buffer that nobody may touch
LAST_TOKENS = (50, 51, 52, -1, 54, 55, 56, 777)  # row id 3 has none, that of 7 is outside the vocabulary
OUTPUTS = (
    "fault_code", "fault_value", "step_counter", "input_ids", "positions", "slot_mapping", "query_start_loc",
    "seq_lens", "block_table", "logits_indices", "req_indices", "req_status", "void_ids", "temperatures", "seeds",
    "encoder_lens", "top_ks", "top_ps", "min_ps",
    "repetition_penalties", "presence_penalties", "frequency_penalties", "prompt_lens", "token_masks", "logprobs",
    "logprob_tokens",
    "places", "decode_seq_lens", "prompt_seq_lens", "decode_start_loc", "prompt_start_loc",
)  # fmt: skip
MORE: dict[str, tuple[float, float]] = {
    "repetition_penalties": (1.25, 1.0), "presence_penalties": (-0.5, 0.0), "frequency_penalties": (0.625, 0.0),
    "prompt_lens": (3, 0), "token_masks": (2, -1), "logprobs": (1, -1), "logprob_tokens": (4, -1),
}  # fmt: skip
"""Copied values whose meaning is nobody's here: what row id 0 has, each further one 1 more, and what pads get."""

OF_GROUPS = ("slot_mapping", "block_table")  # a row of them per KV group
SCRATCH = {"new_spans", "check_code", "check_value", "table_from", "table_to"}  # notes of the kernels for each other


@dataclass(frozen=True)
class Request:
    req_index: int
    tokens: Sequence[int]
    seq_len: int
    pages: Sequence[int]
    sample: int = 1
    temperature: float = 0.0
    seed: int = 0
    start: int | None = None  # lie about the first token
    query_len: int | None = None  # lie about the number of tokens
    page_count: int | None = None  # lie about the number of pages
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


@dataclass(frozen=True)
class Case:
    """Rows of one step, and by row which fault they have to show."""

    id: str
    rows: tuple[Request, ...]
    sizes: Sizes = field(default_factory=Sizes)
    faults: dict[int, tuple[FaultCode, int]] = field(default_factory=dict)


def pack(rows: Sequence[Request], step: int) -> list[int]:
    """The step record of `rows`, built from the words of record.py and nothing else."""
    words = [0] * layout.HEADER_SIZE
    low = step & 0xFFFFFFFF
    words[layout.HEADER_STEP_LOW] = low - (1 << 32) if low >= 1 << 31 else low
    words[layout.HEADER_STEP_HIGH] = step >> 32
    tokens = [t for row in rows for t in row.tokens]
    pages = [p for row in rows for p in row.pages]
    words[layout.HEADER_NUM_REQS] = len(rows)
    words[layout.HEADER_NUM_TOKENS] = len(tokens)
    words[layout.HEADER_NUM_PAGES] = len(pages)
    columns: list[list[int]] = [[] for _ in range(layout.req_fields(1))]
    token_at = page_at = 0
    for row in rows:
        columns[layout.REQ_INDEX].append(row.req_index)
        columns[layout.REQ_SEQ_LEN].append(row.seq_len)
        columns[layout.REQ_QUERY_START].append(token_at if row.start is None else row.start)
        columns[layout.REQ_QUERY_LEN].append(len(row.tokens) if row.query_len is None else row.query_len)
        columns[layout.REQ_PAGES + layout.PAGE_FIRST].append(row.first_page)
        columns[layout.REQ_PAGES + layout.PAGE_START].append(page_at)
        count = len(row.pages) if row.page_count is None else row.page_count
        columns[layout.REQ_PAGES + layout.PAGE_COUNT].append(count)
        columns[layout.REQ_SAMPLE].append(row.sample)
        columns[layout.REQ_COPIED].append(struct.unpack("<i", struct.pack("<f", row.temperature))[0])
        columns[layout.REQ_COPIED + 1].append(struct.unpack("<i", struct.pack("<I", row.seed & 0xFFFFFFFF))[0])
        columns[layout.REQ_ENCODER_LEN].append(row.encoder_len)
        columns[layout.REQ_ENCODER_LEN + 1].append(row.top_k)
        for at, share in ((2, row.top_p), (3, row.min_p)):
            columns[layout.REQ_ENCODER_LEN + at].append(struct.unpack("<i", struct.pack("<f", share))[0])
        for name, (value, _) in MORE.items():
            word = struct.pack("<f" if isinstance(value, float) else "<i", value + row.req_index % 100)
            columns[layout.REQ_COPIED + COPIED.index(name)].append(struct.unpack("<i", word)[0])
        token_at += len(row.tokens)
        page_at += len(row.pages)
    return words + [word for column in columns for word in column] + tokens + pages


def expect(
    rows: Sequence[Request], sizes: Sizes, faults: dict[int, tuple[FaultCode, int]], step: int
) -> dict[str, list[object]]:
    """Every derived buffer after a step of `rows`."""
    s, n = sizes, len(rows)
    query_lens = [s.query_len or len(row.tokens) for row in rows]
    decodes = [r for r in range(n) if s.decode_len and query_lens[r] == s.decode_len]
    order = decodes + [r for r in range(n) if r not in decodes]
    starts = [sum(query_lens[r] for r in order[:at]) for at in range(n + 1)]
    bounds = [starts[min(at, n)] for at in range(s.reqs + 1)]
    prompts_from = len(decodes) * s.decode_len
    out: dict[str, list[object]] = {
        "fault_code": [0] * s.reqs,
        "fault_value": [0] * s.reqs,
        "step_counter": [step],
        "input_ids": [0] * s.tokens,
        "positions": [0] * s.tokens,
        "slot_mapping": [[-1] * s.tokens],
        "query_start_loc": bounds,
        "seq_lens": [s.seq_len_fill] * s.reqs,
        "places": [order.index(r) if r < n else r for r in range(s.reqs)],
        "decode_seq_lens": [s.seq_len_fill] * s.reqs,
        "prompt_seq_lens": [s.seq_len_fill] * s.reqs,
        "decode_start_loc": [min(start, prompts_from) for start in bounds],
        "prompt_start_loc": [max(start, prompts_from) for start in bounds],
        "block_table": [[[s.null_page] * s.max_pages for _ in range(s.reqs)]],
        "logits_indices": [0] * s.reqs,
        "req_indices": [-1] * s.reqs,
        "req_status": [int(RequestStatus.PAD)] * s.reqs,
        "void_ids": [-1] * s.reqs,
        "temperatures": [0.0] * s.reqs,
        "seeds": [0] * s.reqs,
        "encoder_lens": [0] * s.reqs,
        "top_ks": [0] * s.reqs,
        "top_ps": [1.0] * s.reqs,
        "min_ps": [0.0] * s.reqs,
        **{name: [pad] * s.reqs for name, (_, pad) in MORE.items()},
    }
    for at, r in enumerate(order):
        row = rows[r]
        if r in faults:
            out["req_status"][at] = int(RequestStatus.INVALID)
            out["fault_code"][at], out["fault_value"][at] = int(faults[r][0]), faults[r][1]
            begins = row.seq_len == (len(row.tokens) if row.query_len is None else row.query_len)
            if begins and 0 <= row.req_index < len(LAST_TOKENS):
                out["void_ids"][at] = row.req_index
            continue
        for j, token in enumerate(row.tokens):
            position = row.seq_len - len(row.tokens) + j
            out["input_ids"][starts[at] + j] = LAST_TOKENS[row.req_index] if token == LAST else token
            out["positions"][starts[at] + j] = position
            slot = row.pages[position // s.page_size] * s.page_size + position % s.page_size
            out["slot_mapping"][0][starts[at] + j] = slot
        for column, page in enumerate(row.pages):
            out["block_table"][0][at][column] = page
        out["seq_lens"][at] = row.seq_len
        out["decode_seq_lens" if r in decodes else "prompt_seq_lens"][at] = row.seq_len
        out["req_indices"][at] = row.req_index
        out["req_status"][at] = int(RequestStatus.SAMPLES if row.sample else RequestStatus.LIVE)
        out["logits_indices"][at] = starts[at] + len(row.tokens) - 1
        out["temperatures"][at] = row.temperature
        out["seeds"][at] = row.seed & 0xFFFFFFFF
        out["encoder_lens"][at] = row.encoder_len
        out["top_ks"][at], out["top_ps"][at], out["min_ps"][at] = row.top_k, row.top_p, row.min_p
        for name, (value, _) in MORE.items():
            out[name][at] = value + row.req_index % 100
    return out


class Rig:
    """The tensors of one captured size, each with a guard behind it, poisoned before every step."""

    def __init__(self, sizes: Sizes, device: torch.device, *, keeps_tables: bool = False) -> None:
        self.sizes, self.device = sizes, device
        s, rows = sizes, sizes.reqs + 2  # room for more rows than this size uses
        capacity = Capacity(
            rows=rows, tokens=s.tokens, req_indices=len(LAST_TOKENS),
            inputs=layout.inputs_size(rows, 3 * s.tokens, rows * s.max_pages, 1), ring=s.ring,
            page_groups=(PageGroup(s.page_size, s.num_pages, s.null_page, s.max_pages),),
        )  # fmt: skip
        tensors = dict(StaticBuffers.allocate(capacity, device).cut(s.reqs, s.tokens).named())
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
        """Poison the outputs, upload a record with garbage behind it, refresh."""
        t, s = self.tensors, self.sizes
        for name in set(OUTPUTS) - {"block_table"}:  # of a table only what differs is written
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
        self, rows: Sequence[Request], faults: dict[int, tuple[FaultCode, int]] | None = None, step: int = 0
    ) -> None:
        """Run one step and compare every buffer."""
        self.run(pack(rows, step))
        self.check(expect(rows, self.sizes, faults or {}, step))

    def step_with_tables(
        self, rows: Sequence[Request], faults: dict[int, tuple[FaultCode, int]] | None = None, step: int = 0
    ) -> None:
        """The same where the caller keeps tables: the record's lists are garbage, and pages to spare are not read."""
        assert self.tables is not None
        held = []
        for row in rows:
            pages = list(row.pages)[: -(-max(row.seq_len, 0) // self.sizes.page_size)]
            held.append(replace(row, pages=pages))
            if 0 <= row.req_index < self.tables.shape[1] and row.seq_len <= self.sizes.max_seq_len:
                self.tables[0, row.req_index, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        before = self.tables.clone()
        self.run(pack([replace(row, pages=[31, 7], first_page=3) for row in rows], step))
        self.check(expect(held, self.sizes, faults or {}, step))
        assert torch.equal(self.tables, before), "the caller's tables were written"

    def check(self, expected: dict[str, list[object]]) -> None:
        for name in OUTPUTS:
            assert getattr(self.tensors, name).tolist() == expected[name], name
            at = int(name in OF_GROUPS)
            guard = self.whole[name].narrow(at, self.whole[name].shape[at] - GUARD, GUARD)
            untouched = guard.isnan() if guard.is_floating_point() else guard == POISON
            assert bool(untouched.all()), f"{name} was written out of bounds"
