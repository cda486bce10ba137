"""Quantized weights of products: fp8 with a scale per row, and int4 with a scale and a zero per group of inputs.

Products read the quantized weights, and multiply in the dtype of the activations, which are not quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from graphrt.kernels.checks import check_contiguous, check_tensor
from graphrt.kernels.errors import ConfigError, ShapeError, UnsupportedError

GROUPS = (32, 64, 128)
"""Supported group sizes: inputs per scale."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The input in each nibble of a 32-bit word, from the lowest. Nibbles i and i + 4, 16 bits apart, hold adjacent inputs.
"""


_Quantized = TypeVar("_Quantized", bound="QuantizedWeight")


class QuantizedWeight(nn.Module):
    """A quantized weight [rows, depth]. Its tensors are parameters of this module, so `state_dict()` lists them.

    Products accept it in place of a tensor. `shape` is the shape of the weight, `dtype` the dtype of its products.
    """

    data: nn.Parameter
    scale: nn.Parameter
    bits: int

    def _keep(self, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            check_contiguous(name, tensor)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def _with(self: _Quantized, tensors: Sequence[torch.Tensor]) -> _Quantized:
        """Return a weight of this kind with these tensors, in the order of the parameters."""
        raise NotImplementedError

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return `data`, `scale`, and `zero` or None."""
        return self.data, self.scale, None

    @property
    def shape(self) -> torch.Size:
        """[rows, depth]"""
        return torch.Size((self.data.shape[0], self.data.shape[1] * 8 // self.bits))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.data.device

    def dequantized(self) -> torch.Tensor:
        """Return the dequantized weight, as products use it: [rows, depth] float32."""
        return dequantized(*self.tensors())

    def split(self: _Quantized, rows: Sequence[int]) -> list[_Quantized]:
        """Split the weight into weights with these numbers of rows, which share its memory."""
        parts = zip(*(tensor.split(list(rows)) for tensor in self.parameters()), strict=True)
        return [self._with(tensors) for tensors in parts]

    def fill_with_noise(self, std: float, generator: torch.Generator) -> None:
        """Overwrite the weight in place with seeded noise of this standard deviation."""
        raise NotImplementedError

    def zero_(self) -> None:
        """Overwrite the weight in place with zeros."""
        for tensor in self.parameters():
            tensor.zero_()

    def copy_(self: _Quantized, source: _Quantized) -> None:
        """Copy a weight of the same kind and group into the first rows and columns, converting its dtype and device."""
        for own, other in zip(self.parameters(), source.parameters(), strict=True):
            own[tuple(slice(size) for size in other.shape)].copy_(other)


class Fp8Weight(QuantizedWeight):
    """Weights of 8 bits: w = data * scale.

    data     [rows, depth]  float8_e4m3fn  device; contiguous
    scale    [rows]         float32        device; contiguous. One scale for a whole matrix is repeated for its rows
    dtype    float16, bfloat16 or float32: dtype of the activations. `to(dtype)` changes it, and keeps the tensors

    Raises: ShapeError: if a tensor has the wrong shape, dtype or device.
    """

    bits = 8

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        check_tensor("data", data, shape=(None, None), dtype=torch.float8_e4m3fn)
        check_tensor("scale", scale, shape=(data.shape[0],), dtype=torch.float32, device=data.device)
        self._set_dtype(dtype)
        self._keep(data=data, scale=scale)

    def _set_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in _FLOATS:
            raise ShapeError(f"dtype: expected one of {_FLOATS}, got {dtype}; pass the dtype of the activations")
        self._dtype = dtype

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp8Weight:
        """Keep the dtypes of the tensors in `to()`, `half()` and so on. Only the dtype of the activations changes."""
        self._set_dtype(fn(torch.empty(0, dtype=self._dtype, device=self.device)).dtype)
        super()._apply(lambda tensor: fn(tensor.view(torch.uint8)).view(tensor.dtype), recurse)
        return self

    @classmethod
    def empty(cls, rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> Fp8Weight:
        """Return an uninitialized weight."""
        data = torch.empty(rows, depth, dtype=torch.float8_e4m3fn, device=device)
        return cls(data, torch.empty(rows, dtype=torch.float32, device=device), dtype)

    def _with(self, tensors: Sequence[torch.Tensor]) -> Fp8Weight:
        data, scale = tensors
        return Fp8Weight(data, scale, self._dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def fill_with_noise(self, std: float, generator: torch.Generator) -> None:
        self.data.copy_(torch.randn(self.shape, generator=generator, device=self.device))
        self.scale.fill_(std)


class Int4Weight(QuantizedWeight):
    """Weights of 4 bits: w = (q - zero) * scale, rounded once to the dtype of the activations.

    data     [rows, depth / 2]      uint8  device; contiguous. 8 adjacent k are a little-endian word of 32 bits
                                           with the nibbles k0, k2, k4, k6, k1, k3, k5, k7 from the lowest (`pack`)
    scale    [rows, depth / group]  float16, bfloat16 or float32  device; contiguous. Its dtype is the activations'
    zero     [rows, depth / group]  uint8  device; contiguous. 0 to 15

    A group has 32, 64 or 128 inputs.

    Raises: ShapeError: if a tensor has the wrong shape, dtype or device. UnsupportedError: if the group size
    is not supported.
    """

    zero: nn.Parameter
    bits = 4

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> None:
        super().__init__()
        check_tensor("data", data, shape=(None, None), dtype=torch.uint8)
        check_tensor("scale", scale, shape=(data.shape[0], None), dtype=_FLOATS, device=data.device)
        check_tensor("zero", zero, shape=tuple(scale.shape), dtype=torch.uint8, device=data.device)
        depth, groups = 2 * data.shape[1], scale.shape[1]
        if not groups or depth % groups:
            raise ShapeError(
                f"scale: expected groups of equal size, got {groups} for {depth} inputs; pass one per group"
            )
        check_group(depth // groups, depth)
        self._keep(data=data, scale=scale, zero=zero)

    @classmethod
    def empty(cls, rows: int, depth: int, group: int, dtype: torch.dtype, device: torch.device) -> Int4Weight:
        """Return an uninitialized weight."""
        check_group(group, depth)
        data = torch.empty(rows, depth // 2, dtype=torch.uint8, device=device)
        shape = rows, depth // group
        return cls(
            data, torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=torch.uint8, device=device)
        )

    @classmethod
    def pack(cls, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Int4Weight:
        """Return the weight for q [rows, depth] uint8. Waits for the device.

        Raises: ShapeError: if a tensor has the wrong shape or dtype. ConfigError: if q or `zero` is above 15.
        """
        check_tensor("values", values, shape=(None, None), dtype=torch.uint8)
        check_tensor("zero", zero, shape=(None, None), dtype=torch.uint8)
        if values.shape[1] % 8:
            raise ShapeError(
                f"values: expected a multiple of 8 inputs, got {values.shape[1]}; do not quantize this weight"
            )
        for name, of in (("values", values), ("zero", zero)):
            if of.numel() and (largest := int(of.max())) > 15:
                raise ConfigError(f"{name}: expected 0 to 15, got {largest}; 4 bits hold no other values")
        ordered = values.unflatten(1, (-1, 8))[..., NIBBLE_ORDER]
        data = ordered[..., 0::2] | ordered[..., 1::2] << 4
        return cls(data.flatten(1), scale.contiguous(), zero.contiguous())

    def _with(self, tensors: Sequence[torch.Tensor]) -> Int4Weight:
        return Int4Weight(*tensors)

    @property
    def group(self) -> int:
        """Inputs per scale."""
        return self.shape[1] // self.scale.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    def fill_with_noise(self, std: float, generator: torch.Generator) -> None:
        self.data.random_(0, 256, generator=generator)
        self.scale.fill_(std * 12**0.5 / 16)  # q is uniform
        self.zero.fill_(8)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.data, self.scale, self.zero


Weight = torch.Tensor | QuantizedWeight
"""A weight [rows, depth] of a product: a tensor, an Fp8Weight or an Int4Weight."""


def concatenate(parts: Sequence[_Quantized]) -> _Quantized:
    """Concatenate the rows of weights of one kind. Each row keeps its scales.

    Raises: ShapeError: if the parts differ in kind, depth, group, dtype or device.
    """
    first = parts[0]
    for part in parts[1:]:
        alike = type(part) is type(first) and part.shape[1] == first.shape[1]
        alike = alike and (part.dtype, part.device) == (first.dtype, first.device)
        if not alike or part.scale.shape[1:] != first.scale.shape[1:]:
            raise ShapeError(
                "parts: weights differ in kind, depth, group, dtype or device; compute a separate product with each"
            )
    return first._with([torch.cat(tensors) for tensors in zip(*(p.parameters() for p in parts), strict=True)])


def dequantized(data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Return the values [rows, depth] float32 of the tensors of an Int4Weight, or of an Fp8Weight if `zero` is None."""
    if zero is None:
        return data.float() * scale[:, None]
    values = torch.empty(len(data), data.shape[1] // 4, 8, dtype=torch.uint8, device=data.device)
    values[..., NIBBLE_ORDER] = nibbles(data.view(torch.int32))
    grouped = values.view(*zero.shape, -1).float() - zero[..., None].float()
    return (grouped * scale[..., None].float()).to(scale.dtype).float().flatten(1)


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """Return the nibbles of words [rows, n] int32, from the lowest: [rows, n, 8] uint8."""
    data = words.contiguous().view(torch.uint8)
    return torch.stack((data & 15, data >> 4), 2).view(*words.shape, 8)


def check_group(group: int, depth: int) -> None:
    """Raise UnsupportedError unless `group` is a supported group size that divides `depth`."""
    if group not in GROUPS or depth % group:
        raise UnsupportedError(
            f"group: expected one of {GROUPS} that divides {depth} inputs, got {group}; use another group size, or "
            "do not quantize this weight"
        )


def check_weight(
    name: str,
    weight: Weight,
    *,
    rows: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise ShapeError unless `weight` is a quantized weight or a matrix of floats. None means any value."""
    if not isinstance(weight, QuantizedWeight):
        check_tensor(name, weight, shape=(rows, None), dtype=dtype or _FLOATS, device=device)
        return
    for what, wanted, found in (
        ("rows", rows, weight.shape[0]), ("dtype", dtype, weight.dtype), ("device", device, weight.device)
    ):  # fmt: skip
        if wanted not in (None, found):
            raise ShapeError(f"{name}: expected {what} {wanted}, got {found}; pass the weight of this layer")
