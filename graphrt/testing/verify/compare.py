"""Compare tensors, find all elements that differ and the first of them, and describe the part that a mask covers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphrt.kernels.checks import span_bytes
from graphrt.testing.numerics import bits_of, first_index

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element in which two results differ.

    Attributes:
        output: name of the tensor, which is an output or "state NAME".
        at: coordinate of the element.
        got, expected: values in the run under test and in the reference run.
        count, total: number of differing elements and of compared elements.
    """

    output: str
    at: tuple[int, ...]
    got: Any
    expected: Any
    count: int
    total: int

    def __str__(self) -> str:
        element = f"{self.output}[{', '.join(map(str, self.at))}]" if self.at else self.output
        got, expected = (f"{v:.6g}" if isinstance(v, float) else str(v) for v in (self.got, self.expected))
        return f"{element}: got {got}, expected {expected} ({self.count} of {self.total} differ)"


def differing(have: torch.Tensor, want: torch.Tensor, tolerance: float = 0.0) -> torch.Tensor:
    """Return a bool mask of the elements that differ. NaN equals NaN.

    Args:
        have, want: tensors of equal shape and dtype.
        tolerance: 0 compares bits. Otherwise floats and complex numbers are equal if
            |have - want| <= tolerance * (1 + |want|).
    """
    if have.is_complex():
        a, b = (torch.view_as_real(t.resolve_conj()) for t in (have, want))
        wrong = differing(a, b, tolerance).any(-1)
        if tolerance:  # rounding errors are relative to the modulus, not to the smaller part
            wrong &= ~_near(have.to(torch.complex128), want.to(torch.complex128), tolerance)
        return wrong
    if not have.is_floating_point():
        return have != want
    if tolerance:
        a, b = have.double(), want.double()
        return ~(_near(a, b, tolerance) | (a == b) | (a.isnan() & b.isnan()))
    return (bits_of(have) != bits_of(want)) & ~(_is_nan(have) & _is_nan(want))


def _near(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> torch.Tensor:
    return a.isfinite() & b.isfinite() & ((a - b).abs() <= tolerance * (1 + b.abs()))


def _is_nan(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.float() if tensor.element_size() == 1 else tensor).isnan()  # torch has no isnan for fp8


def same_bits(have: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Return whether two lists of tensors are bitwise equal, using one comparison per device."""
    if any((a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) for a, b in zip(have, want, strict=True)):
        return False
    devices = {tensor.device for tensor in have}
    return all(torch.equal(_bits(have, device), _bits(want, device)) for device in devices)


def _bits(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Concatenate the bytes of the tensors on a device."""
    resolved = (tensor.resolve_conj().resolve_neg() for tensor in tensors if tensor.device == device)
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in resolved])


def unlike(have: torch.Tensor, want: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype differ in shape or in any element."""
    return have.shape != want.shape or bool(differing(have, want).any())


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values can be copied and compared.

    False for sparse, nested, quantized, lazy, freed, packed and meta tensors, and for wrapper subclasses.
    """
    try:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            return False
        if type(tensor) not in _PLAIN:
            tensor.detach()  # some subclasses raise
        if not _is_copied(tensor.dtype):
            return False
        held = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
        return not tensor.numel() or (tensor.data_ptr() != 0 and held >= span_bytes(tensor))
    except Exception:
        return False


@functools.cache
def _is_copied(dtype: torch.dtype) -> bool:
    """Return whether torch can copy values of a dtype, which is not the case for dtypes of fewer than eight bits."""
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
) -> Difference | None:
    """Return the first element in which two tensors of equal shape and dtype differ, or None.

    `counted` is a bool mask of the elements to compare; None compares all.
    """
    wrong = differing(have, want, tolerance)
    if counted is not None:
        wrong &= counted
    count = int(wrong.sum())
    if not count:
        return None
    at = first_index(wrong)
    total = wrong.numel() if counted is None else int(counted.sum())
    return Difference(name, at, have[at].item(), want[at].item(), count, total)


def region(name: str, mask: torch.Tensor) -> str:
    """Return the range that a mask covers, such as "positions[5:8]"; for the whole tensor, only the name."""
    if mask.dim() == 0 or bool(mask.all()) or not bool(mask.any()):
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
