"""What a runtime needs and a backend's declared capabilities lack, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.spec import AttentionKind, AttentionSpec

if TYPE_CHECKING:
    from graphrt.backends.base import BackendContext, Capabilities


def refusals(have: Capabilities, context: BackendContext) -> list[str]:
    """What `context` needs and `have` lacks, a sentence each; every field but `lse`, which `Step.attend` asks for."""
    reasons = []
    if context.device.type not in have.devices:
        reasons.append(f"device {context.device.type}: runs on {', '.join(have.devices)} only")
    for kv in dict.fromkeys(context.kv_groups):
        if have.page_sizes is not None and kv.page_size not in have.page_sizes:
            reasons.append(f"page_size {kv.page_size}: supports {listing(have.page_sizes)}")
        if kv.layout not in have.layouts:
            reasons.append(f"layout {kv.layout.value}: supports {listing([x.value for x in have.layouts])}")
        if kv.dtype not in have.kv_dtypes:
            reasons.append(f"KV dtype {kv.dtype}: supports {listing(have.kv_dtypes)}")
    if len(context.kv_groups) > 1 and not have.kv_groups:
        reasons.append(f"{len(context.kv_groups)} KV groups: supports one")
    for spec in dict.fromkeys(context.attention):
        reasons += _refusals_of_layer(have, spec)
    for spec, kv in dict.fromkeys((spec, kv) for spec, kv, _ in context.layers):
        if kv.dtype not in (spec.dtype, *FP8_DTYPES):
            reasons.append(f"dtype {spec.dtype} with KV dtype {kv.dtype}: must be equal, or the cache fp8")
    if context.prefill and not have.prefill:
        reasons.append("prompt part of mixed steps: not supported")
    if not context.prefill and context.max_query_len > have.max_query_len:
        reasons.append(f"query_len {context.max_query_len}: decodes at most {have.max_query_len} tokens per row")
    if context.batch_invariant and not have.batch_invariant:
        reasons.append("batch_invariant: not supported")
    if context.mixed_batches and not context.prefill and not have.mixed:
        reasons.append(
            "mixed batches: not supported, so prompts cannot run; choose another backend, or "
            "RuntimeConfig(mixed_batches=False) where prompts are computed elsewhere"
        )
    return reasons


def _refusals_of_layer(have: Capabilities, spec: AttentionSpec) -> list[str]:
    reasons = []
    if spec.dtype not in have.dtypes:
        reasons.append(f"dtype {spec.dtype}: supports {listing(have.dtypes)}")
    if have.head_dims is not None and spec.head_dim not in have.head_dims:
        reasons.append(f"head_dim {spec.head_dim}: supports {listing(have.head_dims)}")
    if have.head_dims is not None and have.v_head_dim and spec.v_head_dim not in (None, *have.head_dims):
        reasons.append(f"v_head_dim {spec.v_head_dim}: supports {listing(have.head_dims)}")
    if spec.v_head_dim is not None and not have.v_head_dim:
        reasons.append(f"v_head_dim {spec.v_head_dim}: supports that of the keys, {spec.head_dim}")
    if spec.sliding_window is not None and not have.sliding_window:
        reasons.append(f"sliding_window {spec.sliding_window}: not supported")
    if spec.attention_chunk_size is not None and not have.attention_chunk_size:
        reasons.append(f"attention_chunk_size {spec.attention_chunk_size}: not supported")
    if spec.logits_softcap is not None and not have.logits_softcap:
        reasons.append(f"logits_softcap {spec.logits_softcap}: not supported")
    if spec.alibi_slopes is not None and not have.alibi:
        reasons.append("alibi_slopes: not supported")
    if spec.alibi_sqrt and not have.alibi_sqrt:
        reasons.append("alibi_sqrt: not supported")
    if spec.sinks and not have.sinks:
        reasons.append("sinks: not supported")
    kinds = {AttentionKind.CROSS: have.cross_attention, AttentionKind.ENCODER: have.encoder_attention}
    if not kinds.get(spec.kind, True):
        reasons.append(f"{spec.kind.value} attention: not supported")
    return reasons


def listing(values: Sequence[object]) -> str:
    """The values as errors and docs/backends.md show them: many multiples of a number as such."""
    if len(values) > 4 and isinstance(first := values[0], int) and isinstance(last := values[-1], int):
        step = (last - first) // (len(values) - 1)
        if step > 0 and first % step == 0 and tuple(values) == tuple(range(first, last + 1, step)):
            return f"{first} to {last}" if step == 1 else f"multiples of {step} from {first} to {last}"
    return ", ".join(str(v) for v in values)
