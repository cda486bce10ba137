"""The order of nodes in a view.

A capture creates each node after its dependencies, and drivers list nodes in creation order. Nodes that were added
in a different order are sorted, and keep the driver's order where dependencies allow.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from graphrt.kernels.errors import CaptureError


def topological_order(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the indices of all nodes, each after its dependencies and otherwise in order.

    edges    (source, target); the target waits for the source

    Raises:
        CaptureError: if the edges have a cycle.
    """
    after: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count
    for source, target in edges:
        after[source].append(target)
        waits[target] += 1
    ready = [node for node in range(count) if not waits[node]]  # sorted, so it is a heap
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for target in after[node]:
            waits[target] -= 1
            if not waits[target]:
                heapq.heappush(ready, target)
    if len(order) != count:
        raise CaptureError(f"edges: there is a cycle among {count - len(order)} nodes; capture the graph again")
    return order
