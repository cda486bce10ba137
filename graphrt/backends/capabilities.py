"""The capabilities of an attention backend, the requirements of a runtime, and their comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import torch

from graphrt.cache.groups import longest_of
from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.checks import check_bool_field, check_int_field, shown
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.spec import AttentionKind, AttentionSpec, KVCacheSpec


class GraphSupport(IntEnum):
    """Which batches of a backend can be captured. Other batches run eagerly; `stats()` counts them with the reason."""

    NEVER = 0
    SINGLE_TOKEN = 1  # decode batches with one new token per request
    UNIFORM = 2  # decode batches with the same number of new tokens in every request
    ALWAYS = 3  # mixed batches too


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features that a backend supports. Building a runtime that needs anything else raises UnsupportedError.

    devices          device types: "cpu", "cuda"
    dtypes           dtypes of queries, keys, values and outputs
    kv_dtypes        dtypes of the KV cache: the dtype of the layers, or an fp8 dtype
    head_dims        head sizes; None: any
    page_sizes       tokens per page; None: any
    layouts          memory layouts of a page
    max_query_len    maximum new tokens per request in a decode batch, where all requests have the same number
    sliding_window   layers with `AttentionSpec.sliding_window`
    logits_softcap   layers with `AttentionSpec.logits_softcap`
    mixed            mixed batches, in which requests differ in their number of new tokens (prefill and decode together)
    alibi            layers with `AttentionSpec.alibi_slopes`
    alibi_sqrt       layers with `AttentionSpec.alibi_sqrt`: slopes times the square root of the distance
    sinks            layers with `AttentionSpec.sinks`
    lse              `run` can write the log-sum-exp. With other backends, a model that needs it raises in its first
                     step, which runs in `capture()`
    batch_invariant  the result of a request does not depend on other requests; see below
    kv_groups        layers of several KV groups, each with its own block table, `metadata.block_tables[layer.group]`
    v_head_dim       value heads whose size differs from the key heads, `AttentionSpec.v_head_dim`
    attention_chunk_size   layers with `AttentionSpec.attention_chunk_size`
    prefill          the prefill part of mixed steps, while another backend serves the decode part; see
                     `AttentionBackend.run`
    cross_attention      layers that attend to encoder outputs, not causally, with lengths `metadata.encoder_lens`
    encoder_attention    bidirectional layers over the tokens of the step, without a cache; see `run_encoder`
    tree_drafts          decode batches in which the drafts of a request form a tree; see `StepMetadata.tree_masks`
    context_parallel     a rank stores only some keys of each request; see `StepMetadata.kv_limits`. Requires lse

    `batch_invariant` is a guarantee per kind of graph. With `RuntimeConfig(batch_invariant=True)`, the result of a
    request is bitwise equal in all decode graphs of one query_len, for any graph size, position in the batch and other
    requests. The same is true among all mixed steps. A decode step and a mixed step may still differ in their last
    bits.

    Raises:
        ConfigError: if a field has the wrong type, or a tuple is empty.
    """

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    kv_dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...] | None
    page_sizes: tuple[int, ...] | None
    layouts: tuple[KVLayout, ...]
    max_query_len: int
    sliding_window: bool
    logits_softcap: bool
    mixed: bool
    alibi: bool = False
    alibi_sqrt: bool = False
    sinks: bool = False
    lse: bool = False
    batch_invariant: bool = False
    kv_groups: bool = False
    v_head_dim: bool = False
    attention_chunk_size: bool = False
    prefill: bool = False
    cross_attention: bool = False
    encoder_attention: bool = False
    tree_drafts: bool = False
    context_parallel: bool = False

    def __post_init__(self) -> None:
        check_int_field(self, "max_query_len", 1, advice="1 is plain decode")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _ITEMS:
                kind, optional = _ITEMS[field.name]
                right = isinstance(value, tuple) and value and all(isinstance(x, kind) for x in value)
                if not (right or (optional and value is None)):
                    or_any = ", or None for any" if optional else ""
                    raise ConfigError(
                        f"Capabilities.{field.name}: expected a non-empty tuple of {kind.__name__}{or_any}, got "
                        f"{shown(value)}; specify at least one"
                    )
            elif field.name != "max_query_len":
                check_bool_field(self, field.name, advice="declare it")

    def unsupported_reasons(self, context: BackendContext) -> list[str]:
        """Return a sentence for each requirement of `context` that these capabilities do not meet.

        `lse` is not part of a context; `Step.attend` checks it.
        """
        reasons = []
        if context.device.type not in self.devices:
            reasons.append(f"device {context.device.type}: runs on {', '.join(self.devices)} only")
        for kv in dict.fromkeys(context.kv_groups):
            if self.page_sizes is not None and kv.page_size not in self.page_sizes:
                reasons.append(f"page_size {kv.page_size}: supports {listing(self.page_sizes)}")
            if kv.layout not in self.layouts:
                reasons.append(f"layout {kv.layout.value}: supports {listing([x.value for x in self.layouts])}")
            if kv.dtype not in self.kv_dtypes:
                reasons.append(f"KV dtype {kv.dtype}: supports {listing(self.kv_dtypes)}")
        if len(context.kv_groups) > 1 and not self.kv_groups:
            reasons.append(f"{len(context.kv_groups)} KV groups: supports one")
        for spec in dict.fromkeys(context.attention):
            reasons += self._unsupported_by_layer(spec)
        for spec, kv in dict.fromkeys((spec, kv) for spec, kv, _ in context.layers):
            if kv.dtype not in (spec.dtype, *FP8_DTYPES):
                reasons.append(f"dtype {spec.dtype} with KV dtype {kv.dtype}: must be equal, unless the cache is fp8")
        if context.prefill and not self.prefill:
            reasons.append(NO_PREFILL)
        if not context.prefill and context.max_query_len > self.max_query_len:
            reasons.append(
                f"query_len {context.max_query_len}: decodes at most {self.max_query_len} tokens per request"
            )
        if context.tree_drafts and not context.prefill:
            reasons += self._unsupported_by_tree(context)
        if context.context_parallel and not self.context_parallel:
            reasons.append("context_parallel_size: not supported")
        if context.batch_invariant and not self.batch_invariant:
            reasons.append("batch_invariant: not supported")
        if context.mixed_batches and not context.prefill and not self.mixed:
            reasons.append(
                "mixed batches: not supported, so prompts cannot run; choose another backend, or set "
                "RuntimeConfig(mixed_batches=False) if prompts are computed elsewhere"
            )
        return reasons

    def _unsupported_by_tree(self, context: BackendContext) -> list[str]:
        if not self.tree_drafts:
            return ["tree_depth: drafts that form a tree are not supported"]
        reasons = ["tree_depth with context_parallel_size: not supported"] if context.context_parallel else []
        for spec in dict.fromkeys(context.attention):
            for option in ("attention_chunk_size", "alibi_slopes"):
                if getattr(spec, option) is not None:
                    reasons.append(f"tree_depth with {option}: not supported")
            if spec.sliding_window is not None and spec.sliding_window < context.max_query_len:
                reasons.append(
                    f"tree_depth with sliding_window {spec.sliding_window}: the window must be larger than the number "
                    f"of drafts, {context.max_query_len - 1}"
                )
        return reasons

    def _unsupported_by_layer(self, spec: AttentionSpec) -> list[str]:
        reasons = []
        if spec.dtype not in self.dtypes:
            reasons.append(f"dtype {spec.dtype}: supports {listing(self.dtypes)}")
        if self.head_dims is not None and spec.head_dim not in self.head_dims:
            reasons.append(f"head_dim {spec.head_dim}: supports {listing(self.head_dims)}")
        if self.head_dims is not None and self.v_head_dim and spec.v_head_dim not in (None, *self.head_dims):
            reasons.append(f"v_head_dim {spec.v_head_dim}: supports {listing(self.head_dims)}")
        if spec.v_head_dim is not None and not self.v_head_dim:
            reasons.append(f"v_head_dim {spec.v_head_dim}: supports only the head size of the keys, {spec.head_dim}")
        for option, flag in _FLAG_OF_OPTION.items():
            value = getattr(spec, option)
            if value is not None and value is not False and not getattr(self, flag):
                shown = "" if isinstance(value, (bool, tuple)) else f" {value}"
                reasons.append(f"{option}{shown}: not supported")
        kinds = {AttentionKind.CROSS: self.cross_attention, AttentionKind.ENCODER: self.encoder_attention}
        if not kinds.get(spec.kind, True):
            reasons.append(f"{spec.kind.value} attention: not supported")
        return reasons


