"""Cost and savings of KV groups: the refresh of several groups, a windowed model with and without groups, and cross
attention.

    python -m scripts.bench_groups                      # all parts
    python -m scripts.bench_groups --only refresh
    python -m scripts.bench_groups --batch 16 --context 32768 --steps 32

refresh   microseconds from the input slot to the derived buffers, in graph replays: 256 decode requests at 1,024
          tokens, with one, two, four and eight KV groups, all full or all but one with a window of 1,024. A step lists
          the pages of all requests in all groups ("full tables"), or passes the requests without pages ("tables that
          stay"). A session's step gives every 16th request a page in each group ("new pages"), or sends no change ("no
          delta"). The time until the step inputs are written is printed in parentheses; checks and writes of derived
          buffers take the rest. Then the same with the attention schedules of one, two and three kinds of layers
model     a model like Gemma 3 (five layers with a window of 1,024 per full layer, dummy weights), with groups from
          `kv_groups` and with one block table for all layers, alternating: bytes of the KV cache, and time per step
cross     TB/s of one cross layer in a decode step, one query per request, over at least 128 MB of encoder KV; for
          comparison, a causal layer over the same number of tokens, and the bandwidth of a read-only sweep. The time of
          a small kernel between two calls is subtracted; the KV of a call is evicted from L2

The last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from graphrt.batch import Batch
from graphrt.bench.decode import DecodeWork, bench_decode, kv_memory
from graphrt.bench.environment import provenance
from graphrt.bench.timer import Timing, measure_read_bandwidth, rotations, spaced_calls, spacer_calls, time_calls
from graphrt.cache.groups import kv_groups
from graphrt.cache.kv_cache import KVCache
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.config import RuntimeConfig
from graphrt.engine.batch_delta import BatchDelta, StopConditions
from graphrt.kernels.metadata.buffers import STOP_TOKENS
from graphrt.kernels.metadata.unpack import unpack
from graphrt.models.config import ModelConfig
from graphrt.models.loading import load_model
from graphrt.models.rope import RopeConfig
from graphrt.replay import ReplayManager
from graphrt.spec import AttentionKind, AttentionSpec, KVCacheSpec
from scripts.rigs.measure import check_token

WINDOW, ROWS, LENGTH, LONGEST = 1024, 256, 1024, 32_768
STEPS = ("full tables", "tables that stay", "new pages", "no delta")
GEMMA_LIKE = ModelConfig(
    architecture="qwen3",
    vocab_size=262_144,
    hidden_size=2560,
    intermediate_size=10_240,
    num_layers=30,
    num_q_heads=8,
    num_kv_heads=4,
    head_dim=256,
    max_position_embeddings=131_072,
    rope=RopeConfig(theta=1_000_000.0),
    qk_norm=True,
    tie_word_embeddings=True,
    sliding_windows=((WINDOW,) * 5 + (None,)) * 5,
    eos_ids=(1,),
)


class _Refresh:
    """Return a manager with a no-op model, `groups` KV groups and 256 requests."""

    def __init__(self, windows: tuple[int | None, ...], device: torch.device) -> None:
        specs = tuple(
            KVCacheSpec(1, 8, 128, layers=(layer,), sliding_window=window) for layer, window in enumerate(windows)
        )
        attention = [AttentionSpec(32, 8, 128, sliding_window=window) for window in windows]
        per_row = LENGTH // 16 + 1
        cache = KVCache.allocate(specs, 1 + ROWS * len(windows) * (per_row + 1), device)
        config = RuntimeConfig(
            max_num_reqs=ROWS, max_num_tokens=ROWS, max_seq_len=LONGEST, decode_sizes=(ROWS,), mixed_sizes=()
        )

        def model(step: Any) -> torch.Tensor:
            return torch.zeros(ROWS, 8, device=device)

        self.manager = ReplayManager(model, cache, attention, vocab_size=8, config=config)
        self.manager.capture()
        pages = np.random.default_rng(0).permutation(cache.num_pages - 1).astype(np.int32) + 1
        batch = Batch(
            req_indices=np.arange(ROWS, dtype=np.int32),
            seq_lens=np.full(ROWS, LENGTH, np.int32),
            tokens=np.ones(ROWS, np.int32),
            page_indptr=np.arange(len(windows) * ROWS + 1, dtype=np.int32) * per_row,
            page_ids=pages[: len(windows) * ROWS * per_row],
        )
        ends = StopConditions(np.zeros(ROWS, np.int32), np.full((STOP_TOKENS, ROWS), -1, np.int32))
        self.manager.begin(batch, ends).tokens()
        self._batch, self._groups, self._pages = batch, len(windows), pages[len(batch.page_ids) :]

    def put(self, what: str) -> None:
        """Write a step into the next input slot. Every replay reads this slot, because write_outputs does not run."""
        (slot, step), n = self.manager.queue.slot(), ROWS * self._groups
        if what == "full tables":
            self._batch.write_inputs(slot.inputs, step, self._groups)
        elif what == "tables that stay":
            stays = Batch(req_indices=self._batch.req_indices, seq_lens=self._batch.seq_lens + 1)
            stays.write_inputs(slot.inputs, step, self._groups)
        else:
            lists = np.zeros((self._groups, 3, ROWS), np.int32)
            lists[:, 0, ::16], lists[:, 2, ::16] = LENGTH // 16 + 1, 1
            lists[:, 1, ::16] = np.arange(n // 16).reshape(self._groups, -1)
            delta = BatchDelta(
                self._batch.req_indices.astype(np.int64), lists.reshape(-1, ROWS), self._pages[: n // 16]
            )
            if what == "no delta":
                delta = replace(delta, lists=None, pages=None)
            delta.write(slot.inputs, step, 1, False, False)
        with slot.in_flight(self.manager._stream):
            pass  # entering the context writes the copies of the header

    def time(self, *, schedule: bool = False) -> Timing:
        """Time from the input slot to the derived buffers, optionally including the attention schedule."""
        program = self.manager._program

        def step() -> None:
            view = program.refresh(BatchDescriptor.decode(ROWS))
            if schedule:
                program.backend.schedule(view.metadata)

        return self._time(step)

    def time_record(self) -> Timing:
        """Time from the input slot to the step inputs: the first of three kernels."""
        return self._time(partial(unpack, self.manager._program.view(BatchDescriptor.decode(ROWS)).buffers))

    def _time(self, step: Callable[[], None]) -> Timing:
        with torch.inference_mode():
            return time_calls([step], device=self.manager.kv_cache.device)

    def close(self) -> None:
        self.manager.close()


def bench_refresh(device: torch.device) -> dict[str, Any]:
    results = []
    for name, windows in (
        ("1 full", (None,)),
        *((f"{n} full", (None,) * n) for n in (2, 4, 8)),
        *((f"{n - 1} windowed, 1 full", (WINDOW,) * (n - 1) + (None,)) for n in (2, 4, 8)),
    ):
        rig = _Refresh(windows, device)
        nbytes = sum(t.nbytes for _, t in rig.manager.buffers.named() if t.device.type == device.type)
        result: dict[str, Any] = {"groups": name, "buffer_bytes": nbytes}
        for what in STEPS:
            rig.put(what)
            result[what] = {**asdict(rig.time()), "record_us": rig.time_record().median_us}
        results.append(result)
        rig.close()
        shown = [f"{what} {result[what]['median_us']:.2f} ({result[what]['record_us']:.2f}) us" for what in STEPS]
        print(f"refresh of {name} (step inputs alone): {', '.join(shown)}", flush=True)
    kinds = []
    for count in (1, 2, 3):
        windows = (None, WINDOW, 512)[:count]
        rig = _Refresh(windows, device)
        rig.put("no delta")
        kinds.append({"kinds": count, **asdict(rig.time(schedule=True)), "refresh_us": rig.time().median_us})
        rig.close()
        print(f"refresh and schedules of {count} kinds: {kinds[-1]['median_us']:.2f} us", flush=True)
    return {"rows": ROWS, "length": LENGTH, "max_seq_len": LONGEST, "refresh": results, "schedules": kinds}


def bench_model(device: torch.device, batch: int, context: int, steps: int) -> dict[str, Any]:
    config = GEMMA_LIKE
    model = load_model(config, device=device, dtype=torch.bfloat16, max_positions=context + steps).model
    attention = config.attention_specs(torch.bfloat16)
    sides = {
        "groups": kv_groups(attention, page_size=16, dtype=torch.bfloat16),
        "one_table": (KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, 16),),
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for name in ("groups", "one_table", "groups", "one_table"):
        report = bench_decode(name, model, sides[name], DecodeWork([batch], context, steps))
        (result,) = report.results
        runs[name].append({"replay_ms": result.replay_ms, "floor_ms": result.floor_ms, "host_us": result.host_us})
        print(f"{name}: {result.replay_ms:.3f} ms per step, floor {result.floor_ms:.3f} ms", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    memory = {name: kv_memory(groups, batch, context, context + steps)[1] for name, groups in sides.items()}
    best = {name: min(run["replay_ms"] for run in of_side) for name, of_side in runs.items()}
    return {
        "batch": batch,
        "context": context,
        "layers": [spec.sliding_window for spec in attention],
        "groups": [list(group.layers or ()) for group in sides["groups"]],
        "kv_bytes": memory,
        "kv_ratio": memory["groups"] / memory["one_table"],
        "runs": runs,
        "step_ratio": best["groups"] / best["one_table"],
    }


@dataclass(frozen=True)
class _CrossCell:
    """Requests of one decode step, and the encoder tokens of each."""

    name: str
    rows: int
    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 16

    @property
    def nbytes(self) -> int:
        """Return K and V of one layer."""
        return 2 * self.rows * self.tokens * self.kv_heads * self.head_dim * self.dtype.itemsize


CROSS_CELLS = (
    _CrossCell("whisper", 32, 1500, 16, 16, 64, torch.float16),
    _CrossCell("whisper", 128, 1500, 16, 16, 64, torch.float16),
    _CrossCell("grouped", 64, 1024, 32, 8, 128),
    _CrossCell("grouped", 256, 1024, 32, 8, 128),
)


def _attention_calls(cell: _CrossCell, kind: AttentionKind, device: torch.device) -> tuple[ReplayManager, list[Any]]:
    """Return calls for the attention of each layer with the schedule of one step, and the manager that owns the
    tensors."""
    layers, cross = max(2, rotations(cell.nbytes, device)), kind is AttentionKind.CROSS
    spec = AttentionSpec(cell.q_heads, cell.kv_heads, cell.head_dim, cell.dtype, kind=kind)
    group = KVCacheSpec(layers, cell.kv_heads, cell.head_dim, cell.page_size, dtype=cell.dtype, cross=cross)
    per_row = group.pages_for(cell.tokens)
    cache = KVCache.allocate(group, 1 + cell.rows * per_row, device)
    for tensor in (*cache.k, *cache.v):
        tensor.normal_()
    config = RuntimeConfig(
        max_num_reqs=cell.rows, max_num_tokens=cell.rows, max_seq_len=cell.tokens, backend="triton",
        max_encoder_len=cell.tokens if cross else None, decode_sizes=(cell.rows,), mixed_sizes=(),
    )  # fmt: skip

    def model(step: Any) -> torch.Tensor:
        return torch.zeros(cell.rows, 8, device=device)

    manager = ReplayManager(model, cache, [spec] * layers, vocab_size=8, config=config)
    manager.capture()
    batch = Batch(
        req_indices=np.arange(cell.rows, dtype=np.int32),
        seq_lens=np.full(cell.rows, 1 if cross else cell.tokens, np.int32),
        encoder_lens=np.full(cell.rows, cell.tokens if cross else 0, np.int32),
        tokens=np.ones(cell.rows, np.int32),
        page_indptr=np.arange(cell.rows + 1, dtype=np.int32) * per_row,
        page_ids=np.random.default_rng(0).permutation(cell.rows * per_row).astype(np.int32) + 1,
    )
    manager.replay(batch).tokens()
    step = manager._program.view(BatchDescriptor.decode(cell.rows))  # with the buffers that the replay wrote
    step.backend.schedule(step.metadata)
    q = torch.randn(layers, cell.rows, cell.q_heads, cell.head_dim, dtype=cell.dtype, device=device)
    outs = torch.empty_like(q)

    def attend(layer: int) -> torch.Tensor:
        step.backend.run(step.layers[layer], q[layer], step.metadata, outs[layer])
        return outs[layer]

    out, pages = attend(0), torch.from_numpy(batch.page_ids).long().to(device).view(cell.rows, per_row)
    for row in (0, cell.rows - 1):
        k, v = (caches[0][pages[row]].flatten(0, 1)[: cell.tokens] for caches in (cache.k, cache.v))
        check_token(q[0, row], k, v, spec.scale, out[row], what=f"{cell.name}, row {row}")
    return manager, [partial(attend, layer) for layer in range(layers)]


def bench_cross(device: torch.device) -> dict[str, Any]:
    bandwidth = measure_read_bandwidth(device)
    cells = []
    for cell in CROSS_CELLS:
        result: dict[str, Any] = {**asdict(cell), "dtype": str(cell.dtype), "nbytes": cell.nbytes}
        for kind in (AttentionKind.CROSS, AttentionKind.DECODER):
            with torch.inference_mode():
                manager, calls = _attention_calls(cell, kind, device)
                spacer = time_calls(spacer_calls([call() for call in calls]), device=device).median_us
                timing = time_calls(spaced_calls(calls, device), device=device)
            us = timing.median_us - spacer
            result[kind.value] = {**asdict(timing), "spacer_us": spacer, "us": us, "tb_per_s": cell.nbytes / us * 1e-6}
            manager.close()
            del manager, calls
            gc.collect()
            torch.cuda.empty_cache()
        cells.append(result)
        print(
            f"{cell.name}: {cell.nbytes / 1e6:.0f} MB, cross {result['cross']['tb_per_s']:.2f} TB/s, causal "
            f"{result['decoder']['tb_per_s']:.2f}, sweep {bandwidth * 1e-12:.2f}",
            flush=True,
        )
    return {"read_tb_per_s": bandwidth * 1e-12, "cells": cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("refresh", "model", "cross"))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=32)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, got none")
    device = torch.device("cuda", 0)
    record: dict[str, Any] = {"name": "groups", **provenance()}
    if options.only in (None, "refresh"):
        record["refresh"] = bench_refresh(device)
    if options.only in (None, "cross"):
        record["cross"] = bench_cross(device)
    if options.only in (None, "model"):
        record["model"] = bench_model(device, options.batch, options.context, options.steps)
        print(
            f"KV memory {record['model']['kv_ratio']:.3f}, step time {record['model']['step_ratio']:.4f} of one table"
        )
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
