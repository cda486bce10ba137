"""The contract of attention backends: `AttentionBackend` declares what it supports and computes attention in a step.

A runtime calls a backend in this order. `docs/write_a_backend.md` has a complete example.

    unsupported_reasons(context)           does this class support the model, cache and device?   class method
    __init__(context)
    graph_unsupported_reason(descriptor)   can a batch of this size be captured?                  once per size
    allocate()                             allocate the buffers                                   per capture attempt
      plan_capture(descriptor)             host state of one size                                 for each size
      schedule(metadata)                   recorded at the start of the step                      for each size
      run(layer, q, metadata, ...)         recorded once per layer                                for each size
      run_encoder(layer, q, k, v, ...)     recorded once per encoder layer, which has no cache    for each size
    plan_replay(descriptor, batch)         host state of one step                                 before each step
      (the graph repeats what `schedule` and `run` recorded)
    close()                                drop the buffers                                       once

A step without a graph runs eagerly and calls `plan_capture`, `plan_replay`, `schedule` and `run`.

A mixed step may have two parts, served by different backends: decode requests and prefill requests. Neither backend
plans such a step on the host, because the device reorders the requests. A class that overrides `plan_capture` or
`plan_replay` cannot serve a part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from graphrt.backends.capabilities import BackendContext, Capabilities, GraphSupport
from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.checks import shown
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionKind, AttentionSpec


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """An attention layer that `run` receives: its spec, and its tensors in the KV cache.

    index              index of the layer in the model
    spec               heads, head size, dtype and options
    k_cache, v_cache   [num_pages, page_size, num_kv_heads, head_dim]  last stride 1, other strides arbitrary. An HND
                       cache is also passed as this view, with the strides of its layout. v_cache may have a different
                       head size. Empty in an encoder layer
    group              KV group of the layer; `metadata.block_tables[group]` contains its page ids
    writes             whether a step writes keys and values of this layer. False if an earlier layer or an encoder
                       writes what the layer reads, or if it has no cache
    k_scale, v_scale   [1] or [num_kv_heads]  float32  scales of an fp8 cache: key = stored value * k_scale; None: 1
    alibi_slopes       [num_q_heads]          float32  `spec.alibi_slopes` on the device; None if the spec has none

    Raises:
        ConfigError: if `alibi_slopes` is given although the spec has none, or is missing.
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
            have, want = ("None" if x is None else "a tensor" for x in (self.alibi_slopes, self.spec.alibi_slopes))
            raise ConfigError(
                f"AttentionLayer.alibi_slopes: expected {want}, as in spec.alibi_slopes, got {have}; make the tensor "
                f"from spec.alibi_slopes"
            )

    def options(
        self,
        sinks: torch.Tensor | None = None,
        tree_masks: torch.Tensor | None = None,
        kv_limits: torch.Tensor | None = None,
    ) -> AttentionOptions:
        """Return the layer's options in the form that the kernels take.

        sinks       [num_q_heads] float32: the sinks of this call, which the model owns
        tree_masks  `StepMetadata.tree_masks`; only decoder layers use it
        kv_limits   `StepMetadata.kv_limits`, which replace the causal mask

        The options of an encoder layer have no window, because its window extends to both sides; see
        `prompt_attention`.
        """
        causal = self.spec.kind is AttentionKind.DECODER and kv_limits is None
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
            tree_masks=tree_masks if causal else None,
            kv_limits=kv_limits,
        )


