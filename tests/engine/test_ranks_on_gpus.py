"""Ranks on two GPUs: collectives in graphs, tokens equal to those of one process, and failures of a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from graphrt.bench.decode_transformers import build_model, hf_config
from graphrt.config import RuntimeConfig
from graphrt.engine.ranks import CUDA_BACKENDS, Ranks
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.attention.context_parallel import gather_queries, reduce_scatter_attention
from graphrt.kernels.errors import RankError
from graphrt.kernels.ops.all_reduce import symmetric_buffers
from graphrt.kernels.ops.collectives import all_gather, all_reduce, all_to_all
from graphrt.models.loading import load_model, make_runtime
from graphrt.models.shapes import SHAPES
from graphrt.sampling_params import SamplingParams
from tests.engine.test_rank_failures import FAILURES, fail
from tests.engine.test_rank_runs import FAMILIES as LONG
from tests.engine.test_rank_runs import answers, check_answers, check_both_ways, run_alone_and_together, run_both_ways
from tests.engine.test_rank_runs import save as save_long
from tests.engine.test_ranks import (
    FAMILIES,
    GREEDY,
    PROMPTS,
    TINY,
    build,
    check_sampling,
    check_tokens,
    decode,
    decode_interleaved,
)
from tests.models.test_loading_quantized import CASES, TOKENS, save
from tests.support.model_fixtures import randomize, save_oracle
from tests.support.rank_processes import Outcome, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def on_gpus(folder: Path, function: Any, *arguments: Any) -> list[Outcome]:
    return run_ranks(folder, function, *arguments, backend=CUDA_BACKENDS, seconds=300)


def collectives(group: dist.ProcessGroup, shares: bool) -> None:
    """Replays of a graph with all collectives, against sums on the CPU, while one rank is late at random."""
    ranks, device = Ranks.of(group), torch.device("cuda", group.rank())
    if shares:
        ranks.connect(device)
        assert group.group_name in symmetric_buffers
    x = torch.empty(5, 96, dtype=torch.bfloat16, device=device)
    y = torch.empty(2, 3, dtype=torch.int32, device=device)

    def step() -> tuple[torch.Tensor, ...]:
        return all_reduce(x, group), all_gather(y, group), all_to_all(y, group)

    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            total, gathered, exchanged = step()
        for seed in range(1000):
            parts = [torch.randn(5, 96, generator=torch.Generator().manual_seed(2 * seed + r)) for r in (0, 1)]
            x.copy_(parts[group.rank()])
            y.fill_(2 * seed + group.rank())
            if seed % 7 == 3 * group.rank():
                torch.cuda._sleep(1_000_000)
            graph.replay()
            first, second = (part.bfloat16().float() for part in parts)
            assert torch.equal(total.cpu(), (first + second).bfloat16()), seed
            assert gathered[:, 0, 0].tolist() == [2 * seed, 2 * seed + 1]
            assert exchanged[:, 0].tolist() == [2 * seed, 2 * seed + 1]
    ranks.exchange(None)


@pytest.mark.parametrize("shares", [False, True], ids=["nccl", "shared_memory"])
def test_collectives_in_a_graph(tmp_path: Path, shares: bool) -> None:
    assert [outcome.error for outcome in on_gpus(tmp_path, collectives, shares)] == [None, None]


def exchanges(group: dist.ProcessGroup) -> None:
    """Replays of a graph that exchanges heads of all ranks over shared memory, while one rank is late at random."""
    ranks, rank, device = Ranks.of(group), group.rank(), torch.device("cuda", group.rank())
    ranks.connect(device)
    assert group.group_name in symmetric_buffers
    rng, tokens, heads = torch.Generator(device).manual_seed(0), 16, 8  # all ranks draw the numbers of all ranks
    shape = (500, 2, tokens, 2 * heads)
    partial = torch.randn(*shape, 128, generator=rng, device=device, dtype=torch.bfloat16)
    lses, sinks = torch.randn(shape, generator=rng, device=device), torch.randn(heads, generator=rng, device=device)
    own, own_lse = partial[0, rank].clone(), lses[0, rank].clone()
    out, lse = own.new_empty(tokens, heads, 128), torch.empty(tokens, heads, device=device)

    def step() -> torch.Tensor:
        reduce_scatter_attention(own, own_lse, 1, group, out, lse=lse, sinks=sinks)
        return gather_queries(out, 1, group)

    stream, wrong = torch.cuda.Stream(device), torch.zeros((), dtype=torch.int64, device=device)
    mine = slice(rank * heads, (rank + 1) * heads)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            gathered = step()
        for turn in range(len(partial)):
            own.copy_(partial[turn, rank])
            own_lse.copy_(lses[turn, rank])
            if turn % 7 == 3 * rank:
                torch.cuda._sleep(1_000_000)
            graph.replay()
            total = torch.logaddexp(lses[turn].logsumexp(0), sinks.repeat(2))
            want = ((lses[turn] - total).exp()[..., None] * partial[turn].float()).sum(0)
            wrong += ((gathered.float() - want).abs() > 0.01 * want.abs() + 0.01).any()
            wrong += ((lse - total[:, mine]).abs() > 1e-4).any()
        assert int(wrong) == 0
    ranks.exchange(None)


def test_exchanges_in_a_graph(tmp_path: Path) -> None:
    assert [outcome.error for outcome in on_gpus(tmp_path, exchanges)] == [None, None]


@pytest.mark.parametrize("case", ["padded-heads", "biases", "interleaved"])
def test_tokens_are_those_of_one_process(tmp_path: Path, case: str) -> None:
    """The generator, sessions, loops, drafts, captures at first use, forks and masks of the test on a CPU."""
    family, sizes, _, *interleaved = FAMILIES[case]
    oracle = save_oracle(tmp_path, family, eos_token_id=None, **sizes)
    function = decode_interleaved if interleaved else decode
    check_tokens(oracle, decode(None, tmp_path), on_gpus(tmp_path, function, tmp_path, *interleaved))


@pytest.mark.parametrize("case", TOKENS)
def test_tokens_of_quantized_weights_are_those_of_one_process(tmp_path: Path, case: str) -> None:
    name, sizes, *interleaved = TOKENS[case]
    oracle = save(tmp_path, CASES[name], eos_token_id=None, **sizes).float()
    function = decode_interleaved if interleaved else decode
    check_tokens(oracle, decode(None, tmp_path), on_gpus(tmp_path, function, tmp_path, *interleaved))


def on_one_gpu(path: Path, name: str, prompts: int) -> dict[str, Any]:
    return answers(None, path, name, prompts, torch.device("cuda", 0))


def save_smollm(folder: Path) -> None:
    """Save random weights. Dummy weights differ from rank to rank."""
    shape = replace(SHAPES["smollm2-135m"], max_position_embeddings=256)
    model = build_model(hf_config(shape).to_dict(), torch.device("cpu"), torch.float32)
    randomize(model)
    model.save_pretrained(folder)


@pytest.mark.parametrize("name", [*LONG, "SmolLM2"])
def test_tokens_of_512_steps_are_those_of_one_gpu(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model"
    if name in LONG:
        save_long(path, name)
    else:
        save_smollm(path)
    check_answers(on_one_gpu(path, name, 45), on_gpus(tmp_path, answers, path, name, 45), 512)


def test_replays_equal_eager_steps_on_every_rank(tmp_path: Path) -> None:
    save_long(tmp_path / "model", "Llama")
    check_both_ways(on_gpus(tmp_path, run_both_ways, tmp_path / "model"))


def test_results_of_a_request_do_not_depend_on_its_batch(tmp_path: Path) -> None:
    save_long(tmp_path / "model", "Qwen3")
    first, other = on_gpus(tmp_path, run_alone_and_together, tmp_path / "model")
    assert (first.error, other.error) == (None, None)
    assert first.value > 150


def greedy(group: dist.ProcessGroup, folder: Path) -> list[list[int | None]]:
    """Sample by the exchange of 8 bytes: eagerly with all options, and in graphs."""
    check_sampling(group)
    answers: list[list[int | None]] = [[] for _ in PROMPTS]
    with build(folder, group, RuntimeConfig(4, 32, 48, truncation=False)) as runtime:
        runtime.capture()
        if runtime.rank:
            runtime.follow()
        else:
            for event in TextGenerator(runtime).generate(PROMPTS, GREEDY):
                answers[event.prompt].append(event.token)
    return answers


def test_sampling_without_truncation(tmp_path: Path) -> None:
    oracle = save_oracle(tmp_path, "Llama", eos_token_id=None)
    first, other = on_gpus(tmp_path, greedy, tmp_path)
    assert (first.error, other.error) == (None, None)
    for prompt, tokens in zip(PROMPTS, first.value, strict=True):
        ids = oracle.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert ids[0, len(prompt) :].tolist() == tokens


def replay_until_killed(group: dist.ProcessGroup, graphs: bool) -> float:
    """Kill rank 1 while rank 0 replays and waits. Return the share of rank 0's memory that is free after that."""
    device = torch.device("cuda", group.rank())
    model = load_model(TINY, device=device, dtype=torch.bfloat16, max_positions=4096, group=group).model
    runtime = make_runtime(model, RuntimeConfig(4, 32, 4096, use_graphs=graphs))
    runtime.capture()
    if runtime.rank:
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -9 {os.getpid()}"])
        runtime.follow()
    generator, start = TextGenerator(runtime), time.monotonic()
    with pytest.raises(RankError) as error:
        list(generator.generate(PROMPTS * 10_000, SamplingParams(max_new_tokens=2000)))
    assert error.value.rank == 1
    assert time.monotonic() - start < 12
    runtime.close()
    assert time.monotonic() - start < 16
    del model, runtime, generator
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free / total


