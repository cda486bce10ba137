"""What a wrong result is blamed on, found by counterfactuals.

One thing is put back, the step runs again, and its results tell whether it was that thing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from graphrt.kernels.checks import shown
from graphrt.testing.verify_host import Change, Held, HostValues, caches
from graphrt.testing.verify_memory import NAN_BYTE
from graphrt.testing.verify_report import Difference, differing, region
from graphrt.testing.verify_runs import OTHER_SEED, POISONED, Case, Contents, Outcome, Runs, World
from graphrt.testing.verify_values import is_value, same

POOL = "memory pool"
_MOST_TRIED = 40
_OFTEN = 3
_RUNS_ON = 4  # of a step whose Python values go on, as not each of them shows in the results
_T = TypeVar("_T")
_NUMBERS = (int, float, bool, str)
_ADVICE = (
    "fill it in place, with copy_()",
    "keep it in a tensor that refresh() fills",
    "choose on the device, or capture a graph for each",
)
"""For tensors, for values, and for functions, objects and classes that others replace."""


@dataclass(frozen=True)
class Blame:
    """The cause, as a `VerifyFinding` has it."""

    check: str
    blamed: tuple[str, ...]
    because: str


@dataclass(frozen=True)
class Captured:
    """A captured step.

    contents  of the buffers when it was captured
    host      values of the host then
    entered   the same, before the step ran
    fill_memory   fills memory that nothing may read before it is written; of 0 the next launch's results take part
    buffers       as they were then. They stay alive: in the memory of one that was replaced, and that the graph goes on
                  reading, somebody else's numbers would be indices of nothing, which end the process on a device
    """

    case: Case
    launch: Callable[[], Any]
    contents: Contents
    host: HostValues
    entered: HostValues
    fill_memory: Callable[[int], object]
    buffers: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Revert:
    """Something that may be put back to what it was at capture."""

    name: str
    because: str
    inputs: Any = None
    slots: Mapping[str, Any] = field(default_factory=dict)
    contents: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Blamer:
    """Explains a replay of a case that differs from the reference.

    reference  of each case: what the buffers held after `refresh`, and the eager outcome
    written    of each case and buffer: which elements `refresh` writes
    """

    def __init__(
        self,
        runs: Runs,
        reference: Mapping[str, tuple[Contents, Outcome]],
        written: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> None:
        self._runs, self._reference, self._written = runs, reference, written

    def explain(self, graph: Captured, case: Case, world: World, contents: Contents, got: Outcome) -> Blame:
        """Why a replay that began with `contents` gave `got`."""
        runs, (clean, expected) = self._runs, self._reference[case.name]
        suspects = [
            n for n in clean if n in contents and _alike(contents[n], clean[n]) and _differ(contents[n], clean[n])
        ]
        unowned = sorted(runs.target.unowned(case.inputs)) if world in POISONED else []
        every = [*suspects, *(f"state {name}" for name in unowned), POOL]

        def again(fixed: Sequence[str]) -> Outcome:
            put = contents.but({name: clean[name] for name in suspects if name in fixed})
            if fixed and set(suspects) <= set(fixed):
                put = Contents(put, clean.host)
            skip = frozenset(name for name in unowned if f"state {name}" in fixed)
            byte = 0 if POOL in fixed else NAN_BYTE if world in POISONED else None
            before = None if byte is None else partial(graph.fill_memory, byte)
            runs.replays += 1
            return runs.run(case, graph.launch, put, unowned=world if unowned else None, skip=skip, before=before)

        repeated = again(())
        if not runs.same(case, repeated, got):
            moved = self._moved(graph, case)
            because = (
                "the same replay from the same state and buffers gave two results: something that the graph reads is "
                "not named in buffers or state, was freed, or is written concurrently"
            )
            if moved:
                because += f"; the graph has the old addresses of {', '.join(moved)}"
            return Blame("determinism", moved, because)
        mended = again(every)
        if runs.same(case, mended, expected):
            fixed = least(every, lambda names: runs.same(case, again(names), expected))
            # Where the step does not mind eagerly, the graph goes on with something that makes it read that memory.
            immune = set(fixed) <= set(suspects) and runs.same(case, runs.eager(case, contents), expected)
            if immune and (found := self._frozen(graph, case, contents, got)):
                return found
            return Blame("history", tuple(fixed), "; ".join(self._stale(n, case, contents) for n in fixed))
        found = self._frozen(graph, case, clean, mended)
        return found or self._unexplained(graph, case)

    def _frozen(self, graph: Captured, case: Case, contents: Contents, got: Outcome) -> Blame | None:
        """What an eager run must have put back to give what the graph gave."""
        runs = self._runs
        host = [*self._host(graph, case, contents), *self._scalars(graph, case)]
        buffers = self._buffers(graph, contents)

        def explains(chosen: Sequence[_Revert]) -> bool:
            inputs, slots, put = None, dict[str, Any](), contents
            for revert in chosen:
                if revert.inputs is not None:
                    inputs = _other_inputs(case.inputs if inputs is None else inputs, revert.inputs)
                slots |= revert.slots
                put = put.but(revert.contents)
            try:
                return runs.same(case, runs.eager(case, put, inputs=inputs, slots=slots), got)
            except Exception:  # refresh does not take such inputs together
                return False

        chosen: Sequence[_Revert] = ()
        for group in (host, buffers, [*host, *buffers]):
            chosen = chosen or next(([r] for r in group[:_MOST_TRIED] if explains([r])), ())
            if not chosen and len(group) > 1 and explains(group):
                chosen = _shrunk(group, explains)
        if chosen:
            seen = self._seen(graph, case, contents)
            return Blame("graph", tuple(r.name for r in chosen), "; ".join(r.because for r in chosen) + seen)
        # A step that goes on by itself, as by a generator, gives something else with its own inputs too.
        everything, usual = _Revert("", "", inputs=graph.case.inputs), self._reference[case.name][1]
        if explains([everything]) and runs.same(case, runs.eager(case, contents, inputs=case.inputs), usual):
            because = (
                f"host values that {runs.target.makes_of_inputs}: they were taken at capture, and the graph goes on "
                f"with those of case {graph.case.name}; keep them in tensors"
            )
            untried = self._moved(graph, case)
            if untried:
                because += f"; another tensor stands in {', '.join(untried)}, too large to be put back"
            return Blame("graph", untried or ("host values",), because + self._seen(graph, case, contents))
        return None

    def _scalars(self, graph: Captured, case: Case) -> list[_Revert]:
        found = []
        for name, old in graph.case.named.items():
            new = case.named.get(name)
            tensors = isinstance(old, torch.Tensor), isinstance(new, torch.Tensor)
            if all(tensors) or (not any(tensors) and same(old, new)):
                continue
            was, now = ("a tensor" if tensor else shown(v) for tensor, v in zip(tensors, (old, new), strict=True))
            because = (
                f"{name} was {was} when case {graph.case.name} was captured, and is {now} now: the graph has "
                f"the old value; keep {name} in a tensor, or capture a graph for each value"
            )
            found.append(_Revert(name, because, inputs={name: old}))
        return found

    def _host(self, graph: Captured, case: Case, contents: Contents) -> list[_Revert]:
        self._runs.target.refresh(case.inputs)
        root = self._runs.target.root
        with self._runs.numbers_of(contents):
            changes = graph.host.changed(*root)
            tried = {change.path: change.old for change in changes if not change.is_tensor}
            changes += [
                change
                for change in graph.entered.changed(*root)
                if not change.is_tensor and not (change.path in tried and same(tried[change.path], change.old))
            ]
        found = []
        for change in changes:
            old = self._runs.before(change)
            if change.is_tensor and old is None:
                continue
            advice = _ADVICE[0 if change.is_tensor else 1 if is_value(old) else 2]
            found.append(_Revert(change.name, f"{change.text}; {advice}", slots={change.path: old}))
        return sorted(found, key=lambda revert: not isinstance(next(iter(revert.slots.values())), _NUMBERS))

    def _buffers(self, graph: Captured, contents: Contents) -> list[_Revert]:
        found = []
        for name, old in graph.contents.items():
            if name in contents and old.shape == contents[name].shape and _differ(old, contents[name]):
                because = (
                    f"the graph goes on with what {name} held at capture, for case {graph.case.name}: what the step "
                    f"reads of it was computed or copied outside of the graph; do that inside of run(), or in refresh()"
                )
                found.append(_Revert(name, because, contents={name: old}))
        return found

    def _seen(self, graph: Captured, case: Case, contents: Contents) -> str:
        """The buffers that hold other values after a replay than after an eager run."""
        runs = self._runs
        runs.replays += 1
        have = runs.run(case, graph.launch, contents, after=True).after
        want = runs.eager(case, contents, after=True).after
        names = [n for n in want if n in have and have[n].shape == want[n].shape and _differ(have[n], want[n])]
        return f"; after the replay {', '.join(names)} differ{'s' if len(names) == 1 else ''} too" if names else ""

    def _unexplained(self, graph: Captured, case: Case) -> Blame:
        moved = self._moved(graph, case)
        text = (
            "no single buffer, scalar or host value explains it; inspect_graph(graph) of graphrt.capture.inspect.cuda "
            "lists the nodes with their addresses, and audit() those that nobody owns"
        )
        if moved:
            names = ", ".join(moved)
            text = f"the tensors in {names} are no longer those of the capture, whose memory may be gone; {text}"
        return Blame("graph", moved, text)

    def _moved(self, graph: Captured, case: Case) -> tuple[str, ...]:
        """The places in which another tensor stands than at capture."""
        self._runs.target.refresh(case.inputs)
        return tuple(c.path for c in graph.host.changed(*self._runs.target.root) if c.is_tensor)

    def _stale(self, name: str, case: Case, contents: Contents) -> str:
        """What stands in a buffer that refresh did not write, and where."""
        if name == POOL:
            return "the graph reads or returns memory of the pool, or memory that was freed, before it writes it"
        if name.startswith("state "):
            return f"unowned parts of {name} reach the results; mask them, or give the row a page of its own"
        clean, have = self._reference[case.name][0][name], contents[name]
        mask = _different(have, clean)
        held = f"{region(name, mask)} holds {self._whose(name, case, have, mask)}"
        written = self._written[case.name].get(name)
        if written is not None and written.shape == mask.shape and bool(written[mask].all()):
            return f"{held}: what refresh() writes there depends on what ran before, not on the case alone"
        return f"{held}: {self._runs.target.why_unwritten}"

    def _whose(self, name: str, case: Case, have: torch.Tensor, mask: torch.Tensor) -> str:
        for other, (contents, _) in self._reference.items():
            values = contents.get(name)
            if other == case.name or values is None or values.shape != have.shape:
                continue
            if not bool(differing(values[mask], have[mask]).any()):
                return f"case {other}'s values"
        return f"{_few(have[mask])}, which stood there before"

    def leak(self, case: Case, written: Mapping[str, torch.Tensor], outcome: Outcome) -> Blame | None:
        """Which memory that refresh did not write for a case changes its eager results."""
        runs, (clean, _) = self._runs, self._reference[case.name]
        if any(not runs.same(case, runs.eager(case, clean), outcome) for _ in range(_OFTEN)):
            return None  # without any poison too
        for world in POISONED:
            for name, mask in written.items():
                if bool(mask.all()):
                    continue
                poisoned = clean[name].clone()
                runs.fill(name, poisoned, world)
                poisoned[mask] = clean[name][mask]
                if _differ(poisoned, clean[name]):
                    changed = runs.eager(case, clean.but({name: poisoned}))
                    if not runs.same(case, changed, outcome):
                        part = region(name, ~mask)
                        because = f"{part} reaches the results: {runs.target.why_unwritten}"
                        return Blame("padding", (name,), because)
            for name in runs.target.unowned(case.inputs):
                skip = frozenset(runs.target.state) - {name}
                if not runs.same(case, runs.eager(case, clean, unowned=world, skip=skip), outcome):
                    return Blame("padding", (f"state {name}",), self._stale(f"state {name}", case, clean))
        return None

    def trespasser(self, case: Case, wrong: Difference) -> Blame:
        """Which elements of a buffer send a write to a part of the state that is not the step's own.

        Elements of one value at a time get another value of the buffer: those count without which nothing goes there.
        """
        runs = self._runs
        clean = self._reference[case.name][0]
        tries = []
        for name, values in clean.items():
            if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool:
                continue
            held = values.unique().tolist()
            if len(held) > 1:
                aims = wrong.at[:1]
                tries += [(v >= 0, v not in aims, name, v, held[0] if v != held[0] else held[1]) for v in held[:16]]
        for _, _, name, value, other in sorted(tries, key=lambda t: t[:2])[:_MOST_TRIED]:
            mask = clean[name] == value
            changed = torch.where(mask, other, clean[name])
            outcome = runs.eager(case, clean.but({name: changed}))
            if not outcome.error and runs.trespasses(case, outcome) is None:
                from_end = "negative, an index from the end" if value < 0 else f"{value}, a place that is not its own"
                because = f"{region(name, mask)} is {from_end}, and sends a write there; mask such rows"
                return Blame("unowned", (name, wrong.output), because)
        text = "the step writes there; look at the rows that are no real ones, and at what they take for their place"
        return Blame("unowned", (wrong.output,), text)

    def carried(self, case: Case, found: Sequence[Held]) -> Blame | None:
        """Which of these host values, which run() changes, a second run goes on from. They are then put back each time.

        found   what they were before a run
        """
        runs = self._runs
        runs.carried = found

        def again(kept: Sequence[str] = ()) -> Outcome:
            runs.kept = frozenset(kept)
            try:
                return runs.eager(case, runs.enter(case, World.REFERENCE), entered=True)
            except Exception as error:  # of refresh(): `check` says so
                return Outcome(error=str(error))
            finally:
                runs.kept = frozenset()

        def goes_on(kept: Sequence[str]) -> bool:
            again()
            return any(not runs.same(case, again(kept), usual) for _ in range(_RUNS_ON))

        usual, paths = again(), [held.path for held in found]
        if usual.error or not runs.same(case, again(), usual) or not goes_on(paths):
            runs.carried = ()
            return None
        tried = next(([path] for path in paths[:_MOST_TRIED] if goes_on([path])), paths)
        chosen = [held.name for held in found if held.path in tried]
        because = (
            f"run() leaves another value in {', '.join(chosen)}, and the next run goes on from it: a replay runs no "
            "Python, so it stays as it was at capture; keep it in a tensor that run() changes in place, or change it "
            "in refresh()"
        )
        return Blame("determinism", tuple(chosen), because)

    def remembered(self, case: Case, start: HostValues) -> Blame | None:
        """Which host values of earlier cases a result comes from: with these as at `start`, it is another one.

        With other random numbers than before: what was drawn once, and kept, is from an earlier case too.
        """
        runs = self._runs
        root = runs.target.root
        changes = [c for c in start.changed(*root, entries=True) if c.old is not None or not c.is_tensor]
        clean, _ = self._reference[case.name]

        def fresh(chosen: Sequence[Change]) -> Outcome | None:
            try:
                return runs.eager(case, clean, earlier={c.path: c.old for c in chosen}, put=False, seed=OTHER_SEED)
            except Exception:  # refresh does not work with such values
                return None

        def enough(chosen: Sequence[Change]) -> bool:
            outcome = fresh(chosen)
            return outcome is not None and not outcome.error and runs.same(case, outcome, wanted)

        everything = fresh(changes) if changes else None
        if everything is None or everything.error:
            return None
        # Several times: what a counter gives may come out alike by chance.
        usual = (fresh(()) for _ in range(_OFTEN))
        if not any(outcome is not None and not runs.same(case, everything, outcome) for outcome in usual):
            return None
        if (again := fresh(changes)) is None or not runs.same(case, again, everything):
            return None  # the step does not repeat: it is not these values that it comes from
        wanted = everything
        chosen = list(changes) if len(changes) == 1 else least(changes[:_MOST_TRIED], enough)
        because = "; ".join(c.text for c in chosen)
        because += ": made for an earlier case, and used again; make it anew in refresh(), or in the captured step"
        return Blame("history", tuple(c.name for c in chosen), because)

    def remembered_by_functions(self, cases: Sequence[Case]) -> tuple[Case, Blame] | None:
        """Which function's cache (functools) a result comes from. What is dropped of one does not come back."""
        runs = self._runs
        functions = caches(*runs.target.root)
        for case in cases if functions else ():
            for _, function in functions:
                function.cache_clear()
            clean, usual = self._reference[case.name]
            if not runs.same(case, runs.eager(case, clean, put=False), usual):
                used = tuple(path for path, function in functions if function.cache_info().currsize)
                because = f"{', '.join(used)} gave a result of an earlier case; let the key hold all that it depends on"
                return case, Blame("history", used, because)
        return None

    def unlike_inputs(self, case: Case) -> Blame | None:
        """A buffer that does not hold the input of its name."""
        clean = self._reference[case.name][0]
        for name, value in case.named.items():
            buffer = clean.get(name)
            if not isinstance(value, torch.Tensor) or buffer is None or value.dim() != buffer.dim():
                continue
            part = tuple(slice(0, n) for n in value.shape)
            if buffer[part].shape != value.shape:
                because = f"{name} has shape {list(buffer.shape)}, and case {case.name} brings {list(value.shape)}"
                return Blame("padding", (name,), f"{because}; allocate it for the largest case")
            held, value = buffer[part], value.to(buffer.device)
            if not held.is_floating_point() and bool((lost := value.to(held.dtype).to(value.dtype) != value).any()):
                because = f"{name} is {held.dtype}, which does not hold {_few(value[lost])} of inputs['{name}']"
                return Blame("padding", (name,), f"{because}; allocate it in {value.dtype}")
            mask = _different(held, value.to(held.dtype))
            if bool(mask.any()):
                because = f"{region(name, mask)} does not hold what inputs['{name}'] has; copy it in refresh()"
                return Blame("padding", (name,), because)
        return None


