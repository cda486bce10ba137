"""The contract of an attention backend: capabilities, support level and five verbs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec

if TYPE_CHECKING:
    from graphrt.batch import Batch


class GraphSupport(IntEnum):
    """Which batches a backend serves inside a graph, from none to all."""

    NEVER = 0
    SINGLE_TOKEN = 1  # decode with one new token per row
    UNIFORM = 2  # decode with the same number of new tokens in every row
    ALWAYS = 3  # mixed batches too


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend implements. `why_not` compares a model with it; docs/backends.md is made from it.

    None in `head_dims` and `page_sizes` means any.

    `batch_invariant` is a promise per kind of graph: in that mode a row's result is bitwise the same in all decode
    graphs of one query_len, whatever their size, its place and its neighbours, and in all mixed steps alike. Decode
    graphs of another query_len and mixed steps are other kinds: another kernel, or another order of sums, may run.
    """

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    kv_dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...] | None
    page_sizes: tuple[int, ...] | None
    layouts: tuple[KVLayout, ...]
    max_query_len: int  # largest uniform query_len in decode graphs
    sliding_window: bool
    logits_softcap: bool
    mixed: bool
    alibi: bool = False  # with the distance and with its square root
    sinks: bool = False
    lse: bool = False  # `run` can write the log-sum-exp
    batch_invariant: bool = False  # see above


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a backend is built for: the model's layers, its cache, the capacities and the device."""

    attention: tuple[AttentionSpec, ...]  # one per layer
    kv: KVCacheSpec
    device: torch.device
    max_num_reqs: int
    max_num_tokens: int
    max_seq_len: int
    max_query_len: int = 1  # most new tokens per row in a decode graph
    batch_invariant: bool = False  # see RuntimeConfig

    def __post_init__(self) -> None:
        if not isinstance(self.device, torch.device):
            raise ConfigError(f"BackendContext.device: expected a torch.device, got {self.device!r}; make it one")

    @property
    def max_pages(self) -> int:
        """Width of the block table."""
        return self.kv.pages_for(self.max_seq_len)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer as `run` sees it: its spec and its KV cache, always in the logical NHD view.

    k_cache, v_cache   [num_pages, page_size, num_kv_heads, head_dim]  any strides, the last one 1
    k_scale, v_scale   [1] or [num_kv_heads]  float32  of an fp8 cache; None: 1
    alibi_slopes       [num_q_heads]          float32  those of the spec, on the device; None if it has none
    """

    index: int
    spec: AttentionSpec
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.alibi_slopes is None) != (self.spec.alibi_slopes is None):
            have, want = ("none" if x is None else "some" for x in (self.alibi_slopes, self.spec.alibi_slopes))
            raise ConfigError(
                f"AttentionLayer.alibi_slopes: expected {want} as in the spec, got {have}; "
                "make the tensor from spec.alibi_slopes"
            )

    def options(self, sinks: torch.Tensor | None = None) -> AttentionOptions:
        """The layer's options as kernels take them. `sinks` are those of this call: they belong to the model."""
        return AttentionOptions(
            softmax_scale=self.spec.scale,
            sliding_window=self.spec.sliding_window or 0,
            logits_softcap=self.spec.logits_softcap or 0.0,
            alibi_slopes=self.alibi_slopes,
            alibi_sqrt=self.spec.alibi_sqrt,
            sinks=sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )


