"""Division of one test run among parallel processes: `pytest --shard I/N`."""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Sequence


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `I/N`, 1 <= I <= N; raises argparse's error otherwise."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= count:
        raise argparse.ArgumentTypeError(f"--shard: expected I/N with 1 <= I <= N, got {text!r}; pass 1/6, for example")
    return index, count


def in_shard(names: Sequence[str], index: int, count: int) -> list[bool]:
    """Which of the tests, by name, are in shard `index` of `count`. Every test is in one; sizes differ by at most 1.

    Dealt in the order of a hash: dealt in the order of collection, a parameter whose number of values divides `count`
    would send all tests of one value, the slow ones perhaps, to one shard.
    """
    order = sorted(range(len(names)), key=lambda at: (hashlib.sha256(names[at].encode()).digest(), at))
    chosen = set(order[index - 1 :: count])
    return [at in chosen for at in range(len(names))]
