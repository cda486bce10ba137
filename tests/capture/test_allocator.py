"""Graphs need PyTorch's native, caching allocator: any other setting is refused before anything runs on the device."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from graphrt.capture import allocator
from graphrt.capture.allocator import allocator_rows, check_allocator, check_capture_allocator
from graphrt.capture.recorder import CudaGraphRecorder
from graphrt.kernels.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[2]

BACKEND_ERROR = "PYTORCH_CUDA_ALLOC_CONF: graphrt needs PyTorch's native allocator, got backend 'cudaMallocAsync'"
CACHING_ERROR = "PYTORCH_NO_CUDA_MEMORY_CACHING: PyTorch's caching allocator is disabled"


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_backend", lambda: "cudaMallocAsync")
    on_cuda = (check_capture_allocator, CudaGraphRecorder)
    for call in (check_allocator, allocator_rows, *(partial(call, CUDA) for call in on_cuda)):
        with pytest.raises(ConfigError, match=BACKEND_ERROR):
            call()
    check_capture_allocator(CPU)


@pytest.mark.parametrize("counted", [0, 1], ids=["disabled", "enabled"])
def test_a_disabled_cache_is_noticed_by_an_allocation_that_is_not_counted(monkeypatch, counted: int) -> None:
    made: list[torch.Tensor] = []

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == CUDA
        made.append(torch.zeros(size, dtype=dtype, device="cpu"))
        return made[-1]

    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda device: {"allocation.all.allocated": 7 + counted * len(made)}
    )
    monkeypatch.setattr(torch, "empty", empty)
    if counted:
        check_capture_allocator(CUDA)
        return
    with pytest.raises(ConfigError, match=CACHING_ERROR):
        check_capture_allocator(CUDA)


def test_segments_of_a_pool_are_those_with_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        {"segment_pool_id": pool, "address": at} for at, pool in enumerate([(0, 0), (0, 300), (0, 7), (0, 300)])
    ]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": segments, "device_traces": []})
    assert [segment["address"] for segment in allocator_rows((0, 300))] == [1, 3]
    assert allocator_rows((0, 8)) == []
    assert allocator_rows() == segments


@pytest.mark.gpu
def test_a_snapshot_keeps_references_to_the_numbers_of_a_pool() -> None:
    """torch.cuda.memory_snapshot(pool) drops one reference per call, and Python frees the number while it is in use."""
    held = torch.empty(1, device="cuda")
    number = int("12345678")  # not a constant, to which the interpreter holds more references
    before = sys.getrefcount(number)
    for _ in range(10):
        assert allocator_rows((0, number)) == []
    assert sys.getrefcount(number) == before
    (segment,) = [
        segment
        for segment in allocator_rows((0, 0))
        if 0 <= held.data_ptr() - segment["address"] < segment["total_size"]
    ]
    assert segment["device"] == held.device.index


BUILD = """
import torch
import graphrt

{before}
spec = graphrt.KVCacheSpec(num_layers=1, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16)
layer = graphrt.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)


def model(step):
    return torch.zeros(step.num_reqs, 8, device="cuda")


try:
    cache = graphrt.KVCache.allocate(spec, 8, "cuda")
    graphrt.ReplayManager(model, cache, layer, vocab_size=8)
except graphrt.ConfigError as error:
    print("refused:", error)
else:
    print("built")
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("variables", "before", "printed"),
    [
        ({}, "", "built"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "", f"refused: {BACKEND_ERROR}"),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "", f"refused: {BACKEND_ERROR}"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "", f"refused: {CACHING_ERROR}"),
        (
            {},
            "torch.cuda.init()\ntorch.cuda.memory.caching_allocator_enable(False)",
            f"refused: {CACHING_ERROR}",
        ),
    ],
    ids=["default", "old-variable", "new-variable", "no-caching", "disabled-by-a-call"],
)
def test_a_manager_refuses_the_allocator_of_its_process(variables: dict[str, str], before: str, printed: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", BUILD.format(before=before)],
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout.startswith(printed), result.stdout + result.stderr
