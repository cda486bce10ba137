"""What `verify` found: the first differing element, what it is blamed on, what was checked and what could not be."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphrt.kernels.checks import span_bytes

_PACKAGES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMES: dict[int, tuple[str, ...]] = {1: ("row",), 2: ("row", "index"), 3: ("row", "head", "index")}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two results differ first.

    output         name of the tensor: an output, or "state NAME"
    at             coordinate of the first element that differs
    got, expected  its value in the run that is judged, and in the one that it is judged by
    count, total   elements that differ, and elements that were compared
    dims           names of the dimensions
    """

    output: str
    at: tuple[int, ...]
    got: Any
    expected: Any
    count: int
    total: int
    dims: tuple[str, ...]

    def __str__(self) -> str:
        where = ", ".join(f"{name} {i}" for name, i in zip(self.dims, self.at, strict=True))
        place = f"{self.output}[{where}]" if where else self.output
        return (
            f"{place}: got {_shown(self.got)}, expected {_shown(self.expected)} ({self.count} of {self.total} differ)"
        )


@dataclass(frozen=True, slots=True)
class VerifyFinding:
    """One thing that is wrong.

    check       which check found it: a name of `VerifyReport.checked`
    case        name of the case, "" where it is of no single one
    captured    name of the case that the graph was captured with, "" where no graph is involved
    text        what happened, in one sentence
    difference  the first differing element, None where none was compared
    blamed      names of the buffers, scalars, host values or other memory that explain it, the cause first
    because     what was stale in them, and what to do
    repeats     further replays with a finding of the same check that is blamed on the same
    """

    check: str
    case: str
    captured: str
    text: str
    difference: Difference | None = None
    blamed: tuple[str, ...] = ()
    because: str = ""
    repeats: int = 0

    def __str__(self) -> str:
        of = f", captured at {self.captured}" if self.captured else ""
        lines = [f"{self.check}{f', case {self.case}' if self.case else ''}{of}: {self.text}"]
        if self.difference is not None:
            lines.append(f"  {self.difference}")
        if self.blamed:
            lines.append(f"  blamed: {', '.join(self.blamed)}")
        if self.because:
            lines.append(f"  {self.because}")
        if self.repeats:
            lines.append(f"  the same in {self.repeats} more replays")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` did and found. Its text is the whole of it.

    name         of the step
    findings     what is wrong, in the order of discovery
    checked      name of each check that ran -> what it did
    not_checked  name of each check that did not run -> why
    eager_runs, replays, seconds   what it cost, capture included; check_seconds leaves the captures out
    """

    name: str
    findings: tuple[VerifyFinding, ...]
    checked: Mapping[str, str]
    not_checked: Mapping[str, str]
    eager_runs: int
    replays: int
    seconds: float
    check_seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def blamed(self) -> tuple[str, ...]:
        """Everything that a finding is blamed on, each name once."""
        return tuple(dict.fromkeys(name for finding in self.findings for name in finding.blamed))

    def raise_if_any(self) -> None:
        """Raises: AssertionError with the whole report, where something was found."""
        if self.findings:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        count = f"{len(self.findings)} finding{'s' if len(self.findings) != 1 else ''}" if self.findings else "ok"
        lines = [f"verify {self.name}: {count}; {self.replays} replays, {self.eager_runs} eager runs, "
                 f"{self.seconds:.2f} s"]  # fmt: skip
        for number, finding in enumerate(self.findings, 1):
            first, *rest = str(finding).splitlines()
            lines += [f"  {number}. {first}", *(f"     {line}" for line in rest)]
        lines.append("checked:")
        lines += [f"  {name}: {what}" for name, what in self.checked.items()]
        if self.not_checked:
            lines.append("not checked:")
            lines += [f"  {name}: {why}" for name, why in self.not_checked.items()]
        return "\n".join(lines)


def differing(have: torch.Tensor, want: torch.Tensor, tolerance: float = 0.0) -> torch.Tensor:
    """Which elements differ, a bool tensor of their shape, which must be equal; two NaN are equal.

    tolerance   0: bit by bit. Else |have - want| <= tolerance * (1 + |want|) for floats
    """
    if have.is_complex():
        return differing(torch.view_as_real(have), torch.view_as_real(want), tolerance).any(-1)
    if not have.is_floating_point():
        return have != want
    if tolerance:
        a, b = have.double(), want.double()
        near = a.isfinite() & b.isfinite() & ((a - b).abs() <= tolerance * (1 + b.abs()))
        return ~(near | (a == b) | (a.isnan() & b.isnan()))
    return other_bits(have, want) & ~(is_nan(have) & is_nan(want))


def other_bits(have: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Which elements of real numbers have other bits, a bool tensor of their shape."""
    if not have.is_floating_point():
        return have != want
    bits = _BITS[have.element_size()]
    return have.contiguous().view(bits) != want.contiguous().view(bits)


def is_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements of floats are NaN."""
    return (tensor.float() if tensor.element_size() == 1 else tensor).isnan()  # torch has no isnan for fp8


def same_bits(have: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Whether two lists of tensors hold the same, bit by bit. One comparison for all: many small ones cost little."""
    if any((a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) for a, b in zip(have, want, strict=True)):
        return False
    devices = {tensor.device for tensor in have}
    return all(torch.equal(_bits(have, device), _bits(want, device)) for device in devices)


def _bits(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """All bytes of the tensors on a device, one behind the other."""
    there = (tensor.resolve_conj().resolve_neg() for tensor in tensors if tensor.device == device)
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in there])


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values lie in memory that can be copied and compared. Not so where it is sparse, nested,
    quantized, lazy, freed, packed or of the meta device, or a wrapper around others."""
    try:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            return False
        if type(tensor) not in _PLAIN:
            tensor.detach()  # a class of somebody else may refuse it
        if not _is_copied(tensor.dtype):
            return False
        held = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
        return not tensor.numel() or (tensor.data_ptr() != 0 and held >= span_bytes(tensor))
    except Exception:
        return False


@functools.cache
def _is_copied(dtype: torch.dtype) -> bool:
    """Whether torch copies values of a dtype: not those of fewer than eight bits."""
    if dtype.itemsize > 1:
        return True
    try:
        torch.zeros(2, dtype=torch.uint8, device="cpu").view(dtype).clone()
        return True
    except (RuntimeError, NotImplementedError):
        return False


def first_difference(
    name: str,
    have: torch.Tensor,
    want: torch.Tensor,
    *,
    counted: torch.Tensor | None = None,
    tolerance: float = 0.0,
    dims: Sequence[str] | None = None,
) -> Difference | None:
    """The first element in which both differ, None where none does.

    counted   bool, of their shape: which elements count; None: all
    """
    wrong = differing(have, want, tolerance)
    if counted is not None:
        wrong &= counted
    count = int(wrong.sum())
    if not count:
        return None
    flat = int(wrong.flatten().to(torch.uint8).argmax())
    at = []
    for extent in reversed(wrong.shape):
        at.append(flat % extent)
        flat //= extent
    place = tuple(reversed(at))
    total = wrong.numel() if counted is None else int(counted.sum())
    names = tuple(dims) if dims is not None and len(dims) == len(place) else _dims(len(place))
    return Difference(name, place, have[place].item(), want[place].item(), count, total, names)


def region(name: str, mask: torch.Tensor) -> str:
    """The part of a tensor that a mask covers, as an index: "positions[5:8]", or its name alone where that is all."""
    if mask.dim() == 0 or bool(mask.all()):
        return name
    parts = []
    for dim in range(mask.dim()):
        others = [d for d in range(mask.dim()) if d != dim]
        hit = (mask.any(dim=others) if others else mask).nonzero().flatten().tolist()
        low, high = hit[0], hit[-1] + 1
        whole = high - low == mask.shape[dim]
        parts.append(":" if whole else str(low) if high == low + 1 else f"{low}:{high}")
    while parts and parts[-1] == ":":
        parts.pop()
    return f"{name}[{', '.join(parts)}]" if parts else name


def _dims(count: int) -> tuple[str, ...]:
    return _NAMES.get(count) or ("row", *(f"dim {i}" for i in range(1, count - 1)), "index")[:count]


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def raised(error: BaseException) -> str:
    """What was raised, and where."""
    return f"{type(error).__name__}: {error}{own_line(error)}"


def own_line(error: BaseException) -> str:
    """Where the caller's code stood when something was raised: "; at step.py:12, `n = int(lengths.max())`"."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_PACKAGES)]
    if not frames and error.__cause__ is not None:
        return own_line(error.__cause__)
    if not frames:
        return ""
    last = frames[-1]
    return f"; at {Path(last.filename).name}:{last.lineno}" + (f", `{last.line}`" if last.line else "")
