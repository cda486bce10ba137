"""Run the `graphrt` command as `python -m graphrt`."""

from graphrt.cli import run

run()
