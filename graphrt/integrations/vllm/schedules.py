"""The schedules of one step for a group of layers, and the attention calls that read them.

    decode step    d d d d . .    d decode, . padding: a decode plan with an equal number of new tokens per request
    mixed step     d d d p p p    p prompt: a decode plan for d, and the prompt kernel for p

If the prompt kernel does not support the head size, a varlen plan serves all requests of a mixed step.

The buffers have fixed addresses, so that full CUDA graphs of all sizes read what `write` wrote before the replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from graphrt.backends.prompt_schedules import num_sms_of
from graphrt.kernels.attention.native import NATIVE_PAGE_MULTIPLE
from graphrt.kernels.attention.operators import paged_attention
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.plan_shape import MAX_QUERY_LEN
from graphrt.kernels.attention.prompt import prompt_attention
from graphrt.kernels.attention.prompt_native import runs_prompt_kernel
from graphrt.kernels.attention.prompt_plan import PROMPT_HEAD_DIMS, PromptPlan
from graphrt.kernels.attention.prompt_schedule import schedule_prompt
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.native.nvrtc import runs_native

_MOST_PLANS = 4096  # cached plans per group; eager batches have any number of requests and tokens


class LayerKind(NamedTuple):
    """Layers of the same kind share a work list.

    kv_dtype   fp8 dtype of the cache; None: the dtype of the queries
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype | None
    sliding_window: int


class StepShape(NamedTuple):
    """The sizes of a step, including padding.

    num_decodes   requests of the decode kernel, which come first; the others are prompts
    query_len     new tokens of each decode; 0: any number, given by query_start_loc
    """

    num_reqs: int
    num_tokens: int
    num_decodes: int
    query_len: int

    @property
    def decodes(self) -> tuple[int, int, int]:
        """Requests, new tokens per request and tokens of the decode kernel."""
        return self.num_decodes, self.query_len, self.num_decodes * self.query_len or self.num_tokens


