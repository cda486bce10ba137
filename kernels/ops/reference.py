"""The operators of this folder in plain torch, on any device."""

from __future__ import annotations

import torch

from graphrt.kernels.types import NO_TOKEN

SAMPLE_CHUNK = 2048
"""Vocabulary entries that share one block of random counters; part of what defines the random numbers of `sample`."""

MAX_TEMPERATURE = 1e30
"""Temperatures beyond are taken as this one; at it every finite logit has the same chance already."""

_MASK32 = 0xFFFFFFFF
_PHILOX_KEYS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)


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


def philox4x32(seed: torch.Tensor, counter0: torch.Tensor, counter1: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Four 32-bit words (as int64) of Philox-4x32-10 at counter (counter0, counter1, 0, 0), key (seed low, seed high).

    Arguments are int64 and broadcast; counters must lie in 0 to 2**32 - 1. Bit for bit `tl.philox`.
    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    key0, key1 = seed & _MASK32, (seed >> 32) & _MASK32
    c0, c1 = torch.broadcast_tensors(counter0, counter1)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        low_a, high_a = _multiply32(c0, _PHILOX_MULTIPLIERS[0])
        low_b, high_b = _multiply32(c2, _PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high_b ^ c1 ^ key0, low_b, high_a ^ c3 ^ key1, low_a
        key0, key1 = (key0 + _PHILOX_KEYS[0]) & _MASK32, (key1 + _PHILOX_KEYS[1]) & _MASK32
    return c0, c1, c2, c3


def _multiply32(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high 32 bits of x * factor, by halves of the factor, so that no product leaves int64."""
    low = x * (factor & 0xFFFF)
    high = x * (factor >> 16)
    middle = (low >> 16) + high
    return (middle << 16 | low & 0xFFFF) & _MASK32, middle >> 16


def exponential_reference(bits: torch.Tensor) -> torch.Tensor:
    """Exponential variates (float32) from 32 random bits, by inversion: -log(1 - u), u = (bits + 0.5) / 2**32.

    Small variates decide a Gumbel-max draw, so they are computed from a series, which keeps their relative precision.
    """
    u = bits.float() * 2.0**-32 + 2.0**-33
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    return torch.where(u < 2.0**-6, series, -torch.log((1.0 - u).clamp_min(2.0**-25)))


def sample_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """Reference of `graphrt::sample`: argmax of logits + temperature * Gumbel noise."""
    vocab = logits.shape[1]
    scores = logits.to(torch.float32, copy=True)
    hot = (temperatures > 0).nonzero()[:, 0]
    if len(hot):
        index = torch.arange(-(-vocab // SAMPLE_CHUNK) * (SAMPLE_CHUNK // 4), device=logits.device)
        words = philox4x32(seeds[hot, None], index[None, :], seq_lens[hot, None].long())
        by_chunk = torch.stack([word.view(len(hot), -1, SAMPLE_CHUNK // 4) for word in words], 2)
        noise = -torch.log(exponential_reference(by_chunk.reshape(len(hot), -1)[:, :vocab]))
        heat = temperatures[hot, None].clamp_max(MAX_TEMPERATURE)
        scores[hot] = scores[hot] + heat * noise
    possible = logits > float("-inf")
    scores = torch.where(possible, scores, float("-inf"))
    best = scores.max(-1, keepdim=True).values
    at_best = possible & (scores == best)
    lowest = torch.where(at_best, torch.arange(vocab, device=logits.device), vocab).min(-1).values
    return torch.where(lowest < vocab, lowest, NO_TOKEN).int()
