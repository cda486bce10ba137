"""Changes the library a little, many times, and counts how often the CPU tests notice.

    python -m scripts.mutation                                  # 150 mutants, the files below
    python -m scripts.mutation --json docs/results/cpu/mutation.json

Works in copies of the checkout, one per worker. First every test file runs once as the code is, under a tracer that
notes which test runs which line; the notes are kept under --cache until a source changes. Then each mutant gets the
tests that run its line, or, where it runs at import, every test that imports its file. The first failure ends its run.
A mutant counts as unnoticed when all its tests passed. `--seconds` bounds what they may take together: the slowest are
left out, which makes the count of the unnoticed too high, never too low. A test that hangs counts as noticed.

cosmic-ray runs one command per mutant in a new process; mutmut skips functions with decorators. This job needs fork.
The last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from scripts.mutants import Mutant, choose, python_files

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    "graphrt/batch.py", "graphrt/config.py", "graphrt/generate/generator.py", "graphrt/engine/guards.py",
    "graphrt/engine/handle.py", "graphrt/cache/kv_cache.py", "graphrt/engine/launch_queue.py",
    "graphrt/engine/batch_delta.py", "graphrt/engine/program.py", "graphrt/replay.py",
    "graphrt/engine/request_tables.py", "graphrt/runtime.py", "graphrt/session/session.py", "graphrt/session/pages.py",
    "graphrt/session/launches.py", "graphrt/spec.py", "graphrt/engine/stats.py", "graphrt/step.py",
    "graphrt/cache/tables.py", "graphrt/engine/undo.py", "graphrt/backends/base.py", "graphrt/backends/registry.py",
    "graphrt/backends/torch_reference.py", "graphrt/backends/triton.py", "capture", "kernels/checks.py",
    "kernels/metadata", "kernels/cache/write.py", "kernels/ops/sampling.py",
)  # fmt: skip
UNJUDGED = ("capture/recorder.py", "capture/loop.py", "capture/raw_graph.py")  # CUDA graphs: CPU tests run them little
# Minutes long, and hardly a line of FILES is run by them alone: packages, compilers, attention, loaders, browsers.
LEFT_OUT = (
    "layout", "layering", "readme", "env", "cli", "gpu_check", "mutation", "bench_*", "compile_*", "attention*",
    "merge", "work_list", "models*", "loading*", "all_capture_sizes", "*_browser", "*_native",
)  # fmt: skip
PRELOADED = ("torch", "triton", "triton.language", "numpy", "hypothesis", "transformers")
HUNG = 1  # status with which faulthandler ends a process that hangs
LEAST_SECONDS = 30  # that a test gets, however fast it usually is
FAST_SECONDS = 0.5
MEMORY = 10 << 30  # address space that a child may add


@dataclass(slots=True)
class TestFile:
    """What a test file did as the code is: seconds of each test, and lines of each file by test.

    The lines of the key "" run outside of one test: at import, or in a fixture that several tests share.
    """

    seconds: dict[str, float]
    lines: dict[str, dict[str, list[int]]]

    def runs(self, path: str, first: int, last: int) -> list[str]:
        """Tests that run one of these lines of a file."""
        hits = [test for test, files in self.lines.items() if any(first <= x <= last for x in files.get(path, ()))]
        return list(self.seconds) if "" in hits else [test for test in hits if test in self.seconds]

    def imports(self, path: str) -> bool:
        return any(path in files for files in self.lines.values())

    def limits(self) -> dict[str, float]:
        """Seconds of each test, no less than a part of the slowest's: any may have to build what they share."""
        return {test: max(seconds, max(self.seconds.values()) / 4) for test, seconds in self.seconds.items()}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant: noticed, unnoticed or timeout; and by which test, of how many."""

    mutant: Mutant
    verdict: str
    by: str | None
    tests: int
    left_out: int
    seconds: float


class _Recorder:
    """A pytest plugin: runs the chosen tests in the chosen order, times them, and ends the process when one hangs."""

    def __init__(self, order: Sequence[str] | None, limits: dict[str, float], log: Any) -> None:
        self.order, self.limits, self.log = order, limits, log
        self.current, self.shared = "", 0
        self.seconds: dict[str, float] = {}
        self.failed: str | None = None

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.order is not None:
            place = {test: at for at, test in enumerate(self.order)}
            items[:] = sorted((i for i in items if i.nodeid in place), key=lambda item: place[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.current, self.started = nodeid, time.monotonic()
        faulthandler.dump_traceback_later(LEAST_SECONDS + 10 * self.limits.get(nodeid, 30.0), exit=True, file=self.log)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    pytest_collectreport = pytest_runtest_logreport

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.seconds[nodeid] = time.monotonic() - self.started
        self.current = ""


class _Tracer:
    """Notes the lines of the judged files that run, by test."""

    def __init__(self, tree: Path, files: Iterable[str], recorder: _Recorder) -> None:
        self.recorder = recorder
        self.names: dict[str, str | None] = {}
        self.files = {str((tree / path).resolve()): path for path in files}
        self.lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))

    def on_call(self) -> Callable[[FrameType, str, object], Callable[..., Any] | None]:
        """What sys.settrace takes. It runs at every call of Python: a closure, and one look-up for most of them."""
        names, files, lines, recorder = self.names, self.files, self.lines, self.recorder

        def call(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
            filename = frame.f_code.co_filename
            if filename not in names:
                names[filename] = files.get(os.path.realpath(filename))
            if (path := names[filename]) is None:
                return None
            into = lines["" if recorder.shared else recorder.current][path].add
            into(frame.f_lineno)

            def line(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
                into(frame.f_lineno)
                return line

            return line

        return call

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        shared = fixturedef.scope != "function"
        self.recorder.shared += shared
        try:
            return (yield)
        finally:
            self.recorder.shared -= shared


def _run_tests(tree: Path, arguments: list[str], recorder: _Recorder, traced: Iterable[str] | None) -> dict[str, Any]:
    """Run pytest in this process, which is a child of its own, and say what it did."""
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    tracer = None if traced is None else _Tracer(tree, traced, recorder)
    plugins = [recorder, tracer] if tracer else [recorder]
    faulthandler.dump_traceback_later(300, exit=True, file=recorder.log)  # collection
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--hypothesis-seed=0", "--tb=short"]
    sys.settrace(tracer.on_call() if tracer else None)
    try:
        code = pytest.main([*options, *arguments], plugins=plugins)
    finally:
        sys.settrace(None)
        faulthandler.cancel_dump_traceback_later()
    imported = getattr(sys.modules.get("graphrt"), "__file__", None)
    if imported is not None and not Path(imported).is_relative_to(tree):
        raise RuntimeError(f"graphrt: expected it to come from {tree}, got {imported}; unset PYTHONPATH")
    lines = {} if tracer is None else tracer.lines
    return {
        "passed": int(code) in (0, 5),
        "failed": recorder.failed or f"pytest ended with {code!r}",
        "seconds": recorder.seconds,
        "lines": {test: {path: sorted(x) for path, x in files.items()} for test, files in lines.items()},
    }


@dataclass(slots=True)
class _Job:
    """A child: what it runs, in which of the trees, and what to do with its answer."""

    arguments: list[str]
    order: list[str] | None
    limits: dict[str, float]
    traced: list[str] | None
    mutant: Mutant | None
    done: Callable[[dict[str, Any] | None, float, str], None]
    started: float = 0.0


class Workers:
    """Copies of the checkout, and a child in each: forked from this process, which has the slow imports behind it."""

    def __init__(self, root: Path, folder: Path, count: int) -> None:
        self.free = [_copy(root, folder / f"tree{i}") for i in range(count)]
        self.running: dict[int, tuple[Path, _Job, bytes | None]] = {}

    def run(self, jobs: Iterator[_Job]) -> None:
        """Run jobs until there are none; the next one is asked for when a tree is free."""
        try:
            while True:
                while self.free and (job := next(jobs, None)) is not None:
                    self._start(job)
                if not self.running:
                    return
                self._finish(*os.wait())
        finally:  # none are left, unless this process is to end
            for pid in self.running:
                _kill(pid)

    def _start(self, job: _Job) -> None:
        tree, original = self.free.pop(), None
        if job.mutant is not None:
            target = tree / job.mutant.path
            original = target.read_bytes()
            target.write_bytes(job.mutant.apply(original))
        job.started = time.monotonic()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _child(tree, job)
        self.running[pid] = tree, job, original

    def _finish(self, pid: int, status: int) -> None:
        if pid not in self.running:
            return
        tree, job, original = self.running.pop(pid)
        _kill(pid)  # what its tests left behind
        if original is not None:
            (tree / job.mutant.path).write_bytes(original)
        self.free.append(tree)
        answer = tree.with_suffix(".json")
        result = json.loads(answer.read_text()) if answer.exists() else None
        answer.unlink(missing_ok=True)
        hung = os.WIFEXITED(status) and os.WEXITSTATUS(status) == HUNG
        log = "hung" if hung else tree.with_suffix(".log").read_text(errors="replace")
        job.done(result, time.monotonic() - job.started, log)


def _kill(pid: int) -> None:
    """End all processes of a child's session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _child(tree: Path, job: _Job) -> None:
    """Never returns."""
    try:
        os.setsid()
        log = os.open(tree.with_suffix(".log"), os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(log, stream)
        own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + MEMORY, own + MEMORY))
        recorder = _Recorder(job.order, job.limits, os.fdopen(os.dup(log), "w"))
        result = _run_tests(tree, job.arguments, recorder, job.traced)
        tree.with_suffix(".json").write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _copy(root: Path, target: Path) -> Path:
    """The files of the checkout as they are, those that git ignores left out, links as links."""
    listing = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if (root / name).is_symlink() or (root / name).exists():
            shutil.copy2(root / name, target / name, follow_symlinks=False)
    return target


