"""The key of a captured graph, and the default capture sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from graphrt.kernels.checks import check_instance, check_int_field
from graphrt.kernels.errors import ConfigError


class GraphKind(str, Enum):
    """The kind of batch that a graph runs.

    DECODE   every request has `query_len` new tokens; if this is more than 1, the last of them may be missing
    MIXED    prefill chunks and decode tokens of any lengths, packed
    """

    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """Immutable key of a captured graph, which is its batch shape.

    padded_reqs     number of requests, including padding
    padded_tokens   number of tokens, including padding; padded_reqs * query_len in a decode graph
    query_len       new tokens per request in a decode graph; 0 in a mixed graph, where it varies
    """

    kind: GraphKind
    padded_reqs: int
    padded_tokens: int
    query_len: int = 1
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Compute the hash once, because every step looks up a descriptor and hashing four fields takes longer than a
        # launch. Hash only ints, because string hashes differ between processes and ranks exchange descriptors.
        check_instance("BatchDescriptor.kind", self.kind, GraphKind, advice="use BatchDescriptor.decode or mixed")
        for name, least in (("padded_reqs", 1), ("padded_tokens", 1), ("query_len", 0)):
            check_int_field(self, name, least, advice="use BatchDescriptor.decode or mixed")
        key = (self.kind is GraphKind.DECODE, self.padded_reqs, self.padded_tokens, self.query_len)
        object.__setattr__(self, "_hash", hash(key))
        if self.kind is GraphKind.DECODE and self.padded_tokens != self.padded_reqs * self.query_len:
            raise ConfigError(
                f"BatchDescriptor.padded_tokens: expected padded_reqs * query_len = "
                f"{self.padded_reqs * self.query_len} in a decode graph, got {self.padded_tokens}; "
                "use BatchDescriptor.decode"
            )

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def decode(cls, padded_reqs: int, query_len: int = 1) -> BatchDescriptor:
        """Return the key of the decode graph for `padded_reqs` requests of `query_len` new tokens each."""
        return cls(GraphKind.DECODE, padded_reqs, padded_reqs * query_len, query_len)

    @classmethod
    def mixed(cls, padded_tokens: int, padded_reqs: int) -> BatchDescriptor:
        """Return the key of the mixed graph for `padded_tokens` packed tokens of at most `padded_reqs` requests."""
        return cls(GraphKind.MIXED, padded_reqs, padded_tokens, 0)

    @property
    def size(self) -> int:
        """The number that selects the size in a config: requests for a decode graph, tokens for a mixed graph."""
        return self.padded_reqs if self.kind is GraphKind.DECODE else self.padded_tokens

    def __str__(self) -> str:
        if self.kind is GraphKind.MIXED:
            return f"mixed[{self.padded_tokens} tokens, {self.padded_reqs}]"
        return f"decode[{self.padded_reqs}" + (f" x {self.query_len}]" if self.query_len > 1 else "]")


def default_decode_sizes(max_num_reqs: int) -> tuple[int, ...]:
    """Return the default batch sizes of decode graphs: 1, 2, 4, multiples of 8 to 256, then of 16, and the maximum."""
    if max_num_reqs < 1:
        raise ConfigError(f"max_num_reqs: expected at least 1, got {max_num_reqs}; pass a larger number")
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_reqs + 1, 16)]
    return tuple(sorted({s for s in sizes if s <= max_num_reqs} | {max_num_reqs}))


def default_mixed_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Return the default token counts of mixed graphs: 64, 128, 256 and so on, and the maximum."""
    if max_num_tokens < 1:
        raise ConfigError(f"max_num_tokens: expected at least 1, got {max_num_tokens}; pass a larger number")
    sizes, size = [], 64
    while size < max_num_tokens:
        sizes.append(size)
        size *= 2
    return (*sizes, max_num_tokens)
