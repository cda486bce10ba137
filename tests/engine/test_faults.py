"""Faults that the device finds: reported for their step and request, without effect on other requests."""

from __future__ import annotations

import multiprocessing
import pickle
from dataclasses import replace

import pytest
import torch

from graphrt.batch import Batch, Request
from graphrt.engine.handle import RequestFault, StepFaultError
from graphrt.kernels.errors import ReplayError
from graphrt.kernels.types import NO_TOKEN, TOKEN_FROM_DEVICE, FaultCode
from tests.support.steps import assert_works
from tests.support.toy import VOCAB, make_rig


def one(*tokens: int, req_index: int = 0, seq_len: int = 0, **options) -> Batch:
    lengths = {"seq_lens": [seq_len or len(tokens)], "query_lens": [len(tokens)]}
    return Batch(req_indices=[req_index], tokens=tokens, page_indptr=[0, 2], page_ids=[5, 6], **lengths, **options)


def greedy(rig, tokens: list[int]) -> int:
    return int(rig.model.oracle(tokens).argmax())


def requests(*changes: dict) -> Batch:
    """Two or three good requests with changes."""
    base = [
        {"req_index": 0, "tokens": [3], "seq_len": 5, "pages": [40, 41]},
        {"req_index": 1, "tokens": [4], "seq_len": 2, "pages": [42]},
    ]
    filled = [b | c for b, c in zip([*base, base[1] | {"req_index": 2, "pages": [43]}], changes, strict=False)]
    return Batch.from_requests([Request(**f) for f in filled])


DEVICE = {
    "req-index": (requests({}, {"req_index": 8}), 1, FaultCode.REQ_INDEX_OUT_OF_RANGE, 8),
    "negative-req-index": (requests({"req_index": -1}, {}), 0, FaultCode.REQ_INDEX_OUT_OF_RANGE, -1),
    "zero-length": (requests({"seq_len": 0}, {}), 0, FaultCode.BAD_LENGTH, 0),
    "length-below-query": (requests({}, {"tokens": [1, 2, 3], "seq_len": 2}), 1, FaultCode.BAD_LENGTH, 2),
    "negative-length": (requests({}, {"seq_len": -3}), 1, FaultCode.BAD_LENGTH, -3),
    "pages-too-few": (requests({"seq_len": 9}, {}), 0, FaultCode.LENGTH_EXCEEDS_PAGES, 9),
    "no-pages": (requests({}, {"pages": []}), 1, FaultCode.LENGTH_EXCEEDS_PAGES, 2),
    "page-too-big": (requests({}, {"pages": [80]}), 1, FaultCode.PAGE_OUT_OF_RANGE, 80),
    "page-negative": (requests({"pages": [40, -4]}, {}), 0, FaultCode.PAGE_OUT_OF_RANGE, -4),
    "null-page": (requests({"pages": [0, 41]}, {}), 0, FaultCode.PAGE_OUT_OF_RANGE, 0),
    "token-too-big": (requests({"tokens": [VOCAB]}, {}), 0, FaultCode.TOKEN_OUT_OF_RANGE, VOCAB),
    "token-negative": (requests({"tokens": [-9]}, {}), 0, FaultCode.TOKEN_OUT_OF_RANGE, -9),
    "token-minus-one": (requests({"tokens": [-1]}, {}), 0, FaultCode.TOKEN_OUT_OF_RANGE, -1),
    "no-last-token": (requests({}, {"req_index": 6, "tokens": [TOKEN_FROM_DEVICE]}), 1, FaultCode.NO_LAST_TOKEN, 6),
    "same-req-index": (requests({}, {"req_index": 0}), 0, FaultCode.DUPLICATE_REQUEST, 0),
    "same-slot": (requests({}, {"pages": [41], "seq_len": 1}), 0, FaultCode.DUPLICATE_PAGE, 41),
}