class AttentionBackend(ABC):
    """Base class of attention backends. One instance serves one runtime.

    Verbs, in the order in which they are called:

    - `allocate` before the first capture, and again where that failed: every buffer that the backend needs across
      replays.
    - `plan_capture(descriptor)` on the host before a graph of that size is captured (and before an eager step).
    - `plan_replay(descriptor, batch)` on the host before each step; a no-op where nothing is needed there.
    - `schedule(metadata)` recorded once at the head of the step, after the refresh.
    - `run(layer, q, metadata, out, sinks, lse)` recorded once per layer, after the KV write.

    `schedule` and `run` are captured: they must not read device values on the host, and may depend on nothing but the
    descriptor and the contents of tensors.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    graph_support: ClassVar[GraphSupport]
    seq_len_fill: ClassVar[int] = 0
    """Safe `seq_lens` of a pad row: 0 where the kernel exits on 0, else 1 (the null page is then read)."""
    nan_safe_tail: ClassVar[bool] = True
    """Whether the unfilled tail of an owned page may hold NaN: a kernel that masks scores alone multiplies it by zero,
    which is NaN. The contract asks for True; False says that the caller must zero pages before it hands them out."""

    def __init__(self, context: BackendContext) -> None:
        self.context = context

    @classmethod
    def unavailable(cls) -> str | None:
        """Why the backend cannot run in this process at all (missing package, no device), or None."""
        return None

    @classmethod
    def why_not(cls, context: BackendContext) -> list[str]:
        """Every reason why the backend cannot serve `context`; empty when it can."""
        reasons = [r for r in (cls.unavailable(),) if r is not None]
        have, kv = cls.capabilities, context.kv
        if context.device.type not in have.devices:
            reasons.append(f"device {context.device.type}: runs on {', '.join(have.devices)} only")
        if have.page_sizes is not None and kv.page_size not in have.page_sizes:
            reasons.append(f"page_size {kv.page_size}: supports {listing(have.page_sizes)}")
        if kv.layout not in have.layouts:
            reasons.append(f"layout {kv.layout.value}: supports {listing([x.value for x in have.layouts])}")
        if kv.dtype not in have.kv_dtypes:
            reasons.append(f"KV dtype {kv.dtype}: supports {listing(have.kv_dtypes)}")
        for spec in dict.fromkeys(context.attention):
            if spec.dtype not in have.dtypes:
                reasons.append(f"dtype {spec.dtype}: supports {listing(have.dtypes)}")
            if have.head_dims is not None and spec.head_dim not in have.head_dims:
                reasons.append(f"head_dim {spec.head_dim}: supports {listing(have.head_dims)}")
            if spec.sliding_window is not None and not have.sliding_window:
                reasons.append(f"sliding_window {spec.sliding_window}: not supported")
            if spec.logits_softcap is not None and not have.logits_softcap:
                reasons.append(f"logits_softcap {spec.logits_softcap}: not supported")
            if spec.alibi_slopes is not None and not have.alibi:
                reasons.append("alibi_slopes: not supported")
                if spec.alibi_sqrt:
                    reasons.append("alibi_sqrt: not supported")
            if spec.sinks and not have.sinks:
                reasons.append("sinks: not supported")
        if context.max_query_len > have.max_query_len:
            reasons.append(f"query_len {context.max_query_len}: decodes at most {have.max_query_len} tokens per row")
        if context.batch_invariant and not have.batch_invariant:
            reasons.append("batch_invariant: not supported")
        return list(dict.fromkeys(reasons))

    @classmethod
    def why_only_by_name(cls, context: BackendContext) -> str | None:
        """Why the backend, though it can serve `context`, is not chosen unless it is named, or None."""
        return None

    def why_not_graph(self, descriptor: BatchDescriptor) -> str | None:
        """Why a batch of this descriptor cannot be captured with this backend, or None."""
        needed = GraphSupport.ALWAYS
        if descriptor.query_len == 1:
            needed = GraphSupport.SINGLE_TOKEN
        elif descriptor.query_len > 1:
            needed = GraphSupport.UNIFORM
        if self.graph_support < needed:
            return f"backend {self.name} has graph support {self.graph_support.name}, {descriptor} needs {needed.name}"
        if descriptor.query_len > self.capabilities.max_query_len:
            return f"backend {self.name} decodes at most {self.capabilities.max_query_len} tokens per row"
        return None

    def allocate(self) -> None:  # noqa: B027  a backend without buffers needs none
        """Allocate every buffer that graphs will hold, and forget what is left of a capture that failed, if any.

        Called once before each attempt to capture.
        """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that the backend keeps across replays, by name, so that an audit can find and poison it."""
        return {}

    def reset(self) -> None:  # noqa: B027
        """Restore what must hold known contents between steps, after an aborted launch. The device is idle."""

    def close(self) -> None:  # noqa: B027  a backend without buffers has none to drop
        """Drop every tensor of `tensors()`. Called once, after the last graph is gone."""

    def plan_capture(self, descriptor: BatchDescriptor) -> None:  # noqa: B027
        """Prepare host-side state for a graph of this size."""

    def plan_replay(self, descriptor: BatchDescriptor, batch: Batch) -> None:  # noqa: B027
        """Prepare host-side state for one step."""

    def schedule(self, metadata: StepMetadata) -> None:  # noqa: B027
        """Record the device-side schedule of the step."""

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
        """Attend with the queries of this step to the paged cache, which already holds this step's K and V.

        q      [padded_tokens, num_q_heads, head_dim]
        out    [padded_tokens, num_q_heads, head_dim]  written in place; zeros in pad tokens
        sinks  [num_q_heads]                 float32   given for layers with spec.sinks, and for no others
        lse    [padded_tokens, num_q_heads]  float32   written in place if given, which needs capabilities.lse: natural
                                                       log of the softmax's denominator, sink included; in pad tokens
                                                       -inf, or the sink, all that a row without keys has

        Causal: token i of a row sees positions 0 to seq_len - query_len + i. `layer.options(sinks)` are the options.
        """


def listing(values: Sequence[object]) -> str:
    """The values as errors and docs/backends.md show them: many multiples of a number as such."""
    if len(values) > 4 and isinstance(first := values[0], int) and isinstance(last := values[-1], int):
        step = (last - first) // (len(values) - 1)
        if step > 0 and first % step == 0 and tuple(values) == tuple(range(first, last + 1, step)):
            return f"multiples of {step} from {first} to {last}"
    return ", ".join(str(v) for v in values)
