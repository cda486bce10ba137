"""References of norms and activation in PyTorch."""

from __future__ import annotations

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Reference of `graphrt::rms_norm`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide.to(x.dtype).float() * weight.float()).to(x.dtype)


def add_rms_norm_reference(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Reference of `graphrt::add_rms_norm`."""
    residual.copy_((residual.float() + x.float()).to(residual.dtype))
    wide = residual.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide.to(x.dtype).float() * weight.float()).to(x.dtype)


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Reference of `graphrt::silu_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate.float()).to(gate.dtype) * up
