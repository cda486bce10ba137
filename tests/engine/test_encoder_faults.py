"""Wrong specs, batches and requests of cross and encoder layers, and the faults that name them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import graphrt
from graphrt.batch import Batch, Request
from graphrt.cache.groups import kv_groups
from graphrt.cache.kv_cache import KVCache
from graphrt.config import RuntimeConfig
from graphrt.engine.handle import StepFaultError
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError
from graphrt.kernels.types import FaultCode
from graphrt.runtime import Runtime
from graphrt.spec import AttentionKind, AttentionSpec, KVCacheSpec
from tests.support.encoder_adapter import CROSS, ENCODER, OWN, cross_layer

F32 = torch.float32

WRONG_SPECS: dict[str, tuple[Callable[[], Any], str]] = {
    "kind": (lambda: replace(OWN, kind="cross"), "AttentionSpec.kind: expected AttentionKind"),
    "cross_window": (lambda: replace(CROSS, sliding_window=3), "sliding_window: expected None in cross .*, got 3"),
    "cross_chunks": (lambda: replace(CROSS, attention_chunk_size=3), "attention_chunk_size: expected None in cross"),
    "cross_slopes": (lambda: replace(CROSS, alibi_slopes=(1.0,) * 4), "alibi_slopes: expected None in cross"),
    "encoder_chunks": (lambda: replace(ENCODER, attention_chunk_size=3), "attention_chunk_size: expected None in enc"),
    "encoder_shares": (lambda: replace(ENCODER, kv_shared_with=0), "kv_shared_with: expected None in encoder"),
    "group_window": (lambda: KVCacheSpec(1, 2, 16, cross=True, sliding_window=3), "KVCacheSpec.cross: expected False"),
    "cross_layer_own_group": (
        lambda: served([CROSS], KVCacheSpec(1, 2, 16, dtype=F32), None), "kind: expected decoder, as in its"
    ),
    "own_layer_cross_group": (
        lambda: served([OWN], KVCacheSpec(1, 2, 16, dtype=F32, cross=True), 8), r"attention\[0\].kind: expected cross"
    ),
    "shares_another_kind": (
        lambda: served([OWN, replace(CROSS, kv_shared_with=0)], None, 8), r"attention\[1\].kind: expected decoder"
    ),
    "no_encoder_len": (lambda: served([CROSS], None, None), "max_encoder_len: required for cross layers"),
    "needless_encoder_len": (lambda: served([OWN], None, 8), "max_encoder_len: expected None without cross layers"),
    "encoder_shares_by_name": (
        lambda: graphrt.Attention(4, 16, name="x", kind=AttentionKind.ENCODER, kv_shared_with="y"),
        "kv_shared_with: expected None in encoder attention"
    ),
    "one_spec_for_all": (lambda: served(ENCODER, (), None), "pass a spec per layer"),
    "no_device": (lambda: KVCache((), (), ()), "groups: empty; pass a KVCacheSpec, or pass device="),
}  # fmt: skip


def served(specs: Any, groups: Any, max_encoder_len: int | None, device: torch.device | str = "cpu") -> Runtime:
    every = tuple(specs) if isinstance(specs, list) else (specs,)
    model, _ = cross_layer(every, torch.device(device))
    config = RuntimeConfig(4, 8, 32, decode_sizes=(4,), mixed_sizes=(8,), max_encoder_len=max_encoder_len)
    return Runtime(
        model, specs, groups, vocab_size=64 * len(every), device=device, config=config, sampler=None,
        num_pages=20 if groups != () else "auto",
    )  # fmt: skip


@pytest.mark.parametrize("name", WRONG_SPECS)
def test_contradicting_options_raise(name: str) -> None:
    make, message = WRONG_SPECS[name]
    with pytest.raises(ConfigError, match=message):
        make()


def test_faults_of_cross_groups_name_request_value_and_group() -> None:
    runtime = served([OWN, CROSS], kv_groups([OWN, CROSS], page_size=4), 9)
    runtime.capture()
    good = Request(1, [1], 1, ([5], [6]), encoder_len=3)
    for row, code, value in (
        (Request(0, [1], 1, ([1], [2]), encoder_len=5), FaultCode.LENGTH_EXCEEDS_PAGES, 5),
        (Request(0, [1], 1, ([1], []), encoder_len=5), FaultCode.LENGTH_EXCEEDS_PAGES, 5),
        (Request(0, [1], 1, ([1], [2, 20]), encoder_len=5), FaultCode.PAGE_OUT_OF_RANGE, 20),
        (Request(0, [1], 1, ([1], [2, 0]), encoder_len=5), FaultCode.PAGE_OUT_OF_RANGE, 0),
    ):
        handle = runtime.replay(Batch.from_requests([good, row]))
        assert [(f.index, f.code, f.value, f.group) for f in handle.faults] == [(1, code, value, 1)]
    with pytest.raises(StepFaultError, match=r"a length of 9 needs more pages .* in KV group 1"):
        raise runtime.replay(Batch.from_requests([Request(0, [1], 1, ([1], [2, 3]), encoder_len=9)])).error
    batch = Batch.from_requests([good])
    batch.encoder_lens[0] = -2  # after it was checked: the device finds it
    (fault,) = runtime.replay(batch).faults
    assert (fault.code, fault.value, fault.group) == (FaultCode.BAD_ENCODER_LEN, -2, 1)
    assert "encoder_len -2 is negative" in str(fault)
    with pytest.raises(ShapeError, match="encoder_lens: expected lengths >= 0, got -1"):
        Batch.from_requests([replace(good, encoder_len=-1)])
    with pytest.raises(CapacityError, match=r"encoder_lens: expected at most max_encoder_len=9, got 10 for request 0"):
        runtime.replay(Batch.from_requests([replace(good, encoder_len=10)]))
    assert not runtime.replay(Batch.from_requests([good])).faults
    runtime.close()


def test_changed_encoder_len_is_a_fault(device: torch.device) -> None:
    """Without the fault, cross layers would see nothing, another length, or the encoder of a finished sequence."""
    runtime = served([OWN, CROSS], kv_groups([OWN, CROSS], page_size=4), 9, device=device)
    runtime.capture()
    begins = [Request(0, [1], 1, ([1], [2, 3]), encoder_len=7), Request(1, [1], 1, ([4], [2]), encoder_len=3)]
    assert not runtime.replay(Batch.from_requests(begins)).faults
    other = Request(1, [1], 2, ([], []), encoder_len=3)
    forgotten = runtime.replay(Batch.from_requests([other, Request(0, [1], 2, ([], []))]))
    with pytest.raises(
        StepFaultError,
        match=r"batch position 1: ENCODER_LEN_CHANGED: .* 0 differs from the earlier steps of the sequence; pass",
    ):
        raise forgotten.error
    hit = runtime.replay(
        Batch.from_requests([Request(0, [1], 6, ([5, 6], []), encoder_len=7), replace(other, seq_len=3)])
    )
    assert [(f.index, f.code, f.group) for f in hit.faults] == [(0, FaultCode.LENGTH_EXCEEDS_PAGES, 1)]
    goes_on = [Request(0, [1], 2, ([], []), encoder_len=7), replace(other, seq_len=4)]
    assert not runtime.replay(Batch.from_requests(goes_on)).faults
    runtime.close()


def test_encoder_models_need_whole_sequences_without_pages() -> None:
    runtime = served([ENCODER], None, None)
    runtime.capture()
    with pytest.raises(
        ShapeError, match="query_lens: expected 5 new tokens for request 1, which is its seq_len, got 1"
    ):
        runtime.replay(Batch.from_requests([Request(0, [1, 2], 2), Request(1, [3], 5)]))
    with pytest.raises(ShapeError, match="page_indptr: expected lists of 0 KV groups"):
        runtime.replay(Batch.from_requests([Request(0, [1, 2], 2, [3])]))
    with pytest.raises(CapacityError, match="max_encoder_len=0, got 4 for request 0; the model has no cross layers"):
        runtime.replay(Batch.from_requests([Request(0, [1, 2], 2, encoder_len=4)]))
    assert not runtime.replay(Batch.from_requests([Request(0, [1, 2], 2)])).faults
    runtime.close()


@pytest.mark.parametrize("specs", [(OWN,), (OWN, CROSS)], ids=["one_group", "two_groups"])
def test_batch_without_pages_continues_in_every_group(specs: tuple[AttentionSpec, ...]) -> None:
    lens = [3] if len(specs) == 2 else None
    runtime = served(list(specs), kv_groups(specs, page_size=4), 9 if lens else None)
    runtime.capture()
    begins = Batch(req_indices=[0], seq_lens=[1], tokens=[1], encoder_lens=lens)
    with pytest.raises(StepFaultError, match="batch position 0: LENGTH_EXCEEDS_PAGES: a length of 1 needs more"):
        raise runtime.replay(begins).error
    lists = {"page_indptr": range(len(specs) + 1), "page_ids": [4, 5][: len(specs)]}
    both = [
        Batch(req_indices=[0], seq_lens=[1], tokens=[1], encoder_lens=lens, **lists),
        Batch(req_indices=[0], seq_lens=[2], tokens=[7], encoder_lens=lens),
    ]
    for batch in both:
        handle = runtime.replay(batch)
        assert not handle.faults
    got = handle.logits(copy=True)
    again = Batch(req_indices=[0], seq_lens=[2], tokens=[7], encoder_lens=lens, **lists)
    assert torch.equal(got, runtime.replay(again).logits(copy=True)), "as with all pages listed"
    with pytest.raises(
        ShapeError, match=f"expected lists of {len(specs)} KV groups, .* pass a list per group and request"
    ):
        runtime.replay(Batch(req_indices=[0], seq_lens=[2], tokens=[7], page_indptr=[0, 0, 0, 1], page_ids=[4]))
    runtime.close()
