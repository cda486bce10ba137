"""Sides of the attention benchmark: their interface, graphrt as a side, and the check before timing.

The calls of a side run through the layers of a cell in rotation. Work that a serving stack does once per step for all
layers is done once per cell and measured separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from graphrt.bench.timer import Call
from graphrt.kernels.attention.operators import contiguous_attention, paged_attention
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.plan_shape import MAX_QUERY_LEN
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
from scripts.rigs.measure import reason_of

_CPU_SMS = 132  # as on an H200, so that a dry run makes the same plans


@dataclass(frozen=True, slots=True)
class Prepared:
    """One variant of a side for a cell. All work on the device can be captured.

    calls      attention, one call per layer, which returns its output
    schedule   per-step device work for all layers, or None
    plan_us    host time of the per-step work for all layers, or None
    """

    variant: str
    calls: list[Call]
    schedule: Callable[[], object] | None = None
    plan_us: float | None = None


class Side(Protocol):
    """An implementation. The calls that `prepare` returns neither compile nor plan."""

    name: str

    def prepare(self, cell: Cell, inputs: Inputs) -> list[Prepared]: ...


def calls_into(out: torch.Tensor, attend: Callable[[int], object]) -> list[Call]:
    """Return a call per layer of `out` [layers, ...] that writes its output by `attend(layer)`, and returns it."""

    def call(layer: int) -> torch.Tensor:
        attend(layer)
        return out[layer]

    return [partial(call, layer) for layer in range(len(out))]


class GraphrtSide:
    """graphrt's kernels. Only this class of the benchmark uses their signatures."""

    name = OURS

    def prepare(self, cell: Cell, inputs: Inputs) -> list[Prepared]:
        chunk = cell.attention_chunk_size
        options = AttentionOptions(softmax_scale=inputs.softmax_scale, attention_chunk_size=chunk)
        if cell.query_len <= MAX_QUERY_LEN:
            return [self._paged(inputs, options)]
        prompts = [self._prompts(inputs, options, packed) for packed in (False, True)]
        return [self._paged(inputs, options), self._contiguous(inputs, options), *prompts]

    def _paged(self, inputs: Inputs, options: AttentionOptions) -> Prepared:
        plan, work_list, workspace = self._planned(inputs)
        starts = inputs.query_starts() if inputs.cell.query_len > MAX_QUERY_LEN else None
        out = inputs.empty_out()

        def attend(layer: int) -> None:
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
            )

        variant = "paged"
        if starts is None and plan.native is None:
            variant = f"{plan.schedule.num_partitions} partitions of {plan.tile.num_warps} warps"
        elif starts is None and plan.native is not None:
            clusters = f" in clusters of {plan.native.cluster}" if plan.native.cluster > 1 else ""
            variant = f"{plan.native_blocks} blocks of {plan.native.warps} warps{clusters}"
        chunk = options.attention_chunk_size
        schedule = partial(
            schedule_attention, plan, inputs.seq_lens, work_list, query_start_loc=starts, attention_chunk_size=chunk
        )
        return Prepared(variant, calls_into(out, attend), schedule)

    def _contiguous(self, inputs: Inputs, options: AttentionOptions) -> Prepared:
        """Contiguous K and V, as the peer expects them."""
        plan, work_list, workspace = self._planned(inputs)
        starts, kv_starts, out = inputs.query_starts(), inputs.kv_starts(), inputs.empty_out()
        packed = [inputs.packed_kv(layer) for layer in range(inputs.layers)]

        def attend(layer: int) -> None:
            (k, v), q = packed[layer], inputs.q[layer]
            contiguous_attention(q, k, v, kv_starts, starts, out[layer], plan, work_list, workspace, options)

        schedule = partial(
            schedule_attention, plan, kv_starts, work_list, query_start_loc=starts, seq_lens_are_starts=True
        )
        return Prepared("contiguous", calls_into(out, attend), schedule)

    def _prompts(self, inputs: Inputs, options: AttentionOptions, packed: bool) -> Prepared:
        """The prompt kernel, over pages or over packed keys."""
        cell, starts, out = inputs.cell, inputs.query_starts(), inputs.empty_out()
        plan = PromptPlan.make(
            cell.batch,
            inputs.q.shape[1],
            num_q_heads=cell.num_q_heads,
            num_kv_heads=cell.num_kv_heads,
            head_dim=cell.head_dim,
            dtype=inputs.q.dtype,
            kv_dtype=cell.kv_dtype,
            num_sms=num_sms(inputs.device),
            native=runs_prompt_kernel(inputs.device),
        )
        units = torch.empty(plan.schedule_words, dtype=torch.int32, device=inputs.device)
        layers = range(inputs.layers)
        kv = [inputs.packed_kv(layer) if packed else (inputs.k[layer], inputs.v[layer]) for layer in layers]
        lens, table = (inputs.kv_starts(), None) if packed else (inputs.seq_lens, inputs.block_table)

        def attend(layer: int) -> None:
            prompt_attention(inputs.q[layer], *kv[layer], out[layer], plan, units, options, block_table=table)

        schedule = partial(schedule_prompt, plan, lens, starts, units, seq_lens_are_starts=packed)
        return Prepared(f"prompts, {'packed' if packed else 'paged'}", calls_into(out, attend), schedule)

    @staticmethod
    def _planned(inputs: Inputs) -> tuple[AttentionPlan, torch.Tensor, AttentionWorkspace]:
        """Return the plan of the cell, its work list and its workspace."""
        cell, device = inputs.cell, inputs.device
        make = partial(AttentionPlan.varlen, num_tokens=inputs.q.shape[1])
        if cell.query_len <= MAX_QUERY_LEN:
            make = partial(
                AttentionPlan.decode, query_len=cell.query_len, kv_dtype=cell.kv_dtype, native=runs_native(device)
            )
        plan = make(
            cell.batch,
            num_q_heads=cell.num_q_heads,
            num_kv_heads=cell.num_kv_heads,
            head_dim=cell.head_dim,
            v_head_dim=cell.head_dims[1],
            dtype=inputs.q.dtype,
            num_sms=num_sms(device),
        )
        work_list = torch.empty(plan.work_list_words, dtype=torch.int32, device=device)
        return plan, work_list, AttentionWorkspace.allocate([plan], device)


def prepare_checked(side: Side, cell: Cell, inputs: Inputs) -> tuple[list[Prepared], str | None]:
    """Return the variants that the side can run, each checked once, or the reason why it cannot.

    If a side refuses a cell or returns a wrong result, the run continues with the others. A device fault ends the run,
    because later results would be unreliable.
    """
    good, reason = [], None
    try:
        every = side.prepare(cell, inputs)
    except torch.AcceleratorError:
        raise
    except Exception as error:
        return [], reason_of(error)
    for prepared in every:
        try:
            if prepared.schedule is not None:
                prepared.schedule()
            for layer in sorted({0, inputs.layers - 1}):
                prepared.calls[layer]().fill_(math.nan)  # reused memory may hold another side's correct output
                check_output(inputs, layer, prepared.calls[layer]())
        except torch.AcceleratorError:
            raise
        except Exception as error:
            reason = reason_of(error)
        else:
            good.append(prepared)
    return good, None if good else reason


def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors for which plans are made."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _CPU_SMS
