"""What a serving stack hands over for one step, and how it is packed into a slot of the input_ring."""

from __future__ import annotations

import contextlib
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt.batch_values import check_ranges, copied_values, host_array, needs_of, of_row
from graphrt.config import Need, RuntimeConfig
from graphrt.kernels.checks import shown
from graphrt.kernels.errors import CapacityError, ShapeError, UnsupportedError
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.arguments import MAX_REQS, MAX_TOKENS
from graphrt.kernels.metadata.buffers import COPIED, COPIED_PAD_WORDS
from graphrt.kernels.types import TOKEN_FROM_DEVICE

Int32Array = npt.NDArray[np.int32]

_PAD_WORDS = np.array(COPIED_PAD_WORDS, np.int32)[:, None]
_FIELDS = {"sample": layout.REQ_SAMPLE} | {name: layout.REQ_COPIED + at for at, name in enumerate(COPIED)}
"""Of values that a record holds as they are: a field each."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence of a step, for callers that prefer objects to arrays; see `Batch.from_requests`.

    req_index       persistent row state that it uses (0 to max_num_reqs - 1), its own as long as it lives
    tokens       the new tokens; [TOKEN_FROM_DEVICE] is the token that this row sampled last, and others may follow it
    seq_len      KV tokens including `tokens`
    pages        page ids, in order; with several KV groups a list of them per group. () lists none in any group
    first_page   place in the sequence of the first of `pages`; with several KV groups one per group
    sample       whether a token is to be sampled after the last of `tokens` (False: a prompt chunk that goes on)
    temperature  0 is greedy
    seed         seed of this row's random numbers
    top_k, top_p, min_p  which tokens a draw may choose; 0, 1 and 0 are all
    repetition_penalty, presence_penalty, frequency_penalty, prompt_len  as Batch has them; 1, 0 and 0 are none
    token_mask   number of the mask that says which tokens are allowed; -1 is none
    logprobs, logprob_token   as Batch has them; -1 and -1 are none, and the sampled token
    encoder_len  tokens that the row's encoder wrote for cross layers, the same in each of its steps; 0: none
    """

    req_index: int
    tokens: Sequence[int] | Int32Array
    seq_len: int
    pages: Sequence[int] | Int32Array | Sequence[Sequence[int] | Int32Array] = ()
    sample: bool = True
    temperature: float = 0.0
    seed: int = 0
    first_page: int | Sequence[int] = 0
    encoder_len: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_len: int = 0
    token_mask: int = -1
    logprobs: int = -1
    logprob_token: int = -1


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Batch:
    """One step: n rows in any order, as host arrays. A batch without rows is legal: an idle rank's dummy step.

    req_indices       [n]       int32    which persistent row state each row uses, all different
    seq_lens      [n]       int32    KV tokens including this step's
    query_lens    [n]       int32    new tokens of each row, >= 1; by default 1
    tokens        [sum]     int32    literal token ids, or TOKEN_FROM_DEVICE, the row's last sampled token; by default
                  that
    page_indptr   [n + 1]   int32    row i lists page_ids[page_indptr[i] : page_indptr[i + 1]]
    page_ids      [listed]  int32    page ids, row after row. By default, of both, no row lists any, in any group
    first_pages   [n]       int32    place in the sequence of each row's first listed page; by default 0
    sample        [n]       int32    1: sample after the row's last token (the default); 0: the prompt goes on
    temperatures  [n]       float32  0 is greedy, the default
    seeds         [n]       uint32   seeds of the rows' random numbers; by default 0
    top_ks        [n]       int32    draws are among so many best tokens; 0 is all, the default
    top_ps        [n]       float32  among the fewest best that hold this probability, in (0, 1]; 1 is all, the default
    min_ps        [n]       float32  among those with this share of the best one's probability, in [0, 1]; 0 is all, the
                                     default
    repetition_penalties  [n]  float32  above 0: logits of tokens in prompt or output are divided by it where they are
                                     above 0, else multiplied; 1 is none, the default
    presence_penalties    [n]  float32  subtracted from logits of tokens in the output; 0 is none, the default
    frequency_penalties   [n]  float32  subtracted for each time that a token is in the output; 0 is none, the default
    prompt_lens   [n]       int32    tokens of each row from this position on are its output, which these two penalties
                                     count; by default 0: all tokens are output
    token_masks   [n]       int32    which mask says what tokens are allowed, of those that
                                     `ReplayManager.request_tables.set_token_masks` wrote; -1 is none, the default
    logprobs      [n]       int32    give log-probabilities of a token of the row, and of so many best ones, as
                                     `StepHandle.logprobs()`; -1 is none, the default
    logprob_tokens   [n]    int32    whose: of this token, as the next one of a prompt; -1 is the sampled one, the
                                     default
    encoder_lens  [n]       int32    tokens that each row's encoder wrote for cross layers; by default 0: no encoder

    A list from page 0 says all pages of its row. A list from a later page, or an empty one, keeps what the row's last
    steps listed before it: a row that goes on needs to list new pages only. A step without new pages needs no lists:
    `Batch(req_indices=[0, 1], seq_lens=[5, 9])`. A row id that begins a sequence (seq_len == query_len) forgets
    the pages that it had.

    With G KV groups (see KVCacheSpec) there are G lists per row, those of the first group first: page_indptr is
    [G * n + 1], first_pages [G * n]. A list of a windowed group may begin at the first page that the row sees; what
    stands before that page is not read. A row that goes on and lists from page 0, in a group of its own tokens, keeps
    nothing in any group: it may be another sequence, with a prefix that is in the cache. It lists its pages in every
    group then.

    A list of a cross group has the pages that the row's encoder wrote. Rows may list the same ones. A row states its
    encoder_len in every step, and it stays the same: another one is a fault, unless the row lists from page 0 or keeps
    nothing. With encoder_len 0, and no pages of an encoder, cross layers give zeros:

        step                    own pages    encoder's pages   encoder_len
        the sequence begins     [4]          [8, 9]            30
        it goes on              []           []                30            0 here is ENCODER_LEN_CHANGED
        a page is full          [5], from 1  []                30
        all lists once more     [4, 5]       [8, 9]            30            [] here is LENGTH_EXCEEDS_PAGES

    A row with a penalty states it in every step of its sequence, from the first token on: a step without it does not
    count its tokens. A sequence that begins with a prefix that is in the cache has the prefix entered before its first
    step, by `ReplayManager.request_tables.record_prefix`. Such rows need `RuntimeConfig(penalties=True)`.

    Logit biases, masks and the model's own values of a row stay on the device by row id: see `RequestTables`.

    A model of encoder layers alone has no KV groups: its batches list no pages, and each row is a whole sequence.

    What `query_lens` and `sample` are by default is shared by batches, and read-only.

    Anything array-like on the host is taken. Arrays of these dtypes are kept as they are, which costs microseconds;
    lists are converted, which costs 13 ns per value. Page ids, page counts and duplicate slots are checked by the
    refresh, on the device.

    Raises: ShapeError naming the argument whose type, rank, length or value is wrong.
    """

    req_indices: Int32Array
    seq_lens: Int32Array
    query_lens: Int32Array
    tokens: Int32Array
    page_indptr: Int32Array
    page_ids: Int32Array
    first_pages: Int32Array
    sample: Int32Array
    temperatures: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.uint32]
    encoder_lens: Int32Array
    top_ks: Int32Array
    top_ps: npt.NDArray[np.float32]
    min_ps: npt.NDArray[np.float32]
    repetition_penalties: npt.NDArray[np.float32]
    presence_penalties: npt.NDArray[np.float32]
    frequency_penalties: npt.NDArray[np.float32]
    prompt_lens: Int32Array
    token_masks: Int32Array
    logprobs: Int32Array
    logprob_tokens: Int32Array
    needs: tuple[Need, ...] = field(init=False)
    _stated: tuple[str, ...] = field(
        init=False, compare=False
    )  # which of the copied values, of query_lens, sample and first_pages the caller gave: others are the defaults

    def __init__(
        self,
        *,
        req_indices: npt.ArrayLike,
        seq_lens: npt.ArrayLike,
        page_indptr: npt.ArrayLike = (0,),
        page_ids: npt.ArrayLike = (),
        first_pages: npt.ArrayLike | None = None,
        query_lens: npt.ArrayLike | None = None,
        tokens: npt.ArrayLike | None = None,
        sample: npt.ArrayLike | None = None,
        temperatures: npt.ArrayLike | None = None,
        seeds: npt.ArrayLike | None = None,
        encoder_lens: npt.ArrayLike | None = None,
        top_ks: npt.ArrayLike | None = None,
        top_ps: npt.ArrayLike | None = None,
        min_ps: npt.ArrayLike | None = None,
        repetition_penalties: npt.ArrayLike | None = None,
        presence_penalties: npt.ArrayLike | None = None,
        frequency_penalties: npt.ArrayLike | None = None,
        prompt_lens: npt.ArrayLike | None = None,
        token_masks: npt.ArrayLike | None = None,
        logprobs: npt.ArrayLike | None = None,
        logprob_tokens: npt.ArrayLike | None = None,
    ) -> None:
        given = locals()
        req_indices = _int32("req_indices", req_indices)
        n = len(req_indices)
        if n > MAX_REQS:
            raise ShapeError(f"batch.req_indices: expected at most {MAX_REQS} rows, got {n}; split the step")
        if query_lens is None:
            query_lens, num_tokens = _ones(n), n
        else:
            query_lens = _int32("query_lens", query_lens, n)
            num_tokens = int(query_lens.sum())
            if n and int(query_lens.min()) < 1:
                raise ShapeError(f"batch.query_lens: expected >= 1 new token per row, got {int(query_lens.min())}")
        if num_tokens > MAX_TOKENS:
            raise ShapeError(
                f"batch.query_lens: expected at most {MAX_TOKENS} tokens, got {num_tokens}; split the step"
            )
        tokens = np.full(num_tokens, TOKEN_FROM_DEVICE, np.int32) if tokens is None else _int32("tokens", tokens)
        if len(tokens) != num_tokens:
            raise ShapeError(f"batch.tokens: expected {num_tokens} tokens, the sum of query_lens, got {len(tokens)}")
        page_ids, page_indptr = _int32("page_ids", page_ids), _int32("page_indptr", page_indptr)
        listed, lists = len(page_ids), len(page_indptr) - 1
        if lists < 0 or (lists % n if n else lists):
            raise ShapeError(
                f"batch.page_indptr: expected {n + 1} values, or G x {n} + 1 with G KV groups, got {lists + 1}"
            )
        if page_indptr[0] != 0 or page_indptr[-1] != listed or bool((page_indptr[1:] < page_indptr[:-1]).any()):
            raise ShapeError(
                f"batch.page_indptr: expected non-decreasing values from 0 to len(page_ids)={listed}, got "
                f"{len(page_indptr)} values from {page_indptr[0]} to {page_indptr[-1]}"
            )
        values = {name: copied_values(name, given[name], n) for name in COPIED}
        stated = {name: value for name, value in values.items() if given[name] is not None}
        check_ranges(stated)
        if n and encoder_lens is not None and values["encoder_lens"].min() < 0:
            raise ShapeError(
                f"batch.encoder_lens: expected lengths >= 0, got {values['encoder_lens'].min()}; 0 is none"
            )
        also = tuple(name for name in ("query_lens", "sample", "first_pages") if given[name] is not None)
        self._set(
            req_indices=req_indices,
            seq_lens=_int32("seq_lens", seq_lens, n),
            query_lens=query_lens,
            tokens=tokens,
            page_indptr=page_indptr,
            page_ids=page_ids,
            first_pages=np.zeros(lists, np.int32) if first_pages is None else _not_negative(first_pages, lists),
            sample=_ones(n) if sample is None else _flags("sample", sample, n),
            **values,
            needs=needs_of(stated),
            _stated=(*stated, *also),
        )

    def _set(self, **arrays: Any) -> None:
        for name, value in arrays.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        """Whether both batches describe the same step, value by value."""
        if not isinstance(other, Batch):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.compare)

    __hash__ = None  # type: ignore[assignment]  # arrays can change

    @classmethod
    def from_requests(cls, rows: Sequence[Request]) -> Batch:
        """A batch from row objects: the readable way, two microseconds per row slower than arrays.

        Raises: ShapeError naming the row and the field that is wrong.
        """
        if isinstance(rows, Request) or not isinstance(rows, Sequence):
            raise ShapeError(f"rows: expected a sequence of Request, got {type(rows).__name__}; pass [row]")
        for index, row in enumerate(rows):
            if not isinstance(row, Request):
                raise ShapeError(f"rows[{index}]: expected a Request, got {type(row).__name__}")
        tokens = [_list(rows, "tokens", r, r.tokens) for r in rows]
        pages, first_pages = _page_lists(rows)
        return cls(
            req_indices=[r.req_index for r in rows],
            seq_lens=[r.seq_len for r in rows],
            query_lens=[len(t) for t in tokens],
            tokens=_concatenate(tokens),
            page_indptr=np.cumsum([0, *(len(p) for p in pages)], dtype=np.int32),
            page_ids=_concatenate(pages),
            first_pages=first_pages,
            sample=[r.sample for r in rows],
            **{name: list(map(attrgetter(of_row(name)), rows)) for name in COPIED},
        )

    @classmethod
    def empty(cls) -> Batch:
        """A batch without rows: the step of an idle rank, which touches no row and no page."""
        return cls(req_indices=(), seq_lens=())

    @property
    def num_reqs(self) -> int:
        return len(self.req_indices)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_groups(self) -> int:
        """KV groups that the rows have lists of; 0 where none lists a page, which fits any runtime."""
        return len(self.first_pages) // self.num_reqs if len(self.page_ids) else 0

    @property
    def asks_logprobs(self) -> bool:
        """Whether any row asks for log-probabilities."""
        return bool(self.needs) and any(name == "max_logprobs" for name, _ in self.needs)

    def is_uniform(self, query_len: int) -> bool:
        """Whether every row has exactly `query_len` new tokens."""
        n = self.num_reqs
        if self.num_tokens != query_len * n:
            return False
        if n == 0 or "query_lens" not in self._stated:
            return True
        # None is longer, and so none is shorter.
        return bool(self.query_lens.item(self.query_lens.argmax()) == query_len)

    def mixed_error(self, query_len: int) -> UnsupportedError:
        """What a runtime without mixed batches raises for a batch that is not uniform."""
        return UnsupportedError(
            f"batch: expected {query_len} new tokens in every row, got {shown(self.query_lens.tolist())}; compute "
            "prompts elsewhere, or build the runtime with RuntimeConfig(mixed_batches=True)"
        )

    def check_needs(self, config: RuntimeConfig, vocab_size: int) -> None:
        """Raise UnsupportedError for rows that a config does not allow, ShapeError for `logprob_tokens` outside of the
        vocabulary."""
        config.check_needs("batch", self.needs)
        if "logprob_tokens" in self._stated and len(over := np.flatnonzero(self.logprob_tokens >= vocab_size)):
            row = int(over[0])
            raise ShapeError(
                f"batch.logprob_tokens: expected token ids below vocab_size={vocab_size}, got "
                f"{self.logprob_tokens[row]} in row {row}; -1 is the sampled token"
            )

    def check_capacity(
        self, max_seq_len: int, inputs_words: int, groups: int, max_encoder_len: int = 0, whole: bool = False
    ) -> None:
        """Raise CapacityError for sequences or page lists that a runtime has no room for, ShapeError for page lists of
        another number of KV groups, and with `whole` for a row that is not a whole sequence; costs microseconds."""
        n, listed = len(self.req_indices), len(self.page_ids)
        if listed and len(self.page_indptr) != groups * n + 1:
            raise ShapeError(
                f"batch.page_indptr: expected lists of {groups} KV groups, {groups * self.num_reqs + 1} values, got "
                f"{len(self.page_indptr)}; pass a list per group and row, an empty one where a row lists no page"
            )
        row = int(self.seq_lens.argmax()) if n else 0  # a fifth of the time that `max` takes
        if n and self.seq_lens.item(row) > max_seq_len:
            raise CapacityError(
                f"batch.seq_lens: expected at most max_seq_len={max_seq_len}, got {self.seq_lens[row]} in row {row}; "
                "end that sequence, or build the runtime with a larger max_seq_len"
            )
        row = int(self.encoder_lens.argmax()) if n and "encoder_lens" in self._stated else 0
        if n and self.encoder_lens.item(row) > max_encoder_len:
            raise CapacityError(
                f"batch.encoder_lens: expected at most max_encoder_len={max_encoder_len}, got {self.encoder_lens[row]} "
                f"in row {row}; {'raise it' if max_encoder_len else 'no layer reads what an encoder wrote, pass none'}"
            )
        if whole and not np.array_equal(self.query_lens, self.seq_lens):
            row = int((self.query_lens != self.seq_lens).argmax())
            raise ShapeError(
                f"batch.query_lens: expected {self.seq_lens[row]} new tokens in row {row}, its seq_len, got "
                f"{self.query_lens[row]}; encoder layers see the tokens of one step, so rows are whole sequences"
            )
        words = layout.inputs_size(n, len(self.tokens), listed, max(groups, 1))
        if words > inputs_words:
            raise CapacityError(
                f"batch.page_ids: expected at most {listed - (words - inputs_words)} pages listed in one step, "
                f"got {listed}; list only the pages that seq_lens need"
            )

    def write_inputs(self, out: Int32Array, step: int, groups: int) -> int:
        """Pack the batch in full into `out`, as a runtime of so many KV groups reads it (see
        kernels/metadata/step_inputs.py), and return the number of words used."""
        n, num_tokens, listed, groups = len(self.req_indices), len(self.tokens), len(self.page_ids), max(groups, 1)
        layout.write_header(out, step, n, num_tokens, listed)
        fields = layout.req_fields(groups)
        tokens_at = layout.HEADER_SIZE + fields * n
        pages_at, end = tokens_at + num_tokens, tokens_at + num_tokens + listed
        rows = out[layout.HEADER_SIZE : tokens_at].reshape(fields, n)
        rows[layout.REQ_INDEX], rows[layout.REQ_SEQ_LEN] = self.req_indices, self.seq_lens
        rows[layout.REQ_QUERY_START :] = _defaults(n, fields)  # one copy; a step states few of them
        for name in self._stated:
            if name in _FIELDS:
                rows[_FIELDS[name]] = getattr(self, name).view(np.int32)
            elif name == "query_lens":
                rows[layout.REQ_QUERY_LEN] = self.query_lens
                np.subtract(np.add.accumulate(self.query_lens), self.query_lens, out=rows[layout.REQ_QUERY_START])
        if listed:
            lists = rows[layout.REQ_PAGES :].reshape(groups, layout.PAGE_FIELDS, n)
            starts, ends = self.page_indptr[:-1].reshape(groups, n), self.page_indptr[1:].reshape(groups, n)
            lists[:, layout.PAGE_START] = starts
            np.subtract(ends, starts, out=lists[:, layout.PAGE_COUNT])
            if "first_pages" in self._stated:
                lists[:, layout.PAGE_FIRST] = self.first_pages.reshape(groups, n)
        out[tokens_at:pages_at], out[pages_at:end] = self.tokens, self.page_ids
        return end