@pytest.mark.alone  # other tests would take memory of the GPU, and time
@pytest.mark.parametrize("graphs", [True, False])
def test_killed_rank_ends_replays_and_frees_memory(tmp_path: Path, graphs: bool) -> None:
    first, second = on_gpus(tmp_path, replay_until_killed, graphs)
    assert (second.exit_code, first.exit_code, first.error) == (-signal.SIGKILL, 0, None)
    assert first.value > 0.9


ON_GPUS = ("raises", "first-raises", "killed", "killed-in-capture", "hangs", "stopped-in-capture", "another-config")


@pytest.mark.parametrize("case", ON_GPUS)
def test_failure_of_one_rank_ends_all(tmp_path: Path, case: str) -> None:
    act, rank, call, error, text = FAILURES[case]
    rank, start = min(rank, 1), time.monotonic()
    outcomes = on_gpus(tmp_path, fail, act, rank, call)
    failed, other = outcomes[rank], outcomes[1 - rank]
    assert isinstance(failed.error, error) if error else failed.exit_code == -signal.SIGKILL
    assert text.replace("rank 2", "rank 1").replace("for 1.5 s", "for 8 s") in str(other.error)
    assert other.exit_code == 0
    assert time.monotonic() - start < 120


SCRIPT = """
import signal, sys, torch
from torch import distributed as dist
from graphrt import RuntimeConfig, SamplingParams, TextGenerator, load_model
from graphrt.engine.ranks import CUDA_BACKENDS
from graphrt.models.loading import make_runtime
from tests.engine.test_ranks import PROMPTS, TINY
device = torch.device("cuda", int(sys.argv[2]))
torch.cuda.set_device(device)
dist.init_process_group(CUDA_BACKENDS, init_method=sys.argv[1], rank=device.index, world_size=2)
model = load_model(TINY, device=device, group=dist.group.WORLD).model
with make_runtime(model, RuntimeConfig(4, 32, 48)) as runtime:
    runtime.capture()
    if runtime.rank:
        signal.raise_signal(signal.SIGSTOP)
    list(TextGenerator(runtime).generate(PROMPTS, SamplingParams(max_new_tokens=20)))
"""


def test_process_exits_after_another_is_stopped(tmp_path: Path) -> None:
    """Destructors of process groups do not wait for the stopped rank."""
    command = [sys.executable, "-c", SCRIPT, f"file://{tmp_path}/rendezvous"]
    first, stopped = (subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE) for rank in (0, 1))
    try:
        errors = first.communicate(timeout=180)[1].decode()
        assert "graphrt.kernels.errors.RankError" in errors
        assert first.returncode == 1, errors
    finally:
        for process in (first, stopped):
            process.kill()
            process.communicate()
