"""Find tensors outside `state` that carry a value from one run into the results of a later run.

Other checks restore such tensors before every run. This check does not restore them, as in a server.
"""

from __future__ import annotations

from collections.abc import Iterable

from graphrt.testing.verify.blame import Blame
from graphrt.testing.verify.compare import differing, region
from graphrt.testing.verify.runs import Case, Outcome
from graphrt.testing.verify.verification import Verification


def find_unreset(v: Verification) -> None:
    """Run cases of 8, 3 and 5 rows in the order 8, 8, 3, 5, 3, 8 without restoring unnamed tensors in between.

    Each case thus follows a larger and a smaller case, and one case follows itself. Each must repeat its first result.
    """
    runs, reference, cases = v.runs, v.reference, list(v.cases.values())
    names = list(runs.target.hidden)
    walk = [cases[0], *cases, *reversed(cases[:-1])]

    def spoiled(kept: Iterable[str]) -> tuple[Case, Outcome] | None:
        """Return the first run that differs."""
        runs.restore_state()
        runs.kept = frozenset(kept)
        try:
            for case in walk:
                clean, expected = reference[case.name]
                outcome = runs.eager(case, clean)
                if not runs.same(case, outcome, expected):
                    return case, outcome
            return None
        finally:
            runs.kept = frozenset()

    if not names or spoiled(names) is None:
        return
    chosen = next(([n] for n in names if spoiled([n])), names)
    found = spoiled(chosen)
    if found is None:  # the step is not deterministic, which is a separate finding
        return
    case, outcome = found
    left = {name: runs.target.hidden[name].clone() for name in chosen}
    clean, expected = reference[case.name]
    runs.eager(case, clean)  # start from the initial contents, so remaining differences are from other runs
    parts = ", ".join(region(name, differing(left[name], runs.target.hidden[name])) for name in chosen)
    because = (
        f"{parts} still contains values of earlier runs, and the step reads them; write or mask them in each "
        f"captured step, or name the tensor in state if they should persist"
    )
    wrong = None if outcome.error else runs.difference(case, outcome, expected)
    text = "the step gives a different result after other runs, because an unnamed tensor persists"
    v.find("determinism", case, "", text, Blame("", tuple(chosen), because), wrong)
