"""Counts of proposed and accepted drafts per request, with right and wrong drafts in one batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from graphrt.generate.generator import TextGenerator
from graphrt.generate.scheduler import Preemption
from graphrt.sampling_params import SamplingParams
from graphrt.session.requests import SessionRequest
from graphrt.session.session import DecodeSession
from graphrt.step import Step
from tests.support.drafts import Table
from tests.support.toy import MAX_LEN, VOCAB, LivelyModel, captured, finish, greedy

PROMPTS = [[1, 3, 1, 4], [2, 7, 7], [1, 9, 8], [2, 5], [1, 6, 6, 6, 6], [2]]
"""Drafts of prompts that begin with 1 are right, those of the others are wrong."""
COUNT = 30


def expected(tokens: int, most: int, right: bool, count: int = COUNT) -> tuple[int, int, int]:
    """Return steps, drafts and accepted drafts of a request that ends at `tokens` of at most `count` tokens. The first
    token follows the prompt. A step has no drafts after the length limit."""
    steps = drafts = accepted = 0
    at = 1
    while at < tokens:
        verified = min(most, count - at - 1)
        new = min(1 + verified, tokens - at) if right else 1
        steps, drafts, accepted, at = steps + 1, drafts + verified, accepted + new - 1, at + new
    return steps, drafts, accepted


@pytest.mark.parametrize("loop_sizes", [(), (1, 2, 4)], ids=["launch_by_launch", "loop"])
@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("stop", ["length", "device", "host"])
def test_counts_of_a_session(device: torch.device, stop: str, most: int, loop_sizes: tuple[int, ...]) -> None:
    """The device compares up to 8 stop tokens. The host finds others, after the device has accepted later drafts."""
    model, table = LivelyModel(device), Table(most, device)
    want = [greedy(model, prompt, COUNT) for prompt in PROMPTS[:2]]
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, want, strict=False)):
        known = torch.tensor([*prompt, *tokens])
        table.tokens[row, : len(known)] = known if prompt[0] == 1 else (known + 1) % VOCAB
    ends, params = [COUNT, COUNT], [SamplingParams(COUNT)] * 2
    if stop != "length":
        ends[0] = next(at for at in range(7, COUNT) if want[0][at] not in want[0][:at]) + 1
        stop_ids = {want[0][ends[0] - 1]}
        if stop == "host":
            stop_ids |= {token for token in range(VOCAB) if token not in want[0]}
        params[0] = SamplingParams(COUNT, stop_ids=stop_ids)
    for steps in (1, 3, 64):
        runtime = captured(
            model, device, proposer=table, num_speculative_tokens=most, loop_sizes=loop_sizes, max_num_tokens=32
        )
        with DecodeSession(runtime) as session:
            requests = [session.add(prompt, each) for prompt, each in zip(PROMPTS, params, strict=False)]
            finish(session, steps)
        totals = Counter[str]()
        for request, tokens, end, right in zip(requests, want, ends, (True, False), strict=True):
            assert request.tokens == tokens[:end]
            found = request.verify_steps, request.num_draft_tokens, request.num_accepted_tokens
            assert found == expected(end, most, right)
            totals.update(drafts=found[1], accepted=found[2])
        stats = runtime.stats()
        assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (totals["drafts"], totals["accepted"])
        runtime.close()


class ByFirstToken:
    """A proposer of known tokens, by the history of a request; wrong ones if its first token is not 1."""

    def __init__(self, known: list[list[int]], most: int, device: torch.device) -> None:
        rows = [torch.tensor(tokens + [-1] * (MAX_LEN + most + 1 - len(tokens))) for tokens in known]
        self.known = torch.stack(rows).to(device, torch.int32)
        self.ahead = torch.arange(1, most + 1, device=device)

    def __call__(self, step: Step) -> torch.Tensor:
        history = step.buffers.token_history[step.req_indices.long()]
        later = torch.arange(history.shape[1], device=history.device) > step.sample_lens[:, None]
        row = ((history[:, None] == self.known[:, : history.shape[1]]) | later[:, None]).all(2).int().argmax(1)
        drafts = self.known[row[:, None], step.sample_lens[:, None] + self.ahead]
        return torch.where((history[:, :1] == 1) | (drafts < 0), drafts, (drafts + 1) % VOCAB)


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20], ids=["recompute", "swap"])
@pytest.mark.parametrize("num_pages", [80, 17], ids=["many_pages", "preemption"])
@pytest.mark.parametrize("loop_sizes", [(), (1, 2, 4)], ids=["launch_by_launch", "loop"])
def test_counts_of_a_text_generator(
    device: torch.device, loop_sizes: tuple[int, ...], num_pages: int, swap_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preempted request continues with a step that computes known tokens, which has no drafts."""
    model, most = LivelyModel(device), 2
    want = [greedy(model, prompt, COUNT) for prompt in PROMPTS]
    known = [prompt + tokens for prompt, tokens in zip(PROMPTS, want, strict=True)]
    resumed, real = Counter[int](), Preemption.resume

    def resume(self: Preemption, request: SessionRequest, *others: object) -> None:
        resumed[PROMPTS.index(request.prompt.tolist())] += 1
        real(self, request, *others)

    monkeypatch.setattr(Preemption, "resume", resume)
    runtime = captured(
        model, device, num_pages, proposer=ByFirstToken(known, most, device), num_speculative_tokens=most,
        loop_sizes=loop_sizes, max_num_tokens=32,
    )  # fmt: skip
    generator, last, found = TextGenerator(runtime, swap_bytes=swap_bytes), {}, [[] for _ in PROMPTS]
    for event in generator.generate(PROMPTS, SamplingParams(COUNT)):
        found[event.prompt].append(event.token)
        assert event.finished or event.num_draft_tokens == event.num_accepted_tokens == 0
        last[event.prompt] = event
    assert found == want
    assert bool(generator.stats.preemptions) == (num_pages == 17)
    for index, prompt in enumerate(PROMPTS):
        _, drafts, accepted = expected(COUNT - resumed[index], most, prompt[0] == 1, COUNT - resumed[index])
        assert (last[index].num_draft_tokens, last[index].num_accepted_tokens) == (drafts, accepted)
    stats = runtime.stats()
    assert stats.num_draft_tokens == sum(event.num_draft_tokens for event in last.values())
    assert stats.num_accepted_tokens == sum(event.num_accepted_tokens for event in last.values())
    runtime.close()
