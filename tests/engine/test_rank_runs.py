"""Ranks over many steps: tokens as of one process, replays as eager steps, and requests alone as in a batch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from graphrt.batch import Batch, Request
from graphrt.capture.descriptor import GraphKind
from graphrt.config import RuntimeConfig
from graphrt.generate.generator import TextGenerator
from graphrt.models.loading import load_model, make_runtime
from graphrt.models.smollm import default_model_path
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from tests.engine.test_ranks import build, device_of, state_of
from tests.support.rank_processes import Outcome, run_ranks

RAGGED = RuntimeConfig(6, 32, 250, decode_sizes=(2, 4, 6), mixed_sizes=(16, 32), penalties=True)
STEPS = RuntimeConfig(6, 32, 48, decode_sizes=(6,), mixed_sizes=(32,), penalties=True, max_logprobs=0)
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 3},
    "Qwen3": {"head_dim": 8},
    "Gemma3": {
        "head_dim": 8,
        "num_attention_heads": 4,
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "vocab_size": 98,  # older versions of transformers need a multiple of the ranks
    },
}


def save(folder: Path, name: str) -> Any:
    from tests.support.model_fixtures import save_oracle

    return save_oracle(folder, name, **FAMILIES[name], max_position_embeddings=256, eos_token_id=None)


def runtime_of(group: dist.ProcessGroup | None, path: Path, name: str, device: torch.device) -> Runtime:
    """A captured runtime. transformers shards the models that load_model does not know."""
    config = RAGGED if device.type == "cuda" else replace(RAGGED, backend="torch_reference")
    if name != "Gemma3":
        model = load_model(path, device=device, dtype=torch.float32, max_positions=256, group=group).model
        runtime = make_runtime(model, config, page_size=4)
        runtime.capture()
        return runtime
    import transformers

    from graphrt import from_transformers
    from tests.integrations.test_transformers_ranks import load

    model = load(group, path) if group else transformers.AutoModelForCausalLM.from_pretrained(path).to(device)
    return from_transformers(model, config=config, page_size=4)


def answers(
    group: dist.ProcessGroup | None, path: Path, name: str, prompts: int, device: torch.device | None = None
) -> dict[str, Any]:
    """Greedy tokens of prompts and answers of many lengths, six at a time."""
    rng, tokens = random.Random(1), list[list[int | None]]()
    with runtime_of(group, path, name, device or device_of(group)) as runtime:
        if runtime.rank:
            runtime.follow()
        else:
            ids = [[rng.randrange(97) for _ in range(rng.randint(1, 60))] for _ in range(prompts)]
            params = [SamplingParams(max_new_tokens=rng.randint(5, 4 * prompts)) for _ in ids]
            tokens = [[] for _ in ids]
            for event in TextGenerator(runtime).generate(ids, params):
                tokens[event.prompt].append(event.token)
        return {"tokens": tokens, "steps": sum(runtime.stats().replays.values()), "state": state_of(runtime)}


def check_answers(expected: dict[str, Any], outcomes: list[Outcome], steps: int) -> None:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    first, *others = (outcome.value for outcome in outcomes)
    assert first["tokens"] == expected["tokens"]
    assert first["steps"] >= steps
    assert {other["state"] for other in others} == {first["state"]}


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_512_steps_are_those_of_one_process(tmp_path: Path, name: str) -> None:
    save(tmp_path / "model", name)
    torch.set_num_threads(1)
    expected = answers(None, tmp_path / "model", name, 45)
    check_answers(expected, run_ranks(tmp_path, answers, tmp_path / "model", name, 45, seconds=120), 512)


def test_tokens_of_smollm_are_those_of_one_process(tmp_path: Path) -> None:
    arguments = default_model_path(), "SmolLM2", 8
    check_answers(answers(None, *arguments), run_ranks(tmp_path, answers, *arguments, seconds=120), 32)


def schedule() -> list[list[Request]]:
    """Requests of 64 steps, which do not depend on results: prompts in chunks, decodes, pauses, and new sequences."""
    rng, lengths, steps = random.Random(2), [0] * 6, list[list[Request]]()
    for step in range(64):
        requests = []
        for index in sorted(rng.sample(range(6), rng.randint(1, 6))):
            count = 5 if lengths[index] == 0 or (step % 3 == 0 and rng.random() < 0.3) else 1
            lengths[index] += count
            pages = range(1 + 12 * index, 1 + 12 * index + -(-lengths[index] // 4))
            tokens = [rng.randrange(97) for _ in range(count)]
            requests.append(Request(index, tokens, lengths[index], list(pages)))
            lengths[index] = 0 if lengths[index] > 40 else lengths[index]
        steps.append(requests)
    return steps


def digest(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.cpu().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def run_both_ways(group: dist.ProcessGroup, path: Path) -> list[dict[str, Any]]:
    """The logits of each step on rank 0, and request state and KV of each rank, of replays and of eager steps."""
    found = []
    for eager in (False, True):
        with build(path, group, STEPS, num_pages=80) as runtime:
            runtime.capture()
            kv = [*runtime.kv_cache.k, *runtime.kv_cache.v]
            logits = []
            for tensor in kv:
                tensor.zero_()
            if runtime.device.type == "cuda":
                torch.cuda.synchronize()  # the steps run on another stream
            if runtime.rank:
                runtime.follow()
            else:
                for requests in schedule():
                    logits.append(runtime.replay(Batch.from_requests(requests), eager=eager).logits().cpu().clone())
                assert sum(runtime.stats().replays.values()) == (0 if eager else len(logits))
            values = {"logits": digest(logits), "state": state_of(runtime), "kv": digest(t[1:] for t in kv)}
            found.append(values)
    return found


def check_both_ways(outcomes: list[Outcome]) -> None:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    for outcome in outcomes:
        assert outcome.value[0] == outcome.value[1]
    first, *others = (outcome.value[0] for outcome in outcomes)
    assert {other["state"] for other in others} == {first["state"]}


def test_replays_equal_eager_steps_on_every_rank(tmp_path: Path) -> None:
    save(tmp_path / "model", "Llama")
    check_both_ways(run_ranks(tmp_path, run_both_ways, tmp_path / "model"))


def run_alone_and_together(group: dist.ProcessGroup, path: Path) -> int:
    """Compare the logits of each request in a batch with those of the request alone, in graphs of the same size."""
    compared = 0
    with build(path, group, replace(STEPS, batch_invariant=True), num_pages=80) as runtime:
        runtime.capture()
        if runtime.rank:
            runtime.follow()
            return 0
        sizes = {size.kind: size for size in runtime.manager.descriptors}

        def logits_of(indices: Iterable[int]) -> list[dict[int, torch.Tensor]]:
            found = []
            for requests in schedule():
                is_mixed = any(len(request.tokens) > 1 for request in requests)
                if chosen := [request for request in requests if request.req_index in indices]:
                    size = sizes[GraphKind.MIXED if is_mixed else GraphKind.DECODE]
                    logits = runtime.replay(Batch.from_requests(chosen), descriptor=size).logits()
                    found.append({r.req_index: logits[row].cpu().clone() for row, r in enumerate(chosen)})
                else:
                    found.append({})
            return found

        together = logits_of(range(6))
        for index in range(6):
            for alone, others in zip(logits_of([index]), together, strict=True):
                if index in alone:
                    assert torch.equal(alone[index], others[index])
                    compared += 1
    return compared


def test_results_of_a_request_do_not_depend_on_its_batch(tmp_path: Path) -> None:
    save(tmp_path / "model", "Qwen3")
    first, other = run_ranks(tmp_path, run_alone_and_together, tmp_path / "model")
    assert (first.error, other.error) == (None, None)
    assert first.value > 150
