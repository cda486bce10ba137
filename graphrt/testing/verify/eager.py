"""The eager checks of `verify`: what `refresh` writes, padded against exact results, what persists between runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial

import torch

from graphrt.kernels.errors import ConfigError
from graphrt.testing.verify.blame import Blame
from graphrt.testing.verify.compare import Difference, differing, first_difference, region, unlike
from graphrt.testing.verify.host import unchanged, written_tensors
from graphrt.testing.verify.memory import zeroed
from graphrt.testing.verify.report import raised
from graphrt.testing.verify.runs import POISONED, Case, Contents, Fill, Outcome, as_recorded, changed, one_seed
from graphrt.testing.verify.subject import PlainSubject, copied_inputs, named_outputs
from graphrt.testing.verify.unreset import find_unreset
from graphrt.testing.verify.verification import SURELY, Verification

_MOST_VALUES = 8  # values of an integer buffer to try in its pad rows
_Pair = tuple[str, torch.Tensor | None, torch.Tensor, torch.Tensor | None]
REFRESH_READS = Blame("", (), "refresh() reads elements that it should write")


class EagerChecks:
    """Compute the reference of each case, and check the eager step."""

    def __init__(self, verification: Verification) -> None:
        self._v = verification

    def prepare(self) -> None:
        """Find which buffers, and which of their elements, refresh() writes in each case."""
        target, runs = self._v.target, self._v.runs
        known = set(runs.storages)
        for index, case in enumerate(list(self._v.cases.values())):
            refresh = partial(target.refresh, case.inputs)
            try:  # two cases show which numbers refresh() recomputes
                during = partial(runs.note_refreshed, refresh) if index < 2 else refresh
                found = written_tensors(*target.root, during)
            except Exception as error:
                self._v.find("refresh", case, "", f"refresh() raised {raised(error)}", Blame("", (), ""))
                del self._v.cases[case.name]
                continue
            named = list(target.subject.buffers.values())
            for path, tensor in found.items():
                address = tensor.untyped_storage().data_ptr()
                if address not in known and not any(tensor is other for other in named):
                    known.add(address)
                    self._record(path, tensor, target.found, runs.initial)
            runs.note_ranges()
            self._find_hidden()
        for case in self._v.cases.values():
            with unchanged(*target.root):
                self._v.written[case.name] = self._survey(case)
        written = self._v.written.values()
        runs.rewritten = frozenset(n for n in target.buffers if written and all(bool(w[n].any()) for w in written))

    def _record(
        self, path: str, tensor: torch.Tensor, tensors: dict[str, torch.Tensor], first: dict[str, torch.Tensor]
    ) -> None:
        """Add an unnamed tensor and its initial contents."""
        name = path if tensors.get(path, tensor) is tensor else f"{path} ({len(tensors)})"
        contents = self._v.host.contents(tensor)
        tensors[name], first[name] = tensor, tensor.clone() if contents is None else contents

    def _find_hidden(self) -> None:
        """Find the unnamed tensors that run() changes in place, which are restored before each run.

        If only the first of two runs changes a tensor, the tensor is treated as a cache that this run filled. Its
        contents are kept, because Python values may mark it as filled.
        """
        target, runs = self._v.target, self._v.runs
        runs.restore_state()
        before = runs.contents()
        outputs: dict[str, torch.Tensor] = {}

        def run() -> None:
            runs.eager_runs += 1
            outputs.update(named_outputs(target.subject.run()))

        def new(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            named = runs.storages
            return {path: t for path, t in found.items() if t.untyped_storage().data_ptr() not in named}

        try:
            once = new(written_tensors(*target.root, run))
            if not outputs:
                target.results |= {n for n, t in runs.contents().items() if n not in before or unlike(t, before[n])}
            twice = new(written_tensors(*target.root, run)) if once else {}
        except Exception:  # `check` reports it
            return
        again = [*twice.values(), *(tensor for tensor, _ in runs.filled.values())]
        for path, tensor in new({**once, **twice}).items():
            if any(tensor is other for other in again):
                runs.filled = {n: pair for n, pair in runs.filled.items() if pair[0] is not tensor}
                self._record(path, tensor, target.hidden, runs.hidden)
            else:
                contents = self._v.host.contents(tensor)
                runs.filled[path] = (tensor, tensor.clone() if contents is None else contents)

    def _survey(self, case: Case) -> dict[str, torch.Tensor]:
        """Return masks of the buffer elements that refresh() writes, which are equal after two different fills."""
        runs, before = self._v.runs, self._v.runs.contents()
        results = []
        for value in POISONED:
            for name, tensor in self._v.target.buffers.items():
                runs.fill(name, tensor, value)
            try:
                self._v.target.refresh(case.inputs)
            except Exception as error:
                text = f"refresh() raised {raised(error)}; before it the buffers held {value.value}"
                self._v.find("refresh", case, "", text, REFRESH_READS)
            results.append(runs.contents())
        written = {}
        for name, tensor in self._v.target.buffers.items():
            old, found = before.get(name), [contents[name] for contents in results if name in contents]
            if old is None or len(found) < len(results) or any(t.shape != tensor.shape for t in (old, *found)):
                written[name] = torch.ones_like(tensor, dtype=torch.bool)  # the graph checks report a replaced buffer
                continue
            high, low = found
            written[name] = ~differing(high, low)
            tensor.copy_(old)
        return written

    def check(self) -> None:
        """Run the oracle and the padded step in each case, compare them, and find what persists between runs.

        Raises:
            ConfigError: if the oracle returns nothing, or `real` has a name that no case returns.
        """
        self._run_oracles()
        self._run_references()
        if not self._v.cases or not self._v.repeats(next(iter(self._v.cases.values()))):
            return
        for case in self._v.cases.values():
            self._check_exact(case)
            if self._v.unrepeatable:
                return
            if wrong := self._v.runs.trespasses(case, self._v.reference[case.name][1]):
                text = "the step writes to a part of the state that is unowned"
                self._v.find("unowned", case, "", text, self._v.blamer.trespasser(case, wrong), wrong)
                self._v.trespassed = True
        self._check_memory()

    def _run_oracles(self) -> None:
        if not self._v.target.has_oracle:
            return
        for case in self._v.cases.values():
            self._v.exact[case.name] = self._oracle(case)
        exact = [outcome for outcome in self._v.exact.values() if not outcome.error]
        if exact and not any(outcome.outputs for outcome in exact) and not self._v.target.is_own_oracle:
            raise ConfigError(
                "eager: the oracle returned nothing; return the same results as the step, or omit the oracle"
            )

    def _run_references(self) -> None:
        runs = self._v.runs
        for case in list(self._v.cases.values()):
            contents: Contents = runs.enter(case, Fill.INITIAL)
            outcome = runs.eager(case, contents, entered=True)
            self._v.reference[case.name] = (contents, outcome)
            if outcome.error:
                text = f"the step raised {outcome.error}"
                self._v.find("eager", case, "", text, self._v.blamer.unlike_inputs(case))
                del self._v.cases[case.name], self._v.reference[case.name]
                continue
            case.check_real(outcome.outputs, self._v.target.state)
            if not outcome.outputs.keys() <= case.exact_shapes.keys():
                self._learn_shapes(case)
            self._v.check_canaries(case, "", "an eager run")

    def _learn_shapes(self, case: Case) -> None:
        """Run the step on exact tensors to get the shapes of outputs that the oracle does not return."""
        runs, subject = self._v.runs, self._v.target.subject
        if not isinstance(subject, PlainSubject):
            return
        runs.restore_state()
        runs.eager_runs += 1
        with unchanged(*self._v.target.root), one_seed(self._v.target.device), suppress(Exception):
            exact = named_outputs(subject.eager(copied_inputs(case.inputs)))
            case.exact_shapes.update({name: tuple(t.shape) for name, t in exact.items()} | case.exact_shapes)
        runs.restore_state()

    def _check_memory(self) -> None:
        """Find what persists between runs: Python values, function caches and unnamed tensors."""
        cases = list(self._v.cases.values())
        text = "the eager result differs without the Python values of earlier cases"
        for case in cases:
            if blame := self._v.blamer.remembered(case, self._v.host):
                self._v.find(blame.check, case, "", text, blame)
        if by_function := self._v.blamer.remembered_by_functions(cases):
            self._v.find("history", by_function[0], "", text, by_function[1])
        find_unreset(self._v)

    def _oracle(self, case: Case) -> Outcome:
        runs, target = self._v.runs, self._v.target
        runs.restore_state()
        runs.eager_runs += 1
        try:
            with one_seed(target.device), zeroed(target.device), as_recorded(target.device):
                exact = target.eager(case.inputs)
        except Exception as error:
            return Outcome(error=raised(error))
        # An oracle may update the state like the step should. If so, the state is also compared.
        changes = {name: changed(runs.state[name], t) for name, t in target.state.items()}
        exact |= {f"state {n}": t for n, t in target.state.items() if len(changes[n][0])}
        exact = {name: t.clone() for name, t in exact.items()}
        runs.restore_state()
        case.exact_shapes.update((name, tuple(t.shape)) for name, t in exact.items())
        return Outcome(exact)

    def _check_exact(self, case: Case) -> None:
        exact = self._v.exact.get(case.name)
        if exact is None:
            return
        padded = self._v.reference[case.name][1]
        if exact.error:
            self._v.find("eager", case, "", f"the oracle raised {exact.error}", None)
            return
        wrong = self._unlike_exact(case, exact, padded)
        if missing := [n for n in exact.outputs if n not in padded.outputs and not n.startswith("state ")]:
            because = f"the step returns {', '.join(padded.outputs) or 'nothing'}; use the same names in both"
            self._v.find("padding", case, "", f"the oracle returns {', '.join(missing)}", Blame("", (), because), wrong)
        elif wrong is not None and self._v.repeats(case, SURELY):
            blame = (
                self._v.blamer.remembered(case, self._v.host)
                or self._v.blamer.unlike_inputs(case)
                or self._pad_values(case, exact, wrong, padded)
            )
            self._v.find("padding", case, "", "the padded step differs from the exact one", blame, wrong)

    def _pad_values(self, case: Case, exact: Outcome, wrong: Difference, padded: Outcome) -> Blame | None:
        """Return the buffer whose pad values, written by the caller's code, cause a wrong result.

        With other pad values, the first wrong element is correct. If only one buffer is padded, or the oracle is the
        step itself, a change of the results is enough.
        """
        runs = self._v.runs
        contents = self._v.reference[case.name][0]
        tails: dict[str, torch.Tensor] = {}
        for name, value in case.named.items():
            buffer = contents.get(name)
            if isinstance(value, torch.Tensor) and buffer is not None and value.dim() == buffer.dim():
                tails[name] = torch.ones_like(buffer, dtype=torch.bool)
                tails[name][tuple(slice(0, n) for n in value.shape)] = False
        tails = {name: tail for name, tail in tails.items() if bool(tail.any())}
        if wrong.output.startswith("state "):  # integers first, because they index writes
            tails = dict(sorted(tails.items(), key=lambda item: contents[item[0]].is_floating_point()))
        changing = []
        for name, tail in tails.items():
            for other in self._others(name, contents[name]):
                outcome = runs.eager(case, contents.but({name: torch.where(tail, other, contents[name])}))
                if not outcome.error and self._is_right(case, exact, outcome, wrong):
                    return self._spoils(name, tail)
                if not outcome.error and name not in changing and not runs.same(case, outcome, padded):
                    changing.append(name)
        is_sure = len(changing) == 1 and (len(tails) == 1 or self._v.target.is_own_oracle)
        return self._spoils(changing[0], tails[changing[0]]) if is_sure else None

    def _others(self, name: str, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield other contents for a buffer: poison and, for integers (possible indices), each value in the buffer."""
        for value in POISONED:
            other = values.clone()
            self._v.runs.fill(name, other, value)
            yield other
        if not (values.is_floating_point() or values.is_complex()):
            for held in values.unique()[:_MOST_VALUES]:
                yield held.expand_as(values)

    def _spoils(self, name: str, tail: torch.Tensor) -> Blame:
        because = f"the pad values {region(name, tail)} reach the results; mask them, or let them index unowned memory"
        return Blame("padding", (name,), because)

    def _is_right(self, case: Case, exact: Outcome, outcome: Outcome, wrong: Difference) -> bool:
        """Return whether the wrong element agrees with the oracle in another outcome."""
        for name, have, want, _ in self._pairs(case, exact, outcome):
            if name == wrong.output and have is not None and have.shape == want.shape:
                return not bool(differing(have, want, self._v.tolerance(want.dtype))[wrong.at].any())
        return False

    def _unlike_exact(self, case: Case, exact: Outcome, padded: Outcome) -> Difference | None:
        for name, have, want, counted in self._pairs(case, exact, padded):
            if have is None:
                return Difference(name, (), "nothing", list(want.shape), 1, 1)
            if have.shape != want.shape:
                return Difference(name, (), list(have.shape), list(want.shape), 1, 1)
            tolerance = self._v.tolerance(want.dtype)
            if wrong := first_difference(name, have, want, counted=counted, tolerance=tolerance):
                return wrong
        return None

    def _pairs(self, case: Case, exact: Outcome, padded: Outcome) -> Iterator[_Pair]:
        """Yield name, real part of the padded tensor, exact tensor and mask of each output and state tensor."""
        for name, want in exact.outputs.items():
            have = padded.outputs.get(name)
            if name.startswith("state "):
                own = name.removeprefix("state ")
                have = self._v.runs.state_after(own, padded.changes[own])
            if have is None:
                yield name, None, want, None
                continue
            counted = None
            if have.shape != want.shape:
                index = case.real.get(name, tuple(slice(0, n) for n in want.shape))
                have = have[index] if have.dim() == want.dim() or name in case.real else have
            else:
                counted = case.counted(name, want)
            yield name, have if have.dtype == want.dtype else have.to(want.dtype), want, counted
