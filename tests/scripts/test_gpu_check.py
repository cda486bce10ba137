"""The jobs of the GPU check: what is read from their outputs, and which options are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import gpu_check
from tests.kernels import test_attention_peers
from tests.support.peer_kit import PEERS

ROOT = Path(__file__).resolve().parents[2]


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *arguments, str(folder)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def test_results_of_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests in two processes, and others in one, as gpu_check reads their outputs."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', range(8))\n"
        "def test_a(x):\n"
        "    assert x != 5, 'five'\n"
        "    if x == 6: pytest.skip('six needs flash-attn')\n"
        "@pytest.mark.slow\n"
        "def test_b(): pass\n"
    )
    (tmp_path / "test_gone.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    runs = [
        run_pytest(tmp_path, "-q", "-rfEs", *options) for options in (("-n", "2", "-m", "not slow"), ("-m", "slow"))
    ]
    monkeypatch.setattr(gpu_check, "run", lambda run: run)
    outcome = gpu_check.run_tests(runs)
    assert outcome.codes == [1, 0]
    assert outcome.data["counts"] == {"passed": 7, "failed": 1, "skipped": 2}
    first, second = outcome.data["skips"]
    assert "could not import 'no_such_package'" in first
    assert "six needs flash-attn" in second
    (failure,) = outcome.summary
    assert re.fullmatch(r"FAILED test_it.py::test_a\[5\] - AssertionError: five.*", failure)


def test_output_is_printed_and_returned(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "print('first'); raise SystemExit(3)"]
    assert gpu_check.run(command) == (3, "first\n")
    assert capfd.readouterr().out.endswith("\nfirst\n")


WRONG_OPTIONS = {
    "--require flash_attn4": "--require: expected names of triton, flash_attn3, ",  # it would require nothing
    "--require flash_attn2,": "--require: expected names of triton, flash_attn3, ",
    "--only backends --require triton": "--require: it checks the skips of the job tests",
    "--commit abc": "--commit and --tree: pass both or neither",
}


@pytest.mark.parametrize("options", WRONG_OPTIONS)
def test_wrong_options_are_refused(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.parse(options.split())
    assert WRONG_OPTIONS[options] in capsys.readouterr().err
    assert gpu_check.parse(["--require", "flash_attn2,flashinfer,gguf"]).require == "flash_attn2,flashinfer,gguf"


def test_results_of_a_benchmark_say_once_where_they_come_from() -> None:
    report = {"name": "x", "results": [1], "gpu": "a", "tree": "b", "command": "c"}
    command = [sys.executable, "-c", f"import json; print('first'); print(json.dumps({report!r}))"]
    outcome = gpu_check.run_benchmark([command])
    assert outcome.codes == [0]
    assert outcome.data == {"name": "x", "results": [1], "command": "c"}
    assert len(gpu_check.run_benchmark([command, command]).data["reports"]) == 2


@pytest.mark.parametrize(
    ("said", "code", "clean"),
    [
        ("ok 2 cases: a, b|========= ERROR SUMMARY: 0 errors", 0, True),
        ("ok 2 cases: a, b|========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, True),
        ("ok 2 cases: a, b|========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", 0, False),
        ("ok 2 cases: a, b|========= ERROR SUMMARY: 10 errors", 9, False),
        ("ok 2 cases: a, b", 0, False),
        ("========= ERROR SUMMARY: 0 errors", 0, False),
    ],
)
def test_what_a_sanitizer_says(said: str, code: int, clean: bool) -> None:
    """Neither a tool that does not speak nor a script that stops early is clean."""
    command = [sys.executable, "-c", f"print({said!r}.replace('|', chr(10))); raise SystemExit({code})"]
    outcome = gpu_check.run_sanitizers([command])
    assert outcome.codes == ([0] if clean else [code or 1])
    if clean:
        assert outcome.data["runs"][0]["cases"] == "2 cases: a, b"
        assert "SUMMARY: 0" in outcome.data["runs"][0]["summary"]


def test_a_missing_tool_fails_its_job_and_no_other() -> None:
    assert gpu_check.run_sanitizers([["no-such-sanitizer", "--tool", "memcheck"]]).codes == [127]


def test_skips_of_peers_name_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `--require flash_attn2` finds them."""
    for module, backend in test_attention_peers.BACKENDS.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(pytest.skip.Exception, match=f"^{backend}: "):
            test_attention_peers.package(module)
    assert {cls.package.module: cls.name for cls in PEERS} == test_attention_peers.BACKENDS
