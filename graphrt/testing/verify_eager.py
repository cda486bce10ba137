"""The eager side of a verification: what `refresh` writes, padded against exact results, and what is remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from graphrt.kernels.errors import ConfigError
from graphrt.testing.verify_blame import Blame, aliased
from graphrt.testing.verify_context import SURELY, Verification
from graphrt.testing.verify_host import Held, first_held, places, renewed, rewritten, unchanged, written_tensors
from graphrt.testing.verify_memory import zeroed
from graphrt.testing.verify_past import Past, blame_state, past_of, unreset
from graphrt.testing.verify_report import Difference, differing, first_difference, raised, region
from graphrt.testing.verify_reversed import check_reversed
from graphrt.testing.verify_runs import POISONED, Case, Contents, Outcome, World, as_recorded, changed, one_seed
from graphrt.testing.verify_slots import slots
from graphrt.testing.verify_subject import PlainSubject, copied_inputs, named_outputs
from graphrt.testing.verify_values import same

_MOST_VALUES = 8  # of a buffer that are tried as values of its pad rows
_Pair = tuple[str, torch.Tensor | None, torch.Tensor, torch.Tensor | None]


class EagerChecks:
    """Fills in the reference of each case."""

    def __init__(self, verification: Verification) -> None:
        self._v = verification
        self._unlike: set[str] = set()  # cases in which the step differs from its oracle
        self._rewritten: Sequence[Held] = ()  # host values that run() changes, as they were

    def prepare(self) -> None:
        """Learn which buffers refresh() writes to, and where, for each case."""
        target, runs = self._v.target, self._v.runs
        known = set(runs.storages)
        at_first = places(*target.root)
        every = list(self._v.cases.values())
        for index, case in enumerate(every):
            refresh = partial(target.refresh, case.inputs)
            try:
                found = written_tensors(*target.root, partial(self._watch, refresh) if index < 2 else refresh)
            except Exception as error:
                self._v.find(
                    "refresh",
                    case,
                    "",
                    f"refresh() raised {raised(error)}",
                    Blame("", (), ""),
                )
                del self._v.cases[case.name]
                continue
            for path, tensor in found.items():
                if tensor.untyped_storage().data_ptr() not in known and not _is_among(tensor, target.subject.buffers):
                    known.add(tensor.untyped_storage().data_ptr())
                    name = _name(path, tensor, target.found, target.root)
                    target.found[name] = tensor
                    first = self._v.host.contents(tensor)
                    runs.initial[name] = tensor.clone() if first is None else first
            runs.note_ranges()
            self._find_hidden(case, is_last=case is every[-1])
        for case in self._v.cases.values():
            with unchanged(*target.root):  # what refresh() keeps of what the buffers hold
                self._v.written[case.name] = self._survey(case)
        runs.rewritten = frozenset(
            n
            for n in target.buffers
            if self._v.cases and all(bool(self._v.written[c][n].any()) for c in self._v.written)
        )
        self._rewritten = [first_held(held, at_first) for held in self._rewritten]
        self._find_carried()

    def _watch(self, refresh: Callable[[], object]) -> None:
        """Refresh, and learn which numbers of the host that changes, and where it puts another tensor. Two cases show
        those that it makes anew."""
        numbers, tensors = renewed(*self._v.target.root, refresh)
        # No items of containers: they move, so another object may stand at such a path in a later run.
        self._v.runs.refreshed |= {path for path in numbers if "[" not in path} | tensors

    def _find_carried(self) -> None:
        """Host values that run() changes and goes on from. A launch by the caller's own code may change them too."""
        for case in self._v.cases.values() if self._rewritten and self._v.target.capture is None else ():
            if blame := self._v.blamer.carried(case, self._rewritten):
                self._v.find(blame.check, case, "", "the same run gives other results when it is repeated", blame)
                return

    def _find_hidden(self, case: Case, *, is_last: bool) -> None:
        """Tensors that run() changes in place, and that are not named: they are restored before each run as well.

        And host values that it changes: the last case shows those that it does not change at the first run only.
        """
        target, runs = self._v.target, self._v.runs
        runs.restore_state()
        runs.eager_runs += 1
        before = runs.contents()
        outputs: dict[str, torch.Tensor] = {}

        def run() -> None:
            outputs.update(named_outputs(target.subject.run()))

        def watched() -> None:
            if is_last:
                self._rewritten = rewritten(*target.root, run)
            else:
                run()

        try:
            found = written_tensors(*target.root, watched)
        except Exception:  # `check` says so
            return
        if not outputs:
            after = runs.contents()
            changed = {
                n for n in after if after[n].shape != before[n].shape or bool(differing(after[n], before[n]).any())
            }
            target.results |= changed
        for path, tensor in found.items():
            if tensor.untyped_storage().data_ptr() not in runs.storages:
                name = _name(path, tensor, target.hidden, target.root)
                target.hidden[name] = tensor
                first = self._v.host.contents(tensor)
                runs.hidden[name] = tensor.clone() if first is None else first

    def _survey(self, case: Case) -> dict[str, torch.Tensor]:
        """Which elements of each buffer refresh() writes for a case: those that come out alike over two fills, or
        otherwise over the same one."""
        runs, before = self._v.runs, self._v.runs.contents()
        results = []
        for world in (*POISONED, World.HIGH):
            for name, tensor in self._v.target.buffers.items():
                runs.fill(name, tensor, world)
            try:
                self._v.target.refresh(case.inputs)
            except Exception as error:
                text = f"refresh() raised {raised(error)} ({world.value} in the buffers)"
                self._v.find("refresh", case, "", text, Blame("", (), "refresh() reads what it should write"))
            results.append(runs.contents())
        written = {}
        for name, tensor in self._v.target.buffers.items():
            old, found = before.get(name), [contents[name] for contents in results if name in contents]
            if old is None or len(found) < len(results) or any(t.shape != tensor.shape for t in (old, *found)):
                written[name] = torch.ones_like(tensor, dtype=torch.bool)  # replaced: `moved` finds it
                continue
            high, low, again = found  # a counter gives three results, and is written all the same
            poison = again.clone()
            runs.fill(name, poison, World.HIGH)
            written[name] = ~differing(high, low) | (differing(high, again) & differing(again, poison))
            tensor.copy_(old)
        return written

    def check(self, permuted: Sequence[str] = ()) -> None:
        """The oracle's results, and the padded step's, each from the reference world; then what either goes on from.

        Raises: ConfigError for an oracle that gives nothing, and for parts that `real` names and nobody has.
        """
        self._run_oracles()
        self._run_references()
        self._v.check_dims()
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
        self._v.ignored = [name for name in self._v.changing if not self._depends_on(name)]
        if permuted:
            check_reversed(self._v, permuted)

    def _run_oracles(self) -> None:
        if not self._v.target.has_oracle:
            return
        for case in self._v.cases.values():
            self._v.exact[case.name] = self._oracle(case)
        exact = {name: outcome for name, outcome in self._v.exact.items() if not outcome.error}
        silent = [name for name, outcome in exact.items() if not outcome.outputs]
        # One that returns nothing may change the state instead: then it does so in some case.
        returns = any(not name.startswith("state ") for outcome in exact.values() for name in outcome.outputs)
        if silent and (returns or len(silent) == len(exact)) and not self._v.target.is_own_oracle:
            raise ConfigError(
                f"eager: expected the results of case {silent[0]}, got nothing; return what the step returns, or leave "
                "the oracle out"
            )

    def _run_references(self) -> None:
        runs = self._v.runs
        for case in list(self._v.cases.values()):
            contents: Contents = runs.enter(case, World.REFERENCE)
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
        """Of outputs that the oracle does not give: how much of each counts, by the step itself on exact tensors."""
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
        """What the step goes on from: values of the host, caches of functions, tensors that nobody named, state."""
        runs, cases = self._v.runs, list(self._v.cases.values())
        text = "the eager result is another one when the host remembers nothing of earlier cases"
        for case in cases:
            if blame := self._v.blamer.remembered(case, self._v.host):
                self._v.find(blame.check, case, "", text, blame)
        if by_function := self._v.blamer.remembered_by_functions(cases):
            self._v.find("history", by_function[0], "", text, by_function[1])
        for case, blame in self._v.kept.check(cases):
            self._v.find("history", case, "", "the eager result is another one when it makes its tensors anew", blame)
        if found := unreset(runs, self._v.reference, cases):
            text = "the step gives another result after other runs, as it goes on from a tensor that nobody named"
            self._v.find(found.blame.check, found.case, "", text, found.blame, found.wrong)
        for case in cases:
            self._check_state(case)
        first = cases[0]
        contents, expected = self._v.reference[first.name]
        again = runs.eager(first, contents)
        if not runs.same(first, again, expected) and self._v.repeats(first, SURELY):
            wrong = None if again.error else runs.difference(first, again, expected)
            text = "the same eager run gave other results after other cases; the step keeps something that state omits"
            self._v.find(
                "determinism", first, "", text, Blame("", (), "name it in state, so that it is restored"), wrong
            )

    def _depends_on(self, name: str) -> bool:
        """Whether a number of the inputs changes a result of any case: else nothing shows that a graph froze it."""
        runs, cases = self._v.runs, self._v.cases.values()
        for case in cases:
            contents, expected = self._v.reference[case.name]
            for value in (other.named[name] for other in cases if not same(other.named[name], case.named[name])):
                try:
                    with unchanged(*self._v.target.root):
                        outcome = runs.eager(case, contents, inputs={**case.named, name: value}, put=False)
                except Exception:  # refresh takes no such number
                    return True
                if not runs.same(case, outcome, expected):
                    return True
        return False

    def _check_state(self, case: Case) -> None:
        """The step and its oracle from the state that another case left, where they agreed from the first one."""
        exact = self._v.exact.get(case.name)
        if exact is None or exact.error or case.name in self._unlike:
            return
        runs = self._v.runs
        past = past_of(runs, self._v.reference, list(self._v.cases.values()), case)
        if past is None:
            return

        def compare(state: Mapping[str, torch.Tensor]) -> tuple[Outcome, Outcome, Difference | None]:
            with runs.starting_from(state):
                want, have = self._oracle(case), runs.eager(case, self._v.reference[case.name][0])
                failed = want.error or have.error
                return want, have, None if failed else self._unlike_exact(case, want, have)

        def agree(state: Mapping[str, torch.Tensor]) -> bool:
            want, have, wrong = compare(state)
            return wrong is None and bool(want.error) == bool(have.error)

        want, have, wrong = compare(past.state)
        self._v.from_others += 1
        if wrong is None and bool(want.error) == bool(have.error):
            return  # or both refuse such a state
        text = "from the state that another case left, the step differs from its oracle"
        if failed := want.error or have.error:
            text = f"from the state that another case left, the {'oracle' if want.error else 'step'} raised {failed}"
        blame = self._overwrites(case, past, want, have, wrong) or blame_state(runs, past, have, agree)
        self._v.find("state", case, "", text, blame, wrong)

    def _overwrites(
        self, case: Case, past: Past, want: Outcome, have: Outcome, wrong: Difference | None
    ) -> Blame | None:
        """Where the step writes to state that its oracle leaves as another case left it, as pad rows may."""
        if wrong is None or not wrong.output.startswith("state "):
            return None
        name = wrong.output.removeprefix("state ")
        old = past.state[name]
        written = torch.zeros_like(old, dtype=torch.bool).flatten()
        written[have.changes[name][0]] = True
        left_alone = not bool(differing(want.outputs[wrong.output], old)[wrong.at])
        if not (left_alone and bool(written.view(old.shape)[wrong.at])):
            return None
        with self._v.runs.starting_from(past.state):
            blame = self._pad_values(case, want, wrong, have, only_if_right=True)
        written[differing(want.outputs[wrong.output], old).flatten()] = False
        because = (
            f"the step writes to {region(name, written.view(old.shape))}, which its oracle leaves as case "
            f"{past.case.name} left it; write where this case's rows are, and let pad rows write to what nobody owns"
        )
        return blame or Blame("state", (wrong.output,), because)

    def _oracle(self, case: Case) -> Outcome:
        self._v.runs.restore_state()
        self._v.runs.eager_runs += 1
        try:
            with one_seed(self._v.target.device), zeroed(self._v.target.device), as_recorded(self._v.target.device):
                exact = self._v.target.eager(case.inputs)
        except Exception as error:
            return Outcome(error=raised(error))
        # An oracle may update the state as the step should: then the state is compared as well.
        changes = {name: changed(self._v.runs.state[name], t) for name, t in self._v.target.state.items()}
        exact |= {f"state {n}": t for n, t in self._v.target.state.items() if len(changes[n][0])}
        exact = {name: t.clone() for name, t in exact.items()}
        self._v.runs.restore_state()
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
            self._unlike.add(case.name)
            because = f"the step gives {', '.join(padded.outputs) or 'none'}; return both by the same names"
            self._v.find("padding", case, "", f"the oracle gives {', '.join(missing)}", Blame("", (), because), wrong)
        elif wrong is not None and self._v.repeats(case, SURELY):
            self._unlike.add(case.name)
            blame = (
                self._v.blamer.leak(case, self._masks(case), padded)
                or self._v.blamer.remembered(case, self._v.host)
                or self._v.blamer.unlike_inputs(case)
                or self._never_written(case)
                or self._pad_values(case, exact, wrong, padded)
                or aliased(self._v.runs, wrong)
                or self._unpadded(case)
            )
            self._v.find("padding", case, "", "the padded step differs from the exact one", blame, wrong)

    def _masks(self, case: Case) -> dict[str, torch.Tensor]:
        """The written elements of the buffers that take part in padding."""
        names = self._v.runs.rewritten - self._v.target.derived
        return {name: mask for name, mask in self._v.written[case.name].items() if name in names}

    def _pad_values(
        self, case: Case, exact: Outcome, wrong: Difference, padded: Outcome, *, only_if_right: bool = False
    ) -> Blame | None:
        """Which values behind a smaller input spoil the result, though the caller's code writes them.

        With other values of it the first wrong element comes right. Of a single one it is enough that results change,
        unless `only_if_right`, and so it is where the oracle is the step itself: padding alone is between them.
        Integers go first where state is wrong: they say where a write goes.
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
        if wrong.output.startswith("state "):
            tails = dict(sorted(tails.items(), key=lambda item: contents[item[0]].is_floating_point()))
        changing = []
        for name, tail in tails.items():
            for other in self._others(name, contents[name]):
                outcome = runs.eager(case, contents.but({name: torch.where(tail, other, contents[name])}))
                if not outcome.error and self._is_right(case, exact, outcome, wrong):
                    return self._spoils(name, tail)
                if not outcome.error and name not in changing and not runs.same(case, outcome, padded):
                    changing.append(name)
        sure = not only_if_right and len(changing) == 1 and (len(tails) == 1 or self._v.target.is_own_oracle)
        return self._spoils(changing[0], tails[changing[0]]) if sure else None

    def _others(self, name: str, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """Other contents of a buffer: poison, and of integers each value that it holds, as it may be an index."""
        for world in POISONED:
            other = values.clone()
            self._v.runs.fill(name, other, world)
            yield other
        if not (values.is_floating_point() or values.is_complex()):
            for value in values.unique()[:_MOST_VALUES]:
                yield value.expand_as(values)

    def _unpadded(self, case: Case) -> Blame | None:
        """Where no input is smaller than its buffer, padding is not to blame."""
        contents = self._v.reference[case.name][0]
        inputs = {name: v for name, v in case.named.items() if isinstance(v, torch.Tensor)}
        if inputs and all(name in contents and contents[name].shape == value.shape for name, value in inputs.items()):
            return Blame(
                "padding", (), "nothing is padded in this case: the step and its oracle compute different things"
            )
        return None

    def _spoils(self, name: str, tail: torch.Tensor) -> Blame:
        because = f"what stands in {region(name, tail)}, behind the input, reaches the results; mask it"
        return Blame("padding", (name,), f"{because}, or let it point to what nobody owns")

    def _is_right(self, case: Case, exact: Outcome, outcome: Outcome, wrong: Difference) -> bool:
        """Whether the element that was wrong agrees with the oracle in another outcome."""
        for name, have, want, _ in self._pairs(case, exact, outcome):
            if name == wrong.output and have is not None and have.shape == want.shape:
                return not bool(differing(have, want, self._v.tolerance(want.dtype))[wrong.at].any())
        return False

    def _unlike_exact(self, case: Case, exact: Outcome, padded: Outcome) -> Difference | None:
        for name, have, want, counted in self._pairs(case, exact, padded):
            if have is None:
                return Difference(name, (), "nothing", list(want.shape), 1, 1, ())
            if have.shape != want.shape:
                return Difference(name, (), list(have.shape), list(want.shape), 1, 1, ())
            tolerance = self._v.tolerance(want.dtype)
            dims = self._v.runs.dims.get(name)
            if wrong := first_difference(name, have, want, counted=counted, tolerance=tolerance, dims=dims):
                return wrong
        return None

    def _pairs(self, case: Case, exact: Outcome, padded: Outcome) -> Iterator[_Pair]:
        """Each output and state tensor of a padded run, cut to what is real, the exact one, and what of them counts."""
        for name, want in exact.outputs.items():
            have = padded.outputs.get(name)
            if name.startswith("state "):
                have = self._v.runs.state[name.removeprefix("state ")].clone().flatten()
                indices, values = padded.changes[name.removeprefix("state ")]
                have[indices] = values
                have = have.view(want.shape)
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

    def _never_written(self, case: Case) -> Blame | None:
        """Buffers that the step reads, and that refresh() did not write to for this case at all."""
        contents, padded = self._v.reference[case.name]
        for name, mask in self._v.written[case.name].items():
            if name not in self._v.target.derived and name in contents and not bool(mask.any()):
                poisoned = contents[name].clone()
                self._v.runs.fill(name, poisoned, World.HIGH)
                if not self._v.runs.same(case, self._v.runs.eager(case, contents.but({name: poisoned})), padded):
                    because = f"refresh() does not write {name} for this case, and the step reads it; fill it each time"
                    return Blame("padding", (name,), because)
        return None


def _is_among(tensor: torch.Tensor, named: Mapping[str, torch.Tensor]) -> bool:
    """Whether it is one of these objects, whose memory may be another than at first."""
    return any(tensor is other for other in named.values())


def _name(path: str, tensor: torch.Tensor, found: Mapping[str, torch.Tensor], root: tuple[Any, str]) -> str:
    """What to call a tensor that stands at a path: "self.ring[0]", or "self.ring[0] (2)" where another one that stood
    there before is within reach still."""
    others = [found[name] for name in found if name == path or name.startswith(f"{path} (")]
    if not others or others[-1] is tensor or not any(slot.value is others[-1] for slot in slots(*root)):
        return path
    return f"{path} ({len(others) + 1})"
