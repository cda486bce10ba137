"""FlashAttention 3, whose scheduler runs on the device, at the start of the graph, once per step."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch

from graphrt.backends.base import AttentionLayer
from graphrt.backends.capabilities import BackendContext, Capabilities, GraphSupport
from graphrt.backends.peer import Package, PeerBackend
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.errors import CaptureError, UnsupportedError
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec

MAX_SPLITS = 32
"""Maximum number of KV splits per request. The scheduler uses fewer if they suffice."""
WORKSPACE_BYTES = 512 << 20
"""Maximum bytes for the partial results of one call. 2,048 tokens of 32 heads of 128 at 32 splits would take 1.1 GB."""
_TOKENS_PER_SPLIT = 64  # the smallest tile of keys; splits of fewer tokens would be empty
_QUERIES_OF_TILE, _MULTIPROCESSORS = 128, 132  # for an H100 or H200; the kernels run on no other GPU
_E4M3_MAX = 448.0
_SMALLEST_AMAX = 2.0**-40  # attention cannot tell smaller queries from zero

_ScheduleKey = tuple[int, int, int, int, int]
"""Query heads, KV heads, head_dim, window and page size. Layers with the same key share a schedule."""


class FlashAttention3Backend(PeerBackend):
    """`flash_attn_with_kvcache` for every batch, with `get_scheduler_metadata` recorded in the graph.

    The scheduler kernel runs at the start of the graph, once per kind of layer, and computes the splits from the
    lengths of that step. Both calls get the same `num_splits` and the same longest length, the width of the block
    table. With different values, they would use different layouts of the schedule.

    A length of 0 costs nothing. NaN in the tail of a page does not reach outputs, because the kernel loads V by
    predicated copies, which write zeros beyond the length of a request. Its TMA path would load whole pages with their
    tails. The kernel takes that path for long queries and large pages, unless a left padding is given. Such calls
    therefore pass a left padding of zeros.

    An fp8 cache needs fp8 queries. These are scaled per request and KV head by the power of two that brings the largest
    element below 448. The relative error is up to 2^-4 per element. The kernel also rounds the probabilities
    to e4m3. Sinks are rounded to bfloat16, which the kernel takes. docs/backends.md lists the errors and limits.
    """

    name: ClassVar[str] = "flash_attn3"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        kv_dtypes=(torch.float16, torch.bfloat16, torch.float8_e4m3fn),
        head_dims=(64, 128, 192, 256),
        page_sizes=None,
        layouts=(KVLayout.NHD, KVLayout.HND),
        max_query_len=1024,
        sliding_window=True,
        logits_softcap=False,
        mixed=True,
        sinks=True,
        lse=True,
        batch_invariant=True,
        kv_groups=True,
        prefill=True,
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS
    seq_len_fill: ClassVar[int] = 0
    quantizes_queries: ClassVar[bool] = True
    package: ClassVar[Package] = Package(
        "flash_attn_interface",
        "pip install tokenspeed-fa3",
        ("tokenspeed-fa3", "flash-attn-3"),
        (3, 0),
        ("flash_attn_with_kvcache", "get_scheduler_metadata"),
    )
    compute_capability: ClassVar[tuple[int, int]] = (9, 0)

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._layer_keys = [_schedule_key(spec, kv) for spec, kv, _ in context.layers]
        self._kinds = {_schedule_key(spec, kv): (spec, group) for spec, kv, group in context.layers}
        self._kv_dtype = context.kv_groups[0].dtype
        self._fp8 = self._kv_dtype in FP8_DTYPES
        self._schedules: dict[_ScheduleKey, torch.Tensor] = {}
        self._scheduled_for: BatchDescriptor | None = None
        self._no_left_padding: torch.Tensor | None = None
        self._token_rows: torch.Tensor | None = None

    @classmethod
    def extra_unsupported_reasons(cls, context: BackendContext) -> list[str]:
        reasons = super().extra_unsupported_reasons(context)
        if context.device.type == "cuda" and torch.cuda.is_available():
            major = torch.cuda.get_device_capability(context.device)[0]
            if major > 9:
                reasons.append(f"device sm_{major}x: the kernels are compiled for sm_90a, which runs on sm_90 only")
        dtypes = dict.fromkeys(group.dtype for group in context.kv_groups)
        if len(dtypes) > 1:
            reasons.append(f"KV dtypes {', '.join(map(str, dtypes))}: all groups must have the same")
        if not dtypes.keys().isdisjoint(FP8_DTYPES) and any(s.dtype != torch.bfloat16 for s in context.attention):
            reasons.append("KV dtype float8_e4m3fn: outputs are bfloat16, so the layers must be bfloat16")
        if any(spec.sinks for spec in context.attention) and cls.unavailable() is None:
            try:
                taken = inspect.signature(cls.package.load().flash_attn_with_kvcache).parameters
            except UnsupportedError as error:  # another backend may serve
                return [*reasons, str(error)]
            reasons += [] if "sinks" in taken else [f"sinks: not in this build; run {cls.package.install}"]
        return reasons

    def allocate(self) -> None:
        """Import the package, and allocate masks. Graphs own their schedules and partial results."""
        super().allocate()
        self._forget_step()  # tensors of a failed capture
        self._no_left_padding = torch.zeros(self.context.max_num_reqs, dtype=torch.int32, device=self.context.device)

    def held(self) -> dict[str, torch.Tensor]:
        return super().held() | ({} if self._no_left_padding is None else {"left padding": self._no_left_padding})

    def close(self) -> None:
        super().close()
        self._forget_step()
        self._no_left_padding = None

    def _forget_step(self) -> None:
        self._schedules = {}
        self._scheduled_for = self._token_rows = None

    def num_splits(self, descriptor: BatchDescriptor, spec: AttentionSpec) -> int:
        """Return the upper bound of KV splits at one size, which its capture fixes.

        It is the minimum of MAX_SPLITS, the splits that the longest sequence can use, and the splits whose partial
        results fit into WORKSPACE_BYTES. It is 1 in batch-invariant mode, where the order of sums must not depend on
        other requests. It is also 1 for prefill parts whose query tiles already occupy every multiprocessor.
        """
        tiles = descriptor.padded_tokens * spec.num_q_heads // _QUERIES_OF_TILE
        if self.context.batch_invariant or (self.context.prefill and tiles >= _MULTIPROCESSORS):
            return 1
        bytes_per_split = 4 * descriptor.padded_tokens * spec.num_q_heads * (spec.head_dim + 1)
        useful = -(-self.context.max_seq_len // _TOKENS_PER_SPLIT)
        return max(1, min(MAX_SPLITS, useful, WORKSPACE_BYTES // bytes_per_split))

    def schedule(self, metadata: StepMetadata) -> None:
        """Run the scheduler once per kind of layer, and mark the real tokens.

        Capture-safe: the device reads the lengths. The library allocates the schedule in the graph's pool.
        """
        super().schedule(metadata)
        descriptor, mixed = metadata.descriptor, metadata.descriptor.kind is GraphKind.MIXED
        if self._fp8 and mixed:
            tokens = torch.arange(descriptor.padded_tokens, dtype=torch.int32, device=metadata.seq_lens.device)
            rows = torch.searchsorted(metadata.query_start_loc[1:], tokens, right=True)
            self._token_rows = rows.clamp_(max=descriptor.padded_reqs - 1)  # padding tokens come last, and are zeros
        # Drop the tensors of the last step first, so that the graph under capture reuses their memory.
        self._schedules = {}
        for key, (spec, group) in self._kinds.items():
            page_size = self.context.kv_groups[group].page_size
            self._schedules[key] = self._module.get_scheduler_metadata(
                batch_size=descriptor.padded_reqs,
                max_seqlen_q=_max_query_len(descriptor),
                max_seqlen_k=metadata.block_tables[group].shape[1] * page_size,
                num_heads_q=spec.num_q_heads,
                num_heads_kv=spec.num_kv_heads,
                headdim=spec.head_dim,
                cache_seqlens=metadata.seq_lens,
                qkv_dtype=self._kv_dtype,
                cu_seqlens_q=metadata.query_start_loc if mixed else None,
                cache_leftpad=self._left_padding(descriptor, spec, page_size),
                page_size=page_size,
                causal=True,
                window_size=_window(spec),
                num_splits=self.num_splits(descriptor, spec),
            )
        self._scheduled_for = descriptor

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
        """Attend with this step's schedule. Capture-safe: all values that vary between steps are in tensors.

        Raises:
            CaptureError: if `schedule` was not called for this size.
        """
        descriptor, spec = metadata.descriptor, layer.spec
        if self._scheduled_for != descriptor:
            raise CaptureError(
                f"backend {self.name}: expected a schedule for {descriptor}, got {self._scheduled_for}; call "
                "schedule() at the start of the step"
            )
        options: dict[str, Any] = {}
        if self._fp8:
            q, options["q_descale"] = self._quantize(q, spec, metadata)
            for name, scale in (("k_descale", layer.k_scale), ("v_descale", layer.v_scale)):
                if scale is not None:
                    options[name] = scale.view(1, -1).expand(descriptor.padded_reqs, spec.num_kv_heads)
        if sinks is not None:
            # NOTE: every graph records the conversion. Weights may be written between replays, which would make a
            # converted copy stale.
            options["sinks"] = sinks.to(torch.bfloat16)
        mixed = descriptor.kind is GraphKind.MIXED
        if mixed:
            options |= {"cu_seqlens_q": metadata.query_start_loc, "max_seqlen_q": _max_query_len(descriptor)}
        result, sums, *_ = self._module.flash_attn_with_kvcache(
            q if mixed else q.view(descriptor.padded_reqs, descriptor.query_len, *q.shape[1:]),
            layer.k_cache,
            layer.v_cache,
            cache_seqlens=metadata.seq_lens,
            cache_leftpad=self._left_padding(descriptor, spec, layer.k_cache.shape[1]),
            page_table=metadata.block_tables[layer.group],
            softmax_scale=spec.scale,
            causal=True,
            window_size=_window(spec),
            scheduler_metadata=self._schedules[self._layer_keys[layer.index]],
            num_splits=self.num_splits(descriptor, spec),
            return_softmax_lse=True,
            **options,
        )
        sums = sums.transpose(0, 1) if mixed else sums.transpose(1, 2).reshape(out.shape[:2])
        self.write(result.view(out.shape), sums, out, lse)

    def _left_padding(self, descriptor: BatchDescriptor, spec: AttentionSpec, page_size: int) -> torch.Tensor | None:
        """Return zeros if the kernel might load whole pages by TMA, else None.

        The kernel may do so for pages of at least 64 tokens and more than 64 queries per KV head.
        """
        if page_size < 64 or _max_query_len(descriptor) * spec.num_queries_per_kv <= 64:
            return None
        assert self._no_left_padding is not None, "schedule() checks that buffers are allocated"
        return self._no_left_padding[: descriptor.padded_reqs]

    def _quantize(
        self, q: torch.Tensor, spec: AttentionSpec, metadata: StepMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries in e4m3 and their scales [padded_reqs, num_kv_heads].

        Scales are powers of two, so that dividing by them is exact. The scale of a request depends only on its own
        queries. Queries of padding tokens may be NaN, and count as zeros.
        """
        descriptor, heads = metadata.descriptor, spec.num_kv_heads
        rows, live = self._token_rows, self.live(q.shape[0]).view(-1, 1, 1, 1)
        clean = q.unflatten(1, (heads, spec.num_queries_per_kv)).masked_fill(~live, 0.0)
        largest = clean.abs().amax((2, 3)).float()  # per token and KV head
        if descriptor.kind is GraphKind.MIXED:
            assert rows is not None, "schedule() makes them for mixed steps"
            per_req = largest.new_zeros(descriptor.padded_reqs, heads)
            per_req = per_req.scatter_reduce(0, rows[:, None].expand(-1, heads), largest, "amax")
        else:
            per_req = largest.view(descriptor.padded_reqs, descriptor.query_len, heads).amax(1)
        scales = torch.exp2(torch.ceil(torch.log2(per_req.clamp_min(_SMALLEST_AMAX) / _E4M3_MAX)))
        if descriptor.kind is GraphKind.MIXED:
            per_token = scales[rows]
        else:
            per_token = scales.repeat_interleave(descriptor.query_len, 0) if descriptor.query_len > 1 else scales
        return (clean / per_token[:, :, None, None]).to(torch.float8_e4m3fn).view(q.shape), scales


def _schedule_key(spec: AttentionSpec, kv: KVCacheSpec) -> _ScheduleKey:
    return spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.sliding_window or 0, kv.page_size


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """Return the tokens that a query sees before and after its own; -1: unbounded."""
    return (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0)


def _max_query_len(descriptor: BatchDescriptor) -> int:
    """Return the longest query that a graph must allow. In a mixed batch, one request may have all tokens."""
    return descriptor.query_len or descriptor.padded_tokens
