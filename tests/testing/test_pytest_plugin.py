"""The pytest plugin: its marker fails a test for each rule that a capture breaks, and its fixtures for findings."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
import pytest, torch, triton
from tests.support.fake_captures import captured

X = torch.ones(4)

def compile(name):
    triton.knobs.runtime.kernel_load_end_hook(None, None, name, {}, "digest")

def launch(name):
    triton.knobs.runtime.launch_enter_hook(type("Metadata", (), {"get": lambda self: {"name": name}})())

@pytest.mark.capture_safe
def test_it(cuda):
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
"""

# The body of a capture, and lines of the failure.
BROKEN = {
    "op-that-waits": (
        "with pytest.raises(RuntimeError): torch.ops.fake_captures.wait(X)",
        [
            "*sync, capture 1, test_*.py:16: expected a capture that never waits for the device, got "
            "fake_captures.wait.default (called a synchronizing CUDA operation); keep the value on the device*"
        ],
    ),
    "device": ("torch.cuda.synchronize()", ["*sync, capture 1, test_*.py:16: *got torch.cuda.synchronize();*"]),
    "event": ("torch.cuda.Event.synchronize(None)", ["*sync, capture 1*got Event.synchronize();*"]),
    "stream-wait": ("torch.cuda.Stream.synchronize(None)", ["*sync, capture 1*got Stream.synchronize();*"]),
    "result-outside": (
        "y = X * 2; cuda.pool = []",
        [
            "*allocate, capture 1, test_*.py:16: expected all memory of a capture in its pool, got the result of "
            "aten.mul.Tensor outside of it; *"
        ],
    ),
    "block-outside": (
        "cuda.live.append((4096, 24))",
        ["*allocate, capture 1: *got 24 bytes at 0x1000 outside of it;*"],
    ),
    "kernel": (
        "compile('_attend')",
        ["*compile, capture 1, test_*.py:7: *got kernel _attend, compiled or loaded; run the step once before*"],
    ),
    "torch-compile": (
        "torch.compile(lambda x: x + 1, backend='eager')(X)",
        ["*compile, capture 1*: *got a function that torch.compile compiles; run the step once before*"],
    ),
    "op-elsewhere": (
        "with cuda.another_stream(): X.add_(1)",
        ["*stream, capture 1, test_*.py:16: *got aten.add_.Tensor on another stream; it ran once, now, and no replay*"],
    ),
    "triton-elsewhere": (
        "with cuda.another_stream(): launch('_attend')",
        ["*stream, capture 1, test_*.py:10: *got Triton kernel _attend on another stream;*"],
    ),
    "result-that-is-live": (  # reported once, as the result of an op
        "y = X * 2; cuda.pool = []; cuda.live.append((y.untyped_storage().data_ptr(), 16))",
        ["*allocate, capture 1*got the result of aten.mul.Tensor outside of it*"],
    ),
    "two": (
        "torch.cuda.synchronize(); torch.cuda.synchronize(); compile('_attend')",
        ["capture_safe:", "*sync, capture 1*", "*compile, capture 1*"],
    ),
}

