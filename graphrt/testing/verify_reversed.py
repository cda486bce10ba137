"""Rows in reverse order must give the results in reverse order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphrt.testing.verify_blame import Blame
from graphrt.testing.verify_context import Verification
from graphrt.testing.verify_report import first_difference
from graphrt.testing.verify_runs import Case


def check_reversed(verification: Verification, permuted: Sequence[str]) -> None:
    """Compare the case whose rows are reversed with the one that it was made from.

    permuted   the inputs whose rows are reversed
    """
    cases = verification.cases
    backwards = next((case for case in cases.values() if case.name.endswith(" reversed")), None)
    first = cases.get(backwards.name.removesuffix(" reversed")) if backwards is not None else None
    if first is None or backwards is None:  # one of both raised, and `eager` has said so
        return
    wanted, found = (_row_results(verification, case, permuted) for case in (first, backwards))
    for name, want in wanted.items():
        have = found.get(name)
        if have is None or have.shape != want.shape:
            continue
        verification.reversed = True
        tolerance, dims = verification.tolerance(want.dtype), verification.runs.dims.get(name)
        if wrong := first_difference(name, have.flip(0), want, tolerance=tolerance, dims=dims):
            text = "rows in reverse order do not give the results in reverse order"
            blame = Blame("", (), "a row's result depends on where it stands")
            verification.find("permute", first, "", text, blame, wrong)


def _row_results(verification: Verification, case: Case, permuted: Sequence[str]) -> dict[str, torch.Tensor]:
    """The results that have a row for each row of the inputs: the oracle's, or else the step's without pad rows."""
    rows = len(case.named[permuted[0]])
    exact = verification.exact.get(case.name)
    if exact is not None and exact.outputs:
        return {name: tensor for name, tensor in exact.outputs.items() if tensor.shape[:1] == (rows,)}
    found = {}
    for name, tensor in verification.reference[case.name][1].outputs.items():
        cut = tensor[case.real[name]] if name in case.real else tensor[:rows] if tensor.dim() else tensor
        if cut.shape[:1] == (rows,):
            found[name] = cut
    return found
