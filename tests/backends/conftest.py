"""Set-up of the contract tests: one thread for tiny operations on CPU, FlashInfer's kernels compiled side by side."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tests are thousands of tiny operations, for which a pool of threads is only a burden."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def compiled_flashinfer(request: pytest.FixtureRequest) -> None:
    """It compiles a module per combination of options on first use, 40 s each: here all that the tests need at once."""
    if "gpu" in request.keywords and "flashinfer" in request.node.nodeid.lower() and torch.cuda.is_available():
        _compile_flashinfer()


@cache
def _compile_flashinfer() -> None:
    try:
        jit = importlib.import_module("flashinfer.jit")
    except ImportError:
        return  # the tests say so themselves
    bf16, f16, fp8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    variants = [
        (bf16, bf16, False, False),
        (bf16, bf16, True, False),
        (bf16, bf16, False, True),
        (fp8, f16, False, False),
    ]
    specs = [
        jit.gen_batch_prefill_module("fa2", bf16, kv_dtype, out_dtype, torch.int32, 128, 128, 0, window, softcap, False)
        for kv_dtype, out_dtype, window, softcap in variants
    ]
    with ThreadPoolExecutor(len(specs)) as threads:
        for build in [threads.submit(spec.build, verbose=False) for spec in specs]:
            build.result()
