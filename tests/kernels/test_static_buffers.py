"""Static buffers: shapes, contents, kinds."""

from __future__ import annotations

import torch

from graphrt.kernels.metadata.buffers import BufferKind, Capacity, PageGroup, StaticBuffers
from graphrt.testing.poison import poison_derived, poisoned

CPU = torch.device("cpu")
GROUPS = (PageGroup(4, 11, 0, 5), PageGroup(2, 6, 5, 9, window=3, writers_at=11))
CAPACITY = Capacity(reqs=3, tokens=7, req_indices=6, inputs=100, ring=2, page_groups=GROUPS)


def test_bytes_and_shapes_of_the_buffers() -> None:
    buffers = StaticBuffers.allocate(CAPACITY, CPU)
    by_hand = {
        "page_groups": (2, 8), "inputs": (100,), "last_token": (6,), "step_counter": (1,), "last_writers": (23,),
        "write_conflicts": (3, 3), "page_table": (2, 6, 9), "page_spans": (2, 6, 2), "block_table": (2, 3, 9),
        "table_from": (2, 3), "table_to": (2, 3), "input_ids": (7,), "positions": (7,), "slot_mapping": (2, 7),
        "query_start_loc": (4,), "seq_lens": (3,), "logits_indices": (3,), "req_indices": (3,), "req_status": (3,),
        "temperatures": (3,), "seeds": (3,), "new_spans": (2, 3, 4), "check_code": (2, 3), "check_value": (2, 3),
        "fault_code": (3,), "fault_value": (3,), "void_req_indices": (3,), "encoder_lens": (3,), "buffer_rows": (3,),
        "decode_seq_lens": (3,), "prompt_seq_lens": (3,), "decode_start_loc": (4,), "prompt_start_loc": (4,),
        "step_ring": (2,), "token_ring": (2, 1, 3), "finish_reason_ring": (2, 3),
        "fault_code_ring": (2, 3), "fault_value_ring": (2, 3), "draft_count_ring": (2, 3), "last_encoder_len": (6,),
        "input_ring": (2, 384), "cursor": (5,), "order": (3,), "req_seq_lens": (6,), "finish_reasons": (6,),
        "req_values": (13, 6),
        "top_ks": (3,), "top_ps": (3,), "min_ps": (3,), "repetition_penalties": (3,), "presence_penalties": (3,),
        "frequency_penalties": (3,), "prompt_lens": (3,), "penalty_seen": (6, 0), "penalty_counts": (6, 0),
        "token_history": (6, 0), "counted_lens": (6,), "drafts": (6, 0), "draft_logprobs": (6, 0, 0),
        "draft_parents": (6, 0), "tree_masks": (0,), "path_rows": (0,), "kv_limits": (0,),
            "sample_lens": (3,), "drafts_left": (3,),
        "logprobs": (3,), "logprob_tokens": (3,), "rank_ring": (2, 1, 3), "logprob_ring": (2, 1, 3, 0),
        "logprob_token_ring": (2, 1, 3, 0), "token_masks": (3,),
        "bias_tokens": (6, 2, 0), "bias_values": (6, 2, 0), "bias_lists": (6, 3), "mask_words": (6, 0),
        "length_limits": (6,), "stop_tokens": (8, 6), "loop_condition": (1,),
    }  # fmt: skip
    assert {name: tuple(tensor.shape) for name, tensor in buffers.named()} == by_hand
    contents = {name: torch.tensor(spec.initial) for name, spec in StaticBuffers.specs().items()}
    contents["page_groups"] = torch.tensor([[4, 11, 0, 5, 0, 0, 0, 0], [2, 6, 5, 9, 3, 0, 11, 0]])
    for name, tensor in buffers.named():
        assert tensor.dtype == StaticBuffers.specs()[name].dtype, name
        assert (tensor == contents[name]).all(), name
    assert not any(t.any() for kind in (BufferKind.INPUT, BufferKind.DERIVED) for _, t in buffers.named(kind))
    assert (CAPACITY.reqs_plus_one, CAPACITY.last_writers) == (4, 11 + 6 + 6)
    assert (CAPACITY.groups, CAPACITY.groups_plus_one, CAPACITY.pages_per_req) == (2, 3, 9)


def test_poison_reaches_derived_buffers_only_and_reset_undoes_it() -> None:
    buffers = StaticBuffers.allocate(CAPACITY, CPU)
    before = {name: tensor.clone() for name, tensor in buffers.named()}
    derived = {name for name, _ in buffers.named(BufferKind.DERIVED)}
    poison_derived(buffers)
    for name, tensor in buffers.named():
        assert poisoned(tensor).all() if name in derived else torch.equal(tensor, before[name]), name
    buffers.reset()
    assert all(torch.equal(tensor, before[name]) for name, tensor in buffers.named())


def test_initial_contents_and_pads_of_the_declarations() -> None:
    specs = StaticBuffers.specs()
    assert {"temperatures": "0", "step_counter": "one value", "last_token": "untouched"}.items() <= {
        name: spec.pad for name, spec in specs.items()
    }.items()
    unknown = (
        "last_token", "step_counter", "step_ring", "token_ring", "fault_value_ring", "order", "stop_tokens",
        "token_history", "drafts",
    )  # fmt: skip
    expected = dict.fromkeys(unknown, -1) | {"table_to": 1 << 30}  # the first launch clears every table
    assert {name: spec.initial for name, spec in specs.items() if spec.initial} == expected


def test_buffers_are_listed_by_kind() -> None:
    buffers = StaticBuffers.allocate(CAPACITY, CPU)
    every = [name for name, _ in buffers.named()]
    assert every == list(StaticBuffers.specs())
    parts = {kind: [name for name, _ in buffers.named(kind)] for kind in BufferKind}
    assert sorted(name for part in parts.values() for name in part) == sorted(every)
    assert parts[BufferKind.INPUT] == ["input_ring"]
    assert parts[BufferKind.CONSTANT] == ["page_groups"]
    both = [name for name, _ in buffers.named(BufferKind.INPUT, BufferKind.OUTPUT)]
    assert both == [name for name in every if name in parts[BufferKind.INPUT] or name in parts[BufferKind.OUTPUT]]
    assert all(tensor is getattr(buffers, name) for name, tensor in buffers.named())
