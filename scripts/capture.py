"""Captures the graphs of a model: what each costs, and what is in them; records replay bundles.

    python scripts/capture.py --shape llama-3.2-1b --html graph.html
    python scripts/capture.py --shape llama-3.2-1b --rows 64 --record step.bundle --launches 4

The same as `graphrt capture`, for a checkout that is not installed: `--help` lists the options. The last line of
standard output is one JSON object.
"""

from __future__ import annotations

import sys

from graphrt.cli.main import main

if __name__ == "__main__":
    sys.argv = ["graphrt", "capture", *sys.argv[1:]]
    main()
