"""Tensors that a step made before `verify` began, and keeps: in a dict by their shape, or in an attribute.

    if n not in self.scales:                    # made at the capture, for the positions of that batch
        self.scales[n] = step.positions.cos()

What is made while `verify` runs, `Blamer.remembered` sees. A runtime captures long before, and a function may have run.
So each such tensor is taken away, and a run makes it anew. Then the results must be what they were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphrt.testing.verify_blame import Blame
from graphrt.testing.verify_host import assign, entry, unchanged
from graphrt.testing.verify_past import Reference
from graphrt.testing.verify_report import has_memory
from graphrt.testing.verify_runs import OTHER_SEED, SEED, Case, Outcome, Runs
from graphrt.testing.verify_slots import slots
from graphrt.testing.verify_values import Keys

_MOST_TRIED = 24


@dataclass(frozen=True)
class Kept:
    """Entries of a dict, or an attribute, and what stands at `path` without them."""

    name: str
    path: str
    without: Any
    places: tuple[str, ...]


def kept_tensors(runs: Runs) -> Iterator[Kept]:
    """Those within reach that are no weights, buffers or state. Before it is made, an attribute is missing, or None."""
    named = runs.storages
    for slot in slots(*runs.target.root):
        if not isinstance(slot.value, dict) or slot.set is None:
            continue
        every = frozenset(slot.value)
        places = {key: entry(slot.path, key) for key, value in slot.value.items() if _is_kept(value, named)}
        if slot.path.endswith("."):  # attributes of an object: one by one, as it may not do without the others
            for key, place in places.items():
                yield Kept(place, slot.path, Keys(every - {key}), (place,))
                yield Kept(place, place, None, (place,))
        elif places:
            paths = tuple(places.values())
            yield Kept(paths[0] if len(paths) == 1 else slot.path, slot.path, Keys(every - places.keys()), paths)


def _is_kept(value: Any, named: Collection[int]) -> bool:
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return bool(tensors) and all(
        isinstance(t, torch.Tensor)
        and not isinstance(t, torch.nn.Parameter)
        and has_memory(t)
        and t.untyped_storage().data_ptr() not in named
        for t in tensors
    )


class KeptTensors:
    """Looks for results that come from such tensors.

    untried  names of those that were too many to take away
    """

    def __init__(self, runs: Runs, reference: Reference) -> None:
        self._runs, self._reference = runs, reference
        self.untried: tuple[str, ...] = ()
        self._found: dict[tuple[str, ...], list[Kept]] = {}

    def check(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Blame]]:
        """The cases whose results are others where these tensors are made anew, each set of tensors once."""
        # What no run makes is a weight, or optional. Of two cases, as one may be of prompts.
        some = [cases[0], *cases[1:][-1:]]
        every = list(kept_tensors(self._runs))
        tried, self.untried = every[:_MOST_TRIED], tuple(dict.fromkeys(kept.name for kept in every[_MOST_TRIED:]))
        made = [kept for kept in tried if any(self._anew(case, [kept]) is not None for case in some)]
        for case in cases if made else ():
            chosen: dict[str, Kept] = {}
            for kept in made:
                if kept.name not in chosen and self._spoils(case, kept):
                    chosen[kept.name] = kept
            if chosen and (names := tuple(chosen)) not in self._found:
                self._found[names] = list(chosen.values())
                yield case, _blame(names)

    def explains(self, case: Case, got: Outcome) -> Blame | None:
        """Why a replay gave `got`: it makes anew what eager runs take from before."""
        for names, chosen in self._found.items():
            outcome = self._anew(case, chosen)
            if outcome is not None and self._runs.same(case, outcome, got):
                return _blame(names)
        return None

    def _spoils(self, case: Case, kept: Kept) -> bool:
        """Whether the results come from it. What is drawn at random is another thing each time it is made."""
        first = self._anew(case, [kept])
        if first is None or self._runs.same(case, first, self._reference[case.name][1]):
            return False
        again = self._anew(case, [kept], OTHER_SEED)
        return again is not None and self._runs.same(case, again, first)

    def _anew(self, case: Case, chosen: Sequence[Kept], seed: int = SEED) -> Outcome | None:
        """The eager outcome without these tensors; None where the run does not make all of them."""
        root = self._runs.target.root
        with unchanged(*root):
            assign(*root, {kept.path: kept.without for kept in chosen})
            try:
                outcome = self._runs.eager(case, self._reference[case.name][0], seed=seed)
            except Exception:  # refresh does not work without them
                return None
            made = {slot.path for slot in slots(*root) if slot.value is not None}
        missing = [kept for kept in chosen if not made.intersection(kept.places)]
        return None if outcome.error or missing else outcome


def _blame(names: tuple[str, ...]) -> Blame:
    because = (
        f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} made in an earlier run, of that run's inputs, and "
        "used again; make it anew in each captured step, or let its key hold all that it depends on"
    )
    return Blame("history", names, because)
