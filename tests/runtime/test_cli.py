"""The command line as a user meets it: answers on standard output, all else on standard error, no tracebacks."""

from __future__ import annotations

import json
import sys

import pytest

from graphrt.cli import main as cli

SKY = "Why is the sky blue?"


def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["graphrt", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capfd.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.fixture
def graphrt(monkeypatch, capfd):
    return lambda *arguments: call(monkeypatch, capfd, *arguments)


def test_generate_answers_alone_in_a_batch_and_without_graphs(graphrt) -> None:
    options = ("--device", "cpu", "--max-new-tokens", "16")
    code, alone, log = graphrt("generate", SKY, *options)
    assert code == 0
    assert "light" in alone
    assert "captured" in log
    assert "op-tape" in log
    code, batch, _ = graphrt("generate", SKY, "Hi", *options)
    assert code == 0
    assert batch.startswith("[")
    assert f"[1] {SKY}\n{alone.strip()}\n" in batch
    assert "[2] Hi\n" in batch
    code, eager, log = graphrt("generate", SKY, *options, "--no-graphs", "--stats")
    assert (code, eager) == (0, alone)
    assert "graphs are switched off" in log
    assert "captured" not in log


def test_generate_samples_by_seed(graphrt) -> None:
    options = ("--device", "cpu", "--max-new-tokens", "8", "--temperature", "1.5")
    first, again, other = (graphrt("generate", SKY, *options, "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--model", "/nowhere/model.gguf"), "ConfigError: model: expected a folder, a .gguf file"),
        (("--device", "tpu"), "ConfigError: device: expected cpu, cuda or cuda:N, got 'tpu'"),
        (("--device", "cuda:99"), "ConfigError: device: expected one of"),
        (("--dtype", "int3"), "ConfigError: --dtype: expected auto, float32"),
        (("--temperature", "-1"), "ConfigError: temperature: expected a finite number >= 0, got -1.0"),
        (("--max-new-tokens", "0"), "ConfigError: max_new_tokens: expected an int from 1 to 1073741824, got 0"),
        (("--max-new-tokens", "9999"), "CapacityError: prompt: expected prompt and output within the model's"),
        (("--device", "cpu", "--backend", "flashy"), "ConfigError: backend: expected one of triton"),
        (("--device", "cpu", "--page-size", "0"), "ConfigError: KVCacheSpec.page_size: expected an int from 1 to 1024"),
    ],
    ids=lambda x: x[-1] if isinstance(x, tuple) else None,
)
def test_errors_have_text_and_no_traceback(graphrt, arguments: tuple[str, ...], text: str) -> None:
    code, out, err = graphrt("generate", SKY, *arguments)
    assert code == 1
    assert out == ""
    assert text in err.replace("\n", " ")
    assert "Traceback" not in err


def test_bench_decode_ends_in_one_json_line(graphrt) -> None:
    sizes = ("--batch", "1,2", "--context", "16", "--steps", "2")
    code, out, _ = graphrt("bench", "decode", "--shape", "smollm2-135m", *sizes, "--device", "cpu")
    assert code == 0
    record = json.loads(out.splitlines()[-1])
    assert [r["batch"] for r in record["results"]] == [1, 2]
    assert all(r["replay_ms"] > r["floor_ms"] > 0 and r["eager_ms"] > 0 for r in record["results"])
    assert record["results"][0]["kv_bytes"] * 2 == record["results"][1]["kv_bytes"]
    assert record["decode_graphs"] == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "expected one of --shape and --model, got both or none"),
        (("--shape", "llama-9000"), "shape: expected one of llama-3.1-8b"),
        (("--shape", "smollm2-135m", "--batch", "1,x"), "--batch: expected comma-separated numbers >= 1, got '1,x'"),
    ],
    ids=["none", "unknown", "batch"],
)
def test_bench_errors(graphrt, arguments: tuple[str, ...], text: str) -> None:
    code, _, err = graphrt("bench", "decode", *arguments)
    assert code == 1
    assert text in err.replace("\n", " ")


def test_env_reports_backends_and_reasons(graphrt) -> None:
    code, out, _ = graphrt("env", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["packages"]["torch"]
    names = {b["name"]: b["why_not"] for b in report["backends"]["known"]}
    assert names["torch_reference"] == []
    assert report["backends"]["chosen"] in names
    code, table, _ = graphrt("env")
    assert code == 0
    assert "torch_reference" in table
    assert "triton" in table
