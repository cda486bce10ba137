"""Sample from logits whose columns are split over ranks, without gathering them.

Mask, bias, penalties, temperature and noise of a token do not depend on other tokens. So each rank finds its best
token, and ranks exchange 8 bytes per row: the score and the token. The result is the token that `sample` draws from all
logits. Rows with top-k, top-p or min-p depend on all logits. For these rows only, ranks on CPUs exchange processed
logits. The kernels for GPUs cannot choose the rows to exchange, so they do not accept these options.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from graphrt.kernels.library import define_op
from graphrt.kernels.ops.all_reduce import symmetric_buffers
from graphrt.kernels.ops.collectives import VocabShards, gather, vocab_part
from graphrt.kernels.ops.sampling import LogitBias, TokenMask, Truncation
from graphrt.kernels.ops.sampling_best import best_of_columns, best_records
from graphrt.kernels.ops.sampling_reference import (
    MAX_TEMPERATURE,
    SampleInputs,
    noise_reference,
    processed_reference,
    sample_reference,
)
from graphrt.kernels.ops.sampling_state import Penalties
from graphrt.kernels.types import NO_TOKEN


def _sample_shards(*arguments: Any) -> torch.Tensor:
    """Sample rows of a rank's logits. The other tensors are those of the whole vocabulary."""
    *tensors, vocab_size, group_name = arguments
    inputs, group = SampleInputs(*tensors), _resolve_process_group(group_name)
    first, end, columns = vocab_part(vocab_size, group.rank(), group.size())
    rows_of, device = len(inputs.logits), inputs.logits.device
    scores = torch.full((rows_of, columns), float("-inf"), dtype=torch.float32, device=device)
    scores[:, : end - first] = processed_reference(_own(inputs, first, end))
    scores = torch.where(scores > float("-inf"), scores, float("-inf"))  # NaN is never sampled
    hot, truncates = _drawn(inputs)
    token = torch.empty(rows_of, dtype=torch.int32, device=device)
    if len(rows := truncates.nonzero()[:, 0]):  # the same rows on all ranks
        every = gather(scores[rows], group).transpose(0, 1).flatten(1)[:, :vocab_size]
        draws, kept = ([tensor[rows] for tensor in some if tensor is not None] for some in (inputs[1:4], inputs[5:8]))
        token[rows] = sample_reference(every, *draws, None, *kept)
    if len(rows := (~truncates).nonzero()[:, 0]):
        of_rows, drawn = scores[rows], hot[rows]
        if drawn.any():
            noise = noise_reference(inputs.seeds[rows][drawn], inputs.seq_lens[rows][drawn], vocab_size)[:, first:end]
            heat = inputs.temperatures[rows][drawn, None].clamp_max(MAX_TEMPERATURE)
            of_rows[drawn, : end - first] += heat * noise
        best = of_rows.max(1, keepdim=True).values
        lowest = torch.where(of_rows == best, torch.arange(columns, device=device), columns).min(1).values + first
        found = gather(torch.stack((best[:, 0].view(torch.int32), lowest.int()), 1), group)  # [ranks, rows, 2]
        values, ranks = found[:, :, 0].contiguous().view(torch.float32), torch.arange(group.size(), device=device)
        winner = torch.where(values == values.max(0).values, ranks[:, None], group.size()).min(0).values
        chosen = found[:, :, 1].gather(0, winner[None])[0]
        token[rows] = torch.where(values.max(0).values > float("-inf"), chosen, NO_TOKEN)
    return token


def _sample_shards_triton(*arguments: Any) -> torch.Tensor:
    *tensors, vocab_size, group_name = arguments
    inputs, group = SampleInputs(*tensors), _resolve_process_group(group_name)
    first, end, _ = vocab_part(vocab_size, group.rank(), group.size())
    own = best_of_columns(inputs, first, end, vocab_size)
    buffer = symmetric_buffers.get(group_name)
    return best_records(gather(own, group) if buffer is None else buffer.gather(own), as_tokens=True)


def _own(inputs: SampleInputs, first: int, end: int) -> SampleInputs:
    """Return the inputs of tokens `first` to `end`, which are numbered from 0."""
    words = slice(first // 32, -(-end // 32))
    return inputs._replace(
        logits=inputs.logits[:, : end - first],
        seen=None if inputs.seen is None else inputs.seen[:, words],
        counts=None if inputs.counts is None else inputs.counts[:, first:end],
        bias_tokens=None if inputs.bias_tokens is None else inputs.bias_tokens - first,
        mask_words=None if inputs.mask_words is None else inputs.mask_words[:, words],
    )


def _drawn(inputs: SampleInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which rows are drawn with noise, and which of them depend on all logits."""
    hot = inputs.temperatures > 0
    if inputs.top_k is None or inputs.top_p is None or inputs.min_p is None:
        return hot, torch.zeros_like(hot)
    hot &= (inputs.top_k != 1) & ~(inputs.top_p <= 0)
    return hot, hot & ((inputs.top_k > 0) | (inputs.top_p < 1) | (inputs.min_p > 0))


_arguments = (f"Tensor{'?' if name in SampleInputs._field_defaults else ''} {name}" for name in SampleInputs._fields)
_op = define_op(
    f"sample_shards({', '.join(_arguments)}, int vocab_size, str group) -> Tensor",
    triton_impl=_sample_shards_triton,
    reference=_sample_shards,
    fake=lambda logits, *others: logits.new_empty((logits.shape[0],), dtype=torch.int32),
)


def sample_shards(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    shards: VocabShards,
    req_indices: torch.Tensor,
    truncation: Truncation | None,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
    token_mask: TokenMask | None = None,
) -> torch.Tensor:
    """Sample one token per row, as `sample` does from all logits; all ranks return the same tokens.

    logits   [rows, columns]  the columns of this rank; see `vocab_part`
    returns  [rows]           int32  tokens of the whole vocabulary

    Other arguments as in `sample`; masks, biases and penalties are those of the whole vocabulary. GPUs ignore
    `truncation`. Capture-safe.
    """
    inputs = SampleInputs(logits, temperatures, seeds, seq_lens, req_indices)
    if truncation is not None:
        inputs = inputs._replace(top_k=truncation.top_k, top_p=truncation.top_p, min_p=truncation.min_p)
    if penalties is not None:
        inputs = inputs._replace(**penalties.checked(len(logits), shards.vocab_size, logits.device))
    if bias is not None:
        inputs = inputs._replace(bias_tokens=bias.tokens, bias_values=bias.values, bias_lists=bias.lists)
    if token_mask is not None:
        inputs = inputs._replace(mask_words=token_mask.words, mask_index=token_mask.index)
    result: torch.Tensor = _op(*inputs, shards.vocab_size, shards.group.group_name)
    return result
