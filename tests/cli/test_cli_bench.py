"""`graphrt bench decode`, `graphrt bench serve` and `graphrt env`."""

from __future__ import annotations

import json

import pytest

from graphrt.bench import speculation
from graphrt.session.session import DecodeSession

SAMPLED = (
    "--temperature", "0.7", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.1",
    "--presence-penalty", "0.2", "--frequency-penalty", "0.3", "--logit-bias", "5=-inf", "--logprobs", "2",
)  # fmt: skip
SAMPLING = {
    "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.2,
    "frequency_penalty": 0.3, "logit_bias": {"5": "-inf"}, "logprobs": 2,
}  # fmt: skip


def bench(graphrt, command: str, *sizes: str) -> tuple[str, dict]:
    """Run a benchmark with all sampling options. Return its table and its last line, which is JSON."""
    arguments = ("bench", command, "--shape", "smollm2-135m", "--device", "cpu", *sizes)
    code, out, _ = graphrt(*arguments, *SAMPLED)
    assert code == 0
    return out, json.loads(out.splitlines()[-1])


def test_bench_decode_ends_in_one_json_line(graphrt) -> None:
    _, record = bench(graphrt, "decode", "--batch", "1,2", "--context", "16", "--steps", "2")
    assert record["sampling"] == SAMPLING
    assert [r["batch"] for r in record["results"]] == [1, 2]
    assert all(r["replay_ms"] > r["floor_ms"] > 0 for r in record["results"])
    assert record["results"][0]["kv_bytes"] * 2 == record["results"][1]["kv_bytes"]
    assert record["decode_graphs"] == 2
    assert record["baselines"] == []


@pytest.mark.parametrize(
    ("source", "drafts", "shown"),
    [("ngram", 3, "prompt lookup"), ("dummy:smollm2-135m", 1, "dummy:smollm2-135m")],
    ids=["ngram", "draft_model"],
)
def test_bench_decode_with_drafts(graphrt, monkeypatch, source: str, drafts: int, shown: str) -> None:
    """All drafts are accepted, so a step yields 1 + K tokens; `accepted_per_step` shows it.

    Times are compared at the same positions: each round adds as many tokens with drafts as without.
    """
    lengths: dict[DecodeSession, list[int]] = {}
    run = DecodeSession.run

    def counted(session: DecodeSession, steps: int) -> None:
        run(session, steps)
        session.collect(wait=True)
        lengths.setdefault(session, []).append(len(session.requests[0].tokens))

    monkeypatch.setattr(DecodeSession, "run", counted)
    monkeypatch.setattr(speculation, "_ROUNDS", 2)
    sizes = ("--batch", "1", "--context", "32", "--steps", "1", "--speculate", source, "--drafts", str(drafts))
    arguments = ("bench", "decode", "--shape", "smollm2-135m", "--device", "cpu", *sizes)
    code, out, _ = graphrt(*arguments)
    assert code == 0
    record = json.loads(out.splitlines()[-1])
    assert record["speculate"] == source
    (found,) = record["speculation"]
    assert (found["batch"], found["context"], found["num_drafts"]) == (1, 32, drafts)
    assert found["accepted_per_step"] == 1 + drafts
    assert 0 < found["accepted_ms"] < found["rejected_ms"]
    assert f"batch 1, {drafts} drafts by {shown}, ms per token" in out
    plain, accepted, rejected = lengths.values()
    ends = plain[-2], accepted[-2], rejected[-1]  # host time was measured in one more step of the first two
    assert max(ends) - min(ends) <= drafts  # a draft model has no draft for the first step


