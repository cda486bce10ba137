"""The input of one step, and its packing into an entry of the input ring."""

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

from graphrt.batch_values import check_ranges, copied_values, host_array, needs_of, singular
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
"""Fields of the step inputs that contain a value of the batch unchanged."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a step, for callers that prefer objects to arrays; see `Batch.from_requests`.

    req_index    index of the persistent request state, 0 to max_num_reqs - 1; a request keeps it until it finishes
    tokens       the new tokens. [TOKEN_FROM_DEVICE] is the request's last sampled token; other tokens may follow it
    seq_len      KV tokens including `tokens`
    pages        page ids, in order; with several KV groups, one list per group. (): no pages in any group
    first_page   page index of `pages[0]` in the sequence; with several KV groups, one index per group
    sample       sample a token after the last of `tokens`; False for a prompt chunk that another chunk follows;
                 1 + d if the last d of `tokens` are drafts, see Batch

    Each other field is the request's value in the Batch field with the plural name.
    """

    req_index: int
    tokens: Sequence[int] | Int32Array
    seq_len: int
    pages: Sequence[int] | Int32Array | Sequence[Sequence[int] | Int32Array] = ()
    sample: int = True
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
    """The input of one step: n requests in any order, as host arrays. n may be 0, as in an idle rank's dummy step.

    req_indices   [n]       int32    index of each request's persistent state; all different
    seq_lens      [n]       int32    KV tokens including the new tokens of this step
    query_lens    [n]       int32    new tokens of each request, >= 1; default 1
    tokens        [sum]     int32    token ids; TOKEN_FROM_DEVICE, the default, is the request's last sampled token
    page_indptr   [n + 1]   int32    request i lists page_ids[page_indptr[i] : page_indptr[i + 1]]
    page_ids      [listed]  int32    page ids of all requests; default: no pages in any group
    first_pages   [n]       int32    page index, in the sequence, of each request's first listed page; default 0
    sample        [n]       int32    1: sample after the request's last token (default); 0: the prompt continues in a
                                     later step;
                                     1 + d: the last d tokens are drafts, which are accepted while they equal the
                                     sampled tokens
    temperatures  [n]       float32  default 0: greedy
    seeds         [n]       uint32   seeds of the requests' random numbers; default 0
    top_ks        [n]       int32    keep the k most likely tokens; default 0: all
    top_ps        [n]       float32  keep the most likely tokens with this total probability, in (0, 1]; default 1: all
    min_ps        [n]       float32  keep tokens with this share of the top probability, in [0, 1]; default 0: all
    repetition_penalties  [n]  float32  above 0: divides positive logits of tokens in the prompt or output, multiplies
                                     their other logits; default 1: off
    presence_penalties    [n]  float32  subtracted from the logits of tokens in the output; default 0: off
    frequency_penalties   [n]  float32  subtracted once per occurrence of the token in the output; default 0: off
    prompt_lens   [n]       int32    position where the output starts, for these two penalties; default 0: all tokens
    count as output
    token_masks   [n]       int32    number of a token mask that
                                     `ReplayManager.request_tables.set_token_masks` has set; default -1: none
    logprobs      [n]       int32    return log-probabilities of one token and of this many most likely tokens; see
                                     `StepHandle.logprobs()`; default -1: none
    logprob_tokens   [n]    int32    the token to include in `logprobs`, such as the next prompt token; default -1: the
                                     sampled token
    encoder_lens  [n]       int32    tokens that each request's encoder wrote for cross layers; default 0: no encoder

    **Page lists.** A list that starts at page 0 contains all pages of its request. If a list starts at a later page, or
    is empty, the request keeps the earlier pages of previous steps. So a running request lists only new pages, and a
    step without new pages has no lists: `Batch(req_indices=[0, 1], seq_lens=[5, 9])`. A request that starts a sequence
    (seq_len == query_len) drops the pages that its index had before.

    With G KV groups (see KVCacheSpec), each request has G lists, ordered by group. Then page_indptr is [G * n + 1], and
    first_pages [G * n]. A list of a windowed group may start at the first page inside the window; earlier pages are not
    read. If a running request lists from page 0 in a group that is not a cross group, it may be a new sequence with a
    cached prefix. It then drops its pages in all groups, and must list its pages in every group.

    A list of a cross group contains the pages that the request's encoder wrote. Requests may share these pages. A
    request has the same encoder_len in every step. A different value is a fault, unless the request lists from page 0
    or starts a sequence. With encoder_len 0 and no encoder pages, cross layers return zeros.

    **Penalties.** They apply to all tokens of the sequence, even if the request steps back to an earlier position. For
    a cached prefix, call `RequestTables.record_prefix` before the first step.

    Encoder-only models have no KV groups. Their batches list no pages, and each request is a whole sequence.

    Arguments may be any array-like host values. Arrays of these dtypes are not copied; lists are converted, at 13 ns
    per value. The device checks page ids, page counts, and that no two requests write the same KV slot.

    Raises: ShapeError: if an argument has the wrong type, rank, length or value. The message names the argument.
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
    _stated: tuple[str, ...] = field(init=False, compare=False)  # arguments that were passed

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
            raise ShapeError(f"batch.req_indices: expected at most {MAX_REQS} requests, got {n}; split the step")
        if query_lens is None:
            query_lens, num_tokens = _ones(n), n
        else:
            query_lens = _int32("query_lens", query_lens, n)
            num_tokens = int(query_lens.sum())
            if n and int(query_lens.min()) < 1:
                raise ShapeError(
                    f"batch.query_lens: expected >= 1 new token per request, got {int(query_lens.min())}; omit "
                    f"requests without new tokens"
                )
        if num_tokens > MAX_TOKENS:
            raise ShapeError(
                f"batch.query_lens: expected at most {MAX_TOKENS} tokens, got {num_tokens}; split the step"
            )
        tokens = np.full(num_tokens, TOKEN_FROM_DEVICE, np.int32) if tokens is None else _int32("tokens", tokens)
        if len(tokens) != num_tokens:
            raise ShapeError(
                f"batch.tokens: expected {num_tokens} tokens, the sum of query_lens, got {len(tokens)}; pass one token "
                "per new position"
            )
        page_ids, page_indptr = _int32("page_ids", page_ids), _int32("page_indptr", page_indptr)
        listed, lists = len(page_ids), len(page_indptr) - 1
        if lists < 0 or (lists % n if n else lists):
            raise ShapeError(
                f"batch.page_indptr: expected {n + 1} values, or G x {n} + 1 with G KV groups, got {lists + 1}; pass "
                "the prefix sum of the list lengths"
            )
        if page_indptr[0] != 0 or page_indptr[-1] != listed or bool((page_indptr[1:] < page_indptr[:-1]).any()):
            raise ShapeError(
                f"batch.page_indptr: expected non-decreasing values from 0 to len(page_ids)={listed}, got "
                f"{len(page_indptr)} values from {page_indptr[0]} to {page_indptr[-1]}; pass the prefix sum of the "
                "list lengths"
            )
        values = {name: copied_values(name, given[name], n) for name in COPIED}
        stated = {name: value for name, value in values.items() if given[name] is not None}
        if sample is None:
            sample = _ones(n)
        else:
            sample = stated["sample"] = _int32("sample", sample, n)
        check_ranges(stated)
        if "sample" in stated and (sample > query_lens).any():
            row = int((sample > query_lens).argmax())
            raise ShapeError(
                f"batch.sample: expected at most {query_lens[row]} for request {row}, the number of its new tokens, "
                f"got {sample[row]}; pass 1, or 1 + the number of drafts among its tokens"
            )
        arrays: dict[str, Any] = dict(
            values,
            req_indices=req_indices,
            seq_lens=_int32("seq_lens", seq_lens, n),
            query_lens=query_lens,
            tokens=tokens,
            page_indptr=page_indptr,
            page_ids=page_ids,
            first_pages=np.zeros(lists, np.int32) if first_pages is None else _not_negative(first_pages, lists),
            sample=sample,
            needs=needs_of(stated),
            _stated=(*stated, *(name for name in ("query_lens", "first_pages") if given[name] is not None)),
        )
        for name, value in arrays.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        """Return whether both batches have the same values."""
        if not isinstance(other, Batch):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.compare)

    __hash__ = None  # type: ignore[assignment]  # arrays are mutable

    @classmethod
    def from_requests(cls, requests: Sequence[Request]) -> Batch:
        """Return a batch of Request objects. Takes two microseconds more per request than a batch of arrays.

        Raises: ShapeError: if a field has a wrong value; the message names the request and the field.
        """
        if isinstance(requests, Request) or not isinstance(requests, Sequence):
            raise ShapeError(f"requests: expected a sequence of Request, got {type(requests).__name__}; pass a list")
        for index, request in enumerate(requests):
            if not isinstance(request, Request):
                raise ShapeError(
                    f"requests[{index}]: expected a Request, got {type(request).__name__}; pass Request(...)"
                )
        tokens = [_list(index, "tokens", r.tokens) for index, r in enumerate(requests)]
        pages, first_pages = _page_lists(requests)
        return cls(
            req_indices=[r.req_index for r in requests],
            seq_lens=[r.seq_len for r in requests],
            query_lens=[len(t) for t in tokens],
            tokens=_concatenate(tokens),
            page_indptr=np.cumsum([0, *(len(p) for p in pages)], dtype=np.int32),
            page_ids=_concatenate(pages),
            first_pages=first_pages,
            sample=[r.sample for r in requests],
            **{name: list(map(attrgetter(singular(name)), requests)) for name in COPIED},
        )

    @classmethod
    def empty(cls) -> Batch:
        """Return a batch without requests, for the step of an idle rank. It changes no request and no page."""
        return cls(req_indices=(), seq_lens=())

    @property
    def num_reqs(self) -> int:
        return len(self.req_indices)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_groups(self) -> int:
        """Number of KV groups in the page lists; 0 if no page is listed, which any runtime accepts."""
        return len(self.first_pages) // self.num_reqs if len(self.page_ids) else 0

    @property
    def asks_logprobs(self) -> bool:
        """Whether any request needs log-probabilities."""
        return bool(self.needs) and any(name == "max_logprobs" for name, _ in self.needs)

    def decode_query_len(self, most_drafts: int) -> int:
        """Return the query_len of the decode graphs that can run the batch: 1, or 1 + `most_drafts`; 0 if none can.

        Raises: UnsupportedError: if a request has too many drafts.
        """
        n = self.num_reqs
        drafts = int(self.sample.max()) - 1 if n and "sample" in self._stated else 0
        if self.num_tokens == n and drafts <= 0:
            return 1
        if drafts > most_drafts:
            raise UnsupportedError(
                f"batch.sample: expected at most {most_drafts} drafts per request, got {drafts}; build the runtime "
                f"with RuntimeConfig(num_speculative_tokens={drafts})"
            )
        return 1 + most_drafts if most_drafts and int(self.query_lens.max()) <= 1 + most_drafts else 0

    def check_needs(self, config: RuntimeConfig, vocab_size: int) -> None:
        """Check the batch against a config.

        Raises: UnsupportedError: if a request needs an option that the config does not enable; ShapeError: if a value
        of `logprob_tokens` is outside the vocabulary.
        """
        config.check_needs("batch", self.needs)
        if "logprob_tokens" in self._stated and len(over := np.flatnonzero(self.logprob_tokens >= vocab_size)):
            row = int(over[0])
            raise ShapeError(
                f"batch.logprob_tokens: expected token ids below vocab_size={vocab_size}, got "
                f"{self.logprob_tokens[row]} for request {row}; use -1 for the sampled token"
            )

    def check_capacity(
        self, max_seq_len: int, inputs_words: int, groups: int, max_encoder_len: int = 0, whole: bool = False
    ) -> None:
        """Check the batch against the capacity of a runtime. Takes microseconds.

        Raises: CapacityError: if a sequence or the page lists are too long; ShapeError: if the page lists are for a
        different number of KV groups, or with `whole`, if a request is not a whole sequence.
        """
        n, listed = len(self.req_indices), len(self.page_ids)
        if listed and len(self.page_indptr) != groups * n + 1:
            raise ShapeError(
                f"batch.page_indptr: expected lists of {groups} KV groups, {groups * self.num_reqs + 1} values, got "
                f"{len(self.page_indptr)}; pass a list per group and request, which may be empty"
            )
        row = int(self.seq_lens.argmax()) if n else 0  # five times as fast as `max`
        if n and self.seq_lens.item(row) > max_seq_len:
            raise CapacityError(
                f"batch.seq_lens: expected at most max_seq_len={max_seq_len}, got {self.seq_lens[row]} for request "
                f"{row}; finish that sequence, or build the runtime with a larger max_seq_len"
            )
        row = int(self.encoder_lens.argmax()) if n and "encoder_lens" in self._stated else 0
        if n and self.encoder_lens.item(row) > max_encoder_len:
            raise CapacityError(
                f"batch.encoder_lens: expected at most max_encoder_len={max_encoder_len}, got {self.encoder_lens[row]} "
                f"for request {row}; "
                + ("raise it" if max_encoder_len else "the model has no cross layers, so omit encoder_lens")
            )
        if whole and not np.array_equal(self.query_lens, self.seq_lens):
            row = int((self.query_lens != self.seq_lens).argmax())
            raise ShapeError(
                f"batch.query_lens: expected {self.seq_lens[row]} new tokens for request {row}, which is its "
                "seq_len, got "
                f"{self.query_lens[row]}; encoder layers see the tokens of one step, so pass whole sequences"
            )
        words = layout.inputs_size(n, len(self.tokens), listed, max(groups, 1))
        if words > inputs_words:
            raise CapacityError(
                f"batch.page_ids: expected at most {listed - (words - inputs_words)} listed pages in one step, got "
                f"{listed}; list only the pages that seq_lens needs"
            )

    def write_inputs(self, out: Int32Array, step: int, groups: int) -> int:
        """Pack the batch into `out`, for a runtime with `groups` KV groups. Return the number of words used.

        kernels/metadata/step_inputs.py defines the layout.
        """
        n, num_tokens, listed, groups = len(self.req_indices), len(self.tokens), len(self.page_ids), max(groups, 1)
        layout.write_header(out, step, n, num_tokens, listed)
        fields = layout.req_fields(groups)
        tokens_at = layout.HEADER_SIZE + fields * n
        pages_at, end = tokens_at + num_tokens, tokens_at + num_tokens + listed
        rows = out[layout.HEADER_SIZE : tokens_at].reshape(fields, n)
        rows[layout.REQ_INDEX], rows[layout.REQ_SEQ_LEN] = self.req_indices, self.seq_lens
        rows[layout.REQ_QUERY_START :] = _defaults(n, fields)  # one copy, since most steps pass few arguments
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
    """Return a read-only array of n ones, which all batches of n requests share."""
    ones = np.ones(n, np.int32)
    ones.setflags(write=False)
    return ones


@functools.lru_cache(maxsize=8)
def _defaults(n: int, fields: int) -> npt.NDArray[np.int32]:
    """Return the default fields of n requests, starting at REQ_QUERY_START, for one sampled token each and no pages."""
    rows = np.zeros((fields, n), np.int32)
    rows[layout.REQ_QUERY_START] = np.arange(n)
    rows[layout.REQ_QUERY_LEN] = rows[layout.REQ_SAMPLE] = 1
    rows[layout.REQ_COPIED : layout.REQ_PAGES] = _PAD_WORDS
    return rows[layout.REQ_QUERY_START :]


def _int32(name: str, values: Any, length: int | None = None) -> Int32Array:
    if type(values) is list or type(values) is tuple:
        # Twice as fast as NumPy, which determines a common type. For values that fail here, NumPy raises the error.
        with contextlib.suppress(TypeError, OverflowError):
            values = np.frombuffer(array("i", values), np.int32) if values else np.empty(0, np.int32)
    result: Int32Array = host_array(name, values, np.int32, length)
    return result


def _not_negative(values: Any, length: int) -> Int32Array:
    pages = _int32("first_pages", values, length)
    if length and pages.min() < 0:
        raise ShapeError(f"batch.first_pages: expected page indices >= 0, got {pages.min()}; pass 0 for the first page")
    return pages


def _page_lists(requests: Sequence[Request]) -> tuple[list[Sequence[int] | Int32Array], list[int]]:
    """Return the page lists of all requests, ordered by KV group, and the first page of each list."""
    given = [_list(index, "pages", request.pages) for index, request in enumerate(requests)]
    if not any(map(len, given)):
        return [], []
    grouped = [bool(len(pages)) and hasattr(pages[0], "__len__") for pages in given]
    if not any(grouped):
        return given, [request.first_page for request in requests]  # type: ignore[misc]  # checked as an array
    lists, first_pages = [], []
    groups = max(map(len, given))
    for group in range(groups):
        for index, (request, pages, ok) in enumerate(zip(requests, given, grouped, strict=True)):
            listed = isinstance(request.first_page, (Sequence, np.ndarray)) and getattr(
                request.first_page, "ndim", True
            )
            firsts: Any = request.first_page if listed else (request.first_page,) * groups
            nothing = not len(pages)  # in no group
            if not (nothing or (ok and len(pages) == groups)) or len(firsts) != groups:
                raise ShapeError(
                    f"requests[{index}].pages: expected {groups} lists of pages, because another request has {groups}, "
                    f"and one first page or {groups}, got {shown(request.pages)} and {shown(request.first_page)}; pass "
                    "a list per KV group"
                )
            lists.append(() if nothing else _list(index, "pages", pages[group]))
            first_pages.append(firsts[group])
    return lists, first_pages


def _list(index: int, name: str, values: Any) -> Any:
    """Return a request's tokens or pages. Raises ShapeError if the value is not a sequence or an array."""
    scalar = isinstance(values, np.ndarray) and values.ndim == 0
    if scalar or isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, np.ndarray)):
        got = "an array of one number" if scalar else type(values).__name__
        none = "pass [TOKEN_FROM_DEVICE] for the last token" if name == "tokens" else "pass () to list no page"
        raise ShapeError(f"requests[{index}].{name}: expected a list or array of ints, got {got}; {none}")
    return values


def _concatenate(lists: list[Sequence[int] | Int32Array]) -> npt.ArrayLike:
    """Concatenate all lists, using NumPy for arrays and a C loop for lists."""
    if lists and all(isinstance(values, np.ndarray) and values.ndim == 1 for values in lists):
        return np.concatenate(lists)
    joined = array("i")
    try:
        for values in lists:
            joined.fromlist(values if type(values) is list else list(values))
    except (TypeError, OverflowError):
        return [value for values in lists for value in values]  # the check of the result reports the bad value
    return np.frombuffer(joined, np.int32) if joined else np.empty(0, np.int32)
