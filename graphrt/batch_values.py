"""Host dtypes, ranges and defaults of the values that the refresh copies for each request of a `Batch`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphrt.config import Need
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata.buffers import COPIED, StaticBuffers

Values = npt.NDArray[Any]

_ON_HOST: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.int64: np.uint32, torch.int32: np.int32}
_SPECS = {name: StaticBuffers.specs()[name] for name in COPIED}
"""Declarations of the copied values. The host sends 32 bits each, in a dtype that _ON_HOST maps to the buffer's."""


def singular(name: str) -> str:
    """Return the singular of a field's name: top_k of top_ks, presence_penalty of presence_penalties."""
    if name == "logprobs":
        return name
    return f"{name.removesuffix('ies')}y" if name.endswith("ies") else name.removesuffix("s")


@dataclass(frozen=True, slots=True)
class _Range:
    """The allowed values of a field: a test of an array, a description, and advice for the error."""

    holds: Callable[[Values], Any]
    what: str
    advice: str


_FINITE = _Range(lambda v: np.isfinite(v).all(), "finite numbers", "0 is off")
_RANGES = {
    "temperatures": _Range(lambda v: v.min() >= 0 and v.max() < math.inf, "finite numbers >= 0", "0 is greedy"),
    "top_ks": _Range(lambda v: (v >= 0).all(), "numbers >= 0", "0 keeps all tokens"),
    "top_ps": _Range(lambda v: ((v > 0) & (v <= 1)).all(), "numbers in (0, 1]", "1 keeps all tokens"),
    "min_ps": _Range(lambda v: ((v >= 0) & (v <= 1)).all(), "numbers in [0, 1]", "0 keeps all tokens"),
    "repetition_penalties": _Range(lambda v: ((v > 0) & (v < math.inf)).all(), "finite numbers > 0", "1 is off"),
    "presence_penalties": _FINITE,
    "frequency_penalties": _FINITE,
    "prompt_lens": _Range(lambda v: (v >= 0).all(), "lengths >= 0", "0: all tokens are output"),
    "logprobs": _Range(lambda v: (v >= -1).all(), "numbers >= -1", "-1 returns none"),
    "logprob_tokens": _Range(lambda v: (v >= -1).all(), "token ids, or -1", "use -1 for the sampled token"),
    "token_masks": _Range(lambda v: (v >= -1).all(), "mask numbers, or -1", "-1 is no mask"),
    "encoder_lens": _Range(lambda v: v.min() >= 0, "lengths >= 0", "0 is no encoder"),
    "sample": _Range(lambda v: v.min() >= 0, "numbers >= 0", "0: more of the prompt follows"),
}


def _penalized(off: float) -> Callable[[Values], tuple[Need, ...]]:
    return lambda values: (("penalties", 1),) if (values != off).any() else ()


_NEEDS: dict[str, Callable[[Values], tuple[Need, ...]]] = {
    "top_ks": lambda values: (("truncation", 1),) if (values > 0).any() else (),
    "top_ps": lambda values: (("truncation", 1),) if (values < 1).any() else (),
    "min_ps": lambda values: (("truncation", 1),) if (values > 0).any() else (),
    "repetition_penalties": _penalized(1),
    "presence_penalties": _penalized(0),
    "frequency_penalties": _penalized(0),
    "token_masks": lambda values: (
        (("token_masks", 1), ("max_num_reqs", int(values.max()) + 1)) if (values >= 0).any() else ()  # one per index
    ),
    "logprobs": lambda values: (("max_logprobs", int(values.max())),) if (values >= 0).any() else (),
}
"""For each field of a batch, the fields of RuntimeConfig that its values need, with their lowest values."""


_pads: dict[str, Values] = {name: np.empty(0, _ON_HOST[spec.dtype]) for name, spec in _SPECS.items()}


def copied_values(name: str, values: Any, length: int) -> Values:
    """Return a copied field of `length` requests from `values`, or if None, the read-only defaults that batches share.

    Raises: ShapeError.
    """
    if values is not None:
        return host_array(name, values, _pads[name].dtype, length)
    if len(_pads[name]) < length:
        pads = np.full(2 * length, _SPECS[name].copied, _pads[name].dtype)
        pads.setflags(write=False)
        _pads[name] = pads
    return _pads[name][:length]


def check_ranges(stated: Mapping[str, Values]) -> None:
    """Raise ShapeError if a value of these copied fields is out of range; it names the field and the request."""
    for name, values in stated.items():
        check = _RANGES.get(name)
        if check is not None and len(values) and not check.holds(values):
            at = next(at for at in range(len(values)) if not check.holds(values[at : at + 1]))
            raise ShapeError(f"batch.{name}: expected {check.what}, got {values[at]} for request {at}; {check.advice}")


def needs_of(stated: Mapping[str, Values]) -> tuple[Need, ...]:
    """Return the fields of RuntimeConfig that these values need, and their lowest values."""
    return tuple(need for name, values in stated.items() if name in _NEEDS for need in _NEEDS[name](values))


def host_array(name: str, values: Any, dtype: Any, length: int | None = None) -> Values:
    """Return `values` as a one-dimensional array of `dtype`, without a copy if it already is one.

    Raises: ShapeError.
    """
    ready = type(values) is np.ndarray and values.dtype == dtype and values.ndim == 1 and values.flags.c_contiguous
    if ready and (length is None or len(values) == length):
        own: Values = values
        return own
    device = getattr(values, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise ShapeError(f"batch.{name}: expected host values, got a tensor on {device}; copy it to the host")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ShapeError(
            f"batch.{name}: NumPy cannot make a one-dimensional {np.dtype(dtype).name} array from this "
            f"{type(values).__name__} ({error}); pass an array of numbers"
        ) from error
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(dtype)  # NumPy converts () to float64
    allowed = "iuf" if np.issubdtype(dtype, np.floating) else "biu"
    if array.dtype.kind not in allowed:
        raise ShapeError(f"batch.{name}: expected {np.dtype(dtype).name} values, got {array.dtype}; convert the array")
    if array.ndim != 1 or (length is not None and len(array) != length):
        want = "one dimension" if length is None else f"shape [{length}]"
        raise ShapeError(f"batch.{name}: expected {want}, got shape {list(array.shape)}; pass one value per request")
    if array.dtype != dtype and array.size and np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        for value in (array.min(), array.max()):
            if value < info.min or value > info.max:
                kind = np.dtype(dtype).name
                raise ShapeError(f"batch.{name}: expected values that fit {kind}, got {value}; pass smaller numbers")
    with np.errstate(all="ignore"):  # a temperature beyond float32 becomes infinite, which check_ranges rejects
        return np.ascontiguousarray(array, dtype=dtype)
