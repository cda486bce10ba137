"""The sides of the attention benchmark: graphrt, FlashAttention 3 and FlashInfer, each behind one adapter.

The calls of a side run through a cell's layers in turn. What a serving stack does once per step for all layers is done
once per cell, and measured apart.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch

from graphrt.bench.attention_cells import OURS, Cell
from graphrt.bench.attention_inputs import Inputs, check_output
from graphrt.kernels.attention.operators import contiguous_attention, paged_attention
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.errors import UnsupportedError
from graphrt.kernels.native.nvrtc import runs_native
from graphrt.kernels.types import KVLayout

Call = Callable[[], torch.Tensor]

_FA3_SPLITS = (0, 32)  # its heuristic, and what serving stacks set under graphs
_FLASHINFER_CORE_GROUPS = (1, 2, 3, 4, 8)  # query heads per KV head that its kernel for CUDA cores is compiled for
_XQA_PAGE_SIZES = (16, 32, 64, 128)
_XQA_SEMAPHORE_BYTES = 8 << 20
_FLASHINFER_WORKSPACE_BYTES = 512 << 20  # 64 query heads x 256 rows need more than the customary 128 MiB
_PLAN_ROUNDS = 11
_CPU_SMS = 132  # as on an H200: a dry run makes the plans of the real one


@dataclass(frozen=True, slots=True)
class Prepared:
    """One way in which a side runs a cell. All calls can be captured and return what they wrote.

    calls       attention, one call per layer
    schedule    what the device does once per step for all layers, or None
    pdl_calls   the calls with programmatic dependent launch, where the side has it as an option
    plan_us     host time of what it does once per step for all layers, or None
    """

    variant: str
    calls: list[Call]
    schedule: Call | None = None
    pdl_calls: list[Call] = field(default_factory=list)
    plan_us: float | None = None


class Side(Protocol):
    """One implementation. `prepare` leaves nothing to compile or plan to the calls that it returns."""

    name: str

    def prepare(self, cell: Cell, inputs: Inputs) -> list[Prepared]: ...


class GraphrtSide:
    """graphrt's own kernels. The only place of the benchmark that knows their signatures."""

    name = OURS

    def prepare(self, cell: Cell, inputs: Inputs) -> list[Prepared]:
        device = inputs.device
        plan = self._plan(cell, inputs.q.dtype, num_sms(device), runs_native(device))
        starts = _query_starts(inputs) if cell.query_len > 1 else None
        work_list = torch.empty(plan.work_list_words, dtype=torch.int32, device=device)
        workspace = AttentionWorkspace.allocate([plan], device)
        options = AttentionOptions(softmax_scale=inputs.softmax_scale)
        out = torch.empty_like(inputs.q)

        def schedule() -> torch.Tensor:
            schedule_attention(plan, inputs.seq_lens, work_list, query_start_loc=starts)
            return work_list

        def call_of(layer: int, pdl: bool) -> Call:
            def call() -> torch.Tensor:
                paged_attention(
                    inputs.q[layer],
                    inputs.k[layer],
                    inputs.v[layer],
                    inputs.block_table,
                    inputs.seq_lens,
                    out[layer],
                    plan,
                    work_list,
                    workspace,
                    options,
                    query_start_loc=starts,
                    pdl=pdl,
                )
                return out[layer]

            return call

        schedule()
        plain, with_pdl = ([call_of(layer, pdl) for layer in range(inputs.layers)] for pdl in (False, True))
        if starts is not None:
            contiguous = self._contiguous(inputs, starts, plan, options)
            return [Prepared("paged", plain, schedule), contiguous]
        return [Prepared(_variant(plan), plain, schedule, with_pdl)]

    @staticmethod
    def _contiguous(inputs: Inputs, starts: torch.Tensor, plan: AttentionPlan, options: AttentionOptions) -> Prepared:
        """K and V without pages, as the peer takes them."""
        kv_starts = torch.zeros_like(starts)
        kv_starts[1:] = inputs.seq_lens.cumsum(0)
        work_list = torch.empty(plan.work_list_words, dtype=torch.int32, device=inputs.device)
        workspace = AttentionWorkspace.allocate([plan], inputs.device)
        out = torch.empty_like(inputs.q)

        def schedule() -> torch.Tensor:
            schedule_attention(plan, kv_starts, work_list, query_start_loc=starts, seq_lens_are_starts=True)
            return work_list

        def call_of(layer: int) -> Call:
            rows = [inputs.row_kv(layer, row) for row in range(inputs.cell.batch)]
            k, v = (torch.cat(parts) for parts in zip(*rows, strict=True))

            def call() -> torch.Tensor:
                q = inputs.q[layer]
                contiguous_attention(q, k, v, kv_starts, starts, out[layer], plan, work_list, workspace, options)
                return out[layer]

            return call

        schedule()
        return Prepared("contiguous", [call_of(layer) for layer in range(inputs.layers)], schedule)

    @staticmethod
    def _plan(cell: Cell, dtype: torch.dtype, num_sms: int, native: bool) -> AttentionPlan:
        if cell.query_len > 1:
            return AttentionPlan.varlen(
                cell.batch,
                cell.batch * cell.query_len,
                num_q_heads=cell.num_q_heads,
                num_kv_heads=cell.num_kv_heads,
                head_dim=cell.head_dim,
                dtype=dtype,
                num_sms=num_sms,
            )
        return AttentionPlan.decode(
            cell.batch,
            num_q_heads=cell.num_q_heads,
            num_kv_heads=cell.num_kv_heads,
            head_dim=cell.head_dim,
            dtype=dtype,
            kv_dtype=cell.kv_dtype,
            num_sms=num_sms,
            native=native,
        )


