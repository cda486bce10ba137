"""The bug catalogue: each bug is found and blamed, correct steps have no findings, and the page is current."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.bug_catalogue import judge, table
from tests.bugs.all import CATALOGUE, Bug, Seen
from tests.bugs.page import PAGE, rendered

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = [name for name, bug in CATALOGUE.items() if not bug.gpu]
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ON_CPU)
def test_an_injected_bug_is_blamed_and_the_correct_step_has_no_findings(name: str) -> None:
    bug = CATALOGUE[name]
    clean = bug.show(False, CPU)
    assert not clean.caught, clean.text
    injected = bug.show(True, CPU)
    assert injected.caught, injected.text
    assert not bug.blamed or bug.blamed in injected.blamed, injected.text


@pytest.mark.gpu
@pytest.mark.parametrize("name", CATALOGUE)
def test_an_injected_bug_is_blamed_on_a_gpu(name: str) -> None:
    entry = judge(CATALOGUE[name], torch.device("cuda", 0))
    assert entry["ok"], table({"entries": [entry], "caught": 0, "bugs": 1, "left_out": []})


def test_each_bug_names_the_shipped_bug_and_the_fix() -> None:
    assert len(CATALOGUE) >= 44
    assert len(ON_CPU) >= 37
    assert {bug.tool for bug in CATALOGUE.values()} <= {"verify", "audit", "diff", "marker", "capture"}
    assert all(bug.models and bug.fix for bug in CATALOGUE.values())


# -- the page


def blocks(mark: str) -> list[str]:
    return re.findall(rf"<!-- {mark} -->\n^```(?:python)?\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )  # fmt: skip


def test_the_table_of_the_page_is_current() -> None:
    text = PAGE.read_text()
    assert rendered(text) == text, "run python -m scripts.bug_catalogue --page"


def test_the_examples_of_the_page_run_without_the_runtime() -> None:
    (plain,), (runner,), (shown,) = blocks("plain"), blocks("runner"), blocks("report")
    check = (
        "import sys\nloaded = [n for n in sys.modules if n.startswith('graphrt.')]\n"
        "used = {n.split('.')[1] for n in loaded}\n"
        "assert used <= {'capture', 'kernels', 'testing', 'graph_checks'}, used\n"
    )
    result = run_python("-c", f"{plain}\n{runner}\n{check}")
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    for line in shown.splitlines():
        assert " ".join(line.split()) in said, result.stdout
    assert "x[3:8] holds case 0's values" in said


def test_the_example_of_a_manager_runs() -> None:
    (source,) = blocks("runtime")
    result = run_python("-c", source, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    assert "verify RuntimeSubject: ok" in result.stdout


# -- the script


def made_up(caught: tuple[bool, bool], blamed: tuple[str, ...] = ("x",)) -> Bug:
    return Bug("made up", "none", "verify", "x", lambda injected, device: Seen(caught[injected], blamed, "its report"))


JUDGED = {
    "right": (made_up((False, True)), True),
    "found without the bug": (made_up((True, True)), False),
    "not found": (made_up((False, False)), False),
    "wrong blame": (made_up((False, True), ("y",)), False),
}


@pytest.mark.parametrize("case", JUDGED)
def test_the_script_judges(case: str) -> None:
    bug, ok = JUDGED[case]
    entry = judge(bug, CPU)
    assert entry["ok"] is ok
    shown = table({"entries": [entry], "caught": int(ok), "bugs": 1, "left_out": []})
    assert ("its report" in shown) is (case in ("found without the bug", "wrong blame"))
    assert shown.splitlines()[1].split()[0] == ("ok" if ok else "MISS")


def test_an_entry_that_raises_fails() -> None:
    def broken(injected: bool, device: torch.device) -> Seen:
        raise ZeroDivisionError("no such tool")

    entry = judge(Bug("made up", "none", "audit", "", broken), CPU)
    assert not entry["ok"]
    assert "no such tool" in table({"entries": [entry], "caught": 0, "bugs": 1, "left_out": []})


def test_the_script_writes_its_result(tmp_path: Path) -> None:
    path = tmp_path / "results" / "graph_bugs.json"
    result = run_python("-m", "scripts.bug_catalogue", "--only", "max_seq_len", "--device", "cpu", "--json", str(path))
    assert result.returncode == 0, result.stdout + result.stderr
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["bugs"] == said["caught"] == 1
    assert "a frozen max_seq_len" in result.stdout
    record = json.loads(path.read_text())
    assert record["data"] == said
    assert record["torch"].split("+")[0] == torch.__version__.split("+")[0]
