"""Move the keys and values of accepted drafts to consecutive KV slots, if drafts form a tree.

Token i of a request's step has the KV slot of position start + i, in which the tokens of all branches are mixed. Later
steps read the token at depth d of the accepted path in the slot of position start + d.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.library import define_op
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.sizes import next_power_of_two

_NUM_WARPS = 4
_TILE = 2048  # words that a program loads at a time
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}
_FIELDS = 8  # per table row: address, strides of pages, slots and heads, page size, KV group, heads, words per head


@triton.jit(do_not_specialize=["padded_reqs", "max_depth", "stride_slots"])
def _move_path_kernel(
    table_ptr,
    slot_mapping_ptr,
    path_rows_ptr,
    logits_indices_ptr,
    padded_reqs,
    max_depth,
    stride_slots,
    WORD: tl.constexpr,
    FIELDS: tl.constexpr,
    PATH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move the path of one request in one tensor. All its tokens are read before the first is written, because the slot
    that a token moves to may be that of a later token of the path."""
    row = tl.program_id(0)
    depth = tl.arange(0, PATH_BLOCK)
    path_row = tl.load(path_rows_ptr + depth * padded_reqs + row, mask=depth < max_depth, other=0)
    accepted = path_row > 0
    source = tl.load(logits_indices_ptr + path_row, mask=accepted, other=0)
    target = tl.load(logits_indices_ptr + row) + 1 + depth
    moves = accepted & (source != target)
    if tl.max(moves.to(tl.int32), 0) > 0:
        fields = table_ptr + tl.program_id(1) * FIELDS
        address, stride_page, stride_slot, stride_head = (
            tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3),
        )  # fmt: skip
        page_size, group, heads, head_words = (
            tl.load(fields + 4), tl.load(fields + 5), tl.load(fields + 6), tl.load(fields + 7),
        )  # fmt: skip
        slots_ptr = slot_mapping_ptr + group * stride_slots
        from_slot = tl.load(slots_ptr + source, mask=moves, other=-1)
        to_slot = tl.load(slots_ptr + target, mask=moves, other=-1)
        moves = moves & (from_slot >= 0) & (to_slot >= 0)
        cache_ptr = address.to(tl.pointer_type(WORD))
        from_at = from_slot // page_size * stride_page + from_slot % page_size * stride_slot
        to_at = to_slot // page_size * stride_page + to_slot % page_size * stride_slot
        for base in range(0, heads * head_words, BLOCK):
            column = base + tl.arange(0, BLOCK)
            mask = moves[:, None] & (column < heads * head_words)[None, :]
            offset = (column // head_words * stride_head + column % head_words)[None, :]
            words = tl.load(cache_ptr + from_at[:, None] + offset, mask=mask)
            tl.debug_barrier()
            tl.store(cache_ptr + to_at[:, None] + offset, words, mask=mask)


_launch_kernel = KernelLauncher(_move_path_kernel)


def _tile(depth: int) -> dict[str, int]:
    path_block = next_power_of_two(depth)
    return {"FIELDS": _FIELDS, "PATH_BLOCK": path_block, "BLOCK": min(max(_TILE // path_block, 32), 256)}


def _launch(
    caches: list[torch.Tensor],
    table: torch.Tensor,
    slot_mapping: torch.Tensor,
    path_rows: torch.Tensor,
    logits_indices: torch.Tensor,
    reqs: int,
    word: int,
) -> None:
    depth = len(path_rows) // reqs
    _launch_kernel(
        (reqs, len(caches)), table, slot_mapping, path_rows, logits_indices, reqs, depth, slot_mapping.stride(0),
        WORD=_WORDS[word], **_tile(depth), num_warps=_NUM_WARPS,
    )  # fmt: skip


def _reference(
    caches: list[torch.Tensor],
    table: torch.Tensor,
    slot_mapping: torch.Tensor,
    path_rows: torch.Tensor,
    logits_indices: torch.Tensor,
    reqs: int,
    word: int,
) -> None:
    rows = path_rows.view(-1, reqs)
    depth, row = (rows > 0).nonzero(as_tuple=True)
    source, target = logits_indices[rows[depth, row]], logits_indices[row] + 1 + depth
    for cache, fields in zip(caches, table, strict=True):
        page_size, (from_slots, to_slots) = cache.shape[1], slot_mapping[fields[5]][torch.stack((source, target))]
        tokens = cache.view(torch.uint8) if cache.itemsize == 1 else cache  # fp8 has no indexing on a CPU
        tokens[to_slots // page_size, to_slots % page_size] = tokens[from_slots // page_size, from_slots % page_size]


_op = define_op(
    "move_path(Tensor(a!)[] caches, Tensor table, Tensor slot_mapping, Tensor path_rows, Tensor logits_indices, "
    "int reqs, int word) -> ()",
    triton_impl=_launch,
    reference=_reference,
)


class PathMover:
    """Moves the KV of accepted drafts in the tensors of a cache, in one launch.

    groups   tensors of each KV group, each [num_pages, page_size, num_kv_heads, head_dim], any strides, last one 1;
             empty for groups that steps do not write
    """

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        self._caches = [tensor for of_group in groups for tensor in of_group]
        rows = []
        for group, of_group in enumerate(groups):
            for cache in of_group:
                address, size = 0 if cache.device.type == "meta" else cache.data_ptr(), cache.itemsize
                strides = [stride * size for stride in cache.stride()[:3]]
                rows.append([address, *strides, cache.shape[1], group, cache.shape[2], cache.shape[3] * size])
        self._word = math.gcd(8, *(value for row in rows for value in (*row[:4], row[7])))
        for row in rows:
            row[1:4] = [stride // self._word for stride in row[1:4]]
            row[7] //= self._word
        with torch.inference_mode(False):
            self.table = torch.tensor(rows, dtype=torch.int64, device=self._caches[0].device)

    def move(self, buffers: StaticBuffers) -> None:
        """Move the KV of the paths that `follow_tree` has written. Capture-safe."""
        b = buffers
        _op(self._caches, self.table, b.slot_mapping, b.path_rows, b.logits_indices, len(b.req_indices), self._word)


def compile_variants() -> list[CompileSpec]:
    """Return the variants for short and long paths, with the widest and the narrowest words."""
    types = dict.fromkeys(("table_ptr", "slot_mapping_ptr", "path_rows_ptr", "logits_indices_ptr"), "*i64")
    return [
        CompileSpec(f"move_path_{depth}", _move_path_kernel, types, {"WORD": word, **_tile(depth)}, _NUM_WARPS, 3)
        for depth, word in ((4, tl.int64), (64, tl.uint8))
    ]
