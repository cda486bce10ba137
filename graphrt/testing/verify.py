"""Verify a step that is captured as a graph: eagerly, padded and replayed it must give the same, whatever ran before.

    report = verify(step, make_inputs)              # step(**inputs) -> tensors; make_inputs(case) -> inputs
    report.raise_if_any()

`step` is any function of tensors, or an object with static buffers, host code that fills them, and a body that is
captured: see `graphrt.testing.verify_subject.Subject`. On CUDA the body is captured as a graph, on a CPU as an op tape,
which freezes numbers and addresses in the same way. Nothing of graphrt's runtime takes part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import CapturedGraph, Recorder
from graphrt.capture.recorder import make_recorder
from graphrt.kernels.errors import ConfigError
from graphrt.testing.verify_blame import Blame, Blamer, Captured
from graphrt.testing.verify_coverage import coverage
from graphrt.testing.verify_flight import flight_findings
from graphrt.testing.verify_host import HostValues, written_tensors
from graphrt.testing.verify_memory import NAN_BYTE, UnwrittenMemory, fill_inactive
from graphrt.testing.verify_report import Difference, VerifyFinding, VerifyReport, differing, first_difference
from graphrt.testing.verify_runs import POISONED, Case, Contents, Outcome, Runs, World, changed
from graphrt.testing.verify_subject import (
    Inputs,
    Output,
    PlainSubject,
    Subject,
    Target,
    check_takes,
    is_plain,
    name_of,
    named_outputs,
)

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
_MOST_EXPLAINED = 8  # replays of one graph that are explained; further ones are counted


def verify(
    step: Callable[..., Output] | Subject,
    make_inputs: Callable[[int], Inputs],
    *,
    cases: int | Sequence[int] = 4,
    captures: Sequence[int] | None = None,
    eager: Callable[..., Output] | None = None,
    tolerance: float | None = None,
    pad: Mapping[str, float] | None = None,
    permute: Sequence[str] = (),
    dims: Mapping[str, Sequence[str]] | None = None,
) -> VerifyReport:
    """Run a step eagerly, padded and as a graph over several cases, and say what differs and why.

    step         a function of make_inputs' names, or a `Subject`
    make_inputs  maps the number of a case to its inputs. Tensors may be smaller in some cases than in others: a graph
                 is captured for the largest extents. Numbers that change from case to case are probed
    cases        how many, or which. Let lengths shrink, grow and stand on page boundaries
    captures     cases that a graph is captured at, each in turn; by default the first, the last and the middle one
    eager        the oracle, of the arguments of step, or of the inputs for a Subject; by default step itself on tensors
                 of exact size, or the subject's own `eager`
    tolerance    of padded against exact results: |a - b| <= tolerance * (1 + |b|); 0 is bit by bit. By default by
                 dtype. Replays are always compared with eager runs bit by bit
    pad          by name of an input of a plain step: what your code writes behind a smaller one. Left out, anything may
                 stand there
    permute      names of inputs whose first dimension is the rows: rows are also given in reverse order
    dims         by name of an output: names of its dimensions, for the report

    The caller's buffers and state are as before afterwards. Works in inference mode; not capture-safe.

    Raises: ConfigError for arguments that do not fit each other. What is wrong with the step is in the report.
    """
    start = time.perf_counter()
    numbers = list(range(cases)) if isinstance(cases, int) else list(cases)
    if not numbers:
        raise ConfigError("cases: expected at least one, got none; give 2 or more")
    with torch.inference_mode():
        inputs = {str(n): make_inputs(n) for n in numbers}
        if permute:
            inputs[f"{numbers[0]} reversed"] = _reversed(inputs[str(numbers[0])], permute)
        if is_plain(step):
            for values in inputs.values():
                check_takes(step, values)  # type: ignore[arg-type]
            step = PlainSubject(step, list(inputs.values()), pad or {})  # type: ignore[arg-type]
        elif pad:
            raise ConfigError("pad: expected none beside a Subject, got some; refresh() writes what its buffers hold")
        target = Target(step, eager)
        names = list(inputs) if captures is None else [str(n) for n in captures]
        if unknown := set(names) - set(inputs):
            raise ConfigError(f"captures: expected some of the cases {list(inputs)}, got {sorted(unknown)}; add them")
        if captures is None:
            names = list(dict.fromkeys((names[0], names[-1], names[len(names) // 2])))
        verifier = _Verifier(target, inputs, dims or {}, tolerance)
        try:
            verifier.prepare()
            verifier.check_eager(bool(permute))
            for name in names:
                verifier.check_graph(name)
        finally:
            verifier.restore()
    return verifier.report(time.perf_counter() - start, names)


class _Verifier:
    def __init__(
        self, target: Target, inputs: Mapping[str, Inputs], dims: Mapping[str, Sequence[str]], tolerance: float | None
    ) -> None:
        self.target, self.tolerance = target, tolerance
        self.cases = {name: Case(name, values, target.real(values)) for name, values in inputs.items()}
        self.runs = Runs(target, dims)
        self.host = HostValues.take(*target.root)  # before anything ran
        self.findings: list[VerifyFinding] = []
        self.reference: dict[str, tuple[Contents, Outcome]] = {}
        self.exact: dict[str, Outcome] = {}
        self.written: dict[str, dict[str, torch.Tensor]] = {}
        self.blamer = Blamer(self.runs, self.reference)
        self.recorder: Recorder | None = None
        self.graphs: list[CapturedGraph] = []
        self.trespassed = False
        self.capture_seconds, self.unwritten, self.pool_bytes, self.in_flight = 0.0, 0, 0, 0

    # -- what is known before anything is compared

    def prepare(self) -> None:
        """Learn which buffers refresh() writes to, and where, for each case."""
        target, runs = self.target, self.runs
        known = runs.storages
        names = list(self.cases)
        for case in list(self.cases.values()):
            try:
                found = written_tensors(*target.root, partial(target.subject.refresh, case.inputs))
            except Exception as error:
                self._find("refresh", case, "", f"refresh() raised {type(error).__name__}: {error}", Blame("", (), ""))
                del self.cases[case.name]
                continue
            for path, tensor in found.items():
                if tensor.untyped_storage().data_ptr() not in known:
                    known.add(tensor.untyped_storage().data_ptr())
                    target.found[path] = tensor
                    first = self.host.contents(path)
                    runs.initial[path] = tensor.clone() if first is None else first
            runs.note_ranges()
            if case.name in (names[0], names[-1]):
                self._find_hidden(case)
        for case in self.cases.values():
            self.written[case.name] = self._survey(case)
        runs.rewritten = frozenset(
            n for n in target.buffers if self.cases and all(bool(self.written[c][n].any()) for c in self.written)
        )

    def _find_hidden(self, case: Case) -> None:
        """Tensors that run() changes in place, and that are not named: they are restored before each run as well."""
        target, runs = self.target, self.runs
        runs.restore_state()
        runs.eager_runs += 1
        try:
            found = written_tensors(*target.root, target.subject.run)
        except Exception:  # check_eager says so
            return
        for path, tensor in found.items():
            if tensor.untyped_storage().data_ptr() not in runs.storages:
                target.hidden[path] = tensor
                first = self.host.contents(path)
                runs.hidden[path] = tensor.clone() if first is None else first

    def _survey(self, case: Case) -> dict[str, torch.Tensor]:
        """Which elements of each buffer refresh() writes for a case: those that come out alike over two fills."""
        runs, before = self.runs, self.runs.contents()
        results = []
        for world in POISONED:
            for name, tensor in self.target.buffers.items():
                runs.fill(name, tensor, world)
            self.target.subject.refresh(case.inputs)
            results.append(runs.contents())
        written = {}
        for name, tensor in self.target.buffers.items():
            high, low = results[0].get(name), results[1].get(name)
            old = before.get(name)
            if high is None or low is None or old is None or not high.shape == low.shape == old.shape == tensor.shape:
                written[name] = torch.ones_like(tensor, dtype=torch.bool)  # replaced: `moved` finds it
                continue
            written[name] = ~differing(high, low)
            tensor.copy_(torch.where(written[name], low, old))
        return written

    # -- eager runs

    def check_eager(self, permuted: bool) -> None:
        """The oracle's results, and the padded step's, each from the reference world; the first case once more."""
        runs = self.runs
        for case in list(self.cases.values()):
            if self.target.eager is not None:
                self.exact[case.name] = self._oracle(case)
        for case in list(self.cases.values()):
            contents: Contents = runs.enter(case, World.REFERENCE)
            outcome = runs.eager(case, contents, entered=True)
            if outcome.error:
                text = f"the step raised {outcome.error}"
                self.reference[case.name] = (contents, outcome)
                self._find("eager", case, "", text, self.blamer.unlike_inputs(case))
                del self.cases[case.name], self.reference[case.name]
                continue
            self.reference[case.name] = (contents, outcome)
            self._check_canaries(case, "", "an eager run")
        for case in self.cases.values():
            self._check_exact(case)
            if wrong := runs.trespasses(case, self.reference[case.name][1]):
                text = "the step writes to a part of the state that is unowned"
                self._find("unowned", case, "", text, self.blamer.trespasser(case, wrong), wrong)
                self.trespassed = True
        if not self.cases:
            return
        first = next(iter(self.cases.values()))
        text = "the eager result is another one when the host remembers nothing of earlier cases"
        for case in self.cases.values():
            if blame := self.blamer.remembered(case, self.host):
                self._find(blame.check, case, "", text, blame)
        if by_function := self.blamer.remembered_by_functions(list(self.cases.values())):
            self._find("history", by_function[0], "", text, by_function[1])
        if blame := self.blamer.unreset(first):
            text = "the same run gives other results when it is repeated"
            self._find(blame.check, first, "", text, blame)
        contents, expected = self.reference[first.name]
        again = runs.eager(first, contents)
        if not runs.same(first, again, expected):
            wrong = None if again.error else runs.difference(first, again, expected)
            text = "the same eager run gave other results after other cases; the step keeps something that state omits"
            self._find("determinism", first, "", text, Blame("", (), "name it in state, so that it is restored"), wrong)
        if permuted:
            self._check_reversed()

    def _oracle(self, case: Case) -> Outcome:
        assert self.target.eager is not None, "called with an oracle only"
        self.runs.restore_state()
        self.runs.eager_runs += 1
        try:
            exact = named_outputs(self.target.eager(case.inputs))
        except Exception as error:
            return Outcome(error=f"{type(error).__name__}: {error}")
        # An oracle may update the state as the step should: then the state is compared as well.
        changes = {name: changed(self.runs.state[name], t) for name, t in self.target.state.items()}
        exact |= {f"state {n}": t for n, t in self.target.state.items() if len(changes[n][0])}
        exact = {name: t.clone() for name, t in exact.items()}
        self.runs.restore_state()
        if not self.target.names_real:
            case.exact_shapes.update((name, tuple(t.shape)) for name, t in exact.items())
        return Outcome(exact)

    def _check_exact(self, case: Case) -> None:
        exact = self.exact.get(case.name)
        if exact is None:
            return
        padded = self.reference[case.name][1]
        if exact.error:
            self._find("eager", case, "", f"the oracle raised {exact.error}", None)
            return
        wrong = self._unlike_exact(case, exact, padded)
        if wrong is not None:
            blame = (
                self.blamer.leak(case, self._masks(case), padded)
                or self.blamer.remembered(case, self.host)
                or self.blamer.unlike_inputs(case)
                or self._never_written(case)
            )
            self._find("padding", case, "", "the padded step differs from the exact one", blame, wrong)

    def _masks(self, case: Case) -> dict[str, torch.Tensor]:
        """The written elements of the buffers that take part in padding."""
        names = self.runs.rewritten - self.target.derived
        return {name: mask for name, mask in self.written[case.name].items() if name in names}

    def _unlike_exact(self, case: Case, exact: Outcome, padded: Outcome) -> Difference | None:
        for name, want in exact.outputs.items():
            have = padded.outputs.get(name)
            if name.startswith("state "):
                have = self.runs.state[name.removeprefix("state ")].clone().flatten()
                indices, values = padded.changes[name.removeprefix("state ")]
                have[indices] = values
                have = have.view(want.shape)
            if have is None:
                return Difference(name, (), "nothing", list(want.shape), 1, 1, ())
            counted = None
            if have.shape != want.shape:
                index = case.real.get(name, tuple(slice(0, n) for n in want.shape))
                have = have[index] if have.dim() == want.dim() or name in case.real else have
            else:
                counted = case.counted(name, want)
            if have.shape != want.shape:
                return Difference(name, (), list(have.shape), list(want.shape), 1, 1, ())
            tolerance = _TOLERANCES.get(want.dtype, 0.0) if self.tolerance is None else self.tolerance
            dims = self.runs.dims.get(name)
            have = have if have.dtype == want.dtype else have.to(want.dtype)
            if wrong := first_difference(name, have, want, counted=counted, tolerance=tolerance, dims=dims):
                return wrong
        return None

    def _never_written(self, case: Case) -> Blame | None:
        """Buffers that the step reads, and that refresh() did not write to for this case at all."""
        contents, padded = self.reference[case.name]
        for name, mask in self.written[case.name].items():
            if name not in self.target.derived and name in contents and not bool(mask.any()):
                poisoned = contents[name].clone()
                self.runs.fill(name, poisoned, World.HIGH)
                if not self.runs.same(case, self.runs.eager(case, {**contents, name: poisoned}), padded):
                    because = f"refresh() does not write {name} for this case, and the step reads it; fill it each time"
                    return Blame("padding", (name,), because)
        return None

    def _check_reversed(self) -> None:
        """Rows in reverse order must give the results in reverse order."""
        names = [*self.exact]
        first, other = self.exact.get(names[0]), self.exact.get(names[-1])
        if first is None or other is None or first.error or other.error:
            return
        for name, want in first.outputs.items():
            have = other.outputs.get(name)
            if have is None or have.shape != want.shape or not want.dim():
                continue
            tolerance = _TOLERANCES.get(want.dtype, 0.0) if self.tolerance is None else self.tolerance
            if wrong := first_difference(name, have.flip(0), want, tolerance=tolerance, dims=self.runs.dims.get(name)):
                text = "rows in reverse order do not give the results in reverse order"
                case = next(iter(self.cases.values()))
                self._find("permute", case, "", text, Blame("", (), "a row's result depends on where it stands"), wrong)

    # -- replays

    def check_graph(self, name: str) -> None:
        """Capture at a case, then replay every case in every world, ending with the captured one."""
        case = self.cases.get(name)
        if case is None or not self.reference:
            return
        start = time.perf_counter()
        graph = self._capture(case)
        self.capture_seconds += time.perf_counter() - start
        if graph is None:
            return
        order = list(self.cases.values())
        at = order.index(case)
        order = [*order[at + 1 :], *order[: at + 1]]
        if at == len(order) - 1:  # captured at the last: the other way round, so that neighbours differ
            order = [*reversed(order[:-1]), case]
        explained = 0
        for world in (World.NATURAL, World.HIGH, World.LOW):
            for each in order:
                explained += self._replay(graph, each, world, explain=explained < _MOST_EXPLAINED)
        if self.target.device.type == "cuda":
            for finding in flight_findings(self.runs, graph, order, self.reference, self.written):
                self._add(finding)
            self.in_flight += 2 * len(order)

    def _capture(self, case: Case) -> Captured | None:
        target, runs = self.target, self.runs
        contents = runs.enter(case, World.REFERENCE)
        static: dict[str, torch.Tensor] = {}
        memory = UnwrittenMemory() if target.device.type == "cpu" and target.capture is None else None
        watch: AbstractContextManager[Any] = memory if memory is not None else nullcontext()

        def step() -> torch.Tensor:
            with watch:
                static.update(named_outputs(target.subject.run()))
            return next(iter({**static, **target.buffers}.values()))

        try:
            if target.capture is not None:
                launch = target.capture(case.inputs)
            else:
                graph = self._record(case, contents, step)

                def launch() -> Output:
                    graph.launch()
                    return static

        except Exception as error:
            if "CUDA error" in str(error):
                raise
            text = str(error).removeprefix(f"{BatchDescriptor.decode(1)}: ")
            because = "a graph holds launches, numbers and addresses: compute on the device, in tensors"
            self._find("capture", case, case.name, f"the step cannot be captured: {text}", Blame("", (), because))
            return None
        self.unwritten += memory.count if memory is not None else 0
        poisoned = {n: t for n, t in static.items() if n not in runs.standing}

        def poison_outputs() -> None:
            for name, tensor in poisoned.items():
                runs.fill(name, tensor, World.HIGH)

        def fill_memory(byte: int) -> None:
            if memory is not None:
                memory.fill(byte)
            elif target.device.type == "cuda":
                self.pool_bytes = max(self.pool_bytes, fill_inactive(target.device, byte))

        def launched() -> Output:
            poison_outputs()
            return launch()

        host = HostValues.take(*target.root)
        return Captured(case, launched, contents, host, fill_memory)

    def _record(self, case: Case, contents: Contents, step: Callable[[], torch.Tensor]) -> CapturedGraph:
        """As servers do it: refresh once, run once to warm up, then capture."""
        runs = self.runs
        if self.recorder is None:
            self.recorder = make_recorder(self.target.device)

        def prepare() -> None:
            runs.restore_state()
            runs.put(contents)

        with self.recorder.session():
            self.target.subject.run()
            prepare()
            graph = self.recorder.record(step, BatchDescriptor.decode(1), prepare)
        self.graphs.append(graph)
        return graph

    def _replay(self, graph: Captured, case: Case, world: World, *, explain: bool) -> bool:
        """One replay, judged by the reference; whether it was explained."""
        runs = self.runs
        addresses = {name: t.data_ptr() for name, t in self.target.buffers.items()}
        contents = runs.enter(case, world)
        moved = [name for name, t in self.target.buffers.items() if addresses.get(name) != t.data_ptr()]
        poisons = world in POISONED
        runs.replays += 1
        unowned = world if poisons and not self.trespassed else None
        before = partial(graph.fill_memory, NAN_BYTE) if poisons else None
        got = runs.run(case, graph.launch, contents, entered=True, unowned=unowned, before=before)
        self._check_canaries(case, graph.case.name, "a replay")
        expected = self.reference[case.name][1]
        if runs.same(case, got, expected):
            return False
        wrong = None if got.error else runs.difference(case, got, expected)
        text = (
            f"the replay raised {got.error}" if got.error else f"the replay differs from the eager run ({world.value})"
        )
        if moved:
            because = (
                f"refresh() puts another tensor in place of {moved[0]}, and the graph reads the old one; use copy_()"
            )
            self._find("replaced", case, graph.case.name, text, Blame("", tuple(moved), because), wrong)
        elif explain:
            blame = self.blamer.explain(graph, case, world, contents, got)
            self._find(blame.check, case, graph.case.name, text, blame, wrong)
        elif self.findings:
            self.findings[-1] = replace(self.findings[-1], repeats=self.findings[-1].repeats + 1)
        return True

    # -- findings

    def _check_canaries(self, case: Case, captured: str, what: str) -> None:
        if self.target.canaries is None:
            return
        for broken in self.target.canaries.broken():
            because = "the step writes beyond its buffer: check its grid, its mask and the number of columns"
            blame = Blame("", (broken.name,), because)
            self._find("canary", case, captured, f"{what} wrote beyond a buffer: {broken}", blame)
            self.target.canaries.repair()

    def _find(
        self, check: str, case: Case, captured: str, text: str, blame: Blame | None, wrong: Difference | None = None
    ) -> None:
        blamed, because = (blame.blamed, blame.because) if blame is not None else ((), "nothing explains it")
        self._add(VerifyFinding(check, case.name, captured, text, wrong, blamed, because))

    def _add(self, finding: VerifyFinding) -> None:
        for index, old in enumerate(self.findings):
            if (old.check, old.blamed) == (finding.check, finding.blamed) and (old.blamed or old.text == finding.text):
                self.findings[index] = replace(old, repeats=old.repeats + 1)
                return
        self.findings.append(finding)

    def restore(self) -> None:
        """Buffers and state as they were, and the graphs dropped."""
        self.runs.put(self.runs.initial)
        self.runs.restore_state()
        for graph in self.graphs:
            graph.close()
        if self.recorder is not None:
            self.recorder.close()

    def report(self, seconds: float, captures: Sequence[str]) -> VerifyReport:
        checked, not_checked = coverage(self, captures)
        checks = seconds - self.capture_seconds
        runs = self.runs
        found = tuple(self.findings)
        name = name_of(self.target.subject)
        return VerifyReport(name, found, checked, not_checked, runs.eager_runs, runs.replays, seconds, checks)


def _reversed(inputs: Inputs, names: Sequence[str]) -> dict[str, Any]:
    if unknown := set(names) - set(inputs):
        raise ConfigError(f"permute: expected names of inputs, got {sorted(unknown)}; name what make_inputs gives")
    return {name: value.flip(0) if name in names else value for name, value in inputs.items()}
