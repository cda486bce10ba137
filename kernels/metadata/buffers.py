"""The static buffers, which are all tensors, other than weights and KV, whose addresses a graph may contain.

Each buffer is declared once, in `StaticBuffers`. The declared shape defines the view that a graph uses. The declared
writer and readers define the arguments of `unpack`, `refresh` and `write_outputs`. `scripts/make_docs.py` generates
the table in docs/decode_step.md from the same declarations; that page also explains how to add a buffer.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

import torch

from graphrt.kernels.errors import CapacityError


class BufferKind(str, Enum):
    """Where a buffer is allocated, what may change it, and when.

    CONSTANT    written once, at allocation
    INPUT       pinned host memory that the graph reads; one entry per launch in flight
    PERSISTENT  kept across replays: request state indexed by req_index, and counters
    DERIVED     rewritten by every refresh for all padded requests. A test may poison it between replays, once the host
                has read the step's logits, because `logits()` reads `buffer_rows` to restore the batch order
    CARRIED     sized by the padded requests like DERIVED, but too large to rewrite, so a refresh writes only the
                elements that differ from the previous step
    OUTPUT      pinned host memory that the graph writes; one entry per step in flight
    """

    CONSTANT = "constant"
    INPUT = "input"
    PERSISTENT = "persistent"
    DERIVED = "derived"
    CARRIED = "carried"
    OUTPUT = "output"


_Result = TypeVar("_Result")

PER_GRAPH = (BufferKind.DERIVED, BufferKind.CARRIED)
ON_HOST = (BufferKind.INPUT, BufferKind.OUTPUT)

HEADER_SIZE = 8  # words in the header of a ring entry and of the step inputs
HEADER_COPIES = 32  # headers in a ring entry, one per program of `unpack`; see step_inputs.py
_ENTRY_ALIGNMENT = 32  # in words; ring entries start at cache lines of the device

CURSOR_ENTRY = 0  # number of finished entries of the input ring
CURSOR_STEP = 1  # number of steps of the current entry that have run
CURSOR_NUM_REQS = 2  # this field and the next two describe the current entry, once its first step has run
CURSOR_STEPS = 3
CURSOR_KIND = 4
CURSOR_SIZE = 5
_ALL = 1 << 30
"""Larger than every column of a page table."""

STOP_TOKENS = 8
"""Maximum stop tokens per request that the device compares; the host checks the others when it collects results."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Declaration of one static buffer.

    shape    names of Capacity attributes, or integers
    writer   "host", or the name of the operator that writes it
    readers  names of the operators and other components that read it
    pad      description of what the refresh writes for pad requests and pad tokens
    initial  fill value at allocation
    copied   pad value of a buffer that the refresh copies from a request field of the step inputs; `Batch` has a
             field of the same name. None: the refresh does not copy the buffer
    """

    shape: tuple[str | int, ...]
    dtype: torch.dtype
    kind: BufferKind
    writer: str
    readers: tuple[str, ...]
    pad: str
    initial: int = 0
    copied: int | None = None


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Parameters of one KV group, that is, of the layers that share a page table.

    page_size   tokens per page, of all ranks that store a part of it
    num_pages   pages in the pool; groups of one pool share page ids
    null_page   id of the pool's page that is never allocated
    max_pages   columns of the table, as many as the longest sequence has pages
    window      tokens that a query sees, including itself; 0: all
    chunk       attention chunk size in tokens; a query sees only its own chunk; 0: all tokens
    writers_at  offset of the pool's pages in `last_writers`
    max_encoder_len   maximum encoder tokens in a cross group, whose pages the encoder writes and steps only read; a
                      request's count is its `encoder_len`. 0: the group holds the KV of the sequences' own tokens
    """

    page_size: int
    num_pages: int
    null_page: int
    max_pages: int
    window: int = 0
    chunk: int = 0
    writers_at: int = 0
    max_encoder_len: int = 0

    @property
    def words(self) -> tuple[int, ...]:
        """The fields in the order of the columns of `page_groups`."""
        return astuple(self)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes for which static buffers are allocated."""

    reqs: int  # maximum requests in a step
    tokens: int  # maximum new tokens in a step
    req_indices: int  # number of request indices, each with its own persistent state
    inputs: int  # int32 words in the largest step inputs
    ring: int  # maximum launches in flight
    page_groups: tuple[PageGroup, ...]  # the KV groups, in order
    launch_steps: int = 1  # maximum steps of a launch
    counted_tokens: int = 0  # vocabulary size if requests may have penalties, else 0
    history: int = 0  # maximum tokens of a sequence if the device keeps them, else 0
    interleaves: bool = False  # whether the KV of each request is interleaved over ranks
    drafts: int = 0  # maximum drafts of a request in a step
    draft_tokens: int = 0  # vocabulary size if drafts are verified by rejection sampling, else 0
    tree_depth: int = 0  # maximum drafts of one path if drafts form trees; 0: they form chains
    masked_tokens: int = 0  # vocabulary size if requests may have token masks, else 0
    bias_entries: int = 0  # maximum logit biases of a request
    logprob_columns: int = 0  # log-probabilities per request and step: of one token, then of the top tokens

    @property
    def input_ring(self) -> int:
        """Words in a ring entry: header copies, the largest step inputs, and the stop conditions."""
        words = (HEADER_COPIES - 1) * HEADER_SIZE + self.inputs + (1 + STOP_TOKENS) * self.reqs
        return -(-words // _ENTRY_ALIGNMENT) * _ENTRY_ALIGNMENT

    @property
    def entries(self) -> int:
        """Maximum number of steps in flight."""
        return self.ring * self.launch_steps

    @property
    def copied(self) -> int:
        return len(COPIED)

    @property
    def seen_words(self) -> int:
        """Words in a bitmap with one bit per counted token."""
        return -(-self.counted_tokens // 32)

    @property
    def allowed_words(self) -> int:
        """Words in a token mask with one bit per token."""
        return -(-self.masked_tokens // 32)

    @property
    def positions(self) -> int:
        """Maximum number of tokens that a request samples in a step."""
        return 1 + self.drafts

    @property
    def logits_rows(self) -> int:
        return self.reqs * self.positions

    @property
    def tree_drafts(self) -> int:
        return self.drafts if self.tree_depth else 0

    @property
    def tree_tokens(self) -> int:
        return self.tokens if self.tree_depth else 0

    @property
    def interleaved_tokens(self) -> int:
        return self.tokens if self.interleaves else 0

    @property
    def path_rows(self) -> int:
        return self.reqs * self.tree_depth

    @property
    def reqs_plus_one(self) -> int:
        return self.reqs + 1

    @property
    def groups(self) -> int:
        return len(self.page_groups)

    @property
    def groups_plus_one(self) -> int:
        return self.groups + 1

    @property
    def pages_per_req(self) -> int:
        """Width of the widest group's page table."""
        return max(group.max_pages for group in self.page_groups)

    @property
    def last_writers(self) -> int:
        """One element per page of every pool, then one per request index."""
        return max(group.writers_at + group.num_pages for group in self.page_groups) + self.req_indices


