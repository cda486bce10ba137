"""Offline generation over a Ray Dataset: a class for `map_batches`, with one Runtime per actor.

Ray Data calls an async class for several batches at once. One thread runs the prompts of all batches with continuous
batching, so the decode batch stays full while the last prompts of a batch run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import queue
import threading
import time
import traceback
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from graphrt.config import RuntimeConfig
from graphrt.engine.ranks import CUDA_BACKENDS, Ranks
from graphrt.generate.generator import Event, TextGenerator
from graphrt.kernels.checks import check_instance, check_int
from graphrt.kernels.errors import ConfigError, RankError
from graphrt.kernels.types import KVLayout
from graphrt.models.config import ModelConfig
from graphrt.models.loading import LoadedModel, load_model, make_runtime
from graphrt.models.smollm import default_model_path
from graphrt.models.tokenizer import load_tokenizer
from graphrt.runtime import Runtime, default_config, resolve_device
from graphrt.sampling_params import SamplingParams, config_fields

_PAGE_SIZE, _MEMORY_UTILIZATION = 16, 0.9
_MAX_RANKS = 64
_POLL_SECONDS = 0.01


class BatchGenerator:
    """Answers the prompts of a Ray Dataset. Pass the class to `map_batches`, and its arguments by name:

        answers = dataset.map_batches(
            BatchGenerator,
            fn_constructor_kwargs={"model": "Qwen/Qwen3-8B", "params": SamplingParams(max_new_tokens=256)},
            batch_size=64,
            num_gpus=1,
            compute=ray.data.ActorPoolStrategy(size=8, max_concurrent_calls_per_actor=8),
        )

    Each row needs a column `prompt`: a text, or token ids. The result has all columns of the row, and the new columns
    `generated_tokens`, without the stop token; `finish_reason`, "stop" or "length"; and `generated_text`, if the model
    has a tokenizer.

    If `temperature` is above 0, the column `seed` has the seed of each row. Without this column, the seed is derived
    from `params.seed` and the prompt, so equal prompts get equal answers. A retried row has the same seed.

    If a rank of the actor fails, the actor exits, and Ray restarts it. Other errors of a step are raised by all batches
    of the actor.

    model   as for `load_model`; None: SmolLM2-135M-Instruct
    params  for all rows. The end-of-sequence tokens of the model are added to `stop_ids`
    config  capacities and options; None: as for `from_transformers`, with the options that `params` need
    device  None: CUDA if available, else CPU. With `num_gpus=N`, each actor has N GPUs of its own
    dtype   as for `load_model`
    ranks   number of processes that run the model together, on one GPU each: pass `num_gpus=ranks`. The actor starts
            the others
    chat    whether a text is a user message; None: if the model has a chat template

    Raises: ConfigError: if an argument is wrong. See also `load_model` and Runtime.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | None = None,
        params: SamplingParams | None = None,
        *,
        config: RuntimeConfig | None = None,
        device: str | None = None,
        dtype: torch.dtype | Literal["auto"] = "auto",
        ranks: int = 1,
        chat: bool | None = None,
    ) -> None:
        params = SamplingParams() if params is None else params
        check_instance("params", params, SamplingParams, advice="pass SamplingParams(...)")
        if not (params.logprobs is None and params.prompt_logprobs is None):
            raise ConfigError("params: log-probabilities are not returned; leave logprobs and prompt_logprobs out")
        ranks = check_int("ranks", ranks, 1, _MAX_RANKS, advice="pass the number of processes per actor")
        if ranks > 1:
            device = _device_of_ranks(device, ranks)
        source = _Source(default_model_path() if model is None else model, device, dtype)
        group = _start_ranks(ranks, source) if ranks > 1 else None
        loaded = source.load(group)
        path = loaded.tokenizer_source
        self._tokenizer = None if path is None else load_tokenizer(path)
        ends = () if self._tokenizer is None else self._tokenizer.eos_ids
        self._params = replace(params, stop_ids=params.stop_ids.union(loaded.config.eos_ids, ends))
        self._chat = self._tokenizer is not None and self._tokenizer.has_chat_template if chat is None else chat
        config = _default_config(loaded, self._params) if config is None else config
        check_instance("config", config, RuntimeConfig, advice="pass None for capacities that fit the model")
        config.check_needs("params", self._params.needs)
        self._engine = _Engine(_capture(loaded, config, group))

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the rows of a batch with their answers, in order.

        Raises: ConfigError: if a column is missing. See also TextGenerator.generate; prompts[i] is row i of the batch.
        """
        if "prompt" not in check_instance("batch", batch, dict, advice="leave batch_format out"):
            raise ConfigError(f"batch: expected a column 'prompt', got {', '.join(batch)}; call rename_columns() first")
        prompts = [self._encode(prompt) for prompt in batch["prompt"]]
        requests = []
        for row, prompt in enumerate(prompts):
            params = self._params
            self._engine.generator.check(prompt, params, row)
            if params.temperature:
                hashed = zlib.crc32(np.asarray(prompt, np.int32).tobytes(), params.seed)
                params = replace(params, seed=int(batch["seed"][row]) if "seed" in batch else hashed)
            requests.append((prompt, params))
        answers = await asyncio.wrap_future(self._engine.submit(requests))
        found = {
            "generated_tokens": [answer.tokens for answer in answers],
            "finish_reason": ["stop" if answer.stopped else "length" for answer in answers],
        }
        if self._tokenizer is not None:
            found["generated_text"] = [self._tokenizer.decode(answer.tokens) for answer in answers]
        return batch | found

    def _encode(self, prompt: Any) -> Any:
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise ConfigError("prompt: the model has no tokenizer; pass token ids")
        return self._tokenizer.encode_prompt(str(prompt), chat=self._chat)


@dataclass(frozen=True)
class _Source:
    """The arguments of `load_model` for all ranks of an actor."""

    model: str | Path | ModelConfig
    device: str | None
    dtype: torch.dtype | Literal["auto"]

    def load(self, group: dist.ProcessGroup | None) -> LoadedModel:
        return load_model(self.model, device=resolve_device(self.device), dtype=self.dtype, group=group)


def _default_config(loaded: LoadedModel, params: SamplingParams) -> RuntimeConfig:
    groups = loaded.config.kv_groups(_PAGE_SIZE, KVLayout.NHD, loaded.model.dtype)
    longest = loaded.config.max_position_embeddings
    config = default_config(groups, longest, loaded.model.device, _MEMORY_UTILIZATION)
    return replace(config, **config_fields(params))


def _capture(loaded: LoadedModel, config: RuntimeConfig | None, group: dist.ProcessGroup | None) -> Runtime:
    """Return a captured runtime with the config of the first rank."""
    if group is not None:
        config = Ranks.of(group).exchange(config)[0]
    assert config is not None, "the first rank has a config"
    runtime = make_runtime(loaded.model, config, page_size=_PAGE_SIZE, memory_utilization=_MEMORY_UTILIZATION)
    runtime.capture()
    return runtime


def _device_of_ranks(device: str | None, ranks: int) -> str:
    """Return the type of the ranks' devices. Raises: ConfigError: if there are fewer GPUs than ranks."""
    kind = resolve_device(device).type
    if kind == "cuda" and ranks > torch.cuda.device_count():
        raise ConfigError(
            f"ranks: expected at most {torch.cuda.device_count()}, the number of GPUs of the actor, got {ranks}; pass "
            "num_gpus=ranks to map_batches"
        )
    return kind


