"""An entry of the bug catalogue: a few lines that inject a bug into a correct step, and the check that must find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graphrt.testing.verify import verify


@dataclass(frozen=True)
class Seen:
    """The result of a check.

    caught  whether it found anything
    blamed  the names that it blames, those of the first finding first
    text    its report
    """

    caught: bool
    blamed: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Bug:
    """An injected bug.

    name     name in docs/graph_bugs.md, which also names the shipped bugs that it is modelled on
    tool     the check that must find it: verify, audit, diff, marker (`capture_safe`), capture
    blamed   a name that the check must blame, or ""
    show     runs the check on the step, with the bug (True) or without it
    gpu      whether it needs a GPU
    """

    name: str
    tool: str
    blamed: str
    show: Callable[[bool, torch.device], Seen]
    gpu: bool = False


CATALOGUE: dict[str, Bug] = {}


def add(name: str, blamed: str, *, tool: str = "verify", gpu: bool = False, **options: Any) -> Callable:
    """Add a class of subjects, or a function of (injected, device), to the catalogue.

    The function returns a `Seen`, or the arguments of `verify`: a step, make_inputs, and optionally a dict of options.
    """

    def enter(injection: Any) -> Any:
        assert name not in CATALOGUE, name

        def show(injected: bool, device: torch.device) -> Seen:
            made = injection(injected, device)
            if isinstance(made, Seen):
                return made
            step, make_inputs, *more = made if isinstance(made, tuple) else (made, made.make_inputs)
            report = verify(step, make_inputs, **options, **(more[0] if more else {}))
            return Seen(not report.ok, report.blamed, str(report))

        CATALOGUE[name] = Bug(name, tool, blamed, show, gpu)
        return injection

    return enter