def aliased(runs: Runs, wrong: Difference) -> Blame | None:
    """A wrong output that is memory of a tensor which the step writes as well."""
    tensor = runs.standing.get(wrong.output, "")
    if tensor not in runs.target.hidden:
        return None
    because = f"{wrong.output} is memory of {tensor}, which the step writes to again; return a copy"
    return Blame("padding", (tensor,), because)


def _other_inputs(inputs: Any, other: Any) -> Any:
    """Inputs with some of them replaced by their names, or all of them where they have no names."""
    return {**inputs, **other} if isinstance(inputs, Mapping) and isinstance(other, Mapping) else other


def least(items: Sequence[_T], enough: Callable[[Sequence[_T]], bool]) -> list[_T]:
    """One item that is enough, or a small set of them, as all together are enough."""
    for item in items:
        if enough([item]):
            return [item]
    return _shrunk(items, enough)


def _shrunk(items: Sequence[_T], enough: Callable[[Sequence[_T]], bool]) -> list[_T]:
    kept = list(items)
    for item in list(items):
        fewer = [other for other in kept if other is not item]
        if fewer and enough(fewer):
            kept = fewer
    return kept


def _different(have: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return differing(have, want)


def _differ(have: torch.Tensor, want: torch.Tensor) -> bool:
    return have.shape != want.shape or bool(differing(have, want).any())


def _alike(have: torch.Tensor, want: torch.Tensor) -> bool:
    return have.shape == want.shape and have.dtype == want.dtype


def _few(values: torch.Tensor) -> str:
    first = values.flatten()[:3].tolist()
    more = ", ..." if values.numel() > 3 else ""
    return "[" + ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in first) + more + "]"