def measure(workers: Workers, root: Path, files: list[str], tests: list[str], cache: Path) -> dict[str, TestFile]:
    """Seconds and lines of every test file as the code is. Ends the program where a test fails."""
    base = hashlib.sha256(repr(files).encode())
    folders = [name for name in ("graphrt", "kernels", "capture", "tests") if (root / name).exists()]
    for path in python_files(root, [*files, *folders]):
        if not Path(path).name.startswith("test_"):
            base.update((root / path).read_bytes())
    known: dict[str, TestFile] = {}
    cache.mkdir(parents=True, exist_ok=True)

    def done(result: dict[str, Any] | None, seconds: float, log: str, *, test: str, kept: Path) -> None:
        if result is None or not result["passed"]:
            raise SystemExit(f"{test}: expected it to pass as the code is, got\n{log[-3000:]}")
        known[test] = TestFile(result["seconds"], result["lines"])
        kept.write_text(json.dumps(asdict(known[test])))
        print(f"measured {test}: {seconds:.0f} s", flush=True)

    def jobs() -> Iterator[_Job]:
        for test in tests:
            key = base.copy()
            key.update(test.encode() + (root / test).read_bytes())
            kept = cache / f"{key.hexdigest()[:24]}.json"
            if kept.exists():
                known[test] = TestFile(**json.loads(kept.read_text()))
            else:
                yield _Job([test], None, {}, files, None, partial(done, test=test, kept=kept))

    workers.run(jobs())
    return {test: known[test] for test in tests}


