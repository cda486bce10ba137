"""Backends that are correct in plain features and wrong in one: the cases of that feature must find the mistake."""

from __future__ import annotations

import torch

from tests.support.mocks import BakedSplits, DeviceSchedule, HostPlan


class TableOfGroup0(BakedSplits):
    """Broken: every layer uses the pages of KV group 0."""

    name = "broken_table_of_group_0"

    def _pages(self, metadata, layer):
        width = metadata.block_tables[layer.group].shape[1]
        columns = torch.arange(width).clamp(max=metadata.block_tables[0].shape[1] - 1)
        return metadata.block_tables[0][:, columns].long()


class GroupByNumber(BakedSplits):
    """Broken: every layer uses the next KV group, also layers that share a cache."""

    name = "broken_group_by_number"

    def _pages(self, metadata, layer):
        own, tables = metadata.block_tables[layer.group], metadata.block_tables
        columns = torch.arange(own.shape[1])
        table = tables[min(layer.index, len(tables) - 1)]
        return table[:, columns.clamp(max=table.shape[1] - 1)].long()


class PageSizeOfGroup0(BakedSplits):
    """Broken: every table is read with the page size of KV group 0."""

    name = "broken_page_size_of_group_0"

    def _page_size(self, layer):
        return min(self.context.kv_groups[0].page_size, layer.k_cache.shape[1])


