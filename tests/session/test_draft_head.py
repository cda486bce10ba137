"""A head that drafts from the model's hidden states: tokens, lengths and KV are those of plain decoding."""

from __future__ import annotations

import pytest
import torch

from graphrt.draft_model import HIDDEN, DraftModel
from graphrt.kernels.errors import ConfigError
from graphrt.proposer import ngram_drafts
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.spec import AttentionSpec
from graphrt.step import Step
from tests.session.test_draft_model import SPEC, kv_of
from tests.session.test_speculation import PARAMS, PROMPTS, results, run
from tests.support.toy import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, LivelyModel, captured, finish

WIDTH = HEADS * HEAD_DIM


class Counting(LivelyModel):
    """A lively model that prefers the number after the last token, and so is easy to draft for."""

    def forward(self, step: Step) -> torch.Tensor:
        return prefer_next(step, super().forward(step), torch.ones_like(step.positions[step.logits_indices]))


def prefer_next(step: Step, logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    following = (step.input_ids[step.logits_indices] + 1) % VOCAB
    return logits.scatter_add_(1, following[:, None], 300.0 * weights[:, None].to(logits.dtype))


class Head(torch.nn.Module):
    """An EAGLE-like head: a product of the token's embedding and the hidden state before it, then one layer.

    It drafts the model's tokens, except at positions that `wrong` divides.
    """

    def __init__(self, model: LivelyModel, wrong: int) -> None:
        super().__init__()
        self.target, self.wrong = [model], wrong
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> torch.nn.Parameter:
            values = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            return torch.nn.Parameter(values.to(model.embed.device), requires_grad=False)

        self.fc, self.qkv = weight(WIDTH, 2 * WIDTH), weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH)
        self.out = weight(WIDTH, WIDTH)

    def forward(self, step: Step) -> torch.Tensor:
        embed = self.target[0].embed
        assert step.previous_hidden is not None
        x = torch.cat((embed[step.input_ids], step.previous_hidden), 1) @ self.fc.t()
        qkv = (x @ self.qkv.t()).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        x = x + step.attend(0, q, k, v).flatten(1) @ self.out.t()
        step.keep_hidden(x)
        right = step.positions[step.logits_indices] % self.wrong != 0
        return prefer_next(step, x[step.logits_indices] @ embed.t(), right)

    def oracle(self, tokens: list[int]) -> list[torch.Tensor]:
        """Keys and values of tokens, in float64: token t and the model's hidden state of token t - 1."""
        hidden = self.target[0].hidden(tokens).roll(1, 0)
        hidden[0] = 0
        up = lambda w: w.detach().double().cpu()  # noqa: E731
        x = torch.cat((up(self.target[0].embed)[torch.tensor(tokens)], hidden), 1) @ up(self.fc).t()
        qkv = (x @ up(self.qkv).t()).view(len(tokens), -1, HEAD_DIM)
        return [part.float() for part in qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)[1:]]


def head_of(model: LivelyModel, wrong: int) -> DraftModel:
    return DraftModel(Head(model, wrong), [SPEC], vocab_size=VOCAB, hidden_size=WIDTH)


