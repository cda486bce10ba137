"""What the parts of a verification share: the target, its cases, what is known of them, and the findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from graphrt.kernels.errors import ConfigError
from graphrt.testing.verify_blame import Blame, Blamer
from graphrt.testing.verify_host import HostValues
from graphrt.testing.verify_kept import KeptTensors
from graphrt.testing.verify_report import Difference, VerifyFinding
from graphrt.testing.verify_runs import Case, Contents, Outcome, Runs, check_part
from graphrt.testing.verify_subject import Inputs, Target
from graphrt.testing.verify_values import is_fixed, same

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}

SURELY = 3
"""How often a run that is wrong is repeated: what changes from run to run may come out alike by chance."""
_NO_REPEAT = "the step does not repeat: the same run, twice in a row, gives two results"
_NO_REPEAT_BECAUSE = (
    "it takes something that is no tensor and no value of Python within reach, such as a clock, an iterator, a write "
    "that races, or a write to a tensor of over 1 MiB that torch does not count, as through `.data`; let refresh() put "
    "that into a tensor. Nothing else was compared"
)


class Verification:
    """One call of `verify`.

    host        the host's values before anything ran
    reference   of each case: what the buffers held after `refresh`, and what the padded step gave eagerly
    exact       of each case: what the oracle gave
    written     of each case and buffer: which elements `refresh` writes
    trespassed  whether the step writes to unowned state: its poison would only repeat that
    from_others how many cases ran from the state that another one left, by step and oracle
    reversed    whether rows in reverse order were compared
    ignored     numbers of the inputs that no result depends on
    unrepeatable  whether the step gives two results twice in a row: nothing else is compared then
    """

    def __init__(
        self, target: Target, inputs: Mapping[str, Inputs], dims: Mapping[str, Sequence[str]], tolerance: float | None
    ) -> None:
        self.target, self._tolerance = target, tolerance
        self.cases = {name: Case(name, values, target.real(values)) for name, values in inputs.items()}
        for values in inputs.values():
            for name, index in target.unowned(values).items():
                check_part("unowned", name, target.state[name], index)
        self.runs = Runs(target, dims)
        self.host = HostValues.take(*target.root)
        self.findings: list[VerifyFinding] = []
        self.reference: dict[str, tuple[Contents, Outcome]] = {}
        self.exact: dict[str, Outcome] = {}
        self.written: dict[str, dict[str, torch.Tensor]] = {}
        self.blamer = Blamer(self.runs, self.reference, self.written)
        self.kept = KeptTensors(self.runs, self.reference)
        self.trespassed = self.unrepeatable = self.reversed = False
        self.from_others = 0
        self.ignored: list[str] = []

    @property
    def changing(self) -> list[str]:
        """Numbers of the inputs that are others in other cases."""
        values: dict[str, list[object]] = {}
        for case in self.cases.values():
            for name, value in case.named.items():
                if is_fixed(value):
                    values.setdefault(name, []).append(value)
        return [name for name, seen in values.items() if not all(same(seen[0], value) for value in seen)]

    @property
    def has_results(self) -> bool:
        """Whether there is anything to compare; True where no case ran."""
        outcomes = [outcome for _, outcome in self.reference.values()]
        return bool(self.target.state) or not outcomes or any(outcome.outputs for outcome in outcomes)

    def check_dims(self) -> None:
        """Raises: ConfigError where `dims` names something that no case gives, or not each of its dimensions."""
        known = {name: t for _, outcome in self.reference.values() for name, t in outcome.outputs.items()}
        known |= {f"state {name}": tensor for name, tensor in self.target.state.items()}
        if self.reference and (unknown := sorted(set(self.runs.dims) - set(known))):
            raise ConfigError(
                f"dims: expected names of outputs, {sorted(known)}, got {unknown}; name what run() returns"
            )
        for name in self.runs.dims if self.reference else ():
            if len(names := self.runs.dims[name]) != known[name].dim():
                raise ConfigError(
                    f"dims[{name!r}]: expected {known[name].dim()} names, one per dimension, got {list(names)}; add or "
                    "remove some"
                )

    def tolerance(self, dtype: torch.dtype) -> float:
        """Of padded results against exact ones."""
        return _TOLERANCES.get(dtype, 0.0) if self._tolerance is None else self._tolerance

    def check_canaries(self, case: Case, captured: str, what: str) -> None:
        if self.target.canaries is None:
            return
        for broken in self.target.canaries.broken():
            because = "the step writes beyond its buffer: check its grid, its mask and the number of columns"
            blame = Blame("", (broken.name,), because)
            self.find("canary", case, captured, f"{what} wrote beyond a buffer: {broken}", blame)
            self.target.canaries.repair()

    def find(
        self, check: str, case: Case, captured: str, text: str, blame: Blame | None, wrong: Difference | None = None
    ) -> None:
        blamed, because = (blame.blamed, blame.because) if blame is not None else ((), "nothing explains it")
        self.add(VerifyFinding(check, case.name, captured, text, wrong, blamed, because))

    def add(self, finding: VerifyFinding) -> None:
        """A finding of the same check that is blamed on the same is counted, not shown again."""
        for index, old in enumerate(self.findings):
            if (old.check, old.blamed) == (finding.check, finding.blamed) and (old.blamed or old.text == finding.text):
                self.findings[index] = replace(old, repeats=old.repeats + 1)
                return
        self.findings.append(finding)

    def repeats(self, case: Case, times: int = 1) -> bool:
        """Whether the step gives the same twice in a row. Where it does not, no other comparison means anything.

        times   how often that is asked
        """
        contents, expected = self.reference[case.name]
        for _ in range(times):
            once = self.runs.eager(case, contents)
            if self.runs.same(case, once, expected):
                continue
            again = self.runs.eager(case, contents)
            if self.runs.same(case, again, once) or self.blamer.remembered(case, self.host):
                return True  # it depends on what ran before, and the checks of that say on what
            wrong = None if again.error or once.error else self.runs.difference(case, again, once)
            self.find("determinism", case, "", _NO_REPEAT, Blame("", (), _NO_REPEAT_BECAUSE), wrong)
            self.unrepeatable = True
            return False
        return True

    def count_again(self) -> None:
        """One more wrong replay, which is not explained by itself."""
        if self.findings:
            self.findings[-1] = replace(self.findings[-1], repeats=self.findings[-1].repeats + 1)

    def restore(self) -> None:
        """Buffers and state as they were."""
        self.runs.put(self.runs.initial)
        self.runs.restore_state()
