"""The attention benchmark's own arithmetic, inputs and check; its figures need a GPU, and its peers an installation."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from graphrt.bench.timer import spaced_calls, spacer_calls
from graphrt.kernels.attention.attend import PARTITION_WORDS
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.types import KVLayout
from scripts.rigs import attention_peers as peers
from scripts.rigs.attention_cells import PARTS, make_cells, shrink
from scripts.rigs.attention_inputs import Inputs, check_output
from scripts.rigs.attention_results import (
    OURS,
    CellResult,
    ScheduleTime,
    geometric_means,
    print_report,
)
from scripts.rigs.attention_schedule import make_schedules
from scripts.rigs.attention_sides import GraphrtSide, Prepared, prepare_checked
from scripts.rigs.cells import LAYERS, Cell
from scripts.rigs.measure import LayerTime

CPU = torch.device("cpu")
SMALL = Cell("ragged", "small", (5, 1, 40), 6, 2, 16, page_size=4)


# Cells


def test_cells_of_every_part():
    cells = make_cells(PARTS)
    assert len({(cell.part, cell.name) for cell in cells}) == len(cells)
    assert {part: sum(cell.part == part for cell in cells) for part in PARTS} == {
        "uniform": 14, "ragged": 9, "pages": 12, "fp8": 8, "shapes": 16, "heads": 12, "chunks": 4, "drafts": 6,
        "varlen": 6,
    }  # fmt: skip
    assert cells == make_cells(PARTS)  # the ragged lengths are seeded
    assert all(1 <= length <= 32768 for cell in cells for length in cell.lengths)
    by_name = {cell.name: sorted(cell.lengths) for cell in cells if cell.part == "ragged"}
    for batch in (16, 64, 256):
        assert by_name[f"{batch} x one of 32768"] == [256] * (batch - 1) + [32768]
        assert by_name[f"{batch} x 1 to 4096"][-1] <= 4096
        assert by_name[f"{batch} x Zipf"][-1] <= 16384
        assert by_name[f"{batch} x Zipf"][batch // 2] < 300  # most rows are short
    for cell in map(shrink, cells):
        assert (cell.batch <= 4, max(cell.lengths) <= 64, cell.query_len <= min(cell.lengths)) == (True, True, True)


def test_sizes_of_a_cell():
    assert Cell("uniform", "", (512,)).kv_bytes == 512 * 8 * 128 * 2 * 2
    assert Cell("fp8", "", (512, 3), kv_dtype=torch.float8_e4m3fn).kv_bytes == 515 * 8 * 128 * 2
    assert SMALL.num_pages == 2 + 1 + 10
    causal = Cell("varlen", "", (3,), 1, 1, 8, query_len=3)
    assert causal.flops == 4 * 8 * (1 + 2 + 3)
    assert replace(causal, lengths=(5,), query_len=2).flops == 4 * 8 * (4 + 5)
    assert replace(causal, v_head_dim=4).flops == 2 * 12 * (1 + 2 + 3)
    assert Cell("heads", "", (512,), head_dim=192, v_head_dim=64).kv_bytes == 512 * 8 * (192 + 64) * 2
    chunks = Cell("chunks", "", (512, 513, 600, 3), attention_chunk_size=512)
    assert chunks.kv_bytes == (512 + 1 + 88 + 3) * 8 * 128 * 2 * 2


def test_unknown_part():
    with pytest.raises(ConfigError, match=r"expected some of uniform, .*, got prefill, decode"):
        make_cells(["uniform", "prefill", "decode"])


# Arithmetic


def result(cell, ours=None, fa3=None, flashinfer=None, **more):
    def side(us, **fields):
        return LayerTime(reason="not here") if us is None else LayerTime(run_us=us, **fields)

    return CellResult(cell, {OURS: side(ours, **more), "FA3": side(fa3), "FlashInfer": side(flashinfer)})


def test_what_flashinfer_is_asked_for():
    def kernels(**fields):
        return [module.kernel for module in peers.flashinfer_modules(Cell("x", "x", (40,), **fields))]

    assert kernels() == ["tensor cores", "CUDA cores", "XQA"]
    assert kernels(num_q_heads=16, num_kv_heads=1, page_size=64) == ["tensor cores", "XQA"]
    assert kernels(page_size=48) == ["tensor cores", "CUDA cores"]
    asked = [cell.part for cell in make_cells(PARTS) if peers._flashinfer_fault(cell) is None]
    assert {part: asked.count(part) for part in ("heads", "chunks", "varlen", "uniform")} == {
        "heads": 2, "chunks": 2, "varlen": 0, "uniform": 14,
    }  # fmt: skip


def test_ratio_is_to_the_best_peer():
    """The schedule counts at a layer's share, and the host plan does not."""
    cell = make_cells(["uniform"])[0]
    assert result(cell, 8.0, 16.0, 10.0).ratio == pytest.approx(0.8)
    assert result(cell, 8.0, 9.0).ratio == pytest.approx(8 / 9)
    assert result(cell, 8.0).ratio is None
    assert result(cell, None, 9.0, 10.0).ratio is None
    assert result(cell, 10.0, 1.0, schedule_us=6.4, host_us=500.0).ratio == pytest.approx(10.0 + 6.4 / LAYERS)


