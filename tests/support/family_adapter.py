"""Decoders of `transformers` as models of graphrt: their own modules, with attention over the paged cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from graphrt.spec import AttentionSpec
from graphrt.step import Step


class NoCache:
    """A cache that keeps nothing. Its length is a tensor: packed position + length = position in the sequence."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer: int = 0) -> torch.Tensor:
        return self.before

    def update(self, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return k, v


def attention(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: None,
    *,
    step: Step | list[AttentionSpec],
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function that `transformers` calls in every layer. With a list as the step, it appends the layer's spec."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # of [1, heads, tokens, size]
    layer, shares = module.layer_idx, getattr(module, "is_kv_shared_layer", False)
    if isinstance(step, Step):
        new = (None, None) if shares else (k, v)
        return step.attend(layer, q, *new, sinks=s_aux)[None], None
    kinds = getattr(module.config, "layer_types", None) or ["full_attention"] * (layer + 1)
    same = [i for i, spec in enumerate(step) if spec.kv_shared_with is None and kinds[i] == kinds[layer]]
    step.append(
        AttentionSpec(
            num_q_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[2],
            v_head_dim=v.shape[2],
            dtype=q.dtype,
            softmax_scale=scaling,
            sliding_window=sliding_window,
            attention_chunk_size=module.config.attention_chunk_size if kinds[layer] == "chunked_attention" else None,
            logits_softcap=softcap,
            sinks=s_aux is not None,
            kv_shared_with=same[-1] if shares else None,
        )
    )
    return q.new_zeros(1, len(q), q.shape[1], v.shape[2]), None


AttentionInterface.register("graphrt", attention)


class Hosted(torch.nn.Module):
    """A decoder of `transformers`, for capture. A run of one token finds the specs of its layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        model.set_attn_implementation("graphrt")
        self.model, self.specs = model, list[AttentionSpec]()
        zero = torch.zeros(1, dtype=torch.int64, device=model.device)
        with torch.no_grad():
            self._run(zero, zero, zero, self.specs)
        assert len(self.specs) == model.config.num_hidden_layers, "the model has attention of its own"

    def forward(self, step: Step) -> torch.Tensor:
        return self._run(step.input_ids, step.positions, step.logits_indices, step)

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: Any) -> torch.Tensor:
        return self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            past_key_values=NoCache(positions),
            use_cache=False,
            logits_to_keep=keep,
            step=step,
        ).logits[0]
