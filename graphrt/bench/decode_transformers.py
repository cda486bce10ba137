"""Baseline of the decode benchmark, in which `transformers` decodes the same model shape on the same device.

It runs in a separate process, which has all of the device's memory and can be stopped after a time limit. Results
measured before the limit are kept. Two modes are timed:

    dynamic    forward with a DynamicCache, one token at a time: the default of `generate` without its overhead
    static     forward with a StaticCache, compiled with torch.compile(mode="reduce-overhead"): CUDA graphs
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from graphrt.bench.timer import synchronize
from graphrt.kernels.checks import check_int
from graphrt.kernels.errors import UnsupportedError
from graphrt.models.config import ModelConfig
from graphrt.models.packages import require
from graphrt.models.rope import RopeConfig

DYNAMIC, STATIC = "dynamic", "static"
STATIC_BATCHES = (1, 32)
"""Batches that are also timed with compilation, which takes about a minute each."""

LIMIT_SECONDS = 140
"""Time limit in seconds for all cells of one shape, so that two shapes finish within six minutes."""

_WARM_UP_STEPS = 5  # compilation, capture, first replay
_ROUNDS, _STEPS = 5, 10
_TOTAL_STEPS = _WARM_UP_STEPS + _ROUNDS * _STEPS
_MARK = "decode_transformers: "  # prefix of result lines


@dataclass(frozen=True, slots=True)
class BaselineTime:
    """One mode at one batch size. `reason` says why times are missing.

    ms, ms_spread   milliseconds per step: median over several rounds, and maximum minus minimum
    """

    way: str
    batch: int
    ms: float | None = None
    ms_spread: float | None = None
    reason: str | None = None


def time_transformers(
    config: ModelConfig,
    *,
    batches: Sequence[int],
    context: int,
    device: torch.device,
    dtype: torch.dtype,
    limit_seconds: float = LIMIT_SECONDS,
) -> list[BaselineTime]:
    """Time all batches with a dynamic cache, and those in STATIC_BATCHES also with a compiled static cache.

    The caller must free its device memory first. Weights and cache are random.

    Raises: ConfigError: if `transformers` is missing. UnsupportedError: if `transformers` does not support the shape.
    """
    cells = [(DYNAMIC, batch) for batch in batches]
    cells += [(STATIC, batch) for batch in batches if batch in STATIC_BATCHES]
    job = {
        "config": hf_config(config).to_dict(),
        "cells": cells,
        "context": check_int("context", context, 1, advice="pass the number of cached tokens"),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
    }
    output, ending = _run_child(json.dumps(job), limit_seconds)
    lines = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    found = {(time.way, time.batch): time for time in (BaselineTime(**json.loads(line)) for line in lines)}
    return [found.get(cell, BaselineTime(*cell, reason=f"not measured: {ending}")) for cell in cells]


def hf_config(config: ModelConfig) -> Any:
    """Return the `transformers` configuration of a shape. Raises: see `time_transformers`."""
    transformers = require("transformers", "for the baseline")
    if config.rotary_dim != config.head_dim:
        raise UnsupportedError(
            f"baseline: expected a model that rotates whole heads, got {config.rotary_dim} of {config.head_dim} "
            "dimensions; omit --baseline"
        )
    options: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": _rope_parameters(config.rope),
    } | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    windows = [window for window in config.sliding_windows if window is not None]
    if config.architecture == "llama":
        options |= {"attention_bias": config.o_bias, "mlp_bias": config.mlp_bias}
    elif config.architecture == "mistral":
        options |= {"sliding_window": windows[0] if windows else None}
    else:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in config.sliding_windows]
        options |= {"use_sliding_window": bool(windows), "layer_types": kinds}
        options |= {"sliding_window": windows[0]} if windows else {}
        options |= {"attention_bias": config.o_bias} if config.architecture == "qwen3" else {}
    return getattr(transformers, f"{config.architecture.capitalize()}Config")(**options)


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        values |= {"factor": rope.factor, "original_max_position_embeddings": rope.original_positions}
    if rope.kind == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "longrope":
        values |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    return values


def _run_child(job: str, limit_seconds: float) -> tuple[str, str]:
    """Return the standard output of the process and, for cells without a result, how the process ended."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from graphrt.bench.decode_transformers import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the compiler's worker processes are also stopped
    )
    try:
        output, errors = process.communicate(job, timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        return output, f"no result after {limit_seconds:g} s"
    last = [line for line in errors.splitlines() if line.strip()][-1:]
    return output, f"the process ended with {process.returncode} ({''.join(last)[:200]})"


def main() -> None:
    """Read a job from standard input and print one line per cell."""
    job = json.load(sys.stdin)
    device, dtype = torch.device(job["device"]), getattr(torch, job["dtype"])
    model = build_model(job["config"], device, dtype)
    for way, batch in job["cells"]:
        try:
            seconds = time_cell(model, way, batch, job["context"])
            spread = max(seconds) - min(seconds)
            result = BaselineTime(way, batch, 1e3 * median(seconds), 1e3 * spread)
        except Exception as error:  # a cell that exceeds memory or does not compile must not end the run
            text = " ".join(f"{type(error).__name__}: {error}".split())
            result = BaselineTime(way, batch, reason=f"not measured: {text[:300]}")
        print(_MARK + json.dumps(asdict(result)), flush=True)


def build_model(values: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Create the model with random weights on the device."""
    transformers = require("transformers", "for the baseline")
    config = transformers.AutoConfig.for_model(**values)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


@torch.no_grad()
def time_cell(model: Any, way: str, batch: int, context: int) -> list[float]:
    """Return the seconds per step of each round, starting at `context` cached tokens.

    Raises: UnsupportedError: for the static mode on a CPU. Errors in the model propagate.
    """
    transformers = require("transformers", "for the baseline")
    device = model.device
    if way == STATIC and device.type != "cuda":
        raise UnsupportedError(
            "static: expected a CUDA device, got a CPU; run this baseline on a GPU, because it times CUDA graphs"
        )
    if device.type == "cuda":
        torch.compiler.reset()  # otherwise, a second batch size would be compiled with dynamic shapes
        gc.collect()
        torch.cuda.empty_cache()
    if way == DYNAMIC:
        cache, forward = transformers.DynamicCache(config=model.config), model.forward
    else:
        cache = transformers.StaticCache(config=model.config, max_cache_len=context + _TOTAL_STEPS)
        forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    fill_cache(cache, model, batch, context)
    tokens = torch.ones(batch, 1, dtype=torch.int64, device=device)

    def step() -> None:
        if way == STATIC:
            torch.compiler.cudagraph_mark_step_begin()
        logits = forward(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))

    for _ in range(_WARM_UP_STEPS):
        step()
    return [_round_seconds(step, device) for _ in range(_ROUNDS)]


def fill_cache(cache: Any, model: Any, batch: int, context: int) -> None:
    """Fill every layer with `context` tokens of random K and V, which cost the same as real ones."""
    config = model.config
    shape = (batch, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        cache.update(k, v, layer)


def _round_seconds(step: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(_STEPS):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / _STEPS
