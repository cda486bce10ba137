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


@pytest.fixture
def refused(graphrt: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """`refused(*arguments)` returns the error, on one line, of a command that exits with `code` and prints nothing."""

    def error_of(*arguments: object, code: int = 1) -> str:
        found, out, err = graphrt(*arguments)
        assert (found, out) == (code, "")
        assert "Traceback" not in err
        return err.replace("\n", " ")

    return error_of
