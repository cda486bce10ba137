"""Where tables and progress are printed."""

from __future__ import annotations

from rich.console import Console

_PIPE_WIDTH = 120


def make_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal; into a file or pipe, where rich would cut tables at 80 columns, 120 wide."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_PIPE_WIDTH)
