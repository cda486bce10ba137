"""Backends in plain torch, one per way of keeping metadata right under replay, and broken ones that go stale.

They compute the same attention. What differs is where the split of a row's keys comes from: a number frozen at capture,
a tensor that `schedule` writes on the device, or arrays that `plan_replay` writes from the host.
"""

from __future__ import annotations

import math

import torch

from graphrt.backends.base import AttentionBackend
from graphrt.backends.capabilities import Capabilities, GraphSupport
from graphrt.kernels.metadata.page_list import list_pages
from graphrt.kernels.types import KVLayout

SPLITS = 3


class MockBackend(AttentionBackend):
    """Attention over all columns of the table, divided into splits by `_split_of` of a subclass."""

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
        cross_attention=True,
        encoder_attention=True,
    )
    graph_support = GraphSupport.ALWAYS

    def close(self):
        for name in [name for name, value in vars(self).items() if isinstance(value, torch.Tensor)]:
            delattr(self, name)

    def run(self, layer, q, metadata, out, *, sinks=None, lse=None):
        spec, (tokens, row, real) = layer.spec, self._tokens(q, metadata)
        lens = self._kv_lens(metadata, layer)[row][:, None]
        at = lens - (metadata.query_start_loc[row + 1] - tokens)[:, None]
        page_size, pages = self._page_size(layer), self._pages(metadata, layer)
        where = torch.arange(pages.shape[1] * page_size)
        seen = (where <= at) & self._reach(spec, at, where) if self._causal(spec) else where < lens
        split = self._split_of(metadata, where, layer)[row]
        pages = pages[row][:, where // page_size]
        k, v = (c[pages, where % page_size] for c in (layer.k_cache, self._values(layer)))
        self._attend(spec, q, k, v, seen & real, split, metadata, out, lse)

    def run_encoder(self, layer, q, k, v, metadata, out, *, sinks=None, lse=None):
        tokens, row, real = self._tokens(q, metadata)
        seen = self._sees_row(tokens, row, metadata) & self._near(layer.spec, tokens - tokens[:, None])
        k, v = (x.expand(len(tokens), *x.shape) for x in (k, v))
        self._attend(layer.spec, q, k, v, seen & real & real.t(), torch.zeros_like(seen), metadata, out, lse)

    def _tokens(self, q, metadata):
        """Return token numbers [tokens], the request of each [tokens], and which are real [tokens, 1]."""
        tokens, starts = torch.arange(q.shape[0]), metadata.query_start_loc
        row = torch.searchsorted(starts[1:], tokens, right=True).clamp(max=len(starts) - 2)
        return tokens, row, (tokens < starts[-1])[:, None]

    def _attend(self, spec, q, k, v, seen, split, metadata, out, lse):
        """Attend with keys and values [tokens, keys, KV heads, head size], `seen` and `split` [tokens, keys]."""
        k, v = (x.repeat_interleave(spec.num_queries_per_kv, 2) for x in (k, v))
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
        mine = (torch.arange(len(q)) >= self._first(metadata))[:, None]  # others are the decode part's
        merged = torch.where((total > -math.inf)[..., None], merged, 0.0)
        out.copy_(torch.where(mine[..., None], merged, out))
        if lse is not None:
            lse.copy_(torch.where(mine, total, lse))

    def _first(self, metadata):
        return metadata.query_start_loc[0]

    def _split_of(self, metadata, where, layer):
        """Return [rows, keys]: the split of each key; a number out of range belongs to no split."""
        raise NotImplementedError

    def _kv_lens(self, metadata, layer):
        return metadata.kv_lens(layer.spec.kind)

    def _causal(self, spec):
        return not spec.is_cross

    def _sees_row(self, tokens, row, metadata):
        """Return [tokens, tokens]: the keys of a token's own request, in an encoder layer."""
        return row[:, None] == row

    def _near(self, spec, ahead):
        """Return [tokens, tokens]: the keys within the window of an encoder layer."""
        return ahead.abs() < (spec.sliding_window or len(ahead))

    def _pages(self, metadata, layer):
        return metadata.block_tables[layer.group].long()

    def _page_size(self, layer):
        return self.context.kv_groups[layer.group].page_size

    def _reach(self, spec, at, where):
        """Return [tokens, keys]: the keys within a token's window and chunk."""
        if spec.attention_chunk_size is not None:
            return where >= at - at % spec.attention_chunk_size
        return where > at - spec.sliding_window if spec.sliding_window is not None else where >= 0

    def _values(self, layer):
        return layer.v_cache


class BakedSplits(MockBackend):
    """The number of splits is constant in a graph; correct, because it depends only on the table width."""

    name = "mock_baked_splits"

    def plan_capture(self, descriptor):
        self._keys_per_split = -(-max(self.context.max_seq_len, self.context.max_encoder_len) // SPLITS)

    def _split_of(self, metadata, where, layer):
        return (where // self._keys_per_split).expand(metadata.seq_lens.shape[0], -1)


class DeviceSchedule(MockBackend):
    """`schedule` computes the bounds of the splits on the device from the lengths, in pages of each KV group."""

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
            pages = (self._lens_in(kv, metadata)[:, None] + kv.page_size - 1) // kv.page_size
            self._bounds[group, :rows] = (pages * shares + SPLITS - 1) // SPLITS

    def _lens_in(self, kv, metadata):
        """Return the lengths of the requests in a KV group."""
        return metadata.encoder_lens if kv.cross else metadata.seq_lens

    def _split_of(self, metadata, where, layer):
        bounds = self._bounds[layer.group, : metadata.seq_lens.shape[0]]
        passed = (where // self._page_size(layer) >= bounds[:, :, None]).sum(1)
        return passed - 1


class HostPlan(MockBackend):
    """`plan_replay` writes lengths and offsets from the host; `schedule` lists the pages by them on the device."""

    name = "mock_host_plan"
    graph_support = GraphSupport.UNIFORM

    def allocate(self):
        rows = self.context.max_num_reqs
        widths = [self.context.max_pages(group) for group in range(len(self.context.kv_groups))]
        self._lens = torch.zeros(len(widths), rows, dtype=torch.int32)
        self._indptr = torch.zeros(len(widths), rows + 1, dtype=torch.int32)
        self._indices = torch.zeros(len(widths), rows * max(widths, default=0), dtype=torch.int32)

    def tensors(self):
        return {"indices": self._indices}

    def plan_capture(self, descriptor):
        self._plan(torch.ones(len(self.context.kv_groups), descriptor.padded_reqs, dtype=torch.int32))

    def plan_replay(self, descriptor, batch):
        lens = torch.zeros(len(self.context.kv_groups), descriptor.padded_reqs, dtype=torch.int32)
        for group, kv in enumerate(self.context.kv_groups):
            lens[group, : batch.num_reqs] = torch.from_numpy(batch.encoder_lens if kv.cross else batch.seq_lens)
        self._plan(lens)

    def _plan(self, lens):
        rows = lens.shape[1]
        self._lens[:, :rows] = lens
        for group, kv in enumerate(self.context.kv_groups):
            self._indptr[group, 1 : rows + 1] = ((lens[group] + kv.page_size - 1) // kv.page_size).cumsum(0)

    def schedule(self, metadata):
        rows = metadata.seq_lens.shape[0]
        for group, table in enumerate(metadata.block_tables):
            list_pages(table, self._indptr[group, : rows + 1], self._indices[group])

    def _split_of(self, metadata, where, layer):
        lens = self._lens[layer.group, : metadata.seq_lens.shape[0], None]
        return torch.where(where < lens, where * SPLITS // lens.clamp(min=1), -1)

    def _pages(self, metadata, layer):
        rows, width = metadata.block_tables[layer.group].shape
        indptr, indices = self._indptr[layer.group], self._indices[layer.group]
        at = indptr[:rows, None] + torch.arange(width)
        listed = at < indptr[1 : rows + 1, None]
        return torch.where(listed, indices[at.clamp(max=len(indices) - 1)], 0).long()


class SplitsOfTheLastPlan(BakedSplits):
    """Broken: the number of splits depends on the lengths of the batch, and the graph keeps that of its capture."""

    name = "broken_splits_of_the_last_plan"

    def plan_capture(self, descriptor):
        self._keys_per_split = 1

    def plan_replay(self, descriptor, batch):
        self._keys_per_split = -(-int(batch.seq_lens.max()) // SPLITS)


class ScheduledAtCapture(DeviceSchedule):
    """Broken: the schedule is computed before the capture, and no graph computes it again."""

    name = "broken_scheduled_at_capture"

    def tensors(self):
        return {}

    def plan_capture(self, descriptor):
        self._bounds[:] = (torch.arange(SPLITS + 1) + SPLITS - 1) // SPLITS  # one page in each row

    def schedule(self, metadata):
        pass


class PlannedAtCapture(HostPlan):
    """Broken: the plan is made before the capture, and not in replays."""

    name = "broken_planned_at_capture"

    def plan_replay(self, descriptor, batch):
        pass


class PlannedElsewhere(HostPlan):
    """Broken: each plan is written to new tensors, while the graph reads those of its capture."""

    name = "broken_planned_elsewhere"

    def _plan(self, lens):
        self._lens, self._indptr = self._lens.clone(), self._indptr.clone()
        super()._plan(lens)


class SplitsByRows(BakedSplits):
    """Correct, but not batch-invariant: the number of splits depends on the number of requests."""

    name = "broken_splits_by_rows"

    def plan_capture(self, descriptor):
        self._keys_per_split = 7 * descriptor.padded_reqs


class BuffersOfTheFirstAttempt(HostPlan):
    """Broken: objects made once per size keep the buffers of a failed capture."""

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


FAMILIES = (BakedSplits, DeviceSchedule, HostPlan)
BROKEN = (SplitsOfTheLastPlan, ScheduledAtCapture, PlannedAtCapture, PlannedElsewhere, PagesOfTheCapture)
