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
        where = torch.arange(metadata.block_tables[0].shape[1] * layer.k_cache.shape[1])
        seen = (where <= at[:, None]) & (metadata.slot_mappings[0] >= 0)[:, None]
        if spec.sliding_window is not None:
            seen = seen & (where > at[:, None] - spec.sliding_window)
        split = self._split_of(metadata, where)[row]
        pages = self._pages(metadata)[row]
        k, v = (c[pages].flatten(1, 2).repeat_interleave(spec.group, 2) for c in (layer.k_cache, layer.v_cache))
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
        out.copy_(torch.where((total > -math.inf)[..., None], merged, 0.0))
        if lse is not None:
            lse.copy_(total)

    def _split_of(self, metadata, where):
        """[rows, keys]: the split that attends to each key; none for a number outside the range."""
        raise NotImplementedError

    def _pages(self, metadata):
        return metadata.block_tables[0].long()


class BakedSplits(MockBackend):
    """The number of splits is a host number, frozen at capture; right because it follows from the table's width."""

    name = "mock_baked_splits"

    def plan_capture(self, descriptor):
        self._keys_per_split = -(-self.context.max_pages(0) * self.context.kv_groups[0].page_size // SPLITS)

    def _split_of(self, metadata, where):
        return (where // self._keys_per_split).expand(metadata.seq_lens.shape[0], -1)


class DeviceSchedule(MockBackend):
    """Bounds of the splits are computed by `schedule`, on the device, from this step's lengths."""

    name = "mock_device_schedule"

    def allocate(self):
        self._bounds = torch.zeros(self.context.max_num_reqs, SPLITS + 1, dtype=torch.int32)

    def tensors(self):
        return {"bounds": self._bounds}

    def schedule(self, metadata):
        rows = metadata.seq_lens.shape[0]
        shares = torch.arange(SPLITS + 1, dtype=torch.int32)
        self._bounds[:rows] = (metadata.seq_lens[:, None] * shares + SPLITS - 1) // SPLITS

    def _split_of(self, metadata, where):
        bounds = self._bounds[: metadata.seq_lens.shape[0]]
        passed = (where >= bounds[:, :, None]).sum(1)
        return passed - 1


class HostPlan(MockBackend):
    """`plan_replay` writes lengths and offsets from the host, `schedule` lists the pages by them on the device."""

    name = "mock_host_plan"
    graph_support = GraphSupport.UNIFORM

    def allocate(self):
        rows = self.context.max_num_reqs
        self._lens = torch.zeros(rows, dtype=torch.int32)
        self._indptr = torch.zeros(rows + 1, dtype=torch.int32)
        self._indices = torch.zeros(rows * self.context.max_pages(0), dtype=torch.int32)

    def tensors(self):
        return {"indices": self._indices}

    def plan_capture(self, descriptor):
        self._plan(torch.ones(descriptor.padded_reqs, dtype=torch.int32))

    def plan_replay(self, descriptor, batch):
        lens = torch.zeros(descriptor.padded_reqs, dtype=torch.int32)
        lens[: batch.num_reqs] = torch.from_numpy(batch.seq_lens)
        self._plan(lens)

    def _plan(self, lens):
        rows, page_size = len(lens), self.context.kv_groups[0].page_size
        self._lens[:rows] = lens
        self._indptr[1 : rows + 1] = ((lens + page_size - 1) // page_size).cumsum(0)

    def schedule(self, metadata):
        rows = metadata.seq_lens.shape[0]
        list_pages(metadata.block_tables[0], self._indptr[: rows + 1], self._indices)

    def _split_of(self, metadata, where):
        lens = self._lens[: metadata.seq_lens.shape[0], None]
        return torch.where(where < lens, where * SPLITS // lens.clamp(min=1), -1)

    def _pages(self, metadata):
        rows, width = metadata.block_tables[0].shape
        at = self._indptr[:rows, None] + torch.arange(width)
        listed = at < self._indptr[1 : rows + 1, None]
        return torch.where(listed, self._indices[at.clamp(max=len(self._indices) - 1)], 0).long()


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
        self._bounds[:] = (torch.arange(SPLITS + 1) + SPLITS - 1) // SPLITS  # one token in each row

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

    def _pages(self, metadata):
        own, self._indices = self._indices, self._wrapper
        try:
            return super()._pages(metadata)
        finally:
            self._indices = own


class PagesOfTheCapture(HostPlan):
    """Broken: page ids are listed before the capture, and no graph lists them again."""

    name = "broken_pages_of_the_capture"

    def tensors(self):
        return {}

    def plan_capture(self, descriptor):
        super().plan_capture(descriptor)
        self._indices[:] = torch.arange(len(self._indices))

    def schedule(self, metadata):
        pass


FAMILIES = (BakedSplits, DeviceSchedule, HostPlan)
BROKEN = (SplitsOfTheLastPlan, ScheduledAtCapture, PlannedAtCapture, PlannedElsewhere, PagesOfTheCapture)
