"""Consoles for tables and progress."""

from __future__ import annotations

import contextlib
import sys
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from graphrt.capture.graph import GraphReport
from graphrt.runtime import Runtime

_PIPE_WIDTH = 120


class _Log:
    """Standard error that ignores write errors, because a log that cannot be written must not end the command."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def make_console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or 120 columns for a file or pipe, where rich would use 80."""
    file = cast("IO[str]", _Log()) if stderr and sys.stderr is not None else None
    console = Console(stderr=stderr, file=file)
    return console if console.is_terminal else Console(stderr=stderr, file=file, width=_PIPE_WIDTH)


def capture_with_bar(runtime: Runtime, log: Console) -> None:
    """Capture all sizes of a runtime with a progress bar, and print their costs."""
    total = len(runtime.manager.descriptors)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=log, transient=True, disable=not total) as bar:
        task = bar.add_task("capturing graphs", total=total)

        def advance(report: GraphReport) -> None:
            bar.update(task, advance=1, description=f"captured {report.descriptor}")

        runtime.capture(advance)
    stats = runtime.stats()
    if stats.graphs:
        log.print(
            f"captured {total} graphs ({stats.recorder}, backend {stats.backend}) in {stats.capture_seconds:.2f} s: "
            f"{stats.capture_seconds / total:.3f} s, {stats.graph_bytes / total / (1 << 20):.1f} MiB and "
            f"{max(g.nodes for g in stats.graphs)} nodes per graph",
            highlight=False,
            soft_wrap=True,
        )
