"""The generated part of docs/graph_bugs.md: the catalogue, with the lines that plant each bug."""

from __future__ import annotations

import re
from pathlib import Path

from tests.bugs.all import CATALOGUE, Bug
from tests.bugs.texts import TEXTS

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "graph_bugs.md"


def cause(bug: Bug) -> str:
    found = re.search(r'"""(.*?)"""', bug.lines, re.DOTALL)
    assert found, f"{bug.name} has no docstring"
    return " ".join(found.group(1).split())


def code(bug: Bug) -> str:
    """Without the decorator, which says what stands beside it, and without the docstring."""
    lines = re.sub(r"\A@add\(.*?\)\n(?=class|def)", "", bug.lines, flags=re.DOTALL)
    return re.sub(r'\n *""".*?"""\n', "\n", lines, count=1, flags=re.DOTALL).replace("\n\n", "\n", 1).rstrip()


def catalogue() -> str:
    lines = ["| | bug | modelled on | tool | blamed |", "|---|---|---|---|---|"]
    for number, bug in enumerate(CATALOGUE.values(), 1):
        blamed = f"`{bug.blamed}`" if bug.blamed else "-"
        where = " (GPU)" if bug.gpu else ""
        lines.append(f"| {number} | {bug.name}{where} | {bug.models} | {bug.tool} | {blamed} |")
    for number, bug in enumerate(CATALOGUE.values(), 1):
        symptom, mend = TEXTS[bug.name]
        shown = f"`{bug.tool}` finds it" + (f" and blames `{bug.blamed}`." if bug.blamed else ".")
        lines += ["", f"### {number}. {bug.name[0].upper()}{bug.name[1:]}", ""]
        lines += [f"- **Symptom:** {symptom}", f"- **Cause:** {cause(bug)}", f"- **Shown by:** {shown}"]
        lines += [f"- **Mend:** {mend}", "", "```python", code(bug), "```"]
    return "\n".join(lines)


def rendered(text: str) -> str:
    """The page with its marked part as it should be."""
    pattern = re.compile(r"(<!-- catalogue -->\n).*?(<!-- /catalogue -->)", re.DOTALL)
    return pattern.sub(lambda found: found.group(1) + catalogue() + "\n" + found.group(2), text)
