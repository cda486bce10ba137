"""Where runtime tests run: the op trace twin on CPU, and CUDA graphs on a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")
