"""What an earlier case left on the device, and a later one goes on from: in tensors that nobody named, and in state.

Tensors that nobody named are as at first before each other run. Here they are not, as in a server. State goes on by
right, so there the oracle is asked: it starts from the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from graphrt.testing.verify_blame import Blame, least
from graphrt.testing.verify_report import Difference, differing, region
from graphrt.testing.verify_runs import Case, Contents, Outcome, Runs

Reference = Mapping[str, tuple[Contents, Outcome]]
"""Of each case: what the buffers held after `refresh`, and the eager outcome."""


@dataclass(frozen=True)
class Unreset:
    """A case that comes out otherwise after others."""

    case: Case
    blame: Blame
    wrong: Difference | None


def unreset(runs: Runs, reference: Reference, cases: Sequence[Case]) -> Unreset | None:
    """Which tensors that nobody named carry something from one run to the next, and into the results.

    Cases of 8, 3 and 5 rows run in the order 8, 8, 3, 5, 3, 8: each behind larger and smaller ones, and one behind
    itself. These tensors are kept meanwhile, and nothing else. Each run must give what it gave from the beginning.
    """
    names = list(runs.target.hidden)
    walk = [cases[0], *cases, *reversed(cases[:-1])]

    def spoiled(kept: Iterable[str]) -> tuple[Case, Outcome] | None:
        """The first run of the walk that differs."""
        runs.restore_state()
        runs.kept = frozenset(kept)
        try:
            for case in walk:
                clean, usual = reference[case.name]
                outcome = runs.eager(case, clean)
                if not runs.same(case, outcome, usual):
                    return case, outcome
            return None
        finally:
            runs.kept = frozenset()

    if not names or spoiled(names) is None:
        return None
    chosen = next(([n] for n in names if spoiled([n])), names)
    found = spoiled(chosen)
    if found is None:  # once only: what cannot be repeated is told elsewhere
        return None
    case, outcome = found
    left = {name: runs.target.hidden[name].clone() for name in chosen}
    clean, usual = reference[case.name]
    runs.eager(case, clean)  # from the beginning: what still differs then was left by other runs
    parts = ", ".join(_part(name, differing(left[name], runs.target.hidden[name])) for name in chosen)
    because = (
        f"{parts} still holds what runs before left there, and the step goes on from it; write it, or mask it, in each "
        "captured step, or, where it is to go on from step to step, name it in state"
    )
    wrong = None if outcome.error else runs.difference(case, outcome, usual)
    return Unreset(case, Blame("determinism", tuple(chosen), because), wrong)


@dataclass(frozen=True)
class Past:
    """State as another case leaves it."""

    case: Case
    state: Mapping[str, torch.Tensor]


def past_of(runs: Runs, reference: Reference, cases: Sequence[Case], case: Case) -> Past | None:
    """The state after the case that changes most of what this one leaves alone; None where no case changes any."""
    own = reference[case.name][1].changes

    def left_there(other: Case) -> tuple[int, int]:
        changes = reference[other.name][1].changes
        fresh = sum(int((~torch.isin(at, own[name][0])).sum()) for name, (at, _) in changes.items())
        return fresh, sum(len(at) for at, _ in changes.values())

    others = [other for other in cases if other is not case] or [case]
    other = max(others, key=left_there)
    if left_there(other) == (0, 0):
        return None
    state = {name: tensor.clone() for name, tensor in runs.state.items()}
    for name, (at, values) in reference[other.name][1].changes.items():
        flat = state[name].flatten()
        flat[at] = values
        state[name] = flat.view(state[name].shape)
    return Past(other, state)


def blame_state(runs: Runs, past: Past, have: Outcome, agree: Callable[[Mapping[str, torch.Tensor]], bool]) -> Blame:
    """Which tensors of the state make the step and its oracle differ.

    have    the step's outcome from the past state
    agree   whether both agree from a state: they do from the first one
    """
    names = [name for name, tensor in past.state.items() if bool(differing(tensor, runs.state[name]).any())]
    chosen = least(names, lambda back: agree({n: runs.state[n] if n in back else t for n, t in past.state.items()}))
    parts = []
    for name in chosen:
        left = differing(past.state[name], runs.state[name]).flatten()
        kept = left.clone()
        if name in have.changes:
            kept[have.changes[name][0]] = False  # what the run wrote itself
        mask = kept if bool(kept.any()) else left
        parts.append(_part(name, mask.view(past.state[name].shape)))
    because = (
        f"the step goes on from what case {past.case.name} left in {', '.join(parts)}, and its oracle does not, or not "
        "in the same way: mask what is stale there; where it is to go on, let the oracle read the state, as both start "
        "from it"
    )
    return Blame("state", tuple(f"state {name}" for name in chosen), because)


def _part(name: str, mask: torch.Tensor) -> str:
    return region(name, mask) if bool(mask.any()) else name
