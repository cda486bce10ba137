"""The end of all ranks of a gloo group after a failure of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from graphrt.capture import device_wait
from graphrt.capture.staging import StagingSlot
from graphrt.config import RequestTensor, RuntimeConfig
from graphrt.engine import ranks as ranks_module
from graphrt.engine.ranks import Ranks
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.errors import ConfigError, RankError
from graphrt.kernels.ops.all_reduce import SymmetricBuffer, buffer_words, symmetric_buffers
from graphrt.models.loading import load_model, make_runtime
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from tests.engine.test_ranks import GREEDY, PROMPTS, TINY, device_of
from tests.support.rank_processes import run_ranks


def stop_process() -> None:
    """Stop this process. It is killed after the other ranks should have noticed."""
    subprocess.Popen(["sh", "-c", f"sleep {3 + 2 * ranks_module.HANG_SECONDS}; kill -9 {os.getpid()}"])
    signal.raise_signal(signal.SIGSTOP)


class Faulty(torch.nn.Module):
    """A model that does something at one of its calls, on one rank."""

    def __init__(self, model: torch.nn.Module, rank: int, call: int, act: str) -> None:
        super().__init__()
        self.model, self.rank, self.call, self.act = model, rank, call, act

    def forward(self, step: Any) -> torch.Tensor:
        self.call -= 1
        if not self.call and self.model.group.rank() == self.rank:
            if self.act == "raise":
                raise ValueError("bad luck")
            if self.act == "interrupt":
                signal.raise_signal(signal.SIGINT)
            if self.act == "hang":
                time.sleep(max(2.0, 1.5 * ranks_module.HANG_SECONDS))
            if self.act == "hang-in-capture":
                time.sleep(1.5 * ranks_module.PATIENT_SECONDS)
            if self.act == "stop":  # once it has arrived at the next collective
                Ranks.of(self.model.group)._until = lambda *_: stop_process()
                return self.model(step)
            if self.act == "stop-in-capture":
                stop_process()
            os.kill(os.getpid(), signal.SIGKILL)
        logits: torch.Tensor = self.model(step)
        return logits


class EventOfGpu:
    """An event of a launch whose kernels do not end once a rank has failed."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def query(self) -> bool:
        return not self.ranks._has_failed


def launch_as_on_gpus(group: dist.ProcessGroup) -> None:
    device_wait.watch, event = Ranks.of(group), EventOfGpu(Ranks.of(group))

    def end(slot: StagingSlot, stream: None) -> None:
        slot._event, slot._running = event, object()

    StagingSlot.end = end


def fail(group: dist.ProcessGroup, act: str, rank: int, call: int) -> None:
    device, backend = device_of(group), None  # on a GPU, ranks compile kernels for different times
    if device.type == "cpu":
        ranks_module.HANG_SECONDS, backend = 1.5, "torch_reference"  # three ranks may share a busy core
        if act == "hang-in-capture":
            ranks_module.PATIENT_SECONDS = 4.0
        if act == "raise":
            launch_as_on_gpus(group)
    if act == "stop-in-loading" and group.rank() == rank:
        Ranks.of(group)
        stop_process()
    missing = act == "loading" and group.rank() == rank
    other = act == "model" and group.rank() == rank
    source = "./nowhere" if missing else replace(TINY, rms_norm_eps=1e-5) if other else TINY
    model = load_model(source, device=device, dtype=torch.float32, group=group).model
    changed = act == "config" and group.rank() == rank
    config = RuntimeConfig(4 if changed else 2, 16, 48, use_graphs="capture" in act, backend=backend)
    specs = model.config.attention_specs(torch.float32)
    with Runtime(
        Faulty(model, rank, call, act), specs, vocab_size=97, device=device, config=config, num_pages=20, group=group
    ) as runtime:
        runtime.capture()
        if runtime.rank:
            runtime.follow()
        else:
            list(TextGenerator(runtime).generate(PROMPTS, GREEDY))


