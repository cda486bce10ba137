"""What each backend costs by batch size and context length, measured on a device. The registry ranks by it.

`ranking.json` beside this file holds the figures. `scripts/make_docs.py` makes that file from the committed result of
`scripts/bench_backends.py`. Without such a result the file is empty, and the registry's static order applies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from graphrt.kernels.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankingCell:
    """One measured size. us_per_layer: microseconds of a layer by backend, with its share of the step's host work."""

    batch: int
    context: int
    us_per_layer: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Ranking:
    """A measured table; `gpu` says on what device. Without cells it ranks nothing.

    cells        of decode steps
    mixed_cells  of mixed steps, by backend where it serves them whole, and by "decode+prefill" in two parts
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
        """Backends with at least one figure."""
        return frozenset(name for cell in self.cells for name in cell.us_per_layer)

    def relative_times(self, names: Iterable[str], *, max_num_reqs: int, max_seq_len: int) -> dict[str, float]:
        """Mean time of each of the backends, the fastest being 1.0, in ascending order.

        The mean is geometric. It is over the sizes that a runtime of these capacities can meet: batches up to
        max_num_reqs, and contexts up to max_seq_len. A runtime below the smallest measured size is ranked by that size.
        A backend is left out if it lacks a figure that another has: its mean would be over other sizes.
        """
        wanted = list(dict.fromkeys(names))
        cells = [
            {name: cell.us_per_layer[name] for name in wanted if name in cell.us_per_layer}
            for cell in self._within(max_num_reqs, max_seq_len)
        ]
        cells = [cell for cell in cells if cell]
        complete = [name for name in wanted if cells and all(name in cell for cell in cells)]
        if not complete:
            return {}
        means = {name: math.exp(sum(math.log(cell[name]) for cell in cells) / len(cells)) for name in complete}
        fastest = min(means.values())
        return {name: means[name] / fastest for name in sorted(means, key=lambda name: means[name])}

    def _within(self, max_num_reqs: int, max_seq_len: int) -> list[RankingCell]:
        batch = max(max_num_reqs, min((cell.batch for cell in self.cells), default=0))
        context = max(max_seq_len, min((cell.context for cell in self.cells), default=0))
        return [cell for cell in self.cells if cell.batch <= batch and cell.context <= context]


def parse_ranking(record: Mapping[str, Any]) -> Ranking:
    """The table of a record as `ranking_record` makes it. Raises: ConfigError where it is none."""
    try:
        cells, mixed_cells = (
            tuple(
                RankingCell(
                    int(cell["batch"]), int(cell["context"]), {n: float(us) for n, us in cell["us_per_layer"].items()}
                )
                for cell in record[name]
            )
            for name in ("cells", "mixed_cells")
        )
        gpu = record["gpu"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"ranking.json: expected a table of measured times, got a {type(error).__name__} on {error}; "
            "make it again with scripts/make_docs.py, or install graphrt again"
        ) from error
    for cell in (*cells, *mixed_cells):
        for name, us in cell.us_per_layer.items():
            if not (math.isfinite(us) and us > 0):
                raise ConfigError(
                    f"ranking.json: expected times > 0, got {us} of {name} at {cell.batch} x {cell.context}; "
                    "measure again with scripts/bench_backends.py or scripts/bench_mixed.py"
                )
    return Ranking(gpu, cells, mixed_cells)


def ranking_record(result: Mapping[str, Any] | None, mixed: Mapping[str, Any] | None) -> dict[str, Any]:
    """What ranking.json holds for the result files of both benchmarks; None, no result yet, makes an empty table.

    Raises: ConfigError for results of different devices.
    """
    if result is None:
        return {"gpu": None, "cells": [], "mixed_cells": []}
    if mixed is not None and mixed["gpu"] != result["gpu"]:
        raise ConfigError(f"mixed.json: expected figures of {result['gpu']}, got {mixed['gpu']}; measure both on one")
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
    """The table that this installation came with."""
    text = files("graphrt.backends").joinpath("ranking.json").read_text(encoding="utf-8")
    return parse_ranking(json.loads(text))
