"""Measured times of each backend by batch size and context length. The registry ranks backends by them.

`ranking.json` in this folder contains the times. `scripts/make_docs.py` generates it from the committed results of
`scripts/bench_backends.py` and `scripts/bench_mixed.py`. Without results, it is empty, and the order of preference
applies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import geometric_mean
from typing import Any

from graphrt.kernels.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankingCell:
    """One measured size.

    us_per_layer  microseconds per layer by backend, including its share of the host work of a step
    """

    batch: int
    context: int
    us_per_layer: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Ranking:
    """A measured table. Without cells, it ranks nothing.

    gpu          name of the device
    cells        decode steps
    mixed_cells  mixed steps, by backend if it serves whole steps, and by "decode+prefill" for two parts
    """

    gpu: str | None = None
    cells: tuple[RankingCell, ...] = ()
    mixed_cells: tuple[RankingCell, ...] = ()

    @property
    def mixed(self) -> Ranking:
        """The table of mixed steps."""
        return Ranking(self.gpu, self.mixed_cells)

    @property
    def names(self) -> frozenset[str]:
        """Backends with at least one time."""
        return frozenset(name for cell in self.cells for name in cell.us_per_layer)

    def relative_times(self, names: Iterable[str], *, max_num_reqs: int, max_seq_len: int) -> dict[str, float]:
        """Return the geometric mean time of each backend relative to the fastest, in ascending order.

        The mean covers the sizes that a runtime of these capacities can use: batches up to max_num_reqs, and contexts
        up to max_seq_len. A runtime below the smallest measured size is ranked by that size. A backend without a time
        for a size that others have is left out, because its mean would cover different sizes.
        """
        wanted = list(dict.fromkeys(names))
        batch = max(max_num_reqs, min((cell.batch for cell in self.cells), default=0))
        context = max(max_seq_len, min((cell.context for cell in self.cells), default=0))
        within = [cell.us_per_layer for cell in self.cells if cell.batch <= batch and cell.context <= context]
        times = [of_cell for of_cell in within if not of_cell.keys().isdisjoint(wanted)]
        complete = [name for name in wanted if times and all(name in of_cell for of_cell in times)]
        means = {name: geometric_mean(of_cell[name] for of_cell in times) for name in complete}
        return {name: means[name] / min(means.values()) for name in sorted(means, key=lambda name: means[name])}


def parse_ranking(record: Mapping[str, Any]) -> Ranking:
    """Return the table in a record of `ranking_record`."""
    cells, mixed_cells = (
        tuple(RankingCell(cell["batch"], cell["context"], cell["us_per_layer"]) for cell in record[name])
        for name in ("cells", "mixed_cells")
    )
    return Ranking(record["gpu"], cells, mixed_cells)


def ranking_record(result: Mapping[str, Any] | None, mixed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the contents of ranking.json for the result files of both benchmarks; an empty table without `result`.

    Raises:
        ConfigError: if the results are from different devices.
    """
    if result is None:
        return {"gpu": None, "cells": [], "mixed_cells": []}
    if mixed is not None and mixed["gpu"] != result["gpu"]:
        raise ConfigError(f"mixed.json: expected times of {result['gpu']}, got {mixed['gpu']}; measure both on one GPU")
    of_mixed = {} if mixed is None else {"mixed_tree": mixed["tree"]}
    return {
        "gpu": result["gpu"],
        "tree": result["tree"],
        **of_mixed,
        "layers": result["data"]["layers"],
        "cells": _cells(result),
        "mixed_cells": [] if mixed is None else _cells(mixed),
    }


def _cells(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    cells = []
    for cell in result["data"]["cells"]:
        times = {name: round(time["us"], 3) for name, time in cell["backends"].items() if time.get("us") is not None}
        cells.append({"batch": cell["batch"], "context": cell["context"], "us_per_layer": times})
    return cells


@cache
def load_ranking() -> Ranking:
    """Return the table of this installation."""
    text = files("graphrt.backends").joinpath("ranking.json").read_text(encoding="utf-8")
    return parse_ranking(json.loads(text))