def made_up():
    """Results in which the better peer takes 1.5 times as long as we do."""
    times = [(cell, 4.0 + cell.kv_bytes / 4.3e6) for cell in make_cells(PARTS)]
    return [result(cell, us, us * 1.5 * 1.1, us * 1.5) for cell, us in times]


def schedules():
    return [ScheduleTime(mode, rows, 128, 2.5 * rows / 256) for mode in ("decode", "mixed") for rows in (64, 256, 512)]


@pytest.mark.parametrize("case", make_schedules()[:10], ids=lambda case: case.mode)
def test_schedules(case):
    """The first ten of forty: one of each mode."""
    assert len({(case.mode, case.rows) for case in make_schedules()}) == 40
    plan = case.plan(CPU)
    work_list = case.call(CPU)()
    assert work_list.numel() >= plan.work_list_words
    assert work_list[plan.schedule.num_partitions * PARTITION_WORDS] > 0, "no segments"


def test_means():
    assert geometric_means(made_up()) == pytest.approx(dict.fromkeys(PARTS, 1 / 1.5))
    assert geometric_means([]) == {}


# What is shown


def test_report(tmp_path):
    results = made_up()
    results[2] = result(results[2].cell, 20.0, 25.0)
    console = Console(file=(tmp_path / "report").open("w"), width=160)
    print_report(console, results, schedules())
    console.file.close()
    text = (tmp_path / "report").read_text()
    assert "…" not in text  # nothing is cut at the width of a pipe
    assert "no time of FlashInfer for uniform 1 x 8192: not here" in text
    assert "the schedule alone" in text
    for cell in make_cells(PARTS):
        assert cell.name in text


def test_results_as_json():
    cell = make_cells(["uniform"])[0]
    record = json.loads(json.dumps(result(cell, 8.0, None, 10.0, schedule_us=3.2, host_us=900.0).to_json()))
    assert record["ratio"] == pytest.approx(0.81)
    assert record[OURS]["us"] == record[OURS]["device_us"] == pytest.approx(8.1)
    assert record[OURS]["run_us"] == 8.0
    assert record["FA3"] == {"us": None, "device_us": None, "reason": "not here"}


# Inputs and the check of outputs


