"""Handles, input ring, statistics and ownership of a manager."""

from __future__ import annotations

import gc

import pytest
import torch

from graphrt.backends.registry import backend_class
from graphrt.batch import Batch
from graphrt.cache.kv_cache import KVCache
from graphrt.kernels.errors import ReplayError
from graphrt.kernels.types import KVLayout
from graphrt.spec import KVCacheSpec
from tests.support.capture_rig import PendingEvent
from tests.support.steps import prompt
from tests.support.toy import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, make_rig

CPU = torch.device("cpu")


def one(token: int, req_index: int = 0, page: int = 5) -> Batch:
    return Batch(req_indices=[req_index], seq_lens=[1], tokens=[token], page_indptr=[0, 1], page_ids=[page])


def greedy(rig, token: int) -> int:
    return int(rig.model.oracle([token]).argmax())


def test_results_can_be_read_in_any_order_and_late(device: torch.device) -> None:
    """Far more steps than ring entries, read in reverse order."""
    rig = make_rig(device)
    handles = [rig.manager.replay(one(t)) for t in range(20)]
    assert [int(h.tokens()[0]) for h in reversed(handles)] == [greedy(rig, t) for t in reversed(range(20))]
    assert all(h.done() for h in handles)
    assert [h.step for h in handles] == list(range(20))


def test_logits_are_valid_until_the_next_step(device: torch.device) -> None:
    rig = make_rig(device)
    first = rig.manager.replay(one(3))
    kept, view = first.logits(copy=True), first.logits()
    assert torch.equal(kept, view)
    assert tuple(view.shape) == (1, VOCAB)
    rig.manager.replay(one(4))
    with pytest.raises(ReplayError, match=r"step 1 has overwritten the logits of step 0; .*copy=True"):
        first.logits()
    assert (kept[0].double().cpu() - rig.model.oracle([3])).abs().max() < 2e-4


def test_stats_count_replays_reasons_padding_and_graphs(device: torch.device) -> None:
    rig = make_rig(device, decode_sizes=(2, 4), mixed_sizes=(), max_num_reqs=8)
    assert rig.manager.stats().pad_waste == 0.0
    rig.manager.replay(one(1))
    assert rig.manager.stats().pad_waste == 0.5
    five = Batch(req_indices=range(5), seq_lens=[1] * 5, tokens=[1] * 5, page_indptr=range(6), page_ids=range(1, 6))
    eager = rig.manager.replay(five)
    rig.manager.replay(prompt(1, 2, 3))
    rig.manager.replay(one(2), eager=True)
    stats = rig.manager.stats()
    assert {str(k): v for k, v in stats.replays.items()} == {"decode[2]": 1}
    assert stats.eager_steps == {
        "no decode graph for 5 requests; the largest captured size is 4": 1,
        "no mixed graph for 3 tokens; the largest captured size is 0": 1,
    }
    assert eager.why_eager == "no decode graph for 5 requests; the largest captured size is 4"
    assert (stats.real_tokens, stats.padded_tokens) == (1 + 5 + 3 + 1, 2 + 5 + 3 + 2)
    assert [str(g.descriptor) for g in stats.graphs] == ["decode[4]", "decode[2]"]
    assert all(g.nodes > 10 and g.seconds > 0 for g in stats.graphs)
    assert stats.recorder == ("cuda-graph" if device.type == "cuda" else "op trace (CPU)")
    assert stats.graph_bytes == sum(g.pool_bytes + g.driver_bytes for g in stats.graphs)
    assert stats.graph_bytes > 0 or device.type == "cuda"
    assert 0 < stats.capture_seconds < 600
    decode, *_ = stats.backend.split("+")  # where mixed steps have two parts, the other one's name follows
    assert decode == stats.backend_reason.split(":")[0]


def test_without_graphs_every_step_is_eager_and_counted(device: torch.device) -> None:
    rig = make_rig(device, use_graphs=False)
    assert rig.manager.descriptors == ()
    handle = rig.manager.replay(one(3))
    assert int(handle.tokens()[0]) == greedy(rig, 3)
    assert rig.manager.stats().eager_steps == {"graphs are switched off (use_graphs=False)": 1}


