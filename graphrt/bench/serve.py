"""The serving benchmark: many prompts of random lengths in TextGenerator, compared with the memory floor."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from graphrt.bench.decode import kv_bytes_read, kv_memory
from graphrt.bench.sampling import stated_sampling
from graphrt.bench.timer import measure_read_bandwidth
from graphrt.config import RuntimeConfig
from graphrt.engine.handle import Launch
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.checks import check_int
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import make_runtime
from graphrt.replay import ReplayManager
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams, config_fields

_MOST_REQUESTS = 1 << 16
_MAX_LENGTH = 1 << 20
_TOKENS = 10_000
"""Upper bound of token ids in prompts if the vocabulary is larger."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and output lengths. Both lengths are uniformly distributed from `least` to `most`.

    sampling   parameters of all requests; lengths and seeds differ

    Numbers are drawn from Python's random module in the order of nano-vllm's benchmark. Seed 0 and the default sizes
    produce the same workload as that benchmark: 133,966 output tokens.
    """

    requests: int = 256
    least: int = 100
    most: int = 1024
    seed: int = 0
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.6))

    def __post_init__(self) -> None:
        check_int("requests", self.requests, 1, _MOST_REQUESTS, advice="pass the number of prompts")
        check_int("most", self.most, 1, _MAX_LENGTH, advice="pass the longest prompt and output")
        check_int("least", self.least, 1, self.most, advice="pass the shortest prompt and output")

    def make(self, vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
        """Return the prompts and their parameters, without stop tokens and with the seeds 0, 1, 2 and so on."""
        draw, last = random.Random(self.seed), min(_TOKENS, vocab_size - 1)
        prompts = [
            [draw.randint(0, last) for _ in range(draw.randint(self.least, self.most))] for _ in range(self.requests)
        ]
        counts = [draw.randint(self.least, self.most) for _ in range(self.requests)]
        return prompts, [replace(self.sampling, max_new_tokens=n, seed=i) for i, n in enumerate(counts)]

    def to_json(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in ("requests", "least", "most", "seed")}
        return sizes | {"sampling": stated_sampling(self.sampling)}


@dataclass(frozen=True, slots=True)
class ServeReport:
    """Results of a run. `to_json` returns the JSON line that the command prints last.

    seconds         time from the first prompt submitted to the last token read by the host
    busy_seconds    part of this time in which the device ran steps; see LaunchTimer
    ttft_ms_*       time from the start to the first token of a prompt, percentiles over prompts
    tpot_ms_*       time per output token: from the first token of a prompt to its last, divided by the number of tokens
                    after the first
    steps           number of steps, in `launches` launches
    weight_bytes    bytes of weights read by one step
    kv_bytes        bytes of KV read by all decode steps
    advice          `Stats.advice` after the run
    """

    model: str
    device: str
    backend: str
    workload: Workload
    rows: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    busy_seconds: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    tpot_ms_p99: float
    steps: int
    launches: int
    weight_bytes: int
    kv_bytes: int
    read_tb_s: float
    preemptions: int
    capture_seconds: float
    advice: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def requests_per_s(self) -> float:
        """Finished prompts per second."""
        return self.workload.requests / self.seconds

    @property
    def busy_share(self) -> float:
        """Share of the run in which the device ran steps."""
        return self.busy_seconds / self.seconds

    @property
    def floor_seconds(self) -> float:
        """Time to read the weights per step and the KV per decoded token at the measured read bandwidth. Excludes
        prompt computation and the KV reads of prompt chunks."""
        return (self.steps * self.weight_bytes + self.kv_bytes) / (self.read_tb_s * 1e12)

    @property
    def share_of_floor(self) -> float:
        """Floor divided by measured time; 1 means every byte at full bandwidth and no other cost."""
        return self.floor_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        figures = ("tokens_per_s", "requests_per_s", "busy_share", "floor_seconds", "share_of_floor")
        record = asdict(self) | {name: getattr(self, name) for name in figures}
        return record | {"workload": self.workload.to_json()}


class LaunchTimer:
    """Context manager that counts a manager's launches and measures the device's idle time between them.

    On CUDA, an event is recorded before and after each launch. Idle time is the time between the end of one launch and
    the start of the next. If a launch ends before the host prepares the next launch, the preparation also counts as
    idle. The share is exact except for launches that end during the preparation. On a CPU, steps run inside the
    launching call and all other time is idle.
    """

    def __init__(self, manager: ReplayManager, stream: torch.cuda.Stream | None) -> None:
        self._manager, self._stream = manager, stream
        self.launches = 0
        self._busy = self._host_idle = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> LaunchTimer:
        for name in ("begin", "advance"):
            setattr(self._manager, name, self._timed(getattr(self._manager, name)))
        return self

    def __exit__(self, *error: object) -> None:
        del self._manager.begin, self._manager.advance  # restores the class attribute

    def _timed(self, call: Callable[..., Launch]) -> Callable[..., Launch]:
        def timed(*arguments: Any, **options: Any) -> Launch:
            self.launches += 1
            idle = bool(self._events) and self._events[-1][1].query()
            begin = self._event()
            start = time.perf_counter()
            launch = call(*arguments, **options)
            seconds = time.perf_counter() - start
            self._busy += seconds
            self._host_idle += seconds if idle else 0.0
            if begin is not None and (end := self._event()) is not None:
                self._events.append((begin, end))
            return launch

        return timed

    def _event(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    @property
    def busy_seconds(self) -> float:
        """Return the seconds in which the device ran steps. Waits for all launches."""
        if not self._events:
            return self._busy
        self._events[-1][1].synchronize()
        total = float(self._events[0][0].elapsed_time(self._events[-1][1]))
        pairs = zip(self._events, self._events[1:], strict=False)
        idle = sum(max(0.0, float(before[1].elapsed_time(after[0]))) for before, after in pairs)
        return (total - idle) / 1e3 - self._host_idle


def bench_serve(
    name: str,
    model: LlamaModel,
    *,
    workload: Workload,
    page_size: int = 16,
    rows: int = 256,
    step_tokens: int = 8192,
    backend: str | None = None,
) -> ServeReport:
    """Capture all sizes, submit all prompts at once, and time the workload.

    rows          maximum number of concurrent sequences
    step_tokens   maximum number of new tokens per step, which is the chunk size of prompts

    Raises: ConfigError: if a size is invalid. CapacityError: if weights and pages do not fit.
    """
    rows = min(check_int("rows", rows, 1, _MOST_REQUESTS, advice="pass the concurrent sequences"), workload.requests)
    if step_tokens < rows:
        raise ConfigError(
            f"step_tokens: expected at least {rows}, one token per request, got {step_tokens}; raise step_tokens"
        )
    longest, device, vocab_size = 2 * workload.most, model.device, model.config.vocab_size
    config = RuntimeConfig(
        max_num_reqs=rows,
        max_num_tokens=step_tokens,
        max_seq_len=longest,
        mixed_sizes=None if device.type == "cuda" else (),
        backend=backend,
        **config_fields(workload.sampling),
    )
    bandwidth = measure_read_bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    kv_groups = model.config.kv_groups(page_size, KVLayout.NHD, model.dtype)
    pages = "auto" if device.type == "cuda" else kv_memory(kv_groups, rows, 0, longest)[0]
    with make_runtime(model, config, page_size=page_size, num_pages=pages) as runtime:
        runtime.capture()
        prompts, params = workload.make(vocab_size)
        generator = TextGenerator(runtime)
        for _ in generator.generate([prompt[:2] for prompt in prompts[:2]], SamplingParams(2)):
            pass  # exclude the first step of a process from the workload
        steps = _steps(runtime)
        times: list[list[float]] = [[] for _ in prompts]
        with LaunchTimer(runtime.manager, runtime.stream) as timer:
            start = time.perf_counter()
            for event in generator.generate(prompts, params):
                times[event.prompt].append(time.perf_counter() - start)
            seconds = time.perf_counter() - start
        per_token = [1e3 * (of[-1] - of[0]) / (len(of) - 1) for of in times if len(of) > 1]
        first, tpot = ([1e3 * of[0] for of in times], per_token or [0.0])
        stats = runtime.stats()
        attention = model.config.attention_specs(model.dtype)
        seen = np.cumsum([kv_bytes_read(attention, kv_groups, length) for length in range(longest + 1)])
        lengths = [(len(prompt), len(of)) for prompt, of in zip(prompts, times, strict=True)]
        return ServeReport(
            model=name,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            backend=stats.backend,
            workload=workload,
            rows=rows,
            prompt_tokens=sum(map(len, prompts)),
            output_tokens=sum(map(len, times)),
            seconds=seconds,
            busy_seconds=timer.busy_seconds,
            ttft_ms_p50=float(np.percentile(first, 50)),
            ttft_ms_p99=float(np.percentile(first, 99)),
            tpot_ms_p50=float(np.percentile(tpot, 50)),
            tpot_ms_p99=float(np.percentile(tpot, 99)),
            steps=_steps(runtime) - steps,
            launches=timer.launches,
            weight_bytes=model.streamed_bytes,
            kv_bytes=sum(int(seen[prompt + new - 1] - seen[prompt]) for prompt, new in lengths),
            read_tb_s=bandwidth / 1e12,
            preemptions=generator.stats.preemptions,
            capture_seconds=stats.capture_seconds,
            advice=stats.advice,
        )


def _steps(runtime: Runtime) -> int:
    stats = runtime.stats()
    return sum(stats.replays.values()) + sum(stats.eager_steps.values())
