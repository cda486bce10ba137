"""Backends in plain torch, one per way of keeping metadata right under replay, and broken ones that go stale.

They compute the same attention. What differs is where the split of a row's keys comes from: a number frozen at capture,
a tensor that `schedule` writes on the device, or arrays that `plan_replay` writes from the host.
"""

from __future__ import annotations

import math

import torch

from graphrt.backends.base import AttentionBackend, Capabilities, GraphSupport
from graphrt.kernels.metadata.page_list import list_pages
from graphrt.kernels.types import KVLayout

SPLITS = 3


class MockBackend(AttentionBackend):
    """Attention over all columns of the table, cut into splits by `_split_of`, which the families define."""

    capabilities = Capabilities(
        devices=("cpu",),
        dtypes=(torch.float32,),
        kv_dtypes=(torch.float32,),
        head_dims=None,
        page_sizes=None,
        layouts=(KVLayout.NHD, KVLayout.HND),
        max_query_len=8,
        sliding_window=True,
        logits_softcap=True,
        mixed=True,
        lse=True,
        kv_groups=True,
        v_head_dim=True,
        attention_chunk_size=True,
        prefill=True,
    )
    graph_support = GraphSupport.ALWAYS

    def close(self):
        for name in [name for name, value in vars(self).items() if isinstance(value, torch.Tensor)]:
            delattr(self, name)

    def run(self, layer, q, metadata, out, *, sinks=None, lse=None):
        rows, spec = metadata.seq_lens.shape[0], layer.spec
        tokens = torch.arange(q.shape[0])
        row = torch.searchsorted(metadata.query_start_loc[1:], tokens, right=True).clamp(max=rows - 1)
        at = metadata.seq_lens[row] - (metadata.query_start_loc[row + 1] - tokens)
        page_size, pages = self._page_size(layer), self._pages(metadata, layer)
        where = torch.arange(pages.shape[1] * page_size)
        seen = (where <= at[:, None]) & (metadata.slot_mappings[0] >= 0)[:, None]
        seen = seen & self._reach(spec, at[:, None], where)
        split = self._split_of(metadata, where, layer)[row]
        pages = pages[row][:, where // page_size]
        k, v = (c[pages, where % page_size] for c in (layer.k_cache, self._values(layer)))
        k, v = (x.repeat_interleave(spec.group, 2) for x in (k, v))
        logits = torch.einsum("thd,tnhd->thn", q, k) * spec.scale
        if spec.logits_softcap is not None:
            logits = spec.logits_softcap * torch.tanh(logits / spec.logits_softcap)
        parts, sums = [], []
        for number in range(SPLITS):  # as kernels do: a softmax per split, merged by the log-sum-exps
            mask = (seen & (split == number))[:, None]
            masked = torch.where(mask, logits, -math.inf)
            sums.append(torch.logsumexp(masked, 2))
            weights = torch.where(mask, (masked - sums[-1].clamp(min=-1e30)[..., None]).exp(), 0.0)
            parts.append(torch.einsum("thn,tnhd->thd", weights, torch.where(mask.transpose(1, 2)[..., None], v, 0.0)))
        total = torch.logsumexp(torch.stack(sums), 0)
        merged = sum(p * (s - total.clamp(min=-1e30)).exp()[..., None] for p, s in zip(parts, sums, strict=True))
        mine = (tokens >= self._first(metadata))[:, None]  # others are the decode part's
        merged = torch.where((total > -math.inf)[..., None], merged, 0.0)
        out.copy_(torch.where(mine[..., None], merged, out))
        if lse is not None:
            lse.copy_(torch.where(mine, total, lse))

    def _first(self, metadata):
        return metadata.query_start_loc[0]

    def _split_of(self, metadata, where, layer):
        """[rows, keys]: the split that attends to each key; none for a number outside the range."""
        raise NotImplementedError

    def _pages(self, metadata, layer):
        return metadata.block_tables[layer.group].long()

    def _page_size(self, layer):
        return self.context.kv_groups[layer.group].page_size

    def _reach(self, spec, at, where):
        """[tokens, keys]: the keys that are within a token's window and chunk."""
        if spec.attention_chunk_size is not None:
            return where >= at - at % spec.attention_chunk_size
        return where > at - spec.sliding_window if spec.sliding_window is not None else where >= 0

    def _values(self, layer):
        return layer.v_cache


class BakedSplits(MockBackend):
    """The number of splits is a host number, frozen at capture; right because it follows from the table's width."""

    name = "mock_baked_splits"

    def plan_capture(self, descriptor):
        self._keys_per_split = -(-self.context.max_seq_len // SPLITS)

    def _split_of(self, metadata, where, layer):
        return (where // self._keys_per_split).expand(metadata.seq_lens.shape[0], -1)


class DeviceSchedule(MockBackend):
    """Bounds of the splits, in pages of each KV group, are computed by `schedule`, on the device, from the lengths."""

    name = "mock_device_schedule"

    def allocate(self):
        groups = len(self.context.kv_groups)
        self._bounds = torch.zeros(groups, self.context.max_num_reqs, SPLITS + 1, dtype=torch.int32)

    def tensors(self):
        return {"bounds": self._bounds}

    def schedule(self, metadata):
        rows = metadata.seq_lens.shape[0]
        shares = torch.arange(SPLITS + 1, dtype=torch.int32)
        for group, kv in enumerate(self.context.kv_groups):
            pages = (metadata.seq_lens[:, None] + kv.page_size - 1) // kv.page_size
            self._bounds[group, :rows] = (pages * shares + SPLITS - 1) // SPLITS

    def _split_of(self, metadata, where, layer):
        bounds = self._bounds[layer.group, : metadata.seq_lens.shape[0]]
        passed = (where // self._page_size(layer) >= bounds[:, :, None]).sum(1)
        return passed - 1


class HostPlan(MockBackend):
    """`plan_replay` writes lengths and offsets from the host, `schedule` lists the pages by them on the device."""

    name = "mock_host_plan"
    graph_support = GraphSupport.UNIFORM

    def allocate(self):
        rows = self.context.max_num_reqs
        widths = [self.context.max_pages(group) for group in range(len(self.context.kv_groups))]
        self._lens = torch.zeros(rows, dtype=torch.int32)
        self._indptr = torch.zeros(len(widths), rows + 1, dtype=torch.int32)
        self._indices = torch.zeros(len(widths), rows * max(widths), dtype=torch.int32)

    def tensors(self):
        return {"indices": self._indices}

    def plan_capture(self, descriptor):
        self._plan(torch.ones(descriptor.padded_reqs, dtype=torch.int32))

    def plan_replay(self, descriptor, batch):
        lens = torch.zeros(descriptor.padded_reqs, dtype=torch.int32)
        lens[: batch.num_reqs] = torch.from_numpy(batch.seq_lens)
        self._plan(lens)

    def _plan(self, lens):
        rows = len(lens)
        self._lens[:rows] = lens
        for group, kv in enumerate(self.context.kv_groups):
            self._indptr[group, 1 : rows + 1] = ((lens + kv.page_size - 1) // kv.page_size).cumsum(0)

    def schedule(self, metadata):
        rows = metadata.seq_lens.shape[0]
        for group, table in enumerate(metadata.block_tables):
            list_pages(table, self._indptr[group, : rows + 1], self._indices[group])

    def _split_of(self, metadata, where, layer):
        lens = self._lens[: metadata.seq_lens.shape[0], None]
        return torch.where(where < lens, where * SPLITS // lens.clamp(min=1), -1)

    def _pages(self, metadata, layer):
        rows, width = metadata.block_tables[layer.group].shape
        indptr, indices = self._indptr[layer.group], self._indices[layer.group]
        at = indptr[:rows, None] + torch.arange(width)
        listed = at < indptr[1 : rows + 1, None]
        return torch.where(listed, indices[at.clamp(max=len(indices) - 1)], 0).long()


class SplitsOfTheLastPlan(BakedSplits):
    """Broken: the host number follows from the lengths of the batch, and the graph keeps that of its capture."""

    name = "broken_splits_of_the_last_plan"

    def plan_capture(self, descriptor):
        self._keys_per_split = 1

    def plan_replay(self, descriptor, batch):
        self._keys_per_split = -(-int(batch.seq_lens.max()) // SPLITS)


class ScheduledAtCapture(DeviceSchedule):
    """Broken: the schedule is made before the capture, for what the rows are then, and no graph makes it again."""

    name = "broken_scheduled_at_capture"

    def tensors(self):
        return {}

    def plan_capture(self, descriptor):
        self._bounds[:] = (torch.arange(SPLITS + 1) + SPLITS - 1) // SPLITS  # one page in each row

    def schedule(self, metadata):
        pass


class PlannedAtCapture(HostPlan):
    """Broken: the plan is made before the capture and at no replay."""

    name = "broken_planned_at_capture"

    def plan_replay(self, descriptor, batch):
        pass


class PlannedElsewhere(HostPlan):
    """Broken: each plan is written to new tensors, and the graph reads those of its capture."""

    name = "broken_planned_elsewhere"

    def _plan(self, lens):
        self._lens, self._indptr = self._lens.clone(), self._indptr.clone()
        super()._plan(lens)


class SplitsByRows(BakedSplits):
    """Right, but not batch-invariant: the number of splits follows from the number of rows."""

    name = "broken_splits_by_rows"

    def plan_capture(self, descriptor):
        self._keys_per_split = 7 * descriptor.padded_reqs


class BuffersOfTheFirstAttempt(HostPlan):
    """Broken: what is made once per size stays with the buffers of a capture that failed."""

    name = "broken_buffers_of_the_first_attempt"

    def __init__(self, context):
        super().__init__(context)
        self._wrapper = None

    def plan_capture(self, descriptor):
        if self._wrapper is None:
            self._wrapper = self._indices
        super().plan_capture(descriptor)

    def _pages(self, metadata, layer):
        own, self._indices = self._indices, self._wrapper
        try:
            return super()._pages(metadata, layer)
        finally:
            self._indices = own


class PagesOfTheCapture(HostPlan):
    """Broken: page ids are listed before the capture, and no graph lists them again."""

    name = "broken_pages_of_the_capture"

    def tensors(self):
        return {}

    def plan_capture(self, descriptor):
        super().plan_capture(descriptor)
        self._indices[:] = torch.arange(self._indices.shape[1])

    def schedule(self, metadata):
        pass


class TableOfGroup0(BakedSplits):
    """Broken: the pages of every layer are those of KV group 0."""

    name = "broken_table_of_group_0"

    def _pages(self, metadata, layer):
        width = metadata.block_tables[layer.group].shape[1]
        columns = torch.arange(width).clamp(max=metadata.block_tables[0].shape[1] - 1)
        return metadata.block_tables[0][:, columns].long()


class GroupByNumber(BakedSplits):
    """Broken: every layer has the next KV group. It forgets layers that read another's cache."""

    name = "broken_group_by_number"

    def _pages(self, metadata, layer):
        own, tables = metadata.block_tables[layer.group], metadata.block_tables
        columns = torch.arange(own.shape[1])
        table = tables[min(layer.index, len(tables) - 1)]
        return table[:, columns.clamp(max=table.shape[1] - 1)].long()


class PageSizeOfGroup0(BakedSplits):
    """Broken: every table is read as if its pages had as many tokens as those of KV group 0."""

    name = "broken_page_size_of_group_0"

    def _page_size(self, layer):
        return min(self.context.kv_groups[0].page_size, layer.k_cache.shape[1])


class ScheduleOfGroup0(DeviceSchedule):
    """Broken: the splits of every layer are those of KV group 0, in its pages."""

    name = "broken_schedule_of_group_0"

    def _split_of(self, metadata, where, layer):
        bounds = self._bounds[0, : metadata.seq_lens.shape[0]]
        return (where // self._page_size(layer) >= bounds[:, :, None]).sum(1) - 1


class PlanOfGroup0(HostPlan):
    """Broken: the plan has as many pages for every KV group as for group 0."""

    name = "broken_plan_of_group_0"

    def _plan(self, lens):
        super()._plan(lens)
        self._indptr[:] = self._indptr[:1].clone()


class WindowPagesFromColumn0(BakedSplits):
    """Broken: the table of a windowed KV group is read from its first column, as a ring of pages would be."""

    name = "broken_window_pages_from_column_0"

    def _pages(self, metadata, layer):
        table, kv = metadata.block_tables[layer.group].long(), self.context.kv_groups[layer.group]
        if kv.sliding_window is None:
            return table
        width = table.shape[1]
        return table[:, torch.arange(width) % min(width, -(-kv.sliding_window // kv.page_size) + 1)]


class DecodeTokensToo(BakedSplits):
    """Broken: as the prompt part of a mixed step it writes over the decode part's tokens."""

    name = "broken_decode_tokens_too"

    def _first(self, metadata):
        return torch.zeros_like(super()._first(metadata))


class ChunksAsWindows(BakedSplits):
    """Broken: a token sees as many tokens as a chunk has, wherever the chunk begins."""

    name = "broken_chunks_as_windows"

    def _reach(self, spec, at, where):
        if spec.attention_chunk_size is None:
            return super()._reach(spec, at, where)
        return where > at - spec.attention_chunk_size


class ChunksAndOneMore(BakedSplits):
    """Broken: a token sees the last token of the chunk before."""

    name = "broken_chunks_and_one_more"
    first_only = False

    def _reach(self, spec, at, where):
        seen = super()._reach(spec, at, where)
        if spec.attention_chunk_size is None:
            return seen
        inside = at % spec.attention_chunk_size
        return seen | ((where == at - inside - 1) & ((inside == 0) | (not self.first_only)))


class ChunksThatBeginLate(ChunksAndOneMore):
    """Broken: the first token of a chunk sees the last token of the chunk before; the others do not."""

    name = "broken_chunks_that_begin_late"
    first_only = True


class CutValues(BakedSplits):
    """Broken: value heads are cut to the size of the key heads; what is left of the output is zeros."""

    name = "broken_cut_values"

    def _values(self, layer):
        values, size = layer.v_cache, layer.spec.head_dim
        dims = torch.arange(values.shape[3])
        return torch.where(dims < size, values, 0.0)


class PaddedValues(BakedSplits):
    """Broken: value heads are read as far apart as if they had the size of the key heads."""

    name = "broken_padded_values"

    def _values(self, layer):
        values, size = layer.v_cache, layer.spec.head_dim
        heads = torch.arange(values.shape[2])[:, None] * size + torch.arange(values.shape[3])
        return values.flatten(2)[:, :, heads.clamp(max=values.shape[2] * values.shape[3] - 1)]


FAMILIES = (BakedSplits, DeviceSchedule, HostPlan)
BROKEN = (SplitsOfTheLastPlan, ScheduledAtCapture, PlannedAtCapture, PlannedElsewhere, PagesOfTheCapture)
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
}
"""What is wrong in these features alone, and right in the plain ones."""
