"""Draft models: the tokens and the state are those of plain decoding, and right drafts are accepted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from graphrt.batch import Batch
from graphrt.bundle.bundle import Bundle
from graphrt.cache.groups import kv_groups
from graphrt.draft_model import DraftModel
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.errors import ConfigError, ReplayError, ShapeError, UnsupportedError
from graphrt.kernels.types import TOKEN_FROM_DEVICE
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession, SessionRequest
from graphrt.spec import AttentionKind, AttentionSpec
from graphrt.step import Step
from tests.session.test_speculation import PARAMS, PENALIZED, PROMPTS, results, run
from tests.support.layered import VOCAB as LAYERED_VOCAB
from tests.support.layered import LayeredModel, build, prompts_of
from tests.support.sampling_cases import generated
from tests.support.toy import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, LivelyModel, ToyModel, captured, finish, greedy

MAX_PROMPT = 32
SPEC = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, torch.float32)


def drafter(model: ToyModel) -> DraftModel:
    return DraftModel(model, [SPEC] * LAYERS, vocab_size=VOCAB)


def perturbed(device: torch.device) -> ToyModel:
    model, generator = LivelyModel(device), torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data += 0.03 * torch.randn(weight.shape, generator=generator).to(device)
    return model


MODELS: dict[str, Callable[[torch.device], ToyModel]] = {
    "equal": LivelyModel,
    "perturbed": perturbed,
    "other": lambda device: ToyModel(device, torch.float32),
}


def kv_of(runtime: Runtime, session: DecodeSession, request: SessionRequest, length: int) -> list[torch.Tensor]:
    """Keys and values of the first tokens of a request, of every layer."""
    pages = [torch.from_numpy(ids).long() for ids in session.pages.pages(request.req_index)]
    slots, found = torch.arange(length), []
    for group, ids in enumerate(pages):
        k, v = runtime.kv_cache.of_group(group)
        found += [tensor[ids[slots // 4], slots % 4].cpu() for tensor in (*k, *v)]
    return found


def kv_of_prompt(model: ToyModel, tokens: list[int], device: torch.device) -> list[torch.Tensor]:
    """Keys and values of tokens that are a prompt."""
    runtime = captured(model, device, max_num_tokens=MAX_PROMPT)
    with DecodeSession(runtime) as session:
        request = session.add(tokens, SamplingParams(1))
        finish(session)
        found = kv_of(runtime, session, request, len(tokens))
    runtime.close()
    return found


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("params", "loop_sizes"), [(PARAMS, ()), (PENALIZED, (1, 2, 4))], ids=["plain", "penalties and loop"]
)
def test_tokens_and_kv_are_those_of_plain_decoding(
    device: torch.device, params: list[SamplingParams], loop_sizes: tuple[int, ...], name: str, most: int
) -> None:
    """With stop tokens, length limits, temperatures, a prompt between the steps, and a fork."""
    options = {"max_num_tokens": MAX_PROMPT, "penalties": True, "max_logit_bias": 8, "max_logprobs": 2}
    model, draft = LivelyModel(device), MODELS[name](device)
    plain = captured(model, device, 80, **options)
    with DecodeSession(plain) as session:
        want = results(run(session, params))
    plain.close()
    runtime = captured(
        model, device, 80, proposer=drafter(draft), num_speculative_tokens=most, loop_sizes=loop_sizes, **options
    )
    with DecodeSession(runtime) as session:
        requests = run(session, params)
        assert results(requests) == want
        for request in requests:
            tokens = [*request.prompt.tolist(), *request.tokens][:-1][:MAX_PROMPT]
            assert runtime.manager.buffers.req_seq_lens[request.req_index] >= len(tokens)
            found = kv_of(runtime, session, request, len(tokens))
            expected = kv_of_prompt(model, tokens, device) + kv_of_prompt(draft, tokens, device)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    runtime.close()


def test_replay_verifies_only_the_drafts_of_its_batch(device: torch.device) -> None:
    """The drafts of an equal model are right. A step yields more than one token only if its batch has them."""
    model, prompt = LivelyModel(device), [3, 1, 4, 1]
    want = greedy(model, prompt, 6)
    runtime = captured(model, device, proposer=drafter(model), num_speculative_tokens=2, max_num_tokens=32)
    pages = {"req_indices": [0], "page_indptr": [0, 4, 8], "page_ids": [*range(1, 5)] * 2}
    first = runtime.replay(Batch(seq_lens=[4], query_lens=[4], tokens=prompt, **pages)).tokens()
    assert first.tolist() == [[want[0], -1, -1]]
    assert runtime.manager.buffers.drafts[0].tolist() == want[1:3]
    assert runtime.replay(Batch(req_indices=[0], seq_lens=[5])).tokens().tolist() == [[want[1], -1, -1]]
    drafts = runtime.manager.buffers.drafts[0].tolist()
    assert drafts == want[2:4]
    own = Batch(req_indices=[0], seq_lens=[8], query_lens=[3], tokens=[TOKEN_FROM_DEVICE, *drafts], sample=[3])
    assert runtime.replay(own).tokens().tolist() == [want[2:5]]
    runtime.close()


@pytest.mark.parametrize("most", [1, 4])
def test_an_equal_model_drafts_every_token(device: torch.device, most: int) -> None:
    """At any temperature, because drafts are sampled with the noise of the request."""
    model = LivelyModel(device)
    runtime = captured(model, device, proposer=drafter(model), num_speculative_tokens=most, max_num_tokens=32)
    with DecodeSession(runtime) as session:
        params = [SamplingParams(41), SamplingParams(41, temperature=0.8, seed=3, top_p=0.9)]
        requests = [session.add(prompt, each) for prompt, each in zip(PROMPTS, params, strict=False)]
        finish(session, 4)
        steps = [request.verify_steps for request in requests]
    # The first step has drafts as far as there is a page, and the last one as far as the limit.
    assert max(steps) <= 1 + -(-40 // (1 + most))
    assert runtime.stats().tokens_per_step.total() == sum(steps)
    runtime.close()


class Padded(LivelyModel):
    """LivelyModel with another number of rows in its embedding. Logits of rows that LivelyModel lacks are large."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        super().__init__(device)
        rows = self.embed.new_ones(max(0, vocab_size - VOCAB), self.embed.shape[1])
        self.embed.data = torch.cat((self.embed.data[:vocab_size], rows))

    def forward(self, step: Step) -> torch.Tensor:
        logits = super().forward(step)
        logits[:, VOCAB:] = 1e4
        return logits


