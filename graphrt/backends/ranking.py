"""Measured times of each backend by batch size and context length. The registry ranks backends by them.

`ranking.json` in this folder holds the times. `scripts/make_docs.py` generates it from the committed results of
`scripts/bench_backends.py` and `scripts/bench_mixed.py`. Without results it is empty, and the static order applies.
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
    """One measured size.

    us_per_layer  microseconds per layer by backend, including its share of the host work of a step
    """

    batch: int
    context: int
    us_per_layer: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Ranking:
    """A measured table. Without cells it ranks nothing.

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
        up to max_seq_len. A runtime below the smallest measured size is ranked by that size. A backend is left out if
        it lacks a time that another has, because its mean would cover other sizes.
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
    """Return the table in a record of `ranking_record`.

    Raises:
        ConfigError: if the record has another format, or a time that is not a finite number above 0.
    """
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
            f"ranking.json: not a table of measured times ({type(error).__name__}: {error}); generate it with "
            "scripts/make_docs.py, or reinstall graphrt"
        ) from error
    for cell in (*cells, *mixed_cells):
        for name, us in cell.us_per_layer.items():
            if not (math.isfinite(us) and us > 0):
                raise ConfigError(
                    f"ranking.json: expected times > 0, got {us} for {name} at {cell.batch} x {cell.context}; "
                    "measure again with scripts/bench_backends.py or scripts/bench_mixed.py"
                )
    return Ranking(gpu, cells, mixed_cells)


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
