"""Models that `transformers` has sharded over ranks, through `from_transformers`: tokens as of one process."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.configuration_utils import DistributedConfig

import graphrt
from graphrt.engine.ranks import CUDA_BACKENDS
from graphrt.integrations.transformers.runtime import TransformersRuntime
from graphrt.integrations.transformers.sharding import GroupCollectives, group_of
from tests.engine.test_ranks import SAMPLED, state_of
from tests.integrations.test_from_transformers import EXPERTS, WINDOWS
from tests.support.model_fixtures import PROMPT, oracle_logits, save_oracle
from tests.support.rank_processes import Outcome, run_ranks

# transformers shards over the GPUs of a machine that has some, and otherwise over processes.
on_cpus = pytest.mark.skipif(torch.cuda.is_available(), reason="transformers would shard over GPUs")


def on_gpus(test: Any) -> Any:
    needs = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    return pytest.mark.gpu(needs(test))


PROMPTS = [PROMPT[:7], [*PROMPT, 7, 64, 29]]  # the second in two chunks
CONFIG = graphrt.RuntimeConfig(
    2, 16, 64, launch_steps=1, decode_sizes=(2,), mixed_sizes=(16,), penalties=True, max_logit_bias=2, max_logprobs=1
)
SIZES = {"num_attention_heads": 4, "vocab_size": 98, "eos_token_id": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Qwen3": {"head_dim": 8},
    "Gemma3": WINDOWS | {"head_dim": 8, "tie_word_embeddings": True, "vocab_size": 97},  # 49 and 48 tokens
    "Qwen3Moe": EXPERTS | {"head_dim": 8},
    "Phi3": {},  # gathers queries, keys and values
}


FUSED = {
    "Llama": {"decoder_layer", "rms_norm"},
    "Qwen3": {"decoder_layer", "rms_norm"},
    "Gemma3": {"linear", "write_kv"},
    "Qwen3Moe": {"linear", "rms_norm", "write_kv"},
    "Phi3": {"rms_norm", "write_kv"},
}


def load(group: dist.ProcessGroup, folder: Path, **options: Any) -> Any:
    rank, size = str(group.rank()), str(group.size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)  # as torchrun does
    config = DistributedConfig(tp_size=group.size())
    return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, **options)


def tokens_of(runtime: TransformersRuntime) -> dict[str, Any]:
    """Greedy tokens of `generate`, and sampled tokens with their log-probabilities."""
    results = runtime.generate(PROMPTS, max_new_tokens=20, do_sample=False)
    tokens: list[list[int | None]] = [[] for _ in PROMPTS]
    logprobs = []
    for event in graphrt.TextGenerator(runtime).generate(PROMPTS, [SAMPLED[1], SAMPLED[3]]):
        tokens[event.prompt].append(event.token)
        logprobs += [round(event.logprob.logprob, 3)] if event.logprob else []
    return {"greedy": [result.token_ids for result in results], "sampled": tokens, "logprobs": logprobs}


def config_for(model: Any) -> graphrt.RuntimeConfig:
    return CONFIG if model.device.type == "cuda" else replace(CONFIG, backend="torch_reference")


@torch.no_grad()
def decode(group: dist.ProcessGroup, folder: Path) -> dict[bool, dict[str, Any]]:
    """Tokens with and without `fuse`, and the state that is equal on all ranks."""
    model, found = load(group, folder), dict[bool, dict[str, Any]]()
    ids = torch.tensor([PROMPT], device=model.device)
    before = model(ids, use_cache=False).logits
    for fuse in (True, False):
        with graphrt.from_transformers(model, config=config_for(model), page_size=4, fuse=fuse) as runtime:
            if runtime.rank:
                runtime.follow()
                found[fuse] = {}
            else:
                found[fuse] = tokens_of(runtime)
                weight = model.lm_head.weight
                model.lm_head.weight = torch.nn.Parameter(weight.clone())
                with pytest.raises(graphrt.ReplayError, match=r"lm_head.weight: expected at address"):
                    runtime.generate(PROMPTS)
                model.lm_head.weight = weight
            found[fuse] |= {"fused": runtime.fused, "state": state_of(runtime), "kv_bytes": runtime.kv_cache.nbytes}
    assert torch.equal(before, model(ids, use_cache=False).logits), "the model is as it was"
    return found


def check(folder: Path, name: str, outcomes: list[Outcome], oracle: Any) -> None:
    assert [outcome.error for outcome in outcomes] == [None, None]
    with graphrt.from_transformers(oracle, config=config_for(oracle), page_size=4) as runtime:
        expected, kv_bytes = tokens_of(runtime), runtime.kv_cache.nbytes
    for prompt, tokens in zip(PROMPTS, expected["greedy"], strict=True):
        ids = torch.tensor([prompt])
        wanted = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        assert wanted[0, len(prompt) :].tolist() == tokens
    for fuse in (True, False):
        first, other = (outcome.value[fuse] for outcome in outcomes)
        assert {key: first[key] for key in expected} == expected
        assert set(first["fused"].values()) == (FUSED[name] if fuse else set())
        for key in ("fused", "state", "kv_bytes"):
            assert first[key] == other[key], key
        assert first["kv_bytes"] == (kv_bytes if name == "Phi3" else kv_bytes // 2)


@on_cpus
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_one_process(tmp_path: Path, name: str) -> None:
    oracle = save_oracle(tmp_path / "model", name, **(SIZES | FAMILIES[name]))
    check(tmp_path, name, run_ranks(tmp_path, decode, tmp_path / "model", seconds=120), oracle)


@on_gpus
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Qwen3Moe"])
def test_tokens_on_two_gpus_are_those_of_one_process(tmp_path: Path, name: str) -> None:
    """In graphs, in float32."""
    oracle = save_oracle(tmp_path / "model", name, **(SIZES | FAMILIES[name]))
    outcomes = run_ranks(tmp_path, decode, tmp_path / "model", backend=CUDA_BACKENDS, seconds=300)
    check(tmp_path, name, outcomes, oracle)


def score(group: dist.ProcessGroup, folder: Path) -> list[float]:
    """Log-probabilities of a prompt in bfloat16, whose sums GPUs compute in the kernel that also adds and norms."""
    model = load(group, folder, dtype=torch.bfloat16)
    with graphrt.from_transformers(model, config=config_for(model), page_size=4) as runtime:
        assert set(runtime.fused.values()) == FUSED["Llama"]
        if runtime.rank:
            runtime.follow()
            return []
        params = graphrt.SamplingParams(max_new_tokens=1, prompt_logprobs=0)
        (event,) = graphrt.TextGenerator(runtime).generate([PROMPT], params)
        assert event.prompt_logprobs is not None
        return [found.logprob for found in event.prompt_logprobs]


def check_scores(oracle: Any, outcomes: list[Outcome]) -> None:
    assert [outcome.error for outcome in outcomes] == [None, None]
    logprobs = oracle_logits(oracle, PROMPT)[:-1].log_softmax(-1)
    wanted = logprobs.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(outcomes[0].value), wanted, atol=0.2, rtol=0)


@on_cpus
def test_scores_in_bfloat16(tmp_path: Path) -> None:
    oracle = save_oracle(tmp_path / "model", "Llama", **(SIZES | FAMILIES["Llama"]))
    check_scores(oracle, run_ranks(tmp_path, score, tmp_path / "model"))


@on_gpus
def test_scores_in_bfloat16_on_two_gpus(tmp_path: Path) -> None:
    oracle = save_oracle(tmp_path / "model", "Llama", **(SIZES | FAMILIES["Llama"]))
    check_scores(oracle, run_ranks(tmp_path, score, tmp_path / "model", backend=CUDA_BACKENDS, seconds=300))


def run_page(group: dist.ProcessGroup, source: str) -> list[list[int]]:
    os.environ.update(RANK=str(group.rank()), LOCAL_RANK=str(group.rank()))
    names: dict[str, Any] = {}
    exec(source, names)
    return [result.token_ids for result in names.get("results", ())]


@on_cpus
def test_block_of_the_docs_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    oracle = save_oracle(tmp_path / "model", "Qwen3", **(SIZES | FAMILIES["Qwen3"]))
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (source,) = (block for block in blocks if "from_transformers" in block)
    for written, here in (
        ('dist.init_process_group("cpu:gloo,cuda:nccl")', ""),
        ('"Qwen/Qwen3-8B", dtype="bfloat16"', f"{str(tmp_path / 'model')!r}"),
        ('["Why is the sky blue?"], max_new_tokens=100', f"{PROMPTS[:1]}, max_new_tokens=20"),
    ):
        assert written in source
        source = source.replace(written, here)
    first, other = run_ranks(tmp_path, run_page, source)
    assert (first.error, other.error, other.value) == (None, None, [])
    want = oracle.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=20, do_sample=False)
    assert PROMPTS[:1] + first.value == [want[0, :7].tolist(), want[0, 7:].tolist()]


def refuse(group: dist.ProcessGroup, folder: Path) -> list[str]:
    """Errors for heads that two ranks cannot divide, for another mesh, and for collectives other than sums."""
    model, found = load(group, folder), []
    with pytest.raises(graphrt.UnsupportedError) as error:
        graphrt.from_transformers(model)
    found.append(str(error.value))
    model._device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    with pytest.raises(graphrt.UnsupportedError) as error:
        group_of(model)
    found.append(str(error.value))
    x = torch.full((3, 2), 1.0 + group.rank())
    with GroupCollectives(group):
        dist.all_reduce(x, group=group)
        for call in (lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=group), lambda: dist.broadcast(x, 0)):
            with pytest.raises(graphrt.UnsupportedError) as error:
                call()
            found.append(str(error.value))
    assert torch.equal(x, torch.full((3, 2), 3.0))
    return found


@on_cpus
def test_what_ranks_cannot_run_is_refused(tmp_path: Path) -> None:
    save_oracle(tmp_path / "model", "Llama", **(SIZES | {"num_attention_heads": 6, "num_key_value_heads": 3}))
    first, other = run_ranks(tmp_path, refuse, tmp_path / "model")
    assert (first.error, other.error, first.value) == (None, None, other.value)
    heads, mesh, maximum, broadcast = first.value
    assert heads.endswith("use a divisor of the number of KV heads, or graphrt.load_model(group=)")
    assert "is sharded over a mesh of fsdp 2; shard the model by tensor parallelism only" in mesh
    assert maximum.startswith("allreduce_: expected a sum or a gather of ranks [0, 1], got one other than a sum")
    assert broadcast.startswith("c10d.broadcast_.default: a sharded model may sum and gather tensors only")


def fail(group: dist.ProcessGroup, folder: Path, act: str) -> None:
    """Let rank 1 fail in the third run of `from_transformers`."""
    model, runs = load(group, folder), []

    def hook(*_: Any) -> None:
        runs.append(None)
        if group.rank() and len(runs) == 3:
            if act == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("no memory is left")

    model.model.layers[1].register_forward_pre_hook(hook)
    graphrt.from_transformers(model, config=config_for(model))


def differ(group: dist.ProcessGroup, folder: Path) -> None:
    model = load(group, folder)
    if group.rank():
        model.config.rms_norm_eps = 1e-5
    graphrt.from_transformers(model, config=config_for(model))


@on_cpus
def test_model_of_one_rank_differs(tmp_path: Path) -> None:
    save_oracle(tmp_path / "model", "Llama", **SIZES)
    for outcome in run_ranks(tmp_path, differ, tmp_path / "model"):
        with pytest.raises(graphrt.ConfigError, match=r"rank 1 differs .* in model.config.rms_norm_eps: 1e-05 instead"):
            raise outcome.error


@on_cpus
@pytest.mark.parametrize("act", ["kill", "raise"])
def test_failure_of_one_rank_ends_all(tmp_path: Path, act: str) -> None:
    save_oracle(tmp_path / "model", "Llama", **SIZES)
    first, other = run_ranks(tmp_path, fail, tmp_path / "model", act)
    assert isinstance(first.error, graphrt.RankError)
    assert first.error.rank == 1
    if act == "kill":
        assert other.exit_code == -signal.SIGKILL
    else:
        assert "rank 1 failed with OutOfMemoryError: no memory is left" in str(first.error)
        assert isinstance(other.error, torch.OutOfMemoryError | graphrt.RankError)
