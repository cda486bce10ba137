"""The command line as a fixture."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from graphrt.models import shapes
from graphrt.models.loading import LoadedModel, load_model
from graphrt.models.smollm import default_model_path
from graphrt.models.tokenizer import load_tokenizer
from tests.support.cli import TINY, call
from tests.support.default_model import default_model

_cached_tokenizer = functools.cache(load_tokenizer)


@pytest.fixture
def graphrt(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """`graphrt(*arguments)` returns the exit code, standard output and standard error. The shape "tiny" is known.

    `generate` loads the default model and each tokenizer once. Tests of `load_model`, of `load_tokenizer` and of the
    command in its own process load them again.
    """
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)

    def load(source: Path, **options: object) -> LoadedModel:
        return default_model() if source == default_model_path() else load_model(source, **options)

    monkeypatch.setattr("graphrt.cli.generate.load_model", load)
    monkeypatch.setattr("graphrt.cli.generate.load_tokenizer", _cached_tokenizer)
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