def test_custom_sampler_and_no_sampler(device: torch.device) -> None:
    worst = make_rig(device, sampler=lambda logits, step: logits.argmin(-1))
    assert int(worst.manager.replay(one(3)).tokens()[0]) == int(worst.model.oracle([3]).argmin())
    silent = make_rig(device, sampler=None)
    handle = silent.manager.replay(one(3))
    assert int(handle.logits().argmax()) == greedy(silent, 3)
    with pytest.raises(ReplayError, match="this runtime has no sampler"):
        handle.tokens()


@pytest.mark.parametrize("layout", list(KVLayout), ids=lambda x: x.value)
def test_caller_may_own_a_cache_with_any_strides_and_null_page(device: torch.device, layout: KVLayout) -> None:
    """K and V interleaved in one allocation with gaps, null page 7."""
    spec = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, layout, torch.float32, null_page=7)
    shape = (LAYERS, 12, 4, KV_HEADS, 2, HEAD_DIM + 8)
    if layout is KVLayout.HND:
        shape = (LAYERS, 12, KV_HEADS, 4, 2, HEAD_DIM + 8)
    mine = torch.full(shape, float("nan"), device=device)
    views = mine.transpose(2, 3) if layout is KVLayout.HND else mine
    cache = KVCache(spec, list(views[..., 0, :HEAD_DIM]), list(views[..., 1, :HEAD_DIM]))
    rig = make_rig(device, cache=cache, max_seq_len=16)
    model, manager = rig.model, rig.manager
    tokens = [3, 1, 4, 1, 5]
    batch = Batch(req_indices=[0], seq_lens=[5], query_lens=[5], tokens=tokens, page_indptr=[0, 2], page_ids=[0, 11])
    logits = manager.replay(batch).logits()[0]
    assert (logits.double().cpu() - model.oracle(tokens)).abs().max() < 2e-4
    keys = [model.project(0, (model.embed[token] + model.where[at])[None])[1][0] for at, token in enumerate(tokens)]
    stored = torch.cat([cache.k[0][0], cache.k[0][11][:1]])
    torch.testing.assert_close(stored, torch.stack(keys), rtol=1e-5, atol=1e-6)
    cache.copy_pages([0, 11], [3, 5])
    again = Batch(req_indices=[1], seq_lens=[6], tokens=[9], page_indptr=[0, 2], page_ids=[3, 5])
    assert (manager.replay(again).logits()[0].double().cpu() - model.oracle([*tokens, 9])).abs().max() < 2e-4
    assert mine[:, 7].isnan().all(), "the null page is never written"
    assert mine[..., HEAD_DIM:].isnan().all(), "nothing between the views is written"


def test_two_managers_are_independent(device: torch.device) -> None:
    a, b = make_rig(device), make_rig(device, page_size=8)
    for token in range(4):
        ha, hb = a.manager.replay(one(token)), b.manager.replay(one(token + 1))
        assert (int(ha.tokens()[0]), int(hb.tokens()[0])) == (greedy(a, token), greedy(b, token + 1))
    a.manager.close()
    assert int(b.manager.replay(one(9)).tokens()[0]) == greedy(b, 9)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "flash_attn3", "flash_attn2", "flashinfer"])
def test_close_frees_all_memory_of_each_backend(name: str) -> None:
    """While the manager, and so its backend, is still referenced."""
    cls, device = backend_class(name), torch.device("cuda", 0)
    if (missing := cls.unavailable()) is not None:
        pytest.skip(f"backend {name}: {missing}")
    page_size = 256 if cls.capabilities.page_sizes else 16
    options = {"dtype": torch.bfloat16, "head_dim": 128, "page_size": page_size, "backend": name}
    before = -1
    kept = []
    for attempt in range(3):
        rig = make_rig(device, **options)
        rig.manager.replay(one(3)).tokens()
        rig.manager.replay(prompt(1, 2, 3, pages=(9,))).tokens()
        rig.manager.close()
        kept.append(rig.manager._backend)
        del rig
        gc.collect()
        torch.cuda.synchronize()
        if attempt == 0:  # one-time costs: cuBLAS handle and workspace, kernels
            before = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_replay_on_a_stream_beside_a_busy_current_stream() -> None:
    """Work of the current stream before `capture()` is finished, and no later work of it is needed."""
    device = torch.device("cuda", 0)
    rig = make_rig(device, capture=False, options={"stream": torch.cuda.Stream()})
    weight, current = rig.model.embed, torch.cuda.current_stream()
    values = weight.clone()
    weight.fill_(torch.nan)
    torch.cuda._sleep(100_000_000)
    weight.copy_(values)

    def delay(_: object) -> None:
        with torch.cuda.stream(current):
            torch.cuda._sleep(100_000_000)

    rig.manager.capture(delay)
    handle = rig.manager.replay(one(3))
    assert int(handle.logits().argmax()) == int(handle.tokens()[0]) == greedy(rig, 3)