@functools.lru_cache(maxsize=8)
def _ones(n: int) -> Int32Array:
    """For all batches of so many rows: none may write it."""
    ones = np.ones(n, np.int32)
    ones.setflags(write=False)
    return ones


@functools.lru_cache(maxsize=8)
def _defaults(n: int, fields: int) -> npt.NDArray[np.int32]:
    """Of n rows that state nothing, the fields from REQ_QUERY_START on: one token, which is sampled, and no pages."""
    rows = np.zeros((fields, n), np.int32)
    rows[layout.REQ_QUERY_START] = np.arange(n)
    rows[layout.REQ_QUERY_LEN] = rows[layout.REQ_SAMPLE] = 1
    rows[layout.REQ_COPIED : layout.REQ_PAGES] = _PAD_WORDS
    return rows[layout.REQ_QUERY_START :]


def _int32(name: str, values: Any, length: int | None = None) -> Int32Array:
    if type(values) is list or type(values) is tuple:
        # Twice as fast as NumPy, which looks at every value to find a type for all; other values go there to be named.
        with contextlib.suppress(TypeError, OverflowError):
            values = np.frombuffer(array("i", values), np.int32) if values else np.empty(0, np.int32)
    result: Int32Array = host_array(name, values, np.int32, length)
    return result


def _not_negative(values: Any, length: int) -> Int32Array:
    pages = _int32("first_pages", values, length)
    if length and pages.min() < 0:
        raise ShapeError(f"batch.first_pages: expected places >= 0, got {pages.min()}")
    return pages


