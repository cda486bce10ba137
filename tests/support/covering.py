"""Tables of cases in which every pair of options occurs."""

from __future__ import annotations

import itertools
import random
from typing import Any


def covering_array(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """A table in which every pair of values of every two factors occurs: greedy, the best of 60 random rows."""
    rng = random.Random(0)
    names = list(factors)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in range(len(factors[a]))
        for y in range(len(factors[b]))
    }
    rows = []
    while missing:
        best, covered, left = {}, set(), sorted(missing)
        for _ in range(60):
            a, x, b, y = rng.choice(left)
            row = {name: rng.randrange(len(values)) for name, values in factors.items()} | {a: x, b: y}
            hits = {pair for pair in _pairs(names, row) if pair in missing}
            if len(hits) > len(covered):
                best, covered = row, hits
        missing -= covered
        rows.append({name: factors[name][index] for name, index in best.items()})
    return rows


def _pairs(names, row):
    return [(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)]