def tests_for(
    mutant: Mutant, known: dict[str, TestFile], noticed: Counter[str], seconds: float
) -> tuple[list[str], list[str]]:
    """The tests of a mutant in the order in which they run, and those that `seconds` leave out."""
    chosen: dict[str, float] = {}
    at: dict[str, tuple[Any, ...]] = {}
    for test_file, what in known.items():
        if mutant.in_function:
            every = what.runs(mutant.path, *mutant.lines)
        else:
            every = list(what.seconds) if what.imports(mutant.path) else []
        total = sum(what.seconds[test] for test in every)
        for place, test in enumerate(every):
            chosen[test] = what.seconds[test]
            at[test] = (-noticed[test], what.seconds[test] > FAST_SECONDS, total, test_file, place)
    order, spent, left_out = [], 0.0, []
    for test in sorted(chosen, key=lambda test: (chosen[test] > FAST_SECONDS, chosen[test])):
        spent += chosen[test]
        (order if spent <= seconds or not order else left_out).append(test)
    return sorted(order, key=at.__getitem__), left_out


def judge(
    workers: Workers, mutants: Sequence[Mutant], known: dict[str, TestFile], *, seconds: float, until: float
) -> list[Verdict]:
    """Run the tests of every mutant, in the order in which they are given, until the time is over."""
    verdicts: list[Verdict] = []
    limits = {test: seconds for what in known.values() for test, seconds in what.limits().items()}
    noticed: dict[str, Counter[str]] = defaultdict(Counter)

    def done(result: Any, took: float, log: str, *, mutant: Mutant, order: list[str], left_out: list[str]) -> None:
        if result is None:
            verdict, by = ("timeout", "a test that hangs") if log == "hung" else ("noticed", "the process died")
        else:
            verdict, by = ("unnoticed", None) if result["passed"] else ("noticed", result["failed"])
        if by in limits:
            noticed[mutant.path][by] += 1
        verdicts.append(Verdict(mutant, verdict, by, len(order), len(left_out), took))
        print(f"[{len(verdicts)}/{len(mutants)}] {verdict} in {took:.0f} s: {mutant.path}:{mutant.line} "
              f"({mutant.operator}) by {by or f'none of {len(order)} tests'}", flush=True)  # fmt: skip

    def jobs() -> Iterator[_Job]:
        for mutant in mutants:
            if time.monotonic() > until:
                return
            order, left_out = tests_for(mutant, known, noticed[mutant.path], seconds)
            if not order:
                verdicts.append(Verdict(mutant, "unnoticed", None, 0, len(left_out), 0.0))
                continue
            finish = partial(done, mutant=mutant, order=order, left_out=left_out)
            yield _Job(sorted({test.split("::")[0] for test in order}), order, limits, None, mutant, finish)

    workers.run(jobs())
    place = {mutant: at for at, mutant in enumerate(mutants)}
    return sorted(verdicts, key=lambda v: place[v.mutant])


