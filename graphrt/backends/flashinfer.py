"""FlashInfer, whose host code plans the schedule before every step, from the lengths in the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from graphrt.backends.base import AttentionLayer
from graphrt.backends.capabilities import BackendContext, Capabilities, GraphSupport
from graphrt.backends.peer import Package, PeerBackend
from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.capture.staging import StagingSlot
from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.errors import CaptureError, ReplayError, UnsupportedError
from graphrt.kernels.metadata.page_list import list_pages
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata

_SMALLEST_WORKSPACE = 128 << 20  # the size that FlashInfer's documentation recommends
_CPU_SMS = 132  # assumed without a GPU, for tests
_TENSOR_CORE_BACKEND = "fa2"  # the library's own choice for 16-bit queries before sm_100

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Buffers that all wrappers share.

    workspace      [bytes]                     uint8   partial results
    indptr         [max_num_reqs + 1]          int32   offset of each request's first page id in `indices`
    indices        [max_num_reqs * max_pages]  int32   page ids of all requests
    last_page_len  [max_num_reqs]              int32   tokens in the last page of each request
    slot           pinned memory of the plan's lengths; its event guards the pinned memory of every wrapper too
    """

    workspace: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    slot: StagingSlot


class FlashInferBackend(PeerBackend):
    """BatchDecodeWithPagedKVCacheWrapper in graph mode on tensor cores; mixed batches eagerly by the prefill wrapper.

    Three steps write the inputs of the kernel, each to its own buffers:

        plan()       in `plan_replay`   offsets (`indptr`), lengths of last pages, and the plan itself
        the refresh  in the graph       page ids, to the block table
        `schedule`   in the graph       `indices`: all page ids as one list, by the offsets of the plan

    There is one wrapper per captured size. All share the float workspace and the plan memory, on the device and pinned,
    because steps run in order on one stream, and each step uploads its plan first. The next plan waits for an event
    after that upload, so the host runs at most one step ahead.

    Padding requests are planned as one token in the null page, because this kernel has read out of bounds for length 0.
    Their output is zeroed. NaN in the tail of a page does not reach outputs, because V is loaded with zeros beyond the
    length of a request.
    """

    name: ClassVar[str] = "flashinfer"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        kv_dtypes=(torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        head_dims=(64, 128, 256),
        page_sizes=None,
        layouts=(KVLayout.NHD, KVLayout.HND),
        max_query_len=1,
        sliding_window=True,
        logits_softcap=True,
        mixed=True,
        lse=True,
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.SINGLE_TOKEN
    seq_len_fill: ClassVar[int] = 1
    package: ClassVar[Package] = Package(
        "flashinfer",
        "pip install flashinfer-python",
        ("flashinfer-python", "flashinfer_python"),
        (0, 6),
        ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"),
    )
    compute_capability: ClassVar[tuple[int, int]] = (8, 0)

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._spec, self._kv = context.attention[0], context.kv_groups[0]
        self._buffers: _Buffers | None = None
        self._wrappers: dict[int, Any] = {}
        self._layouts: dict[int, tuple[int, ...]] = {}
        self._prefill: Any = None
        self._shared: tuple[Any, Any] | None = None
        self._planned_rows = self._planned_tokens = 0

    @classmethod
    def extra_unsupported_reasons(cls, context: BackendContext) -> list[str]:
        reasons = super().extra_unsupported_reasons(context)
        for field in ("num_q_heads", "dtype", "sliding_window", "logits_softcap", "scale"):
            values = list(dict.fromkeys(getattr(spec, field) for spec in context.attention))
            if len(values) > 1:
                reasons.append(f"{field} {', '.join(map(str, values))}: must be equal, one plan serves all layers")
        return reasons

    def allocate(self) -> None:
        """Import the package and allocate the shared buffers. Drops wrappers and buffers of a failed capture."""
        self._drop()
        super().allocate()
        context, device, rows = self.context, self.context.device, self.context.max_num_reqs
        self._buffers = _Buffers(
            workspace=torch.zeros(self._workspace_bytes(), dtype=torch.uint8, device=device),
            indptr=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            indices=torch.zeros(rows * context.max_pages(0), dtype=torch.int32, device=device),
            last_page_len=torch.ones(rows, dtype=torch.int32, device=device),
            slot=StagingSlot.allocate(3 * rows + 2, device),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        return super().tensors() | ({} if self._buffers is None else {"indices": self._buffers.indices})

    def held(self) -> dict[str, torch.Tensor]:
        if self._buffers is None:
            return {}
        names = ("workspace", "indptr", "last_page_len")
        shared: dict[str, torch.Tensor] = {} if self._shared is None else {"plan": self._shared[0]}
        return super().held() | {name: getattr(self._buffers, name) for name in names} | shared

    def close(self) -> None:
        self._drop()
        super().close()

    def _drop(self) -> None:
        """Drop buffers, wrappers and plans, after the last upload from pinned memory."""
        if self._buffers is not None:
            self._buffers.slot.wait()
        self._wrappers, self._layouts, self._prefill, self._shared, self._buffers = {}, {}, None, None, None
        self._planned_rows = self._planned_tokens = 0

    def plan_capture(self, descriptor: BatchDescriptor) -> None:
        """Make the wrapper of this size, compile its kernels, and plan requests of one token.

        A graph contains the address of the plan, not its contents. Mixed steps are never captured and need no plan
        here.
        """
        if descriptor.kind is GraphKind.DECODE:
            self._plan_decode(descriptor.padded_reqs, np.ones(descriptor.padded_reqs, np.int32))

    def plan_replay(self, descriptor: BatchDescriptor, batch: Batch) -> None:
        """Plan the step from the lengths in the batch, with padding requests of one token in the null page.

        Raises:
            ReplayError: if the layout of the plan differs from the captured one.
        """
        if descriptor.kind is GraphKind.MIXED:
            self._plan_mixed(batch)
            return
        seq_lens = np.ones(descriptor.padded_reqs, np.int32)
        # The refresh rejects lengths below 1; plan such a request as padding, so that no offset is negative.
        np.maximum(batch.seq_lens, 1, out=seq_lens[: batch.num_reqs])
        self._plan_decode(descriptor.padded_reqs, seq_lens)

    def schedule(self, metadata: StepMetadata) -> None:
        """List the page ids of all requests, in one launch. Capture-safe: the device reads the offsets."""
        super().schedule(metadata)
        buffers = self._have_buffers()
        rows = self._planned_rows if metadata.descriptor.kind is GraphKind.MIXED else metadata.descriptor.padded_reqs
        list_pages(metadata.block_tables[0][:rows], buffers.indptr[: rows + 1], buffers.indices)

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
        """Attend with the plan. Capture-safe in decode steps, because the device reads the plan.

        The wrappers take the scales of the cache as Python numbers, which would be constants in a graph. The key scale
        is therefore multiplied into the queries, and the value scale into the output, on the device.

        Raises:
            CaptureError: if no plan of this size was made.
        """
        mixed = metadata.descriptor.kind is GraphKind.MIXED
        wrapper = self._prefill if mixed else self._wrappers.get(metadata.descriptor.padded_reqs)
        if wrapper is None:
            raise CaptureError(
                f"backend {self.name}: there is no plan for {metadata.descriptor}; call plan_capture() first"
            )
        k, v = layer.k_cache, layer.v_cache
        if self._kv.layout is KVLayout.HND:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        real = self._planned_tokens if mixed else q.shape[0]
        if layer.k_scale is not None:
            q = _scaled(q, layer.k_scale, torch.empty_like(q, memory_format=torch.contiguous_format))
        result, sums = wrapper.run(q[:real], (k, v), return_lse=True)
        if layer.v_scale is not None:
            result = _scaled(result, layer.v_scale, torch.empty_like(result, dtype=out.dtype))
        out[real:].zero_()
        if lse is not None:
            lse[real:].fill_(-math.inf)
            sums = sums * math.log(2.0)  # FlashInfer returns the logarithm to base 2
        self.write(result.to(out.dtype), sums, out[:real], None if lse is None else lse[:real])

    def _plan_decode(self, rows: int, seq_lens: Int32Array) -> None:
        buffers, wrapper = self._have_buffers(), self._wrappers.get(rows)
        if wrapper is None:
            wrapper = self._wrappers[rows] = self._share(
                self._module.BatchDecodeWithPagedKVCacheWrapper(
                    buffers.workspace,
                    self._kv.layout.value,
                    use_cuda_graph=True,
                    use_tensor_cores=True,
                    paged_kv_indptr_buffer=buffers.indptr[: rows + 1],
                    paged_kv_indices_buffer=buffers.indices,
                    paged_kv_last_page_len_buffer=buffers.last_page_len[:rows],
                    backend=_TENSOR_CORE_BACKEND,
                )
            )
        indptr, last_page_len, _ = self._write_lengths(seq_lens, np.ones(rows, np.int32))
        with buffers.slot.in_flight(self._stream()):
            self._plan(wrapper, indptr, buffers.indices[:0], last_page_len)  # the refresh writes the page ids
        layout = self._layout(wrapper)
        if layout != self._layouts.setdefault(rows, layout):
            raise ReplayError(
                f"plan of {rows} requests: expected the layout {self._layouts[rows]} of the captured plan, got "
                f"{layout}; the layout of plans depends on lengths in this version of flashinfer; report this as a bug"
            )

    def _layout(self, wrapper: Any) -> tuple[int, ...]:
        """Return the offsets of a plan in its memory, which replays must not change. There is no public API for it."""
        try:
            layout = tuple(map(int, wrapper._plan_info))
        except (AttributeError, TypeError, ValueError):
            layout = ()
        if not layout:
            raise self._other_version("layout of a plan as numbers in _plan_info")
        return layout

    def _other_version(self, wanted: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.package.module}: this version has no {wanted}; install version 0.6.4, or choose another backend"
        )

    def _plan_mixed(self, batch: Batch) -> None:
        """Plan an eager mixed step, without padding."""
        buffers = self._have_buffers()
        self._planned_rows, self._planned_tokens = batch.num_reqs, batch.num_tokens
        if self._prefill is None:
            make = self._module.BatchPrefillWithPagedKVCacheWrapper
            self._prefill = self._share(make(buffers.workspace, self._kv.layout.value, backend=_TENSOR_CORE_BACKEND))
        indptr, last_page_len, query_starts = self._write_lengths(np.maximum(batch.seq_lens, 1), batch.query_lens)
        with buffers.slot.in_flight(self._stream()):
            buffers.indptr[: len(indptr)].copy_(indptr, non_blocking=True)  # for `schedule`; the wrapper has a copy
            self._plan(self._prefill, query_starts, indptr, buffers.indices, last_page_len, causal=True)

    def _plan(self, wrapper: Any, *lengths_and_pages: torch.Tensor, **options: Any) -> None:
        spec, stored = self._spec, self._kv.dtype
        wrapper.plan(
            *lengths_and_pages,
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self._kv.page_size,
            q_data_type=spec.dtype,
            kv_data_type=stored,
            # Partial results have the dtype of the output, before the value scale. float16 can represent any mean of
            # fp8 values, and has a smaller rounding error than bfloat16.
            o_data_type=torch.float16 if stored in FP8_DTYPES else spec.dtype,
            sm_scale=spec.scale,
            window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
            logits_soft_cap=spec.logits_softcap or 0.0,
            **options,
        )

    def _write_lengths(
        self, seq_lens: Int32Array, query_lens: Int32Array
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Write page offsets, lengths of last pages and query offsets to pinned memory, after its last upload."""
        slot = self._have_buffers().slot
        slot.wait()
        n, page_size, words = len(seq_lens), self._kv.page_size, slot.inputs
        pages = -(-seq_lens // page_size)
        words[0] = 0
        np.cumsum(pages, out=words[1 : n + 1])
        words[n + 1 : 2 * n + 1] = seq_lens - (pages - 1) * page_size
        words[2 * n + 1] = 0
        np.cumsum(query_lens, out=words[2 * n + 2 : 3 * n + 2])
        host = slot.inputs_tensor
        return host[: n + 1], host[n + 1 : 2 * n + 1], host[2 * n + 1 : 3 * n + 2]

    def _share(self, wrapper: Any) -> Any:
        """Let a wrapper use the plan memory of the first wrapper, which saves 8 MB on the device and 8 MB pinned.

        The event of `_Buffers.slot` then guards every wrapper. No public API shares the pinned half.
        """
        names = ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer")
        if not all(hasattr(wrapper, name) for name in names):
            raise self._other_version(f"{' and '.join(names)} in its wrappers")
        if self._shared is None:
            self._shared = getattr(wrapper, names[0]), getattr(wrapper, names[1])
        for name, buffer in zip(names, self._shared, strict=True):
            setattr(wrapper, name, buffer)
        return wrapper

    def _workspace_bytes(self) -> int:
        """Return the bytes for partial results of the largest step, with one query tile per query head and program.

        An estimate suffices, because plan() raises if the workspace is too small.
        """
        spec, device = self._spec, self.context.device
        sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _CPU_SMS
        programs = -(-2 * sms // spec.num_kv_heads)
        tile = 16 if spec.num_queries_per_kv <= 16 else 64 if spec.num_queries_per_kv <= 64 else 128
        decode_tiles = max(programs, self.context.max_num_reqs * (1 + -(-spec.num_queries_per_kv // tile))) * tile
        tiles = max(decode_tiles, programs * 128)
        return max(_SMALLEST_WORKSPACE, 4 * spec.num_q_heads * tiles * (spec.head_dim + 1) + (1 << 20))

    def _have_buffers(self) -> _Buffers:
        assert self._buffers is not None, "allocate() makes them"
        return self._buffers

    def _stream(self) -> torch.cuda.Stream | None:
        device = self.context.device
        return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _scaled(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write x [tokens, num_q_heads, head_dim] times a scale [1] or [num_kv_heads] to `out`, rounded once."""
    heads = scale.shape[0]
    torch.mul(x.unflatten(1, (heads, -1)), scale.view(-1, 1, 1), out=out.unflatten(1, (heads, -1)))
    return out
