"""Attention metadata of a step, as views of the static buffers at the size of one graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.spec import AttentionKind


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Attention metadata of one captured size. Every tensor is a view of StaticBuffers, which each step rewrites.

    descriptor        the captured size
    max_seq_len       longest sequence of the runtime, and its drafts; the same at capture and at every replay
    seq_lens          [padded_reqs]      int32  KV tokens including the new tokens of this step, and missing drafts,
                                                which are padding; `seq_len_fill` of the backend in padding requests
    query_start_loc   [padded_reqs + 1]  int32  prefix sum of query lengths; repeats its last value in padding requests
    positions         [padded_tokens]    int64  position of each new token in its sequence; 0 in padding tokens
    block_tables      per KV group [padded_reqs, max_pages]  int32  page ids; unused entries (after a request's last
                                                page, before the first page that it reads, in padding) are the null page
    slot_mappings     per KV group [padded_tokens]           int64  flat KV slot of each new token; -1 in padding
                                                tokens, and everywhere in cross groups
    encoder_lens      [padded_reqs]      int32  encoder tokens of each request; 0 in padding requests
    tree_masks        [padded_tokens]    int64  in a graph for drafts that form a tree, else None. Bit i of a token's
                                                mask is set if token i of the request's step is the token itself or an
                                                ancestor. A token sees these, and the tokens before the step. Its
                                                position is that of token 0 plus the number of its ancestors
    kv_limits         [padded_tokens]    int32  if each rank stores only some keys of a request, in a graph with several
                                                tokens per request, else None. A token sees the first kv_limits keys
                                                of its request on this rank, or none at 0. `seq_lens` then counts the
                                                keys on this rank, and may be 0 in a request that is not padding
    parts             metadata of the decode part and of the prefill part, if mixed steps have two parts, else None. The
                      decode part is None in a graph that has no room for a decode request

    A layer reads `block_tables[layer.group]`; there is one group if all layers are alike. Cross layers use
    `encoder_lens` instead of `seq_lens`.

    In a mixed step with two parts, decode requests come first:

        tokens                  0 1 2 | 3 4 5 6 7 | 8 9      three decode requests, then prefills of 5 and 2 tokens
        query_start_loc         0 1 2   3           8  10
        .. of the decode part   0 1 2   3           3   3    prefill requests are padding here
        .. of the prefill part  3 3 3   3           8  10    decode requests have no tokens here

    The decode part is a decode batch of min(padded_reqs, padded_tokens // decode_len) requests with `decode_len` tokens
    each. Prefill requests occupy its padding, so only `seq_lens` and `query_start_loc` contain padding values there. In
    both parts, `encoder_lens`, `block_tables`, `slot_mappings` and `positions` cover the whole step.
    """

    descriptor: BatchDescriptor
    max_seq_len: int
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: tuple[torch.Tensor, ...]
    encoder_lens: torch.Tensor
    tree_masks: torch.Tensor | None = None
    kv_limits: torch.Tensor | None = None
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
        """Return the metadata of static buffers that are already sliced to the size of `descriptor`.

        max_pages   width of the block table of each KV group; empty without groups
        decode_len  new tokens per request of the decode part; 0 for a step with one part
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
            buffers.tree_masks if len(buffers.tree_masks) else None,
            buffers.kv_limits if len(buffers.kv_limits) and descriptor.query_len != 1 else None,
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
        """Return how many KV tokens of each request the layers of a kind read, [padded_reqs] int32."""
        return self.encoder_lens if kind is AttentionKind.CROSS else self.seq_lens
