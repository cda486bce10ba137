"""Decode steps of a Llama shape by `from_transformers`, against graphrt's own model and transformers in the same run.

    python -m scripts.bench_transformers                             # Llama-3.2-1B, batches 1, 8 and 32
    python -m scripts.bench_transformers --shape llama-3.1-8b --batches 1,64
    python -m scripts.bench_transformers --shape smollm2-135m --device cpu --batches 1 --steps 2 --no-baseline

Milliseconds per step, medians over rounds: `own` is graphrt's model, `fused` and `plain` are the modules of
transformers with `fuse=True` and `fuse=False`. The others are transformers' own decoding: `dynamic` and `static` with
these caches, `static` also with `torch.compile`, and `continuous` by `generate_batch` with "sdpa" attention. If
flash-attn is installed, `continuous_flash` uses it, and then also CUDA graphs. The last line of standard output is one
JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from graphrt.bench.decode import DecodeLoop, DecodeWork, bench_decode, kv_memory
from graphrt.bench.decode_transformers import DYNAMIC, build_model, hf_config, time_transformers
from graphrt.bench.environment import provenance
from graphrt.cache.groups import kv_groups
from graphrt.config import RuntimeConfig
from graphrt.integrations.transformers.runtime import from_transformers
from graphrt.kernels.types import KVLayout
from graphrt.models.config import ModelConfig
from graphrt.models.loading import load_model
from graphrt.sampling_params import SamplingParams

_PAGE = 16
_CONTINUOUS = 128  # new tokens of `generate_batch`


def time_hosted(
    config: ModelConfig, device: torch.device, batches: list[int], context: int, steps: int, *, fuse: bool
) -> dict[str, Any]:
    """Return the milliseconds per step of each batch, the nodes of the largest graph, and the operators."""
    model = build_model(hf_config(config).to_dict(), device, torch.bfloat16)
    most, length = max(batches), context + steps
    groups = kv_groups(config.attention_specs(torch.bfloat16), page_size=_PAGE)
    pages, _ = kv_memory(groups, most, context, length)
    sizes = RuntimeConfig(most, max(most, 64), length, decode_sizes=tuple(batches), mixed_sizes=())
    with from_transformers(model, config=sizes, num_pages=pages, page_size=_PAGE, fuse=fuse) as runtime:
        loops = {batch: DecodeLoop(runtime, batch, context, SamplingParams()) for batch in batches}
        ms = {batch: 1e3 * median(loop.step_seconds(steps)) for batch, loop in loops.items()}
        nodes = max(graph.nodes for graph in runtime.stats().graphs)
        return {"ms": ms, "nodes": nodes, "fused": dict(Counter(runtime.fused.values()))}


def time_continuous(model: Any, batch: int, context: int, *, flash: bool) -> float:
    """Return the milliseconds per step of transformers' continuous batching, from the times of the tokens.

    With `flash`, `generate_batch` uses flash-attn if it is installed. Otherwise the model keeps "sdpa" attention.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    how = ContinuousBatchingConfig()
    if hasattr(how, "auto_switch_to_flash"):
        how.auto_switch_to_flash = flash
    elif not flash:  # transformers 5.17
        model.set_attn_implementation("paged|sdpa")
    prompts = torch.randint(1, model.config.vocab_size, (batch, context)).tolist()
    length = {"max_new_tokens": _CONTINUOUS, "min_new_tokens": _CONTINUOUS}
    options = GenerationConfig(**length, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(prompts, options, how, record_timestamps=True, progress_bar=False)
    times = [output.timestamps for output in found.values()]
    if [len(of_request) for of_request in times] != [_CONTINUOUS] * batch:
        raise RuntimeError(f"generate_batch: expected {batch} outputs of {_CONTINUOUS} tokens")
    half = _CONTINUOUS // 2  # until then, graphs are captured, and the prompts of other requests run
    seconds = median(of_request[-1] - of_request[half - 1] for of_request in times)
    return 1e3 * float(seconds) / half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batches", default="1,8,32", help="comma-separated numbers")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--no-baseline", action="store_true", help="leave out transformers' own decoding")
    arguments = parser.parse_args()
    device, batches = torch.device(arguments.device), [int(batch) for batch in arguments.batches.split(",")]
    context, steps = arguments.context, arguments.steps
    loaded = load_model(f"dummy:{arguments.shape}", device=device, max_positions=context + steps)
    config = replace(loaded.config, max_position_embeddings=context + steps)
    groups = config.kv_groups(_PAGE, KVLayout.NHD, loaded.model.dtype)
    own = bench_decode(arguments.shape, loaded.model, groups, DecodeWork(batches, context, steps))
    found: dict[str, Any] = {"own": {result.batch: result.replay_ms for result in own.results}}
    details = {"own": own.nodes_per_graph}
    del loaded
    for name, fuse in (("fused", True), ("plain", False)):
        gc.collect()
        hosted = time_hosted(config, device, batches, context, steps, fuse=fuse)
        found[name], details[name] = hosted["ms"], hosted["nodes"]
        print(f"{name}: {hosted['nodes']} nodes, {hosted['fused']}")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if not arguments.no_baseline:
        from transformers.utils import is_flash_attn_2_available

        dtype = torch.bfloat16
        for cell in time_transformers(config, batches=batches, context=context, device=device, dtype=dtype):
            found.setdefault("dynamic" if cell.way == DYNAMIC else "static", {})[cell.batch] = cell.ms
        model = build_model(hf_config(config).to_dict(), device, dtype)
        ways = {"continuous_flash": True} if is_flash_attn_2_available() else {}
        for way, flash in {**ways, "continuous": False}.items():
            found[way] = {batch: time_continuous(model, batch, context, flash=flash) for batch in batches}
    for batch in batches:
        print(f"batch {batch}: " + ", ".join(f"{way} {ms[batch]} ms" for way, ms in found.items() if batch in ms))
    record = {"name": "transformers", "shape": arguments.shape, "context": context, "nodes": details, "ms": found}
    print(json.dumps({**provenance(), **record}), flush=True)


if __name__ == "__main__":
    main()