def report(verdicts: Sequence[Verdict], sources: dict[str, bytes]) -> dict[str, Any]:
    """Print a table per file and the unnoticed mutants, and return what the JSON holds."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for v in verdicts:
        rows[v.mutant.path][v.verdict] += 1
    print(f"\n{'file':40} {'tried':>6} {'noticed':>8} {'unnoticed':>10} {'timeouts':>9}")
    total: Counter[str] = Counter()
    for path, row in [*sorted(rows.items()), ("all", total)]:
        if path != "all":
            total += row
        print(f"{path:40} {row.total():6} {row['noticed']:8} {row['unnoticed']:10} {row['timeout']:9}")
    unnoticed = [v for v in verdicts if v.verdict == "unnoticed"]
    for v in unnoticed:
        print(f"\n{v.mutant.diff(sources[v.mutant.path])}\n  tests: {v.tests} passed, {v.left_out} left out")
    tried = total.total()
    return {
        "tried": tried,
        "noticed": tried - len(unnoticed),
        "timeouts": total["timeout"],
        "unnoticed": len(unnoticed),
        "share_noticed": round(1 - len(unnoticed) / tried, 4) if tried else None,
        "files": {path: dict(row) for path, row in sorted(rows.items())},
        "mutants": [
            {
                "where": f"{v.mutant.path}:{v.mutant.line}",
                "operator": v.mutant.operator,
                "verdict": v.verdict,
                "by": v.by,
                "tests": v.tests,
                "left_out": v.left_out,
                "seconds": round(v.seconds, 1),
                "diff": v.mutant.diff(sources[v.mutant.path]).splitlines()[1:],
            }
            for v in verdicts
        ],
    }


def run(
    root: Path, files: list[str], tests: list[str], *, seed: int, count: int, minutes: float, seconds: float,
    workers: int, cache: Path, watched: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """The whole job for a checkout; see the head of this file. Notes of lines are of `watched` and of `files`."""
    start = time.monotonic()
    sources = {path: (root / path).read_bytes() for path in files}
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        pool = Workers(root, Path(folder).resolve(), workers)
        known = measure(pool, root, list(dict.fromkeys([*watched, *files])), tests, cache)
        measured = time.monotonic() - start
        mutants = choose(sources, count, seed)
        until = time.monotonic() + 60 * minutes
        verdicts = judge(pool, mutants, known, seconds=seconds, until=until)
    return {
        "seed": seed,
        "asked": len(mutants),
        **report(verdicts, sources),
        "test_files": len(known),
        "measuring_s": round(measured),
        "seconds": round(time.monotonic() - start),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="chooses the mutants")
    parser.add_argument("--count", type=int, default=150, help="mutants to try")
    parser.add_argument("--minutes", type=float, default=60, help="no mutant starts later than this after the first")
    parser.add_argument("--seconds", type=float, default=150, help="what the tests of one mutant may take together")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="copies of the checkout at work")
    parser.add_argument("--files", default=",".join(FILES), help="files and folders to change, separated by commas")
    parser.add_argument("--tests", default="tests", help="test files and folders, separated by commas")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "graphrt-mutation")
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args()
    if options.count < 1 or options.workers < 1:
        parser.error("--count and --workers: expected at least 1")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # as an error: all is tidied up
    _preload()
    watched, files = (
        [path for path in python_files(ROOT, names) if path not in UNJUDGED]
        for names in (FILES, options.files.split(","))
    )
    names = {path: Path(path).stem for path in python_files(ROOT, options.tests.split(","))}
    tests = [path for path, name in names.items()
             if name.startswith("test_") and not any(fnmatch(name, f"test_{left}") for left in LEFT_OUT)]  # fmt: skip
    result = run(
        ROOT, files, tests, seed=options.seed, count=options.count, minutes=options.minutes, seconds=options.seconds,
        workers=options.workers, cache=options.cache, watched=watched,
    )  # fmt: skip
    sys.path.insert(0, str(ROOT))
    from graphrt.bench.environment import provenance  # no earlier: children must import graphrt from their own tree

    result = {"name": "mutation", **provenance(), **result}
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print("\n" + json.dumps({key: value for key, value in result.items() if key != "mutants"}))
    return 0


def _preload() -> None:
    """Import what every test imports, once, so that forks of this process need not."""
    os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    os.environ.pop("PYTHONPATH", None)
    sys.dont_write_bytecode = True  # a mutant may have the size and the second of the file that it replaces
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
