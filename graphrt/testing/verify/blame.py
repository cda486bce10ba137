"""Find the cause of a wrong result. Restore one value, run again, and compare the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from graphrt.kernels.checks import shown
from graphrt.testing.verify.compare import Difference, differing, region, unlike
from graphrt.testing.verify.host import Change, HostValues, caches, is_value, same
from graphrt.testing.verify.memory import NAN_BYTE, CapturedMemory
from graphrt.testing.verify.runs import OTHER_SEED, POISONED, Case, Contents, Fill, Outcome, Runs

POOL = "memory pool"
_MOST_TRIED = 40
_TIMES = 3  # number of repetitions of a run that must be deterministic
_ADVICE = (
    "fill it in place with copy_()",
    "keep it in a tensor that refresh() fills",
    "choose on the device, or capture a graph for each",
)
"""Advice for tensors, for numbers and other data, and for objects and functions."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Blame:
    """The check, the cause and the explanation of a `VerifyFinding`."""

    check: str
    blamed: tuple[str, ...]
    because: str


@dataclass(frozen=True)
class Captured:
    """A captured step.

    case         the case at which it was captured
    launch       launches the graph and returns its outputs
    host         Python values after the capture
    fill_memory  fills memory that the step must write before it reads. 0 also fills the next launch's results
    buffers      the buffers at capture. They are kept alive, because the graph still reads the memory of a replaced
                 buffer, which could otherwise contain values that are out of range as indices
    memory       memory of all the step's tensors at capture
    """

    case: Case
    launch: Callable[[], Any]
    host: HostValues
    fill_memory: Callable[[int], object]
    buffers: Mapping[str, torch.Tensor]
    memory: CapturedMemory


@dataclass(frozen=True)
class _Revert:
    """A value that can be reset to its value at capture: inputs, or Python values by path."""

    name: str
    because: str
    inputs: Any = None
    host: Mapping[str, Any] = field(default_factory=dict)


