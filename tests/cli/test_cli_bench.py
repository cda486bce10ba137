"""`graphrt bench decode`, `graphrt bench serve` and `graphrt env`."""

from __future__ import annotations

import json

import pytest


def test_bench_decode_ends_in_one_json_line(graphrt) -> None:
    sizes = ("--batch", "1,2", "--context", "16", "--steps", "2")
    code, out, _ = graphrt("bench", "decode", "--shape", "smollm2-135m", *sizes, "--device", "cpu")
    assert code == 0
    record = json.loads(out.splitlines()[-1])
    assert [r["batch"] for r in record["results"]] == [1, 2]
    assert all(r["replay_ms"] > r["floor_ms"] > 0 for r in record["results"])
    assert record["results"][0]["kv_bytes"] * 2 == record["results"][1]["kv_bytes"]
    assert record["decode_graphs"] == 2
    assert record["baselines"] == []


def test_bench_serve_ends_in_one_json_line(graphrt) -> None:
    sizes = ("--requests", "3", "--least", "2", "--most", "5", "--rows", "2", "--step-tokens", "8")
    code, out, _ = graphrt("bench", "serve", "--shape", "smollm2-135m", *sizes, "--device", "cpu")
    assert code == 0
    assert "output tokens/s" in out
    record = json.loads(out.splitlines()[-1])
    assert record["workload"] == {
        "requests": 3, "least": 2, "most": 5, "seed": 0, "sampling": {"temperature": 0.6}
    }  # fmt: skip
    assert record["tokens_per_s"] == record["output_tokens"] / record["seconds"] > 0
    assert 0 < record["busy_share"] < 1
    assert 0 < record["share_of_floor"] < 1


SAMPLED = (
    "--temperature", "0.7", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.1",
    "--presence-penalty", "0.2", "--frequency-penalty", "0.3", "--logit-bias", "5=-inf", "--logprobs", "2",
)  # fmt: skip
SAMPLING = {
    "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.2,
    "frequency_penalty": 0.3, "logit_bias": {"5": "-inf"}, "logprobs": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "sizes", "found"),
    [
        ("decode", ("--batch", "2", "--context", "16", "--steps", "2"), lambda record: record["sampling"]),
        (
            "serve", ("--requests", "2", "--least", "2", "--most", "3", "--rows", "2", "--step-tokens", "8"),
            lambda record: record["workload"]["sampling"],
        ),
    ],
)  # fmt: skip
def test_benchmarks_sample_as_they_are_told(graphrt, command: str, sizes: tuple[str, ...], found) -> None:
    shape = ("--shape", "smollm2-135m", "--device", "cpu")
    code, out, _ = graphrt("bench", command, *shape, *sizes, *SAMPLED)
    assert code == 0
    assert found(json.loads(out.splitlines()[-1])) == SAMPLING
    code, out, err = graphrt("bench", command, *shape, *sizes, "--logit-bias", "99999999=1")
    assert (code, out) == (1, "")
    assert "--logit-bias: expected token ids below " in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--shape", "llama-9000"), "shape: expected one of llama-3.1-8b"),
        (("--least", "9", "--most", "3"), "least: expected an int from 1 to 3, got 9"),
        (("--shape", "smollm2-135m", "--device", "cpu", "--step-tokens", "3"), "step_tokens: expected at least 256"),
        (("--temperature", "-1"), "temperature: expected a finite number >= 0, got -1.0"),
    ],
    ids=lambda x: " ".join(x)[-30:] if isinstance(x, tuple) else "",
)
def test_bench_serve_errors(graphrt, arguments: tuple[str, ...], text: str) -> None:
    code, out, err = graphrt("bench", "serve", *arguments)
    assert (code, out) == (1, "")
    assert text in err.replace("\n", " ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "expected one of --shape and --model, got none"),
        (("--shape", "smollm2-135m", "--model", "x"), "expected one of --shape and --model, got both"),
        (("--shape", "llama-9000"), "shape: expected one of llama-3.1-8b"),
        (("--shape", "smollm2-135m", "--batch", "1,x"), "--batch: expected comma-separated numbers >= 1, got '1,x'"),
        (("--shape", "smollm2-135m", "--batch", ""), "--batch: expected comma-separated numbers >= 1, got ''"),
        (("--shape", "smollm2-135m", "--batch", "1,"), "--batch: expected comma-separated numbers >= 1, got '1,'"),
        (("--shape", "smollm2-135m", "--batch", "0"), "--batch: expected comma-separated numbers >= 1, got '0'"),
        (("--shape", "smollm2-135m", "--batch", "9" * 5000), "--batch: expected comma-separated numbers >= 1"),
        (("--shape", "smollm2-135m", "--baseline", "vllm"), "--baseline: expected transformers, got 'vllm'"),
        (("--model", "dummy:llama-9000"), "shape: expected one of llama-3.1-8b"),
        (("--shape", "smollm2-135m", "--context", str(10**12)), "ConfigError: max_positions: expected"),
        (("--shape", "smollm2-135m", "--device", "cpu", "--batch", "65536", "--context", "99999"), "CapacityError"),
        (
            ("--shape", "smollm2-135m", "--device", "cpu", "--batch", "999999"),
            "ConfigError: RuntimeConfig.max_num_reqs: expected an int from 1 to 65536, got 999999",
        ),
    ],
    ids=lambda x: " ".join(x)[-30:] if isinstance(x, tuple) else "",
)
def test_bench_errors(graphrt, arguments: tuple[str, ...], text: str) -> None:
    code, out, err = graphrt("bench", "decode", *arguments)
    assert (code, out) == (1, "")
    assert text in err.replace("\n", " ")
    assert "Traceback" not in err


def test_env_reports_backends_and_reasons(graphrt) -> None:
    code, out, _ = graphrt("env", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["packages"]["torch"]
    names = {b["name"]: b["unsupported_reasons"] for b in report["backends"]["known"]}
    assert names["torch_reference"] == []
    assert report["backends"]["chosen"] in names
    code, table, _ = graphrt("env")
    assert code == 0
    assert "torch_reference" in table
    assert "triton" in table
