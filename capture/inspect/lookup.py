"""Who holds each address of a graph: the memory map, what the graph allocates itself, then the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from graphrt.capture.inspect.ask import Driver
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.scan import WORD, Words, scan
from graphrt.capture.inspect.torch_kernels import no_addresses
from graphrt.capture.inspect.view import GraphView, NodeKind, Operand


class Lookup:
    """A graph with the region of each word of its arguments that may be an address.

    view     the graph
    memory   the map
    words    of its kernels' arguments, but for those where PyTorch's own kernels have no address
    regions  those of the map, those that the graph allocates, those that the driver told
    holder   [n] int64: for each word the index in `regions`, -1 where nobody knows the address

    The driver is asked about no word that is misaligned: numbers side by side make up many of those.
    """

    def __init__(self, view: GraphView, memory: MemoryMap, driver: Driver) -> None:
        self.view, self.memory, self._driver = view, memory, driver
        self.words: Words = scan(view)
        self._made = MemoryMap(
            Region("allocation of the graph", Owner.POOL, operand.address, operand.nbytes)
            for _, node in view.walk()
            for operand in node.operands
            if node.kind is NodeKind.ALLOC
        )
        self._asked: dict[int, Region | None] = {}
        self.holder = memory.find_many(self.words.value)
        self.regions: list[Region] = list(memory.regions)
        self._look_further(self._made)
        self._leave_out_numbers()
        unknown = (self.holder < 0) & (self.words.aligned | self.words.exact)
        self._look_further(MemoryMap(self._ask_all(np.unique(self.words.value[unknown]))))

    def find(self, address: int) -> Region | None:
        """The region that holds an address, for all that is known."""
        return self.memory.find(address) or self._made.find(address) or self._ask(address)

    def stretches(self, operand: Operand) -> Iterator[tuple[int, Region | None]]:
        """The bytes of an operand, cut where another region begins to hold them: first address, and region."""
        end = operand.address + operand.nbytes
        for start, region in self.memory.stretches(operand.address, operand.nbytes):
            if region is not None:
                yield start, region
                continue
            # A gap of the map: one region that is known otherwise may hold all of it, or only its beginning.
            stop = next((at for at, held in self.memory.stretches(start, end - start) if held is not None), end)
            while start < stop:
                known = self._made.find(start) or self._ask(start)
                yield start, known
                start = max(known.end, start + 1) if known is not None else stop

    def count(self, owners: Counter[Owner]) -> None:
        """Add the words by owner; those that nobody knows are numbers."""
        counts = np.bincount(self.holder[self.holder >= 0], minlength=len(self.regions))
        for index in np.flatnonzero(counts).tolist():
            owners[self.regions[index].owner] += int(counts[index])

    def _leave_out_numbers(self) -> None:
        """Drop the words that stand where a kernel of PyTorch has no address."""
        words, kept = self.words, np.ones(len(self.holder), np.bool_)
        for number, (_, node) in enumerate(words.nodes):
            starts = words.starts[words.firsts[number] :]
            for index, first, end in no_addresses(node, partial(self._is_known, starts)):
                low, high = np.searchsorted(words.at, (starts[index] + first - WORD + 1, starts[index] + end))
                kept[low:high] = False  # those that reach into the stretch too
        if not kept.all():
            self.words, self.holder = words.only(kept), self.holder[kept]

    def _is_known(self, starts: npt.NDArray[np.int64], index: int, offset: int) -> bool:
        """Whether a word at an offset in an argument is an address of known memory. `starts`: of the arguments."""
        at = int(np.searchsorted(self.words.at, starts[index] + offset))
        return at < len(self.words.at) and self.words.at[at] == starts[index] + offset and bool(self.holder[at] >= 0)

    def _look_further(self, memory: MemoryMap) -> None:
        """Look up the words that nobody knew so far."""
        unknown = np.flatnonzero(self.holder < 0)
        found = memory.find_many(self.words.value[unknown])
        self.holder[unknown] = np.where(found >= 0, found + len(self.regions), -1)
        self.regions += memory.regions

    def _ask_all(self, addresses: npt.NDArray[np.uint64]) -> Iterator[Region]:
        """What the driver knows of ascending addresses: each range once."""
        last: Region | None = None
        for address in addresses.tolist():
            if last is None or address >= last.end:
                known = self._ask(address)
                if known is not None:
                    last = known
                    yield known

    def _ask(self, address: int) -> Region | None:
        if address not in self._asked:
            self._asked[address] = self._driver.memory_at(address) if address else None
        return self._asked[address]