@pytest.mark.parametrize(
    ("most", "wrong", "loop_sizes"), [(1, 2, ()), (3, 4, (1, 2, 4)), (4, 7, ()), (3, 1, (1, 2, 4))]
)
def test_tokens_and_kv_are_those_of_plain_decoding(
    device: torch.device, most: int, wrong: int, loop_sizes: tuple[int, ...]
) -> None:
    """Some drafts are accepted and others are not; with a prompt between the steps, chunks of a prompt, and a fork."""
    model = Counting(device)
    options = {"max_num_tokens": 20, "max_logprobs": 2}
    plain = captured(model, device, 80, **options)
    with DecodeSession(plain) as session:
        want = results(run(session, PARAMS))
    plain.close()
    head = head_of(model, wrong)
    runtime = captured(model, device, 80, proposer=head, num_speculative_tokens=most, loop_sizes=loop_sizes, **options)
    with DecodeSession(runtime) as session:
        requests = run(session, PARAMS)
        assert results(requests) == want
        for request in requests:
            tokens = [*request.prompt.tolist(), *request.tokens][:-1]
            found = kv_of(runtime, session, request, len(tokens))[2 * LAYERS :]
            for ours, theirs in zip(found, head.model.oracle(tokens), strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
        session.release(requests[0])
        long = session.add(list(range(45)), SamplingParams(10))  # a prompt of three steps
        session.run(2)
        finish(session, 3)
        tokens = [*range(45), *long.tokens][:-1]
        found = kv_of(runtime, session, long, len(tokens))[2 * LAYERS :]
        for ours, theirs in zip(found, head.model.oracle(tokens), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    accepted = runtime.stats().tokens_per_step
    assert accepted[1] > 100 if wrong == 1 else accepted[1 + most] > 9
    runtime.close()


def test_later_drafts_use_the_hidden_states_of_the_head(device: torch.device) -> None:
    """The drafts are those of a loop in float64 over the tokens so far."""
    model, most = LivelyModel(device), 3
    proposer = head_of(model, 1)
    runtime = captured(model, device, proposer=proposer, num_speculative_tokens=most, max_num_tokens=32)
    head = proposer.model
    up = lambda w: w.detach().double().cpu()  # noqa: E731
    with DecodeSession(runtime) as session:
        request = session.add(PROMPTS[0], SamplingParams(30))
        for _ in range(5):
            session.run(1)
            session.collect(wait=True)
            tokens = [*request.prompt.tolist(), *request.tokens]
            states, found = list(model.hidden(tokens)[: len(tokens) - 1]), []
            states.insert(0, torch.zeros(WIDTH, dtype=torch.float64))
            for _ in range(most):
                x = torch.cat((up(model.embed)[torch.tensor(tokens)], torch.stack(states)), 1) @ up(head.fc).t()
                qkv = (x @ up(head.qkv).t()).view(len(tokens), -1, HEAD_DIM)
                q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
                k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
                p = (torch.einsum("hd,khd->hk", q[-1], k) * HEAD_DIM**-0.5).softmax(-1)
                states.append(x[-1] + torch.einsum("hk,khd->hd", p, v).flatten() @ up(head.out).t())
                tokens.append(int((up(model.embed) @ states[-1]).argmax()))
                found.append(tokens[-1])
            assert runtime.manager.buffers.drafts[request.req_index].tolist() == found
    runtime.close()


def test_replay_equals_the_eager_step(device: torch.device) -> None:
    """Every step is compared, with the kept hidden states."""
    model = Counting(device)
    runtime = captured(
        model, device, proposer=head_of(model, 3), num_speculative_tokens=2, max_num_tokens=32, shadow_every=1
    )
    with DecodeSession(runtime) as session:
        for prompt, each in zip(PROMPTS, PARAMS[:2], strict=False):
            session.add(prompt, each)
        finish(session, 1)
    stats = runtime.stats()
    assert stats.shadow_steps
    assert not stats.shadow_differences
    assert runtime.manager.request_tables.tensors[HIDDEN][-1].eq(0).all()  # the row of padding
    runtime.close()


def test_a_model_that_keeps_no_hidden_states_is_refused(device: torch.device) -> None:
    model = LivelyModel(device)
    spec = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, torch.float32)
    with pytest.raises(ConfigError, match=r"hidden: the model kept no hidden states; call step\.keep_hidden"):
        captured(
            lambda step: step.attend(0, *model.project(0, model.embed[step.input_ids])).new_zeros(
                len(step.logits_indices), VOCAB
            ),
            device, proposer=DraftModel(Head(model, 1), [spec], vocab_size=VOCAB, hidden_size=WIDTH),
            num_speculative_tokens=2, max_num_tokens=32,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="hidden_size: expected"):
        DraftModel(model, [spec], vocab_size=VOCAB, hidden_size=0)


def test_a_function_of_a_step_reads_the_hidden_states_of_the_model(device: torch.device) -> None:
    model, seen = LivelyModel(device), []

    def proposer(step: Step) -> torch.Tensor:
        seen.append(step.hidden)
        return ngram_drafts(step)

    runtime = captured(
        model, device, proposer=proposer, num_speculative_tokens=2, max_num_tokens=32, use_graphs=False
    )  # fmt: skip
    with DecodeSession(runtime) as session:
        session.add([11, 12, 13], SamplingParams(1))
        session.run()
        session.collect(wait=True)
        torch.testing.assert_close(seen[-1][:3].double().cpu(), model.hidden([11, 12, 13]), rtol=1e-4, atol=1e-4)
    runtime.close()
