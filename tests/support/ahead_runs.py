"""Runs programs that compile kernels ahead, each in a process without the Triton interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_ahead(module: str, cache: Path) -> dict[str, Any]:
    """Return the JSON in the last line that a module of this folder prints. `cache` is the folder for kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", f"tests.support.{module}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