@pytest.mark.parametrize("eager", [False, True], ids=["replay", "eager"])
@pytest.mark.parametrize("case", DEVICE, ids=str)
def test_faults_found_on_the_device_are_raised_by_the_handle(device: torch.device, case: str, eager: bool) -> None:
    """The bad request gets token -1 and writes nothing; others are served; the error names step, request and value."""
    batch, row, code, value = DEVICE[case]
    rig = make_rig(device, fill=0.25)
    kv = [t.clone() for _, t in rig.manager.kv_cache.named_tensors()]
    handle = rig.manager.replay(batch, eager=eager)
    with pytest.raises(StepFaultError, match=f"step {handle.step}, batch position {row}: {code.name}") as caught:
        handle.tokens()
    found = caught.value
    assert (found.step, found.index, found.code, found.value) == (handle.step, row, code, value)
    tokens = handle.tokens(raise_on_fault=False)
    invalid = {row} if not code.name.startswith("DUPLICATE") else {0, 1}
    logits = handle.logits(copy=True)
    for i in range(batch.num_reqs):
        assert tokens[i] == (-1 if i in invalid else int(logits[i].argmax()))
    allowed = {
        (int(p), (batch.seq_lens[i] - 1) % 4)
        for i in range(batch.num_reqs)
        if i not in invalid
        for p in batch.page_ids[batch.page_indptr[i + 1] - 1 : batch.page_indptr[i + 1]]
    }
    for old, (_, new) in zip(kv, rig.manager.kv_cache.named_tensors(), strict=True):
        changed = {tuple(x) for x in (old != new).flatten(2).any(-1).nonzero().tolist()}
        assert changed == allowed
    assert_works(rig)


@pytest.mark.parametrize("fill", [float("nan"), float("-inf")])
@pytest.mark.parametrize("eager", [False, True])
def test_logits_without_a_token_are_a_fault_of_their_step(device: torch.device, fill: float, eager: bool) -> None:
    """The request then has no last token, which the next step reports too; other requests continue."""
    rig = make_rig(device)
    broken = torch.zeros(8, dtype=torch.bool, device=device)
    model = rig.model
    logits = model.forward

    def forward(step):
        return torch.where(broken[step.req_indices.long().clamp_min(0), None], fill, logits(step))

    model.forward = forward
    rig = make_rig(device, model=model)
    broken[3] = True
    batch = Batch(
        req_indices=[2, 3], seq_lens=[2, 2], query_lens=[2, 2], tokens=[7, 8, 9, 10], page_indptr=[0, 1, 2],
        page_ids=[4, 5],
    )  # fmt: skip
    handle = rig.manager.replay(batch, eager=eager)
    assert handle.faults == (RequestFault(1, FaultCode.NO_TOKEN_OFFERED, NO_TOKEN),)
    with pytest.raises(StepFaultError, match=r"batch position 1: NO_TOKEN_OFFERED: no token can be sampled"):
        handle.tokens()
    assert handle.tokens(raise_on_fault=False).tolist() == [greedy(rig, [7, 8]), NO_TOKEN]
    again = Batch(req_indices=[3, 2], seq_lens=[3, 3], page_indptr=[0, 1, 2], page_ids=[5, 4])
    handle = rig.manager.replay(again, eager=eager)
    assert handle.faults == (RequestFault(0, FaultCode.NO_LAST_TOKEN, 3),)
    assert handle.tokens(raise_on_fault=False)[1] == greedy(rig, [7, 8, greedy(rig, [7, 8])])


@pytest.mark.parametrize("sample", [-1, -7, VOCAB, 2**31 - 1, 2**32 + 5, -(2**32) + 5])
def test_samples_outside_the_vocabulary_are_faults_of_their_step(device: torch.device, sample: int) -> None:
    rig = make_rig(device, sampler=lambda logits, step: torch.full_like(step.logits_indices, sample))
    handle = rig.manager.replay(one(4))
    code = FaultCode.NO_TOKEN_OFFERED if sample == NO_TOKEN else FaultCode.SAMPLE_OUT_OF_RANGE
    assert handle.faults == (RequestFault(0, code, sample),)
    assert handle.tokens(raise_on_fault=False).tolist() == [NO_TOKEN]
    assert rig.manager.buffers.last_token[0] == NO_TOKEN


def test_custom_samplers_and_no_sampler(device: torch.device) -> None:
    """The largest token of the vocabulary is valid, and faults are reported without a sampler."""
    rig = make_rig(device, sampler=lambda logits, step: torch.full_like(step.logits_indices, VOCAB - 1))
    assert rig.manager.replay(one(VOCAB - 1)).tokens().tolist() == [VOCAB - 1]
    rig = make_rig(device, sampler=None)
    assert rig.manager.replay(one(VOCAB)).faults == (RequestFault(0, FaultCode.TOKEN_OUT_OF_RANGE, VOCAB),)


