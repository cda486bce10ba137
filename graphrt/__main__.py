"""Run the `graphrt` command as `python -m graphrt`."""

from graphrt.cli.main import main

main()