def _declare(spec: BufferSpec) -> Any:
    return field(metadata={"spec": spec})


def _constant(shape: tuple[str | int, ...], dtype: torch.dtype, *readers: str) -> Any:
    return _declare(BufferSpec(shape, dtype, BufferKind.CONSTANT, "construction", readers, "constant"))


def _words(shape: tuple[str, ...], kind: BufferKind, writer: str, *readers: str) -> Any:
    return _declare(BufferSpec(shape, torch.int32, kind, writer, readers, "not padded: the header has the counts"))


def _persistent(
    shape: tuple[str | int, ...],
    dtype: torch.dtype,
    writer: str,
    *readers: str,
    pad: str = "untouched",
    initial: int = 0,
) -> Any:
    return _declare(BufferSpec(shape, dtype, BufferKind.PERSISTENT, writer, readers, pad, initial))


def _derived(shape: tuple[str | int, ...], dtype: torch.dtype, *readers: str, pad: str, writer: str = "refresh") -> Any:
    return _declare(BufferSpec(shape, dtype, BufferKind.DERIVED, writer, readers, pad))


def _carried(shape: tuple[str | int, ...], *readers: str, pad: str, initial: int = 0) -> Any:
    return _declare(BufferSpec(shape, torch.int32, BufferKind.CARRIED, "refresh", readers, pad, initial))


