"""Runs a replay bundle: as a graph, eagerly, and against what was recorded; times it.

    python scripts/replay.py step.bundle
    python scripts/replay.py step.bundle --backend triton --time

The same as `graphrt replay`, for a checkout that is not installed: `--help` lists the options. The last line of
standard output is one JSON object.
"""

from __future__ import annotations

import sys

from graphrt.cli.main import main

if __name__ == "__main__":
    sys.argv = ["graphrt", "replay", *sys.argv[1:]]
    main()
