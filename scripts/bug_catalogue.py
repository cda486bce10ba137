"""Run the catalogue of injected bugs, and print which were found and what was blamed.

    python -m scripts.bug_catalogue                       # all bugs on a GPU, most of them on a CPU
    python -m scripts.bug_catalogue --only "stale"        # bugs whose name contains a text

Each step runs twice. Without the bug, its check must find nothing. With the bug injected, it must find the bug and
blame the right name. Exits with 1 if either fails. The last line of standard output is a JSON object.
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

from tests.bugs.all import CATALOGUE, Bug

ROOT = Path(__file__).resolve().parent.parent


def judge(bug: Bug, device: torch.device) -> dict[str, Any]:
    """Run one bug: it must be found with the right blame, and nothing may be found without it."""
    start = time.perf_counter()
    entry: dict[str, Any] = {"bug": bug.name, "tool": bug.tool, "expected": bug.blamed}
    try:
        clean, injected = bug.show(False, device), bug.show(True, device)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return entry | {"ok": False, "error": text, "silent": None, "caught": None, "blamed": []}
    right = not bug.blamed or bug.blamed in injected.blamed
    return entry | {
        "ok": not clean.caught and injected.caught and right,
        "silent": not clean.caught,
        "caught": injected.caught,
        "blamed": list(injected.blamed),
        "seconds": round(time.perf_counter() - start, 3),
        "reports": [text for text, wrong in ((clean.text, clean.caught), (injected.text, not right)) if wrong],
    }


def run(only: str, device: torch.device) -> dict[str, Any]:
    """Run every bug whose name contains `only` and that can run on the device."""
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
    lines.append(f"{result['caught']} of {result['bugs']} passed")
    if result["left_out"]:
        lines.append(f"skipped without a GPU: {', '.join(result['left_out'])}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only bugs whose name contains this text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    arguments = parser.parse_args()
    if not any(arguments.only in bug.name for bug in CATALOGUE.values()):
        parser.error(f"--only: no bug has {arguments.only!r} in its name; leave it out to list all")
    device = torch.device(arguments.device, 0 if arguments.device == "cuda" else None)
    result = run(arguments.only, device)
    sys.stdout.write(table(result) + "\n")
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(result["caught"] != result["bugs"])


if __name__ == "__main__":
    main()
