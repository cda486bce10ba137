"""Ray: each row of a dataset is answered once, even if an actor dies; batches share steps; ranks of an actor."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import multiprocessing
import os
import queue
import re
import select
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from graphrt.config import RuntimeConfig
from graphrt.generate.generator import TextGenerator
from graphrt.integrations import ray as ray_module
from graphrt.integrations.ray import BatchGenerator, _device_of_ranks, _Engine, _join
from graphrt.kernels.errors import CapacityError, ConfigError, RankError, ReplayError, ShapeError, UnsupportedError
from graphrt.models.loading import make_runtime
from graphrt.models.smollm import default_model_path
from graphrt.models.tokenizer import load_tokenizer
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from tests.support.default_model import default_model
from tests.support.model_fixtures import byte_tokenizer, save_oracle
from tests.support.rank_processes import _context as context

CONFIG = RuntimeConfig(max_num_reqs=4, max_num_tokens=64, max_seq_len=64, decode_sizes=(4,), mixed_sizes=(64,))
TEXTS = ["Hello there", "a", "What is it?", "12 + 30 ="]


@pytest.fixture(scope="module")
def folder() -> Iterator[tuple[Path, Any]]:
    """A tiny Llama with a tokenizer of bytes, and transformers' model."""
    with tempfile.TemporaryDirectory() as name:
        oracle = save_oracle(Path(name), "Llama", vocab_size=260, num_key_value_heads=3, eos_token_id=None)
        byte_tokenizer().save_pretrained(name)
        yield Path(name), oracle