CLEAN = {
    "ops": "y = (X * 2).add_(1); z = y.view(2, 2).t().contiguous()",
    "views-elsewhere": "with cuda.another_stream(): y = X.view(2, 2).t(); y.t_(); torch.empty(4)",
    "warm-kernel": "launch('_attend')",
    "nothing": "pass",
    "freed-block": "cuda.live.clear()",
    "idle-block": "cuda.idle.append((4096, 24))",
}


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """Load modules that torch imports lazily: an inner run would drop them, and torch does not import them again."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable other plugins in inner runs."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a test file with the fakes."""
    pytester.makeconftest(CONFTEST)

    assert fake_captures.__name__ in sys.modules, "imported here, so that inner runs share it"

    def run_it(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider", "--strict-markers", *options)

    return run_it


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_fails_the_test_with_advice(run, case: str) -> None:
    body, lines = BROKEN[case]
    result = run(HEAD + f"        {body}\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(lines)
    # In CI, pytest repeats the whole message in its summary.
    report = itertools.takewhile(lambda line: "short test summary" not in line, result.outlines)
    told = [line for line in report if ", capture 1" in line]
    assert len(told) == sum("capture 1" in line for line in lines), "nothing else, and nothing twice"


@pytest.mark.parametrize("case", BROKEN)
def test_a_rule_with_a_reason_is_not_checked(run, case: str) -> None:
    body, lines = BROKEN[case]
    rules = {line.strip("*").split(",")[0] for line in lines if "capture_safe" not in line}
    reasons = ", ".join(f"{rule}='on purpose'" for rule in rules)
    body = body.replace("with pytest.raises(RuntimeError): ", "")  # no op raises where waits are allowed
    result = run(HEAD.replace("capture_safe", f"capture_safe({reasons})") + f"        {body}\n")
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("case", BROKEN)
def test_without_the_marker_and_outside_of_captures_nothing_is_reported(run, case: str) -> None:
    body, _ = BROKEN[case]
    body = body.replace("with pytest.raises(RuntimeError): ", "")
    unmarked = HEAD.replace("@pytest.mark.capture_safe\n", "")
    before = (
        HEAD.replace("    with captured(graph):", "    if True:")
        + f"        {body}\n    cuda.pool = [dict(address=0, total_size=1 << 62)]\n"
    )
    run(unmarked + f"        {body}\n").assert_outcomes(passed=1)
    run(before + "    with captured(graph): pass\n").assert_outcomes(passed=1)


@pytest.mark.parametrize("case", CLEAN)
def test_a_clean_capture_passes(run, case: str) -> None:
    run(HEAD + f"        {CLEAN[case]}\n").assert_outcomes(passed=1)


def test_a_test_that_fails_by_itself_shows_the_faults_too(run) -> None:
    result = run(HEAD + "        torch.ops.fake_captures.wait(X)\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*RuntimeError: called a synchronizing*", "*capture_safe*", "*sync, capture 1, *"])


def test_captures_are_numbered(run) -> None:
    again = "        pass\n    with captured(torch.cuda.CUDAGraph()): torch.cuda.synchronize()\n"
    result = run(HEAD + again)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*sync, capture 2, *"])


def test_the_memory_of_a_failed_capture_is_not_checked(run) -> None:
    source = HEAD.replace("    with captured", "    with pytest.raises(RuntimeError, match='invalidated'), captured")
    run(source + "        y = X * 2; cuda.pool = []; cuda.broken = True\n").assert_outcomes(passed=1)


def test_wrong_arguments_of_the_marker_fail_the_test(run) -> None:
    for arguments, text in {
        "'compile'": "*capture_safe: expected keyword arguments, got ('compile',)*",
        "compiles='x'": "capture_safe: allowed: expected sync, *, stream, each with a reason, got compiles='x'*",
        "compile=''": "*allowed: expected *got compile=''; give a reason*",
    }.items():
        result = run(HEAD.replace("capture_safe", f"capture_safe({arguments})") + "        pass\n")
        assert result.ret == 1
        result.stdout.fnmatch_lines([text])
        result.stdout.no_fnmatch_line("*capture_watch.py*")


def test_a_marked_test_without_a_capture_warns(run) -> None:
    result = run(HEAD.replace("    with captured(graph):", "    if True:") + "        pass\n")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*capture_safe: the body of the test captures nothing*"])
    run(HEAD + "        pass\n").assert_outcomes(passed=1, warnings=0)


def test_the_marker_is_registered_and_listed(run) -> None:
    result = run(HEAD + "        pass\n", "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.capture_safe(sync=, allocate=, compile=, stream=): fail if a CUDA*"])


# -- the op trace


TAPE = """
import numpy, pytest, torch, triton
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.op_trace import OpTraceRecorder
from graphrt.kernels.errors import CaptureError

X = torch.ones(4)

def launched(x):
    triton.knobs.runtime.launch_enter_hook(None)
    return x

@pytest.mark.capture_safe
def test_it():
    try:
        tape = OpTraceRecorder().capture(lambda: STEP, BatchDescriptor.decode(1), lambda: None)
        tape.launch()
    except CaptureError:
        pass
"""

TAPES = {
    "clean": ("(X * 2).add_(torch.zeros(4)) + torch.tensor(0.5)", None),
    "no-streams": ("launched(X * 2)", None),
    "item": ("X * X[0].item()", "*sync, capture 1*got a read on the host (decode*"),
    "tolist": ("X * X.tolist()[0]", "*sync, capture 1*got a read on the host (decode*"),
    "nonzero": ("X.nonzero()", "*sync, capture 1*got a read on the host (decode*"),
    "host-values": ("X + torch.tensor([1.0, 2, 3, 4])", "*sync, capture 1*got a tensor made of host values*"),
}


@pytest.mark.parametrize("case", TAPES)
def test_on_a_cpu_the_op_tape_is_watched(pytester: pytest.Pytester, case: str) -> None:
    """Also if the test catches the error."""
    step, text = TAPES[case]
    pytester.makepyfile(TAPE.replace("STEP", step))
    result = pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider")
    if text is None:
        result.assert_outcomes(passed=1)
    else:
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([text])


