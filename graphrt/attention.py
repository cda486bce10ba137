"""The step as a model sees it: inputs, and attention over the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.cache.write import Rotary, write_kv
from graphrt.kernels.checks import check_tensor
from graphrt.kernels.errors import ShapeError
from graphrt.metadata import StepMetadata


@dataclass(frozen=True, slots=True)
class Step:
    """One captured size of the decode step. A model is any callable `model(step) -> logits [padded_reqs, vocab]`.

    input_ids       [padded_tokens]  int64    0 in pad tokens
    positions       [padded_tokens]  int64    0 in pad tokens
    logits_indices  [padded_reqs]    int64    token whose hidden state gives the row's logits
    temperatures    [padded_reqs]    float32  for samplers; 0 is greedy
    seeds           [padded_reqs]    int64    for samplers

    The tensors are views of static buffers: a graph that reads them sees every later step's values. Whatever else
    varies from step to step must be in a tensor too; a Python number is frozen at capture.
    """

    descriptor: BatchDescriptor
    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    metadata: StepMetadata
    backend: AttentionBackend
    layers: tuple[AttentionLayer, ...]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, rotary: Rotary | None = None
    ) -> torch.Tensor:
        """Write this step's K and V to the cache and attend to everything cached so far, causally.

        q     [padded_tokens, num_q_heads, head_dim]   rotated in place if `rotary` is given
        k, v  [padded_tokens, num_kv_heads, head_dim]  may be slices of one qkv tensor
        returns [padded_tokens, num_q_heads, head_dim]; zeros in pad tokens

        Capture-safe: shapes depend on the descriptor only, and lengths are read on the device.
        Raises: ShapeError when a shape, dtype or device does not match the layer.
        """
        if not 0 <= layer < len(self.layers):
            raise ShapeError(
                f"layer: expected 0 to {len(self.layers) - 1}, got {layer}; the KV cache has one per layer"
            )
        target, tokens = self.layers[layer], self.descriptor.padded_tokens
        spec, device = target.spec, self.positions.device
        check_tensor("q", q, shape=(tokens, spec.num_q_heads, spec.head_dim), dtype=spec.dtype, device=device)
        check_tensor("k", k, shape=(tokens, spec.num_kv_heads, spec.head_dim), dtype=spec.dtype, device=device)
        check_tensor("v", v, shape=(tokens, spec.num_kv_heads, spec.head_dim), dtype=spec.dtype, device=device)
        if rotary is not None and rotary.cos_sin.shape[0] < self.metadata.max_seq_len:
            raise ShapeError(
                f"rotary.cos_sin: expected rows for max_seq_len={self.metadata.max_seq_len} positions, got "
                f"{rotary.cos_sin.shape[0]}; make the table longer, or lower RuntimeConfig.max_seq_len"
            )
        write_kv(
            q, k, v, target.k_cache, target.v_cache, self.metadata.slot_mapping, self.positions, rotary=rotary
        )  # fmt: skip
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.backend.run(target, q, self.metadata, out)
        return out


Model = Callable[[Step], torch.Tensor]
"""Maps a step to logits [padded_reqs, vocab]; run under no_grad, captured once per size."""

Sampler = Callable[[torch.Tensor, Step], torch.Tensor]
"""Maps logits [padded_reqs, vocab] to token ids [padded_reqs], int32 or int64; captured with the model."""
