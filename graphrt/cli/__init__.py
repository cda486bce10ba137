"""The command line `graphrt`: one file per command, on top of the library."""

from __future__ import annotations

from graphrt.cli.interrupts import importing


def run() -> None:
    """Run the command line; see graphrt.cli.main."""
    with importing():
        from graphrt.cli.main import main

    main()
