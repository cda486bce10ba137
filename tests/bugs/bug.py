"""What an entry of the catalogue is: a few lines that plant a bug in a working step, and who must name it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphrt.testing.verify import verify
from graphrt.testing.verify_report import VerifyReport


@dataclass(frozen=True)
class Seen:
    """What a tool of the kit said.

    caught  whether it found anything
    blamed  names of buffers, nodes and host values that it blames, the first finding's first
    text    its whole report
    """

    caught: bool
    blamed: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Bug:
    """One entry.

    name     of the bug, as the documentation has it
    models   the real bugs that it is modelled on
    tool     which tool of the kit must catch it: verify, audit, diff, marker (`capture_safe`), capture
    blamed   what must be among the names that the tool blames
    show     runs the tool on the step, with the bug or without it
    gpu      whether it needs a GPU
    lines    the lines that plant it
    topic    the module that they stand in
    """

    name: str
    models: str
    tool: str
    blamed: str
    show: Callable[[bool, torch.device], Seen]
    gpu: bool = False
    lines: str = field(default="", repr=False)
    topic: str = ""


CATALOGUE: dict[str, Bug] = {}


def add(name: str, models: str, blamed: str, *, tool: str = "verify", gpu: bool = False, **options: Any) -> Callable:
    """Enters a class of subjects, or a function from (planted, device) to `Seen`, or to what `verify` takes.

    That is a step and make_inputs, and a dict of options where they belong to this very step.
    """

    def enter(planting: Any) -> Any:
        assert name not in CATALOGUE, name

        def show(planted: bool, device: torch.device) -> Seen:
            made = planting(planted, device)
            if isinstance(made, Seen):
                return made
            step, make_inputs, *more = made if isinstance(made, tuple) else (made, made.make_inputs)
            return seen(verify(step, make_inputs, **options, **(more[0] if more else {})))

        lines = textwrap.dedent(inspect.getsource(planting))
        CATALOGUE[name] = Bug(name, models, tool, blamed, show, gpu, lines, planting.__module__)
        return planting

    return enter


def seen(report: VerifyReport) -> Seen:
    return Seen(not report.ok, report.blamed, str(report))
