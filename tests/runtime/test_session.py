"""Sessions: rows that live on the device, against the toy model's float64 oracle."""

from __future__ import annotations

import pytest
import torch

from graphrt.generate import SamplingParams
from graphrt.kernels.types import RowEnd
from graphrt.session import DecodeSession
from tests.runtime.toy import greedy, make_runtime

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [6]]


@pytest.mark.parametrize("loop_sizes", [(), (1, 2, 4)], ids=["launch_by_launch", "loop"])
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_rows_go_on_by_themselves(device: torch.device, steps: int, loop_sizes: tuple[int, ...]) -> None:
    runtime = make_runtime(device, num_pages=60, config={"loop_sizes": loop_sizes})
    runtime.capture()
    with DecodeSession(runtime) as session:
        rows = [session.add(prompt, SamplingParams(max_new_tokens=12)) for prompt in PROMPTS]
        while session.running:
            session.run(steps)
            session.collect(wait=True)
        for row, prompt in zip(rows, PROMPTS, strict=True):
            assert row.tokens == greedy(runtime.manager._program.model, prompt, 12)
            assert row.end is RowEnd.LENGTH
    assert runtime.allocator.num_free == 59