def _flags(name: str, values: Any, length: int) -> Int32Array:
    flags = _int32(name, values, length)
    if length and not (flags.min() >= 0 and flags.max() <= 1):
        raise ShapeError(f"batch.{name}: expected 0 or 1 for each row, got {flags.min()} to {flags.max()}")
    return flags


def _page_lists(rows: Sequence[Request]) -> tuple[list[Sequence[int] | Int32Array], list[int]]:
    """The rows' lists of pages, those of the first KV group first, and the place of each list's first page."""
    given = [_list(rows, "pages", row, row.pages) for row in rows]
    if not any(map(len, given)):
        return [], []
    grouped = [bool(len(pages)) and hasattr(pages[0], "__len__") for pages in given]
    if not any(grouped):
        return given, [row.first_page for row in rows]  # type: ignore[misc]  # checked with the others, as an array
    lists, first_pages = [], []
    groups = max(map(len, given))
    for group in range(groups):
        for row, pages, ok in zip(rows, given, grouped, strict=True):
            listed = isinstance(row.first_page, (Sequence, np.ndarray)) and getattr(row.first_page, "ndim", True)
            firsts: Any = row.first_page if listed else (row.first_page,) * groups
            nothing = not len(pages)  # in no group
            if not (nothing or (ok and len(pages) == groups)) or len(firsts) != groups:
                raise ShapeError(
                    f"rows: expected {groups} lists of pages in each row, and as many first pages or one, as one row "
                    f"has, got {shown(row.pages)} and {shown(row.first_page)}; pass a list per KV group"
                )
            lists.append(() if nothing else _list(rows, "pages", row, pages[group]))
            first_pages.append(firsts[group])
    return lists, first_pages


def _list(rows: Sequence[Request], name: str, row: Request, values: Any) -> Any:
    """A row's tokens or pages, something with a length that can be joined to the other rows'."""
    scalar = isinstance(values, np.ndarray) and values.ndim == 0
    if scalar or isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, np.ndarray)):
        at = next(i for i, r in enumerate(rows) if r is row)
        got = "an array of one number" if scalar else type(values).__name__
        none = "for the row's last token [TOKEN_FROM_DEVICE]" if name == "tokens" else "() lists no page"
        raise ShapeError(f"rows[{at}].{name}: expected a list or array of ints, got {got}; pass ints, {none}")
    return values


def _concatenate(lists: list[Sequence[int] | Int32Array]) -> npt.ArrayLike:
    """All lists as one: arrays by NumPy, lists in a loop of C."""
    if lists and all(isinstance(values, np.ndarray) and values.ndim == 1 for values in lists):
        return np.concatenate(lists)
    joined = array("i")
    try:
        for values in lists:
            joined.fromlist(values if type(values) is list else list(values))
    except (TypeError, OverflowError):
        return [value for values in lists for value in values]  # to be named by the check of the whole
    return np.frombuffer(joined, np.int32) if joined else np.empty(0, np.int32)
