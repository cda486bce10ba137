"""The vLLM benchmark with an engine that counts instead of decoding; its figures need vLLM and a GPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts import bench_vllm_plugin as bench


class CountingEngine:
    """Token n of each request is n; the second best logit is 0.5 lower."""

    llm_engine = SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16))
    )

    def generate(self, prompts: list[Any], params: SimpleNamespace, use_tqdm: bool) -> list[Any]:
        time.sleep(0.002 * params.max_tokens)
        steps = [
            {n: SimpleNamespace(logprob=-0.1), n + 1: SimpleNamespace(logprob=-0.6)} for n in range(params.max_tokens)
        ]
        output = SimpleNamespace(token_ids=list(range(params.max_tokens)), logprobs=steps)
        return [SimpleNamespace(outputs=[output]) for _ in prompts]


def test_a_cell_is_timed_and_its_tokens_have_margins() -> None:
    found = bench.measure(CountingEngine(), SimpleNamespace, batch=2, context=16, steps=8)
    assert found["step_ms"] == pytest.approx(2.0, rel=0.5)
    assert found["tokens"] == [[(n, pytest.approx(0.5)) for n in range(10)]] * 2
    assert "room for 160 tokens" in bench.measure(CountingEngine(), SimpleNamespace, 9, 16, 8)["reason"]


def test_tokens_may_differ_only_at_small_margins() -> None:
    theirs = [[(1, 3.0), (2, 0.2), (3, 3.0)], [(1, 3.0), (2, 3.0), (3, 3.0)]]
    ours = [[(1, 3.0), (7, 0.2), (8, 3.0)], [(1, 3.0), (2, 3.0), (3, 3.0)]]
    found = bench.compare(ours, theirs)
    assert found == {"equal_tokens": 4, "requests_that_differ": 1, "largest_margin": 0.2, "tokens_agree": True}
    ours[1][2] = (9, 3.0)
    assert not bench.compare(ours, theirs)["tokens_agree"]


def test_weights_are_equal_in_every_process() -> None:
    models = [torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(64, 64), "norm": torch.nn.LayerNorm(64)}) for _ in "ab"]
    for model in models:
        bench.randomize(model)
    first, second = (torch.nn.utils.parameters_to_vector(model.parameters()) for model in models)
    assert torch.equal(first, second)
    assert models[0]["qkv_proj"].weight.std().item() == pytest.approx(2 / 8, rel=0.1)
    assert models[0]["norm"].weight.eq(1.0).all()


def test_the_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(command: list[str], **options: object) -> None:
        backend = command[command.index("--backend") + 1]
        step_ms = {"FLASH_ATTN": 10.0, "CUSTOM": 8.0}[backend]
        measured = {"step_ms": step_ms, "tokens": [[(1, 0.5)]]}
        Path(command[-1]).write_text(json.dumps([measured, {"reason": "the KV cache has room for 7 tokens"}]))

    monkeypatch.setattr(bench.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench_vllm_plugin", "--cells", "4x8,9x8"])
    monkeypatch.setattr("graphrt.bench.environment.provenance", lambda: {"gpu": "none"})
    bench.main()
    *lines, report = capsys.readouterr().out.strip().splitlines()
    assert "graphrt 8.00 ms (0.800), tokens agree" in lines[0]
    assert "room for 7 tokens" in lines[1]
    first, second = json.loads(report)["results"]
    assert (first["vllm_ms"], first["graphrt_ms"], first["ratio"], first["equal_tokens"]) == (10.0, 8.0, 0.8, 1)
    assert second == {"batch": 9, "context": 8, "reason": "the KV cache has room for 7 tokens"}
