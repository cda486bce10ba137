"""The decode benchmark: its sizes, its baseline by `transformers`, its dry run; its figures need a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from graphrt.bench import decode_transformers as baseline
from graphrt.bench.decode import DecodeReport, DecodeWork, bench_decode
from graphrt.kernels.errors import CapacityError, ConfigError, UnsupportedError
from graphrt.kernels.types import KVLayout
from graphrt.models.config import ModelConfig
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import load_model
from graphrt.models.quantization import Quantization
from graphrt.models.rope import RopeConfig
from graphrt.models.shapes import SHAPES
from scripts import make_docs
from tests.support.model_fixtures import PROMPT, check_logits, make_oracle, oracle_logits, save_oracle

CPU = torch.device("cpu")
TINY = ModelConfig(
    architecture="llama", vocab_size=97, hidden_size=48, intermediate_size=64, num_layers=2, num_q_heads=6,
    num_kv_heads=2, head_dim=8, max_position_embeddings=64,
    rope=RopeConfig("llama3", 100.0, 8.0, 32, low_freq_factor=1.0, high_freq_factor=4.0),
)  # fmt: skip


def num_parameters(config: ModelConfig) -> int:
    model = LlamaModel(config, dtype=torch.bfloat16, device=torch.device("meta"))
    return sum(p.numel() for p in model.parameters())


def bench(**options: Any) -> DecodeReport:
    model = load_model(TINY, device=CPU).model
    groups = TINY.kv_groups(16, KVLayout.NHD, torch.float32)
    work = DecodeWork(**{"batches": (1, 2), "context": 5, "steps": 2, "backend": "torch_reference"} | options)
    return bench_decode("tiny", model, groups, work)


def test_report() -> None:
    report = bench(batches=[2, 1, 2])
    assert [r.batch for r in report.results] == [1, 2]
    first = report.results[0]
    assert first.kv_bytes == (5 + 1) * TINY.num_layers * 2 * 2 * 8 * 4
    assert first.weight_bytes == 4 * (num_parameters(TINY) - TINY.vocab_size * TINY.hidden_size), "no embedding"
    assert first.floor_ms == pytest.approx((first.weight_bytes + first.kv_bytes) / report.read_tb_s / 1e9)
    assert 0 < first.host_us_p20 <= first.host_us <= first.host_us_p80
    assert first.host_steps >= 2
    record = json.loads(json.dumps(report.to_json()))
    assert record["baselines"] == []
    assert record["results"][0]["share_of_floor"] == first.floor_ms / first.replay_ms


@pytest.mark.parametrize(
    ("quantization", "bits"), [(Quantization(8), 8), (Quantization(4, 32), 4)], ids=["fp8", "int4"]
)
def test_the_floor_counts_the_bytes_of_quantized_weights(quantization: Quantization, bits: int) -> None:
    sizes = {"hidden_size": 64, "num_q_heads": 8, "quantization": replace(quantization, plain=frozenset(("lm_head",)))}
    model = load_model(replace(TINY, **sizes), device=CPU).model
    layer, matrices = model.layers[0], 64 * (64 + 2 * 16 + 64) + 3 * 64 * 64
    scales = 4 * (64 + 2 * 16 + 64 + 3 * 64) if bits == 8 else matrices // 32 * (4 + 1)
    assert sum(weight.nbytes for weight in layer.parameters()) == matrices * bits // 8 + scales + 2 * 64 * 4
    assert model.streamed_bytes == 2 * sum(w.nbytes for w in layer.parameters()) + 4 * 64 * (97 + 1)


@pytest.mark.gpu
def test_host_time_is_of_many_steps() -> None:
    model = load_model("dummy:smollm2-135m", device="cuda", max_positions=64).model
    groups = model.config.kv_groups(16, KVLayout.NHD, model.dtype)
    report = bench_decode("x", model, groups, DecodeWork((1,), 20, 30))
    assert report.results[0].host_steps >= 200


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batches": ()}, ConfigError, "batches: expected one or more sizes, got ()"),
        ({"batches": (1, 0)}, ConfigError, "batches: expected an int >= 1, got 0"),
        ({"context": 0}, ConfigError, "context: expected an int from 1 to"),
        ({"steps": 0}, ConfigError, "steps: expected an int from 1 to"),
        ({"batches": (1 << 16,), "context": 1 << 20}, CapacityError, "batches: expected a KV cache of at most"),
    ],
)
def test_sizes_are_checked(options: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        bench(**options)
    assert str(caught.value).startswith(text)


# The baseline


@pytest.mark.parametrize("name", SHAPES)
def test_the_baseline_has_the_shape(name: str) -> None:
    config = baseline.hf_config(SHAPES[name])
    model = baseline.build_model(config.to_dict(), torch.device("meta"), torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == num_parameters(SHAPES[name])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_the_baseline_is_the_same_model(architecture: str) -> None:
    """A model of the described shape takes the weights of the described model and gives its logits."""
    oracle = make_oracle(architecture, **({"head_dim": 16} if architecture == "Qwen3" else {}))
    ours = ModelConfig.from_hf(oracle.config.to_dict() | {"architectures": None})
    made = baseline.build_model(baseline.hf_config(ours).to_dict(), CPU, torch.float32)
    made.load_state_dict(oracle.state_dict())
    torch.testing.assert_close(oracle_logits(made, PROMPT), oracle_logits(oracle, PROMPT), atol=1e-5, rtol=0)
    model = LlamaModel(ours, dtype=torch.float32, device=CPU)
    model.load_weights(made.state_dict())
    check_logits(model, made)


def test_every_way_of_scaling_positions_is_described() -> None:
    factors = (1.0, 1.1, 1.2, 1.3)
    ropes = [
        RopeConfig(), TINY.rope, RopeConfig("linear", 1e4, 4.0), RopeConfig("dynamic", 1e4, 2.0, 64),
        RopeConfig("yarn", 1e4, 4.0, 16),
        RopeConfig("longrope", 1e4, 4.0, 16, short_factor=factors, long_factor=factors),
    ]  # fmt: skip
    for rope in ropes:
        config = baseline.hf_config(replace(TINY, rope=rope))
        model = baseline.build_model(config.to_dict(), CPU, torch.float32)
        inverse, _ = rope.inverse_frequencies(8, 64, 64)
        if rope.kind != "longrope":  # chosen by the length of each call there
            torch.testing.assert_close(model.model.rotary_emb.inv_freq, inverse, rtol=1e-5, atol=0)


def test_a_shape_that_cannot_be_described_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="baseline: expected a model that rotates whole heads, got 4 of 8"):
        baseline.hf_config(replace(TINY, rotary_dim=4))


@pytest.mark.parametrize("make", [transformers.DynamicCache, transformers.StaticCache], ids=["dynamic", "static"])
def test_a_filled_cache_is_continued(make: type) -> None:
    model = baseline.build_model(baseline.hf_config(TINY).to_dict(), CPU, torch.float32)
    options = {"max_cache_len": 12} if make is transformers.StaticCache else {}
    cache = make(config=model.config, **options)
    baseline.fill_cache(cache, model, 3, 9)
    assert int(cache.get_seq_length()) == 9
    assert cache.layers[1].keys[:, :, :9].std() > 0.5
    with torch.no_grad():
        before = [layer.keys[:, :, :9].clone() for layer in cache.layers]
        logits = model(input_ids=torch.ones(3, 1, dtype=torch.int64), past_key_values=cache, use_cache=True).logits
    assert int(cache.get_seq_length()) == 10
    assert logits.shape == (3, 1, 97)
    assert len({tuple(row) for row in logits[:, 0].tolist()}) == 3, "rows differ in their caches alone"
    assert all(torch.equal(k, layer.keys[:, :, :9]) for k, layer in zip(before, cache.layers, strict=True))


OPTIONS = {"context": 6, "device": CPU, "dtype": torch.float32}


def test_a_baseline_that_takes_too_long_or_dies_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    (late,) = baseline.time_transformers(TINY, batches=(2,), **OPTIONS, limit_seconds=0.01)
    assert late == baseline.BaselineTime("dynamic", 2, reason="not measured: no result after 0.01 s")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (dead,) = baseline.time_transformers(TINY, batches=(2,), **OPTIONS)
    assert dead.reason.startswith("not measured: the process ended with 1")


def test_results_that_came_before_the_end_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    line = baseline._MARK + '{"way": "dynamic", "batch": 2, "ms": 1.5, "ms_spread": 0.1, "reason": null}'
    monkeypatch.setattr(baseline, "_run_child", lambda *_: (f"noise\n{line}\nnoise", "no result after 9 s"))
    one, two, compiled = baseline.time_transformers(TINY, batches=(1, 2), **OPTIONS)
    assert two.ms == 1.5
    assert one.reason == compiled.reason == "not measured: no result after 9 s"


# The command, the job and the table


def test_dry_run(tmp_path: Path) -> None:
    save_oracle(tmp_path, "Llama")
    command = [sys.executable, "-m", "graphrt", "bench", "decode", "--model", str(tmp_path), "--device", "cpu"]
    command += ["--batch", "2,1", "--context", "20", "--steps", "2", "--baseline", "transformers"]
    root = Path(make_docs.ROOT)
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    *shown, last = result.stdout.splitlines()
    record = json.loads(last)
    assert [r["batch"] for r in record["results"]] == [1, 2]
    assert [(b["way"], b["batch"]) for b in record["baselines"]] == [("dynamic", 1), ("dynamic", 2), ("static", 1)]
    assert all(b["ms"] > 0 for b in record["baselines"][:2])
    text = "\n".join(shown)
    assert "transformers" in text
    assert "static, batch 1: not measured: UnsupportedError: static: expected a CUDA device, got a CPU" in text


def test_the_table_of_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"batch": 1, "context": 9, "floor_ms": 3.0, "replay_ms": 4.0, "share_of_floor": 0.75}
    result |= {"host_us": 80.4, "host_us_p20": 70.2, "host_us_p80": 99.7}
    baselines = [
        {"way": "dynamic", "batch": 1, "ms": 20.0, "ms_spread": 1.0, "reason": None},
        {"way": "static", "batch": 1, "ms": 6.0, "ms_spread": 1.0, "reason": None},
        {"way": "dynamic", "batch": 2, "ms": None, "ms_spread": None, "reason": "not measured: too large"},
    ]
    report = {"model": "m", "results": [result, result | {"batch": 2}], "baselines": baselines}
    folder = tmp_path / "docs" / "results" / "nvidia-h200"
    folder.mkdir(parents=True)
    origin = {"gpu": "G", "torch": "1", "triton": "2", "tree": "abc", "name": "decode"}
    (folder / "decode.json").write_text(json.dumps(origin | {"data": {"reports": [report]}}))
    source = make_docs.ROOT / "docs" / "results" / "nvidia-h200" / "capture.json"
    (folder / "capture.json").write_text(source.read_text())
    monkeypatch.setattr(make_docs, "ROOT", tmp_path)
    table = make_docs.results_table()
    assert "| m | 1 | 9 | 3.00 | 4.00 | 75 % | 20.00 (5.0 x) | 80 (70 to 100) |" in table
    assert "| m | 2 | 9 | 3.00 | 4.00 | 75 % | not measured: too large | 80 (70 to 100) |" in table
    assert "m at batch 1: 6.00 (1.5 x)." in table
    assert "eager" not in table
