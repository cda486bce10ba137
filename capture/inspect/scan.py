"""Find words in a graph's kernel arguments that may be addresses, at every byte offset of all arguments at once.

Structs passed by value have pointers at any offset, even at unaligned offsets. The scan therefore reads each argument
as eight overlapping sequences of little-endian words. If the pointers of an argument are known, it uses only those.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from graphrt.capture.inspect.view import Argument, GraphView, Node, Place

WORD = 8
"""Bytes per address."""

LOWEST, HIGHEST = 1 << 32, (1 << 48) - 1
"""Range of device addresses. Most words are small integers, floats and strides."""


@dataclass(frozen=True, slots=True)
class ArgumentRef:
    """An argument of a kernel: place of the node, the node, and index of the argument."""

    place: Place
    node: Node
    index: int

    @property
    def argument(self) -> Argument:
        return self.node.arguments[self.index]


@dataclass(frozen=True, slots=True)
class Words:
    """Words that may be addresses, as parallel arrays in the order of the arguments.

    nodes      nodes with arguments, and their places
    firsts     [nodes]  index of each node's first argument among all arguments
    starts     start of each argument in `data`, and the end of the last argument
    data       bytes of all arguments, then WORD zeros
    at         [n]  position of a word in `data`
    value      [n]  the word
    exact      [n]  whether the word is certainly an address
    aligned    [n]  whether the word is at a multiple of WORD in a kernel's arguments, where compilers place addresses
    looked_at  number of checked words, including words outside the address range
    """

    nodes: tuple[tuple[Place, Node], ...]
    firsts: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    data: npt.NDArray[np.uint8]
    at: npt.NDArray[np.int64]
    value: npt.NDArray[np.uint64]
    exact: npt.NDArray[np.bool_]
    aligned: npt.NDArray[np.bool_]
    looked_at: int

    def argument_at(self, at: int) -> tuple[ArgumentRef, int]:
        """Return the argument that contains a byte of `data`, and the byte's offset in it."""
        index = int(np.searchsorted(self.starts, at, side="right")) - 1
        of = int(np.searchsorted(self.firsts, index, side="right")) - 1
        place, node = self.nodes[of]
        return ArgumentRef(place, node, index - int(self.firsts[of])), int(at - self.starts[index])

    def only(self, kept: npt.NDArray[np.bool_]) -> Words:
        """Return the words for which `kept` [n] is True."""
        return replace(
            self, at=self.at[kept], value=self.value[kept], exact=self.exact[kept], aligned=self.aligned[kept]
        )

    def values_at(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return the words at positions [n] of `data`."""
        return _values_at(self.data, at)


def scan(view: GraphView) -> Words:
    """Return the words in all kernel arguments of a graph, including bodies."""
    nodes = tuple((place, node) for place, node in view.walk() if node.arguments)
    firsts = np.array([0, *itertools.accumulate(len(node.arguments) for _, node in nodes)], np.int64)[:-1]
    arguments = [argument for _, node in nodes for argument in node.arguments]
    starts = np.array([0, *itertools.accumulate(len(argument.data) for argument in arguments)], np.int64)
    data = np.frombuffer(b"".join(argument.data for argument in arguments) + bytes(WORD), np.uint8)
    # The last entry keeps indexing valid for an empty graph.
    offsets = np.array([*(argument.offset for argument in arguments), 0], np.int64)
    scanned = np.array([*(argument.pointers is None for argument in arguments), False], np.bool_)

    at, value = _candidates(data)
    of = np.searchsorted(starts, at, side="right") - 1
    within = scanned[of] & (at + WORD <= np.append(starts[1:], 0)[of])
    at, value = at[within], value[within]
    told = np.array(list(_told(arguments, starts.tolist())), np.int64)
    exact = np.arange(len(at) + len(told)) >= len(at)
    at, value = np.concatenate((at, told)), np.concatenate((value, _values_at(data, told)))

    order = np.argsort(at, kind="stable")
    at, value, exact = at[order], value[order], exact[order]
    of = np.searchsorted(starts, at, side="right") - 1
    aligned = (at - starts[of] + offsets[of]) % WORD == 0
    looked_at = int(np.maximum(np.diff(starts)[scanned[:-1]] - (WORD - 1), 0).sum()) + len(told)
    return Words(nodes, firsts, starts, data, at, value, exact, aligned, looked_at)


def _told(arguments: list[Argument], starts: list[int]) -> Iterator[int]:
    """Yield the positions of known pointers."""
    for argument, start in zip(arguments, starts, strict=False):
        for offset in argument.pointers or ():
            if 0 <= offset <= len(argument.data) - WORD:
                yield start + offset


def _candidates(data: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Return the positions and values of all words from LOWEST to HIGHEST in `data`, by offset within a word."""
    places, values = [], []
    for first in range(WORD):
        words = np.frombuffer(data, "<u8", (len(data) - first) // WORD, first)
        # One comparison is enough, because a negative difference wraps around to a large value.
        found = np.flatnonzero(words - np.uint64(LOWEST) <= np.uint64(HIGHEST - LOWEST))
        places.append(found * WORD + first)
        values.append(words[found])
    return np.concatenate(places).astype(np.int64, copy=False), np.concatenate(values).astype(np.uint64, copy=False)


def _values_at(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    rows: npt.NDArray[np.uint8] = data[at[:, None] + np.arange(WORD)]
    return rows.view("<u8").reshape(-1).astype(np.uint64, copy=False)
