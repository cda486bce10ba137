"""The pointer guard: which changes a first, an incremental and a full check detect, and the error texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from graphrt.capture.guard import PointerGuard
from graphrt.kernels.errors import ReplayError


def weight() -> torch.Tensor:
    return torch.arange(12, dtype=torch.float32).view(3, 4)


# A change of a tensor of `weight()` in place, and the error for it.
CHANGES: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "moved": (
        lambda w: setattr(w, "data", w.data.clone()),
        r"w: expected at address 0x[0-9a-f]+ as captured, got 0x[0-9a-f]+; load new values in place",
    ),
    "set": (
        lambda w: w.set_(torch.zeros(2, 5)),
        r"w: expected at address 0x[0-9a-f]+, float32 \[3, 4\] with strides \[4, 1\] as captured, got "
        r"0x[0-9a-f]+, float32 \[2, 5\] with strides \[5, 1\]; load new values",
    ),
    "offset": (lambda w: setattr(w, "data", w.data[1:]), r"w: expected at address .*\[3, 4\].* got .*\[2, 4\]"),
    "shrunk": (
        lambda w: w.resize_(2, 4),
        r"w: expected float32 \[3, 4\] with strides \[4, 1\] as captured, got float32 \[2, 4\] with strides "
        r"\[4, 1\]; restore its shape, strides and dtype, or close this runtime and capture again",
    ),
    "transposed": (lambda w: w.t_(), r"w: expected float32 \[3, 4\] .* got float32 \[4, 3\] with strides \[1, 4\];"),
    "strides-alone": (
        lambda w: w.as_strided_((3, 4), (1, 3)),
        r"w: expected float32 \[3, 4\] with strides \[4, 1\] as captured, got float32 \[3, 4\] with strides \[1, 3\];",
    ),
    "dtype-alone": (
        lambda w: setattr(w, "data", w.data.view(torch.int32)),
        r"w: expected float32 \[3, 4\] .* got int32 \[3, 4\]",
    ),
    "freed": (lambda w: w.untyped_storage().resize_(0), r"w: expected at address 0x[0-9a-f]+ as captured, got 0x0;"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_all_checks_but_incremental_ones_detect_every_change(case: str) -> None:
    """An incremental check detects new addresses only, unless `always` is set. New values in place are allowed."""
    change, text = CHANGES[case]
    w = weight()
    named = [("a", torch.ones(1)), ("w", w)]
    guard, always, turns = PointerGuard(named), PointerGuard(named, always=True), PointerGuard([("w", w)])
    once, late = (PointerGuard(named, in_turns=False) for _ in range(2))
    once.check_next()
    for each in (guard, always, turns):
        each.check_next()
        w.mul_(2)
        each.check_next()
    fresh = PointerGuard(named)
    change(w)
    once.check_next()  # only its first call checks
    for check in (fresh.check_next, fresh.check_next, late.check_next, guard.check, always.check_next):
        with pytest.raises(ReplayError, match=f"^{text}"):
            check()
    if "address" in text:
        with pytest.raises(ReplayError, match=f"^{text}"):
            turns.check_next()
    else:
        turns.check_next()


def test_remembered_names_are_looked_up_again() -> None:
    held = {"kept": weight(), "replaced": weight(), "gone": weight()}
    guard = PointerGuard(())
    guard.remember(held.items)
    held["later"] = weight()  # not remembered
    guard.check()
    kept = held["replaced"]
    held["replaced"] = kept.clone()
    with pytest.raises(ReplayError, match=r"^replaced: expected at address .* load new values in place"):
        guard.check_next()
    held["replaced"] = kept.view(3, 4)  # another object with the same memory and layout
    guard.check_next()
    del held["gone"]
    guard.check_next()  # only a full check looks names up
    with pytest.raises(ReplayError, match=r"^gone: the tensor captured at address 0x.* is gone; restore it"):
        guard.check()
    module = torch.nn.Linear(2, 2)
    guard = PointerGuard(module.named_parameters())
    guard.check_names([*module.named_parameters(), ("new", torch.ones(1))])
    with pytest.raises(ReplayError, match=r"^bias: the tensor captured at address 0x.* is gone;"):
        guard.check_names([("weight", module.weight)])
    guard.remember(lambda: [("later", torch.ones(1))])
    guard.check_new([*module.named_parameters(), ("later", torch.ones(1))])
    with pytest.raises(ReplayError, match=r"^new: graphs do not read this tensor, which was added after the capture;"):
        guard.check_new([*module.named_parameters(), ("new", torch.ones(1))])
    guard.remember(lambda: ())
    module.weight = torch.nn.Parameter(torch.zeros(2, 2))
    guard.check()  # the old parameter has not moved
    with pytest.raises(ReplayError, match=r"^weight: expected at address"):
        guard.check_names(module.named_parameters())


def test_incremental_checks_cover_all_tensors_in_num_turns_calls() -> None:
    weights = {f"w{index}": torch.ones(1) for index in range(70)}
    early, guard = PointerGuard(weights.items()), PointerGuard(weights.items())
    guard.check_next()
    kept, weights["w69"].data = weights["w69"].data, torch.zeros(1)
    with pytest.raises(ReplayError, match="w69: expected at address 0x"):
        early.check_next()
    assert guard.num_turns == 70
    for _ in range(69):
        guard.check_next()
    for _ in range(2):  # the error is raised again until it is fixed
        with pytest.raises(ReplayError, match="w69: expected at address 0x"):
            guard.check_next()
    weights["w69"].data = kept
    for _ in range(2 * guard.num_turns):
        guard.check_next()
    PointerGuard([]).check()
    PointerGuard([]).check_next()
