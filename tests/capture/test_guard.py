"""The pointer guard: what it sees at the first check, in turns, and at every check; and what it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from graphrt.capture.guard import PointerGuard
from graphrt.kernels.errors import ReplayError


def weight() -> torch.Tensor:
    return torch.arange(12, dtype=torch.float32).view(3, 4)


# Each changes a tensor of `weight()` in place, and the words that name what it was and is.
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
        r"\[4, 1\]; give it back its shape, strides and dtype, or close this runtime and capture again",
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
def test_the_first_check_sees_every_change(case: str) -> None:
    change, text = CHANGES[case]
    w = weight()
    guard = PointerGuard([("a", torch.ones(1)), ("w", w)])
    guard.check_next()
    fresh = PointerGuard([("a", torch.ones(1)), ("w", w)])
    change(w)
    for _ in range(2):
        with pytest.raises(ReplayError, match=f"^{text}"):
            fresh.check_next()
    with pytest.raises(ReplayError, match=f"^{text}"):
        guard.check()


@pytest.mark.parametrize("case", CHANGES)
def test_turns_see_addresses_and_a_guard_of_every_call_sees_all(case: str) -> None:
    change, text = CHANGES[case]
    w = weight()
    turns, always = PointerGuard([("w", w)]), PointerGuard([("w", w)], always=True)
    turns.check_next()
    always.check_next()
    change(w)
    with pytest.raises(ReplayError, match=f"^{text}"):
        always.check_next()
    if "address" in text:
        with pytest.raises(ReplayError, match=f"^{text}"):
            turns.check_next()
    else:
        turns.check_next()


def test_without_turns_the_first_check_is_the_last() -> None:
    w = weight()
    guard, late = PointerGuard([("w", w)], in_turns=False), PointerGuard([("w", w)], in_turns=False)
    guard.check_next()
    w.data = w.data.clone()
    guard.check_next()
    with pytest.raises(ReplayError, match=r"^w: expected at address"):
        late.check_next()


def test_remembered_names_are_looked_up_again() -> None:
    held = {"kept": weight(), "replaced": weight(), "gone": weight()}
    guard = PointerGuard(())
    guard.remember(held.items)
    held["later"] = weight()  # nothing that a graph holds
    guard.check()
    kept = held["replaced"]
    held["replaced"] = kept.clone()
    with pytest.raises(ReplayError, match=r"^replaced: expected at address .* load new values in place"):
        guard.check_next()
    held["replaced"] = kept.view(3, 4)  # another object, the same memory in the same layout
    guard.check_next()
    del held["gone"]
    guard.check_next()  # no longer the first check: names are looked up at that one alone
    with pytest.raises(ReplayError, match=r"^gone: expected at address 0x.* got no tensor of this name; put it back"):
        guard.check()


def test_new_values_in_place_are_no_change() -> None:
    w = torch.nn.Parameter(weight())
    guard = PointerGuard([("w", w)], always=True)
    with torch.no_grad():
        w.copy_(w * 2)
        w.mul_(3)
    w.grad = torch.ones_like(w)
    guard.check_next()
    guard.check_next()
