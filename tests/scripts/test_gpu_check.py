"""The GPU tier in several processes: how tests are dealt out, and how their results are put together again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from scripts import gpu_check
from tests.kernels import test_attention_peers
from tests.support.peer_kit import PEERS
from tests.support.sharding import in_shard, parse_shard

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("tests", "count"), [(0, 2), (1, 1), (40, 6), (40, 50)])
def test_every_test_is_in_exactly_one_shard(tests: int, count: int) -> None:
    names = [f"tests/test_a.py::test_b[{i}]" for i in range(tests)]
    shards = [in_shard(names, index, count) for index in range(1, count + 1)]
    assert [sum(column) for column in zip(*shards, strict=True)] == [1] * tests
    sizes = [sum(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


def test_values_of_a_parameter_are_spread_over_the_shards() -> None:
    """Dealt in turn, every test of one value would be in one shard."""
    names = [f"test_a[{i}-{value}]" for i in range(40) for value in ("fp8", *"abcde")]
    of_value = [sum(chosen for name, chosen in zip(names, in_shard(names, i, 6), strict=True) if "fp8" in name)
                for i in range(1, 7)]  # fmt: skip
    assert sum(of_value) == 40
    assert max(of_value) < 20


@pytest.mark.parametrize("text", ["", "1", "0/6", "7/6", "a/b", "1/6/2"])
def test_malformed_shards(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"--shard: expected I/N with 1 <= I <= N, got"):
        parse_shard(text)
    assert parse_shard("6/6") == (6, 6)


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *arguments, str(folder)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def test_shards_of_a_run_and_what_they_come_to(tmp_path: Path) -> None:
    """Three shards of what -m leaves; their outputs, and one of a fourth process, as gpu_check reads them."""
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
    options = ("-v", "-rfEs", "-m", "not slow")
    runs = [run_pytest(tmp_path, *options, "--shard", f"{index}/3") for index in (1, 2, 3)]
    ran = [re.findall(r"::(test_\w+\S*) (?:PASSED|FAILED|SKIPPED)", output) for _, output in runs]
    assert sorted(name for names in ran for name in names) == [f"test_a[{x}]" for x in range(8)]
    assert sorted(map(len, ran)) == [2, 3, 3]
    assert sorted(code for code, _ in runs) == [0, 0, 1]
    last = run_pytest(tmp_path, "-q", "-rfEs", "-m", "slow")
    outputs = [output for _, output in (*runs, last)]
    result = gpu_check.tests_result(outputs)
    assert result["counts"] == {"passed": 7, "failed": 1, "skipped": 2}
    assert len(result["skips"]) == 2
    assert "could not import 'no_such_package'" in result["skips"][0]
    assert "six needs flash-attn" in result["skips"][1]
    (failure,) = gpu_check.failures(outputs)
    assert re.fullmatch(r"FAILED test_it.py::test_a\[5\] - AssertionError: five.*", failure)


def test_a_process_that_ends_without_a_summary_is_named() -> None:
    (line,) = gpu_check.failures(["...\nFatal Python error: Segmentation fault\n", "3 passed in 1.00s\n"])
    assert line == "ended without a summary: ... | Fatal Python error: Segmentation fault"


def test_lines_of_processes_are_passed_on_whole(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; [print('x' * 500) for _ in range(50)]; sys.stdout.write('no newline'); sys.exit(3)"
    status, output = gpu_check.run([sys.executable, "-c", code], "[7] ")
    printed = capfd.readouterr().out.splitlines()
    assert status == 3
    assert (
        printed[1:] == ["[7] " + line for line in output.splitlines()] == ["[7] " + "x" * 500] * 50 + ["[7] no newline"]
    )


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


def test_all_of_the_gpu_tier_is_asked_for() -> None:
    beside, alone = gpu_check.test_commands(3)
    assert [command[-1] for command in beside] == ["1/3", "2/3", "3/3"]
    assert {command[command.index("-m", 3) + 1] for command in beside} == {"gpu and not alone"}
    assert alone[-1] == "gpu and alone"
