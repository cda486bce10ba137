"""list_pages, kernel and reference, against plain Python."""

from __future__ import annotations

import pytest
import torch

from graphrt.kernels.metadata.page_list import list_pages, list_pages_reference

CASES = {
    "ragged": (4, 5, (1, 5, 0, 3), 20),
    "all full": (3, 4, (4, 4, 4), 12),
    "nothing": (3, 4, (0, 0, 0), 12),
    "one row, wider than a block": (1, 1500, (1400,), 1500),
    "more than the table is wide": (2, 3, (5, 2), 6),
    "more than the buffer holds": (3, 4, (4, 4, 4), 9),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("op", [list_pages, list_pages_reference], ids=["kernel", "reference"])
def test_lists_the_pages_of_each_row(op, case: str, kernel_device: torch.device, rng: torch.Generator) -> None:
    rows, width, counts, capacity = CASES[case]
    wide = torch.randint(1, 1000, (rows, width + 3), generator=rng, dtype=torch.int32)
    table = wide.to(kernel_device)[:, :width]  # strided, as a view of a larger buffer is
    indptr = torch.tensor([0, *counts]).cumsum(0).to(kernel_device, torch.int32)
    indices = torch.full((capacity + 4,), -7, dtype=torch.int32, device=kernel_device)
    op(table, indptr, indices[:capacity])
    want = [-7] * (capacity + 4)
    for row, start in enumerate(indptr.tolist()[:-1]):
        for column in range(min(counts[row], width)):
            if start + column < capacity:
                want[start + column] = int(wide[row, column])
    assert indices.tolist() == want