def test_watches_nest(run) -> None:
    """The inner one sees what the marker sees, except for a rule with a reason."""
    source = HEAD.replace("import captured", "import captured\nfrom graphrt.testing.capture_watch import CaptureWatch")
    source = source.replace(
        "    with captured",
        "    inner = CaptureWatch(), CaptureWatch({'sync': 'why'})\n    with inner[0], inner[1], captured",
    )
    body = "        torch.cuda.synchronize()\n    assert [len(watch.faults) for watch in inner] == [1, 0]\n"
    result = run(source + body + "    assert cuda.sync_mode == 0\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["sync, capture 1, *"])


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


# -- a device


DEVICE = """
import pytest, torch, triton
import triton.language as tl

@pytest.fixture
def cuda():
    x = torch.ones(64, 64, device="cuda")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.graph.default_capture_stream = torch.cuda.Stream()  # the next of torch's 32, so that it is not `side`
    w = x.detach().requires_grad_()
    torch.autograd.grad((w @ w).relu().sum(), w)
    torch.cuda.synchronize()
    return x, side, graph

@triton.jit
def late_add(x, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets) + 1)

@pytest.mark.capture_safe
def test_it(cuda):
    x, side, graph = cuda
    late_add[(1,)](x, BLOCK=64)
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
"""

ON_DEVICE = {
    "clean": ("y = ((x @ x).relu() * 2).sum(); late_add[(1,)](x, BLOCK=64)", []),
    "fork": (
        "side.wait_stream(torch.cuda.current_stream())\n"
        "        with torch.cuda.stream(side): y = x * 2; late_add[(1,)](x, BLOCK=64)\n"
        "        torch.cuda.current_stream().wait_stream(side)",
        [],
    ),
    "training": (
        "w = x.detach().requires_grad_()\n        torch.autograd.grad((w @ w).relu().sum(), w)",
        [],
    ),
    "item": (
        "x.add_(1)\n        with pytest.raises(RuntimeError, match='synchronizing'): x.sum().item()",
        ["*sync, capture 1*_local_scalar_dense*"],
    ),
    "nonzero": (
        "x.add_(1)\n        with pytest.raises(RuntimeError, match='synchronizing'): x.nonzero()",
        ["*sync, capture 1*nonzero*"],
    ),
    "kernel": ("late_add[(1,)](x, BLOCK=128)", ["*compile, capture 1*got kernel late_add, compiled or loaded*"]),
    "op-elsewhere": (
        "x.add_(1)\n        with torch.cuda.stream(side): x.add_(1)",
        ["*stream, capture 1*got aten.add_.Tensor on another stream*"],
    ),
    "triton-elsewhere": (
        "x.add_(1)\n        with torch.cuda.stream(side): late_add[(1,)](x, BLOCK=64)",
        ["*stream, capture 1*got Triton kernel late_add on another stream*"],
    ),
    "memory-elsewhere": (
        "x.add_(1)\n        with torch.cuda.stream(side): y = torch.empty(3 << 20, device='cuda')",
        ["*allocate, capture 1*got the result of aten.empty.memory_format outside of it*"],
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_DEVICE)
def test_on_a_device(pytester: pytest.Pytester, case: str) -> None:
    body, lines = ON_DEVICE[case]
    pytester.makepyfile(DEVICE + f"        {body}\n    torch.cuda.synchronize()\n")
    result = pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider")
    result.assert_outcomes(failed=len(lines[:1]), passed=1 - len(lines[:1]))
    result.stdout.fnmatch_lines(lines)
    if not lines:
        result.stdout.no_fnmatch_line("*capture 1*")


COUNTING = """
import pytest
from graphrt.testing.capture_watch import CaptureWatch

@pytest.fixture(autouse=True)
def seen(monkeypatch):
    counts, leave = [], CaptureWatch.__exit__
    monkeypatch.setattr(CaptureWatch, "__exit__", lambda self, *e: (counts.append(self.captures), leave(self, *e))[1])
    yield
    assert counts[0] > 0
"""

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
    """The captures are counted, because a watch that sees none finds nothing either."""
    pytester.makeconftest(COUNTING)
    pytester.makepyfile(OTHERS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    result = pytester.runpytest_subprocess("-p", PLUGIN, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3)


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
    "installed": ((), "", True),
    "by-option": (("-p", PLUGIN), "", False),
    "by-option-and-installed": (("-p", PLUGIN), "", True),
    "by-file": ((), f"pytest_plugins = [{PLUGIN!r}]", False),
    "by-file-and-installed": ((), f"pytest_plugins = [{PLUGIN!r}]", True),
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
    result = in_a_process(tmp_path, LAZY.replace("LOADS", line), options, installed)
    assert result.returncode == 0, result.stdout + result.stderr


def test_it_can_be_disabled(tmp_path: Path) -> None:
    source = LAZY.replace("LOADS", "").replace("assert request", "assert not request").split("    loaded")[0]
    result = in_a_process(tmp_path, source, ("-p", f"no:{PLUGIN}"), installed=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_entry_point_has_the_name_of_the_module() -> None:
    """pytest refuses one plugin under two names, and `-p` and `pytest_plugins` name the module."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {PLUGIN: PLUGIN}
