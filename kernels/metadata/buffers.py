"""The static buffers: every tensor, other than weights and KV, whose address a graph may hold.

Each buffer is declared once, below. Its shape gives the slices that a graph sees; its writer and readers give the
arguments of the operators `unpack`, `refresh` and `write_outputs`. docs/decode_step.md is made from the same
declarations,
and has the recipe for a new one.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, fields, make_dataclass
from enum import Enum
from typing import Any, TypeVar

import torch

from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.errors import CapacityError, ShapeError
from graphrt.kernels.op_declaration import Written


class BufferKind(str, Enum):
    """Who may change a buffer, and when.

    CONSTANT    written once, when the buffers are made
    INPUT       host memory that the graph reads: what is new, a slot per launch in flight
    PERSISTENT  survives replays: row state keyed by req_index, and counters
    DERIVED     rewritten by every refresh, for every captured row; may be poisoned between replays, once the host has
                the step's logits: in mixed steps of two parts these are put in order by `places`
    CARRIED     of the captured rows too, but too large for that: a refresh writes what differs from its last contents
    OUTPUT      host memory that the graph writes to, one entry per step in flight
    """

    CONSTANT = "constant"
    INPUT = "input"
    PERSISTENT = "persistent"
    DERIVED = "derived"
    CARRIED = "carried"
    OUTPUT = "output"


_Found = TypeVar("_Found")

_OF_ROWS = (BufferKind.DERIVED, BufferKind.CARRIED)
_ON_HOST = (BufferKind.INPUT, BufferKind.OUTPUT)

HEADER_SIZE = 8  # words that a slot of the input_ring, and the step record, begin with
HEADER_COPIES = 32  # of it in a slot: one for each program of `unpack`, see record.py
_SLOT_ALIGNMENT = 32  # words: slots begin at cache lines of the device

CURSOR_SLOT = 0  # slots of the input_ring that were used up
CURSOR_STEP = 1  # steps of the present slot that have run
CURSOR_NUM_REQS = 2  # of the present slot, once its first step has run: its rows, its steps, and its kind
CURSOR_STEPS = 3
CURSOR_KIND = 4
CURSOR_SIZE = 5
_ALL = 1 << 30
"""Above every column of a page table."""

STOP_TOKENS = 8
"""Tokens that end a row's sequence on the device, at most; the host looks for others."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Declaration of one static buffer.

    shape    names of Capacity attributes, or integers
    writer   who writes it: the host, or an operator
    readers  who reads it: operators by their names, and others
    pad      what the refresh writes for pad rows and pad tokens, in words
    initial  value that fills it at allocation
    copied   value that pad rows get, where the refresh copies the buffer from a row field of the step record that
             `Batch` has under the same name; None for all other buffers
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
    """What the refresh knows of one KV group: layers that share a page table.

    page_size   tokens per page
    num_pages   pages of its pool; groups of one pool share the page ids
    null_page   id of the pool's page that no sequence owns
    max_pages   columns of its table: pages of the longest sequence
    window      tokens that a query sees, itself included; 0: all
    chunk       a query sees its own chunk of so many tokens only; 0: all
    claims_at   where the claims of its pool begin
    max_encoder_len   most tokens of an encoder, in a group whose pages an encoder wrote: how many a row has is its
                      `encoder_len`, and steps write none. 0: a group of the rows' own tokens
    """

    page_size: int
    num_pages: int
    null_page: int
    max_pages: int
    window: int = 0
    chunk: int = 0
    claims_at: int = 0
    max_encoder_len: int = 0

    @property
    def words(self) -> tuple[int, ...]:
        """The fields in the order of the columns of `page_groups`."""
        return astuple(self)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The extents that static buffers are allocated for."""

    rows: int  # most requests in a step
    tokens: int  # most new tokens in a step
    req_indices: int  # persistent row states
    inputs: int  # int32 words in the largest step record
    ring: int  # launches in flight
    page_groups: tuple[PageGroup, ...]  # the KV groups, in order
    launch_steps: int = 1  # most steps of a launch
    counted_tokens: int = 0  # the vocabulary, where rows may have penalties
    masked_tokens: int = 0  # and where they may have token masks
    bias_entries: int = 0  # most tokens of a row whose logits have a bias
    logprob_columns: int = 0  # log-probabilities of a row and step: of a token, and of the best ones

    @property
    def input_ring(self) -> int:
        """Words of a slot: copies of its header, a record in full, and when its rows end."""
        words = (HEADER_COPIES - 1) * HEADER_SIZE + self.inputs + (1 + STOP_TOKENS) * self.rows
        return -(-words // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT

    @property
    def entries(self) -> int:
        """Steps in flight."""
        return self.ring * self.launch_steps

    @property
    def copied(self) -> int:
        return len(COPIED)

    @property
    def seen_words(self) -> int:
        """Words of a bit per counted token."""
        return -(-self.counted_tokens // 32)

    @property
    def allowed_words(self) -> int:
        """Words of a bit per token, in a mask."""
        return -(-self.masked_tokens // 32)

    @property
    def rows_plus_one(self) -> int:
        return self.rows + 1

    @property
    def groups(self) -> int:
        return len(self.page_groups)

    @property
    def groups_plus_one(self) -> int:
        return self.groups + 1

    @property
    def pages_per_row(self) -> int:
        """Width of the widest group's page table."""
        return max(group.max_pages for group in self.page_groups)

    @property
    def claims(self) -> int:
        """One claim per page of every pool, then one per row id."""
        return max(group.claims_at + group.num_pages for group in self.page_groups) + self.req_indices


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