class AttentionBackend(ABC):
    """Base class of attention backends. One instance serves one runtime.

    A subclass declares `name`, `capabilities` and `graph_support`, and defines `run`. Everything else has a default.
    """

    # 1 What a class declares.

    name: ClassVar[str]
    """The name by which users select the backend, an identifier that equals the name of its entry point."""
    capabilities: ClassVar[Capabilities]
    """The capabilities of the backend. The runtime enforces every field."""
    graph_support: ClassVar[GraphSupport]
    """Which batches can be captured. The runtime enforces this."""
    seq_len_fill: ClassVar[int] = 0
    """Value of `metadata.seq_lens` in padding requests: 0, or 1 for a kernel that must read at least one token. With 1,
    the kernel reads the null page, whose contents are undefined."""
    quantizes_queries: ClassVar[bool] = False
    """Whether the backend rounds queries and probabilities to e4m3 if the cache is e4m3. The backend test suite then
    widens its tolerances; the runtime does not read this attribute."""

    # 2 Class methods, called before an instance is built.

    @classmethod
    def unavailable(cls) -> str | None:
        """Return why the backend cannot run in this process (a missing package, with its pip command), or None."""
        return None

    @final
    @classmethod
    def unsupported_reasons(cls, context: BackendContext) -> list[str]:
        """Return every reason why the backend cannot serve `context`; empty if it can.

        Subclasses define `extra_unsupported_reasons` instead of overriding this method.

        Raises:
            ConfigError: if `extra_unsupported_reasons` does not return a list of strings.
        """
        unavailable, also = cls.unavailable(), cls.extra_unsupported_reasons(context)
        if not (isinstance(also, list) and all(isinstance(reason, str) for reason in also)):
            raise ConfigError(
                f"{cls.__name__}.extra_unsupported_reasons: expected a list of str, got {shown(also)}; return [] if "
                "there is no reason"
            )
        reasons = [] if unavailable is None else [unavailable]
        return list(dict.fromkeys([*reasons, *cls.capabilities.unsupported_reasons(context), *also]))

    @classmethod
    def extra_unsupported_reasons(cls, context: BackendContext) -> list[str]:
        """Return reasons against `context` that `capabilities` cannot express, such as two options that exclude each
        other."""
        return []

    @classmethod
    def prefill_class(cls) -> type[AttentionBackend] | None:
        """Return the class that serves the prefill part of mixed steps under this name, which may be this class or
        another; None if there is none."""
        return cls if cls.capabilities.prefill else None

    # 3 An instance, before the first step. Overriding methods call super().

    decode_len: int = 0
    """New tokens per request in the decode part of mixed steps; 0 if mixed steps have one part."""

    def __init__(self, context: BackendContext) -> None:
        self.context = context

    @final
    def graph_unsupported_reason(self, descriptor: BatchDescriptor) -> str | None:
        """Return why a batch of this size cannot be captured, or None.

        Subclasses define `extra_graph_unsupported_reason` instead of overriding this method.
        """
        of_query_len = {0: GraphSupport.ALWAYS, 1: GraphSupport.SINGLE_TOKEN}
        needed = of_query_len.get(descriptor.query_len, GraphSupport.UNIFORM)
        if self.graph_support < needed:
            return f"backend {self.name} has graph support {self.graph_support.name}, {descriptor} needs {needed.name}"
        return self.extra_graph_unsupported_reason(descriptor)

    def extra_graph_unsupported_reason(self, descriptor: BatchDescriptor) -> str | None:
        """Return a reason against a graph of this size that `graph_support` cannot express, or None."""
        return None

    def compiles_ahead(self, descriptor: BatchDescriptor) -> bool:
        """Return whether `schedule` and `run` launch kernels at this size only by `KernelLauncher` and `native.nvrtc`.

        `capture` then calls them in a `compiling_ahead` block, where these launches compile kernels and write nothing.
        """
        return False

    def allocate(self) -> None:  # noqa: B027  a backend without buffers needs none
        """Allocate every buffer that graphs will address, for the largest sizes of the context.

        Called before each capture attempt. After a failed attempt, drop the buffers of that attempt first.
        """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return, by name, every tensor that `schedule` and `run` rewrite in each step before they read it.

        Tests overwrite these with garbage between steps, except a tensor named "counters".
        """
        return {}

    def held(self) -> dict[str, torch.Tensor]:
        """Return, by name, every other tensor of the backend that graphs address, written once or before a step."""
        return {}

    # 4 The methods of a step. The first two run on the host, the last two are recorded.

    def plan_capture(self, descriptor: BatchDescriptor) -> None:  # noqa: B027
        """Prepare host state for a graph of this size. Sequence lengths are not known yet. Not called for the parts of
        a mixed step."""

    def plans_on_host(self) -> bool:
        """Return whether each step is planned on the host, which then has to know the length of every request."""
        return type(self).plan_replay is not AttentionBackend.plan_replay

    def plan_replay(self, descriptor: BatchDescriptor, batch: Batch) -> None:  # noqa: B027
        """Prepare host state for one step, before its graph is launched. Not called for the parts of a mixed step.

        descriptor  the captured size that serves the batch; padding requests follow the requests of the batch
        batch       the step as host arrays; the device has not checked it yet

        Earlier steps may still be running. Write device memory in stream order only. Write pinned memory only after
        its last upload has finished.
        """

    def schedule(self, metadata: StepMetadata) -> None:  # noqa: B027
        """Record the work that is done once per step, such as a schedule that all layers share.

        Must be capture-safe, that is, depend only on the descriptor and the contents of tensors, and read no tensor on
        the host. Python code here runs once, at capture.
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
        """Record the attention of one layer. The queries of this step attend to the paged cache.

        The cache already contains the keys and values of this step. Must be capture-safe, like `schedule`.

        q      [padded_tokens, num_q_heads, head_dim]    last stride 1, other strides arbitrary; any value, including
                                                         NaN, in padding tokens
        out    [padded_tokens, num_q_heads, v_head_dim]  written in place; zeros in padding tokens
        sinks  [num_q_heads]                 float32     given if and only if spec.sinks
        lse    [padded_tokens, num_q_heads]  float32     written in place if given, which needs capabilities.lse: log of
                                                         the softmax denominator, including the sink. Padding tokens
                                                         get -inf, or the sink

        Decoder layers are causal. Token i of a request sees positions 0 to seq_len - query_len + i, which is its own
        position in `metadata.positions`. With `metadata.tree_masks`, it sees the tokens before the step, and only those
        of the step that its mask has. With `metadata.kv_limits`, token t sees the first kv_limits[t] keys. Cross layers
        are not causal. Every token sees positions 0 to encoder_len - 1, and its output is zero if encoder_len is 0.
        `layer.options(sinks)` has the other options.

        Keys and values beyond the `seq_len` of a request, in the null page and in pages of other requests may be NaN.
        None of these may reach an output. Mask values as well as scores, because zero times NaN is NaN. The block table
        has null pages for pages entirely before the window or chunk of a request. If a KV group frees such pages, its
        null page has finite numbers. A tile that starts before the window may then read it without masking values.

        In the prefill part of a mixed step (`context.prefill`), `metadata.query_start_loc[0]` is the number of tokens
        of the decode part, whose requests have no tokens here. `run` does not write these tokens of `out` and `lse`.
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
        """Record the attention of an encoder layer, for capabilities.encoder_attention. Must be capture-safe.

        Each token sees the tokens of its own request in this step, before and after it, at a distance below
        spec.sliding_window.

        k      [padded_tokens, num_kv_heads, head_dim]    last stride 1; any value in padding tokens
        v      [padded_tokens, num_kv_heads, v_head_dim]  last stride 1; any value in padding tokens

        Requests start at `metadata.query_start_loc`. For the other arguments see `run`.

        Raises:
            UnsupportedError: unless a subclass overrides it.
        """
        raise UnsupportedError(
            f"backend {self.name}: layer {layer.index} is an encoder layer, which this backend does not support; "
            "choose another backend"
        )

    # 5 After a failed step, and at the end of the runtime.

    def reset(self) -> None:  # noqa: B027
        """After an aborted launch, restore buffers that must have known contents between steps. The device is idle."""

    def close(self) -> None:  # noqa: B027  a backend without buffers has none to drop
        """Drop every tensor. Called once, after all graphs were destroyed."""
