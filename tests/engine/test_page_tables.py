"""Block tables on the device that the caller owns: graphs read them, and batches list no pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphrt.batch import Batch
from graphrt.engine.handle import StepFaultError
from graphrt.kernels.errors import ReplayError, ShapeError
from graphrt.kernels.types import FaultCode
from graphrt.replay import ReplayManager
from tests.support.toy import LivelyModel, greedy, make_rig

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8], [6]]
PAGE, ROWS, LONGEST, PAGES = 4, 4, 32, 40


def make_manager(device: torch.device, tables: torch.Tensor | None) -> ReplayManager:
    sizes = {"max_num_reqs": ROWS, "max_num_tokens": 32, "max_seq_len": LONGEST, "decode_sizes": (1, 2, 4)}
    rig = make_rig(
        device, model=LivelyModel(device), num_pages=PAGES, capture=False, options={"page_tables": tables},
        mixed_sizes=(8, 32), **sizes,
    )  # fmt: skip
    return rig.manager


@pytest.mark.parametrize("dims", [2, 3])
def test_requests_read_the_callers_tables(device: torch.device, dims: int) -> None:
    tables = torch.full((1, ROWS, LONGEST // PAGE), -7, dtype=torch.int32, device=device)
    manager = make_manager(device, tables if dims == 3 else tables[0])
    manager.capture()
    free = list(range(PAGES - 1, 0, -1))
    held = [0] * ROWS

    def grow(req_index: int, length: int) -> None:
        while held[req_index] * PAGE < length:
            tables[0, req_index, held[req_index]] = free.pop()
            held[req_index] += 1

    req_indices, lengths = [2, 0, 3], [len(prompt) for prompt in PROMPTS]
    for req_index, length in zip(req_indices, lengths, strict=True):
        grow(req_index, length)
    first = Batch(req_indices=req_indices, seq_lens=lengths, query_lens=lengths, tokens=[t for p in PROMPTS for t in p])
    got = [[token] for token in manager.replay(first).tokens().tolist()]
    for step in range(12):
        lengths = [length + 1 for length in lengths]
        for req_index, length in zip(req_indices, lengths, strict=True):
            grow(req_index, length)
        order = [0, 1, 2] if step % 2 else [2, 0, 1]
        batch = Batch(req_indices=[req_indices[i] for i in order], seq_lens=[lengths[i] for i in order])
        handle = manager.replay(batch)
        assert not handle.why_eager
        for i, token in zip(order, handle.tokens().tolist(), strict=True):
            got[i].append(token)
    assert got == [greedy(manager._program.model, list(prompt), 13) for prompt in PROMPTS]
    manager.close()


def test_bad_pages_are_faults_of_their_request_only(device: torch.device) -> None:
    tables = torch.tensor([[1, 2, 3], [4, PAGES, 6], [7, 8, 9], [10, -1, 11]], dtype=torch.int32, device=device)
    tables = torch.nn.functional.pad(tables, (0, LONGEST // PAGE - 3), value=-1).contiguous()
    manager = make_manager(device, tables)
    manager.capture()
    batch = Batch(req_indices=[0, 1, 2, 3], seq_lens=[5] * 4, query_lens=[5] * 4, tokens=np.arange(20))
    handle = manager.replay(batch)
    with pytest.raises(StepFaultError, match="batch position 1: PAGE_OUT_OF_RANGE"):
        handle.tokens()
    bad = FaultCode.PAGE_OUT_OF_RANGE
    assert [(f.index, f.code, f.value) for f in handle.faults] == [(1, bad, PAGES), (3, bad, -1)]
    want = [greedy(manager._program.model, list(range(5 * row, 5 * row + 5)), 1)[0] for row in (0, 2)]
    assert handle.tokens(raise_on_fault=False)[[0, 2]].tolist() == want
    manager.close()


WRONG = {
    "no tensor": ([[1]], "page_tables: expected Tensor"),
    "dtype": (torch.zeros(ROWS, LONGEST // PAGE, dtype=torch.int64), "page_tables: expected dtype"),
    "rows": (
        torch.zeros(ROWS - 1, LONGEST // PAGE, dtype=torch.int32),
        rf"page_tables: expected shape \[{ROWS}, {LONGEST // PAGE}\], got \[{ROWS - 1}, ",
    ),
    "width": (torch.zeros(1, ROWS, LONGEST // PAGE + 1, dtype=torch.int32), "page_tables: expected shape"),
    "strided": (
        torch.zeros(1, ROWS, 2 * (LONGEST // PAGE), dtype=torch.int32)[..., ::2],
        "expected a contiguous tensor",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tables_raise(case: str) -> None:
    tables, text = WRONG[case]
    with pytest.raises(ShapeError, match=text):
        make_manager(torch.device("cpu"), tables)


def test_batch_with_pages_and_moved_tables_raise() -> None:
    tables = torch.zeros(ROWS, LONGEST // PAGE, dtype=torch.int32)
    manager = make_manager(torch.device("cpu"), tables)
    manager.capture()
    with pytest.raises(ShapeError, match=r"batch\.page_ids: must be empty with page_tables"):
        manager.replay(Batch(req_indices=[0], seq_lens=[1], tokens=[1], page_indptr=[0, 1], page_ids=[1]))
    tables.data = tables.clone()
    with pytest.raises(ReplayError, match="page_tables"):
        [manager.replay(Batch(req_indices=[0], seq_lens=[1], tokens=[1])) for _ in range(100)]
    manager.close()
