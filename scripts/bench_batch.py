"""Host time of creating a batch and of packing it into the step inputs.

    python -m scripts.bench_batch [--rows 256] [--pages 512]

Every request decodes one token and lists all its pages. Times are microseconds, the best of 50. docs/embedding.md
quotes them. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from graphrt.batch import Batch, Request
from graphrt.bench.environment import provenance
from graphrt.kernels.metadata.step_inputs import inputs_size
from graphrt.kernels.types import TOKEN_FROM_DEVICE

PAGE_SIZE = 16


def microseconds(call: Callable[[], object]) -> float:
    """Return the shortest time of 50 calls. Other work on the machine can only lengthen a call."""
    times = []
    for _ in range(50):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def main() -> None:
    """Print one line per way to pass a batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--pages", type=int, default=512, help="per row")
    options = parser.parse_args()
    rows, pages = options.rows, options.pages
    table = 1 + np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    arrays = {
        "req_indices": np.arange(rows, dtype=np.int32),
        "seq_lens": np.full(rows, pages * PAGE_SIZE, np.int32),
        "page_indptr": np.arange(0, rows * pages + 1, pages, dtype=np.int32),
        "page_ids": table.reshape(-1),
    }
    lists = {name: array.tolist() for name, array in arrays.items()}
    of_lists = [Request(i, [TOKEN_FROM_DEVICE], pages * PAGE_SIZE, table[i].tolist()) for i in range(rows)]
    of_arrays = [Request(i, [TOKEN_FROM_DEVICE], pages * PAGE_SIZE, table[i]) for i in range(rows)]
    batch, record = Batch(**arrays), np.zeros(inputs_size(rows, rows, rows * pages, 1), np.int32)
    print(f"{rows} rows x {pages} pages, microseconds")
    times = {}
    for name, call in {
        "`Batch(...)` of int32 arrays": lambda: Batch(**arrays),
        "`Batch(...)` of lists": lambda: Batch(**lists),
        "`Batch.from_requests`, pages as int32 arrays": lambda: Batch.from_requests(of_arrays),
        "`Batch.from_requests`, pages as lists": lambda: Batch.from_requests(of_lists),
        "page ids out of a `[rows, pages]` table": lambda: np.concatenate([row[:pages] for row in table]),
        "packing into the step inputs": lambda: batch.write_inputs(record, 1, 1),
    }.items():
        times[name] = microseconds(call)
        print(f"{times[name]:8.0f}  {name}", flush=True)
    result = {"rows": rows, "pages": pages, "microseconds": times}
    print(json.dumps({"name": "batch", **result, **provenance()}), flush=True)


if __name__ == "__main__":
    main()
