"""Checks of what `verify` is given, before it runs anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from graphrt.kernels.checks import check_callable, check_instance, check_no_overlap, check_sequence, shown
from graphrt.kernels.errors import ConfigError, ShapeError
from graphrt.testing.canary import Canaries
from graphrt.testing.poison import has_poison


def check_cases(name: str, value: object) -> list[int]:
    """Numbers of cases. Raises: ConfigError for anything else, and for none."""
    numbers = check_sequence(name, value, of="numbers of cases", error=ConfigError)
    if not numbers:
        raise ConfigError(f"{name}: expected at least one, got none; name some")
    for index, number in enumerate(numbers):
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise ConfigError(f"{name}[{index}]: expected an int, got {shown(number)}; make_inputs takes the number")
    return [int(number) for number in numbers]


def check_tensor_value(name: str, value: object) -> torch.Tensor:
    """A tensor that can be copied, filled with poison and compared. Raises: ConfigError for any other."""
    tensor = check_instance(name, value, torch.Tensor, advice="pass a tensor")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else "sparse or nested"
        raise ConfigError(f"{name}: expected a dense tensor, got a {kind} one; give its parts, or to_dense() of it")
    if tensor.is_meta:
        raise ConfigError(f"{name}: expected a tensor with memory, got one of the meta device; move it to a device")
    if not (has_poison(tensor.dtype) or tensor.dtype == torch.bool or tensor.is_complex()):
        raise ConfigError(f"{name}: expected numbers that torch compares, got {tensor.dtype}; convert it, or view it")
    return tensor


def check_tensors(what: str, value: object) -> dict[str, torch.Tensor]:
    """Tensors by name that are written. Raises: ConfigError for others, and for elements that share memory."""
    named = check_instance(what, value, Mapping, advice="pass a dict of tensors by name")
    for name, tensor in named.items():
        check_instance(f"{what}'s name", name, str, advice="name each tensor with a text")
        try:
            check_no_overlap(f"{what}[{name!r}]", check_tensor_value(f"{what}[{name!r}]", tensor))
        except ShapeError as error:
            raise ConfigError(str(error)) from error
    return dict(named)


def check_dims(value: object) -> dict[str, Sequence[str]]:
    """Names of dimensions by output. Raises: ConfigError for anything else."""
    named = check_instance("dims", value, Mapping, advice="pass a dict of names of dimensions, by output")
    for output, names in named.items():
        check_sequence(f"dims[{output!r}]", names, of="names of dimensions", error=ConfigError)
        for index, name in enumerate(names):
            check_instance(f"dims[{output!r}][{index}]", name, str, advice="name each dimension with a text")
    return dict(named)


def check_pad(name: str, value: object, dtype: torch.dtype) -> None:
    """Raises: ConfigError unless a dtype has this value."""
    number: Any = check_instance(f"pad[{name!r}]", value, (int, float), advice="pass a number")
    message = f"pad[{name!r}]: expected a value of {dtype}, got {shown(value)}; pass one it has"
    try:
        held = torch.empty(2, dtype=dtype, device="cpu").fill_(number)  # one alone is clamped where a dtype is small
    except (RuntimeError, OverflowError) as error:
        raise ConfigError(message) from error
    if not (dtype.is_floating_point or dtype.is_complex) and held[0].item() != number:  # 1.5 of an integer, 2 of a bool
        raise ConfigError(message)


def check_permute(names: object, inputs: object) -> tuple[str, ...]:
    """Names of inputs with rows. Raises: ConfigError for others."""
    chosen = tuple(check_sequence("permute", names, of="names of inputs", error=ConfigError))
    known = inputs if isinstance(inputs, Mapping) else {}
    if unknown := [name for name in chosen if not isinstance(name, str) or name not in known]:
        raise ConfigError(f"permute: expected names of inputs, got {unknown}; name what make_inputs gives")
    for name in chosen:
        value = known[name]
        if not isinstance(value, torch.Tensor) or not value.dim():
            raise ConfigError(f"permute: expected tensors with rows, got {name} = {shown(value)}; leave it out")
    return chosen


def check_subject(subject: Any) -> None:
    """What a `Subject` has, and its optional parts. Raises: ConfigError for a part of another kind."""
    check_tensors("buffers", subject.buffers)
    for name in ("refresh", "run"):
        check_callable(name, getattr(subject, name), advice="make it a method")
    for name in ("eager", "real", "unowned", "capture"):
        if (part := getattr(subject, name, None)) is not None:
            check_callable(name, part, advice="make it a method, or leave it out")
    check_tensors("state", getattr(subject, "state", None) or {})
    if (canaries := getattr(subject, "canaries", None)) is not None:
        check_instance("canaries", canaries, Canaries, advice="allocate the buffers from a Canaries")
    derived = getattr(subject, "derived", ())
    if not isinstance(derived, Iterable) or isinstance(derived, str) or not all(isinstance(n, str) for n in derived):
        raise ConfigError(f"derived: expected names of buffers, got {shown(derived)}; pass a tuple of them")
    host = getattr(subject, "host", None)
    if host is not None and not (isinstance(host, tuple) and len(host) == 2 and isinstance(host[1], str)):
        raise ConfigError(f"host: expected a pair of an object and its name, got {shown(host)}; pass both")


def check_parts(what: str, value: object) -> dict[str, Any]:
    """What `real` or `unowned` returned. Raises: ConfigError unless it is a dict."""
    return dict(check_instance(what, value, Mapping, advice="return an index by name of a tensor, {} for none"))
