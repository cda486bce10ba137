"""Which kernels of a step are compiled before it runs, and what is not called for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt import RuntimeConfig, load_model
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.engine.ahead import compile_ahead
from graphrt.engine.graphs import StepGraphs
from graphrt.models.loading import make_runtime
from graphrt.runtime import Runtime
from tests.support.ahead_runs import run_ahead
from tests.support.cli import TINY
from tests.support.toy import HEADS, first_of_two_ranks, make_rig


def test_a_step_compiles_no_kernel_after_all_were_compiled_ahead(tmp_path: Path) -> None:
    found = run_ahead("ahead_program", tmp_path)
    assert found["late"] == []
    assert found["launched"] == 0
    assert found["ahead"] > 15
    assert found["ran"] > 3 * 15  # three sizes
    assert found["slow"] == []


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    model = load_model(TINY, device="cpu").model
    with make_runtime(model, RuntimeConfig(max_num_reqs=2, max_num_tokens=8, max_seq_len=32)) as made:
        yield made


def refuse(*arguments: object, **named: object) -> Any:
    raise AssertionError("called ahead")


def test_attention_has_the_query_heads_of_all_ranks(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    with first_of_two_ranks() as cache:
        manager, heads = make_rig(torch.device("cpu"), cache=cache, page_size=32, capture=False).manager, set[int]()
        backend = manager._program.backend
        monkeypatch.setattr(backend, "compiles_ahead", lambda descriptor: True)
        monkeypatch.setattr(backend, "run", lambda layer, q, *arguments, **named: heads.add(q.shape[1]))
        compile_ahead(manager._program, manager.descriptors)
    assert heads == {2 * HEADS}


def test_models_samplers_and_backends_that_may_keep_results_are_not_called(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = runtime.manager._program
    for name in ("schedule", "run", "plan_capture"):
        monkeypatch.setattr(program.backend, name, refuse)
    compile_ahead(replace(program, model=refuse, sampler=refuse), runtime.manager.descriptors)
    compile_ahead(replace(program, model=refuse, sampler=None), runtime.manager.descriptors)


def test_kernels_of_sizes_that_are_captured_at_first_use_are_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RuntimeConfig(max_num_reqs=4, max_num_tokens=8, max_seq_len=32, lazy_capture=True, decode_sizes=(1, 2, 4))
    given: list[tuple[list[BatchDescriptor], ...]] = []
    monkeypatch.setattr(StepGraphs, "capture", lambda self, *sizes: given.append(tuple(map(list, sizes[:2]))))
    with make_runtime(load_model(TINY, device="cpu").model, config) as made:
        made.capture()
    ((captured, every),) = given
    assert [size.kind for size in captured] == [GraphKind.MIXED, GraphKind.DECODE]
    assert [size.padded_reqs for size in every if size.kind is GraphKind.DECODE] == [4, 2, 1]
    assert set(captured) < set(every)


def test_the_first_layer_of_a_llama_stands_for_all_layers(runtime: Runtime) -> None:
    model = runtime.manager._program.model
    first = model.ahead_model()
    assert (len(first.layers), len(model.layers)) == (1, TINY.num_layers)
    assert first.layers[0] is model.layers[0]
    assert first.head is model.head
