"""Sessions with rejection sampling: the distribution of the model, and more drafts than the default rule accepts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.batch import Batch
from graphrt.draft_model import DraftModel
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.proposer import ngram_drafts
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.step import Model, Step
from tests.kernels.test_sampling_distribution import check_counts
from tests.session.test_draft_model import SPEC, drafter, perturbed
from tests.session.test_speculation import PROMPTS, results, run
from tests.support.sampling_cases import warped
from tests.support.toy import VOCAB, LivelyModel, captured, finish

TOKENS, PARAMS = 6, SamplingParams(60, temperature=1.2, top_k=5, top_p=0.9, min_p=0.05)


def table(seed: int, device: torch.device) -> torch.Tensor:
    """Logits [VOCAB, VOCAB] after each token; only TOKENS tokens follow another."""
    logits = torch.full((VOCAB, VOCAB), -100.0)
    logits[:, :TOKENS] = 1.5 * torch.randn(VOCAB, TOKENS, generator=torch.Generator().manual_seed(seed))
    return logits.to(device)


def chain(logits: torch.Tensor) -> Model:
    return lambda step: logits[step.input_ids[step.logits_indices]]


def texts(device: torch.device, seeds: range, *, rejects: bool) -> tuple[list[list[int]], float]:
    """The tokens of a request per seed, and the share of drafts that were accepted."""
    reqs, most = 64, 2
    runtime = captured(
        chain(table(1, device)), device, 64 * 2 * 18, num_speculative_tokens=most, rejection_sampling=rejects,
        proposer=DraftModel(chain(table(2, device)), [SPEC], vocab_size=VOCAB), max_num_reqs=reqs,
        max_num_tokens=reqs * (1 + most), decode_sizes=(reqs,), mixed_sizes=(reqs * (1 + most),),
    )  # fmt: skip
    found, steps = [], 0
    for first in range(seeds.start, seeds.stop, reqs):
        with DecodeSession(runtime) as session:
            requests = [session.add([0], replace(PARAMS, seed=first + i)) for i in range(reqs)]
            finish(session, 8)
            found += [request.tokens for request in requests]
            steps += sum(request.verify_steps for request in requests)
    runtime.close()
    return found, (sum(len(tokens) - 1 for tokens in found) - steps) / (most * steps)


def test_tokens_have_the_distribution_of_the_model(device: torch.device) -> None:
    """Counts of each token after each other, with temperature, top-k, top-p and min-p."""
    found, accepted = texts(device, range(0, 64), rejects=True)
    counts = torch.zeros(TOKENS, VOCAB, dtype=torch.int64)
    for tokens in found:
        for before, after in zip([0, *tokens], tokens, strict=False):
            counts[before, after] += 1
    for before, of_next in enumerate(counts):
        exact = warped(table(1, torch.device("cpu"))[before], PARAMS.temperature, 5, 0.9, 0.05).softmax(0)
        check_counts(of_next, int(of_next.sum()) * exact)
    _, by_default = texts(device, range(64, 128), rejects=False)
    assert accepted > by_default + 0.03


def test_forks_with_other_seeds_are_independent(device: torch.device) -> None:
    """The drafts that a request has when it is forked decide no token of the fork, unless both have the same seed."""
    reqs, most = 64, 2
    pairs, expected = torch.zeros(2, TOKENS, TOKENS, dtype=torch.float64)
    runtime = captured(
        chain(table(1, device)), device, 2 * reqs * 18, num_speculative_tokens=most, rejection_sampling=True,
        proposer=DraftModel(chain(table(1, device)), [SPEC], vocab_size=VOCAB), max_num_reqs=reqs,
        max_num_tokens=reqs * (1 + most), decode_sizes=(reqs,), mixed_sizes=(reqs * (1 + most),),
    )  # fmt: skip
    for first in range(0, 8 * reqs, reqs):
        with DecodeSession(runtime) as session:
            sources = [session.add([0], SamplingParams(3, 1.2, first + i)) for i in range(reqs // 2)]
            session.run(1)
            forks = [session.fork(source, seed=1000 + source.params.seed) for source in sources[1:]]
            twin = session.fork(sources[0])
            finish(session, 8)
            assert twin.tokens == sources[0].tokens
        for source, fork in zip(sources[1:], forks, strict=True):
            exact = (table(1, torch.device("cpu"))[source.tokens[0], :TOKENS].double() / 1.2).softmax(0)
            pairs[source.tokens[1], fork.tokens[1]] += 1
            expected += torch.outer(exact, exact)
    check_counts(pairs.flatten(), expected.flatten())
    runtime.close()


def test_greedy_tokens_are_those_of_plain_decoding(device: torch.device) -> None:
    """With penalties, stop tokens, a fork and loops: a distribution of one token leaves no choice."""
    params = [
        SamplingParams(40, frequency_penalty=0.3, repetition_penalty=1.1),
        SamplingParams(27, temperature=0.8, top_k=1, presence_penalty=2.0, min_tokens=9, stop_ids={5, 11, 20}),
        SamplingParams(33, stop_ids={1, 2}, logit_bias={4: 3.0}, logprobs=0),
    ]
    options = {"max_num_tokens": 32, "penalties": True, "max_logit_bias": 8, "max_logprobs": 2}
    model, found = LivelyModel(device), []
    for most in (0, 3):
        proposer = drafter(perturbed(device)) if most else None
        runtime = captured(
            model, device, 80, proposer=proposer, num_speculative_tokens=most, rejection_sampling=most > 0,
            loop_sizes=(1, 2, 4), **options,
        )  # fmt: skip
        with DecodeSession(runtime) as session:
            found.append(results(run(session, params)))
        runtime.close()
    assert found[1] == found[0]


def test_replay_equals_the_eager_step(device: torch.device) -> None:
    """Steps of a sampled request are compared, with the log-probabilities of the drafts."""
    runtime = captured(
        LivelyModel(device), device, proposer=drafter(perturbed(device)), num_speculative_tokens=2, max_num_tokens=32,
        rejection_sampling=True, shadow_every=1,
    )  # fmt: skip
    with DecodeSession(runtime) as session:
        for prompt in PROMPTS[:2]:
            session.add(prompt, SamplingParams(25, temperature=5.0, seed=3))
        finish(session, 1)
        stats = runtime.stats()
        assert stats.shadow_steps
        assert not stats.shadow_differences
        assert stats.tokens_per_step[1]
        assert stats.tokens_per_step[3]
        with pytest.raises(UnsupportedError, match="tokens: expected no drafts with rejection_sampling=True"):
            session.set_drafts(request := session.add([1], SamplingParams(2)), [1])
        session.set_drafts(request, [])  # no drafts need no probabilities
    with pytest.raises(UnsupportedError, match=r"batch\.sample: expected no drafts with rejection_sampling=True"):
        runtime.replay(Batch(req_indices=[0], seq_lens=[11], query_lens=[2], sample=[2], tokens=[1, 2]))
    runtime.close()


def test_what_is_refused() -> None:
    options = {"num_speculative_tokens": 2, "max_num_tokens": 32, "rejection_sampling": True}
    with pytest.raises(ConfigError, match="proposer: expected drafts and their log-probabilities"):
        captured(proposer=ngram_drafts, **options)
    with pytest.raises(ConfigError, match=r"rejection_sampling: expected the built-in sampler, .* got no proposer"):
        captured(**options)

    def wrong(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        return ngram_drafts(step), torch.zeros(len(step.req_indices), 2, VOCAB - 1)

    with pytest.raises(ConfigError, match="rejection_sampling: expected"):
        captured(num_speculative_tokens=2, max_num_tokens=32, rejection_sampling=1)
    with pytest.raises(Exception, match="the proposer's log-probabilities: expected"):
        captured(proposer=wrong, **options)
