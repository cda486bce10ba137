"""Session set-up: the Triton interpreter on machines without CUDA, shared fixtures, and the check of module names."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder

import pytest
import torch


class _WithoutLayerFolders(PathFinder):
    """Hides the names `kernels` and `capture`, which the checkout on the path would else give to its folders.

    `kernels` is also a popular package that transformers looks for, and it takes the folder for it.
    """

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname in ("kernels", "capture") else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = _WithoutLayerFolders

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # a process per core: threads of one would take the others' time
    os.environ["OMP_NUM_THREADS"] = "1"  # the same for the processes that tests start

CUDA = torch.cuda.is_available()
INTERPRETED = not CUDA and "GRAPHRT_TEST_COMPILED" not in os.environ

# Triton reads the variable when it is first imported, so this precedes every import of graphrt.
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
    from graphrt.kernels.interpreter import install

    install()  # some tests launch kernels by themselves


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if wrong := [item.nodeid for item in items if "alone" in item.keywords and "gpu" not in item.keywords]:
        raise pytest.UsageError(f"marked alone but not gpu, so scripts/gpu_check.py runs them in no process: {wrong}")
    if not CUDA:
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Deal the tests out one after another at the end: by default a process gets its last ones in a block."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when a layer was imported under its folder's name: its enums and ops would then exist twice."""
    wrong = sorted({"kernels", "capture"} & sys.modules.keys())
    if wrong:
        sys.stderr.write(f"\ntop-level modules imported: {wrong}; import graphrt.kernels and graphrt.capture instead\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def _addresses_of_interpreted_kernels() -> Iterator[None]:
    """A kernel that leaves its tensors fails under the interpreter as on a device, whichever test launches it."""
    if not INTERPRETED:
        yield
        return
    from tests.support.interpreter import checked_addresses

    with checked_addresses():
        yield


def _kernel_devices() -> list[object]:
    cpu = pytest.param("cpu", id="cpu-interpreter")
    cuda = pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)
    return [cpu, cuda] if INTERPRETED else [cuda]


@pytest.fixture(params=_kernel_devices())
def kernel_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where a Triton kernel under test runs: the interpreter on CPU tensors, or a CUDA device.

    Programs run in another order each time: the interpreter has to be told to.
    """
    yield from _kernels_on(request.param)


@pytest.fixture(params=["reference", *_kernel_devices()])
def op_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where an operator under test runs: its reference on CPU tensors, or its kernel as with `kernel_device`."""
    if request.param == "reference":
        yield torch.device("cpu")
    else:
        yield from _kernels_on(request.param)


def _kernels_on(name: str) -> Iterator[torch.device]:
    if name == "cuda":
        yield torch.device("cuda")
        return
    from graphrt.kernels.library import interpreted
    from tests.support.interpreter import shuffled_programs

    with interpreted(), shuffled_programs():
        yield torch.device("cpu")


@pytest.fixture
def rng() -> torch.Generator:
    """A seeded generator on the CPU; make inputs there and move them, so that every device sees the same ones."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where runtime tests run: the op trace on a CPU, and CUDA graphs on a GPU."""
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")
