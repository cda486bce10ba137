"""Adapters for the peers of the attention benchmark: FlashAttention 3 and FlashInfer."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from graphrt.kernels.errors import UnsupportedError
from graphrt.kernels.types import KVLayout
from scripts.rigs.attention_inputs import Inputs
from scripts.rigs.attention_sides import Prepared, calls_into
from scripts.rigs.cells import Cell
from scripts.rigs.measure import reason_of

_FA3_SPLITS = (0, 32)  # 0: FlashAttention's heuristic; 32: the value that serving stacks use with graphs
_FLASHINFER_CORE_GROUPS = (1, 2, 3, 4, 8)  # query heads per KV head for which the CUDA-core kernel is compiled
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
_XQA_PAGE_SIZES = (16, 32, 64, 128)
_XQA_SEMAPHORE_BYTES = 8 << 20
_FLASHINFER_WORKSPACE_BYTES = 512 << 20  # 64 query heads x 256 requests need more than the usual 128 MiB
_PLAN_ROUNDS = 11


class Fa3Side:
    """FlashAttention 3 with scheduler metadata, computed once per step for the same number of splits."""

    name = "FA3"

    def __init__(self) -> None:
        self._package = _require("flash_attn_interface", "fa3")

    def prepare(self, cell: Cell, inputs: Inputs) -> list[Prepared]:
        if cell.query_len > 1:
            return [self._packed_prompts(inputs), self._paged_prompts(inputs)]
        return [self._decode(inputs, splits, causal) for splits in _FA3_SPLITS for causal in (True, False)]

    def _decode(self, inputs: Inputs, splits: int, causal: bool) -> Prepared:
        """`causal` does not change the result for one query token, but it selects another kernel."""
        cell = inputs.cell
        fp8 = cell.kv_dtype.itemsize == 1  # then q, k and v are all fp8; the output is bf16
        q = inputs.q.to(cell.kv_dtype).unsqueeze(2)
        scales = torch.ones(cell.batch, cell.num_kv_heads, device=inputs.device) if fp8 else None
        chunked = {"attention_chunk": cell.attention_chunk_size} if cell.attention_chunk_size else {}
        schedule = partial(
            self._package.get_scheduler_metadata,
            batch_size=cell.batch,
            max_seqlen_q=1,
            # The kernel derives the maximum length from the table width, so the metadata must use the same value.
            max_seqlen_k=inputs.block_table.shape[1] * cell.page_size,
            num_heads_q=cell.num_q_heads,
            num_heads_kv=cell.num_kv_heads,
            headdim=cell.head_dim,
            cache_seqlens=inputs.seq_lens,
            qkv_dtype=cell.kv_dtype,
            page_size=cell.page_size,
            causal=causal,
            num_splits=splits,
            **({"headdim_v": cell.v_head_dim} if cell.v_head_dim else {}),
            **chunked,
        )
        attend = partial(
            self._package.flash_attn_with_kvcache,
            cache_seqlens=inputs.seq_lens,
            page_table=inputs.block_table,
            q_descale=scales,
            k_descale=scales,
            v_descale=scales,
            softmax_scale=inputs.softmax_scale,
            causal=causal,
            scheduler_metadata=schedule(),
            num_splits=splits,
            **chunked,
        )
        calls = [partial(attend, *tensors) for tensors in zip(q, inputs.k, inputs.v, strict=True)]
        variant = (f"{splits} splits" if splits else "heuristic") + (", causal" if causal else "")
        return Prepared(variant, calls, schedule)

    def _packed_prompts(self, inputs: Inputs) -> Prepared:
        attend = partial(
            self._package.flash_attn_varlen_func,
            cu_seqlens_q=inputs.query_starts(),
            cu_seqlens_k=inputs.kv_starts(),
            max_seqlen_q=inputs.cell.query_len,
            max_seqlen_k=max(inputs.cell.lengths),
            softmax_scale=inputs.softmax_scale,
            causal=True,
        )
        layers = range(inputs.layers)
        return Prepared("packed", [partial(attend, inputs.q[layer], *inputs.packed_kv(layer)) for layer in layers])

    def _paged_prompts(self, inputs: Inputs) -> Prepared:
        attend = partial(
            self._package.flash_attn_with_kvcache,
            cache_seqlens=inputs.seq_lens,
            page_table=inputs.block_table,
            cu_seqlens_q=inputs.query_starts(),
            max_seqlen_q=inputs.cell.query_len,
            softmax_scale=inputs.softmax_scale,
            causal=True,
        )
        tensors = zip(inputs.q, inputs.k, inputs.v, strict=True)
        return Prepared("paged", [partial(attend, *of_layer) for of_layer in tensors])


class FlashInferSide:
    """FlashInfer's paged decode in graph mode, planned on the host once per step; and XQA, which needs no plan. Paged
    decode runs on tensor cores and, for few query heads per KV head, on CUDA cores."""

    name = "FlashInfer"

    def __init__(self, device: torch.device) -> None:
        self._package = _require("flashinfer", "flashinfer")
        self._faults: dict[FlashInferModule, str] = {}
        self._workspace = torch.zeros(_FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._semaphores = torch.zeros(_XQA_SEMAPHORE_BYTES // 4, dtype=torch.uint32, device=device)

    def build(self, cells: Iterable[Cell]) -> float:
        """Compile the modules of the cells concurrently, about 40 s each. Returns the seconds it took."""
        start = time.perf_counter()
        wanted = {module for cell in cells if _flashinfer_fault(cell) is None for module in flashinfer_modules(cell)}
        with ThreadPoolExecutor(max(1, len(wanted))) as threads:
            builds = {module: threads.submit(module.spec().build, verbose=False) for module in wanted}
        for module, build in builds.items():
            if (error := build.exception()) is not None:
                self._faults[module] = str(error)[-2000:]
        return time.perf_counter() - start

    def prepare(self, cell: Cell, inputs: Inputs) -> list[Prepared]:
        if (reason := _flashinfer_fault(cell)) is not None:
            raise UnsupportedError(f"FlashInfer: {reason}")
        prepared, faults = [], []
        for module in flashinfer_modules(cell):
            try:
                if (fault := self._faults.get(module)) is not None:
                    raise UnsupportedError(fault)
                prepared.append(self._xqa(inputs) if module.kernel == "XQA" else self._planned(inputs, module.kernel))
            except torch.AcceleratorError:
                raise
            except Exception as error:  # the other kernels may still work
                faults.append(f"{module.kernel}: {reason_of(error)}")
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
            backend="fa2",  # the choice of "auto" on sm_90 with 16-bit queries
        )

        def plan() -> float:
            """Lengths are on the host, as in a scheduler; on the device they would cost an extra transfer."""
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

        def attend(layer: int) -> None:
            k, v = inputs.k[layer], inputs.v[layer]
            if cell.layout is KVLayout.HND:
                k, v = k.transpose(1, 2), v.transpose(1, 2)
            wrapper.run(inputs.q[layer], (k, v), out=out[layer])

        return Prepared(kernel, calls_into(out, attend), plan_us=plan_us)

    def _xqa(self, inputs: Inputs) -> Prepared:
        cell, out = inputs.cell, torch.empty_like(inputs.q)
        lengths = inputs.seq_lens.to(torch.uint32)[:, None]

        def attend(layer: int) -> None:
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

        return Prepared("XQA", calls_into(out, attend))


@dataclass(frozen=True, slots=True)
class FlashInferModule:
    """A FlashInfer module: compiled per head size and KV dtype, for XQA also per page size and query heads per KV
    head."""

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


def _flashinfer_fault(cell: Cell) -> str | None:
    """Return why FlashInfer is skipped, or None."""
    if cell.query_len > 1:
        return "prompts are not part of this comparison"
    if cell.attention_chunk_size:
        return "its paged decode has no chunks"
    if cell.v_head_dim:
        return "its paged decode has one size of heads for K and V"
    sizes = ", ".join(map(str, _FLASHINFER_HEAD_DIMS))
    return None if cell.head_dim in _FLASHINFER_HEAD_DIMS else f"it has heads of {sizes}"


def flashinfer_modules(cell: Cell) -> list[FlashInferModule]:
    """Return the FlashInfer variants for a cell. Head counts and page sizes are run-time arguments except for XQA."""
    group = cell.num_q_heads // cell.num_kv_heads
    modules = [FlashInferModule("tensor cores", cell.head_dim, cell.kv_dtype)]
    if group in _FLASHINFER_CORE_GROUPS:
        modules.append(FlashInferModule("CUDA cores", cell.head_dim, cell.kv_dtype))
    if cell.page_size in _XQA_PAGE_SIZES:
        modules.append(FlashInferModule("XQA", cell.head_dim, cell.kv_dtype, cell.page_size, group))
    return modules


def _require(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a linked library is missing
        raise UnsupportedError(
            f'{module}: import failed ({error}); run pip install "graphrt[{extra}]", or pass '
            "--without-peers to time graphrt alone"
        ) from error
