"""Match the nodes of two graphs by the shortest edit script between their lists of names.

Graphs of models repeat their layers. On such lists `difflib`, which matches the longest runs first, takes cubic time.
The algorithm here takes time quadratic in the number of differences (Myers, "An O(ND) difference algorithm and its
variations", 1986).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Label = tuple[str, str]
"""Kind and name of a node."""

_MOST_EDITS = 2000
"""Number of insertions and deletions from which two lists are treated as having nothing in common."""


def aligned(a: Sequence[Label], b: Sequence[Label]) -> Iterator[tuple[int | None, int | None]]:
    """Yield pairs of matching indices, in the order of both lists. A node without a match is paired with None.

    Between nodes that match by name, the remaining nodes of the same kind are matched in order.
    """
    first = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    rest = min(len(a), len(b)) - first
    last = next((at for at in range(rest) if a[-1 - at] != b[-1 - at]), rest)
    middle = _common(a[first : len(a) - last], b[first : len(b) - last])
    ends = [(len(a) - at, len(b) - at) for at in range(last, -1, -1)]
    i = j = 0
    for i_end, j_end in (*((at, at) for at in range(first)), *((first + x, first + y) for x, y in middle), *ends):
        while i < i_end or j < j_end:
            both = i < i_end and j < j_end
            if both and a[i][0] != b[j][0]:
                yield i, None
                i += 1
                continue
            yield (i if i < i_end else None), (j if j < j_end else None)
            i, j = i + (i < i_end), j + (j < j_end)
        if i < len(a) and j < len(b):
            yield i, j
        i, j = i + 1, j + 1


def _common(a: Sequence[Label], b: Sequence[Label]) -> list[tuple[int, int]]:
    """Return the index pairs of a longest common subsequence; empty if the lists have too little in common."""
    middle = _MOST_EDITS + 1
    reach = [0] * (2 * middle + 1)  # per diagonal, the furthest index in `a`
    steps: list[list[int]] = []
    for edits in range(min(len(a) + len(b), _MOST_EDITS) + 1):
        steps.append(reach[middle - edits - 1 : middle + edits + 2])
        for diagonal in range(-edits, edits + 1, 2):
            down = _goes_down(reach, middle, diagonal, edits)
            x = reach[middle + diagonal + 1] if down else reach[middle + diagonal - 1] + 1
            while x < len(a) and x - diagonal < len(b) and a[x] == b[x - diagonal]:
                x += 1
            reach[middle + diagonal] = x
            if x >= len(a) and x - diagonal >= len(b):
                return _backtrack(steps, len(a), len(b))
    return []


def _goes_down(reach: Sequence[int], middle: int, diagonal: int, edits: int) -> bool:
    """Return whether the last edit on the path to a diagonal inserts a name of `b`, rather than deleting a name of
    `a`."""
    return diagonal == -edits or (
        diagonal != edits and reach[middle + diagonal - 1] < reach[middle + diagonal + 1]
    )  # fmt: skip


def _backtrack(steps: list[list[int]], x: int, y: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for edits in range(len(steps) - 1, -1, -1):
        reach, diagonal, middle = steps[edits], x - y, edits + 1
        down = _goes_down(reach, middle, diagonal, edits)
        start = reach[middle + diagonal + 1] if down else reach[middle + diagonal - 1] + 1
        start = start if edits else 0
        while x > start:
            x, y = x - 1, y - 1
            found.append((x, y))
        x, y = (x, y - 1) if down else (x - 1, y)
    return found[::-1]
