"""A warm step is one graph launch without uploads, allocations or waits, as the profiler shows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from graphrt.batch import Batch
from graphrt.capture import raw_graph
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from tests.support.toy import make_rig, make_runtime

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

STEPS = 8
FORBIDDEN = ("Malloc", "Free", "HostAlloc", "HostRegister", "Synchronize", "Memset", "Memcpy", "LaunchKernel")


class CountedDriver:
    """Counts driver calls, since the profiler does not see all of them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._real = raw_graph.driver

    def __getattr__(self, name: str) -> object:
        self.calls[name] += 1
        return getattr(self._real, name)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> CountedDriver:
    counted = CountedDriver()
    monkeypatch.setattr(raw_graph, "driver", counted)
    return counted


def check_calls(prof: profile, driver: CountedDriver, steps: int) -> None:
    """Check that each step is one launch and one event."""
    assert (driver.calls["cuGraphLaunch"], driver.calls["cuEventRecord"]) == (steps, steps), driver.calls
    runtime = Counter(
        e.name for e in prof.events() if e.name.startswith(("cuda", "cu")) and e.device_type.name == "CPU"
    )
    assert not runtime["cudaGraphLaunch"], "torch launches nothing"
    # The profiler itself synchronises the device once when it stops.
    waits = {n: c for n, c in runtime.items() if any(f in n for f in FORBIDDEN) and n != "cudaDeviceSynchronize"}
    assert not waits, f"calls that a warm step must not make: {waits}"
    assert runtime["cudaDeviceSynchronize"] <= 1, runtime


def test_warm_step_is_one_launch(driver: CountedDriver) -> None:
    rig = make_rig(torch.device("cuda", 0), ring_depth=2 * STEPS, fill=0.0)
    lengths = [3, 9, 17, 30]
    pages = [list(range(1 + 10 * i, 11 + 10 * i)) for i in range(4)]

    def batch(step: int) -> Batch:
        return Batch(
            req_indices=range(4),
            seq_lens=[n + step for n in lengths],
            tokens=[1, 2, 3, 4],
            page_indptr=range(0, 41, 10),
            page_ids=[page for row in pages for page in row],
        )

    for step in range(2 * STEPS):  # every slot of the ring, whose events torch makes
        rig.manager.replay(batch(step % 4)).tokens()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    pinned = torch.cuda.host_memory_stats()["active_requests.allocated"]
    torch.cuda.synchronize()
    driver.calls.clear()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        handles = [rig.manager.replay(batch(step)) for step in range(STEPS)]
        allocated_after = torch.cuda.memory_stats()["allocation.all.allocated"]
        pinned_after = torch.cuda.host_memory_stats()["active_requests.allocated"]
    tokens = [h.tokens().tolist() for h in handles]
    assert allocated_after == allocated, "a warm step allocates no device memory"
    assert pinned_after == pinned, "nor pinned memory"
    check_calls(prof, driver, STEPS)
    assert rig.manager.stats().ring_waits == 0
    assert len(tokens) == STEPS


@pytest.mark.parametrize("steps", [1, 8])
def test_warm_step_of_a_session_is_one_launch(driver: CountedDriver, steps: int) -> None:
    """Also if a launch runs many steps."""
    device = torch.device("cuda", 0)
    config = {"ring_depth": STEPS, "decode_sizes": (4,), "loop_sizes": (4,), "max_num_tokens": 32}
    runtime = make_runtime(device, num_pages=80, config=config)
    runtime.capture()
    with DecodeSession(runtime) as session:
        for prompt in ([3, 1, 4], [1, 5, 9, 2, 6]):
            session.add(prompt, SamplingParams(max_new_tokens=50))
        for _ in range(STEPS + 1):
            session.run(1 if steps == 1 else 2)
            session.collect(wait=True)
        torch.cuda.synchronize()
        launches = STEPS if steps == 1 else 3
        driver.calls.clear()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            for _ in range(launches):
                session.run(steps)
        check_calls(prof, driver, launches)
        assert sum(len(tokens) for _, tokens in session.collect(wait=True)) == 2 * launches * steps
