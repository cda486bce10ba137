"""`python -m graphrt` is the command `graphrt`."""

from graphrt.cli import run

run()
