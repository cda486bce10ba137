"""Map a batch to the graph that runs it. The dispatcher owns the capture sizes; a lookup is O(1)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.kernels.errors import CapacityError, ConfigError

NOT_CAPTURED = "its graph is captured at its first use"
"""`why_eager` of a size that `RuntimeConfig.lazy_capture` has not captured yet."""

NO_GRAPHS = "graphs are switched off (use_graphs=False)"
TOO_LARGE = "no {} graph for "
"""The start of `why_eager` of batches above the largest size of a kind of graph."""


@dataclass(slots=True)
class Dispatch:
    """The size to which a batch is padded; all batches of one size share the object.

    why_eager   empty if a graph of this size is captured, else the reason why not. A late capture replaces NOT_CAPTURED
    """

    descriptor: BatchDescriptor
    why_eager: str


class Dispatcher:
    """Choose a capture size per batch. A batch over capacity raises an error; a batch without a graph runs eagerly.

    decode_sizes, mixed_sizes   sorted sizes to capture, up to the maxima; may be empty
    graph_unsupported_reason    returns why the backend cannot capture a descriptor, or None
    lazy                        capture only the largest size of each kind before the first step
    """

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        query_lens: Sequence[int],
        decode_sizes: Sequence[int],
        mixed_sizes: Sequence[int],
        graph_unsupported_reason: Callable[[BatchDescriptor], str | None],
        use_graphs: bool,
        lazy: bool = False,
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        self._use_graphs, self._lazy = use_graphs, lazy
        self._graph_unsupported_reason = graph_unsupported_reason
        self._decode = {
            query_len: self._table(
                decode_sizes, max_num_reqs, partial(BatchDescriptor.decode, query_len=query_len), "decode", "requests"
            )
            for query_len in query_lens
        }
        self._mixed = self._table(
            mixed_sizes,
            max_num_tokens,
            lambda n: BatchDescriptor.mixed(n, min(n, max_num_reqs)),
            "mixed",
            "tokens",
        )

    def check_room(self, num_reqs: int, num_tokens: int) -> None:
        """Raise CapacityError if a batch exceeds max_num_reqs or max_num_tokens."""
        if num_reqs > self.max_num_reqs or num_tokens > self.max_num_tokens:
            raise CapacityError(
                f"batch: expected at most {self.max_num_reqs} requests and {self.max_num_tokens} tokens, got "
                f"{num_reqs} requests and {num_tokens} tokens; split it, or raise max_num_reqs / max_num_tokens"
            )

    def dispatch(self, num_reqs: int, num_tokens: int, query_len: int) -> Dispatch:
        """Return the smallest size with room for a batch.

        query_len   the decode graphs that can run the batch, one of `query_lens`; 0: only mixed graphs can

        Raises: see check_room().
        """
        if num_reqs > self.max_num_reqs or num_tokens > self.max_num_tokens:
            self.check_room(num_reqs, num_tokens)
        # An empty batch is padded to the smallest decode size.
        return self._decode[query_len][num_reqs - 1 if num_reqs else 0] if query_len else self._mixed[num_tokens - 1]

    def at(self, descriptor: BatchDescriptor, num_reqs: int, num_tokens: int, query_len: int) -> Dispatch:
        """Return the dispatch of `descriptor` for a batch, even if a smaller size has room.

        Raises:
            ConfigError: if the runtime never pads to `descriptor`.
            CapacityError: if the batch does not fit `descriptor`.
        """
        is_decode = descriptor.kind is GraphKind.DECODE
        table = self._decode.get(descriptor.query_len, []) if is_decode else self._mixed
        size = descriptor.size
        if size > len(table) or table[size - 1].descriptor != descriptor:
            raise ConfigError(
                f"descriptor: {descriptor} is not a size that this runtime pads to; choose one of `descriptors`"
            )
        fits = num_reqs <= descriptor.padded_reqs and num_tokens <= descriptor.padded_tokens
        if not fits or (is_decode and not 0 < query_len <= descriptor.query_len):
            raise CapacityError(
                f"descriptor: {descriptor} does not fit {num_reqs} requests and {num_tokens} tokens"
                f"{'' if query_len else ' of unequal query lengths'}; choose a larger or a mixed size"
            )
        return table[size - 1]

    def captured(self, *, late: bool = False) -> tuple[BatchDescriptor, ...]:
        """Return the sizes that have a graph, or get one in `capture()`: mixed before decode, and largest first, so
        that graphs reuse memory.

        late   add the sizes that are captured at their first use
        """
        reasons = ("", NOT_CAPTURED) if late else ("",)
        decode = [
            size for query_len in sorted(self._decode, reverse=True) for size in reversed(self._decode[query_len])
        ]
        sizes = (*reversed(self._mixed), *decode)
        return tuple({d.descriptor: None for d in sizes if d.why_eager in reasons})

    def _table(
        self,
        sizes: Sequence[int],
        maximum: int,
        make: Callable[[int], BatchDescriptor],
        kind: str,
        unit: str,
    ) -> list[Dispatch]:
        """Return one entry per batch size; entry n - 1 is for size n."""
        table, shared = [], dict[BatchDescriptor, Dispatch]()
        for n in range(1, maximum + 1):
            index = bisect_left(sizes, n)
            padded = sizes[index] if index < len(sizes) else n
            descriptor = make(padded)
            why = ""
            if not self._use_graphs:
                why = NO_GRAPHS
            elif index == len(sizes):
                largest = sizes[-1] if sizes else 0
                why = f"{TOO_LARGE.format(kind)}{n} {unit}; the largest captured size is {largest}"
            elif (reason := self._graph_unsupported_reason(descriptor)) is not None:
                why = reason
            table.append(shared.setdefault(descriptor, Dispatch(descriptor, why)))
        if self._lazy:
            for dispatch in [of_size for of_size in shared.values() if not of_size.why_eager][:-1]:
                dispatch.why_eager = NOT_CAPTURED
        return table
