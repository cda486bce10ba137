"""What a serving stack hands over for one step, and how it is packed into the step record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt.kernels.errors import CapacityError, ShapeError
from graphrt.kernels.metadata import record as layout
from graphrt.kernels.types import TOKEN_FROM_ROW

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a step, for callers that prefer objects to arrays; see `Batch.from_rows`.

    row_id       persistent row state that it uses (0 to max_num_reqs - 1), its own as long as it lives
    tokens       the new tokens; TOKEN_FROM_ROW as the first means the token that this row sampled last
    seq_len      KV tokens including `tokens`
    pages        page ids, in order; enough for `seq_len`
    sample       whether a token is to be sampled after the last of `tokens` (False: a prompt chunk that goes on)
    temperature  0 is greedy
    seed         seed of this row's random numbers
    """

    row_id: int
    tokens: Sequence[int]
    seq_len: int
    pages: Sequence[int]
    sample: bool = True
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: n rows in any order, as host arrays.

    row_ids       [n]       int32    which persistent row state each row uses, all different
    seq_lens      [n]       int32    KV tokens including this step's
    query_lens    [n]       int32    new tokens of each row, >= 1
    tokens        [sum]     int32    literal token ids, or TOKEN_FROM_ROW (-1): the row's last sampled token
    page_indptr   [n + 1]   int32    row i owns page_ids[page_indptr[i] : page_indptr[i + 1]]
    page_ids      [listed]  int32    page ids, row after row
    sample        [n]       int32    1: sample after the row's last token; 0: the prompt goes on
    temperatures  [n]       float32  0 is greedy
    seeds         [n]       int64    low 32 bits are used
    """

    row_ids: Int32Array
    seq_lens: Int32Array
    query_lens: Int32Array
    tokens: Int32Array
    page_indptr: Int32Array
    page_ids: Int32Array
    sample: Int32Array
    temperatures: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls,
        *,
        row_ids: npt.ArrayLike,
        seq_lens: npt.ArrayLike,
        page_indptr: npt.ArrayLike,
        page_ids: npt.ArrayLike,
        query_lens: npt.ArrayLike | None = None,
        tokens: npt.ArrayLike | None = None,
        sample: npt.ArrayLike | None = None,
        temperatures: npt.ArrayLike | None = None,
        seeds: npt.ArrayLike | None = None,
    ) -> Batch:
        """A batch from anything array-like. Defaults: one new token per row, the row's last token, greedy.

        Raises ShapeError naming the argument whose type, rank or length is wrong.
        """
        ids = _array("row_ids", row_ids, np.int32)
        n = len(ids)
        ones = np.ones(n, np.int32)
        query = ones if query_lens is None else _array("query_lens", query_lens, np.int32, n)
        if tokens is None:
            given: Int32Array = np.full(int(query.sum()), TOKEN_FROM_ROW, np.int32)
        else:
            given = _array("tokens", tokens, np.int32)
        return cls(
            row_ids=ids,
            seq_lens=_array("seq_lens", seq_lens, np.int32, n),
            query_lens=query,
            tokens=given,
            page_indptr=_array("page_indptr", page_indptr, np.int32, n + 1),
            page_ids=_array("page_ids", page_ids, np.int32),
            sample=ones if sample is None else _array("sample", sample, np.int32, n),
            temperatures=np.zeros(n, np.float32)
            if temperatures is None
            else _array("temperatures", temperatures, np.float32, n),
            seeds=np.zeros(n, np.int64) if seeds is None else _array("seeds", seeds, np.int64, n),
        )

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> Batch:
        """A batch from row objects; the readable way, some microseconds per row slower than arrays."""
        return cls.of(
            row_ids=[r.row_id for r in rows],
            seq_lens=[r.seq_len for r in rows],
            query_lens=[len(r.tokens) for r in rows],
            tokens=[t for r in rows for t in r.tokens],
            page_indptr=np.cumsum([0, *(len(r.pages) for r in rows)]),
            page_ids=[p for r in rows for p in r.pages],
            sample=[int(r.sample) for r in rows],
            temperatures=[r.temperature for r in rows],
            seeds=[r.seed for r in rows],
        )

    @property
    def num_reqs(self) -> int:
        return len(self.row_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def is_uniform(self, query_len: int) -> bool:
        """Whether every row has exactly `query_len` new tokens."""
        return self.num_tokens == query_len * self.num_reqs and bool((self.query_lens == query_len).all())

    def check(self, max_seq_len: int, record_words: int) -> None:
        """Raise ShapeError or CapacityError for whatever the host can see to be wrong; costs a few microseconds.

        Page ids, page counts and duplicate slots are checked by the refresh kernel, on the device.
        """
        n = self.num_reqs
        if n == 0:
            raise ShapeError("batch: expected at least 1 request, got 0; skip the step when there is nothing to run")
        for name in ("seq_lens", "query_lens", "sample", "temperatures", "seeds"):
            if len(getattr(self, name)) != n:
                raise ShapeError(f"batch.{name}: expected {n} values, one per row id, got {len(getattr(self, name))}")
        if self.temperatures.dtype != np.float32:
            raise ShapeError(f"batch.temperatures: expected float32, got {self.temperatures.dtype}; use Batch.of")
        if int(self.query_lens.min()) < 1:
            raise ShapeError(f"batch.query_lens: expected >= 1 new token per row, got {int(self.query_lens.min())}")
        if int(self.query_lens.sum()) != self.num_tokens:
            raise ShapeError(
                f"batch.tokens: expected {int(self.query_lens.sum())} tokens, the sum of query_lens, "
                f"got {self.num_tokens}"
            )
        longest = int(self.seq_lens.max())
        if longest > max_seq_len:
            row = int(self.seq_lens.argmax())
            raise CapacityError(
                f"batch.seq_lens: expected at most max_seq_len={max_seq_len}, got {longest} in row {row}; end that "
                "sequence, or build the runtime with a larger max_seq_len"
            )
        listed, indptr = len(self.page_ids), self.page_indptr
        if len(indptr) != n + 1 or indptr[0] != 0 or indptr[-1] != listed or bool((indptr[1:] < indptr[:-1]).any()):
            raise ShapeError(
                f"batch.page_indptr: expected {n + 1} non-decreasing values from 0 to len(page_ids)={listed}, "
                f"got {len(indptr)} values from {indptr[:1].tolist()} to {indptr[-1:].tolist()}"
            )
        words = layout.record_size(n, self.num_tokens, listed)
        if words > record_words:
            raise CapacityError(
                f"batch.page_ids: expected at most {listed - (words - record_words)} pages listed in one step, "
                f"got {listed}; list only the pages that seq_lens need"
            )

    def write_record(self, out: Int32Array, step: int) -> int:
        """Pack the batch into `out` (see kernels/metadata/record.py) and return the number of words used."""
        n, tokens, listed = self.num_reqs, self.num_tokens, len(self.page_ids)
        out[layout.HEADER_STEP_LOW] = np.uint32(step & 0xFFFFFFFF).view(np.int32)
        out[layout.HEADER_STEP_HIGH] = step >> 32
        out[layout.HEADER_NUM_REQS] = n
        out[layout.HEADER_NUM_TOKENS] = tokens
        out[layout.HEADER_NUM_PAGES] = listed
        at = layout.HEADER_SIZE
        rows = out[at : at + layout.ROW_FIELDS * n].reshape(layout.ROW_FIELDS, n)
        rows[layout.ROW_ID] = self.row_ids
        rows[layout.ROW_SEQ_LEN] = self.seq_lens
        rows[layout.ROW_QUERY_LEN] = self.query_lens
        rows[layout.ROW_QUERY_START, 0] = 0
        np.cumsum(self.query_lens[:-1], out=rows[layout.ROW_QUERY_START, 1:])
        rows[layout.ROW_PAGE_START] = self.page_indptr[:-1]
        np.subtract(self.page_indptr[1:], self.page_indptr[:-1], out=rows[layout.ROW_PAGE_COUNT])
        rows[layout.ROW_SAMPLE] = self.sample
        rows[layout.ROW_TEMPERATURE] = self.temperatures.view(np.int32)
        rows[layout.ROW_SEED] = self.seeds.astype(np.int32)
        at += layout.ROW_FIELDS * n
        out[at : at + tokens] = self.tokens
        out[at + tokens : at + tokens + listed] = self.page_ids
        return at + tokens + listed


def _array(name: str, values: npt.ArrayLike, dtype: type, length: int | None = None) -> Any:
    device = getattr(values, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise ShapeError(f"batch.{name}: expected host values, got a tensor on {device}; batches live on the host")
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(dtype)
    allowed = "biuf" if np.issubdtype(dtype, np.floating) else "biu"
    if array.dtype.kind not in allowed:
        raise ShapeError(f"batch.{name}: expected {np.dtype(dtype).name} values, got {array.dtype}; convert them")
    if array.ndim != 1 or (length is not None and len(array) != length):
        want = "one dimension" if length is None else f"shape [{length}]"
        raise ShapeError(f"batch.{name}: expected {want}, got shape {list(array.shape)}")
    if array.dtype != dtype and array.size and np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        if array.min() < info.min or array.max() > info.max:
            raise ShapeError(f"batch.{name}: expected values that fit {np.dtype(dtype).name}, got {array.max()}")
    return np.ascontiguousarray(array, dtype=dtype)
