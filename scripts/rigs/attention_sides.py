"""Sides of the attention benchmark: their interface, graphrt as a side, and the check before timing.

The calls of a side run through the layers of a cell in rotation. Work that a serving stack does once per step for all
layers is done once per cell and measured separately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch

from graphrt.bench.timer import Call
from graphrt.kernels.attention.operators import contiguous_attention, paged_attention
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.prompt import prompt_attention
from graphrt.kernels.attention.prompt_native import runs_prompt_kernel
from graphrt.kernels.attention.prompt_plan import PromptPlan
from graphrt.kernels.attention.prompt_schedule import schedule_prompt
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.native.nvrtc import runs_native
from scripts.rigs.attention_inputs import Inputs, check_output
from scripts.rigs.attention_results import OURS
from scripts.rigs.cells import Cell

_CPU_SMS = 132  # as on an H200, so that a dry run makes the same plans


@dataclass(frozen=True, slots=True)
class Prepared:
    """One variant of a side for a cell. All calls can be captured and return their outputs.

    calls       attention, one call per layer
    schedule    per-step device work for all layers, or None
    pdl_calls   the calls with programmatic dependent launch, if the side has this option
    plan_us     host time of the per-step work for all layers, or None
    """

    variant: str
    calls: list[Call]
    schedule: Call | None = None
    pdl_calls: list[Call] = field(default_factory=list)
    plan_us: float | None = None


class Side(Protocol):
    """An implementation. The calls that `prepare` returns neither compile nor plan."""

    name: str

    def prepare(self, cell: Cell, inputs: Inputs) -> list[Prepared]: ...


class GraphrtSide:
    """graphrt's kernels. Only this class of the benchmark uses their signatures."""

    name = OURS

    def prepare(self, cell: Cell, inputs: Inputs) -> list[Prepared]:
        device = inputs.device
        plan = self._plan(cell, inputs.q.dtype, num_sms(device), runs_native(device))
        starts = inputs.query_starts() if cell.query_len > 1 else None
        work_list = torch.empty(plan.work_list_words, dtype=torch.int32, device=device)
        workspace = AttentionWorkspace.allocate([plan], device)
        chunk = cell.attention_chunk_size
        options = AttentionOptions(softmax_scale=inputs.softmax_scale, attention_chunk_size=chunk)
        out = inputs.empty_out()

        def schedule() -> torch.Tensor:
            schedule_attention(plan, inputs.seq_lens, work_list, query_start_loc=starts, attention_chunk_size=chunk)
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
            prompts = [self._prompts(inputs, starts, options, packed) for packed in (False, True)]
            return [Prepared("paged", plain, schedule), contiguous, *prompts]
        return [Prepared(_variant(plan), plain, schedule, with_pdl)]

    @staticmethod
    def _contiguous(inputs: Inputs, starts: torch.Tensor, plan: AttentionPlan, options: AttentionOptions) -> Prepared:
        """Contiguous K and V, as the peer expects them."""
        kv_starts = inputs.kv_starts()
        work_list = torch.empty(plan.work_list_words, dtype=torch.int32, device=inputs.device)
        workspace = AttentionWorkspace.allocate([plan], inputs.device)
        out = inputs.empty_out()

        def schedule() -> torch.Tensor:
            schedule_attention(plan, kv_starts, work_list, query_start_loc=starts, seq_lens_are_starts=True)
            return work_list

        def call_of(layer: int) -> Call:
            k, v = inputs.packed_kv(layer)

            def call() -> torch.Tensor:
                q = inputs.q[layer]
                contiguous_attention(q, k, v, kv_starts, starts, out[layer], plan, work_list, workspace, options)
                return out[layer]

            return call

        schedule()
        return Prepared("contiguous", [call_of(layer) for layer in range(inputs.layers)], schedule)

    @staticmethod
    def _prompts(inputs: Inputs, starts: torch.Tensor, options: AttentionOptions, packed: bool) -> Prepared:
        """The prompt kernel, over pages or over packed keys."""
        cell, device = inputs.cell, inputs.device
        plan = PromptPlan.make(
            cell.batch,
            inputs.q.shape[1],
            num_q_heads=cell.num_q_heads,
            num_kv_heads=cell.num_kv_heads,
            head_dim=cell.head_dim,
            dtype=inputs.q.dtype,
            kv_dtype=cell.kv_dtype,
            num_sms=num_sms(device),
            native=runs_prompt_kernel(device),
        )
        lens = inputs.kv_starts() if packed else inputs.seq_lens
        units = torch.empty(plan.schedule_words, dtype=torch.int32, device=device)
        out = torch.empty_like(inputs.q)

        def schedule() -> torch.Tensor:
            schedule_prompt(plan, lens, starts, units, seq_lens_are_starts=packed)
            return units

        def call_of(layer: int) -> Call:
            k, v = inputs.packed_kv(layer) if packed else (inputs.k[layer], inputs.v[layer])
            table = None if packed else inputs.block_table

            def call() -> torch.Tensor:
                prompt_attention(inputs.q[layer], k, v, out[layer], plan, units, options, block_table=table)
                return out[layer]

            return call

        schedule()
        variant = f"prompts, {'packed' if packed else 'paged'}"
        return Prepared(variant, [call_of(layer) for layer in range(inputs.layers)], schedule)

    @staticmethod
    def _plan(cell: Cell, dtype: torch.dtype, num_sms: int, native: bool) -> AttentionPlan:
        if cell.query_len > 1:
            return AttentionPlan.varlen(
                cell.batch,
                cell.batch * cell.query_len,
                num_q_heads=cell.num_q_heads,
                num_kv_heads=cell.num_kv_heads,
                head_dim=cell.head_dim,
                v_head_dim=cell.head_dims[1],
                dtype=dtype,
                num_sms=num_sms,
            )
        return AttentionPlan.decode(
            cell.batch,
            num_q_heads=cell.num_q_heads,
            num_kv_heads=cell.num_kv_heads,
            head_dim=cell.head_dim,
            v_head_dim=cell.head_dims[1],
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


def prepare_checked(side: Side, cell: Cell, inputs: Inputs) -> tuple[list[Prepared], str | None]:
    """Return the variants that the side can run, each checked once, or the reason why it cannot.

    A side that refuses a cell or returns a wrong result must not end the run of the others. A device fault does: later
    results would be unreliable.
    """
    try:
        every = side.prepare(cell, inputs)
    except torch.AcceleratorError:
        raise
    except Exception as error:
        return [], reason_of(error)
    good, reason = [], None
    for prepared in every:
        try:
            for calls in (prepared.calls, prepared.pdl_calls):
                for layer in sorted({0, inputs.layers - 1} if calls else ()):
                    calls[layer]().fill_(math.nan)  # reused memory may hold another side's correct output
                    check_output(inputs, layer, calls[layer]())
        except torch.AcceleratorError:
            raise
        except Exception as error:
            reason = reason_of(error)
        else:
            good.append(prepared)
    return good, None if good else reason


def reason_of(error: Exception) -> str:
    """Return the error text on one line. Compilers state the cause at the end."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-200:]}"


def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors for which plans are made."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _CPU_SMS
