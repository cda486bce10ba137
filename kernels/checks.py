"""Argument checks of public functions. A check is one call. Its error names the expected and the actual value."""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from graphrt.kernels.errors import ConfigError, GraphRTError, ShapeError

_T = TypeVar("_T")
_MOST_PASSED = 4096  # cached geometries per check, more than a runtime has sizes and layers
_LONGEST_SHOWN = 80  # characters of a value in an error

FLOAT32_TINY, FLOAT32_MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""The smallest and largest positive normal float32."""


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | None] | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise ShapeError unless `tensor` is dense and has the given shape (None matches any extent), dtype and device."""
    # A step makes hundreds of these checks, so on success each attribute is read once and nothing is built.
    if (
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and (shape is None or tensor.shape == shape or _matches(tensor.shape, shape))
        and (dtype is None or tensor.dtype is dtype or (type(dtype) is tuple and tensor.dtype in dtype))
        and (device is None or tensor.device == device)
    ):
        return
    if not isinstance(tensor, torch.Tensor):
        raise ShapeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}; pass a tensor")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ShapeError(f"{name}: sparse and nested tensors are not supported; pass tensor.to_dense()")
    if shape is not None and not _matches(tensor.shape, shape):
        want = "[" + ", ".join("*" if s is None else str(s) for s in shape) + "]"
        raise ShapeError(f"{name}: expected shape {want}, got {list(tensor.shape)}; reshape or slice it")
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    if dtype is not None and tensor.dtype not in allowed:
        names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        got = str(tensor.dtype).removeprefix("torch.")
        raise ShapeError(f"{name}: expected dtype {names}, got {got}; convert it with .to()")
    raise ShapeError(f"{name}: expected device {device}, got {tensor.device}; move it with .to()")


def _matches(have: Sequence[int], want: Sequence[int | None]) -> bool:
    if len(have) != len(want):
        return False
    for extent, wanted in zip(have, want, strict=True):  # noqa: SIM110  a generator is twice as slow
        if wanted is not None and wanted != extent:
            return False
    return True


def check_unit_stride(name: str, tensor: torch.Tensor) -> None:
    """Raise ShapeError unless the last dimension of `tensor` has stride 1, as the kernels require."""
    strides = tensor.stride()
    if strides and strides[-1] != 1 and tensor.shape[-1] > 1:
        raise ShapeError(
            f"{name}: expected stride 1 in the last dimension, got strides {list(tensor.stride())}; "
            "permute only the other dimensions, or call .contiguous()"
        )


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise ShapeError unless `tensor` is contiguous."""
    if not tensor.is_contiguous():
        raise ShapeError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}; copy it once")


def check_no_overlap(name: str, tensor: torch.Tensor) -> None:
    """Raise ShapeError if elements of an output `tensor` may share memory, as expand() makes them do."""
    if tensor.is_contiguous():
        return
    span = 0  # distance from first to last element, over the dimensions with smaller strides
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride <= span:
            raise ShapeError(
                f"{name}: elements may share memory (strides {list(tensor.stride())} for shape {list(tensor.shape)}); "
                "the kernel writes this tensor, so pass a tensor not made by expand()"
            )
        span += (extent - 1) * stride


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor in memory; 0 for an empty tensor."""
    if not tensor.numel():
        return 0
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.element_size()


def once_per_geometry(check: Callable[..., None]) -> Callable[..., None]:
    """Decorate `check`, a function of tensors and hashable values, so that it runs once per geometry.

    The geometry of a tensor is its shape, strides, dtype and device; `check` may read nothing else. Failures are
    not cached, so the same arguments raise again. Under torch.compile, `check` runs on every call.
    """
    passed: set[tuple[Any, ...]] = set()

    @functools.wraps(check)
    def checked(*args: Any) -> None:
        if torch.compiler.is_compiling():
            check(*args)
            return
        geometry: list[Any] = []
        try:
            for value in args:
                if isinstance(value, torch.Tensor):
                    geometry += (value.shape, value.stride(), value.dtype, value.device)
                else:
                    geometry.append(value)
            known = (key := tuple(geometry)) in passed
        except (RuntimeError, TypeError):  # a sparse tensor without strides, or an unhashable value
            check(*args)
            return
        if not known:
            check(*args)
            if len(passed) >= _MOST_PASSED:
                passed.clear()
            passed.add(key)

    return checked


