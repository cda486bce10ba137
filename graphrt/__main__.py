"""`python -m graphrt` is the command `graphrt`."""

from graphrt.cli.main import main

main()
