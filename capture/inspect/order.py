"""The order of nodes in a view.

A capture creates each node after its dependencies, and drivers list nodes in order of creation, without guaranteeing
it. If every edge in the driver's list leads forward, that order is kept. Otherwise nodes are sorted by depth, name and
neighbourhood, which are equal in two captures of one step. The driver's order breaks ties only.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from hashlib import blake2b

from graphrt.kernels.errors import CaptureError

_Pairs = Sequence[tuple[int, int]]


def topological_order(labels: Sequence[str], edges: _Pairs) -> list[int]:
    """Return the indices of all nodes, each after its dependencies.

    labels   kind and name of each node, without anything that differs between two captures of one step
    edges    (source, target): the target waits for the source

    Raises:
        CaptureError: if the edges have a cycle.
    """
    if all(source < target for source, target in edges):
        return list(range(len(labels)))
    before, after = _neighbours(len(labels), edges)
    free = _kahn(list(range(len(labels))), before, after)
    depth = [0] * len(labels)
    for node in free:
        depth[node] = 1 + max((depth[source] for source in before[node]), default=-1)
    above, below = _neighbourhoods(labels, free, before), _neighbourhoods(labels, free[::-1], after)
    keys = sorted(
        range(len(labels)), key=lambda node: (depth[node], labels[node], above[node], below[node], node)
    )  # fmt: skip
    rank = [0] * len(labels)
    for position, node in enumerate(keys):
        rank[node] = position
    return _kahn(rank, before, after)


def _neighbours(count: int, edges: _Pairs) -> tuple[list[list[int]], list[list[int]]]:
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        before[target].append(source)
        after[source].append(target)
    return before, after


def _kahn(rank: list[int], before: list[list[int]], after: list[list[int]]) -> list[int]:
    """Sort topologically, and take the node of the lowest rank among those whose dependencies are done."""
    waits = [len(sources) for sources in before]
    ready = [(rank[node], node) for node, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)[1]
        order.append(node)
        for target in after[node]:
            waits[target] -= 1
            if not waits[target]:
                heapq.heappush(ready, (rank[target], target))
    if len(order) != len(rank):
        raise CaptureError(f"edges: there is a cycle among {len(rank) - len(order)} nodes; the graph is not valid")
    return order


def _neighbourhoods(labels: Sequence[str], order: Sequence[int], neighbours: list[list[int]]) -> list[bytes]:
    """Return a digest per node of its label and the nodes reachable over `neighbours`, which come first in `order`."""
    found = [b""] * len(labels)
    for node in order:
        digest = blake2b(labels[node].encode(), digest_size=16)
        for one in sorted(found[other] for other in neighbours[node]):
            digest.update(one)
        found[node] = digest.digest()
    return found
