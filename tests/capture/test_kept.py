"""kept_graphs(): on a CPU with a class built as torch's, on a GPU with graphs of torch.compile."""

from __future__ import annotations

import pytest
import torch

from graphrt.capture.inspect.audit import audit, memory_of
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.kept import kept_graphs


class Base:
    """Stands for torch's base class, whose `__init__` takes `keep_graph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.kept = keep_graph


@pytest.fixture
def graph_class(monkeypatch: pytest.MonkeyPatch) -> type[Base]:
    class CUDAGraph(Base):
        def __new__(cls, keep_graph: bool = False) -> CUDAGraph:
            return super().__new__(cls)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    return CUDAGraph


def test_graphs_are_kept_only_in_the_context(graph_class: type[Base]) -> None:
    assert not graph_class().kept
    with kept_graphs() as graphs:
        made = [graph_class(), graph_class(False), graph_class(keep_graph=True), type("Mine", (graph_class,), {})()]
        assert graphs == made
        assert all(graph.kept for graph in made)
    assert not graph_class().kept
    assert graph_class(keep_graph=True).kept
    assert len(graphs) == 4


def test_nested_contexts_end_with_their_blocks(graph_class: type[Base]) -> None:
    with kept_graphs() as outer:
        with pytest.raises(KeyError), kept_graphs() as inner:
            raise KeyError(both := graph_class())
        one = graph_class()
        assert (outer, inner) == ([both, one], [both])
        assert one.kept
    assert "__init__" not in vars(graph_class)
    assert not graph_class().kept


@pytest.mark.gpu
def test_graphs_of_torch_compile_have_no_findings() -> None:
    """A step with mode="reduce-overhead": no finding, all nodes are readable, and the results equal eager results."""
    device = torch.device("cuda")
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4))).to(device, torch.bfloat16)
    with torch.inference_mode(), kept_graphs() as graphs:
        compiled = torch.compile(model, mode="reduce-overhead")
        for _ in range(4):
            x = torch.randn(16, 128, device=device, dtype=torch.bfloat16)
            got = compiled(x).clone()
        torch.testing.assert_close(got, model(x), rtol=2e-2, atol=2e-2)
    graph = next(graph for graph in reversed(graphs) if len(inspect_graph(graph).nodes) >= 4)
    report = audit(graph, memory_of(weights=model, pool=graph))
    assert not report.findings, str(report)
