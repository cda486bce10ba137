"""Kernels compiled in threads before their first launch: which, how often, and what a launch does then."""

from __future__ import annotations

import ast
import contextlib
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from graphrt.kernels import compile_ahead
from graphrt.kernels.compile_ahead import compile_threads, compiled, compiling_ahead, counting_compilations, hash_triton
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.native import nvrtc
from graphrt.kernels.native.nvrtc import NativeVariant
from tests.support.fake_triton import FakeTriton, installed

DEVICE = torch.device("cuda", 0)
X = torch.zeros(8)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeTriton]:
    """Triton compiles for sm_90, with an empty cache; there is no device."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    with installed(monkeypatch) as triton_:
        yield triton_


def test_launches_in_the_block_compile_in_threads_and_launch_nothing(kernels: FakeTriton) -> None:
    launcher, before = KernelLauncher(kernels.kernel), len(compiled)
    main, threads = threading.get_ident(), set[int]()
    triton.knobs.runtime.kernel_load_end_hook.add(loaded := lambda *_: threads.add(threading.get_ident()))
    try:
        with counting_compilations():
            with compiling_ahead(DEVICE):
                for block in (16, 32, 16):
                    launcher((1,), X, 8, BLOCK=block)
                assert compile_threads() is not None
            assert kernels.launches == []
            assert compiled[before:] == ["add_one"] * 2
            assert threads
            assert main not in threads
            launcher((1,), X, 8, BLOCK=32)
            assert kernels.launches == [(1, 1, 1)]
            assert len(compiled) == before + 2
            launcher((1,), X, 8, BLOCK=64)  # was not launched in the block
            assert compiled[before + 2 :] == ["add_one"]
            assert main in threads
    finally:
        triton.knobs.runtime.kernel_load_end_hook.remove(loaded)
    assert compile_threads() is None


def test_kernels_in_the_cache_are_not_counted_and_other_listeners_are_called(
    kernels: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit))
    before = len(compiled)
    for _ in range(2):  # as two processes
        with counting_compilations(), compiling_ahead(DEVICE):
            KernelLauncher(kernels.new_kernel())((1,), X, 8, BLOCK=16)
    assert hits == [False, True]
    assert compiled[before:] == ["add_one"]
    kernels.launch(32)
    assert compiled[before:] == ["add_one"]  # outside of the block
    assert hits == [False, True, False]


def test_a_kernel_that_does_not_compile_raises_at_its_first_launch_after_the_block(kernels: FakeTriton) -> None:
    launcher = KernelLauncher(kernels.kernel)
    with compiling_ahead(DEVICE):
        launcher((1,), X, 8, BLOCK=24)  # not a power of two
    with pytest.raises(triton.CompilationError, match="power of 2"):
        launcher((1,), X, 8, BLOCK=24)


def test_kernels_are_parsed_without_garbage_collection(kernels: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python 3.11, threads that parse share a counter. A collection may switch threads inside `ast.parse`."""
    real, collects = ast.parse, list[bool]()

    def parse(*arguments: Any, **named: Any) -> ast.AST:
        collects.append(gc.isenabled())
        return real(*arguments, **named)

    monkeypatch.setattr(ast, "parse", parse)
    with compiling_ahead(DEVICE):
        KernelLauncher(kernels.kernel)((1,), X, 8, BLOCK=16)
    assert set(collects) == {False}
    assert gc.isenabled()


def test_an_error_in_the_block_ends_it(kernels: FakeTriton) -> None:
    with contextlib.suppress(ZeroDivisionError), compiling_ahead(DEVICE):
        KernelLauncher(kernels.kernel)((1,), X, 8, BLOCK=16)
        raise ZeroDivisionError
    assert compile_threads() is None
    kernels.launch(16)
    assert kernels.launches == [(1, 1, 1)]


def test_native_variants_are_loaded_once_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[tuple[str, int]] = []

    def load(variant: NativeVariant, index: int) -> None:
        assert threading.current_thread().name.startswith("graphrt-compile")
        loads.append((variant.entry, index))
        raise RuntimeError("ignored: the first launch reports it")

    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(nvrtc, "load", load)
    variants = [NativeVariant("x.cu", entry, (), 32, 0) for entry in ("a", "b", "a")]
    with compiling_ahead(DEVICE):
        for variant in variants:
            nvrtc.launch(variant, (1, 1), None, DEVICE)
    assert sorted(loads) == [("a", 0), ("b", 0)]


def test_triton_is_hashed_once_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(compile_ahead, "triton_key", lambda: calls.append(threading.current_thread().name))
    hash_triton.cache_clear()
    try:
        hash_triton().join()
        hash_triton().join()
    finally:
        hash_triton.cache_clear()
    assert calls == ["graphrt-hash-triton"]