def answers_of(generator: BatchGenerator, *batches: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of batches that are submitted together."""

    async def ask() -> list[dict[str, Any]]:
        return await asyncio.gather(*map(generator, batches))

    return asyncio.run(ask())


def test_rows_of_an_actor_that_dies_are_answered_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.data

    class Mortal(BatchGenerator):
        """Adds the process that answered each row. The first process that has answered three batches kills itself."""

        answered = 0

        async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            found = await super().__call__(batch)
            self.answered += 1
            if self.answered == 3:
                with contextlib.suppress(FileExistsError), open(f"{folder}/lost", "x") as file:
                    print(os.getpid(), *batch["id"], file=file, flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
            return {**found, "pid": [os.getpid()] * len(batch["id"])}

    params = SamplingParams(max_new_tokens=8)
    rows = [{"id": i, "prompt": f"Name {i + 2} fruits."} for i in range(6)]
    for name, value in {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}.items():
        monkeypatch.setenv(name, value)  # neither a file in the home folder, nor a report to Ray
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # its path is short enough for Ray's sockets
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        try:
            ray.data.DataContext.get_current().enable_progress_bars = False
            answers = ray.data.from_items(rows, override_num_blocks=6).map_batches(
                Mortal,
                fn_constructor_kwargs={"params": params, "config": CONFIG, "device": "cpu"},
                batch_size=1,
                num_cpus=1,
                compute=ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=2),
            )
            found = answers.take_all()
        finally:
            ray.shutdown()
        killed, *lost = map(int, Path(folder, "lost").read_text().split())
    assert sorted(row["id"] for row in found) == list(range(6))
    assert all(row["pid"] != killed for row in found if row["id"] in lost)
    tokenizer, loaded = load_tokenizer(default_model_path()), default_model()
    prompts = [tokenizer.encode_prompt(row["prompt"], chat=True) for row in rows]
    with make_runtime(loaded.model, CONFIG) as runtime:
        runtime.capture()
        expected: list[list[int]] = [[] for _ in prompts]
        ends = replace(params, stop_ids=frozenset(tokenizer.eos_ids))
        for event in TextGenerator(runtime).generate(prompts, ends):
            expected[event.prompt] += [] if event.token is None else [event.token]
    for row in found:
        assert row["prompt"] == rows[row["id"]]["prompt"]
        assert list(row["generated_tokens"]) == expected[row["id"]]
        assert row["generated_text"] == tokenizer.decode(expected[row["id"]])
        assert row["finish_reason"] == ("length" if len(expected[row["id"]]) == 8 else "stop")


def test_batches_share_steps_and_tokens_equal_transformers(
    folder, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted, all_submitted = itertools.count(1), threading.Event()
    arrivals, submit = _Engine._arrivals, _Engine.submit

    def count_and_submit(engine: _Engine, requests: Any) -> Any:
        future = submit(engine, requests)
        if next(submitted) == len(columns):
            all_submitted.set()
        return future

    # A busy machine would otherwise run a batch to its end before the next one is submitted.
    monkeypatch.setattr(_Engine, "_arrivals", lambda engine, idle: all_submitted.wait() and arrivals(engine, idle))
    monkeypatch.setattr(_Engine, "submit", count_and_submit)
    path, oracle = folder
    generator = BatchGenerator(path, SamplingParams(40), config=CONFIG, device=str(device), dtype=torch.float32)
    tokenizer = load_tokenizer(path)
    prompts = [tokenizer.encode_prompt(text, chat=False) for text in TEXTS]
    columns = [np.array(TEXTS[:1]), np.array([prompts[1]]), list(map(np.array, prompts[2:])), np.array([], object)]
    found = answers_of(generator, *({"prompt": column, "id": list(range(len(column)))} for column in columns))
    assert [answer["id"] for answer in found] == [[0], [0], [0, 1], []]
    tokens = [tokens for answer in found for tokens in answer["generated_tokens"]]
    for prompt, answer in zip(prompts, tokens, strict=True):
        with torch.no_grad():
            expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        assert answer == expected[0, len(prompt) :].tolist()
    assert [text for answer in found for text in answer["generated_text"]] == list(map(tokenizer.decode, tokens))
    # One after the other, two batches would be 80 steps, and all four 160.
    assert sum(generator._engine.generator._runtime.stats().replays.values()) < 80


def test_seeds_of_rows(folder) -> None:
    generator = BatchGenerator(folder[0], SamplingParams(12, temperature=1.0, seed=5), config=CONFIG, device="cpu")
    first, again, other, given = answers_of(
        generator,
        {"prompt": TEXTS[:2]},
        {"prompt": TEXTS[1::-1]},
        {"prompt": TEXTS[2:]},
        {"prompt": TEXTS[:1] * 3, "seed": np.array([1, 2, 1])},
    )
    assert first["generated_tokens"] == again["generated_tokens"][::-1]
    assert len({*map(tuple, first["generated_tokens"] + other["generated_tokens"])}) == 4
    one, two, same = given["generated_tokens"]
    assert one == same != two


REFUSED = {
    "params": ({"params": {"max_new_tokens": 3}}, "params: expected SamplingParams"),
    "logprobs": ({"params": SamplingParams(logprobs=0)}, "params: log-probabilities are not returned"),
    "ranks": ({"ranks": 0}, "ranks: expected an int from 1 to 64, got 0"),
    "model": ({"model": "nowhere"}, "model: expected a folder"),
    "config": ({"config": {}}, "config: expected RuntimeConfig, got"),
    "penalties": ({"params": SamplingParams(3, presence_penalty=1.0)}, "params: .*penalties"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_options(folder, case: str) -> None:
    options, text = REFUSED[case]
    with pytest.raises((ConfigError, UnsupportedError), match=text):
        BatchGenerator(**{"model": folder[0], "config": CONFIG, "device": "cpu"} | options)


def test_a_wrong_batch_fails_alone_and_a_fault_fails_all(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = BatchGenerator(folder[0], SamplingParams(20), config=CONFIG, device="cpu")
    for batch, error, text in (
        ({"text": ["a"]}, ConfigError, "expected a column 'prompt', got text"),
        ([{"prompt": "a"}], ConfigError, "batch: .*leave batch_format out"),
        ({"prompt": ["b", ""]}, ConfigError, "prompt: expected some text"),
        ({"prompt": [[1], []]}, ShapeError, r"prompts\[1\]: expected at least 1 token"),
        ({"prompt": [[1], [2] * 46]}, CapacityError, r"prompts\[1\]: 46 tokens and max_new_tokens=20"),
        ({"prompt": [[1], None]}, ShapeError, r"prompts\[1\]: .* got None"),
    ):
        with pytest.raises(error, match=text):
            answers_of(generator, batch)
    (answer,) = answers_of(generator, {"prompt": ["a"]})
    assert len(answer["generated_tokens"][0]) == 20

    def broken(*arguments: object) -> None:
        raise ReplayError("a fault")

    monkeypatch.setattr(DecodeSession, "run", broken)
    for _ in range(2):
        with pytest.raises(ReplayError, match="a fault"):
            answers_of(generator, {"prompt": ["a"]}, {"prompt": ["b"]})


def test_an_actor_exits_if_a_rank_fails(folder, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """Ray then restarts it. A retry would go to the same actor."""
    generator = BatchGenerator(folder[0], SamplingParams(20), config=CONFIG, device="cpu")
    codes = queue.SimpleQueue[int]()

    def failing(*arguments: object) -> None:
        raise RankError(1, "rank 1 is gone")

    def leave(code: int) -> None:
        codes.put(code)
        threading.Event().wait()  # as the thread does not continue

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(DecodeSession, "run", failing)
    generator._engine.submit([([1], SamplingParams(1))])
    assert codes.get(timeout=10) == 1
    assert "rank 1 is gone" in capfd.readouterr().err


def serve(pipe: Connection, path: Path, device: str) -> None:
    """An actor of two ranks."""
    torch.set_num_threads(1)
    generator = BatchGenerator(path, SamplingParams(20), config=CONFIG, device=device, dtype=torch.float32, ranks=2)
    pipe.send(answers_of(generator, {"prompt": TEXTS})[0]["generated_tokens"])
    pipe.send([process.pid for process in multiprocessing.active_children()])
    pipe.recv()


def check_ranks(folder: tuple[Path, Any], device: str) -> None:
    """Compare the answers of two ranks with those of one. Kill the actor, and wait for the other rank's end."""
    pipe, other = context.Pipe()
    actor = context.Process(target=serve, args=(other, folder[0], device))
    actor.start()
    other.close()
    alone = BatchGenerator(folder[0], SamplingParams(20), config=CONFIG, device=device, dtype=torch.float32)
    assert pipe.recv() == answers_of(alone, {"prompt": TEXTS})[0]["generated_tokens"]
    (follower,) = map(os.pidfd_open, pipe.recv())
    actor.kill()
    assert select.select([follower], [], [], 20)[0], "a rank outlives its actor"
    actor.join()


def test_ranks_of_an_actor_that_dies_end(folder) -> None:
    check_ranks(folder, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_ranks_of_an_actor_on_gpus(folder) -> None:
    check_ranks(folder, "cuda")


def test_device_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an actor to which Ray gives two GPUs."""
    used: list[object] = []
    monkeypatch.setattr(ray_module, "resolve_device", lambda device: torch.device(device or "cuda:0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: used.append((backend, options["rank"])))
    assert [_device_of_ranks(device, 2) for device in (None, "cuda:1", "cpu")] == ["cuda", "cuda", "cpu"]
    with pytest.raises(ConfigError, match="ranks: expected at most 2, the number of GPUs of the actor, got 3"):
        _device_of_ranks("cuda", 3)
    with contextlib.suppress(AssertionError):  # there is no group
        _join(cast("TCPStore", None), 1, 2, on_cuda=True)
    assert used == [1, ("cpu:gloo,cuda:nccl", 1)]


def test_block_of_the_docs_passes_arguments_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.data

    page = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text()
    (block,) = re.findall(r"^```python\n(import ray\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    dataset = create_autospec(ray.data.Dataset, instance=True)
    dataset.repartition.return_value = dataset.map_batches.return_value = dataset
    monkeypatch.setattr(ray.data, "read_parquet", create_autospec(ray.data.read_parquet, return_value=dataset))
    exec(block, names := {})
    call = dataset.map_batches.call_args
    inspect.signature(BatchGenerator).bind(**call.kwargs["fn_constructor_kwargs"])
    assert call.args == (names["BatchGenerator"],)
    assert dataset.repartition.call_args.kwargs == {"target_num_rows_per_block": call.kwargs["batch_size"]}
    dataset.write_parquet.assert_called_once()
