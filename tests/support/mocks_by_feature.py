"""Backends that are correct in plain features and wrong in one: the cases of that feature must find the mistake.

Each is a correct mock with one method replaced by a function of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.mocks import BakedSplits, DeviceSchedule, HostPlan, MockBackend


def broken(name: str, base: type[MockBackend], **methods: Callable[..., Any]) -> type[MockBackend]:
    return type(name, (base,), {"name": f"broken_{name}"} | methods)


def table_of_group_0(self, metadata, layer):
    width = metadata.block_tables[layer.group].shape[1]
    columns = torch.arange(width).clamp(max=metadata.block_tables[0].shape[1] - 1)
    return metadata.block_tables[0][:, columns].long()


def table_by_layer_number(self, metadata, layer):
    """Also for layers that share a cache."""
    own, tables = metadata.block_tables[layer.group], metadata.block_tables
    table = tables[min(layer.index, len(tables) - 1)]
    return table[:, torch.arange(own.shape[1]).clamp(max=table.shape[1] - 1)].long()


def page_size_of_group_0(self, layer):
    return min(self.context.kv_groups[0].page_size, layer.k_cache.shape[1])


def splits_of_group_0(self, metadata, where, layer):
    bounds = self._bounds[0, : metadata.seq_lens.shape[0]]
    return (where // self._page_size(layer) >= bounds[:, :, None]).sum(1) - 1


def plan_of_group_0(self, lens):
    HostPlan._plan(self, lens)
    self._indptr[:] = self._indptr[:1].clone()


def window_pages_from_column_0(self, metadata, layer):
    table, kv = metadata.block_tables[layer.group].long(), self.context.kv_groups[layer.group]
    if kv.sliding_window is None:
        return table
    width = table.shape[1]
    return table[:, torch.arange(width) % min(width, -(-kv.sliding_window // kv.page_size) + 1)]


def chunks_as_windows(self, spec, at, where):
    """A token sees as many tokens as a chunk has, wherever the chunk starts."""
    if spec.attention_chunk_size is None:
        return BakedSplits._reach(self, spec, at, where)
    return where > at - spec.attention_chunk_size


def chunks_and_one_more(self, spec, at, where, *, first_only=False):
    """A token sees the last token of the previous chunk; `first_only`: only the first token of a chunk does."""
    seen = BakedSplits._reach(self, spec, at, where)
    if spec.attention_chunk_size is None:
        return seen
    inside = at % spec.attention_chunk_size
    return seen | ((where == at - inside - 1) & ((inside == 0) | (not first_only)))


def chunks_that_begin_late(self, spec, at, where):
    return chunks_and_one_more(self, spec, at, where, first_only=True)


def cut_values(self, layer):
    """Value heads are cut to the size of the key heads; the rest of the output is zeros."""
    dims = torch.arange(layer.v_cache.shape[3])
    return torch.where(dims < layer.spec.head_dim, layer.v_cache, 0.0)


def padded_values(self, layer):
    """Value heads are read at the strides of key heads."""
    values, size = layer.v_cache, layer.spec.head_dim
    heads = torch.arange(values.shape[2])[:, None] * size + torch.arange(values.shape[3])
    return values.flatten(2)[:, :, heads.clamp(max=values.shape[2] * values.shape[3] - 1)]


def seq_lens(self, metadata, layer):
    return metadata.seq_lens


def seq_lens_of_group(self, kv, metadata):
    return metadata.seq_lens


def one_key_more(self, metadata, layer):
    return BakedSplits._kv_lens(self, metadata, layer) + int(layer.spec.is_cross)


def one_key_without_encoder(self, metadata, layer):
    return BakedSplits._kv_lens(self, metadata, layer).clamp(min=int(layer.spec.is_cross))


def causal(self, spec):
    """As if the tokens of the request were the last encoder tokens."""
    return True


def causal_window(self, spec, ahead):
    return BakedSplits._near(self, spec, ahead) & (ahead <= 0)


def window_one_wider(self, spec, ahead):
    return BakedSplits._near(self, spec, ahead) | (ahead.abs() == spec.sliding_window)


def window_of_one_side(self, spec, ahead):
    return BakedSplits._near(self, spec, ahead) | (ahead > 0)


def last_token_of_the_neighbor(self, tokens, row, metadata):
    own = BakedSplits._sees_row(self, tokens, row, metadata)
    return own | (tokens == metadata.query_start_loc[row][:, None] - 1)


def decode_tokens_too(self, metadata):
    return torch.zeros_like(metadata.query_start_loc[0])


def splits_by_rows(self, metadata, where, layer):
    splits = BakedSplits._split_of(self, metadata, where, layer)
    return where // (7 * len(splits)) + 0 * splits if layer.spec.is_cross else splits


CrossSplitsByRows = broken("cross_splits_by_rows", BakedSplits, _split_of=splits_by_rows)
"""Correct, but not batch-invariant: in cross layers the number of splits depends on the number of requests."""

CHUNKS = ("attention_chunk_size", "mixed-attention_chunk_size")
CROSS = ("cross_attention", "mixed-cross_attention")
ENCODER = ("encoder_attention", "mixed-encoder_attention")
ENCODER_WINDOW = ("mixed-encoder_attention-window",)
BROKEN_BY_FEATURE = {
    broken("table_of_group_0", BakedSplits, _pages=table_of_group_0): ("kv_groups", "mixed-kv_groups"),
    broken("group_by_number", BakedSplits, _pages=table_by_layer_number): ("kv_groups",),
    broken("page_size_of_group_0", BakedSplits, _page_size=page_size_of_group_0): ("kv_groups",),
    broken("schedule_of_group_0", DeviceSchedule, _split_of=splits_of_group_0): ("mixed-kv_groups",),
    broken("plan_of_group_0", HostPlan, _plan=plan_of_group_0): ("mixed-kv_groups",),
    broken("window_pages_from_column_0", BakedSplits, _pages=window_pages_from_column_0): ("window-pages",),
    broken("decode_tokens_too", BakedSplits, _first=decode_tokens_too): ("prefill", "prefill-window"),
    broken("chunks_as_windows", BakedSplits, _reach=chunks_as_windows): CHUNKS,
    broken("chunks_and_one_more", BakedSplits, _reach=chunks_and_one_more): CHUNKS,
    broken("chunks_that_begin_late", BakedSplits, _reach=chunks_that_begin_late): CHUNKS,
    broken("cut_values", BakedSplits, _values=cut_values): ("mixed-v_head_dim",),
    broken("padded_values", BakedSplits, _values=padded_values): ("v_head_dim",),
    broken("cross_by_seq_lens", BakedSplits, _kv_lens=seq_lens): (*CROSS, "cross_attention-kv_groups"),
    broken("cross_scheduled_by_seq_lens", DeviceSchedule, _lens_in=seq_lens_of_group): (
        "cross_attention-kv_groups",
        "mixed-cross_attention-kv_groups",
    ),
    broken("causal_cross", BakedSplits, _causal=causal): ("cross_attention-query_len", "mixed-cross_attention"),
    broken("cross_and_one_more", BakedSplits, _kv_lens=one_key_more): CROSS,
    broken("cross_of_something", BakedSplits, _kv_lens=one_key_without_encoder): CROSS,
    broken("causal_encoder", BakedSplits, _near=causal_window): ENCODER,
    broken("encoder_window_one_wider", BakedSplits, _near=window_one_wider): ENCODER_WINDOW,
    broken("encoder_window_of_one_side", BakedSplits, _near=window_of_one_side): ENCODER_WINDOW,
    broken("encoder_of_neighbors", BakedSplits, _sees_row=last_token_of_the_neighbor): ENCODER,
}
"""What is wrong in these features alone, and right in the plain ones."""
