"""Who holds each address of a graph: the memory map, what the graph allocates itself, then the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from graphrt.capture.inspect.ask import Driver
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.scan import Words, scan
from graphrt.capture.inspect.view import GraphView, NodeKind, Operand


class Lookup:
    """A graph with the region of each word of its arguments that may be an address.

    view     the graph
    memory   the map
    words    of its kernels' arguments
    regions  that hold any of them: those of the map, then those that the driver told
    holder   [n] int64: for each word the index in `regions`, -1 where nobody knows the address
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
        self._told: dict[int, Region | None] = {}
        self.regions: list[Region] = list(memory.regions)
        self.holder = self._hold(self.words.value)

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

    def _hold(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Equal words recur, as weights do: each value is looked up once, and in the order of the addresses."""
        unique, inverse = np.unique(values, return_inverse=True)
        holder = self.memory.find_many(unique)
        last: Region | None = None
        for at in np.flatnonzero(holder < 0).tolist():
            address = int(unique[at])
            if last is None or not last.address <= address < last.end:
                last = self._made.find(address) or self._ask(address)
                if last is not None:
                    self.regions.append(last)
            if last is not None:
                holder[at] = len(self.regions) - 1
        return holder[inverse.reshape(-1)]

    def _ask(self, address: int) -> Region | None:
        if address not in self._told:
            self._told[address] = self._driver.memory_at(address) if address else None
        return self._told[address]