class LayerInputs(NamedTuple):
    """The KV cache and the options of a layer; see `paged_attention`."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    options: AttentionOptions


class GroupSchedules:
    """Work lists, prompt schedules and the workspace of a group of layers.

    kinds           of the layers
    dtype           of the queries
    page_size       tokens per page of the KV tensors
    max_num_tokens  tokens of a step, including padding; also the maximum number of requests, because each has a token
    max_query_len   new tokens per decode
    """

    def __init__(
        self,
        kinds: Iterable[LayerKind],
        dtype: torch.dtype,
        page_size: int,
        device: torch.device,
        *,
        max_num_tokens: int,
        max_query_len: int,
    ) -> None:
        kinds = tuple(dict.fromkeys(kinds))
        self.serves_prompts = all(kind.head_dim in PROMPT_HEAD_DIMS for kind in kinds)
        self._dtype, self._num_sms = dtype, num_sms_of(device)
        whole_tiles = page_size % NATIVE_PAGE_MULTIPLE == 0
        self._native = whole_tiles and (device.type == "cpu" or runs_native(device))  # on CPU: same plans as on a GPU
        self._native_prompts = whole_tiles and runs_prompt_kernel(device)
        self._plan = lru_cache(_MOST_PLANS)(self._make_plan)
        self._prompt_plan = lru_cache(_MOST_PLANS)(self._make_prompt_plan)
        sizes = [(max_num_tokens, 0, max_num_tokens)]
        self._max_query_len = min(max_query_len, MAX_QUERY_LEN)
        for query_len in range(1, self._max_query_len + 1):
            largest = max(max_num_tokens // query_len, 1)
            powers = [1 << bit for bit in range(largest.bit_length())]
            sizes += [(reqs, query_len, reqs * query_len) for reqs in (*powers, largest)]
        plans = {kind: [self._plan(kind, *size) for size in sizes] for kind in kinds}
        self._work_lists = {kind: _words(max(plan.work_list_words for plan in plans[kind]), device) for kind in kinds}
        self._workspace = AttentionWorkspace.allocate([plan for of_kind in plans.values() for plan in of_kind], device)
        self._prompt_schedules = {
            kind: _words(self._prompt_plan(kind, max_num_tokens, max_num_tokens).schedule_words, device)
            for kind in dict.fromkeys(map(_without_window, kinds if self.serves_prompts else ()))
        }

    def write(self, shape: StepShape, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        """Compute the schedules of a step, one launch per kind of layer and kernel. Nothing is read on the host.

        seq_lens         [num_reqs]      int32  0: padding
        query_start_loc  [num_reqs + 1]  int32
        """
        decodes = shape.num_decodes
        for kind, work_list in self._work_lists.items() if decodes else ():
            schedule_attention(
                self._plan(kind, *shape.decodes),
                seq_lens[:decodes],
                work_list,
                query_start_loc=None if shape.query_len else query_start_loc,
                sliding_window=kind.sliding_window,
            )
        prompts = shape.num_reqs - decodes
        for kind, schedule in self._prompt_schedules.items() if prompts else ():
            plan = self._prompt_plan(kind, prompts, shape.num_tokens)
            schedule_prompt(plan, seq_lens[decodes:], query_start_loc[decodes:], schedule)

    def attend(
        self,
        kind: LayerKind,
        shape: StepShape,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        options: AttentionOptions,
    ) -> None:
        """Attend with the schedules of this step, one launch for decodes and one for prompts. Capture-safe.

        q, out   [num_tokens, num_q_heads, head_dim]; for the other tensors see `paged_attention`
        """
        decodes = shape.num_decodes
        if decodes:
            *_, tokens = shape.decodes
            paged_attention(
                q[:tokens],
                k_cache,
                v_cache,
                block_table[:decodes],
                seq_lens[:decodes],
                out[:tokens],
                self._plan(kind, *shape.decodes),
                self._work_lists[kind],
                self._workspace,
                options,
                query_start_loc=None if shape.query_len else query_start_loc,
            )
        if prompts := shape.num_reqs - decodes:
            of_prompts = _without_window(kind)
            plan, schedule = (
                self._prompt_plan(of_prompts, prompts, shape.num_tokens),
                self._prompt_schedules[of_prompts],
            )
            prompt_attention(q, k_cache, v_cache, out, plan, schedule, options, block_table=block_table[decodes:])

    def compile_ahead(
        self,
        layers: Mapping[LayerKind, LayerInputs],
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        table_stride: int,
    ) -> None:
        """Launch the kernels of every number of decodes, and of prompts, in a `compiling_ahead` block.

        layers        inputs of a layer of each kind, with one page
        table_stride  from one row of the block table to the next
        """
        shapes = [
            StepShape(reqs, reqs * query_len, reqs, query_len)
            for query_len in range(1, self._max_query_len + 1)
            for reqs in range(1, max_num_reqs + 1)
        ]
        if self.serves_prompts:
            shapes += [StepShape(1, 1, 0, 0), StepShape(2, 2, 1, 1)]  # the row of a prompt may be unaligned
        else:
            powers = [1 << bit for bit in range(max_num_tokens.bit_length())]
            shapes += [
                StepShape(n, tokens, n, 0) for n in powers if n <= max_num_reqs for tokens in powers if tokens >= n
            ]
        most = max(shape.num_tokens for shape in shapes)
        device = self._workspace.counters.device
        rows = max(max_num_reqs, 2)
        lens, starts = _words(rows, device), _words(rows + 1, device)
        table = torch.empty(rows, table_stride, dtype=torch.int32, device=device)
        for kind, (k_cache, v_cache, options) in layers.items():
            q = torch.empty(most, kind.num_q_heads, kind.head_dim, dtype=self._dtype, device=device)
            for shape in shapes:
                tokens, reqs = q[: shape.num_tokens], shape.num_reqs
                self.write(shape, lens[:reqs], starts[: reqs + 1])
                self.attend(
                    kind,
                    shape,
                    tokens,
                    k_cache,
                    v_cache,
                    tokens,
                    table[:reqs],
                    lens[:reqs],
                    starts[: reqs + 1],
                    options,
                )

    def _make_plan(self, kind: LayerKind, num_reqs: int, query_len: int, num_tokens: int) -> AttentionPlan:
        heads = self._heads(kind)
        if query_len:
            return AttentionPlan.decode(num_reqs, query_len=query_len, native=self._native, **heads)
        return AttentionPlan.varlen(num_reqs, num_tokens, **heads)

    def _make_prompt_plan(self, kind: LayerKind, num_reqs: int, num_tokens: int) -> PromptPlan:
        return PromptPlan.make(num_reqs, num_tokens, native=self._native_prompts, **self._heads(kind))

    def _heads(self, kind: LayerKind) -> dict[str, Any]:
        heads = kind._asdict() | {"dtype": self._dtype, "num_sms": self._num_sms}
        del heads["sliding_window"]
        return heads


def _words(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _without_window(kind: LayerKind) -> LayerKind:
    """Return the kind whose prompt schedule a layer shares: without a window, because each query tile derives its
    own."""
    return kind._replace(sliding_window=0)