def plain_attention(inputs, layer):
    cell = inputs.cell
    out = torch.empty(inputs.empty_out().shape[1:], dtype=torch.float64)
    for row, length in enumerate(cell.lengths):
        pages = inputs.block_table[row, : -(-length // cell.page_size)].long()
        k, v = (
            torch.stack([x[layer, p] for p in pages]).flatten(0, 1)[:length].double().repeat_interleave(
                cell.num_q_heads // cell.num_kv_heads, 1
            )
            for x in (inputs.k.to(torch.bfloat16), inputs.v.to(torch.bfloat16))
        )  # fmt: skip
        for new in range(cell.query_len):
            seen = length - cell.query_len + new + 1
            q = inputs.q[layer, row * cell.query_len + new].double()
            first = cell.first_seen(seen - 1)
            weights = torch.einsum("hd,shd->hs", q, k[first:seen]).mul(1 / math.sqrt(cell.head_dim)).softmax(-1)
            out[row * cell.query_len + new] = torch.einsum("hs,shd->hd", weights, v[first:seen])
    return out


CELLS = {
    "decode": SMALL,
    "HND": replace(SMALL, layout=KVLayout.HND),
    "fp8": replace(SMALL, kv_dtype=torch.float8_e4m3fn),
    "fp8-HND": replace(SMALL, kv_dtype=torch.float8_e4m3fn, layout=KVLayout.HND),
    "drafts": replace(SMALL, lengths=(7, 4, 9), query_len=4),
    "varlen": replace(SMALL, lengths=(20, 17, 22), query_len=17),
    "two_sizes": replace(SMALL, v_head_dim=24),
    "two_sizes-HND": replace(SMALL, v_head_dim=24, layout=KVLayout.HND),
    "chunks": replace(SMALL, attention_chunk_size=16),
}


@pytest.mark.parametrize("name", CELLS)
def test_inputs_and_check(name):
    cell = CELLS[name]
    inputs = Inputs.make(cell, CPU)
    assert inputs.k.shape == (1, cell.num_pages, 4, 2, 16)
    assert inputs.v.shape == (1, cell.num_pages, 4, 2, cell.v_head_dim or 16)
    assert inputs.k.stride(2) == (16 if cell.layout is KVLayout.HND else 32)
    assert sorted(inputs.page_indices.tolist()) == list(range(cell.num_pages))
    for row, length in enumerate(cell.lengths):
        pages = inputs.page_indices[inputs.page_indptr[row] : inputs.page_indptr[row + 1]]
        assert inputs.block_table[row, : len(pages)].tolist() == pages.tolist()
        assert not inputs.block_table[row, len(pages) :].any()
        assert (len(pages) - 1) * cell.page_size + int(inputs.last_page_len[row]) == length
        assert inputs.row_kv(0, row)[0].shape == (length, 2, 16)
    assert torch.equal(inputs.q, inputs.q.to(cell.kv_dtype).to(torch.bfloat16)), "queries have values of the cache"
    right = plain_attention(inputs, 0).to(torch.bfloat16)
    check_output(inputs, 0, right)
    for wrong in (torch.zeros_like(right), right * 1.2, right.roll(1, 1), right * math.nan):
        with pytest.raises(AssertionError, match="expected a relative error of at most"):
            check_output(inputs, 0, wrong)


# Sides


class FakeSide:
    name = "fake"

    def __init__(self, outcome):
        self.outcome = outcome

    def prepare(self, cell, inputs):
        if self.outcome == "refuses":
            raise UnsupportedError("head_dim 16: expected 64, 128 or 256")
        right = plain_attention(inputs, 0).to(torch.bfloat16)
        first = torch.zeros_like(right) if self.outcome in ("half", "wrong") else right
        second = first if self.outcome == "wrong" else right
        written = (lambda x: lambda: x) if self.outcome == "stale" else (lambda x: x.clone)
        return [Prepared("first", [written(first)]), Prepared("second", [written(second)])]


OUTCOMES = {
    "right": (["first", "second"], None),
    "half": (["second"], None),
    "wrong": ([], "expected a relative error of at most 0.02, got 1"),
    "stale": ([], "got nan"),  # right once, but not written by the call
    "refuses": ([], "head_dim 16: expected 64, 128 or 256"),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_only_right_results_are_timed(outcome):
    variants, text = OUTCOMES[outcome]
    prepared, reason = prepare_checked(FakeSide(outcome), SMALL, Inputs.make(SMALL, CPU))
    assert [p.variant for p in prepared] == variants
    assert reason is None if text is None else text in reason


def test_spacers_leave_the_outputs_alone():
    outs = [torch.full((2, 3), float(i), dtype=torch.bfloat16) for i in (1, 2)]
    sinks = [call() for call in spaced_calls([lambda out=out: out for out in outs], CPU)]
    assert sinks[0].data_ptr() == sinks[1].data_ptr()  # one after another, each on the one before
    assert sinks[1].item() == 3.0
    assert [call() for call in spacer_calls(outs)][-1].item() == 3.0
    assert outs[0].eq(1).all()


@pytest.mark.parametrize("name", ["decode", "HND", "drafts", "varlen", "two_sizes", "chunks"])
def test_graphrt_side_passes_its_check(name):
    cell = CELLS[name]
    prepared, reason = prepare_checked(GraphrtSide(), cell, Inputs.make(cell, CPU))
    assert reason is None
    assert [p.variant for p in prepared][-1:] == (["prompts, packed"] if name == "varlen" else [prepared[0].variant])


@pytest.mark.parametrize("peer", ["fa3", "flashinfer"])
def test_missing_peer_says_how_to_get_it(monkeypatch, peer):
    module = {"fa3": "flash_attn_interface", "flashinfer": "flashinfer"}[peer]
    monkeypatch.setitem(sys.modules, module, None)
    make = {"fa3": peers.Fa3Side, "flashinfer": lambda: peers.FlashInferSide(CPU)}[peer]
    with pytest.raises(UnsupportedError, match=rf"{module}: .* run pip install .graphrt\[{peer}\].*--without-peers"):
        make()


def test_dry_run(tmp_path):
    root = Path(__file__).resolve().parents[2]
    options = ["--device", "cpu", "--without-peers", "--quick", "--only", "uniform,varlen"]
    command = [sys.executable, "-m", "scripts.bench_attention", *options]
    finished = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    record = json.loads(finished.stdout.splitlines()[-1])
    assert record["name"] == "attention"
    assert record["sides"] == [OURS]
    assert len(record["cells"]) == 20
    assert all(cell[OURS]["us"] is not None for cell in record["cells"])