def test_every_faulty_request_is_named(device: torch.device) -> None:
    rig = make_rig(device)
    batch = Batch(
        req_indices=[0, 9, 1, 2], seq_lens=[1, 1, 9, 1], tokens=[1, 1, 1, VOCAB], page_indptr=[0, 1, 2, 3, 4],
        page_ids=[4, 5, 6, 7],
    )  # fmt: skip
    handle = rig.manager.replay(batch)
    expected = (
        RequestFault(1, FaultCode.REQ_INDEX_OUT_OF_RANGE, 9),
        RequestFault(2, FaultCode.LENGTH_EXCEEDS_PAGES, 9),
        RequestFault(3, FaultCode.TOKEN_OUT_OF_RANGE, VOCAB),
    )
    assert handle.faults == expected
    assert isinstance(handle.error, StepFaultError)
    assert (handle.error.index, handle.error.code, handle.error.value) == (1, FaultCode.REQ_INDEX_OUT_OF_RANGE, 9)
    assert "and 2 more, at batch positions 2, 3" in str(handle.error)
    assert handle.tokens(raise_on_fault=False).tolist() == [greedy(rig, [1]), NO_TOKEN, NO_TOKEN, NO_TOKEN]
    fine = rig.manager.replay(one(5))
    assert fine.faults == ()
    assert fine.error is None


def _raise(faults: tuple[RequestFault, ...]) -> None:
    raise StepFaultError(7, faults)


def test_fault_says_if_the_request_wrote_kv() -> None:
    """Only faults of sampling are found after keys and values were written."""
    for code in FaultCode:
        if code is not FaultCode.NONE:
            late = code in (FaultCode.NO_TOKEN_OFFERED, FaultCode.SAMPLE_OUT_OF_RANGE)
            assert ("its KV was written" if late else "the request wrote nothing") in str(RequestFault(2, code, 7))
            assert str(RequestFault(2, code, 7)).startswith(f"batch position 2: {code.name}: ")


def test_fault_can_be_pickled() -> None:
    faults = (RequestFault(1, FaultCode.BAD_LENGTH, 9), RequestFault(4, FaultCode.DUPLICATE_REQUEST, 2))
    error = pickle.loads(pickle.dumps(StepFaultError(7, faults)))
    assert (error.step, error.faults, str(error)) == (7, faults, str(StepFaultError(7, faults)))
    of_prompts = pickle.loads(pickle.dumps(StepFaultError(7, faults, [3, 5])))
    assert of_prompts.prompts == (3, 5)
    assert str(of_prompts).startswith("prompts[3], prompts[5]: step 7: BAD_LENGTH: ")
    with multiprocessing.get_context("spawn").Pool(1) as pool, pytest.raises(StepFaultError) as caught:
        pool.apply(_raise, (faults,))
    assert caught.value.faults == faults


@pytest.mark.parametrize("tokens", [(TOKEN_FROM_DEVICE,), (TOKEN_FROM_DEVICE, 3)])
def test_new_sequence_reads_no_token_of_the_previous_one(device: torch.device, tokens: tuple[int, ...]) -> None:
    rig = make_rig(device)
    rig.manager.replay(one(4)).tokens()
    rig.manager.replay(one(4, sample=[0])).tokens()  # a partial prompt, after a sequence that sampled
    last = rig.manager.replay(one(TOKEN_FROM_DEVICE, seq_len=2))
    assert last.faults == (RequestFault(0, FaultCode.NO_LAST_TOKEN, 0),)
    assert rig.manager.replay(one(*tokens)).faults == (RequestFault(0, FaultCode.NO_LAST_TOKEN, 0),)
    assert rig.manager.replay(one(TOKEN_FROM_DEVICE, seq_len=2)).faults == (
        RequestFault(0, FaultCode.NO_LAST_TOKEN, 0),
    )
    assert rig.manager.replay(one(4)).tokens().tolist() == [greedy(rig, [4])]
    assert rig.manager.replay(one(TOKEN_FROM_DEVICE, seq_len=2)).faults == ()


@pytest.mark.parametrize("kind", ["token", "page", "slot"])
def test_faulty_first_step_leaves_no_last_token(device: torch.device, kind: str) -> None:
    """The next step is submitted before the fault is read, and must not continue from the previous sequence."""
    rig = make_rig(device, fill=0.0)
    rig.manager.replay(one(4)).tokens()
    tokens, pages = ([1, VOCAB], [8]) if kind == "token" else ([1, 2], [0]) if kind == "page" else ([1, 2], [8])
    begins = {"seq_lens": [2], "query_lens": [2], "tokens": tokens, "page_indptr": [0, 1], "page_ids": pages}
    if kind == "slot":
        begins = {k: v * 2 for k, v in begins.items()} | {"req_indices": [0, 1], "page_indptr": [0, 1, 2]}
    first = rig.manager.replay(Batch(**{"req_indices": [0]} | begins))
    second = rig.manager.replay(Batch(req_indices=[0], seq_lens=[3], page_indptr=[0, 1], page_ids=[8]))
    assert first.faults[0].index == 0
    assert second.faults == (RequestFault(0, FaultCode.NO_LAST_TOKEN, 0),)