class Blamer:
    """Explain results that differ from the reference. `Verification` documents `reference` and `written`."""

    def __init__(
        self,
        runs: Runs,
        reference: Mapping[str, tuple[Contents, Outcome]],
        written: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> None:
        self._runs, self._reference, self._written = runs, reference, written

    def explain(self, graph: Captured, case: Case, value: Fill, contents: Contents, got: Outcome) -> Blame:
        """Return why a replay that started with `contents` produced `got`."""
        runs, (clean, expected) = self._runs, self._reference[case.name]
        suspects = [
            name
            for name, want in clean.items()
            if name in contents
            and (contents[name].shape, contents[name].dtype) == (want.shape, want.dtype)
            and unlike(contents[name], want)
        ]
        unowned = sorted(runs.target.unowned(case.inputs)) if value in POISONED else []
        every = [*suspects, *(f"state {name}" for name in unowned), POOL]

        def again(fixed: Sequence[str]) -> Outcome:
            put = contents.but({name: clean[name] for name in suspects if name in fixed})
            if fixed and set(suspects) <= set(fixed):
                put = Contents(put, clean.host)
            skip = frozenset(name for name in unowned if f"state {name}" in fixed)
            byte = 0 if POOL in fixed else NAN_BYTE if value in POISONED else None
            before = None if byte is None else partial(graph.fill_memory, byte)
            runs.replays += 1
            return runs.run(case, graph.launch, put, unowned=value if unowned else None, skip=skip, before=before)

        if not runs.same(case, again(()), got):
            moved = self._moved(graph, case)
            because = (
                "the same replay from the same state and buffers gave two results: the graph reads memory that is not "
                "named in buffers or state, that was freed, or that is written concurrently"
            )
            if moved:
                because += f"; the graph has the old addresses of {', '.join(moved)}"
            return Blame("determinism", moved, because)
        fixed = again(every)
        if runs.same(case, fixed, expected):
            cause = least(every, lambda names: runs.same(case, again(names), expected))
            # If the eager step is correct with these contents, a frozen value makes the graph read them.
            immune = set(cause) <= set(suspects) and runs.same(case, runs.eager(case, contents), expected)
            if immune and (found := self._frozen(graph, case, contents, got)):
                return found
            return Blame("history", tuple(cause), "; ".join(self._stale(n, case, contents) for n in cause))
        return self._frozen(graph, case, clean, fixed) or self._unexplained(graph, case)

    def _frozen(self, graph: Captured, case: Case, contents: Contents, got: Outcome) -> Blame | None:
        """Return the values from capture with which an eager run reproduces the graph's result."""
        runs = self._runs
        reverts = [*self._host(graph, case, contents), *self._scalars(graph, case)]

        def explains(chosen: Sequence[_Revert]) -> bool:
            inputs, values = None, dict[str, Any]()
            for revert in chosen:
                if revert.inputs is not None:
                    inputs = _with_inputs(case.inputs if inputs is None else inputs, revert.inputs)
                values |= revert.host
            return runs.same(case, runs.eager(case, contents, inputs=inputs, host=values), got)

        chosen = next(([r] for r in reverts[:_MOST_TRIED] if explains([r])), [])
        if not chosen and len(reverts) > 1 and explains(reverts):
            chosen = _shrunk(reverts, explains)
        if chosen:
            return Blame("graph", tuple(r.name for r in chosen), "; ".join(r.because for r in chosen))
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
        found = []
        for change in changes:
            old = self._runs.before(change)
            if change.is_tensor and old is None:
                continue
            advice = _ADVICE[0 if change.is_tensor else 1 if is_value(old) else 2]
            found.append(_Revert(change.name, f"{change.text}; {advice}", host={change.path: old}))
        return sorted(found, key=lambda r: not isinstance(next(iter(r.host.values())), (int, float, str)))

    def _unexplained(self, graph: Captured, case: Case) -> Blame:
        moved = self._moved(graph, case)
        text = (
            "no single buffer, argument or Python value explains it; a Python value that changed before this call "
            "cannot be named; inspect_graph() of graphrt.capture.inspect.cuda lists the nodes with their addresses, "
            "and audit() lists addresses without an owner"
        )
        if moved:
            text = f"{', '.join(moved)} are different tensors than at capture, whose memory may have been freed; {text}"
        return Blame("graph", moved, text)

    def _moved(self, graph: Captured, case: Case) -> tuple[str, ...]:
        """Return the paths whose tensors differ from the tensors at capture."""
        self._runs.target.refresh(case.inputs)
        return tuple(c.path for c in graph.host.changed(*self._runs.target.root) if c.is_tensor)

    def _stale(self, name: str, case: Case, contents: Contents) -> str:
        """Describe the stale part of a buffer, and its origin."""
        if name == POOL:
            return "the graph reads or returns memory of the pool, or freed memory, before it writes it"
        if name.startswith("state "):
            return f"unowned parts of {name} reach the results; mask them, or give the row its own page"
        clean, have = self._reference[case.name][0][name], contents[name]
        mask = differing(have, clean)
        held = f"{region(name, mask)} holds {self._origin(name, case, have, mask)}"
        written = self._written[case.name].get(name)
        if written is not None and written.shape == mask.shape and bool(written[mask].all()):
            return f"{held}: refresh() writes values there that depend on earlier runs, not only on the case"
        return f"{held}: {self._runs.target.why_unwritten}"

    def _origin(self, name: str, case: Case, have: torch.Tensor, mask: torch.Tensor) -> str:
        for other, (contents, _) in self._reference.items():
            values = contents.get(name)
            if other == case.name or values is None or values.shape != have.shape:
                continue
            if not bool(differing(values[mask], have[mask]).any()):
                return f"case {other}'s values"
        values = have[mask]
        first = ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values[:3].tolist())
        return f"[{first}{', ...' if len(values) > 3 else ''}], its old contents"

    def trespasser(self, case: Case, wrong: Difference) -> Blame:
        """Return the elements of an index buffer that cause a write to unowned state.

        All elements with one value get a different value of the buffer. If this stops the write, they are the cause.
        """
        runs = self._runs
        clean = self._reference[case.name][0]
        tries = []
        for name, values in clean.items():
            if not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool):
                held = values.unique().tolist()
                pairs = zip(held, [*held[1:], held[0]], strict=True) if len(held) > 1 else ()
                tries += [(value >= 0, value not in wrong.at, name, value, other) for value, other in pairs]
        for _, _, name, value, other in sorted(tries)[:_MOST_TRIED]:
            mask = clean[name] == value
            outcome = runs.eager(case, clean.but({name: torch.where(mask, other, clean[name])}))
            if not outcome.error and runs.trespasses(case, outcome) is None:
                held_value = "negative, an index from the end" if value < 0 else f"{value}"
                because = f"{region(name, mask)} is {held_value}, and causes a write to unowned state; mask such rows"
                return Blame("unowned", (name, wrong.output), because)
        text = "the step writes there; check which index the pad rows use"
        return Blame("unowned", (wrong.output,), text)

    def carried(self, case: Case, start: HostValues, once: Outcome) -> Blame | None:
        """Return the Python values that a run changes and the next run uses. With the values of `start`, the next run
        produces `once`."""
        runs = self._runs
        changes = start.changed(*runs.target.root, entries=True)
        clean, _ = self._reference[case.name]

        def enough(chosen: Sequence[Change]) -> bool:
            return runs.same(case, runs.eager(case, clean, earlier={c.path: c.old for c in chosen}), once)

        if not changes or not all(enough(changes) for _ in range(_TIMES)):
            return None
        chosen = tuple(c.name for c in least(changes[:_MOST_TRIED], enough))
        because = (
            f"each run changes {', '.join(chosen)}, and the next run uses it, but a replay runs no Python, so the "
            "graph has the value of its capture; keep it in a tensor that run() changes in place, or change it in "
            "refresh()"
        )
        return Blame("determinism", chosen, because)

    def remembered(self, case: Case, start: HostValues) -> Blame | None:
        """Return the Python values of earlier cases that change a result. With the values of `start`, the result
        differs.

        The trial uses different random numbers, because a number drawn once and kept is also from an earlier case.
        """
        runs = self._runs
        changes = start.changed(*runs.target.root, entries=True)
        clean, _ = self._reference[case.name]

        def fresh(chosen: Sequence[Change]) -> Outcome:
            return runs.eager(case, clean, earlier={c.path: c.old for c in chosen}, put=False, seed=OTHER_SEED)

        if not changes or (wanted := fresh(changes)).error:
            return None
        # Try several times, because a counter's result may be correct by chance.
        if all(runs.same(case, fresh(()), wanted) for _ in range(_TIMES)):
            return None
        if not runs.same(case, fresh(changes), wanted):
            return None  # the step is not deterministic, so these values are not the cause
        chosen = least(changes[:_MOST_TRIED], lambda some: runs.same(case, fresh(some), wanted))
        because = "; ".join(c.text for c in chosen)
        because += ": computed for an earlier case and used again; recompute it in refresh(), or in the captured step"
        return Blame("history", tuple(c.name for c in chosen), because)

    def remembered_by_functions(self, cases: Sequence[Case]) -> tuple[Case, Blame] | None:
        """Return the `functools` caches that change a result. Their entries are cleared, not restored."""
        runs = self._runs
        functions = caches(*runs.target.root)
        for case in cases if functions else ():
            for _, function in functions:
                function.cache_clear()
            clean, usual = self._reference[case.name]
            if not runs.same(case, runs.eager(case, clean, put=False), usual):
                used = tuple(path for path, function in functions if function.cache_info().currsize)
                because = f"{', '.join(used)} returned a result of an earlier case; extend the key of the cache"
                return case, Blame("history", used, because)
        return None

    def unlike_inputs(self, case: Case) -> Blame | None:
        """Return a buffer whose contents differ from the input of the same name."""
        clean = self._reference[case.name][0]
        for name, value in case.named.items():
            buffer = clean.get(name)
            if not isinstance(value, torch.Tensor) or buffer is None or value.dim() != buffer.dim():
                continue
            part = tuple(slice(0, n) for n in value.shape)
            if buffer[part].shape != value.shape:
                because = f"{name} has shape {list(buffer.shape)}, and case {case.name} has {list(value.shape)}"
                return Blame("padding", (name,), f"{because}; allocate it for the largest case")
            mask = differing(buffer[part], value.to(buffer.device, buffer.dtype))
            if bool(mask.any()):
                because = f"{region(name, mask)} does not have the values of inputs['{name}']; copy them in refresh()"
                return Blame("padding", (name,), because)
        return None


def _with_inputs(inputs: Any, other: Any) -> Any:
    """Replace the named inputs, or all inputs if they are not mappings."""
    return {**inputs, **other} if isinstance(inputs, Mapping) and isinstance(other, Mapping) else other


def least(items: Sequence[_T], enough: Callable[[Sequence[_T]], bool]) -> list[_T]:
    """Return one sufficient item, or a small sufficient subset. All items together must be sufficient."""
    return next(([item] for item in items if enough([item])), None) or _shrunk(items, enough)


def _shrunk(items: Sequence[_T], enough: Callable[[Sequence[_T]], bool]) -> list[_T]:
    kept = list(items)
    for item in list(items):
        fewer = [other for other in kept if other is not item]
        if fewer and enough(fewer):
            kept = fewer
    return kept
