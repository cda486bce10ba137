"""Drafts in steps that also compute prompts: the tokens and the state are those of plain decoding."""

from __future__ import annotations

import random

import pytest
import torch

from graphrt.capture.descriptor import GraphKind
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession, SessionRequest
from graphrt.spec import AttentionSpec, KVCacheSpec
from tests.support.drafts import Table, TreeTable, results, tree
from tests.support.layered import build
from tests.support.toy import captured, finish

MOST = 3
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7, 7], list(range(10, 31)), [8, 2, 8, 2, 8, 2]]
PARAMS = [
    SamplingParams(24, frequency_penalty=0.3, repetition_penalty=1.1),
    SamplingParams(27, temperature=0.8, seed=3, presence_penalty=2.0, min_tokens=9, stop_ids={5, 11, 20}),
    SamplingParams(20, temperature=20.0, seed=5, stop_ids={1, 2}, logprobs=1),
    SamplingParams(23, logprobs=0),
]


def build_runtime(kind: str, device: torch.device, table: Table | TreeTable | None, tree_depth: int = 0) -> Runtime:
    most = 0 if table is None else MOST
    options = {
        "max_num_tokens": 16,
        "num_speculative_tokens": most,
        "tree_depth": tree_depth,
        "penalties": True,
        "max_logit_bias": 8,
        "max_logprobs": 1,
    }
    if kind == "one_group":
        return captured(device=device, num_pages=80, proposer=table, **options)
    specs = [AttentionSpec(4, 2, 16, torch.float32, sliding_window=6), AttentionSpec(4, 2, 16, torch.float32)]
    groups = [
        KVCacheSpec(1, 2, 16, 4, dtype=torch.float8_e4m3fn, layers=(0,), sliding_window=6),
        KVCacheSpec(1, 2, 16, 4, dtype=torch.float32, layers=(1,)),
    ]
    parts = {"backend": "torch_reference", "prefill_backend": "torch_reference"} if kind == "two_parts" else {}
    return build(specs, groups, 120, device, table, **options, **parts)[1]


def state_of(runtime: Runtime, requests: list[SessionRequest]) -> list[object]:
    """Lengths, histories and penalty counts of finished requests on the device."""
    b, state = runtime.manager.buffers, list[object]()
    for request in requests:
        at, length = request.req_index, int(b.req_seq_lens[request.req_index])
        tokens = b.token_history[at, : length + 1].tolist()
        state.append((length, tokens, b.penalty_counts[at].tolist(), b.penalty_seen[at].tolist()))
    return state


@pytest.mark.parametrize("tree_depth", [0, MOST], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", ["one_group", "groups", "two_parts"])
def test_any_mix_of_requests_and_drafts(device: torch.device, kind: str, tree_depth: int) -> None:
    """Prompts arrive at random, while others verify drafts of a proposer, and some of them drafts of the caller."""
    if device.type == "cuda" and kind == "two_parts":
        pytest.skip("the reference has no graph on CUDA")
    plain = build_runtime(kind, device, None)
    with DecodeSession(plain) as session:
        requests = [session.add(*each) for each in zip(PROMPTS, PARAMS, strict=True)]
        finish(session)
        want, state = results(requests), state_of(plain, requests)
    table = (TreeTable if tree_depth else Table)(MOST, device)
    runtime, yielded = build_runtime(kind, device, table, tree_depth), list[int]()
    for seed, right in enumerate((1.0, 0.9, 0.5, 0.0)):
        pick, waiting, found = random.Random(seed), list(zip(PROMPTS, PARAMS, strict=True)), list[SessionRequest]()
        table.fill(requests, pick, right)
        with DecodeSession(runtime) as session:
            while waiting or session.running:
                if waiting and pick.random() < 0.5:
                    found.append(session.add(*waiting.pop(0)))
                for request in found:
                    if not request.finish_reason and pick.random() < 0.2:
                        known = requests[request.req_index].tokens[len(request.tokens) :]
                        drafts = known[: pick.randint(0, MOST)], None
                        if tree_depth and pick.random() < 0.5:
                            drafts = tree([*request.tokens[-1:], *known], MOST, pick, 0.7, bad=False)
                        session.set_drafts(request, *drafts)
                for launch in session.run(pick.randint(1, 3)):
                    if launch.descriptor.kind is GraphKind.MIXED:
                        yielded += (launch.tokens(raise_on_fault=False) >= 0).sum(0).tolist()
                session.collect(wait=pick.random() < 0.5)
            session.collect(wait=True)
            assert [request.req_index for request in found] == [request.req_index for request in requests]
            assert results(found) == want
            assert state_of(runtime, found) == state
    some = set() if tree_depth else {MOST}  # a tree often ends after one draft
    assert {1, MOST + 1} | some <= set(yielded), "steps with prompts accept some or all drafts"
    plain.close()
    runtime.close()


def test_a_prompt_a_plain_request_and_drafts_are_one_launch(device: torch.device) -> None:
    plain = captured(device=device)
    with DecodeSession(plain) as session:
        requests = [session.add(prompt, SamplingParams(9)) for prompt in PROMPTS[:3]]
        finish(session)
        want = [request.tokens for request in requests]
    plain.close()
    runtime = captured(device=device, num_speculative_tokens=MOST, max_num_tokens=32)
    with DecodeSession(runtime) as session:
        found = [session.add(prompt, SamplingParams(9)) for prompt in PROMPTS[:2]]
        session.run(1)
        session.collect(wait=True)
        session.set_drafts(found[0], want[0][1 : 1 + MOST])
        found.append(session.add(PROMPTS[2], SamplingParams(9)))
        (launch,) = session.run(1)
        assert (launch.descriptor.kind, launch.why_eager) == (GraphKind.MIXED, "")
        assert (launch.tokens() >= 0).sum(0).tolist() == [1 + MOST, 1, 1]
        finish(session)
        assert [request.tokens for request in found] == want
        assert [request.verify_steps for request in found] == [1, 0, 0]
    runtime.close()