@pytest.mark.parametrize("turned", [False, True])
def test_faulty_request_with_a_duplicate_index(device: torch.device, turned: bool) -> None:
    """Both are faulty, and the next step of the index finds no last token, for any order."""
    rig = make_rig(device, fill=0.0)
    rig.manager.replay(one(4)).tokens()
    order = [1, 0] if turned else [0, 1]
    tokens, lengths, pages = ([TOKEN_FROM_DEVICE, VOCAB], [2, 1], [5, 8])
    both = rig.manager.replay(
        Batch(
            req_indices=[0, 0], seq_lens=[lengths[i] for i in order], tokens=[tokens[i] for i in order],
            page_indptr=[0, 1, 2], page_ids=[pages[i] for i in order],
        )
    )  # fmt: skip
    faults = [RequestFault(0, FaultCode.DUPLICATE_REQUEST, 0), RequestFault(1, FaultCode.TOKEN_OUT_OF_RANGE, VOCAB)]
    assert both.faults == tuple(replace(faults[i], index=at) for at, i in enumerate(order))
    assert rig.manager.replay(one(TOKEN_FROM_DEVICE, seq_len=2)).faults == (
        RequestFault(0, FaultCode.NO_LAST_TOKEN, 0),
    )


def test_state_by_req_indices_follows_the_request(device: torch.device) -> None:
    """A penalty per request index, which the caller owns."""
    penalties = torch.zeros(8, VOCAB, device=device)

    def sampler(logits: torch.Tensor, step) -> torch.Tensor:
        own = penalties[step.req_indices.long().clamp_min(0)]
        tokens = (logits - own).argmax(-1)
        return torch.where(step.req_status >= 0, tokens, -1)

    rig = make_rig(device, sampler=sampler)
    best = greedy(rig, [9])
    penalties[6, best] = 1e6
    batch = Batch(req_indices=[1, 6, 2], seq_lens=[1] * 3, tokens=[9] * 3, page_indptr=range(4), page_ids=[4, 5, 6])
    second = int(rig.model.oracle([9]).index_fill(0, torch.tensor([best]), -1e9).argmax())
    assert rig.manager.replay(batch).tokens().tolist() == [best, second, best]
    turned = Batch(req_indices=[6, 1], seq_lens=[1] * 2, tokens=[9] * 2, page_indptr=range(3), page_ids=[4, 5])
    assert rig.manager.replay(turned).tokens().tolist() == [second, best]


def test_empty_batch_changes_nothing(device: torch.device) -> None:
    rig = make_rig(device)
    first = int(rig.manager.replay(one(4)).tokens()[0])
    cache = [t.clone() for t in (*rig.manager.kv_cache.k, *rig.manager.kv_cache.v)]
    last = rig.manager.buffers.last_token.clone()
    idle = rig.manager.replay(Batch.empty())
    assert idle.tokens().shape == (0,)
    assert idle.faults == ()
    assert str(idle.descriptor) == "decode[1]"
    assert idle.why_eager == ""
    for descriptor in rig.manager.descriptors:
        handle = rig.manager.replay(Batch.empty(), descriptor=descriptor)
        assert (handle.descriptor, handle.why_eager, len(handle.tokens())) == (descriptor, "", 0)
        assert len(handle.logits()) == 0
    now = (*rig.manager.kv_cache.k, *rig.manager.kv_cache.v)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(cache, now, strict=True))
    assert torch.equal(last, rig.manager.buffers.last_token)
    again = rig.manager.replay(one(TOKEN_FROM_DEVICE, seq_len=2), descriptor=rig.manager.descriptors[0])
    assert again.tokens().tolist() == [greedy(rig, [4, first])]
    assert rig.manager.stats().eager_steps == {}


def test_unreported_first_step_raises(device: torch.device, monkeypatch) -> None:
    """Warm-up steps of a capture also have number 0; their outputs must not count as results."""
    rig = make_rig(device)
    monkeypatch.setattr(rig.manager._graphs, "run", lambda *args, **options: rig.manager.queue._logits)
    with pytest.raises(ReplayError, match=r"step 0: the device did not report this step .*step -1"):
        rig.manager.replay(one(4)).tokens()
