"""Find the region of each address in a graph. Search the map, then the graph's allocations, then ask the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from graphrt.capture.inspect.driver_memory import LookUp
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.scan import WORD, Words, scan
from graphrt.capture.inspect.torch_kernels import no_addresses
from graphrt.capture.inspect.view import GraphView, NodeKind, Operand


class Lookup:
    """The words in a graph's kernel arguments that may be addresses, with the memory region of each word.

    view     the graph
    memory   the map
    driver   looks up all other memory
    words    words of its kernels' arguments, except words of PyTorch's kernels that are known not to be addresses
    regions  regions of the map, of the graph's allocations and of the driver
    holder   [n] int64: index in `regions` of each word; -1 if unknown

    Misaligned words are not looked up in the driver, because adjacent numbers form many of them.
    """

    def __init__(self, view: GraphView, memory: MemoryMap, driver: LookUp) -> None:
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
        """Return the region that contains an address; None if unknown."""
        return self.memory.find(address) or self._made.find(address) or self._ask(address)

    def ranges(self, operand: Operand) -> Iterator[tuple[int, Region | None]]:
        """Yield the parts of an operand by region: first address and region."""
        end = operand.address + operand.nbytes
        for start, region in self.memory.ranges(operand.address, operand.nbytes):
            if region is not None:
                yield start, region
                continue
            # Another region may contain all of a gap in the map, or only its start.
            stop = next((at for at, held in self.memory.ranges(start, end - start) if held is not None), end)
            while start < stop:
                known = self._made.find(start) or self._ask(start)
                yield start, known
                start = max(known.end, start + 1) if known is not None else stop

    def count(self, owners: Counter[Owner]) -> None:
        """Add the number of words per owner to `owners`. Unknown words are numbers."""
        counts = np.bincount(self.holder[self.holder >= 0], minlength=len(self.regions))
        for index in np.flatnonzero(counts).tolist():
            owners[self.regions[index].owner] += int(counts[index])

    def _leave_out_numbers(self) -> None:
        """Drop the words at positions where PyTorch's kernels have no addresses."""
        words, kept = self.words, np.ones(len(self.holder), np.bool_)
        for number, (_, node) in enumerate(words.nodes):
            starts = words.starts[words.firsts[number] :]
            for index, first, end in no_addresses(node, partial(self._is_known, starts)):
                low, high = np.searchsorted(words.at, (starts[index] + first - WORD + 1, starts[index] + end))
                kept[low:high] = False  # including words that overlap the range
        if not kept.all():
            self.words, self.holder = words.only(kept), self.holder[kept]

    def _is_known(self, starts: npt.NDArray[np.int64], index: int, offset: int) -> bool:
        """Return whether the word at an offset in an argument points to known memory. `starts`: argument starts."""
        at = int(np.searchsorted(self.words.at, starts[index] + offset))
        return at < len(self.words.at) and self.words.at[at] == starts[index] + offset and bool(self.holder[at] >= 0)

    def _look_further(self, memory: MemoryMap) -> None:
        """Look up the words that are still unknown."""
        unknown = np.flatnonzero(self.holder < 0)
        found = memory.find_many(self.words.value[unknown])
        self.holder[unknown] = np.where(found >= 0, found + len(self.regions), -1)
        self.regions += memory.regions

    def _ask_all(self, addresses: npt.NDArray[np.uint64]) -> Iterator[Region]:
        """Yield the driver's allocations at ascending addresses, each once."""
        last: Region | None = None
        for address in addresses.tolist():
            if last is None or address >= last.end:
                known = self._ask(address)
                if known is not None:
                    last = known
                    yield known

    def _ask(self, address: int) -> Region | None:
        if address not in self._asked:
            self._asked[address] = self._driver(address) if address else None
        return self._asked[address]
