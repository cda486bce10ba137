"""The benchmark of backends: its arithmetic, its check of results, and a dry run; its figures need a GPU."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from graphrt.backends import registry
from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import Capabilities
from graphrt.backends.ranking import parse_ranking, ranking_record
from graphrt.backends.registry import register_backend
from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.backends.triton import TritonBackend
from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.library import INTERPRETER_AVAILABLE
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata
from scripts import bench_backends
from scripts.rigs.backend_rig import Rig, make_context, page_size_of
from scripts.rigs.cells import LAYERS, Cell, uniform_cell
from scripts.rigs.measure import LayerTime

CPU = torch.device("cpu")


def tiny_cells(batches: tuple[int, ...], contexts: tuple[int, ...]) -> list[Cell]:
    return [uniform_cell("x", batch, context, **bench_backends.TINY) for batch in batches for context in contexts]


def test_costs() -> None:
    time = LayerTime(host_us=64.0, schedule_us=3.2, run_us=10.0)
    assert time.device_us == pytest.approx(10.0 + 3.2 / LAYERS)
    assert time.us == pytest.approx(10.0 + 3.2 / LAYERS + 64.0 / LAYERS)
    assert LayerTime(reason="none").us is None
    assert uniform_cell("x", 2, 512).kv_bytes == 2 * 2 * 512 * 8 * 128 * 2
    assert len({(cell.batch, cell.longest) for cell in bench_backends.CELLS}) == 12


class LargePages(TorchReferenceBackend):
    """Pages of 256 in HND, and an account of the verbs."""

    name = "large_pages"
    capabilities = Capabilities(
        devices=("cpu",), dtypes=(torch.float32,), kv_dtypes=(torch.float32,), head_dims=None, page_sizes=(512, 256),
        layouts=(KVLayout.HND,), max_query_len=1, sliding_window=False, logits_softcap=False, mixed=False,
    )  # fmt: skip
    calls: tuple[Any, ...] = ()

    def allocate(self) -> None:
        type(self).calls = ("allocate",)

    def plan_capture(self, descriptor: BatchDescriptor) -> None:
        type(self).calls += ("plan_capture", descriptor)

    def plan_replay(self, descriptor: BatchDescriptor, batch: Batch) -> None:
        type(self).calls += (("plan_replay", batch),)

    def schedule(self, metadata: StepMetadata) -> None:
        type(self).calls += ("schedule",)


class Wrong(LargePages):
    name = "wrong"

    def run(self, layer: AttentionLayer, q: torch.Tensor, metadata: StepMetadata, out: torch.Tensor, **_: Any) -> None:
        out.copy_(q)


def rig_of(cls: type[AttentionBackend], cells: list[Cell]) -> Rig:
    return Rig(cls, make_context(cls, cells, CPU))


def test_the_contract_is_driven_in_order() -> None:
    cells = tiny_cells((1, 3), (5, 300))
    rig = rig_of(LargePages, cells)
    assert page_size_of(LargePages) == 256
    assert (rig.context.max_num_reqs, rig.context.max_seq_len, rig.context.kv_groups[0].layout) == (
        3,
        300,
        KVLayout.HND,
    )
    time = rig.measure(cells[-1], 2)
    assert time.reason is None
    assert time.us is not None
    assert time.us > 0
    first, *rest = LargePages.calls
    assert first == "allocate"
    assert rest[:2] == ["plan_capture", BatchDescriptor.decode(3)]
    plans = [call[1] for call in rest[2:] if call[0] == "plan_replay"]
    assert rest[2 + len(plans)] == "schedule", "every plan precedes the schedule"
    last = plans[-1]
    assert last.seq_lens.tolist() == [300] * 3
    assert last.page_indptr.tolist() == [0, 2, 4, 6]
    assert sorted(last.page_ids.tolist()) == list(range(1, 7)), "the null page belongs to no row"
    assert len({int(plan.seq_lens[0]) for plan in plans}) > 10, "plans of one batch could be remembered"
    last.check_capacity(max_seq_len=300, inputs_words=10_000, groups=1)


@pytest.mark.skipif(not INTERPRETER_AVAILABLE, reason="needs TRITON_INTERPRET=1")
def test_triton_passes_the_check_of_results() -> None:
    rig = rig_of(TritonBackend, cells := tiny_cells((2,), (17,)))
    time = rig.measure(cells[0], 1)
    assert time.reason is None
    assert time.run_us is not None
    assert time.schedule_us is not None
    rig.close()


def test_a_wrong_result_is_no_figure() -> None:
    (time,) = bench_backends.measure(Wrong, tiny_cells((1,), (9,)), CPU, 1).values()
    assert time.us is None
    assert str(time.reason).startswith("AssertionError: row 0, layer 0: expected a relative error of at most 0.02")


def test_a_backend_that_cannot_be_built_has_a_reason_in_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(self: LargePages) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(LargePages, "allocate", allocate)
    cells = tiny_cells((1,), (9, 10))
    times = bench_backends.measure(LargePages, cells, CPU, 1)
    assert {cell: time.reason for cell, time in times.items()} == dict.fromkeys(cells, "RuntimeError: no compiler")


def test_what_cannot_be_captured_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LargePages, "graph_unsupported_reason", lambda self, descriptor: "reads lengths on the host")
    time = rig_of(LargePages, tiny_cells((1,), (9,))).measure(tiny_cells((1,), (9,))[0], 1)
    assert time == LayerTime(reason="reads lengths on the host")


def test_dry_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever is registered is measured; the last line is what make_docs makes the table from."""
    monkeypatch.setattr(registry, "_registered", {})
    register_backend(LargePages)
    register_backend(Wrong)
    monkeypatch.setattr(sys, "argv", ["bench_backends.py", "--device", "cpu", "--quick"])
    bench_backends.main()
    *shown, last = capfd.readouterr().out.splitlines()
    record = json.loads(last)
    assert {"name", "gpu", "tree", "command", "packages", "layers"} <= record.keys()
    assert record["page_sizes"]["torch_reference"] == 16
    assert record["page_sizes"]["large_pages"] == 256
    assert len(record["cells"]) == 4
    for cell in record["cells"]:
        assert cell["backends"]["large_pages"]["us"] > 0
        assert cell["backends"]["torch_reference"]["run_us"] > 0
        assert "relative error" in cell["backends"]["wrong"]["reason"]
        assert not INTERPRETER_AVAILABLE or "reason" not in cell["backends"]["triton"]
    assert any("1 x 40" in line and "large_pages" in line for line in shown)
    assert any(line.startswith("no time of wrong for 1 x 8") for line in shown)
    made = ranking_record({"gpu": "a device", "tree": "abc", "data": record}, None)
    assert {"large_pages", "torch_reference"} <= parse_ranking(made).names


def test_unknown_backends_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_backends.py", "--device", "cpu", "--only", "tritn"])
    with pytest.raises(SystemExit, match="bench_backends: backend: expected one of triton"):
        bench_backends.main()
