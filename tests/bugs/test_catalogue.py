"""The bug catalogue: each bug is found and blamed, correct steps have no findings, and the page is current."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bug_catalogue import judge, main, table
from tests.bugs.all import CATALOGUE, Bug, Seen

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "graph_bugs.md"
CPU = torch.device("cpu")
ON_CPU = [(name, CPU) for name, bug in CATALOGUE.items() if not bug.gpu]
ON_GPU = [pytest.param(name, torch.device("cuda", 0), marks=pytest.mark.gpu) for name in CATALOGUE]


def shown(entry: dict[str, Any]) -> str:
    return table({"entries": [entry], "caught": int(entry["ok"]), "bugs": 1, "left_out": []})


@pytest.mark.parametrize(("name", "device"), [*ON_CPU, *ON_GPU])
def test_an_injected_bug_is_blamed_and_the_correct_step_has_no_findings(name: str, device: torch.device) -> None:
    entry = judge(CATALOGUE[name], device)
    assert entry["ok"], shown(entry)


# -- the page


def blocks(mark: str) -> list[str]:
    return re.findall(rf"<!-- {mark} -->\n^```(?:python)?\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def run_python(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )  # fmt: skip


def test_the_table_of_the_page_lists_every_bug_with_its_reports_and_fix() -> None:
    rows = [re.split(r" *\| *", line)[1:-1] for line in PAGE.read_text().splitlines() if re.match(r"\| \d", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 1 + len(CATALOGUE)))
    listed = {name: (tool, blamed.strip("`-")) for _, name, _, tool, blamed, _ in rows}
    assert listed == {bug.name + " (GPU)" * bug.gpu: (bug.tool, bug.blamed) for bug in CATALOGUE.values()}
    assert all(reports and fix for _, _, reports, _, _, fix in rows)
    assert len(CATALOGUE) >= 44
    assert len(ON_CPU) >= 37


def test_the_examples_of_the_page_run_without_the_runtime() -> None:
    (plain,), (runner,), (shown,) = blocks("plain"), blocks("runner"), blocks("report")
    check = (
        "import sys\nloaded = [n for n in sys.modules if n.startswith('graphrt.')]\n"
        "used = {n.split('.')[1] for n in loaded}\n"
        "assert used <= {'capture', 'kernels', 'testing', 'graph_checks'}, used\n"
    )
    result = run_python(f"{plain}\n{runner}\n{check}")
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    for line in shown.splitlines():
        assert " ".join(line.split()) in said, result.stdout
    assert "x[3:8] holds case 0's values" in said


def test_the_example_of_a_manager_runs() -> None:
    (source,) = blocks("runtime")
    result = run_python(source, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    assert "verify RuntimeSubject: ok" in result.stdout


# -- the script


# Whether something is found without and with the bug, the blame, and the text that is printed below the entry.
JUDGED = {
    "right": ((False, True), "x", ""),
    "found without the bug": ((True, True), "x", "its report"),
    "not found": ((False, False), "x", ""),
    "wrong blame": ((False, True), "y", "its report"),
    "an error": ((), "x", "IndexError"),
}


@pytest.mark.parametrize("case", JUDGED)
def test_the_script_judges(case: str) -> None:
    caught, blamed, text = JUDGED[case]
    show = lambda injected, device: Seen(caught[injected], (blamed,), "its report")  # noqa: E731
    entry = judge(Bug("made up", "verify", "x", show), CPU)
    assert entry["ok"] is (case == "right")
    _, verdict, *below, _ = shown(entry).splitlines()
    assert verdict.split()[0] == ("ok" if case == "right" else "MISS")
    assert text in "".join(below)
    assert bool(below) is bool(text)


def test_the_script_prints_its_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bug_catalogue", "--only", "max_seq_len", "--device", "cpu"])
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr().out
    assert not caught.value.code, printed
    said = json.loads(printed.splitlines()[-1])
    assert said["bugs"] == said["caught"] == 1
    assert "a frozen max_seq_len" in printed
