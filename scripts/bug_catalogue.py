"""Runs the catalogue of planted bugs and prints which were caught, and what was blamed.

    python -m scripts.bug_catalogue                       # what this machine can show: all on a GPU, most on a CPU
    python -m scripts.bug_catalogue --only "stale"        # entries whose name contains a text
    python -m scripts.bug_catalogue --page                # rewrites the catalogue in docs/graph_bugs.md, runs nothing
    python -m scripts.bug_catalogue --json docs/results/nvidia-h200/graph_bugs.json

Each bug runs twice. With the bug removed the kit must be silent; with the bug planted its tool must find it, and blame
the right thing. Exits 1 where one of the two fails. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from graphrt.bench.environment import provenance
from tests.bugs.all import CATALOGUE, Bug
from tests.bugs.page import PAGE, rendered

ROOT = Path(__file__).resolve().parent.parent


def judge(bug: Bug, device: torch.device) -> dict[str, Any]:
    """One entry: silent without the bug, caught with it, and the right thing blamed."""
    start = time.perf_counter()
    entry: dict[str, Any] = {"bug": bug.name, "models": bug.models, "tool": bug.tool, "expected": bug.blamed}
    try:
        clean, planted = bug.show(False, device), bug.show(True, device)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return entry | {"ok": False, "error": text, "silent": None, "caught": None, "blamed": []}
    right = not bug.blamed or bug.blamed in planted.blamed
    return entry | {
        "ok": not clean.caught and planted.caught and right,
        "silent": not clean.caught,
        "caught": planted.caught,
        "blamed": list(planted.blamed),
        "seconds": round(time.perf_counter() - start, 3),
        "reports": [text for text, wrong in ((clean.text, clean.caught), (planted.text, not right)) if wrong],
    }


def run(only: str, device: torch.device) -> dict[str, Any]:
    """Every entry whose name contains `only`, and that the device can show."""
    chosen = [bug for bug in CATALOGUE.values() if only in bug.name]
    entries = [judge(bug, device) for bug in chosen if device.type == "cuda" or not bug.gpu]
    left_out = [bug.name for bug in chosen if bug.gpu and device.type != "cuda"]
    caught = sum(entry["ok"] for entry in entries)
    return {"device": str(device), "bugs": len(entries), "caught": caught, "left_out": left_out, "entries": entries}


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':5}{'bug':58}{'tool':9}blamed"]
    for entry in result["entries"]:
        verdict = "ok" if entry["ok"] else "MISS"
        lines.append(f"{verdict:5}{entry['bug']:58}{entry['tool']:9}{', '.join(entry['blamed']) or '-'}")
        lines += [f"     {entry['error']}"] if "error" in entry else []
        lines += [f"     {line}" for text in entry.get("reports", ()) for line in text.splitlines()]
    lines.append(f"{result['caught']} of {result['bugs']} as they should be")
    if result["left_out"]:
        lines.append(f"not shown without a GPU: {', '.join(result['left_out'])}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="entries whose name contains this text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--json", type=Path, help="write the result, with its origin, to this file")
    parser.add_argument("--page", action="store_true", help="rewrite the catalogue in docs/graph_bugs.md")
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(rendered(PAGE.read_text()))
        return
    if not any(arguments.only in bug.name for bug in CATALOGUE.values()):
        parser.error(f"--only: expected a part of a bug's name, got {arguments.only!r}")
    device = torch.device(arguments.device, 0 if arguments.device == "cuda" else None)
    result = run(arguments.only, device)
    sys.stdout.write(table(result) + "\n")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(provenance() | {"data": result}, indent=1) + "\n")
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(result["caught"] != result["bugs"])


if __name__ == "__main__":
    main()
