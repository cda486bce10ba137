"""Driver lookups of the audit, and probes of cuBLAS workspaces."""

from __future__ import annotations

import pytest
import torch
from cuda.bindings import driver as bindings

from graphrt.capture.inspect import blas, driver_memory
from graphrt.capture.inspect.audit import audit
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from tests.support.audit_examples import BASE, LEAK, POOL, X, graph, kernel, words

ATTRIBUTE = bindings.CUpointer_attribute
NAMES = {
    ATTRIBUTE.CU_POINTER_ATTRIBUTE_MEMORY_TYPE: "type",
    ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: "start",
    ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_SIZE: "size",
}
DEVICE, HOST = bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE, bindings.CUmemorytype.CU_MEMORYTYPE_HOST


class Bindings:
    """Stands for cuda.bindings.driver with 4 KiB allocated at BASE."""

    CUmemorytype, CUpointer_attribute = bindings.CUmemorytype, ATTRIBUTE

    def __init__(self, **values: object) -> None:
        self.values = values

    def cuPointerGetAttribute(self, attribute: object, address: int) -> tuple[object, object]:
        value = self.values.get(NAMES[attribute]) if BASE <= address < BASE + 4096 else None
        if value is None:
            return bindings.CUresult.CUDA_ERROR_INVALID_VALUE, None
        return bindings.CUresult.CUDA_SUCCESS, value


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes the audit believe that CUDA is available."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(driver_memory, "ensure_context", lambda index: None)
    return monkeypatch


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"type": DEVICE, "start": BASE, "size": 4096}, (Owner.LIBRARY, BASE, 4096)),
        ({"type": HOST, "start": bindings.CUdeviceptr(BASE), "size": 4096}, (Owner.HOST, BASE, 4096)),
        ({"type": DEVICE}, (Owner.LIBRARY, BASE + 16, 1)),
        ({"type": DEVICE, "start": 0, "size": 0}, (Owner.LIBRARY, BASE + 16, 1)),
        ({"type": 0}, None),
        ({}, None),
    ],
    ids=["device", "host", "no-range", "wrong-range", "no-type", "unknown"],
)
def test_driver_answers(cuda: pytest.MonkeyPatch, values: dict, expected: tuple | None) -> None:
    cuda.setattr(driver_memory, "driver", Bindings(**values))
    found = driver_memory.driver_memory()(BASE + 16)
    assert (found and (found.owner, found.address, found.nbytes)) == expected
    assert driver_memory.driver_memory()(BASE + 4096) is None


def test_the_driver_is_asked_for_graphs_of_cuda(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(driver_memory, "driver", Bindings(type=HOST, start=BASE, size=4096))
    (finding,) = audit(graph(kernel(words(BASE))), MemoryMap([])).findings
    assert (finding.owner, finding.region) == (Owner.HOST, "pinned memory")
    cuda.setattr(torch.cuda, "is_available", lambda: False)
    assert audit(graph(kernel(words(BASE))), MemoryMap([])).ok


def test_workspaces_follow_named_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Region("workspace of cuBLAS", Owner.LIBRARY, LEAK.address, LEAK.nbytes)
    named = Region("mask", Owner.STATIC, LEAK.address, 64)
    monkeypatch.setattr(blas, "_probe", lambda stream, memory: [workspace])
    memory = blas.with_blas_workspaces(MemoryMap([X, named, POOL, LEAK]), ["stream", "other stream"])
    assert memory.regions == (X, named, workspace, POOL, LEAK)
    assert memory.find(LEAK.address) is named
    assert memory.find(LEAK.address + 64) is workspace
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    assert blas.with_blas_workspaces(MemoryMap([X, LEAK])).regions == (X, LEAK), "nothing has been captured"


def test_probes_have_products_with_and_without_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps a workspace for each of the two libraries. The operands of all products differ."""
    static = {name: torch.ones(shape) for name, shape in blas._operands(2, 3, 5).items()}
    static |= {f"{name} 2": torch.ones(shape) for name, shape in blas._operands(4, 6, 7).items()}
    called = []
    for name in ("mm", "addmm"):
        call = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *o, name=name, call=call, out: called.append((name, call(*o, out=out))))
    blas._products(static)
    assert [(name, tuple(y.shape)) for name, y in called] == [
        ("mm", (2, 5)), ("addmm", (2, 5)), ("mm", (4, 7)), ("addmm", (4, 7)),
    ]  # fmt: skip
    assert called[-1][1] is static["y 2"]
    assert torch.equal(static["y 2"], torch.full((4, 7), 7.0))
