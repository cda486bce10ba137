"""Which matrix products with few tokens the CUDA kernel computes, and how: a table of measured plans for each device.

`scripts/bench_linear.py` measures the plans, and `linear_plans.json` in this folder holds the fastest. A product of a
different size uses the plan of the nearest measured product with the same bits per weight. Without a plan, PyTorch
computes the product, or `quantized_product` if the weight is quantized. The plans of another file can replace them
(`use_plans`).

Measured so far, on an H200: bfloat16 weights at 1 to 64 tokens, and fp8 and int4 weights at 1 to 32 tokens. At 64
tokens, no plan was faster than PyTorch. There are no plans for other devices.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch

from graphrt.kernels.errors import ConfigError
from graphrt.kernels.native.nvrtc import nvrtc_fault, runs_native
from graphrt.kernels.ops.linear_call import End, LinearPlan

_CPU_FOLLOWS = "NVIDIA H200"
_file: Path | None = None


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """The fastest plan of a product: tokens, bits per weight, epilogue, rows and depth of the weight.

    plan   None: a product without the CUDA kernel is faster
    """

    tokens: int
    bits: int
    end: End
    rows: int
    depth: int
    plan: LinearPlan | None


def use_plans(file: Path | None) -> None:
    """Use the plans of a file for the devices that it lists, in all later products of this process.

    file   a JSON object in the format of `linear_plans.json`; None: graphrt's own plans for all devices

    Raises: ConfigError: if the file cannot be read, or has a different format. The plans then stay as they were.
    """
    global _file
    if file == _file:
        return
    if file is not None:
        _read(file)
    _file = file
    for function in (load_plans, device_plans, linear_plan):
        function.cache_clear()


@functools.cache
def load_plans() -> dict[str, tuple[MeasuredPlan, ...]]:
    """Return the measured plans by the name of the device."""
    text = files("graphrt.kernels.ops").joinpath("linear_plans.json").read_text(encoding="utf-8")
    return _parse(text) | ({} if _file is None else _read(_file))


def _read(file: Path) -> dict[str, tuple[MeasuredPlan, ...]]:
    try:
        return _parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"plans of products: {str(file)!r:.200} cannot be read ({error!r:.200}); "
            "write it with scripts/bench_linear.py --write"
        ) from error


def _parse(text: str) -> dict[str, tuple[MeasuredPlan, ...]]:
    return {
        device: tuple(
            MeasuredPlan(t, bits, End[end], rows, depth, None if p is None else LinearPlan.from_ints(p))
            for t, bits, end, rows, depth, p in plans
        )
        for device, plans in json.loads(text).items()
    }


class DevicePlans(NamedTuple):
    """The measured plans of a device, and a sentence that states their origin, or why there are none."""

    plans: tuple[MeasuredPlan, ...]
    reason: str


@functools.cache
def device_plans(device: torch.device) -> DevicePlans:
    """Return the measured plans of a device; no plans if PyTorch computes all products."""
    if device.type == "cpu":
        return DevicePlans(load_plans()[_CPU_FOLLOWS], f"reference on a CPU, with the plans of {_CPU_FOLLOWS}")
    if not runs_native(device):
        return DevicePlans((), "PyTorch: this device does not run the CUDA kernel (compute capability 9.0 or newer)")
    if (fault := nvrtc_fault()) is not None:
        return DevicePlans((), f"PyTorch: {fault}")
    name = torch.cuda.get_device_name(device)
    if (plans := load_plans().get(name)) is None:
        advice = "write a file with scripts/bench_linear.py --write, and set GRAPHRT_LINEAR_PLANS"
        return DevicePlans((), f"PyTorch: no plans were measured on {name}; {advice}")
    most = max(plan.tokens for plan in plans)
    return DevicePlans(plans, f"CUDA kernel for at most {most} tokens, with the plans of {name}")


def describe_plans(device: torch.device, dtype: torch.dtype) -> str:
    """Return how products of few tokens run on a device with activations of this dtype, and why."""
    plans, reason = device_plans(device)
    if plans and dtype is not torch.bfloat16:
        return f"PyTorch, or Triton for quantized weights: {dtype} activations; load the model with torch.bfloat16"
    return reason


@functools.lru_cache(maxsize=4096)
def linear_plan(
    device: torch.device, tokens: int, bits: int, end: End, rows: int, depth: int, head_dim: int, rotary_dim: int
) -> LinearPlan | None:
    """Return the plan of a product; None: the CUDA kernel does not compute it.

    tokens                number of tokens
    bits                  per weight: 16, 8 or 4
    rows, depth           of the weight
    head_dim, rotary_dim  of ROPE_WRITE; must be multiples of the rows of a tile
    """
    known = [
        measured
        for measured in device_plans(device).plans
        if measured.tokens >= tokens
        and (measured.bits, measured.end) == (bits, end)
        and (measured.plan is None or measured.plan.fits(end, rows, head_dim, rotary_dim))
    ]
    if not known:
        return None
    size = min(m.tokens for m in known)

    def distance(measured: MeasuredPlan) -> float:
        return abs(math.log(measured.rows / rows)) + abs(math.log(measured.depth / depth))

    return min((m for m in known if m.tokens == size), key=distance).plan
