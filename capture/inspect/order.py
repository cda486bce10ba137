"""The order in which a view lists the nodes of a graph.

A capture makes each node after all that it waits for. Drivers list nodes as they were made, though none promises it.
So a list in which every edge leads forward is kept: it is the order of the capture. Any other list is the driver's own
doing and is dropped. The nodes are then taken by depth, name and surroundings, which two captures of one step share;
the driver's list decides only between nodes that are alike in all of that.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from hashlib import blake2b

from graphrt.kernels.errors import CaptureError

_Pairs = Sequence[tuple[int, int]]


def topological_order(labels: Sequence[str], edges: _Pairs) -> list[int]:
    """Indices of all nodes, each behind those that it waits for.

    labels   what each node is, without anything that differs between two captures of one step
    edges    (source, target): the target waits for the source

    Raises: CaptureError for a circle.
    """
    if all(source < target for source, target in edges):
        return list(range(len(labels)))
    before, after = _neighbours(len(labels), edges)
    free = _kahn(list(range(len(labels))), before, after)
    depth = [0] * len(labels)
    for node in free:
        depth[node] = 1 + max((depth[source] for source in before[node]), default=-1)
    behind, ahead = _surroundings(labels, free, before), _surroundings(labels, free[::-1], after)
    keys = sorted(
        range(len(labels)), key=lambda node: (depth[node], labels[node], behind[node], ahead[node], node)
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
    """Of the nodes that wait for none that is left, always the one of the lowest rank."""
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
        raise CaptureError(f"edges: expected no circle, got one among {len(rank) - len(order)} nodes; check the graph")
    return order


def _surroundings(labels: Sequence[str], order: Sequence[int], neighbours: list[list[int]]) -> list[bytes]:
    """A digest per node of its label and of all that can be reached over `neighbours`, which `order` has first."""
    found = [b""] * len(labels)
    for node in order:
        digest = blake2b(labels[node].encode(), digest_size=16)
        for one in sorted(found[other] for other in neighbours[node]):
            digest.update(one)
        found[node] = digest.digest()
    return found