def test_host_times_of_drafts_are_of_launches_that_wait_for_none(graphrt, monkeypatch) -> None:
    """While host times are measured, no launch is in flight before a launch."""
    in_flight: dict[DecodeSession, list[int]] = {}
    run = DecodeSession.run

    def counted(session: DecodeSession, steps: int) -> None:
        in_flight.setdefault(session, []).append(len(session.launches.pending))
        run(session, steps)

    monkeypatch.setattr(DecodeSession, "run", counted)
    monkeypatch.setattr(speculation, "_ROUNDS", 1)
    monkeypatch.setattr(speculation, "_STEPS_PER_LAUNCH", 1)
    sizes = ("--batch", "1", "--context", "32", "--steps", "3", "--speculate", "ngram", "--drafts", "1")
    code, out, _ = graphrt("bench", "decode", "--shape", "smollm2-135m", "--device", "cpu", *sizes)
    assert code == 0
    (found,) = json.loads(out.splitlines()[-1])["speculation"]
    assert found["host_us"] > 0
    assert found["plain_host_us"] > 0
    plain, accepted, rejected = in_flight.values()
    for counts, steps in ((plain[:-3], 6), (accepted[:-3], 3), (rejected, 6)):
        assert max(counts) == steps - 1, "the timed rounds queue launches"
    assert plain[-3:] == accepted[-3:] == [0, 0, 0]


def test_bench_serve_ends_in_one_json_line(graphrt) -> None:
    sizes = ("--requests", "3", "--least", "2", "--most", "5", "--rows", "2", "--step-tokens", "8")
    table, record = bench(graphrt, "serve", *sizes)
    assert "output tokens/s" in table
    assert record["workload"] == {"requests": 3, "least": 2, "most": 5, "seed": 0, "sampling": SAMPLING}
    assert record["tokens_per_s"] == record["output_tokens"] / record["seconds"] > 0
    assert 0 < record["busy_share"] < 1
    assert 0 < record["share_of_floor"] < 1


ERRORS = [
    *(
        (f"{command} --shape smollm2-135m --device cpu --logit-bias 99999999=1", "--logit-bias: expected token ids")
        for command in ("decode", "serve")
    ),
    ("serve --least 9 --most 3", "least: expected an int from 1 to 3, got 9"),
    ("serve --shape smollm2-135m --device cpu --step-tokens 3", "step_tokens: expected at least 256"),
    ("serve --temperature -1", "temperature: expected a finite number >= 0, got -1.0"),
    ("decode --shape smollm2-135m --device cpu --speculate dummy:llama-9000", "shape: expected one of llama-3.1-8b"),
    ("decode --shape smollm2-135m --device cpu --speculate nrgam", "--speculate: expected ngram or a draft model, got"),
    ("decode --shape smollm2-135m --device cpu --drafts 3", "--drafts: requires --speculate, got --drafts 3"),
    ("decode", "expected one of --shape and --model, got none"),
    ("decode --shape smollm2-135m --model x", "expected one of --shape and --model, got both"),
    ("decode --shape llama-9000", "shape: expected one of llama-3.1-8b"),
    ("decode --model dummy:llama-9000", "shape: expected one of llama-3.1-8b"),
    *(
        (f"decode --shape smollm2-135m --batch {batch}", f"--batch: expected comma-separated numbers >= 1, got '{text}")
        for batch, text in (("1,x", "1,x'"), ("1,", "1,'"), ("0", "0'"), ("9" * 5000, "9999"))
    ),
    ("decode --shape smollm2-135m --baseline vllm", "--baseline: expected transformers, got 'vllm'"),
    (f"decode --shape smollm2-135m --context {10**12}", "ConfigError: context: expected an int from 1 to"),
    ("decode --shape smollm2-135m --device cpu --batch 65536 --context 99999", "CapacityError"),
    ("decode --shape smollm2-135m --device cpu --batch 999999", "RuntimeConfig.max_num_reqs: expected an int from 1"),
]


@pytest.mark.parametrize(("arguments", "text"), ERRORS, ids=lambda x: x[-30:])
def test_bench_errors(refused, arguments: str, text: str) -> None:
    assert text in refused("bench", *arguments.split())


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
