"""The command line as a fixture."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from graphrt.models import shapes
from tests.support.cli import TINY, call


@pytest.fixture
def graphrt(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """`graphrt(*arguments)` returns the exit code, standard output and standard error. The shape "tiny" is known."""
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    return lambda *arguments: call(monkeypatch, capfd, *map(str, arguments))