FAILURES = {  # act, rank, call of the model, error on this rank, and text of the error on the other ranks
    "raises": ("raise", 1, 3, ValueError, "rank 1 failed with ValueError: bad luck"),
    "first-raises": ("raise", 0, 3, ValueError, "rank 0 failed with ValueError: bad luck"),
    "killed": ("kill", 1, 3, None, "the process of rank 1 has ended"),
    "first-killed": ("kill", 0, 3, None, "the process of rank 0 has ended"),
    "killed-in-capture": ("capture", 2, 2, None, "the process of rank 2 has ended"),
    "hangs": ("hang", 1, 3, None, "rank 1 did not arrive at a collective or launch for 1.5 s"),
    "hangs-in-capture": ("hang-in-capture", 1, 2, None, "rank 1 did not arrive at a collective or launch for 4 s"),
    "stopped": ("stop", 1, 3, None, "rank 1"),  # it is also late
    "stopped-in-capture": ("stop-in-capture", 1, 2, None, "the process of rank 1 is stopped"),
    "stopped-in-loading": ("stop-in-loading", 1, 0, None, "the process of rank 1 is stopped"),
    "interrupted": ("interrupt", 0, 3, KeyboardInterrupt, "rank 0 failed with KeyboardInterrupt"),
    "loading": ("loading", 1, 0, ConfigError, "the process of rank 1 has ended"),
    "another-config": ("config", 1, 0, ConfigError, "rank 1 differs from rank 0 in config.max_num_reqs"),
    "another-model": ("model", 1, 0, ConfigError, "rank 1 differs from rank 0 in model.rms_norm_eps: 1e-05 instead"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failure_of_one_rank_ends_all(tmp_path: Path, case: str) -> None:
    act, rank, call, error, text = FAILURES[case]
    start, outcomes = time.monotonic(), run_ranks(tmp_path, fail, act, rank, call, ranks=3)
    failed = outcomes.pop(rank)
    assert isinstance(failed.error, error) if error else failed.exit_code == -signal.SIGKILL
    differs = act in ("config", "model")
    for outcome in outcomes:
        assert isinstance(outcome.error, ConfigError if differs else RankError), outcome
        assert text in str(outcome.error)
        assert outcome.exit_code == 0
        assert differs or outcome.error.rank == rank
    assert time.monotonic() - start < 45


def interrupt_a_message(group: dist.ProcessGroup) -> None:
    """Ctrl-C while rank 0 sends values that do not fit into the ring, before rank 1 reads them."""
    model, state = load_model(TINY, device="cpu", group=group).model, RequestTensor("state", (1 << 21,))
    with make_runtime(model, RuntimeConfig(2, 16, 48, request_tensors=(state,)), num_pages=20) as runtime:
        runtime.capture()
        if runtime.rank:
            time.sleep(2)
            runtime.follow()
        else:
            threading.Timer(1, signal.raise_signal, [signal.SIGINT]).start()
            with pytest.raises(KeyboardInterrupt):
                runtime.manager.request_tables.set_state({0: {"state": torch.ones(1 << 21)}})
            runtime.manager.request_tables.set_state({0: {"state": torch.zeros(1 << 21)}})


def test_interrupted_message_ends_all(tmp_path: Path) -> None:
    for outcome in run_ranks(tmp_path, interrupt_a_message):
        assert isinstance(outcome.error, RankError), outcome
        assert "rank 0 failed with KeyboardInterrupt" in str(outcome.error)


def join(group: dist.ProcessGroup, act: str) -> None:
    ranks_module.PATIENT_SECONDS = 2.0
    if group.rank() == 1:
        if act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(5)
    else:
        Ranks.of(group)


@pytest.mark.parametrize(("act", "text"), [("kill", "rank 1 has ended"), ("hang", "no answer for 2 s")])
def test_rank_that_does_not_join_is_named(tmp_path: Path, act: str, text: str) -> None:
    first, _, third = run_ranks(tmp_path, join, act, ranks=3)
    for outcome in (first, third):
        assert isinstance(outcome.error, RankError)
        assert outcome.error.rank == 1
        assert text in str(outcome.error)
        assert outcome.seconds < 8


SCRIPT = """
import signal, sys, torch
from torch import distributed as dist
from graphrt.engine import ranks
ranks.HANG_SECONDS, rank = 1.0, int(sys.argv[2])
ranks.PATIENT_SECONDS = 3.0
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
if sys.argv[3] == "join" and rank:
    signal.raise_signal(signal.SIGSTOP)
ranks.Ranks.of(dist.group.WORLD)
if rank:
    signal.raise_signal(signal.SIGSTOP)
ranks.Ranks.of(dist.group.WORLD).exchange(None)
"""


@pytest.mark.parametrize(("where", "text"), [
    ("join", "RankError: rank 1 has ended, or did not join the group: no answer for 3 s"),
    ("exchange", "RankError: the process of rank 1 is stopped"),
])  # fmt: skip
def test_process_exits_though_a_collective_never_ends(tmp_path: Path, where: str, text: str) -> None:
    command = [sys.executable, "-c", SCRIPT, f"file://{tmp_path}/rendezvous"]
    first, stopped = (subprocess.Popen([*command, str(rank), where], stderr=subprocess.PIPE) for rank in (0, 1))
    try:
        assert text in first.communicate(timeout=60)[1].decode()
        assert first.returncode == 1
    finally:
        for process in (first, stopped):
            process.kill()
            process.communicate()


def load_after_the_end_of_a_rank(group: dist.ProcessGroup, folder: Path) -> None:
    Ranks.of(group)
    if group.rank():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    load_model(folder, device="cpu", group=group)


def test_end_of_a_rank_ends_the_loading_of_others(tmp_path: Path) -> None:
    from tests.support.model_fixtures import save_oracle

    save_oracle(tmp_path / "model", "Llama")
    first, _ = run_ranks(tmp_path, load_after_the_end_of_a_rank, tmp_path / "model")
    assert isinstance(first.error, RankError)
    assert first.error.rank == 1


class Never:
    """An event of a GPU whose kernel waits for another rank forever."""

    def query(self) -> bool:
        return False


def wait_for_gpu(group: dist.ProcessGroup, act: str) -> None:
    ranks_module.HANG_SECONDS = 0.5
    ranks = Ranks.of(group)
    if group.rank():
        if act != "late":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.5)
        return
    device_wait.watch, slot = ranks, StagingSlot.allocate(4, torch.device("cpu"))
    slot._event, slot.on_done, slot._running = Never(), lambda: None, object()
    if act == "late":
        ranks.arrive()
    try:
        while act == "poll":
            slot.is_done()
        slot.wait()
    finally:
        with pytest.raises(RankError):  # results of a launch that is done may be wrong
            ranks.wait_for_device(lambda: True)


@pytest.mark.parametrize(("act", "text"), [
    ("kill", "the process of rank 1 has ended"),
    ("poll", "the process of rank 1 has ended"),
    ("late", "rank 1 did not arrive at a collective or launch"),
])  # fmt: skip
def test_failure_ends_the_wait_for_a_gpu(tmp_path: Path, act: str, text: str) -> None:
    first, _ = run_ranks(tmp_path, wait_for_gpu, act)
    assert isinstance(first.error, RankError)
    assert text in str(first.error)


def end_in_the_driver(group: dist.ProcessGroup) -> None:
    """Rank 0 is in a call that does not return before the collectives are aborted, which then raise."""
    ranks = Ranks.of(group)
    words = torch.empty(buffer_words(2, 16), dtype=torch.int32, device="cpu")
    with torch.inference_mode():  # as a caller may build a manager
        buffer = SymmetricBuffer.of_words(words, [0, 0], 0)
    symmetric_buffers[group.group_name] = buffer
    ended = ranks.watch()
    if group.rank():
        os.kill(os.getpid(), signal.SIGKILL)
    with ranks.reporting():
        start = time.monotonic()
        while buffer.missing_rank() is None and time.monotonic() - start < 8:
            time.sleep(0.01)
        assert buffer.missing_rank() == 1
        ended()
        raise RuntimeError("communicator was aborted")


def fail_in_a_collective(group: dist.ProcessGroup) -> None:
    ranks = Ranks.of(group)
    if group.rank():
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    with ranks.reporting():
        raise dist.DistBackendError("remote process exited")


@pytest.mark.parametrize("call", [end_in_the_driver, fail_in_a_collective])
def test_errors_of_collectives_name_the_rank_that_has_ended(
    tmp_path: Path, call: Callable[[dist.ProcessGroup], None]
) -> None:
    first, _ = run_ranks(tmp_path, call)
    assert isinstance(first.error, RankError)
    assert first.error.rank == 1
    assert "the process of rank 1 has ended" in str(first.error)


class Nccl:
    """NCCL of a group: abort() keeps a lock that queueing takes, until graphs are freed."""

    group_name = "nccl"

    def __init__(self) -> None:
        self.lock, self.aborting = threading.Lock(), threading.Event()

    def _get_backend(self, device: torch.device) -> Nccl:
        return self

    def abort(self) -> None:
        self.aborting.set()
        self.lock.acquire()


def queue_collectives(group: dist.ProcessGroup, waits: bool) -> float:
    """Queue collectives, as in a capture, until rank 1 ends. Return the seconds until then."""
    ranks, nccl = Ranks.of(group), Nccl()
    if group.rank():
        os.kill(os.getpid(), signal.SIGKILL)

    def queue() -> None:
        if not waits:
            time.sleep(0.1)
            assert nccl.lock.acquire(timeout=5), "the abort had begun"
            nccl.lock.release()
        elif nccl.aborting.wait(timeout=5):  # NCCL connects to a rank that has ended
            raise dist.DistBackendError("communicator was aborted")

    ranks.group, ranks.on_cuda = nccl, True
    ended, start = ranks.watch(), time.monotonic()

    def queue_until_it_fails() -> None:
        with ranks.reporting():
            while True:
                ranks._run_collective(queue)

    with pytest.raises(RankError, match="the process of rank 1 has ended"):
        queue_until_it_fails()
    ended()
    assert nccl.aborting.wait(timeout=5)
    return time.monotonic() - start


@pytest.mark.parametrize("waits", [False, True])
def test_abort_and_collectives_do_not_wait_for_each_other(tmp_path: Path, waits: bool) -> None:
    first, _ = run_ranks(tmp_path, queue_collectives, waits)
    assert first.error is None
    assert first.value < 4


def capture_slowly(group: dist.ProcessGroup) -> list[int | None]:
    """Rank 1 finishes its capture later than the time limit of a launch."""
    ranks_module.HANG_SECONDS = 0.5
    model = load_model(TINY, device="cpu", group=group).model
    config = RuntimeConfig(2, 16, 48, decode_sizes=(2,), mixed_sizes=())
    with make_runtime(model, config, num_pages=20) as runtime:
        runtime.capture(lambda _: time.sleep(3 * runtime.rank))
        if runtime.rank:
            runtime.follow()
            return []
        return [event.token for event in TextGenerator(runtime).generate([[1, 2, 3]], SamplingParams(4))]


def test_slow_capture_of_one_rank_is_waited_for(tmp_path: Path) -> None:
    first, other = run_ranks(tmp_path, capture_slowly)
    assert (first.error, other.error) == (None, None)
    assert len(first.value) == 4
