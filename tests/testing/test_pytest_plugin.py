"""The pytest plugin: its marker fails a test whose capture breaks a rule, and its fixtures fail it for findings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fake_captures

pytest_plugins = ("pytester",)
ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "graphrt.testing.pytest_plugin"

CONFTEST = """
import pytest
from tests.support.fake_captures import install

@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    return install(monkeypatch)
"""

HEAD = """
import pytest, torch
from tests.support.fake_captures import captured

@pytest.mark.capture_safe
def test_it():
    with captured(torch.cuda.CUDAGraph()):
"""
WAITS = "        torch.cuda.synchronize()\n"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable other plugins in inner runs."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def run(pytester: pytest.Pytester):
    """Return a function that runs a test file with the fakes."""
    pytester.makeconftest(CONFTEST)

    assert fake_captures.__name__ in sys.modules, "imported here, so that inner runs share it"

    def run_it(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider", "--strict-markers", *options)

    return run_it


def test_a_broken_rule_fails_the_test_with_advice(run) -> None:
    result = run(HEAD + WAITS)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "capture_safe:",
            "sync, capture 1, test_*.py:7: expected a capture that never waits for the device, got "
            "torch.cuda.synchronize(); keep the value on the device*",
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_plugin.py*")
    result = run(HEAD + "        torch.ops.fake_captures.wait(torch.ones(4))\n")  # fails by itself too
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*RuntimeError: called a synchronizing*", "*capture_safe*", "*sync, capture 1, *"])


def test_a_rule_with_a_reason_and_tests_without_marker_or_capture_pass(run) -> None:
    run(HEAD.replace("capture_safe", "capture_safe(sync='on purpose')") + WAITS).assert_outcomes(passed=1)
    run(HEAD.replace("@pytest.mark.capture_safe\n", "") + WAITS).assert_outcomes(passed=1)
    run(HEAD + "        pass\n").assert_outcomes(passed=1, warnings=0)
    result = run(HEAD.replace("with captured(torch.cuda.CUDAGraph())", "if True") + "        pass\n")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*capture_safe: the body of the test captures nothing*"])


def test_wrong_arguments_of_the_marker_fail_the_test(run) -> None:
    for arguments, text in {
        "'compile'": "*capture_safe: expected keyword arguments, got ('compile',)*",
        "compiles='x'": "capture_safe: allowed: expected reasons by rule (sync, *, stream), got compiles='x'*",
        "compile=''": "*allowed: expected *got compile=''; pass a string as the reason*",
    }.items():
        result = run(HEAD.replace("capture_safe", f"capture_safe({arguments})") + "        pass\n")
        assert result.ret == 1
        result.stdout.fnmatch_lines([text])
        result.stdout.no_fnmatch_line("*capture_watch.py*")


# -- fixtures


REPORTS = """
import sys, types

class Report:
    def __init__(self, *arguments, **options):
        self.findings, self.text = arguments[0], f"report of {arguments} {options}"
    def __str__(self):
        return self.text

sys.modules["graphrt.capture.inspect.audit"] = types.SimpleNamespace(audit=Report)
sys.modules["graphrt.testing.verify"] = types.SimpleNamespace(verify=Report)
"""


@pytest.mark.parametrize("fixture", ["graph_audit", "graph_verify"])
def test_findings_fail_the_test_with_the_report(pytester: pytest.Pytester, fixture: str) -> None:
    pytester.makeconftest(REPORTS)
    pytester.makepyfile(f"""
        def test_clean({fixture}):
            assert {fixture}((), 'memory', allowed={{1: 2}}).findings == ()

        def test_found({fixture}):
            {fixture}(('bad',), 'memory')
    """)
    result = pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*{*}(('bad',), 'memory')".replace("{*}", fixture), "*report of (('bad',), 'memory')*"]
    )


OTHERS = """
import pytest, torch
from tests.support.toy import make_rig

@pytest.fixture
def warm():
    make_rig(torch.device("cuda")).manager.close()

@pytest.mark.capture_safe
def test_the_graphs_of_a_manager(warm):
    rig = make_rig(torch.device("cuda"))
    assert len(rig.manager.stats().graphs) == 6

@pytest.mark.capture_safe
def test_graphed_callables():
    module = torch.nn.Linear(64, 64, device="cuda")
    sample = torch.ones(8, 64, device="cuda")
    torch.cuda.make_graphed_callables(module, (sample,))(sample).sum().backward()

@pytest.mark.capture_safe
def test_cudagraph_trees():
    function = torch.compile(lambda x: (x @ x).relu() * 2, mode="reduce-overhead")
    x = torch.ones(64, 64, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            result = function(x).clone()
    assert float(result[0, 0]) == 128
"""


@pytest.mark.gpu
def test_captures_by_other_code_on_a_device_have_no_faults(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(OTHERS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    result = pytester.runpytest_subprocess("-p", PLUGIN, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3)
    result.stdout.no_fnmatch_line("*captures nothing*")


# -- imports


LAZY = """
import sys
LOADS

def test_it(request):
    assert request.config.pluginmanager.has_plugin("graphrt.testing.pytest_plugin")
    loaded = {name for name in sys.modules if name.split(".")[0] in ("torch", "triton", "numpy", "graphrt", "cuda")}
    assert loaded == {"graphrt", "graphrt.testing", "graphrt.testing.pytest_plugin"}
"""

# Ways to load the plugin: options, a line of the test file, and whether the package is installed.
WAYS = {
    "by-option": (("-p", PLUGIN), "", False),
    "by-option-and-installed": (("-p", PLUGIN), "", True),
    "by-file-and-installed": ((), f"pytest_plugins = [{PLUGIN!r}]", True),
    "disabled": (("-p", f"no:{PLUGIN}"), "", True),
}


def in_a_process(
    folder: Path, source: str, options: tuple[str, ...], installed: bool
) -> subprocess.CompletedProcess[str]:
    """Run a test file in a new process, with the package's metadata on the path if it is installed."""
    (folder / "test_it.py").write_text(source)
    (info := folder / "site/graphrt_copy-1.dist-info").mkdir(parents=True)
    if installed:
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: graphrt-copy\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[pytest11]\n{PLUGIN} = {PLUGIN}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_it.py"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{info.parent}", "PYTHONDONTWRITEBYTECODE": "1"}
    if installed:
        del environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_imported_until_it_is_used(tmp_path: Path, way: str) -> None:
    options, line, installed = WAYS[way]
    source = LAZY.replace("LOADS", line)
    if way == "disabled":
        source = source.replace("assert request", "assert not request").split("    loaded")[0]
    result = in_a_process(tmp_path, source, options, installed)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_entry_point_has_the_name_of_the_module() -> None:
    """pytest refuses one plugin under two names, and `-p` and `pytest_plugins` name the module."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {PLUGIN: PLUGIN}