def _derived(shape: tuple[str | int, ...], dtype: torch.dtype, *readers: str, pad: str) -> Any:
    return _declare(BufferSpec(shape, dtype, BufferKind.DERIVED, "refresh", readers, pad))


def _carried(shape: tuple[str | int, ...], *readers: str, pad: str, initial: int = 0) -> Any:
    return _declare(BufferSpec(shape, torch.int32, BufferKind.CARRIED, "refresh", readers, pad, initial))


def _row_value(dtype: torch.dtype, *readers: str, pad: int = 0) -> Any:
    """A value per row that the scheduler sends with each step: `Batch` has a field of the same name."""
    return _declare(BufferSpec(("rows",), dtype, BufferKind.DERIVED, "refresh", readers, str(pad), copied=pad))


def _output(
    shape: tuple[str | int, ...], dtype: torch.dtype, *, pad: str, initial: int = -1, writer: str = "write_outputs"
) -> Any:
    readers = ("host, by the step's handle",)
    return _declare(BufferSpec(shape, dtype, BufferKind.OUTPUT, writer, readers, pad, initial))


@dataclass(frozen=True)
class StaticBuffers:
    """All static tensors. Allocated once for the largest descriptor; a graph gets views by `cut`. Never reallocated."""

    page_groups: torch.Tensor = _constant(("groups", len(fields(PageGroup))), torch.int32, "unpack", "refresh")
    input_ring: torch.Tensor = _words(("ring", "input_ring"), BufferKind.INPUT, "host", "unpack", "write_outputs")
    inputs: torch.Tensor = _words(("inputs",), BufferKind.DERIVED, "unpack", "refresh", "write_outputs")

    cursor: torch.Tensor = _persistent((CURSOR_SIZE,), torch.int64, "write_outputs", "unpack", pad="see CURSOR_SLOT")
    order: torch.Tensor = _persistent(("rows",), torch.int32, "unpack", "unpack", initial=-1)
    req_lens: torch.Tensor = _persistent(("req_indices",), torch.int32, "write_outputs", "unpack")
    finish_reasons: torch.Tensor = _persistent(
        ("req_indices",), torch.int32, "write_outputs", "unpack", "write_outputs"
    )
    req_values: torch.Tensor = _persistent(("copied", "req_indices"), torch.int32, "unpack", "unpack")
    end_lengths: torch.Tensor = _persistent(("req_indices",), torch.int32, "unpack", "write_outputs")
    end_tokens: torch.Tensor = _persistent(
        (STOP_TOKENS, "req_indices"), torch.int32, "unpack", "write_outputs", initial=-1
    )
    go_on: torch.Tensor = _persistent((1,), torch.int32, "write_outputs", "loop", pad="one value")
    last_token: torch.Tensor = _persistent(("req_indices",), torch.int32, "write_outputs", "refresh", initial=-1)
    last_encoder_len: torch.Tensor = _persistent(("req_indices",), torch.int32, "refresh", "refresh")
    step_counter: torch.Tensor = _persistent(
        (1,), torch.int64, "refresh", "unpack", "write_outputs", pad="one value", initial=-1
    )
    claims: torch.Tensor = _persistent(("claims",), torch.int64, "refresh", "refresh")
    duplicates: torch.Tensor = _persistent(("groups_plus_one", "rows"), torch.int64, "refresh", "refresh")
    page_table: torch.Tensor = _persistent(
        ("groups", "req_indices", "pages_per_row"), torch.int32, "refresh", "refresh"
    )
    page_spans: torch.Tensor = _persistent(("groups", "req_indices", 2), torch.int32, "refresh", "unpack", "refresh")
    penalty_seen: torch.Tensor = _persistent(("req_indices", "seen_words"), torch.int32, "record_tokens", "sampling")
    penalty_counts: torch.Tensor = _persistent(
        ("req_indices", "counted_tokens"), torch.int32, "record_tokens", "sampling"
    )
    bias_tokens: torch.Tensor = _persistent(("req_indices", 2, "bias_entries"), torch.int32, "host", "sampling")
    bias_values: torch.Tensor = _persistent(("req_indices", 2, "bias_entries"), torch.float32, "host", "sampling")
    bias_lists: torch.Tensor = _persistent(("req_indices", 3), torch.int32, "host", "sampling")
    mask_words: torch.Tensor = _persistent(("req_indices", "allowed_words"), torch.int32, "host", "sampling")
    block_table: torch.Tensor = _carried(
        ("groups", "rows", "pages_per_row"), "attention",
        pad="null page; also beyond a row's pages, and before the first one that it sees",
    )  # fmt: skip
    table_from: torch.Tensor = _carried(("groups", "rows"), "refresh", pad="2^30: the table holds no pages")
    table_to: torch.Tensor = _carried(("groups", "rows"), "refresh", pad="0", initial=_ALL)

    input_ids: torch.Tensor = _derived(("tokens",), torch.int64, "model", pad="0")
    positions: torch.Tensor = _derived(("tokens",), torch.int64, "model", "KV write", pad="0")
    slot_mapping: torch.Tensor = _derived(
        ("groups", "tokens"), torch.int64, "KV write", pad="-1, from the real token count on; in invalid rows too"
    )
    query_start_loc: torch.Tensor = _derived(("rows_plus_one",), torch.int32, "attention", pad="repeats its last value")
    seq_lens: torch.Tensor = _derived(
        ("rows",), torch.int32, "write_outputs", "attention", "sampling", pad="the backend's fill"
    )
    places: torch.Tensor = _derived(("rows",), torch.int32, "write_outputs", "host, for logits", pad="its own index")
    decode_seq_lens: torch.Tensor = _derived(
        ("rows",), torch.int32, "attention", pad="the backend's fill; of rows of the prompt part too"
    )
    prompt_seq_lens: torch.Tensor = _derived(
        ("rows",), torch.int32, "attention", pad="the backend's fill; of rows of the decode part too"
    )
    decode_start_loc: torch.Tensor = _derived(
        ("rows_plus_one",), torch.int32, "attention", pad="the end of the decode part's tokens, from its last row on"
    )
    prompt_start_loc: torch.Tensor = _derived(
        ("rows_plus_one",),
        torch.int32,
        "attention",
        pad="as query_start_loc; before its first row its first token",
    )
    logits_indices: torch.Tensor = _derived(("rows",), torch.int64, "model", pad="0")
    req_indices: torch.Tensor = _derived(("rows",), torch.int32, "write_outputs", "model", "sampling", pad="-1")
    req_status: torch.Tensor = _derived(
        ("rows",), torch.int32, "write_outputs", "model", "sampling", pad="PAD (-1); INVALID (-2) after a fault"
    )
    new_spans: torch.Tensor = _derived(("groups", "rows", 4), torch.int32, "refresh", pad="no new pages")
    check_code: torch.Tensor = _derived(("groups", "rows"), torch.int32, "refresh", pad="0")
    check_value: torch.Tensor = _derived(("groups", "rows"), torch.int64, "refresh", pad="0")
    fault_code: torch.Tensor = _derived(("rows",), torch.int32, "write_outputs", pad="0")
    fault_value: torch.Tensor = _derived(("rows",), torch.int64, "write_outputs", pad="0")
    void_ids: torch.Tensor = _derived(
        ("rows",), torch.int32, "write_outputs", pad="-1; the row id of a faulty row whose sequence begins in this step"
    )
    temperatures: torch.Tensor = _row_value(torch.float32, "sampling")
    seeds: torch.Tensor = _row_value(torch.int64, "sampling")
    encoder_lens: torch.Tensor = _row_value(torch.int32, "attention")
    top_ks: torch.Tensor = _row_value(torch.int32, "sampling")
    top_ps: torch.Tensor = _row_value(torch.float32, "sampling", pad=1)
    min_ps: torch.Tensor = _row_value(torch.float32, "sampling")
    repetition_penalties: torch.Tensor = _row_value(torch.float32, "record_tokens", "sampling", pad=1)
    presence_penalties: torch.Tensor = _row_value(torch.float32, "record_tokens", "sampling")
    frequency_penalties: torch.Tensor = _row_value(torch.float32, "record_tokens", "sampling")
    prompt_lens: torch.Tensor = _row_value(torch.int32, "record_tokens")
    token_masks: torch.Tensor = _row_value(torch.int32, "sampling", pad=-1)
    logprobs: torch.Tensor = _row_value(torch.int32, "token_logprobs", pad=-1)
    logprob_tokens: torch.Tensor = _row_value(torch.int32, "token_logprobs", pad=-1)

    step_ring: torch.Tensor = _output(("entries",), torch.int64, pad="the step that wrote the entry")
    token_ring: torch.Tensor = _output(("entries", "rows"), torch.int32, pad="-1")
    end_ring: torch.Tensor = _output(("entries", "rows"), torch.int32, pad="0", initial=0)
    fault_code_ring: torch.Tensor = _output(("entries", "rows"), torch.int32, pad="0", initial=0)
    fault_value_ring: torch.Tensor = _output(("entries", "rows"), torch.int64, pad="kept: read where a code is not 0")

    rank_ring: torch.Tensor = _output(
        ("entries", "rows"), torch.int32, pad="0: no log-probabilities", initial=0, writer="write_logprobs"
    )
    logprob_ring: torch.Tensor = _output(
        ("entries", "rows", "logprob_columns"), torch.float32, pad="kept: read where a rank is not 0", initial=0,
        writer="write_logprobs",
    )  # fmt: skip
    logprob_token_ring: torch.Tensor = _output(
        ("entries", "rows", "logprob_columns"), torch.int32, pad="kept: read where a rank is not 0", initial=0,
        writer="write_logprobs",
    )  # fmt: skip

    @classmethod
    @functools.cache
    def specs(cls) -> dict[str, BufferSpec]:
        """Declaration of every buffer, by name."""
        return {f.name: f.metadata["spec"] for f in fields(cls)}

    @classmethod
    def shapes(cls, capacity: Capacity) -> dict[str, tuple[int, ...]]:
        """Shape of every buffer for `capacity`, by name."""
        return {
            name: tuple(getattr(capacity, extent) if isinstance(extent, str) else extent for extent in spec.shape)
            for name, spec in cls.specs().items()
        }

    @classmethod
    @torch.inference_mode(False)
    def allocate(cls, capacity: Capacity, device: torch.device) -> StaticBuffers:
        """All buffers for `capacity` on `device`; INPUT and OUTPUT ones in (pinned) host memory.

        Raises: CapacityError when one does not fit.
        """
        tensors, shapes = {}, cls.shapes(capacity)
        for name, spec in cls.specs().items():
            shape = shapes[name]
            on_host = spec.kind in _ON_HOST
            try:
                tensors[name] = torch.full(
                    shape,
                    spec.initial,
                    dtype=spec.dtype,
                    device="cpu" if on_host else device,
                    pin_memory=on_host and device.type == "cuda",
                )
            except RuntimeError as error:
                where = "the host" if on_host else device
                raise CapacityError(
                    f"{name}: expected a buffer that fits {where}, got shape {list(shape)}; lower max_num_reqs, "
                    "max_num_tokens or max_seq_len"
                ) from error
        words = [group.words for group in capacity.page_groups]
        tensors["page_groups"].copy_(torch.tensor(words, dtype=torch.int32, device="cpu"))
        return cls(**tensors)

    def cut(self, padded_reqs: int, padded_tokens: int) -> StaticBuffers:
        """Views for a graph of this size: derived buffers end at its rows and tokens, the others stay whole."""
        extents = {"rows": padded_reqs, "rows_plus_one": padded_reqs + 1, "tokens": padded_tokens}
        views = {}
        for name, spec in self.specs().items():
            views[name] = tensor = getattr(self, name)
            if spec.kind in _OF_ROWS:
                views[name] = tensor[tuple(slice(extents.get(str(extent))) for extent in spec.shape)]
        return StaticBuffers(**views)

    def once(self, find: Callable[[StaticBuffers], _Found]) -> _Found:
        """`find(self)`, called for the first step alone: which tensors these are, and their shapes, never change."""
        if find not in self._found:
            self._found[find] = find(self)
        found: _Found = self._found[find]
        return found

    @functools.cached_property
    def _found(self) -> dict[Callable[[StaticBuffers], Any], Any]:
        return {}

    def named(self, *kinds: BufferKind) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of every buffer of the given kinds, or of all."""
        for name, spec in self.specs().items():
            if not kinds or spec.kind in kinds:
                yield name, getattr(self, name)

    def reset(self) -> None:
        """Put every buffer back to its initial contents, as after an aborted launch. The device must be idle."""
        for name, tensor in self.named():
            if self.specs()[name].kind is not BufferKind.CONSTANT:
                tensor.fill_(self.specs()[name].initial)

    def copy_row(self, source: int, target: int) -> None:
        """Give one row id what another has, on the current stream: every persistent buffer that is kept by row id."""
        for _, tensor, dim in self._by_req_index():
            tensor.select(dim, target).copy_(tensor.select(dim, source))

    def clear_rows(self, ids: torch.Tensor) -> None:
        """Row ids, [n] int64, have their initial contents, on the current stream: every persistent buffer that is kept
        by row id, but for masks, which rows name by number."""
        for name, tensor, dim in self._by_req_index():
            if name != "mask_words" and tensor.numel():
                tensor.index_fill_(dim, ids, self.specs()[name].initial)

    def _by_req_index(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """Name, tensor and dimension of row ids of each persistent buffer that is kept by row id."""
        for name, tensor in self.named(BufferKind.PERSISTENT):
            if "req_indices" in (shape := self.specs()[name].shape):
                yield name, tensor, shape.index("req_indices")

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Copies of the persistent and carried buffers: what a step changes, and what the next step then reads."""
        kept = self.named(BufferKind.PERSISTENT, BufferKind.CARRIED)
        return {name: tensor.clone() for name, tensor in kept}

    def restore(self, snapshot: dict[str, torch.Tensor]) -> None:
        """Write a snapshot back, in place."""
        for name, tensor in snapshot.items():
            getattr(self, name).copy_(tensor)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, host memory included."""
        return sum(t.numel() * t.element_size() for _, t in self.named())


COPIED = tuple(name for name, spec in StaticBuffers.specs().items() if spec.copied is not None)
"""Buffers that the refresh copies from the step record, in the order of their row fields there."""

COPIED_PADS = tuple(spec.copied for spec in StaticBuffers.specs().values() if spec.copied is not None)
"""What pad rows hold in each of them."""

COPIED_PAD_WORDS = tuple(
    struct.unpack("<i", struct.pack("<f" if StaticBuffers.specs()[name].dtype is torch.float32 else "<i", pad))[0]
    for name, pad in zip(COPIED, COPIED_PADS, strict=True)
)
"""The same as words of a record."""


@functools.cache
def operands(operator: str) -> tuple[str, ...]:
    """Names of the buffers that an operator reads or writes, in the order of its arguments."""
    return tuple(n for n, spec in StaticBuffers.specs().items() if spec.writer == operator or operator in spec.readers)


def call_class(operator: str, **others: Any) -> type[Any]:
    """The dataclass of an operator's arguments, for DeclaredOp: its buffers, then `others`, types by name."""
    specs = StaticBuffers.specs()
    buffers = [(name, Written if specs[name].writer == operator else torch.Tensor) for name in operands(operator)]
    return make_dataclass(f"{operator.capitalize()}Call", [*buffers, *others.items()], frozen=True, slots=True)


