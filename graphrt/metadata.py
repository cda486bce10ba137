"""What a step's layers may read: views of the static buffers, cut to the size of one graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.spec import AttentionKind


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Attention metadata of one captured size. Every tensor is a view of StaticBuffers and is rewritten by the refresh.

    seq_lens          [padded_reqs]             int32  KV tokens including this step's; the backend's fill in pad rows
    query_start_loc   [padded_reqs + 1]         int32  prefix sum of query lengths; repeats its last value in pad rows
    positions         [padded_tokens]           int64  position of each new token in its sequence; 0 in pad tokens
    block_tables      per KV group [padded_reqs, max_pages]  int32  page ids; the null page beyond a row's pages, in
                                                pad rows, and before the first page that the row sees
    slot_mappings     per KV group [padded_tokens]           int64  flat KV slot of each new token; -1 in pad tokens,
                                                and everywhere in cross groups
    encoder_lens      [padded_reqs]             int32  tokens that the row's encoder wrote; 0 in pad rows
    max_seq_len       host bound, the model's maximum: the same at capture and at every replay
    parts             of a mixed step in two parts, the metadata of each: decode part, and prompt part. A graph that has
                      no room for a row that decodes has no decode part

    A layer reads `block_tables[layer.group]`. Where all layers are alike there is one group. Cross layers take
    `encoder_lens` where others take `seq_lens`.

    In a mixed step of two parts decode rows stand first:

        tokens                0 1 2 | 3 4 5 6 7 | 8 9      three decodes, prompts of 5 tokens and of 2
        query_start_loc       0 1 2   3           8  10
        .. of the decode part 0 1 2   3           3   3    the others are pad rows, with the lengths of pad rows
        .. of the prompt part 3 3 3   3           8  10    the others are rows without tokens; tokens before 3 are not
                                                           this part's

    The decode part is a decode batch: min(padded_reqs, padded_tokens // decode_len) rows of `decode_len` tokens. Its
    pad rows and pad tokens are those of prompts. So only `seq_lens` and `query_start_loc` hold pad values there;
    `encoder_lens`, `block_tables`, `slot_mappings` and `positions` hold what they have in the whole step. In the prompt
    part the same four are those of the whole step, in rows of the decode part too.
    """

    descriptor: BatchDescriptor
    max_seq_len: int
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: tuple[torch.Tensor, ...]
    encoder_lens: torch.Tensor
    parts: tuple[StepMetadata | None, StepMetadata] | None = None

    @classmethod
    def of(
        cls,
        buffers: StaticBuffers,
        descriptor: BatchDescriptor,
        max_seq_len: int,
        max_pages: Sequence[int],
        decode_len: int = 0,
    ) -> StepMetadata:
        """The metadata in static buffers that were cut to the size of `descriptor`.

        max_pages   by KV group. Without groups, buffers are those of one that keeps nothing: no layer may read them
        decode_len  new tokens of a row of the decode part; 0 for a step in one part
        """
        groups = len(max_pages)
        whole = cls(
            descriptor,
            max_seq_len,
            buffers.seq_lens,
            buffers.query_start_loc,
            buffers.positions,
            tuple(buffers.block_table[group, :, :width] for group, width in enumerate(max_pages)),
            buffers.slot_mapping.unbind()[:groups],
            buffers.encoder_lens,
        )
        if not decode_len:
            return whole
        prompts = replace(whole, seq_lens=buffers.prompt_seq_lens, query_start_loc=buffers.prompt_start_loc)
        rows = min(descriptor.padded_reqs, descriptor.padded_tokens // decode_len)
        if not rows:
            return replace(whole, parts=(None, prompts))
        tokens = rows * decode_len
        decodes = replace(
            whole,
            descriptor=BatchDescriptor.decode(rows, decode_len),
            seq_lens=buffers.decode_seq_lens[:rows],
            query_start_loc=buffers.decode_start_loc[: rows + 1],
            positions=buffers.positions[:tokens],
            block_tables=tuple(table[:rows] for table in whole.block_tables),
            slot_mappings=tuple(slots[:tokens] for slots in whole.slot_mappings),
            encoder_lens=whole.encoder_lens[:rows],
        )
        return replace(whole, parts=(decodes, prompts))

    def kv_lens(self, kind: AttentionKind) -> torch.Tensor:
        """Keys and values of each row, [padded_reqs] int32, that layers of a kind find in the cache."""
        return self.encoder_lens if kind is AttentionKind.CROSS else self.seq_lens