def _start_ranks(count: int, source: _Source) -> dist.ProcessGroup:
    """Start the other ranks, wait until all have joined, and return the group."""
    store = TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    processes = {
        rank: context.Process(target=_follow, args=(store.port, rank, count, source), daemon=True)
        for rank in range(1, count)
    }
    for process in processes.values():
        process.start()
    while not store.check([_joined(rank) for rank in processes]):
        for rank, process in processes.items():
            if not process.is_alive():
                raise RankError(rank, f"the process of rank {rank} exited early, with code {process.exitcode}")
        time.sleep(_POLL_SECONDS)
    return _join(store, 0, count, source.device == "cuda")


def _join(store: TCPStore, rank: int, count: int, on_cuda: bool) -> dist.ProcessGroup:
    """Return the group of the actor's ranks. On CUDA, the GPU of this rank becomes the current device. All ranks see
    all GPUs of the actor."""
    if on_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(CUDA_BACKENDS if on_cuda else "gloo", store=store, rank=rank, world_size=count)
    assert dist.group.WORLD is not None, "the group was just initialized"
    return dist.group.WORLD


def _joined(rank: int) -> str:
    return f"rank {rank} has joined"


def _follow(port: int, rank: int, count: int, source: _Source) -> None:
    """Run as a rank other than the first, until the actor ends."""
    store = TCPStore("127.0.0.1", port, count, is_master=False, wait_for_workers=False)
    store.set(_joined(rank), "")
    with contextlib.suppress(RankError):  # the actor reports it, or has ended
        group = _join(store, rank, count, source.device == "cuda")
        _capture(source.load(group), None, group).follow()


@dataclass(slots=True)
class _Answer:
    tokens: list[int] = field(default_factory=list)
    stopped: bool = False


@dataclass(eq=False, slots=True)
class _Rows:
    """The prompts of a batch. The future gets their answers when all have finished."""

    requests: Sequence[tuple[Any, SamplingParams]]
    answers: list[_Answer]
    left: int
    future: Future[list[_Answer]] = field(default_factory=Future)


class _Engine:
    """A thread that runs the prompts of all batches."""

    def __init__(self, runtime: Runtime) -> None:
        self.generator = TextGenerator(runtime)
        self._queue = queue.SimpleQueue[_Rows]()
        self._running: dict[int, tuple[_Rows, int]] = {}  # by the index of a prompt: its batch, and its row there
        self._indices = itertools.count()
        threading.Thread(target=self._run, name="graphrt", daemon=True).start()

    def submit(self, requests: Sequence[tuple[Any, SamplingParams]]) -> Future[list[_Answer]]:
        rows = _Rows(requests, [_Answer() for _ in requests], len(requests))
        rows.future.set_running_or_notify_cancel()  # a batch that is cancelled runs to its end
        if requests:
            self._queue.put(rows)
        else:
            rows.future.set_result([])
        return rows.future

    def _run(self) -> None:
        try:
            for event in self.generator.serve(self._arrivals):
                self._take(event)
        except RankError:
            traceback.print_exc()
            os._exit(1)  # Ray treats it as a crash: it restarts the actor, and retries its tasks
        except Exception as error:
            for rows in {rows for rows, _ in self._running.values()}:
                rows.future.set_exception(error)
            while True:
                self._queue.get().future.set_exception(error)

    def _arrivals(self, idle: bool) -> list[tuple[Any, SamplingParams]]:
        arrived: list[tuple[Any, SamplingParams]] = []
        while idle or not self._queue.empty():
            rows, idle = self._queue.get(), False
            self._running.update((next(self._indices), (rows, row)) for row in range(rows.left))
            arrived += rows.requests
        return arrived

    def _take(self, event: Event) -> None:
        rows, row = self._running[event.prompt]
        answer = rows.answers[row]
        if event.token is not None:
            answer.tokens.append(event.token)
        if event.finished:
            del self._running[event.prompt]
            answer.stopped = event.stop_token is not None
            rows.left -= 1
            if not rows.left:
                rows.future.set_result(rows.answers)
