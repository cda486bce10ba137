"""Time and device memory of capturing all sizes.

    python -m scripts.bench_capture                          # 35 decode sizes to 256 of the Llama-3.1-8B shape
    python -m scripts.bench_capture --shape llama-3.2-1b --repeats 5

Capture runs `--repeats` times in one process. The first run is reported separately: it also loads every kernel and
compiles those that the Triton cache lacks. Seconds cover the whole `capture()` call including warm-up. Bytes are the
decrease of free device memory: driver objects, the memory pool and static buffers. Separate managers capture decode and
mixed sizes, so that neither hides the cost of the other. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
from statistics import median
from typing import Any

import torch

from graphrt.bench.environment import provenance
from graphrt.cache.kv_cache import KVCache
from graphrt.config import RuntimeConfig
from graphrt.kernels.types import KVLayout
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import load_model
from graphrt.models.shapes import SHAPES
from graphrt.replay import ReplayManager


def measure(model: LlamaModel, repeats: int, **sizes: Any) -> dict[str, Any]:
    """Capture one kind of sizes several times. Return the costs by name."""
    runs = [capture(model, **sizes) for _ in range(repeats + 1)]
    seconds = [run.pop("seconds") for run in runs]
    return {
        "first_seconds": seconds[0],
        "seconds": median(seconds[1:]),
        "seconds_all": seconds[1:],
        **runs[-1],
    }


def capture(model: LlamaModel, **sizes: Any) -> dict[str, Any]:
    """Capture one kind of sizes once, in a new manager that is closed afterwards. Return the costs by name."""
    gc.collect()
    torch.cuda.empty_cache()
    config, device = model.config, model.device
    cache = KVCache.allocate(config.kv_groups(16, KVLayout.NHD, torch.bfloat16), 64, device)
    free = torch.cuda.mem_get_info(device)[0]
    manager = ReplayManager(
        model,
        cache,
        config.attention_specs(torch.bfloat16),
        vocab_size=config.vocab_size,
        config=RuntimeConfig(max_num_reqs=256, max_num_tokens=2048, max_seq_len=8192, **sizes),
    )
    manager.capture()
    torch.cuda.empty_cache()
    nbytes = free - torch.cuda.mem_get_info(device)[0]
    stats = manager.stats()
    manager.close()
    return {
        "seconds": stats.capture_seconds,
        "graphs": len(stats.graphs),
        "mib_per_graph": nbytes / len(stats.graphs) / (1 << 20),
        "pool_mib": sum(g.pool_bytes for g in stats.graphs) / (1 << 20),
        "driver_mib": sum(g.driver_bytes for g in stats.graphs) / (1 << 20),
        "nodes": max(g.nodes for g in stats.graphs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, got none")
    model = load_model(f"dummy:{arguments.shape}", device="cuda:0", dtype=torch.bfloat16).model
    record = {"name": "capture", "model": arguments.shape, **provenance()}
    for kind, other in (("decode", "mixed"), ("mixed", "decode")):
        found = measure(model, arguments.repeats, **{f"{other}_sizes": ()})
        nodes = found.pop("nodes")
        record |= {f"{kind}_{name}": value for name, value in found.items()}
        record.setdefault("nodes_per_graph", nodes)
        print(
            f"{kind}: {found['graphs']} graphs of {nodes} nodes in {found['seconds']:.2f} s "
            f"({found['first_seconds']:.2f} s the first time), {found['mib_per_graph']:.1f} MiB per graph, everything "
            "included"
        )
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
