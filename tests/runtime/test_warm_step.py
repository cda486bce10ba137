"""A warm step is one graph launch. It uploads nothing, allocates nothing, waits for nothing, as the profiler shows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from graphrt.batch import Batch
from tests.runtime.toy import make_rig

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

STEPS = 8
FORBIDDEN = ("Malloc", "Free", "HostAlloc", "HostRegister", "Synchronize", "Memset", "LaunchKernel")


def test_a_warm_step_is_one_launch() -> None:
    rig = make_rig(torch.device("cuda", 0), ring_depth=2 * STEPS, fill=0.0)
    lengths = [3, 9, 17, 30]
    pages = [list(range(1 + 10 * i, 11 + 10 * i)) for i in range(4)]

    def batch(step: int) -> Batch:
        return Batch(
            row_ids=range(4),
            seq_lens=[n + step for n in lengths],
            tokens=[1, 2, 3, 4],
            page_indptr=range(0, 41, 10),
            page_ids=[page for row in pages for page in row],
        )

    for step in range(4):
        rig.manager.replay(batch(step)).tokens()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    pinned = torch.cuda.host_memory_stats()["active_requests.allocated"]
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        handles = [rig.manager.replay(batch(step)) for step in range(STEPS)]
        allocated_after = torch.cuda.memory_stats()["allocation.all.allocated"]
        pinned_after = torch.cuda.host_memory_stats()["active_requests.allocated"]
    tokens = [h.tokens().tolist() for h in handles]
    assert allocated_after == allocated, "a warm step allocates no device memory"
    assert pinned_after == pinned, "nor pinned memory"
    runtime = Counter(
        e.name for e in prof.events() if e.name.startswith(("cuda", "cu")) and e.device_type.name == "CPU"
    )
    assert not runtime["cudaMemcpyAsync"], runtime
    assert runtime["cudaGraphLaunch"] == STEPS, runtime
    # The profiler itself synchronises the device once when it stops.
    waits = {n: c for n, c in runtime.items() if any(f in n for f in FORBIDDEN) and n != "cudaDeviceSynchronize"}
    assert not waits, f"calls that a warm step must not make: {waits}"
    assert runtime["cudaDeviceSynchronize"] <= 1, runtime
    assert rig.manager.stats().ring_waits == 0
    assert len(tokens) == STEPS