@pytest.mark.gpu
@pytest.mark.alone
def test_host_may_run_ahead_of_a_slow_device() -> None:
    """Many steps are submitted to a busy device: no ring entry is overwritten before its upload."""
    rig = make_rig(torch.device("cuda", 0), ring_depth=3)
    expected = [greedy(rig, t) for t in range(12)]
    torch.cuda._sleep(200_000_000)
    handles = [rig.manager.replay(one(t)) for t in range(12)]
    assert [int(h.tokens()[0]) for h in handles] == expected
    assert rig.manager.stats().ring_waits >= 1


def test_step_that_fails_midway_does_not_affect_the_next(device: torch.device) -> None:
    """The eager model raises after the refresh; the next step is another batch in another order."""
    rig = make_rig(device, use_graphs=False)
    real, broken = rig.model.project, {"on": True}

    def project(layer: int, x: torch.Tensor):
        if broken["on"]:
            raise ZeroDivisionError("from the model")
        return real(layer, x)

    rig.model.project = project
    two = {"seq_lens": [1, 1], "page_indptr": [0, 1, 2]}
    with pytest.raises(ZeroDivisionError, match="from the model"):
        rig.manager.replay(Batch(req_indices=[0, 1], tokens=[3, 4], page_ids=[5, 6], **two))
    broken["on"] = False
    handle = rig.manager.replay(Batch(req_indices=[1, 0], tokens=[4, 3], page_ids=[6, 5], **two))
    assert handle.tokens().tolist() == [greedy(rig, 4), greedy(rig, 3)]
    assert handle.step == 1


@pytest.mark.gpu
def test_reset_restores_the_counters_of_an_aborted_launch() -> None:
    rig = make_rig(torch.device("cuda", 0), decode_sizes=(1,), page_size=1, num_pages=64)
    long = rig.start(0, list(range(32)))
    rig.prefill(long)
    batch = Batch.from_requests([rig.row(long)])
    want = rig.manager.replay(batch).logits(copy=True)
    rig.manager._backend.tensors()["counters"].fill_(3)
    rig.manager.reset()
    assert torch.equal(rig.manager.replay(batch).logits(), want)
    assert not rig.manager._backend.tensors()["counters"].any()


def test_ring_waits_are_counted() -> None:
    rig = make_rig(CPU, ring_depth=2)
    for token in range(7):
        assert rig.manager.replay(one(token)).done()
    assert rig.manager.stats().ring_waits == 0, "a CPU never waits for the ring"
    for slot in rig.manager.queue._ring._slots:
        slot._event = PendingEvent()
    handles = [rig.manager.replay(one(token)) for token in range(5)]
    assert rig.manager.stats().ring_waits == 3
    assert not handles[-1].done()
    assert [int(h.tokens()[0]) for h in handles] == [greedy(rig, token) for token in range(5)]


def test_handle_of_an_unreported_step_raises(device: torch.device) -> None:
    rig = make_rig(device)
    for wrong in (-1, 1, 4):
        handle = rig.manager.replay(one(3))
        if device.type == "cuda":
            torch.cuda.synchronize()
        rig.manager.buffers.step_ring[handle.step % 4] = handle.step + wrong
        with pytest.raises(ReplayError, match=f"step {handle.step}: .* contains step {handle.step + wrong}\\)"):
            handle.tokens()
        assert type(handle.error) is ReplayError
        with pytest.raises(ReplayError, match=f"step {handle.step}: .* contains step {handle.step + wrong}\\)"):
            handle.faults  # noqa: B018
    assert rig.manager.replay(one(3)).tokens().tolist() == [greedy(rig, 3)]
