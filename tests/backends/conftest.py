"""Fixtures of the backend tests: one thread for small CPU operations, and FlashInfer's kernels compiled in parallel."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch

BF16, F16 = torch.bfloat16, torch.float16
# Dtypes of layers and cache, head size and mask of test_combinations.py: each is a module that FlashInfer compiles.
FLASHINFER_MODULES = (
    ((BF16, BF16), 128, "full"),
    ((F16, F16), 64, "full"),
    ((BF16, torch.float8_e5m2), 128, "full"),
    ((BF16, BF16), 128, "softcap"),
    ((BF16, BF16), 128, "window_softcap"),
    ((BF16, BF16), 256, "full"),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tests run thousands of small operations, which a thread pool slows down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def compiled_flashinfer(request: pytest.FixtureRequest) -> None:
    """FlashInfer compiles a module per combination of options on first use, in 40 s each: compile all of them here."""
    if "gpu" in request.keywords and "flashinfer" in request.node.nodeid.lower() and torch.cuda.is_available():
        _compile_flashinfer()


@cache
def _compile_flashinfer() -> None:
    try:
        jit = importlib.import_module("flashinfer.jit")
    except ImportError:
        return  # the tests say so themselves
    also = [((BF16, BF16), 128, "window"), ((BF16, torch.float8_e4m3fn), 128, "full")]
    specs = [
        jit.gen_batch_prefill_module(
            "fa2", dtype, kv_dtype, torch.float16 if kv_dtype.itemsize == 1 else dtype, torch.int32, head_dim, head_dim,
            0, "window" in mask, "softcap" in mask, False,
        )
        for (dtype, kv_dtype), head_dim, mask in (*FLASHINFER_MODULES, *also)
    ]  # fmt: skip
    with ThreadPoolExecutor(len(specs)) as threads:
        for build in [threads.submit(spec.build, verbose=False) for spec in specs]:
            build.result()
