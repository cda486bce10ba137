"""The result of `verify`: its findings with their causes, the checks that ran, and the checks that did not."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from graphrt.testing.verify.compare import Difference

_PACKAGES = tuple(f"{package}{os.sep}" for package in (Path(torch.__file__).parent, Path(__file__).parents[2]))


@dataclass(frozen=True, slots=True)
class VerifyFinding:
    """One fault of the step.

    Attributes:
        check: name of the check that found it, a key of `VerifyReport.checked`.
        case: name of the case, or "" if the finding does not belong to a single case.
        captured: name of the case at which the graph was captured, or "" for an eager run.
        text: what happened.
        difference: the first element that differs, or None if nothing was compared.
        blamed: names of the buffers, arguments, Python values or memory that cause it.
        because: what is stale or frozen in them, and how to fix it.
        repeats: number of further replays with the same check and cause.
    """

    check: str
    case: str
    captured: str
    text: str
    difference: Difference | None = None
    blamed: tuple[str, ...] = ()
    because: str = ""
    repeats: int = 0

    def __str__(self) -> str:
        case = f", case {self.case}" if self.case else ""
        captured = f", captured at {self.captured}" if self.captured else ""
        lines = [f"{self.check}{case}{captured}: {self.text}"]
        if self.difference is not None:
            lines.append(f"  {self.difference}")
        if self.blamed:
            lines.append(f"  blamed: {', '.join(self.blamed)}")
        if self.because:
            lines.append(f"  {self.because}")
        if self.repeats:
            lines.append(f"  the same in {self.repeats} more replays")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`. `str()` returns the whole report.

    Attributes:
        name: name of the step.
        findings: the faults, in the order of detection.
        checked: what each check did, by name, for checks that ran.
        not_checked: why a check did not run, or what it could not detect, by name.
        eager_runs, replays: number of runs.
        seconds: duration in seconds, including captures. `check_seconds` excludes captures.
    """

    name: str
    findings: tuple[VerifyFinding, ...]
    checked: Mapping[str, str]
    not_checked: Mapping[str, str]
    eager_runs: int
    replays: int
    seconds: float
    check_seconds: float

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    @property
    def blamed(self) -> tuple[str, ...]:
        """The causes of all findings, without duplicates."""
        return tuple(dict.fromkeys(name for finding in self.findings for name in finding.blamed))

    def raise_if_any(self) -> None:
        """Raise if there are findings.

        Raises:
            AssertionError: with the whole report, if there are findings.
        """
        if self.findings:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        count = f"{len(self.findings)} finding{'s' if len(self.findings) != 1 else ''}" if self.findings else "ok"
        lines = [f"verify {self.name}: {count}; {self.replays} replays, {self.eager_runs} eager runs, "
                 f"{self.seconds:.2f} s"]  # fmt: skip
        for number, finding in enumerate(self.findings, 1):
            first, *rest = str(finding).splitlines()
            lines += [f"  {number}. {first}", *(f"     {line}" for line in rest)]
        lines.append("checked:")
        lines += [f"  {name}: {what}" for name, what in self.checked.items()]
        if self.not_checked:
            lines.append("not checked:")
            lines += [f"  {name}: {why}" for name, why in self.not_checked.items()]
        return "\n".join(lines)


def raised(error: BaseException) -> str:
    """Describe an exception and the line of the caller's code that raised it."""
    return f"{type(error).__name__}: {error}{own_line(error)}"


def own_line(error: BaseException) -> str:
    """Return the line of the caller's code that raised: "; at step.py:12, `n = int(lengths.max())`"."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_PACKAGES)]
    if not frames and error.__cause__ is not None:
        return own_line(error.__cause__)
    if not frames:
        return ""
    last = frames[-1]
    return f"; at {Path(last.filename).name}:{last.lineno}" + (f", `{last.line}`" if last.line else "")
