"""Check the arguments of `verify` and the parts of a `Subject` before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch

from graphrt.kernels.checks import check_callable, check_instance, check_no_overlap, check_sequence, shown
from graphrt.kernels.errors import ConfigError, ShapeError
from graphrt.testing.canary import Canaries
from graphrt.testing.poison import has_poison


def check_cases(name: str, value: object) -> list[int]:
    """Return case numbers.

    Raises:
        ConfigError: if `value` is not a non-empty sequence of ints.
    """
    numbers = check_sequence(name, value, of="case numbers", error=ConfigError)
    if not numbers:
        raise ConfigError(f"{name}: the list is empty; specify at least one case")
    for index, number in enumerate(numbers):
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise ConfigError(
                f"{name}[{index}]: expected an int, got {shown(number)}; pass the number that make_inputs takes"
            )
    return [int(number) for number in numbers]


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
            f"{name}: torch cannot compare values of {tensor.dtype}; convert the tensor, or view it as another dtype"
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


def check_subject(subject: Any) -> None:
    """Check the attributes and methods of a `Subject`.

    Raises:
        ConfigError: if an attribute or method has the wrong type.
    """
    check_tensors("buffers", subject.buffers)
    for name in ("refresh", "run"):
        check_callable(name, getattr(subject, name), advice="make it a method")
    for name in ("eager", "real", "unowned", "capture"):
        if (part := getattr(subject, name, None)) is not None:
            check_callable(name, part, advice="make it a method, or leave it out")
    check_tensors("state", getattr(subject, "state", None) or {})
    if (canaries := getattr(subject, "canaries", None)) is not None:
        check_instance("canaries", canaries, Canaries, advice="allocate the buffers from a Canaries")
    check_sequence("derived", getattr(subject, "derived", ()), of="names of buffers", error=ConfigError)
    host = getattr(subject, "host", None)
    if host is not None and not (isinstance(host, tuple) and len(host) == 2 and isinstance(host[1], str)):
        raise ConfigError(f"host: expected an (object, name) tuple, got {shown(host)}; pass both")