def check_not_empty(name: str, tensor: torch.Tensor) -> None:
    """Raise ShapeError if `tensor` has no elements."""
    if tensor.numel() == 0:
        raise ShapeError(f"{name}: the tensor is empty, got shape {list(tensor.shape)}; pass a tensor with elements")


def shown(value: object) -> str:
    """Return `value` for an error text: its repr on one line, truncated; its type if it has no repr."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # ints with thousands of digits have no repr, and a caller's __repr__ may raise
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def _names(kind: type | tuple[type, ...]) -> str:
    return " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))


def check_instance(
    name: str,
    value: object,
    kind: type[_T] | tuple[type[_T], ...],
    *,
    advice: str,
    error: type[GraphRTError] = ConfigError,
) -> _T:
    """Return `value`. Raises: `error`: unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise error(f"{name}: expected {_names(kind)}, got {shown(value)}; {advice}")
    return value


def check_callable(name: str, value: object, *, advice: str) -> None:
    """Raise ConfigError unless `value` is callable."""
    if not callable(value):
        raise ConfigError(f"{name}: expected a callable, got {shown(value)}; {advice}")


def check_bool(name: str, value: object, *, advice: str) -> bool:
    """Return `value` as a bool. Raises: ConfigError: unless `value` is a Python or NumPy bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigError(f"{name}: expected True or False, got {shown(value)}; {advice}")
    return bool(value)


def check_bool_field(owner: object, name: str, *, advice: str) -> None:
    """Apply `check_bool` to a field of a frozen dataclass, and store the result as a Python bool."""
    value = check_bool(f"{type(owner).__name__}.{name}", getattr(owner, name), advice=advice)
    object.__setattr__(owner, name, value)


def check_int(
    name: str,
    value: object,
    low: int,
    high: int | None = None,
    *,
    advice: str,
    error: type[GraphRTError] = ConfigError,
) -> int:
    """Return `value` as an int. Raises: `error`: unless `value` is a Python or NumPy int (no bool) from `low` to
    `high`."""
    if type(value) is int and low <= value and (high is None or value <= high):
        return value  # a step makes several of these checks
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or number < low or (high is not None and number > high):
        bounds = f">= {low}" if high is None else f"from {low} to {high}"
        raise error(f"{name}: expected an int {bounds}, got {shown(value)}; {advice}")
    return number


def check_int_field(owner: object, name: str, low: int, high: int | None = None, *, advice: str) -> None:
    """Apply `check_int` to a field of a frozen dataclass, and store the result as a Python int."""
    value = check_int(f"{type(owner).__name__}.{name}", getattr(owner, name), low, high, advice=advice)
    object.__setattr__(owner, name, value)


def check_number(name: str, value: object, low: float, high: float = math.inf, *, advice: str) -> float:
    """Return `value` as a float. Raises: ConfigError: unless `value` is a finite number from `low` to `high`."""
    if not (is_finite(value) and low <= float(value) <= high):  # type: ignore[arg-type]
        too_large = is_finite(value) and float(value) > high  # type: ignore[arg-type]
        bounds = f">= {low:g}" if high >= FLOAT32_MAX and not too_large else f"from {low:g} to {high:g}"
        raise ConfigError(f"{name}: expected a finite number {bounds}, got {shown(value)}; {advice}")
    return float(value)  # type: ignore[arg-type]


def check_sequence(
    name: str, value: object, length: int | None = None, *, of: str, error: type[GraphRTError] = ShapeError
) -> Sequence[Any]:
    """Return `value`.

    length   required number of items; None: any
    of       plural name of the items, for the error text

    Raises: `error`: unless `value` is a sequence, other than str or bytes, of `length` items.
    """
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        raise error(f"{name}: expected a list or tuple of {of}, got {shown(value)}; pass a list")
    if length is not None and len(value) != length:
        raise error(f"{name}: expected {length} {of}, got {len(value)}; pass {length} items")
    return value


def check_device(value: object) -> torch.device:
    """Return `value` as an available device; `cuda` gets the index of the current device.

    The meta device is accepted.
    Raises: ConfigError: if the device type is not supported, or the CUDA device does not exist.
    """
    try:
        device = torch.device(value) if isinstance(value, (str, torch.device)) else None
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "meta"):
        raise ConfigError(f"device: expected cpu, cuda or cuda:N, got {shown(value)}; pass a supported device")
    if device.type != "cuda":
        return torch.device(device.type)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index
    if index is None and count:
        index = torch.cuda.current_device()
    if index is None or index >= count:
        raise ConfigError(
            f"device: expected one of {count} CUDA devices, got {shown(value)}; pass the index of an "
            f"existing device, or 'cpu'"
        )
    return torch.device("cuda", index)


def check_named_tensors(name: str, value: object) -> tuple[tuple[str, torch.Tensor], ...]:
    """Return `value` as a tuple of (name, tensor) pairs. Raises: ConfigError: if an item is not such a pair."""
    advice = "pass pairs such as those of Module.named_parameters()"
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray, np.ndarray, torch.Tensor)):
        raise ConfigError(f"{name}: expected pairs of a name and a tensor, got {shown(value)}; {advice}")
    pairs = []
    for index, pair in enumerate(value):
        good = isinstance(pair, tuple) and len(pair) == 2
        if not (good and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)):
            raise ConfigError(f"{name}[{index}]: expected a name and a tensor, got {shown(pair)}; {advice}")
        pairs.append(pair)
    return tuple(pairs)


def check_ints(
    name: str, values: object, low: int, high: int, *, advice: str, error: type[GraphRTError] = ShapeError
) -> npt.NDArray[np.int64]:
    """Return `values` as a contiguous int64 array [n].

    values   a sequence of Python or NumPy ints, or a 1-D array or host tensor of any int dtype; not bool or float.
             Empty values may have any dtype

    Raises: `error`: unless all values are ints from `low` to `high`.
    """
    found = _as_array(values)
    if found is None:
        found = _listed(name, values, low, high, advice, error)
    if found.ndim != 1:
        raise error(f"{name}: expected one dimension, got shape {list(found.shape)}; {advice}")
    if len(found) == 0:
        return np.empty(0, np.int64)
    if found.dtype.kind not in "iu":
        raise error(f"{name}: expected ints from {low} to {high}, got {found.dtype} values; {advice}")
    least, most = int(found.min()), int(found.max())
    if least < low or most > high:
        wrong, index = (least, found.argmin()) if least < low else (most, found.argmax())
        raise error(f"{name}[{int(index)}]: expected an int from {low} to {high}, got {wrong}; {advice}")
    return np.ascontiguousarray(found, dtype=np.int64)


def _as_array(values: object) -> npt.NDArray[Any] | None:
    """Return a NumPy array for an array, a strided host tensor or an `array.array`; None for anything else."""
    if isinstance(values, torch.Tensor):
        whole = not values.is_floating_point() or values.numel() == 0
        plain = values.device.type == "cpu" and values.layout is torch.strided and whole
        try:
            return values.detach().numpy() if plain else None
        except (RuntimeError, TypeError):  # dtypes without a NumPy equivalent, nested tensors and other subclasses
            return None
    if isinstance(values, (np.ndarray, array)):
        return np.asarray(values)
    return None


def _listed(
    name: str, values: object, low: int, high: int, advice: str, error: type[GraphRTError]
) -> npt.NDArray[np.int64]:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes, bytearray)):
        if isinstance(values, torch.Tensor):
            got = f"a {str(values.dtype).removeprefix('torch.')} tensor on {values.device}"
        else:
            got = shown(values)
        raise error(f"{name}: expected ints from {low} to {high} on the host, got {got}; {advice}")
    for kind in set(map(type, values)):  # usually one type: 20 ns per item
        if not issubclass(kind, Integral) or issubclass(kind, bool):
            index = next(i for i, value in enumerate(values) if type(value) is kind)
            raise error(f"{name}[{index}]: expected an int from {low} to {high}, got {shown(values[index])}; {advice}")
    try:
        return np.fromiter(values, np.int64, count=len(values))
    except OverflowError as overflow:
        index, wrong = next((i, v) for i, v in enumerate(values) if not -(1 << 63) <= v < 1 << 63)
        text = f"{name}[{index}]: expected an int from {low} to {high}, got {shown(wrong)}; {advice}"
        raise error(text) from overflow


def is_finite(value: object) -> bool:
    """Return whether `value` is a finite Python or NumPy number, not a bool."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can represent
        return False
