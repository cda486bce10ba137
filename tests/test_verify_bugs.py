"""The catalogue of planted bugs: each is caught, the right thing is blamed, and without the bug the kit is silent."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphrt.testing.verify import verify
from scripts.bug_catalogue import judge, table
from tests.bugs import frozen as bug_frozen
from tests.bugs import padding as bug_padding
from tests.bugs import stale as bug_stale
from tests.bugs.all import CATALOGUE, Bug, Seen
from tests.bugs.page import PAGE, rendered
from tests.bugs.texts import TEXTS

ROOT = Path(__file__).resolve().parent.parent
ON_CPU = [name for name, bug in CATALOGUE.items() if not bug.gpu]
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ON_CPU)
def test_a_planted_bug_is_blamed_and_its_absence_is_silent(name: str) -> None:
    bug = CATALOGUE[name]
    clean = bug.show(False, CPU)
    assert not clean.caught, clean.text
    planted = bug.show(True, CPU)
    assert planted.caught, planted.text
    assert not bug.blamed or bug.blamed in planted.blamed, planted.text


@pytest.mark.gpu
@pytest.mark.parametrize("name", CATALOGUE)
def test_the_same_on_a_gpu(name: str) -> None:
    entry = judge(CATALOGUE[name], torch.device("cuda", 0))
    assert entry["ok"], table({"entries": [entry], "caught": 0, "bugs": 1, "left_out": []})


def test_there_are_enough_and_each_says_what_it_is_modelled_on() -> None:
    assert len(CATALOGUE) >= 24
    assert len(ON_CPU) >= 15
    assert {bug.tool for bug in CATALOGUE.values()} <= {"verify", "audit", "diff", "marker", "capture"}
    assert all(bug.models for bug in CATALOGUE.values())


# The page


def blocks(mark: str = "") -> list[str]:
    start = rf"<!-- {mark} -->\n" if mark else ""
    return re.findall(rf"{start}^```(?:python)?\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_page_shows_the_code_that_runs() -> None:
    assert set(TEXTS) == set(CATALOGUE)
    text = PAGE.read_text()
    assert rendered(text) == text, "run python -m scripts.bug_catalogue --page"


def test_the_examples_of_the_page_run() -> None:
    """In a process of their own: nothing of the runtime is imported for them."""
    (plain,), (runner,), (shown,) = blocks("plain"), blocks("runner"), blocks("report")
    assert len(plain.strip().splitlines()) <= 14
    check = (
        "import sys\nloaded = [n for n in sys.modules if n.startswith('graphrt.')]\n"
        "used = {n.split('.')[1] for n in loaded}\nassert used <= {'capture', 'kernels', 'testing'}, used\n"
    )
    source = f"{plain}\n{runner}\n{check}"
    result = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    for line in shown.splitlines():
        assert " ".join(line.split()) in said, result.stdout
    assert "x[3:8] holds case 0's values" in said


def test_the_example_of_a_manager_runs_by_itself() -> None:
    (source,) = blocks("runtime")
    result = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "verify RuntimeSubject: ok" in result.stdout


def test_every_block_of_the_catalogue_runs_as_it_is_shown() -> None:
    """The code of the page itself, not that of the files: what a reader copies is caught."""
    names: dict[str, object] = {}
    for module in (bug_stale, bug_frozen, bug_padding):
        names |= {name: value for name, value in vars(module).items() if not name.startswith("__")}
    part = PAGE.read_text().split("<!-- catalogue -->")[1]
    found = re.findall(r"^### \d+\. (.*?)$.*?^```python\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
    assert len(found) == len(CATALOGUE)
    ran = 0
    for title, source in found:
        bug = next(b for b in CATALOGUE.values() if b.name.lower() == title.lower())
        compile(source, title, "exec")
        if bug.gpu or not source.startswith("class "):
            continue
        space = dict(names)
        exec(compile(source, title, "exec"), space)
        name = re.match(r"class (\w+)", source).group(1)
        planted = space[name](True, CPU)
        report = verify(planted, planted.make_inputs, captures=[0, 1])
        assert not report.ok, title
        ran += 1
    assert ran >= 20


def made_up(caught: tuple[bool, bool], blamed: tuple[str, ...] = ("x",)) -> Bug:
    return Bug(
        "made up", "nobody #1", "verify", "x", lambda planted, device: Seen(caught[planted], blamed, "its report")
    )


JUDGED = {
    "right": (made_up((False, True)), True),
    "not silent without the bug": (made_up((True, True)), False),
    "not caught": (made_up((False, False)), False),
    "something else blamed": (made_up((False, True), ("y",)), False),
}


@pytest.mark.parametrize("case", JUDGED)
def test_the_script_judges(case: str) -> None:
    bug, ok = JUDGED[case]
    entry = judge(bug, CPU)
    assert entry["ok"] is ok
    shown = table({"entries": [entry], "caught": int(ok), "bugs": 1, "left_out": []})
    assert ("its report" in shown) is (case in ("not silent without the bug", "something else blamed"))
    assert shown.splitlines()[1].split()[0] == ("ok" if ok else "MISS")


def test_an_entry_that_cannot_run_is_no_entry_that_passed() -> None:
    def broken(planted: bool, device: torch.device) -> Seen:
        raise ZeroDivisionError("no such tool")

    entry = judge(Bug("made up", "nobody #1", "audit", "", broken), CPU)
    assert not entry["ok"]
    assert "no such tool" in table({"entries": [entry], "caught": 0, "bugs": 1, "left_out": []})


def test_the_script_writes_what_it_found(tmp_path: Path) -> None:
    path = tmp_path / "results" / "graph_bugs.json"
    command = [sys.executable, "-m", "scripts.bug_catalogue", "--only", "baked", "--device", "cpu", "--json", str(path)]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["bugs"] == said["caught"] == 1
    assert "baked max_seq_len" in result.stdout
    record = json.loads(path.read_text())
    assert record["data"] == said
    assert record["torch"].split("+")[0] == torch.__version__.split("+")[0]
