"""The shared data of the checks in one `verify` call: target, cases, reference runs and findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from graphrt.testing.verify.blame import Blame, Blamer
from graphrt.testing.verify.compare import Difference
from graphrt.testing.verify.host import HostValues, same
from graphrt.testing.verify.locations import is_fixed
from graphrt.testing.verify.report import VerifyFinding
from graphrt.testing.verify.runs import Case, Contents, Outcome, Runs
from graphrt.testing.verify.subject import Inputs, Target

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
SURELY = 3
"""Number of repetitions of a wrong run. Values that change between runs may be equal by chance."""
_NO_REPEAT = "the step is not deterministic: two identical runs in a row gave different results"
_NO_REPEAT_BECAUSE = (
    "it uses a value that verify cannot restore: a clock, an iterator, a racing write, "
    "or a write through `.data` to a tensor larger than 1 MiB; let refresh() write that value to a tensor. Nothing "
    "else was compared"
)


class Verification:
    """One call of `verify`.

    host          Python values before anything ran
    reference     for each case: buffer contents after `refresh`, and the outcome of the padded eager run
    exact         for each case: the outcome of the oracle
    written       for each case and buffer: a mask of the elements that `refresh` writes
    trespassed    whether the step writes to unowned state, so that poison there would only repeat the finding
    unrepeatable  whether two identical runs in a row differ, so that nothing else can be compared
    """

    def __init__(self, target: Target, inputs: Mapping[str, Inputs], tolerance: float | None) -> None:
        self.target, self._tolerance = target, tolerance
        self.cases = {name: Case(name, values, target.real(values)) for name, values in inputs.items()}
        self.runs = Runs(target)
        self.host = HostValues.take(*target.root)
        self.findings: list[VerifyFinding] = []
        self.reference: dict[str, tuple[Contents, Outcome]] = {}
        self.exact: dict[str, Outcome] = {}
        self.written: dict[str, dict[str, torch.Tensor]] = {}
        self.blamer = Blamer(self.runs, self.reference, self.written)
        self.trespassed = self.unrepeatable = False

    @property
    def changing(self) -> list[str]:
        """Names of number inputs that differ between cases."""
        values: dict[str, list[object]] = {}
        for case in self.cases.values():
            for name, value in case.named.items():
                if is_fixed(value):
                    values.setdefault(name, []).append(value)
        return [name for name, seen in values.items() if not all(same(seen[0], value) for value in seen)]

    @property
    def has_results(self) -> bool:
        """Whether there are results to compare. True if no case ran."""
        outcomes = [outcome for _, outcome in self.reference.values()]
        return bool(self.target.state) or not outcomes or any(outcome.outputs for outcome in outcomes)

    def tolerance(self, dtype: torch.dtype) -> float:
        """Return the tolerance for comparing padded with exact results."""
        real = dtype.to_real() if dtype.is_complex else dtype
        return _TOLERANCES.get(real, 0.0) if self._tolerance is None else self._tolerance

    def check_canaries(self, case: Case, captured: str, what: str) -> None:
        """Report and repair the guards to which a run wrote."""
        for broken in self.target.canaries.broken() if self.target.canaries is not None else ():
            because = "the step writes beyond its buffer; check its grid, its mask and the number of columns"
            text = f"{what} wrote beyond a buffer: {broken}"
            self.find("canary", case, captured, text, Blame("", (broken.name,), because))
        if self.target.canaries is not None:
            self.target.canaries.repair()

    def find(
        self, check: str, case: Case, captured: str, text: str, blame: Blame | None, wrong: Difference | None = None
    ) -> None:
        """Add a finding."""
        blamed, because = (blame.blamed, blame.because) if blame is not None else ((), "no cause was found")
        self.add(VerifyFinding(check, case.name, captured, text, wrong, blamed, because))

    def add(self, finding: VerifyFinding) -> None:
        """Add a finding. If an earlier finding has the same check and cause, only count the new finding."""
        for index, old in enumerate(self.findings):
            if (old.check, old.blamed) == (finding.check, finding.blamed) and (old.blamed or old.text == finding.text):
                self.findings[index] = replace(old, repeats=old.repeats + 1)
                return
        self.findings.append(finding)

    def repeats(self, case: Case, times: int = 1) -> bool:
        """Return whether two identical runs in a row give the same result. Add a finding if not."""
        contents, expected = self.reference[case.name]
        for _ in range(times):
            start = HostValues.take(*self.target.root)
            once = self.runs.eager(case, contents)
            if self.runs.same(case, once, expected):
                continue
            again = self.runs.eager(case, contents)
            if self.runs.same(case, again, once):
                return True  # the result depends on earlier runs, which other checks report
            blame = self.blamer.carried(case, start, once)
            if blame is None and self.blamer.remembered(case, self.host):
                return True
            wrong = None if again.error or once.error else self.runs.difference(case, again, once)
            self.find("determinism", case, "", _NO_REPEAT, blame or Blame("", (), _NO_REPEAT_BECAUSE), wrong)
            self.unrepeatable = True
            return False
        return True

    def count_again(self) -> None:
        """Count a wrong replay whose cause is not searched."""
        if self.findings:
            self.findings[-1] = replace(self.findings[-1], repeats=self.findings[-1].repeats + 1)

    def restore(self) -> None:
        """Restore the contents of all tensors."""
        self.runs.put(self.runs.initial)
        self.runs.restore_state()
        for tensor, first in self.runs.filled.values():
            tensor.copy_(first)
