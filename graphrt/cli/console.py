"""Where tables and progress are printed."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from graphrt.capture.graph import GraphReport
from graphrt.runtime import Runtime

_PIPE_WIDTH = 120


def make_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal; into a file or pipe, where rich would cut tables at 80 columns, 120 wide."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_PIPE_WIDTH)


def capture_with_bar(runtime: Runtime, log: Console) -> None:
    """Capture the capture_sizes of a runtime, with a bar; then a line that says what they cost."""
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