def captured_size(buffers: StaticBuffers) -> tuple[int, int]:
    """Rows and tokens that static buffers are cut to. Raises: ShapeError when either cannot be told."""
    for name in ("req_indices", "input_ids"):
        check_tensor(name, getattr(buffers, name), shape=(None,))
    return buffers.req_indices.shape[0], buffers.input_ids.shape[0]


def pass_operands(operator: str, buffers: StaticBuffers) -> list[torch.Tensor]:
    """The buffers of an operator, cut to one size, as its arguments; checked against their declarations.

    Raises: ShapeError when a tensor does not fit the rows of `req_indices`, the tokens of `input_ids` and the groups of
    `page_groups`, or a ring has not as many entries as `step_ring`.
    """
    rows, tokens = captured_size(buffers)
    check_tensor("step_ring", buffers.step_ring, shape=(None,))
    check_tensor("page_groups", buffers.page_groups, shape=(None, len(fields(PageGroup))))
    groups, entries = buffers.page_groups.shape[0], buffers.step_ring.shape[0]
    everywhere = {"groups": groups, "groups_plus_one": groups + 1, "copied": len(COPIED)}
    extents = {**everywhere, "rows": rows, "rows_plus_one": rows + 1, "tokens": tokens}
    device, specs = buffers.req_indices.device, StaticBuffers.specs()
    for name in operands(operator):
        spec, tensor = specs[name], getattr(buffers, name)
        on_host = spec.kind in _ON_HOST
        known = extents if spec.kind in _OF_ROWS else {**everywhere, "entries": entries}
        shape = [s if isinstance(s, int) else known.get(s) for s in spec.shape]
        check_tensor(name, tensor, shape=tuple(shape), dtype=spec.dtype, device=None if on_host else device)
        check_unit_stride(name, tensor)
        least = rows if spec.shape[-1] == "rows" else 1
        if tensor.shape[-1] < least or tensor.shape[0] < 1:
            raise ShapeError(f"{name}: expected at least {least} columns, got shape {list(tensor.shape)}; enlarge it")
    return [getattr(buffers, name) for name in operands(operator)]