def _variant(plan: AttentionPlan) -> str:
    if plan.native is None:
        return f"{plan.schedule.num_parts} parts of {plan.tile.num_warps} warps"
    clusters = f" in clusters of {plan.native.cluster}" if plan.native.cluster > 1 else ""
    return f"{plan.native_blocks} blocks of {plan.native.warps} warps{clusters}"


class Fa3Side:
    """FlashAttention 3 with scheduler metadata, computed once per step for the same number of splits."""

    name = "FA3"

    def __init__(self) -> None:
        self._package = _require("flash_attn_interface", "fa3")

    def prepare(self, cell: Cell, inputs: Inputs) -> list[Prepared]:
        if cell.query_len > 1:
            return [Prepared("", [self._varlen_call(inputs, layer) for layer in range(inputs.layers)])]
        return [self._decode(inputs, splits, causal) for splits in _FA3_SPLITS for causal in (True, False)]

    def _decode(self, inputs: Inputs, splits: int, causal: bool) -> Prepared:
        """`causal` changes no result with one query token, but it takes another kernel."""
        cell = inputs.cell
        fp8 = cell.kv_dtype.itemsize == 1  # q, k and v are then fp8 alike; the output is bf16
        q = inputs.q.to(cell.kv_dtype).unsqueeze(2)
        scales = torch.ones(cell.batch, cell.num_kv_heads, device=inputs.device) if fp8 else None
        # The kernel takes its longest length from the table's width: the metadata must be made for the same one.
        max_seq_len = inputs.block_table.shape[1] * cell.page_size

        def schedule() -> torch.Tensor:
            metadata: torch.Tensor = self._package.get_scheduler_metadata(
                batch_size=cell.batch,
                max_seqlen_q=1,
                max_seqlen_k=max_seq_len,
                num_heads_q=cell.num_q_heads,
                num_heads_kv=cell.num_kv_heads,
                headdim=cell.head_dim,
                cache_seqlens=inputs.seq_lens,
                qkv_dtype=cell.kv_dtype,
                page_size=cell.page_size,
                causal=causal,
                num_splits=splits,
            )
            return metadata

        metadata = schedule()

        def call_of(layer: int) -> Call:
            def call() -> torch.Tensor:
                out: torch.Tensor = self._package.flash_attn_with_kvcache(
                    q[layer],
                    inputs.k[layer],
                    inputs.v[layer],
                    cache_seqlens=inputs.seq_lens,
                    page_table=inputs.block_table,
                    q_descale=scales,
                    k_descale=scales,
                    v_descale=scales,
                    softmax_scale=inputs.softmax_scale,
                    causal=causal,
                    scheduler_metadata=metadata,
                    num_splits=splits,
                )
                return out

            return call

        variant = f"{splits} splits" if splits else "heuristic"
        if causal:
            variant += ", causal"
        return Prepared(variant, [call_of(layer) for layer in range(inputs.layers)], schedule)

    def _varlen_call(self, inputs: Inputs, layer: int) -> Call:
        rows = [inputs.row_kv(layer, row) for row in range(inputs.cell.batch)]
        k, v = (torch.cat(tensors) for tensors in zip(*rows, strict=True))
        starts = _query_starts(inputs)
        kv_starts = torch.nn.functional.pad(inputs.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))

        def call() -> torch.Tensor:
            out: torch.Tensor = self._package.flash_attn_varlen_func(
                inputs.q[layer],
                k,
                v,
                cu_seqlens_q=starts,
                cu_seqlens_k=kv_starts,
                max_seqlen_q=inputs.cell.query_len,
                max_seqlen_k=max(inputs.cell.lengths),
                softmax_scale=inputs.softmax_scale,
                causal=True,
            )
            return out

        return call


