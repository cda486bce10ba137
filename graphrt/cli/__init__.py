"""The command-line tool `graphrt`, based on the library, with one file per command."""

from __future__ import annotations

from graphrt.cli.interrupts import importing


def run() -> None:
    """Run the command line; see graphrt.cli.main."""
    with importing():
        from graphrt.cli.main import main

    main()
