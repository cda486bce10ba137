"""Drafts that form a tree: masks, positions, the path of the sampled tokens, and the move of its KV."""

from __future__ import annotations

import pytest
import torch

from graphrt.kernels.cache.path import PathMover
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.buffers import Capacity, PageGroup, StaticBuffers
from graphrt.kernels.metadata.draft_tree import follow_tree, write_tree

DRAFTS, DEPTH, REQS, PAGE = 5, 3, 4, 4
FIRST = 10  # position of the first token of each request
TOKENS = [7, 17, 8, 9, 8, 6]
PARENTS = [0, 1, 1, 0, 2]  # 7 - 17 - (8 - 6, 9), 8
GROUPS = (PageGroup(PAGE, 20, 0, 5), PageGroup(2, 40, 0, 10, writers_at=20))


def buffers_of(device: torch.device) -> StaticBuffers:
    """Refreshed buffers: a tree, the same with three drafts, a prompt of two tokens with a draft, and padding."""
    capacity = Capacity(
        reqs=6, tokens=40, req_indices=8, inputs=100, ring=2, page_groups=GROUPS, drafts=DRAFTS, tree_depth=DEPTH
    )
    b = StaticBuffers.allocate(capacity, device).cut(REQS, REQS * (1 + DRAFTS), 1 + DRAFTS, DEPTH)
    b.path_rows.fill_(9)
    b.inputs[layout.HEADER_KIND] = layout.DELTA
    b.draft_parents[5], b.draft_parents[2] = (torch.tensor(PARENTS, dtype=torch.int32) for _ in range(2))
    b.draft_parents[1] = -7
    b.req_indices.copy_(torch.tensor([5, 2, 1, -1]))
    b.drafts_left.copy_(torch.tensor([5, 3, 1, -1]))
    first = torch.arange(REQS) * (1 + DRAFTS)
    root = first + torch.tensor([0, 0, 1, 0])
    root[3] = 0
    b.logits_indices.view(-1, REQS).copy_(
        root + torch.arange(1 + DRAFTS)[:, None].minimum(b.drafts_left.cpu().clamp(0))
    )
    b.input_ids.view(REQS, -1).copy_(torch.tensor(TOKENS))
    b.positions.view(REQS, -1).copy_(FIRST + torch.arange(1 + DRAFTS))
    # Request r has pages 4 r + 1, ... of the first group, and twice as many of the second.
    place = FIRST + torch.arange(1 + DRAFTS) + 16 * torch.arange(REQS)[:, None] + PAGE
    b.slot_mapping.view(2, REQS, -1).copy_(torch.stack((place, place)))
    return b


def test_masks_positions_and_paths(op_device: torch.device) -> None:
    b = buffers_of(op_device)
    write_tree(b)
    masks = b.tree_masks.view(REQS, -1).tolist()
    assert masks[0] == [0b1, 0b11, 0b111, 0b1011, 0b10001, 0b100111]
    assert masks[1] == [0b1, 0b11, 0b111, 0b1011, 0b10000, 0b100000]
    assert masks[2] == [0b1, 0b11, 0b111, 0b1000, 0b10000, 0b100000], "the draft of a prompt follows it"
    assert masks[3] == [1 << i for i in range(6)]
    positions = (b.positions.view(REQS, -1) - FIRST).tolist()
    assert positions == [[0, 1, 2, 2, 1, 3], [0, 1, 2, 2, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    paths = b.path_rows.view(-1, REQS)
    # The first request accepts 17, 8, 6; the second 17, then nothing; the prompt its draft, token 8.
    sampled = ([17, 17, 8, 17], [8, 4, 8, 8], [6, 6, 6, 6])
    for position, tokens in enumerate(sampled):
        follow_tree(b, torch.tensor(tokens, dtype=torch.int64, device=op_device), position)
        b.drafts_left.copy_(torch.where(paths[position] > 0, b.drafts_left - 1, -1))
    assert paths.tolist() == [[4, 5, 6, 0], [8, 0, 0, 0], [20, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads_first", [False, True], ids=["NHD", "HND"])
def test_moved_keys_and_values(op_device: torch.device, dtype: torch.dtype, heads_first: bool) -> None:
    """The third accepted draft moves from slot 5 to 3. Slot 3 is free, as the second was in its place already."""
    b = buffers_of(op_device)
    b.path_rows.view(-1, REQS).copy_(torch.tensor([[16, 13, 6, 0], [20, 17, 0, 0], [0, 21, 0, 0]]))
    # Token i has row 4 i: 4, 5 of the first request; 3, 4, 5 of the second, whose slots overlap with 1, 2, 3.
    caches, before = [], []
    for group, dim in zip(GROUPS, (8, 3), strict=True):
        shape = (
            (group.num_pages, 3, group.page_size, dim) if heads_first else (group.num_pages, group.page_size, 3, dim)
        )
        values = torch.randn(shape, generator=torch.Generator().manual_seed(dim)).to(dtype).to(op_device)
        caches.append([values.transpose(1, 2) if heads_first else values])
        before.append(caches[-1][0].cpu().clone())
    b.logits_indices.view(-1, REQS).copy_(torch.arange(REQS) * 6 + torch.arange(6)[:, None])
    PathMover(caches).move(b)
    moves = {(0, 4): (0, 1), (0, 5): (0, 2), (1, 3): (1, 1), (1, 4): (1, 2), (1, 5): (1, 3)}
    slots = b.slot_mapping.view(2, REQS, -1).cpu()
    for of_group, (group, want) in enumerate(zip(GROUPS, before, strict=True)):
        new, size = want.view(torch.uint8).clone(), group.page_size
        for source, target in moves.items():
            (page, at), (to_page, to) = (divmod(int(slots[of_group][place]), size) for place in (source, target))
            new[to_page, to] = want.view(torch.uint8)[page, at]
        assert torch.equal(caches[of_group][0].cpu().view(torch.uint8), new)