class FlashInferSide:
    """FlashInfer's paged decode: in graph mode, planned on the host once per step, on tensor cores and for small groups
    on CUDA cores; and XQA, which needs no plan."""

    name = "FlashInfer"

    def __init__(self, device: torch.device) -> None:
        self._package = _require("flashinfer", "flashinfer")
        self._faults: dict[FlashInferModule, str] = {}
        self._workspace = torch.zeros(_FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._semaphores = torch.zeros(_XQA_SEMAPHORE_BYTES // 4, dtype=torch.uint32, device=device)

    def build(self, cells: Iterable[Cell]) -> float:
        """Compile the modules that the cells need side by side, some 40 s each; returns the seconds it took."""
        start = time.perf_counter()
        wanted = list(
            dict.fromkeys(module for cell in cells if cell.query_len == 1 for module in flashinfer_modules(cell))
        )
        with ThreadPoolExecutor(max(1, len(wanted))) as threads:
            builds = {module: threads.submit(module.spec().build, verbose=False) for module in wanted}
        for module, build in builds.items():
            if (error := build.exception()) is not None:
                self._faults[module] = str(error)[-2000:]
        return time.perf_counter() - start

    def prepare(self, cell: Cell, inputs: Inputs) -> list[Prepared]:
        if cell.query_len > 1:
            raise UnsupportedError("FlashInfer: not part of this comparison")
        prepared, faults = [], []
        for module in flashinfer_modules(cell):
            try:
                if (fault := self._faults.get(module)) is not None:
                    raise UnsupportedError(fault)
                prepared.append(self._xqa(inputs) if module.kernel == "XQA" else self._planned(inputs, module.kernel))
            except torch.AcceleratorError:
                raise
            except Exception as error:  # the other kernels may serve
                faults.append(f"{module.kernel}: {_reason(error)}")
        if not prepared:
            raise UnsupportedError("; ".join(faults))
        return prepared

    def _planned(self, inputs: Inputs, kernel: str) -> Prepared:
        cell = inputs.cell
        wrapper = self._package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            cell.layout.value,
            use_cuda_graph=True,
            use_tensor_cores=kernel == "tensor cores",
            paged_kv_indptr_buffer=torch.empty_like(inputs.page_indptr, device=inputs.device),
            paged_kv_indices_buffer=torch.empty_like(inputs.page_indices),
            paged_kv_last_page_len_buffer=torch.empty_like(inputs.last_page_len, device=inputs.device),
            backend="fa2",  # what "auto" takes on sm_90 with 16-bit queries
        )

        def plan() -> float:
            """Lengths are the host's, as a scheduler has them: on the device they would cost a transfer more."""
            torch.cuda.synchronize(inputs.device)
            start = time.perf_counter()
            wrapper.plan(
                inputs.page_indptr,
                inputs.page_indices,
                inputs.last_page_len,
                cell.num_q_heads,
                cell.num_kv_heads,
                cell.head_dim,
                cell.page_size,
                q_data_type=torch.bfloat16,
                kv_data_type=cell.kv_dtype,
                sm_scale=inputs.softmax_scale,
            )
            return time.perf_counter() - start

        plan()  # loads the module
        plan_us = 1e6 * median(plan() for _ in range(_PLAN_ROUNDS))
        torch.cuda.synchronize(inputs.device)
        out = torch.empty_like(inputs.q)

        def call_of(layer: int) -> Call:
            k, v = inputs.k[layer], inputs.v[layer]
            if cell.layout is KVLayout.HND:
                k, v = k.transpose(1, 2), v.transpose(1, 2)
            return lambda: wrapper.run(inputs.q[layer], (k, v), out=out[layer])

        return Prepared(kernel, [call_of(layer) for layer in range(inputs.layers)], plan_us=plan_us)

    def _xqa(self, inputs: Inputs) -> Prepared:
        cell, out = inputs.cell, torch.empty_like(inputs.q)
        lengths = inputs.seq_lens.to(torch.uint32)[:, None]

        def call_of(layer: int) -> Call:
            def call() -> torch.Tensor:
                self._package.xqa(
                    inputs.q[layer].unsqueeze(1),
                    inputs.k[layer],
                    inputs.v[layer],
                    inputs.block_table,
                    lengths,
                    out[layer].unsqueeze(1),
                    self._workspace,
                    self._semaphores,
                    cell.num_kv_heads,
                    cell.page_size,
                    q_scale=inputs.softmax_scale * cell.head_dim**0.5,
                )
                return out[layer]

            return call

        return Prepared("XQA", [call_of(layer) for layer in range(inputs.layers)])


@dataclass(frozen=True, slots=True)
class FlashInferModule:
    """What FlashInfer compiles: a kernel for a head size and a KV dtype, and of XQA for a page size and group too."""

    kernel: str
    head_dim: int
    kv_dtype: torch.dtype
    page_size: int = 0
    group: int = 0

    def spec(self) -> Any:
        jit = importlib.import_module("flashinfer.jit")
        bf16, no_position_encoding, off = torch.bfloat16, 0, False
        if self.kernel == "XQA":
            xqa = importlib.import_module("flashinfer.jit.xqa")
            return xqa.gen_xqa_module(bf16, self.kv_dtype, self.page_size, self.head_dim, self.group, off, bf16, 1)
        common = (bf16, self.kv_dtype, bf16, torch.int32, self.head_dim, self.head_dim, no_position_encoding)
        if self.kernel == "CUDA cores":
            return jit.gen_batch_decode_module(*common, off, off)
        return jit.gen_batch_prefill_module("fa2", *common, off, off, off)


def flashinfer_modules(cell: Cell) -> list[FlashInferModule]:
    """The ways in which FlashInfer may run a cell; numbers of heads and page sizes are arguments but for XQA."""
    group = cell.num_q_heads // cell.num_kv_heads
    modules = [FlashInferModule("tensor cores", cell.head_dim, cell.kv_dtype)]
    if group in _FLASHINFER_CORE_GROUPS:
        modules.append(FlashInferModule("CUDA cores", cell.head_dim, cell.kv_dtype))
    if cell.page_size in _XQA_PAGE_SIZES:
        modules.append(FlashInferModule("XQA", cell.head_dim, cell.kv_dtype, cell.page_size, group))
    return modules


def num_sms(device: torch.device) -> int:
    """Multiprocessors that our plans are made for."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _CPU_SMS


def prepare_checked(side: Side, cell: Cell, inputs: Inputs) -> tuple[list[Prepared], str | None]:
    """What the side can run, each way checked once, or why it cannot.

    A side that refuses a cell in whatever way, or whose result is wrong, must not end the run of the others. A fault of
    the device does: nothing after it could be believed.
    """
    try:
        every = side.prepare(cell, inputs)
    except torch.AcceleratorError:
        raise
    except Exception as error:
        return [], _reason(error)
    good, reason = [], None
    for prepared in every:
        try:
            for calls in (prepared.calls, prepared.pdl_calls):
                for layer in sorted({0, inputs.layers - 1} if calls else ()):
                    calls[layer]().fill_(math.nan)  # memory is reused: an output of an earlier side would pass
                    check_output(inputs, layer, calls[layer]())
        except torch.AcceleratorError:
            raise
        except Exception as error:
            reason = _reason(error)
        else:
            good.append(prepared)
    return good, None if good else reason


def make_sides(device: torch.device, *, with_peers: bool) -> list[Side]:
    """Our side, and the peers'. Raises: UnsupportedError for a peer that is not installed."""
    return [GraphrtSide(), Fa3Side(), FlashInferSide(device)] if with_peers else [GraphrtSide()]


def spacer_calls(outs: Sequence[torch.Tensor]) -> list[Call]:
    """Small kernels, one per output, that read an element of it: what is subtracted from `spaced_calls`."""
    sink = torch.zeros(1, device=outs[0].device)
    return [partial(_spacer, sink, out) for out in outs]


def spaced_calls(calls: Sequence[Call], device: torch.device) -> list[Call]:
    """The calls, each followed by a small kernel that depends on its output and on which the next call depends.

    It has no programmatic dependent launch, as most kernels that stand between the attentions of a model have none:
    a call cannot hide its start behind the end of the one before.
    """
    sink = torch.zeros(1, device=device)

    def spaced(call: Call) -> torch.Tensor:
        return _spacer(sink, call())

    return [partial(spaced, call) for call in calls]


def _spacer(sink: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return sink.add_(out.view(-1)[:1])


def _query_starts(inputs: Inputs) -> torch.Tensor:
    rows, query_len = inputs.cell.batch, inputs.cell.query_len
    return torch.arange(rows + 1, dtype=torch.int32, device=inputs.device) * query_len


def _require(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a library that it links to is missing
        raise UnsupportedError(
            f'{module}: expected the package, got none ({error}); run pip install "graphrt[{extra}]", or pass '
            "--without-peers to time graphrt alone"
        ) from error


def _reason(error: Exception) -> str:
    """The error's text on one line; a compiler says at the end what is wrong."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-200:]}"