def _request_value(dtype: torch.dtype, *readers: str, pad: int = 0) -> Any:
    """Declare a value per request that the scheduler sends in each step, in the `Batch` field of the same name."""
    return _declare(BufferSpec(("reqs",), dtype, BufferKind.DERIVED, "refresh", readers, str(pad), copied=pad))


def _output(
    shape: tuple[str | int, ...], dtype: torch.dtype, *, pad: str, initial: int = -1, writer: str = "write_outputs"
) -> Any:
    readers = ("host, through StepHandle",)
    return _declare(BufferSpec(shape, dtype, BufferKind.OUTPUT, writer, readers, pad, initial))


@dataclass(frozen=True)
class StaticBuffers:
    """All static tensors, allocated once for the largest descriptor and never reallocated; graphs use views (`cut`)."""

    page_groups: torch.Tensor = _constant(("groups", len(fields(PageGroup))), torch.int32, "unpack", "refresh")
    input_ring: torch.Tensor = _words(("ring", "input_ring"), BufferKind.INPUT, "host", "unpack", "write_outputs")
    inputs: torch.Tensor = _words(("inputs",), BufferKind.DERIVED, "unpack", "refresh", "write_outputs", "write_tree")

    cursor: torch.Tensor = _persistent((CURSOR_SIZE,), torch.int64, "write_outputs", "unpack", pad="see CURSOR_ENTRY")
    order: torch.Tensor = _persistent(("reqs",), torch.int32, "unpack", "unpack", initial=-1)
    req_seq_lens: torch.Tensor = _persistent(("req_indices",), torch.int32, "write_outputs", "unpack")
    finish_reasons: torch.Tensor = _persistent(
        ("req_indices",), torch.int32, "write_outputs", "unpack", "write_outputs"
    )
    req_values: torch.Tensor = _persistent(("copied", "req_indices"), torch.int32, "unpack", "unpack")
    length_limits: torch.Tensor = _persistent(("req_indices",), torch.int32, "unpack", "unpack", "write_outputs")
    stop_tokens: torch.Tensor = _persistent(
        (STOP_TOKENS, "req_indices"), torch.int32, "unpack", "write_outputs", initial=-1
    )
    loop_condition: torch.Tensor = _persistent((1,), torch.int32, "write_outputs", "loop graph", pad="one value")
    last_token: torch.Tensor = _persistent(("req_indices",), torch.int32, "write_outputs", "refresh", initial=-1)
    last_encoder_len: torch.Tensor = _persistent(("req_indices",), torch.int32, "refresh", "refresh")
    step_counter: torch.Tensor = _persistent(
        (1,), torch.int64, "refresh", "unpack", "write_outputs", "write_logprobs", pad="one value", initial=-1
    )
    last_writers: torch.Tensor = _persistent(("last_writers",), torch.int64, "refresh", "refresh")
    write_conflicts: torch.Tensor = _persistent(("groups_plus_one", "reqs"), torch.int64, "refresh", "refresh")
    page_table: torch.Tensor = _persistent(
        ("groups", "req_indices", "pages_per_req"), torch.int32, "refresh", "refresh"
    )
    page_spans: torch.Tensor = _persistent(("groups", "req_indices", 2), torch.int32, "refresh", "unpack", "refresh")
    penalty_seen: torch.Tensor = _persistent(("req_indices", "seen_words"), torch.int32, "record_tokens", "sampling")
    penalty_counts: torch.Tensor = _persistent(
        ("req_indices", "counted_tokens"), torch.int32, "record_tokens", "sampling"
    )
    token_history: torch.Tensor = _persistent(
        ("req_indices", "history"), torch.int32, "record_tokens", "record_tokens", "unpack", "write_outputs", initial=-1
    )
    drafts: torch.Tensor = _persistent(
        ("req_indices", "drafts"), torch.int32, "write_drafts", "unpack", "write_outputs", initial=-1
    )
    draft_logprobs: torch.Tensor = _persistent(
        ("req_indices", "drafts", "draft_tokens"), torch.float32, "store_draft_logprobs", "sampling"
    )
    draft_parents: torch.Tensor = _persistent(
        ("req_indices", "tree_drafts"), torch.int32, "write_drafts", "unpack", "write_tree"
    )
    counted_lens: torch.Tensor = _persistent(("req_indices",), torch.int32, "record_tokens", "record_tokens")
    bias_tokens: torch.Tensor = _persistent(("req_indices", 2, "bias_entries"), torch.int32, "host", "sampling")
    bias_values: torch.Tensor = _persistent(("req_indices", 2, "bias_entries"), torch.float32, "host", "sampling")
    bias_lists: torch.Tensor = _persistent(("req_indices", 3), torch.int32, "host", "sampling")
    mask_words: torch.Tensor = _persistent(("req_indices", "allowed_words"), torch.int32, "host", "sampling")
    block_table: torch.Tensor = _carried(
        ("groups", "reqs", "pages_per_req"), "attention",
        pad="null page; also after a request's pages, and before the first page that it sees",
    )  # fmt: skip
    table_from: torch.Tensor = _carried(("groups", "reqs"), "refresh", pad="2^30: the table holds no pages")
    table_to: torch.Tensor = _carried(("groups", "reqs"), "refresh", pad="0", initial=_ALL)

    input_ids: torch.Tensor = _derived(("tokens",), torch.int64, "model", "write_outputs", "follow_tree", pad="0")
    positions: torch.Tensor = _derived(
        ("tokens",), torch.int64, "model", "KV write", "write_tree", "localize_kv", pad="0"
    )
    slot_mapping: torch.Tensor = _derived(
        ("groups", "tokens"), torch.int64, "KV write", "localize_kv",
        pad="-1 for pad tokens and for tokens of invalid requests; missing drafts have slots if their pages are known",
    )  # fmt: skip
    query_start_loc: torch.Tensor = _derived(("reqs_plus_one",), torch.int32, "attention", pad="repeats the last value")
    seq_lens: torch.Tensor = _derived(
        ("reqs",), torch.int32, "attention", "localize_kv", pad="the backend's `seq_len_fill`"
    )
    buffer_rows: torch.Tensor = _derived(
        ("reqs",), torch.int32, "write_outputs", "write_logprobs", "host, for logits", pad="its own index"
    )
    decode_seq_lens: torch.Tensor = _derived(
        ("reqs",), torch.int32, "attention", pad="the backend's `seq_len_fill`; also for prefill requests"
    )
    prompt_seq_lens: torch.Tensor = _derived(
        ("reqs",), torch.int32, "attention", pad="the backend's `seq_len_fill`; also for decode requests"
    )
    decode_start_loc: torch.Tensor = _derived(
        ("reqs_plus_one",), torch.int32, "attention", pad="the end of the decode tokens; also for prefill requests"
    )
    prompt_start_loc: torch.Tensor = _derived(
        ("reqs_plus_one",),
        torch.int32,
        "attention",
        pad="as query_start_loc; the first prefill token for decode requests",
    )
    logits_indices: torch.Tensor = _derived(
        ("logits_rows",), torch.int64, "model", "record_tokens", "write_outputs", "write_tree", "follow_tree", pad="0"
    )
    sample_lens: torch.Tensor = _derived(("reqs",), torch.int32, "write_outputs", "record_tokens", "sampling", pad="0")
    drafts_left: torch.Tensor = _derived(
        ("reqs",), torch.int32, "write_outputs", "write_logprobs", "write_tree", "follow_tree", pad="-1"
    )
    req_indices: torch.Tensor = _derived(
        ("reqs",), torch.int32, "write_outputs", "write_drafts", "write_tree", "model", "sampling", pad="-1"
    )
    req_status: torch.Tensor = _derived(
        ("reqs",), torch.int32, "model", "sampling", pad="PAD (-1); INVALID (-2) after a fault"
    )
    tree_masks: torch.Tensor = _derived(
        ("tree_tokens",), torch.int64, "follow_tree", "attention", pad="its own bit", writer="write_tree"
    )
    kv_limits: torch.Tensor = _derived(
        ("interleaved_tokens",), torch.int32, "attention", pad="as at position 0", writer="localize_kv"
    )
    path_rows: torch.Tensor = _derived(
        ("path_rows",), torch.int64, "write_outputs", "move_path", pad="0", writer="follow_tree"
    )
    new_spans: torch.Tensor = _derived(("groups", "reqs", 4), torch.int32, "refresh", pad="no new pages")
    check_code: torch.Tensor = _derived(("groups", "reqs"), torch.int32, "refresh", pad="0")
    check_value: torch.Tensor = _derived(("groups", "reqs"), torch.int64, "refresh", pad="0")
    fault_code: torch.Tensor = _derived(("reqs",), torch.int32, "write_outputs", pad="0")
    fault_value: torch.Tensor = _derived(("reqs",), torch.int64, "write_outputs", pad="0")
    void_req_indices: torch.Tensor = _derived(
        ("reqs",), torch.int32, "write_outputs", pad="-1; the request index of a faulty request that starts in the step"
    )
    temperatures: torch.Tensor = _request_value(torch.float32, "sampling")
    seeds: torch.Tensor = _request_value(torch.int64, "sampling")
    encoder_lens: torch.Tensor = _request_value(torch.int32, "attention")
    top_ks: torch.Tensor = _request_value(torch.int32, "sampling")
    top_ps: torch.Tensor = _request_value(torch.float32, "sampling", pad=1)
    min_ps: torch.Tensor = _request_value(torch.float32, "sampling")
    repetition_penalties: torch.Tensor = _request_value(torch.float32, "record_tokens", "sampling", pad=1)
    presence_penalties: torch.Tensor = _request_value(torch.float32, "record_tokens", "sampling")
    frequency_penalties: torch.Tensor = _request_value(torch.float32, "record_tokens", "sampling")
    prompt_lens: torch.Tensor = _request_value(torch.int32, "record_tokens")
    token_masks: torch.Tensor = _request_value(torch.int32, "sampling", pad=-1)
    logprobs: torch.Tensor = _request_value(torch.int32, "token_logprobs", pad=-1)
    logprob_tokens: torch.Tensor = _request_value(torch.int32, "token_logprobs", "write_logprobs", pad=-1)

    step_ring: torch.Tensor = _output(("entries",), torch.int64, pad="the step that wrote the entry")
    token_ring: torch.Tensor = _output(("entries", "positions", "reqs"), torch.int32, pad="-1")
    finish_reason_ring: torch.Tensor = _output(("entries", "reqs"), torch.int32, pad="0", initial=0)
    fault_code_ring: torch.Tensor = _output(("entries", "reqs"), torch.int32, pad="0", initial=0)
    fault_value_ring: torch.Tensor = _output(
        ("entries", "reqs"), torch.int64, pad="unchanged: valid where code is not 0"
    )
    draft_count_ring: torch.Tensor = _output(
        ("entries", "reqs"), torch.int32, pad="0; unchanged in a runtime without drafts", initial=0
    )

    rank_ring: torch.Tensor = _output(
        ("entries", "positions", "reqs"),
        torch.int32,
        pad="0: no log-probabilities",
        initial=0,
        writer="write_logprobs",
    )
    logprob_ring: torch.Tensor = _output(
        ("entries", "positions", "reqs", "logprob_columns"), torch.float32,
        pad="unchanged: valid where rank is not 0", initial=0, writer="write_logprobs",
    )  # fmt: skip
    logprob_token_ring: torch.Tensor = _output(
        ("entries", "positions", "reqs", "logprob_columns"), torch.int32,
        pad="unchanged: valid where rank is not 0", initial=0, writer="write_logprobs",
    )  # fmt: skip

    @classmethod
    @functools.cache
    def specs(cls) -> dict[str, BufferSpec]:
        """Return the declaration of every buffer, by name."""
        return {f.name: f.metadata["spec"] for f in fields(cls)}

    @classmethod
    def shapes(cls, capacity: Capacity) -> dict[str, tuple[int, ...]]:
        """Return the shape of every buffer for `capacity`, by name."""
        return {
            name: tuple(getattr(capacity, extent) if isinstance(extent, str) else extent for extent in spec.shape)
            for name, spec in cls.specs().items()
        }

    @classmethod
    @torch.inference_mode(False)
    def allocate(cls, capacity: Capacity, device: torch.device) -> StaticBuffers:
        """Allocate all buffers for `capacity`, INPUT and OUTPUT buffers in host memory, all others on `device`.

        For a CUDA device, the host memory is pinned.
        Raises: CapacityError: if an allocation fails.
        """
        tensors, shapes = {}, cls.shapes(capacity)
        for name, spec in cls.specs().items():
            shape = shapes[name]
            on_host = spec.kind in ON_HOST
            try:
                tensors[name] = torch.full(
                    shape,
                    spec.initial,
                    dtype=spec.dtype,
                    device="cpu" if on_host else device,
                    pin_memory=on_host and device.type == "cuda",
                )
            except RuntimeError as error:
                where = "host memory" if on_host else f"the memory of {device}"
                raise CapacityError(
                    f"{name}: shape {list(shape)} does not fit into {where}; lower max_num_reqs, max_num_tokens or "
                    "max_seq_len"
                ) from error
        words = [group.words for group in capacity.page_groups]
        tensors["page_groups"].copy_(torch.tensor(words, dtype=torch.int32, device="cpu"))
        return cls(**tensors)

    def cut(self, padded_reqs: int, padded_tokens: int, positions: int = 1, tree_depth: int = 0) -> StaticBuffers:
        """Return the views for a graph of this size. DERIVED and CARRIED buffers are sliced, all others are whole.

        positions   tokens of a request with logits
        tree_depth  maximum accepted drafts of a request if drafts form trees, else 0
        """
        extents = {
            "reqs": padded_reqs, "reqs_plus_one": padded_reqs + 1, "tokens": padded_tokens,
            "logits_rows": padded_reqs * positions, "path_rows": padded_reqs * tree_depth,
            "tree_tokens": padded_tokens if tree_depth else 0, "interleaved_tokens": padded_tokens,
        }  # fmt: skip
        views = {}
        for name, spec in self.specs().items():
            views[name] = tensor = getattr(self, name)
            if spec.kind in PER_GRAPH:
                views[name] = tensor[tuple(slice(extents.get(str(extent))) for extent in spec.shape)]
        return StaticBuffers(**views)

    def once(self, compute: Callable[[StaticBuffers], _Result]) -> _Result:
        """Return `compute(self)`, cached after the first call. The tensors and their shapes never change."""
        if compute not in self._results:
            self._results[compute] = compute(self)
        result: _Result = self._results[compute]
        return result

    @functools.cached_property
    def _results(self) -> dict[Callable[[StaticBuffers], Any], Any]:
        return {}

    def named(self, *kinds: BufferKind) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and tensor of every buffer of the given kinds, or of all buffers if none are given."""
        for name, spec in self.specs().items():
            if not kinds or spec.kind in kinds:
                yield name, getattr(self, name)

    def reset(self) -> None:
        """Fill all buffers except CONSTANT ones with their initial values, for example after an aborted launch.

        The device must be idle.
        """
        for name, tensor in self.named():
            if self.specs()[name].kind is not BufferKind.CONSTANT:
                tensor.fill_(self.specs()[name].initial)

    def copy_request_state(self, source: int, target: int) -> None:
        """Copy the persistent state of request index `source` to request index `target`, on the current stream."""
        for _, tensor, dim in self._by_req_index():
            tensor.select(dim, target).copy_(tensor.select(dim, source))

    def clear_request_state(self, req_indices: torch.Tensor) -> None:
        """Reset the persistent state of `req_indices`, [n] int64, to the initial values, on the current stream.

        `mask_words` is not reset. Requests refer to masks by index, so a mask is not the state of one request.
        """
        for name, tensor, dim in self._by_req_index():
            if name != "mask_words" and tensor.numel():
                tensor.index_fill_(dim, req_indices, self.specs()[name].initial)

    def _by_req_index(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """Yield the name, tensor and request dimension of each persistent buffer indexed by req_index."""
        for name, tensor in self.named(BufferKind.PERSISTENT):
            if "req_indices" in (shape := self.specs()[name].shape):
                yield name, tensor, shape.index("req_indices")


COPIED = tuple(name for name, spec in StaticBuffers.specs().items() if spec.copied is not None)
"""Buffers that the refresh copies from the step inputs, in the order of the request fields."""

COPIED_PADS = tuple(spec.copied for spec in StaticBuffers.specs().values() if spec.copied is not None)
"""Pad value of each buffer in COPIED."""

COPIED_PAD_WORDS = tuple(
    struct.unpack("<i", struct.pack("<f" if StaticBuffers.specs()[name].dtype is torch.float32 else "<i", pad))[0]
    for name, pad in zip(COPIED, COPIED_PADS, strict=True)
)
"""The pad values as int32 words, as in the step inputs."""
