"""FlashAttention 3: its scheduler runs on the device, at the head of the graph, once per step."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch

from graphrt.backends.base import AttentionLayer, BackendContext, Capabilities, GraphSupport
from graphrt.backends.peer import Package, PeerBackend
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.errors import CaptureError, UnsupportedError
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec

MAX_SPLITS = 32
"""Most splits of a row's keys. The scheduler takes fewer where these suffice."""
WORKSPACE_BYTES = 512 << 20
"""Most memory for the partial results of one call. 2,048 tokens of 32 heads of 128 at 32 splits would take 1.1 GB."""
_TOKENS_PER_SPLIT = 64  # no tile of the kernel covers fewer keys: more splits than that would be empty
_QUERIES_OF_TILE, _MULTIPROCESSORS = 128, 132  # of an H100 or H200, which are all that the kernels run on
_E4M3_MAX = 448.0
_SMALLEST_AMAX = 2.0**-40  # attention cannot tell smaller queries from zero

_ScheduleKey = tuple[int, int, int, int, int]
"""What layers must have in common to share a schedule: query heads, KV heads, head_dim, window, page size."""


class FlashAttention3Backend(PeerBackend):
    """`flash_attn_with_kvcache` for every batch, with `get_scheduler_metadata` recorded in the graph.

    The scheduler's kernel is at the head of the graph, once per kind of layer. At each replay it computes the splits
    from that step's lengths, into a tensor that the graph owns. So no copy of a schedule can be stale. Both calls get
    the same `num_splits`, which bounds the splits and sizes the partial results. Both get the same longest length, the
    table's width. With different values they would disagree about the tensor's layout.

    Lengths of 0 make no work. NaN in the tail of a page stays there: the kernel loads V through predicated copies,
    which leave zeros beyond a row's length. Its TMA path would load whole pages, with their tails. The kernel takes
    that path for long queries and large pages, but not with a left padding. So such calls get a left padding, of zeros.

    An fp8 cache needs fp8 queries. They are scaled per row and KV head, by the power of two that brings their largest
    element below 448. Then they are rounded to e4m3: 3 bits of mantissa, a relative error up to 2^-4 per element. The
    kernel rounds the probabilities to e4m3 as well. Outputs are off by some per cent of their spread, which is more
    than with a kernel that converts an fp8 cache to 16 bits.

    Sinks are rounded to bfloat16, which is what the kernel takes. A float32 sink is off by up to 2^-9 of itself, so
    between 8 and 16 its weight is off by up to 3 %.

    Graph nodes per layer, beside the kernel and our select: one merge of the splits, which also zeroes the scheduler's
    semaphore. Where `num_splits` is 1, one fill zeroes the semaphore instead. Few splits save memory, not nodes.

    No softcap and no other head sizes: the build that this was tested with has neither compiled in. There is no public
    way to ask another build.
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
    quantises_queries: ClassVar[bool] = True
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
        """Devices newer than the kernels; layers other than bfloat16 with an fp8 cache; sinks, in builds without."""
        reasons = super().extra_unsupported_reasons(context)
        if context.device.type == "cuda" and torch.cuda.is_available():
            major = torch.cuda.get_device_capability(context.device)[0]
            if major > 9:
                reasons.append(f"device sm_{major}x: the kernels are compiled for sm_90a, which runs on sm_90 alone")
        dtypes = dict.fromkeys(group.dtype for group in context.kv_groups)
        if len(dtypes) > 1:
            reasons.append(f"KV dtypes {', '.join(map(str, dtypes))}: all groups must have one")
        if not dtypes.keys().isdisjoint(FP8_DTYPES) and any(s.dtype != torch.bfloat16 for s in context.attention):
            reasons.append("KV dtype float8_e4m3fn: its output is bfloat16, so the layers must be")
        if any(spec.sinks for spec in context.attention) and cls.unavailable() is None:
            reasons += cls._why_no_sinks()
        return reasons

    @classmethod
    def _why_no_sinks(cls) -> list[str]:
        """Only the imported package knows. That it cannot be imported is a reason too, as others may serve."""
        try:
            taken = inspect.signature(cls.package.load().flash_attn_with_kvcache).parameters
        except UnsupportedError as error:
            return [str(error)]
        return [] if "sinks" in taken else [f"sinks: not in this build; run {cls.package.install}"]

    def allocate(self) -> None:
        """Import the package, and allocate masks. Graphs own their schedules and partial results."""
        super().allocate()
        self._forget_step()  # of a capture that failed
        self._no_left_padding = torch.zeros(self.context.max_num_reqs, dtype=torch.int32, device=self.context.device)

    def held(self) -> dict[str, torch.Tensor]:
        """The zeros that stand for no left padding."""
        return super().held() | ({} if self._no_left_padding is None else {"left padding": self._no_left_padding})

    def close(self) -> None:
        """Drop every tensor."""
        super().close()
        self._forget_step()
        self._no_left_padding = None

    def _forget_step(self) -> None:
        self._schedules = {}
        self._scheduled_for = self._token_rows = None

    def num_splits(self, descriptor: BatchDescriptor, spec: AttentionSpec) -> int:
        """Upper bound of the splits at one size, fixed when that size is captured.

        It is the least of MAX_SPLITS, what the longest sequence can use, and what fits into WORKSPACE_BYTES of partial
        results. It is 1 in batch-invariant mode, so that a row's sums never depend on how busy the device is. It is 1
        too for prompts whose queries alone keep every multiprocessor busy.
        """
        tiles = descriptor.padded_tokens * spec.num_q_heads // _QUERIES_OF_TILE
        if self.context.batch_invariant or (self.context.prefill and tiles >= _MULTIPROCESSORS):
            return 1
        bytes_per_split = 4 * descriptor.padded_tokens * spec.num_q_heads * (spec.head_dim + 1)
        useful = -(-self.context.max_seq_len // _TOKENS_PER_SPLIT)
        return max(1, min(MAX_SPLITS, useful, WORKSPACE_BYTES // bytes_per_split))

    def schedule(self, metadata: StepMetadata) -> None:
        """Record the scheduler once per kind of layer, and the mask of real tokens.

        Capture-safe: lengths are read on the device. The library allocates the schedule in the graph's pool.
        """
        super().schedule(metadata)
        descriptor, mixed = metadata.descriptor, metadata.descriptor.kind is GraphKind.MIXED
        if self._fp8 and mixed:
            tokens = torch.arange(descriptor.padded_tokens, dtype=torch.int32, device=metadata.seq_lens.device)
            rows = torch.searchsorted(metadata.query_start_loc[1:], tokens, right=True)
            self._token_rows = rows.clamp_(max=descriptor.padded_reqs - 1)  # pad tokens come last, and are zeros
        # Dropping the last step's tensors first gives the graph that is being captured their memory.
        self._schedules = {}
        for key, (spec, group) in self._kinds.items():
            self._schedules[key] = self._make_schedule(spec, group, metadata)
        self._scheduled_for = descriptor

    def _make_schedule(self, spec: AttentionSpec, group: int, metadata: StepMetadata) -> torch.Tensor:
        descriptor, page_size = metadata.descriptor, self.context.kv_groups[group].page_size
        result: torch.Tensor = self._module.get_scheduler_metadata(
            batch_size=descriptor.padded_reqs,
            max_seqlen_q=_max_query_len(descriptor),
            max_seqlen_k=metadata.block_tables[group].shape[1] * page_size,
            num_heads_q=spec.num_q_heads,
            num_heads_kv=spec.num_kv_heads,
            headdim=spec.head_dim,
            cache_seqlens=metadata.seq_lens,
            qkv_dtype=self._kv_dtype,
            cu_seqlens_q=metadata.query_start_loc if descriptor.kind is GraphKind.MIXED else None,
            cache_leftpad=self._left_padding(descriptor, spec, page_size),
            page_size=page_size,
            causal=True,
            window_size=_window(spec),
            num_splits=self.num_splits(descriptor, spec),
        )
        return result

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
        """Attend by this step's schedule. Capture-safe: everything that varies is a tensor."""
        descriptor, spec = metadata.descriptor, layer.spec
        if self._scheduled_for != descriptor:
            raise CaptureError(
                f"backend {self.name}: expected a schedule for {descriptor}, got one for {self._scheduled_for}; "
                "call schedule() at the head of the step"
            )
        options: dict[str, Any] = {}
        if self._fp8:
            q, options["q_descale"] = self._quantise(q, spec, metadata)
            for name, scale in (("k_descale", layer.k_scale), ("v_descale", layer.v_scale)):
                if scale is not None:
                    options[name] = scale.view(1, -1).expand(descriptor.padded_reqs, spec.num_kv_heads)
        if sinks is not None:
            # NOTE: every graph records the conversion. A converted copy that is kept would be stale after a write to
            # the weights, which is allowed between replays.
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
        self.write_out(result.view(out.shape), out)
        if lse is not None:
            self.write_lse(sums.transpose(0, 1) if mixed else sums.transpose(1, 2).reshape(lse.shape), lse)

    def _left_padding(self, descriptor: BatchDescriptor, spec: AttentionSpec, page_size: int) -> torch.Tensor | None:
        """Zeros where the kernel might load whole pages by TMA, else None. It might with pages of 64 tokens or more,
        and with more than 64 rows of queries per KV head."""
        if page_size < 64 or _max_query_len(descriptor) * spec.num_queries_per_kv <= 64:
            return None
        assert self._no_left_padding is not None, "schedule() has checked that buffers are allocated"
        return self._no_left_padding[: descriptor.padded_reqs]

    def _quantise(
        self, q: torch.Tensor, spec: AttentionSpec, metadata: StepMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries in e4m3 and their scales [padded_reqs, num_kv_heads], powers of two: dividing by them is exact.

        A row's scale depends on its own queries alone. Queries of pad tokens may be NaN, and count as zeros.
        """
        descriptor, heads = metadata.descriptor, spec.num_kv_heads
        rows, live = self._token_rows, self.live(q.shape[0]).view(-1, 1, 1, 1)
        clean = q.unflatten(1, (heads, spec.num_queries_per_kv)).masked_fill(~live, 0.0)
        largest = clean.abs().amax((2, 3)).float()  # per token and KV head
        if descriptor.kind is GraphKind.MIXED:
            assert rows is not None, "schedule() makes them for mixed steps"
            of_row = largest.new_zeros(descriptor.padded_reqs, heads)
            of_row = of_row.scatter_reduce(0, rows[:, None].expand(-1, heads), largest, "amax")
        else:
            of_row = largest.view(descriptor.padded_reqs, descriptor.query_len, heads).amax(1)
        scales = torch.exp2(torch.ceil(torch.log2(of_row.clamp_min(_SMALLEST_AMAX) / _E4M3_MAX)))
        if descriptor.kind is GraphKind.MIXED:
            of_token = scales[rows]
        else:
            of_token = scales.repeat_interleave(descriptor.query_len, 0) if descriptor.query_len > 1 else scales
        return (clean / of_token[:, :, None, None]).to(torch.float8_e4m3fn).view(q.shape), scales


def _schedule_key(spec: AttentionSpec, kv: KVCacheSpec) -> _ScheduleKey:
    return spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.sliding_window or 0, kv.page_size


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """Tokens that a query sees to its left and right, its own not counted; -1 is no bound."""
    return (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0)


def _max_query_len(descriptor: BatchDescriptor) -> int:
    """The bound that the graph holds: in a mixed batch one row may have every token."""
    return descriptor.query_len or descriptor.padded_tokens
