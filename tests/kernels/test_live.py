"""copy_live: copy live tokens, fill other tokens without reading them, and skip tokens before `first`."""

from __future__ import annotations

import pytest
import torch

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.ops.live import copy_live

UNTOUCHED = 7.0
SHAPES = [(1, 1, 1), (5, 4, 16), (9, 3, 1), (6, 5, 300)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("first", [None, 0, 2, 99])
def test_copies_live_tokens_and_fills_others(
    op_device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], first: int | None
) -> None:
    tokens = shape[0]
    result = torch.randn(shape[1], tokens, shape[2] + 3).to(op_device, dtype).transpose(0, 1)[..., 1:-2]
    live = (torch.arange(tokens) % 3 != 1).to(op_device)
    result[~live] = float("nan")
    if tokens % 2:  # otherwise neither side is contiguous
        result = result.contiguous()
    out = torch.full(shape, UNTOUCHED, dtype=dtype, device=op_device)
    at = None if first is None else torch.tensor([first], dtype=torch.int32, device=op_device)
    copy_live(result, live, out, fill=float("-inf"), first=at)
    for token in range(tokens):
        if token < (first or 0):
            want = torch.full(shape[1:], UNTOUCHED)
        elif live[token]:
            want = result[token].float().cpu()
        else:
            want = torch.full(shape[1:], float("-inf"))
        assert torch.equal(out[token].float().cpu(), want), f"token {token}"


def test_wrong_arguments_raise() -> None:
    out, live = torch.zeros(3, 2, 4), torch.ones(3, dtype=torch.bool)
    for result, mask, first, text in (
        (torch.zeros(3, 2, 5), live, None, "result"),
        (torch.zeros(3, 2, 4, dtype=torch.float16), live, None, "result"),
        (torch.zeros(3, 2, 4), live[:2], None, "live"),
        (torch.zeros(3, 2, 4), live.int(), None, "live"),
        (torch.zeros(3, 2, 4), live, torch.zeros(2, dtype=torch.int32), "first"),
        (torch.zeros(3, 2, 4), live, torch.zeros(1), "first"),
    ):
        with pytest.raises(ShapeError, match=text):
            copy_live(result, mask, out, first=first)
