"""Check the tensors of `verify` before anything runs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphrt.kernels.checks import check_instance, check_no_overlap
from graphrt.kernels.errors import ConfigError, ShapeError
from graphrt.testing.poison import has_poison


def check_tensor(name: str, value: object) -> torch.Tensor:
    """Return a tensor that can be copied, poisoned and compared.

    Raises:
        ConfigError: if it is not a tensor, is sparse, nested, quantized or on the meta device, or has a dtype that
            torch cannot compare.
    """
    tensor = check_instance(name, value, torch.Tensor, advice="pass a tensor")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise ConfigError(f"{name}: sparse, nested and quantized tensors are not supported; pass a dense tensor")
    if tensor.is_meta:
        raise ConfigError(f"{name}: the tensor is on the meta device and has no memory; move it to a device")
    if not (has_poison(tensor.dtype) or tensor.dtype == torch.bool or tensor.is_complex()):
        raise ConfigError(
            f"{name}: torch cannot compare values of {tensor.dtype}; convert the tensor, or view it as a different "
            f"dtype"
        )
    return tensor


def check_tensors(what: str, value: object) -> dict[str, torch.Tensor]:
    """Return tensors by name that `verify` may write to.

    Raises:
        ConfigError: if `value` is not a dict of tensors, or the elements of a tensor share memory.
    """
    named = check_instance(what, value, Mapping, advice="pass a dict of tensors by name")
    for name, tensor in named.items():
        check_instance(f"{what}'s name", name, str, advice="name each tensor with a string")
        try:
            check_no_overlap(f"{what}[{name!r}]", check_tensor(f"{what}[{name!r}]", tensor))
        except ShapeError as error:
            raise ConfigError(str(error)) from error
    return dict(named)
