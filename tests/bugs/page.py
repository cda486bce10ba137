"""The generated table of docs/graph_bugs.md."""

from __future__ import annotations

import re
from pathlib import Path

from tests.bugs.all import CATALOGUE

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "graph_bugs.md"


def catalogue() -> str:
    lines = ["| | bug | reported as | found by | blamed | fix |", "|---|---|---|---|---|---|"]
    for number, bug in enumerate(CATALOGUE.values(), 1):
        name = f"{bug.name} (GPU)" if bug.gpu else bug.name
        blamed = f"`{bug.blamed}`" if bug.blamed else "-"
        lines.append(f"| {number} | {name} | {bug.models} | {bug.tool} | {blamed} | {bug.fix} |")
    return "\n".join(lines)


def rendered(text: str) -> str:
    """Return the page with a current table."""
    pattern = re.compile(r"(<!-- catalogue -->\n).*?(<!-- /catalogue -->)", re.DOTALL)
    return pattern.sub(lambda found: found.group(1) + catalogue() + "\n" + found.group(2), text)
