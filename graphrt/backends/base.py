"""What an attention backend is: a class that says what it can do, and computes the attention of every step.

A runtime calls a backend in this order. `docs/write_a_backend.md` has a complete example.

    unsupported_reasons(context)                 may this class serve this model, cache and device?    class method
    __init__(context)
    graph_unsupported_reason(descriptor)        may a batch of this size be captured?                 once per size
    allocate()                       make the buffers                                      once per attempt to capture
      plan_capture(descriptor)       host state of one size                                for each size
      schedule(metadata)             recorded at the head of the step                      for each size
      run(layer, q, metadata, ...)   recorded once per layer                               for each size
      run_encoder(layer, q, k, v, ...)   the same of an encoder layer, which has no cache  for each size
    plan_replay(descriptor, batch)   host state of one step                                before each step
      (the graph repeats what `schedule` and `run` recorded)
    close()                          drop the buffers                                      once

A step without a graph runs eagerly: `plan_capture`, `plan_replay`, `schedule` and `run` are called in each such step.

In a mixed step of two parts neither backend is asked to plan: the device puts its rows into another order than the
host's batch has. A class that overrides `plan_capture` or `plan_replay` is refused as a part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, final

import torch

from graphrt.backends.refusals import refusals
from graphrt.cache.groups import longest_of
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.checks import check_bool_field, check_instance, check_int_field, shown
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionKind, AttentionSpec, KVCacheSpec

if TYPE_CHECKING:
    from graphrt.batch import Batch


class GraphSupport(IntEnum):
    """Which of the batches that a backend serves can be captured. The others run eagerly, are counted, and say why."""

    NEVER = 0
    SINGLE_TOKEN = 1  # decode batches with one new token per row
    UNIFORM = 2  # decode batches with the same number of new tokens in every row
    ALWAYS = 3  # mixed batches too


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. A runtime that needs more than this is refused when it is built.

    devices          types of device: "cpu", "cuda"
    dtypes           of the layers: queries, keys, values and outputs
    kv_dtypes        of the cache: the dtype of the layers, or an fp8 dtype
    head_dims        head sizes; None: any
    page_sizes       tokens per page; None: any
    layouts          orders of a page in memory
    max_query_len    most new tokens per row in a decode batch, where all rows have equally many
    sliding_window   layers with `AttentionSpec.sliding_window`
    logits_softcap   layers with `AttentionSpec.logits_softcap`
    mixed            mixed batches, whose rows differ in their number of new tokens: prompts beside decodes
    alibi            layers with `AttentionSpec.alibi_slopes`
    alibi_sqrt       layers with `AttentionSpec.alibi_sqrt`: slopes times the square root of the distance
    sinks            layers with `AttentionSpec.sinks`
    lse              `run` can write the log-sum-exp; a model that asks another backend for it is refused in its first
                     step, which is in `capture()`
    batch_invariant  a row's result does not depend on the other rows; see below
    kv_groups        layers of several KV groups, each with a page table: `metadata.block_tables[layer.group]`
    v_head_dim       value heads of another size than the key heads: `AttentionSpec.v_head_dim`
    attention_chunk_size   layers with `AttentionSpec.attention_chunk_size`
    prefill          the prompt part of mixed steps, beside another backend's decode part; see `AttentionBackend.run`
    cross_attention      layers over what an encoder wrote: not causal, and `metadata.encoder_lens` are their lengths
    encoder_attention    layers over the tokens of the step, both ways and without a cache: `run_encoder`

    `batch_invariant` is a promise per kind of graph. With `RuntimeConfig(batch_invariant=True)`, a row's result is
    bitwise the same in all decode graphs of one query_len: at any size, at any place, beside any neighbours. The same
    holds among all mixed steps. Between these kinds nothing is promised, as each may sum in another order.

    Raises: ConfigError for a field of the wrong type, and for an empty tuple.
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

    def __post_init__(self) -> None:
        check_int_field(self, "max_query_len", 1, advice="1 is plain decode")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _ITEMS:
                kind, optional = _ITEMS[field.name]
                _check_items(f"Capabilities.{field.name}", value, kind, optional=optional)
            elif field.name != "max_query_len":
                check_bool_field(self, field.name, advice="say what the backend does")


_ITEMS: dict[str, tuple[type, bool]] = {
    "devices": (str, False),
    "dtypes": (torch.dtype, False),
    "kv_dtypes": (torch.dtype, False),
    "head_dims": (int, True),
    "page_sizes": (int, True),
    "layouts": (KVLayout, False),
}
"""The fields of Capabilities that are tuples: the type of their items, and whether None means any."""


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a backend is built for: the model's layers, the cache, the capacities and the device.

    attention        the spec of every layer, in order
    kv_groups        the spec of every KV group; one where all layers are alike, none where all are encoder layers
    group_of         the KV group of every layer, None for an encoder layer; None where there is one group
    device           where the tensors are
    max_num_reqs     most rows in one step
    max_num_tokens   most new tokens in one step
    max_seq_len      longest sequence; `max_pages` pages
    max_query_len    most new tokens per row in a decode batch: `RuntimeConfig.query_len`
    batch_invariant  see Capabilities and RuntimeConfig
    mixed_batches    whether there are steps whose rows differ in their number of new tokens; see RuntimeConfig
    prefill          the backend serves the prompt part of these steps, and nothing else
    max_encoder_len  most tokens that an encoder writes for a row; 0 without cross layers

    Raises: ConfigError for a field of the wrong type.
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

    def __post_init__(self) -> None:
        _check_items("BackendContext.attention", self.attention, AttentionSpec)
        if self.kv_groups != () or any(spec.is_cached for spec in self.attention):
            _check_items("BackendContext.kv_groups", self.kv_groups, KVCacheSpec)
        if self.group_of is None and len(self.kv_groups) <= 1:
            found = tuple(0 if spec.is_cached else None for spec in self.attention)
            object.__setattr__(self, "group_of", found)
        groups = range(len(self.kv_groups))
        if (
            not isinstance(self.group_of, tuple)
            or len(self.group_of) != len(self.attention)
            or any(
                group not in groups if spec.is_cached else group is not None
                for group, spec in zip(self.group_of, self.attention, strict=True)
            )
        ):
            raise ConfigError(
                f"BackendContext.group_of: expected one of {len(groups)} KV groups for each of {len(self.attention)} "
                f"layers, got {shown(self.group_of)}; pass those of layer_places()"
            )
        check_instance("BackendContext.device", self.device, torch.device, advice="make it a torch.device")
        for name in ("max_num_reqs", "max_num_tokens", "max_seq_len", "max_query_len"):
            check_int_field(self, name, 1, advice="pass the runtime's")
        check_int_field(self, "max_encoder_len", 0, advice="pass the runtime's, 0 without cross layers")
        for name in ("batch_invariant", "mixed_batches", "prefill"):
            check_bool_field(self, name, advice="pass the runtime's")

    def max_pages(self, group: int) -> int:
        """Width of the block table of a KV group."""
        spec = self.kv_groups[group]
        return spec.pages_for(longest_of(spec, self.max_seq_len, self.max_encoder_len))

    @property
    def layers(self) -> Iterator[tuple[AttentionSpec, KVCacheSpec, int]]:
        """The spec of every layer over the cache, with its KV group: the group's spec and number."""
        assert self.group_of is not None, "set at construction"
        for spec, group in zip(self.attention, self.group_of, strict=True):
            if group is not None:
                yield spec, self.kv_groups[group], group


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer as `run` sees it: its spec, and its part of the KV cache.

    index              number of the layer
    spec               heads, head size, dtype and options
    k_cache, v_cache   [num_pages, page_size, num_kv_heads, head_dim]  any strides, the last one 1; an HND cache comes
                       in this view too, with the strides of its layout; values may have another head size. Empty in
                       an encoder layer
    group              its KV group: `metadata.block_tables[group]` names its pages
    writes             whether a step writes its keys and values; False: an earlier layer or an encoder has written what
                       it reads, or it has no cache
    k_scale, v_scale   [1] or [num_kv_heads]  float32  of an fp8 cache: key = stored value * k_scale; None: 1
    alibi_slopes       [num_q_heads]          float32  those of the spec, on the device; None if it has none
    """

    index: int
    spec: AttentionSpec
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    group: int = 0
    writes: bool = True

    def __post_init__(self) -> None:
        if (self.alibi_slopes is None) != (self.spec.alibi_slopes is None):
            have, want = ("none" if x is None else "some" for x in (self.alibi_slopes, self.spec.alibi_slopes))
            raise ConfigError(
                f"AttentionLayer.alibi_slopes: expected {want} as in the spec, got {have}; "
                "make the tensor from spec.alibi_slopes"
            )

    def options(self, sinks: torch.Tensor | None = None) -> AttentionOptions:
        """The layer's options as kernels take them. `sinks` are those of this call: they belong to the model.

        The window of an encoder layer is no option, as it reaches to both sides: see `prompt_attention`.
        """
        causal = self.spec.kind is AttentionKind.DECODER
        return AttentionOptions(
            softmax_scale=self.spec.scale,
            causal=causal,
            sliding_window=self.spec.sliding_window or 0 if causal else 0,
            attention_chunk_size=self.spec.attention_chunk_size or 0,
            logits_softcap=self.spec.logits_softcap or 0.0,
            alibi_slopes=self.alibi_slopes,
            alibi_sqrt=self.spec.alibi_sqrt,
            sinks=sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )


class AttentionBackend(ABC):
    """Base class of attention backends. One instance serves one runtime.

    A subclass declares `name`, `capabilities` and `graph_support`, and defines `run`. All else has a default.
    """

    # 1 What a class declares.

    name: ClassVar[str]
    """What users choose it by: an identifier, the same as the name of its entry point."""
    capabilities: ClassVar[Capabilities]
    """What it can do. The runtime enforces every field."""
    graph_support: ClassVar[GraphSupport]
    """Which of its batches can be captured. The runtime enforces it."""
    seq_len_fill: ClassVar[int] = 0
    """What `metadata.seq_lens` holds in pad rows: 0, or 1 for a kernel that must read something. A length of 1 makes
    it read the null page, whose contents are undefined."""
    quantises_queries: ClassVar[bool] = False
    """Whether queries and probabilities are rounded to e4m3 with an e4m3 cache. The contract suite then allows for it;
    the runtime does not read it."""

    # 2 Questions to the class, before anything is built.

    @classmethod
    def unavailable(cls) -> str | None:
        """Why the backend cannot run in this process at all, as a missing package with its pip command; or None."""
        return None

    @final
    @classmethod
    def unsupported_reasons(cls, context: BackendContext) -> list[str]:
        """Every reason why the backend cannot serve `context`; empty when it can. Subclasses add to
        `extra_unsupported_reasons`."""
        unavailable, also = cls.unavailable(), cls.extra_unsupported_reasons(context)
        if not (isinstance(also, list) and all(isinstance(reason, str) for reason in also)):
            raise ConfigError(
                f"{cls.__name__}.extra_unsupported_reasons: expected a list of reasons, got {shown(also)}; [] is none"
            )
        reasons = [] if unavailable is None else [unavailable]
        return list(dict.fromkeys([*reasons, *refusals(cls.capabilities, context), *also]))

    @classmethod
    def extra_unsupported_reasons(cls, context: BackendContext) -> list[str]:
        """Reasons against `context` that `capabilities` cannot say, as two options that do not go together."""
        return []

    @classmethod
    def why_only_by_name(cls, context: BackendContext) -> str | None:
        """Why the backend is taken for `context` only when it is named, though it could serve; or None."""
        return None

    @classmethod
    def prefill_class(cls) -> type[AttentionBackend] | None:
        """The class that serves the prompt part of mixed steps under this name: this one, another one, or none."""
        return cls if cls.capabilities.prefill else None

    # 3 An instance, before the first step. Overridden methods call super().

    decode_len: int = 0
    """New tokens of the rows that stand first in mixed steps, as a part of their own serves them; 0: there is none."""

    def __init__(self, context: BackendContext) -> None:
        self.context = context

    @final
    def graph_unsupported_reason(self, descriptor: BatchDescriptor) -> str | None:
        """Why a batch of this size cannot be captured, or None. Subclasses define `extra_graph_unsupported_reason`."""
        of_query_len = {0: GraphSupport.ALWAYS, 1: GraphSupport.SINGLE_TOKEN}
        needed = of_query_len.get(descriptor.query_len, GraphSupport.UNIFORM)
        if self.graph_support < needed:
            return f"backend {self.name} has graph support {self.graph_support.name}, {descriptor} needs {needed.name}"
        return self.extra_graph_unsupported_reason(descriptor)

    def extra_graph_unsupported_reason(self, descriptor: BatchDescriptor) -> str | None:
        """A reason against a graph of this size that `graph_support` cannot say, as one of this device; or None."""
        return None

    def allocate(self) -> None:  # noqa: B027  a backend without buffers needs none
        """Allocate every buffer that graphs will hold, for the largest sizes of the context.

        Called before each attempt to capture. After an attempt that failed, drop all that is left of it.
        """

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, every tensor that `schedule` and `run` rewrite in each step before they read it.

        Tests fill these with nonsense between steps. A tensor named "counters" is left alone.
        """
        return {}

    def held(self) -> dict[str, torch.Tensor]:
        """By name, every other tensor of its own that graphs work on: what is written before a step, or once."""
        return {}

    # 4 The verbs of a step. The first two run on the host, the last two are recorded.

    def plan_capture(self, descriptor: BatchDescriptor) -> None:  # noqa: B027
        """Prepare the host's state for a graph of this size, where no lengths are known yet. Not called for either part
        of a mixed step."""

    def plans_on_host(self) -> bool:
        """Whether each step is planned on the host, which must know every row's length then."""
        return type(self).plan_replay is not AttentionBackend.plan_replay

    def plan_replay(self, descriptor: BatchDescriptor, batch: Batch) -> None:  # noqa: B027
        """Prepare the host's state for one step, before its graph is launched. Not called for either part of a mixed
        step.

        Steps before this one may still be running: write to the device in stream order only, and to pinned memory
        only once its last upload is over.

        descriptor  the captured size that serves the batch; pad rows follow the rows of the batch
        batch       the step as host arrays, before the device has checked it
        """

    def schedule(self, metadata: StepMetadata) -> None:  # noqa: B027
        """Record what is computed once per step, as a schedule that all layers share.

        Must be capture-safe: depend on nothing but the descriptor and the contents of tensors, and read no tensor on
        the host. Whatever Python does here happens once, at capture.
        """

    @abstractmethod
    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        metadata: StepMetadata,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Record the attention of one layer: this step's queries over the paged cache, which already holds this
        step's keys and values. Must be capture-safe, as `schedule`.

        q      [padded_tokens, num_q_heads, head_dim]  any strides, the last one 1; anything, NaN too, in pad tokens
        out    [padded_tokens, num_q_heads, head_dim]  written in place; zeros in pad tokens; heads of v_head_dim
        sinks  [num_q_heads]                 float32   given for layers with spec.sinks, and for no others
        lse    [padded_tokens, num_q_heads]  float32   written in place if given, which needs capabilities.lse: natural
                                                       log of the softmax's denominator, sink included; in pad tokens
                                                       -inf, or the sink, all that a row without keys has

        Causal: token i of a row sees positions 0 to seq_len - query_len + i, which is `metadata.positions` of the
        token. A cross layer is not: every token sees positions 0 to encoder_len - 1, and is zero where there are none.
        `layer.options(sinks)` are the other options.

        Keys and values beyond a row's `seq_len`, in the null page and in pages of others may be NaN. None of them may
        reach an output, so mask values as well as scores: zero times NaN is NaN. Pages that lie wholly before what the
        row sees (its window, its chunk) are null pages in the table. Where a KV group drops such pages, its null page
        holds finite numbers: a tile that begins before the window may read it, and need not mask values there.

        As the prompt part of a mixed step (`context.prefill`): `metadata.query_start_loc` begins behind the tokens of
        the decode part, whose rows have no tokens here. These tokens of `out` and `lse` are left as they are.
        """

    def run_encoder(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: StepMetadata,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Record the attention of an encoder layer: each token sees those of its row in this step, on both sides, at a
        distance below spec.sliding_window. Needed with capabilities.encoder_attention. Must be capture-safe.

        k, v   [padded_tokens, num_kv_heads, head_dim]  any strides, the last one 1; anything in pad tokens; values have
               heads of v_head_dim

        Rows begin at `metadata.query_start_loc`. The other arguments are those of `run`.
        """
        raise UnsupportedError(
            f"backend {self.name}: expected no encoder layer, got layer {layer.index}; choose another"
        )

    # 5 The end of a step that failed, and of the runtime.

    def reset(self) -> None:  # noqa: B027
        """Restore what must hold known contents between steps, after an aborted launch. The device is idle."""

    def close(self) -> None:  # noqa: B027  a backend without buffers has none to drop
        """Drop every tensor. Called once, after the last graph is gone."""


def _check_items(name: str, value: object, kind: type, *, optional: bool = False) -> None:
    """Raise ConfigError unless `value` is a tuple of one or more of `kind`, or None where that means any."""
    if optional and value is None:
        return
    if not (isinstance(value, tuple) and value and all(isinstance(x, kind) for x in value)):
        or_any = ", or None for any" if optional else ""
        raise ConfigError(f"{name}: expected a tuple of {kind.__name__}{or_any}, got {shown(value)}; name at least one")