NO_PREFILL = "prefill part of mixed steps: not supported"

_ITEMS: dict[str, tuple[type, bool]] = {
    "devices": (str, False),
    "dtypes": (torch.dtype, False),
    "kv_dtypes": (torch.dtype, False),
    "head_dims": (int, True),
    "page_sizes": (int, True),
    "layouts": (KVLayout, False),
}
"""The fields of Capabilities that are tuples: the type of their items, and whether None means any."""

_FLAG_OF_OPTION = {
    "sliding_window": "sliding_window",
    "attention_chunk_size": "attention_chunk_size",
    "logits_softcap": "logits_softcap",
    "alibi_slopes": "alibi",
    "alibi_sqrt": "alibi_sqrt",
    "sinks": "sinks",
}
"""The field of Capabilities that an option of AttentionSpec needs."""


@dataclass(frozen=True, slots=True)
class BackendContext:
    """The requirements that a backend is built for: the model's layers, the cache, the capacities and the device.

    attention        the spec of every layer, in order
    kv_groups        the spec of every KV group: one if all layers are alike, none if all are encoder layers
    group_of         the KV group of every layer, None for an encoder layer; None if there is one group
    device           device of all tensors
    max_num_reqs     maximum number of requests in one step
    max_num_tokens   maximum number of new tokens in one step
    max_seq_len      longest sequence, in tokens; see `max_pages`
    max_query_len    maximum new tokens per request in a decode batch, `RuntimeConfig.query_len`
    batch_invariant  see Capabilities and RuntimeConfig
    mixed_batches    whether steps occur in which requests differ in their number of new tokens; see RuntimeConfig
    prefill          whether the backend serves only the prefill part of these steps
    max_encoder_len  maximum encoder tokens of a request; 0 without cross layers
    tree_drafts      whether drafts form trees in decode batches with max_query_len tokens per request
    context_parallel whether a rank stores only some keys of each request; the layers have the query heads of all ranks
    """

    attention: tuple[AttentionSpec, ...]
    kv_groups: tuple[KVCacheSpec, ...]
    device: torch.device
    max_num_reqs: int
    max_num_tokens: int
    max_seq_len: int
    max_query_len: int = 1
    batch_invariant: bool = False
    mixed_batches: bool = True
    group_of: tuple[int | None, ...] | None = None
    prefill: bool = False
    max_encoder_len: int = 0
    tree_drafts: bool = False
    context_parallel: bool = False

    def __post_init__(self) -> None:
        if self.group_of is None:
            found = tuple(0 if spec.is_cached else None for spec in self.attention)
            object.__setattr__(self, "group_of", found)

    def max_pages(self, group: int) -> int:
        """Return the width of the block table of a KV group."""
        spec = self.kv_groups[group]
        return spec.pages_for(longest_of(spec, self.max_seq_len, self.max_encoder_len))

    @property
    def layers(self) -> Iterator[tuple[AttentionSpec, KVCacheSpec, int]]:
        """Yield the spec of every layer that has a cache, the spec of its KV group, and the number of that group."""
        assert self.group_of is not None, "set at construction"
        for spec, group in zip(self.attention, self.group_of, strict=True):
            if group is not None:
                yield spec, self.kv_groups[group], group


def listing(values: Sequence[object]) -> str:
    """Format values as errors and docs/backends.md show them. A long run of multiples becomes its step and its ends."""
    if len(values) > 4 and isinstance(first := values[0], int) and isinstance(last := values[-1], int):
        step = (last - first) // (len(values) - 1)
        if step > 0 and first % step == 0 and tuple(values) == tuple(range(first, last + 1, step)):
            return f"{first} to {last}" if step == 1 else f"multiples of {step} from {first} to {last}"
    return ", ".join(str(v) for v in values)