@pytest.mark.parametrize("rejects", [False, True])
@pytest.mark.parametrize("vocab_size", [50, 60, 64])
def test_a_vocabulary_with_other_padding(device: torch.device, vocab_size: int, rejects: bool) -> None:
    """Tokens that the draft model lacks are in the prompt, but not drafted. It drafts all others as the model does."""
    model, most = LivelyModel(device), 3
    draft = DraftModel(Padded(device, vocab_size), [SPEC] * LAYERS, vocab_size=vocab_size)
    options = {"num_speculative_tokens": most, "max_num_tokens": 32, "rejection_sampling": rejects}
    runtime = captured(model, device, proposer=draft, **options)
    prompt = [3, VOCAB - 1, 4, 1, 5]
    with DecodeSession(runtime) as session:
        request = session.add(prompt, SamplingParams(41))
        finish(session, 4)
    assert request.tokens == greedy(LivelyModel(device), prompt, 41)
    assert request.verify_steps <= (1 + -(-40 // (1 + most)) if vocab_size > VOCAB else 30)
    runtime.close()


def test_replay_equals_the_eager_step(device: torch.device) -> None:
    """Tokens, request state and KV of both models are compared, and restored by `compare`."""
    model = LivelyModel(device)
    draft = perturbed(device)
    runtime = captured(
        model, device, proposer=drafter(draft), num_speculative_tokens=2, max_num_tokens=32, shadow_every=1
    )
    with DecodeSession(runtime) as session:
        requests = [session.add(prompt, each) for prompt, each in zip(PROMPTS, PARAMS[:2], strict=False)]
        finish(session, 1)
        tokens = requests[0].tokens
    stats = runtime.stats()
    assert stats.shadow_steps
    assert not stats.shadow_differences
    pages = {"page_indptr": [0, 5, 10], "page_ids": [*range(1, 6)] * 2, "req_indices": [0]}  # of both pools
    first = Batch(seq_lens=[9], query_lens=[9], tokens=PROMPTS[0], **pages)
    assert runtime.replay(first).tokens()[0, 0] == tokens[0]
    before = [tensor.clone() for _, tensor in runtime.kv_cache.named_tensors()]
    batch = Batch(req_indices=[0], seq_lens=[11], query_lens=[2], sample=[2], tokens=tokens[:2])
    assert runtime.compare(batch).equal
    for (_, tensor), old in zip(runtime.kv_cache.named_tensors(), before, strict=True):
        torch.testing.assert_close(tensor, old, atol=0, rtol=0, equal_nan=True)
    assert runtime.replay(batch).tokens().tolist() == [[*tokens[1:3], -1]]
    assert runtime.manager.buffers.drafts[0].tolist() != [-1, -1]
    runtime.close()


def test_recorded_launches_run_again(device: torch.device) -> None:
    model = LivelyModel(device)
    runtime = captured(model, device, proposer=drafter(model), num_speculative_tokens=2, max_num_tokens=32)
    with DecodeSession(runtime) as session:
        session.add(PROMPTS[0], SamplingParams(20))
        recording = runtime.manager.record(3)
        session.run(1)
        session.run(1)
        session.run(3)
        session.collect(wait=True)
    bundle = Bundle.of(recording)
    assert len(bundle.attention) == LAYERS
    with bundle.open(model, device=device, proposer=drafter(model)) as replays:
        for index in range(len(bundle.launches)):
            found = replays.run(index)
            assert found.difference is None, str(found)
            assert found.tokens_equal
            assert found.logits_distance == 0
    runtime.close()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("num_pages", [120, 26], ids=["many_pages", "preemption"])
def test_layers_with_windows_and_shared_kv(device: torch.device, num_pages: int, window: int | None) -> None:
    """A TextGenerator with preemption and swaps. The draft model has other layers, and KV of another page size."""
    specs = [AttentionSpec(4, 2, 16, torch.float32, sliding_window=6), AttentionSpec(4, 2, 16, torch.float32)]
    of_draft = [
        AttentionSpec(2, 1, 8, torch.float32, sliding_window=window),
        AttentionSpec(2, 1, 8, torch.float32, sliding_window=window, kv_shared_with=0),
        AttentionSpec(2, 1, 16, torch.float32),
    ]
    draft = DraftModel(LayeredModel(of_draft, device, seed=5), of_draft, vocab_size=LAYERED_VOCAB)
    prompts = prompts_of([3, 9, 14, 2, 11])
    found = []
    for proposer in (None, draft):
        most = 3 if proposer else 0
        _, runtime = build(
            specs, kv_groups(specs, page_size=4), num_pages, device, proposer, num_speculative_tokens=most
        )
        generator = TextGenerator(runtime, swap_bytes=1 << 20)
        found.append(generated(generator, prompts, [SamplingParams(25)] * len(prompts)))
        assert bool(generator.stats.preemptions) == (num_pages == 26)
        runtime.close()
    assert found[1] == found[0]


def test_moved_weights_of_the_draft_model_are_found(device: torch.device) -> None:
    draft = LivelyModel(device)
    runtime = captured(device=device, proposer=drafter(draft), num_speculative_tokens=2, max_num_tokens=32)
    draft.embed.data = draft.embed.data.clone()
    with pytest.raises(ReplayError, match="draft model's embed: expected at address"):
        runtime.replay(Batch.empty())
    runtime.close()


def test_what_is_refused(device: torch.device) -> None:
    options = {"num_speculative_tokens": 2, "max_num_tokens": 32}
    model = LivelyModel(device)
    other = r"DraftModel.vocab_size: expected 61, as in the model, up to 128 more or less, got 190; use a draft"
    with pytest.raises(ConfigError, match=other):
        captured(model, device, proposer=DraftModel(model, [SPEC] * LAYERS, vocab_size=190), **options)
    narrow = DraftModel(lambda step: model(step)[:, :60], [SPEC] * LAYERS, vocab_size=VOCAB)
    with pytest.raises(ShapeError, match="the draft model's logits"):
        captured(model, device, proposer=narrow, **options)
    for no_proposer in (model, LivelyModel(device)):
        with pytest.raises(ConfigError, match=r"proposer: expected a DraftModel.* got a model; pass load_draft_model"):
            captured(model, device, proposer=no_proposer, **options)
    with pytest.raises(ConfigError, match="proposer: expected a callable, got 5; pass a DraftModel, a function of"):
        captured(model, device, proposer=5, **options)
    cross = AttentionSpec(4, 2, 16, torch.float32, kind=AttentionKind.CROSS)
    with pytest.raises(ConfigError, match="attention: expected at least 1 AttentionSpec, got none"):
        DraftModel(model, [], vocab_size=VOCAB)
    for refused in (lambda: DraftModel(model, [cross], vocab_size=VOCAB), lambda: drafter(model).layers_after([cross])):
        with pytest.raises(UnsupportedError, match="expected decoder layers with a draft model, got cross layers"):
            refused()