class ScheduleOfGroup0(DeviceSchedule):
    """Broken: every layer uses the splits of KV group 0, in pages of that group."""

    name = "broken_schedule_of_group_0"

    def _split_of(self, metadata, where, layer):
        bounds = self._bounds[0, : metadata.seq_lens.shape[0]]
        return (where // self._page_size(layer) >= bounds[:, :, None]).sum(1) - 1


class PlanOfGroup0(HostPlan):
    """Broken: the plan of every KV group has the number of pages of group 0."""

    name = "broken_plan_of_group_0"

    def _plan(self, lens):
        super()._plan(lens)
        self._indptr[:] = self._indptr[:1].clone()


class WindowPagesFromColumn0(BakedSplits):
    """Broken: the table of a windowed KV group is read from its first column."""

    name = "broken_window_pages_from_column_0"

    def _pages(self, metadata, layer):
        table, kv = metadata.block_tables[layer.group].long(), self.context.kv_groups[layer.group]
        if kv.sliding_window is None:
            return table
        width = table.shape[1]
        return table[:, torch.arange(width) % min(width, -(-kv.sliding_window // kv.page_size) + 1)]


class DecodeTokensToo(BakedSplits):
    """Broken: the prefill part of a mixed step overwrites the tokens of the decode part."""

    name = "broken_decode_tokens_too"

    def _first(self, metadata):
        return torch.zeros_like(super()._first(metadata))


class ChunksAsWindows(BakedSplits):
    """Broken: a token sees as many tokens as a chunk has, wherever the chunk starts."""

    name = "broken_chunks_as_windows"

    def _reach(self, spec, at, where):
        if spec.attention_chunk_size is None:
            return super()._reach(spec, at, where)
        return where > at - spec.attention_chunk_size


class ChunksAndOneMore(BakedSplits):
    """Broken: a token sees the last token of the previous chunk."""

    name = "broken_chunks_and_one_more"
    first_only = False

    def _reach(self, spec, at, where):
        seen = super()._reach(spec, at, where)
        if spec.attention_chunk_size is None:
            return seen
        inside = at % spec.attention_chunk_size
        return seen | ((where == at - inside - 1) & ((inside == 0) | (not self.first_only)))


class ChunksThatBeginLate(ChunksAndOneMore):
    """Broken: only the first token of a chunk sees the last token of the previous chunk."""

    name = "broken_chunks_that_begin_late"
    first_only = True


class CutValues(BakedSplits):
    """Broken: value heads are cut to the size of the key heads; the rest of the output is zeros."""

    name = "broken_cut_values"

    def _values(self, layer):
        values, size = layer.v_cache, layer.spec.head_dim
        dims = torch.arange(values.shape[3])
        return torch.where(dims < size, values, 0.0)


class PaddedValues(BakedSplits):
    """Broken: value heads are read at the strides of key heads."""

    name = "broken_padded_values"

    def _values(self, layer):
        values, size = layer.v_cache, layer.spec.head_dim
        heads = torch.arange(values.shape[2])[:, None] * size + torch.arange(values.shape[3])
        return values.flatten(2)[:, :, heads.clamp(max=values.shape[2] * values.shape[3] - 1)]


class CrossBySeqLens(BakedSplits):
    """Broken: a cross layer reads seq_len keys."""

    name = "broken_cross_by_seq_lens"

    def _kv_lens(self, metadata, layer):
        return metadata.seq_lens


class CrossScheduledBySeqLens(DeviceSchedule):
    """Broken: the splits of a cross layer are computed from seq_lens."""

    name = "broken_cross_scheduled_by_seq_lens"

    def _lens_in(self, kv, metadata):
        return metadata.seq_lens


class CausalCross(BakedSplits):
    """Broken: a cross layer is causal, as if the tokens of the request were the last encoder tokens."""

    name = "broken_causal_cross"

    def _causal(self, spec):
        return True


class CrossAndOneMore(BakedSplits):
    """Broken: a cross layer reads one key after the last encoder token."""

    name = "broken_cross_and_one_more"

    def _kv_lens(self, metadata, layer):
        return super()._kv_lens(metadata, layer) + int(layer.spec.is_cross)


class CrossOfSomething(BakedSplits):
    """Broken: a request without an encoder reads one key."""

    name = "broken_cross_of_something"

    def _kv_lens(self, metadata, layer):
        return super()._kv_lens(metadata, layer).clamp(min=int(layer.spec.is_cross))


class CrossSplitsByRows(BakedSplits):
    """Correct, but not batch-invariant: in cross layers the number of splits depends on the number of requests."""

    name = "broken_cross_splits_by_rows"

    def _split_of(self, metadata, where, layer):
        splits = super()._split_of(metadata, where, layer)
        return where // (7 * len(splits)) + 0 * splits if layer.spec.is_cross else splits


class CausalEncoder(BakedSplits):
    """Broken: encoder layers are causal."""

    name = "broken_causal_encoder"

    def _near(self, spec, ahead):
        return super()._near(spec, ahead) & (ahead <= 0)


class EncoderWindowOneWider(BakedSplits):
    """Broken: the window of an encoder layer is one token too wide on each side."""

    name = "broken_encoder_window_one_wider"

    def _near(self, spec, ahead):
        return super()._near(spec, ahead) | (ahead.abs() == spec.sliding_window)


class EncoderWindowOfOneSide(BakedSplits):
    """Broken: the window of an encoder layer limits only the tokens before the query."""

    name = "broken_encoder_window_of_one_side"

    def _near(self, spec, ahead):
        return super()._near(spec, ahead) | (ahead > 0)


class EncoderOfNeighbours(BakedSplits):
    """Broken: in an encoder layer a request sees the last token of the previous request."""

    name = "broken_encoder_of_neighbours"

    def _sees_row(self, tokens, row, metadata):
        return super()._sees_row(tokens, row, metadata) | (tokens == metadata.query_start_loc[row][:, None] - 1)


BROKEN_BY_FEATURE = {
    TableOfGroup0: ("kv_groups", "mixed-kv_groups"),
    GroupByNumber: ("kv_groups",),
    PageSizeOfGroup0: ("kv_groups",),
    ScheduleOfGroup0: ("mixed-kv_groups",),
    PlanOfGroup0: ("mixed-kv_groups",),
    WindowPagesFromColumn0: ("window-pages",),
    DecodeTokensToo: ("prefill", "prefill-window"),
    ChunksAsWindows: ("attention_chunk_size", "mixed-attention_chunk_size"),
    ChunksAndOneMore: ("attention_chunk_size", "mixed-attention_chunk_size"),
    ChunksThatBeginLate: ("attention_chunk_size", "mixed-attention_chunk_size"),
    CutValues: ("mixed-v_head_dim",),
    PaddedValues: ("v_head_dim",),
    CrossBySeqLens: ("cross_attention", "cross_attention-kv_groups", "mixed-cross_attention"),
    CrossScheduledBySeqLens: ("cross_attention-kv_groups", "mixed-cross_attention-kv_groups"),
    CausalCross: ("cross_attention-query_len", "mixed-cross_attention"),
    CrossAndOneMore: ("cross_attention", "mixed-cross_attention"),
    CrossOfSomething: ("cross_attention", "mixed-cross_attention"),
    CausalEncoder: ("encoder_attention", "mixed-encoder_attention"),
    EncoderWindowOneWider: ("mixed-encoder_attention-window",),
    EncoderWindowOfOneSide: ("mixed-encoder_attention-window",),
    EncoderOfNeighbours: ("encoder_attention", "mixed-encoder_attention"),
}
"""What is wrong in these features alone, and right in the plain ones."""
