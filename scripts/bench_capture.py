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
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from graphrt.bench.environment import provenance
from graphrt.cache.kv_cache import KVCache
from graphrt.config import RuntimeConfig
from graphrt.kernels.types import KVLayout
from graphrt.models.config import ModelConfig
from graphrt.models.loading import load_model
from graphrt.models.shapes import SHAPES
from graphrt.replay import ReplayManager


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    graphs: int
    first_seconds: float
    seconds: list[float]
    nbytes: int
    nodes: int
    pool_bytes: int
    driver_bytes: int


def measure(
    model: torch.nn.Module, config: ModelConfig, device: torch.device, repeats: int, **sizes: Any
) -> CaptureSizes:
    seconds, nbytes = [], 0
    spec = config.kv_groups(16, KVLayout.NHD, torch.bfloat16)
    for _ in range(repeats + 1):
        gc.collect()
        torch.cuda.empty_cache()
        cache = KVCache.allocate(spec, 64, device)
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
        graphs = manager.stats().graphs
        seconds.append(manager.stats().capture_seconds)
        manager.close()
    return CaptureSizes(
        graphs=len(graphs),
        first_seconds=seconds[0],
        seconds=seconds[1:],
        nbytes=nbytes,
        nodes=max(g.nodes for g in graphs),
        pool_bytes=sum(g.pool_bytes for g in graphs),
        driver_bytes=sum(g.driver_bytes for g in graphs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats: expected >= 1, got {arguments.repeats}")
    if arguments.shape not in SHAPES:
        parser.error(f"--shape: expected one of {', '.join(SHAPES)}, got {arguments.shape!r}")
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, got none")
    device = torch.device("cuda", 0)
    loaded = load_model(f"dummy:{arguments.shape}", device=device, dtype=torch.bfloat16)
    decode = measure(loaded.model, loaded.config, device, arguments.repeats, mixed_sizes=())
    mixed = measure(loaded.model, loaded.config, device, arguments.repeats, decode_sizes=())
    record = {"name": "capture", "model": arguments.shape, **provenance()}
    for kind, capture_sizes in (("decode", decode), ("mixed", mixed)):
        record |= {
            f"{kind}_graphs": capture_sizes.graphs,
            f"{kind}_first_seconds": capture_sizes.first_seconds,
            f"{kind}_seconds": median(capture_sizes.seconds),
            f"{kind}_seconds_all": capture_sizes.seconds,
            f"{kind}_mib_per_graph": capture_sizes.nbytes / capture_sizes.graphs / (1 << 20),
            f"{kind}_pool_mib": capture_sizes.pool_bytes / (1 << 20),
            f"{kind}_driver_mib": capture_sizes.driver_bytes / (1 << 20),
        }
        print(
            f"{kind}: {capture_sizes.graphs} graphs of {capture_sizes.nodes} nodes in "
            f"{median(capture_sizes.seconds):.2f} s ({capture_sizes.first_seconds:.2f} s the first time), "
            f"{capture_sizes.nbytes / capture_sizes.graphs / (1 << 20):.1f} MiB per graph, everything included"
        )
    record["nodes_per_graph"] = decode.nodes
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
