"""Short runs of the toy runtime that check some buffers of a step each: mutation tests skip one buffer at a time."""

from __future__ import annotations

import random

import numpy as np
import torch

from graphrt.batch import Batch, Request
from graphrt.cache.groups import kv_groups
from graphrt.config import RuntimeConfig
from graphrt.kernels.types import FaultCode, FinishReason
from graphrt.proposer import ngram_drafts
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.spec import AttentionKind, AttentionSpec
from graphrt.step import Step
from graphrt.testing.poison import poison_derived
from tests.support.toy import VOCAB, Rig, Sequence, captured, make_rig


def prompts(rng: random.Random, count: int, low: int = 1, high: int = 7) -> list[list[int]]:
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(low, high))] for _ in range(count)]


def check_row(rig: Rig, sequence: Sequence, logits: torch.Tensor) -> None:
    """Compare the logits of one request with the dense oracle on the tokens that were fed."""
    want = rig.model.oracle(sequence.tokens[: sequence.cached])
    bound = 2e-4 if logits.dtype == torch.float32 else 6e-2
    error = (logits.double().cpu() - want).abs().max().item()
    assert error <= bound, f"row {sequence.req_index} at length {sequence.cached}: error {error}"


def step_both_ways(rig: Rig, batch: Batch) -> tuple[np.ndarray, torch.Tensor]:
    """Run one step eagerly and by replay, with poisoned buffers in between; both must be bitwise equal."""
    buffers = rig.manager.buffers
    last = buffers.last_token.clone()
    poison_derived(buffers)
    eager = rig.manager.replay(batch, eager=True)
    eager_logits, eager_tokens = eager.logits(copy=True), eager.tokens()
    buffers.last_token.copy_(last)
    poison_derived(buffers)
    buffers.token_ring.fill_(-9)
    if rig.manager.kv_cache.device.type == "cuda":
        torch.cuda.synchronize()
    handle = rig.manager.replay(batch)
    assert handle.why_eager == "", handle.why_eager
    logits, tokens = handle.logits(copy=True), handle.tokens()
    assert torch.equal(logits, eager_logits), f"{handle.descriptor}: replay differs from eager"
    assert tokens.tolist() == eager_tokens.tolist()
    if logits.dim() == 3:  # in a graph for drafts
        assert not (tokens[:, 1:] >= 0).any()
        logits, tokens = logits[0], tokens[:, 0]
    assert tokens.tolist() == logits.argmax(-1).tolist()
    return tokens, logits


def rig_of(two_parts: bool) -> Rig:
    parts = {"backend": "torch_reference", "prefill_backend": "torch_reference"} if two_parts else {}
    return make_rig(torch.device("cpu"), **parts)


def scenario(rig: Rig) -> None:
    """A short run: prefill, sampled and greedy decode in a shrinking batch, then decode together with a prompt."""
    rng = random.Random(8)
    sequences = [rig.start(i, p) for i, p in enumerate(prompts(rng, 4, 3, 7))]
    rig.prefill(*sequences)
    kv = [t.clone() for _, t in rig.manager.kv_cache.named_tensors()]
    for chosen in (sequences[:3], sequences[1:3], sequences):
        options = [{"temperature": 50.0 * (s.req_index % 2), "seed": 11 + s.req_index} for s in chosen]
        rows = [rig.row(s, **o) for s, o in zip(chosen, options, strict=True)]
        handle = rig.manager.replay(Batch.from_requests(rows))
        logits, tokens = handle.logits(copy=True), handle.tokens()
        for i, (sequence, row) in enumerate(zip(chosen, rows, strict=True)):
            check_row(rig, sequence, logits[i])
            expected = _expected_token(logits[i], row)
            assert int(tokens[i]) == expected, f"row {i}: token {tokens[i]}, expected {expected}"
            sequence.tokens.append(int(tokens[i]))
            assert rig.manager.buffers.last_token[sequence.req_index] == tokens[i]
        kv = _check_kv(rig, chosen, kv)
    for req_index, decoding in ((5, sequences[:3]), (6, sequences[1:2])):  # as many decodes as before would be too many
        chosen = [rig.start(req_index, [3, 1, 4, 1]), *decoding]
        handle = rig.manager.replay(Batch.from_requests([rig.row(s) for s in chosen]))
        for sequence, token, logits in zip(chosen, handle.tokens().tolist(), handle.logits(copy=True), strict=True):
            check_row(rig, sequence, logits)
            sequence.tokens.append(token)


def fault_scenario() -> None:
    """A step with a faulty request, and one without."""
    rig = make_rig(torch.device("cpu"))
    for token in (VOCAB + 2, 3):
        fine, other = rig.row(rig.start(0, [5])), rig.row(rig.start(1, [token]))
        faults = rig.manager.replay(Batch.from_requests([fine, other])).faults
        found = [(fault.index, fault.code, fault.value) for fault in faults]
        assert found == ([(1, FaultCode.TOKEN_OUT_OF_RANGE, token)] if token > VOCAB else [])


def truncation_scenario() -> None:
    """Requests at high temperature with only their best token, by three options, and one with all tokens."""
    rig = make_rig(torch.device("cpu"))
    sequences = [rig.start(i, [5, 3, 1]) for i in range(3)]
    asked = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
    rows = [rig.row(s, temperature=50.0, seed=9, **o) for s, o in zip(sequences, asked, strict=True)]
    best = int(rig.model.oracle([5, 3, 1]).argmax())
    assert rig.manager.replay(Batch.from_requests(rows)).tokens().tolist() == [best] * 3
    rows = [rig.row(rig.start(3 + i, [5, 3, 1]), temperature=50.0, seed=i) for i in range(4)]
    assert len(set(rig.manager.replay(Batch.from_requests(rows)).tokens().tolist())) > 1


def penalty_scenario() -> None:
    """Requests that forbid each token of the prompt, then the first of the output, by three options."""
    rig = make_rig(torch.device("cpu"), penalties=True)
    sequences = [rig.start(i, [5, 3, 1]) for i in range(3)]
    asked: list[dict[str, float]] = [
        {"repetition_penalty": 1e6}, {"presence_penalty": 1e6}, {"frequency_penalty": 1e6, "prompt_len": 3},
    ]  # fmt: skip
    for length in (3, 4):
        rows = [rig.row(s, **o) for s, o in zip(sequences, asked, strict=True)]
        tokens = rig.manager.replay(Batch.from_requests(rows)).tokens().tolist()
        for sequence, token, options in zip(sequences, tokens, asked, strict=True):
            logits, known = rig.model.oracle(sequence.tokens), set(sequence.tokens[options.get("prompt_len", 0) :])
            if "repetition_penalty" in options:
                logits = torch.where(logits > 0, 0.0, float("-inf")).where(sequence_mask(known), logits)
            else:
                logits[list(known)] = float("-inf")
            assert token == int(logits.argmax()), f"{options} at length {length}"
            sequence.tokens.append(token)
    for sequence in sequences:  # back into the prompt, with other tokens from there on
        sequence.tokens[2:], sequence.cached = [7, 7], 2
    rows = [rig.row(s, **o) for s, o in zip(sequences, asked, strict=True)]
    rig.manager.replay(Batch.from_requests(rows)).tokens()
    for sequence, options in zip(sequences, asked, strict=True):
        output = torch.tensor(sequence.tokens[int(options.get("prompt_len", 0)) :])
        counts = rig.manager.buffers.penalty_counts[sequence.req_index]
        assert torch.equal(counts, torch.bincount(output, minlength=VOCAB).int())


def copies(step: Step) -> torch.Tensor:
    """A model that counts from 11 to 16, again and again."""
    logits = torch.zeros(len(step.logits_indices), VOCAB, device=step.input_ids.device)
    following = step.input_ids[step.logits_indices] + 1
    return logits.scatter(1, torch.where(following > 16, 11, following)[:, None], 1.0)


def draft_scenario() -> None:
    """A prompt in two chunks, then n-grams that are all accepted: four tokens a step."""
    runtime = captured(copies, proposer=ngram_drafts, num_speculative_tokens=3)
    with DecodeSession(runtime) as session:
        request = session.add([11, 12, 13, 14, 15, 16] * 4, SamplingParams(17))
        session.run(2)
        session.run(4)
        session.collect(wait=True)
        assert request.tokens == ([11, 12, 13, 14, 15, 16] * 3)[:17]
        assert request.num_draft_tokens == request.num_accepted_tokens == 17 - 1 - 4
        assert request.finish_reason is FinishReason.LENGTH


def even(step: Step) -> torch.Tensor:
    """A model whose next token is any of 11 to 16, with equal probabilities."""
    tokens = torch.arange(VOCAB, device=step.input_ids.device)
    logits = torch.where((tokens >= 11) & (tokens <= 16), 0.0, float("-inf"))
    return logits.expand(len(step.logits_indices), -1).contiguous()


def elevens(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts that are always 11, with the log-probabilities of `even`."""
    drafts = torch.full_like(step.buffers.drafts[: step.descriptor.padded_reqs], 11)
    logprobs = even(step)[:1].log_softmax(1)
    return drafts, logprobs.expand(*drafts.shape, -1).contiguous()


def rejection_scenario() -> None:
    """Drafts have the probability with which they were drawn, so all are accepted: four tokens a step."""
    runtime = captured(even, proposer=elevens, num_speculative_tokens=3, rejection_sampling=True)
    with DecodeSession(runtime) as session:
        request = session.add([11], SamplingParams(17, temperature=1.0, seed=5))
        session.run(5)
        session.collect(wait=True)
        assert len(request.tokens) == 17
        assert all(token == 11 for at, token in enumerate(request.tokens) if at % 4)
    runtime.close()


def branches(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """The drafts of `ngram_drafts` as the second children of the tokens before them; the first are token 0."""
    most = step.buffers.drafts.shape[1]
    tokens = ngram_drafts(step).repeat_interleave(2, 1)[:, :most]
    tokens[:, ::2] = 0
    parents = torch.arange(most, dtype=torch.int32, device=tokens.device) // 2 * 2
    return tokens.contiguous(), parents.expand_as(tokens).contiguous()


def tree_scenario() -> None:
    """A prompt, then six steps, in each of which two drafts are accepted and two are not."""
    runtime = captured(copies, proposer=branches, num_speculative_tokens=4, tree_depth=2, max_num_tokens=32)
    with DecodeSession(runtime) as session:
        request = session.add([11, 12, 13, 14, 15, 16] * 4, SamplingParams(30))
        session.run(2)
        session.run(5)
        session.collect(wait=True)
        assert request.tokens == ([11, 12, 13, 14, 15, 16] * 4)[:19]
    runtime.close()


def mask_scenario() -> None:
    """Requests with a mask each, with the mask of another, and with none."""
    rig = make_rig(torch.device("cpu"), token_masks=True)
    allowed = {0: {7, 40}, 3: {8, 31, 32, 60}}
    words = {at: [sum(1 << t % 32 for t in tokens if t // 32 == w) for w in (0, 1)] for at, tokens in allowed.items()}
    rig.manager.request_tables.set_token_masks(words)
    masks = [3, 0, -1]
    rows = [rig.row(rig.start(i, [5, 3, 1]), token_mask=mask) for i, mask in enumerate(masks)]
    logits = rig.model.oracle([5, 3, 1])
    want = [max(allowed.get(mask, range(VOCAB)), key=lambda t: float(logits[t])) for mask in masks]
    assert rig.manager.replay(Batch.from_requests(rows)).tokens().tolist() == want


def logprob_scenario() -> None:
    """Log-probabilities of the sampled token, of a given one, and none, in two orders."""
    rig = make_rig(torch.device("cpu"), max_logprobs=2)
    logits = rig.model.oracle([5, 3, 1])
    best = int(logits.argmax())
    for asked in ([(1, -1), (-1, -1), (0, 7)], [(0, 7), (1, -1), (-1, 3)]):
        rows = [rig.row(rig.start(i, [5, 3, 1]), logprobs=n, logprob_token=token) for i, (n, token) in enumerate(asked)]
        handle = rig.manager.replay(Batch.from_requests(rows))
        for (n, token), found in zip(asked, handle.logprobs(), strict=True):
            assert (found is None) == (n < 0)
            if found is not None:
                want = best if token < 0 else token
                assert found.token == want
                assert abs(found.logprob - float(logits.log_softmax(-1)[want])) < 1e-4
                assert len(found.top) == n


def sequence_mask(tokens: set[int]) -> torch.Tensor:
    """[VOCAB] bool: which tokens a sequence has."""
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[list(tokens)] = True
    return mask


def encoder_scenario() -> None:
    """Requests with encoders of 5, 2 and 0 tokens, in two orders, against softmax in float64."""
    specs = [AttentionSpec(2, 1, 16, torch.float32, kind=AttentionKind.CROSS)]

    def model(step: Step) -> torch.Tensor:
        q = torch.ones(step.descriptor.padded_tokens, 2, 16)
        return step.attend(0, q, None, None).flatten(1)[step.logits_indices]

    config = RuntimeConfig(4, 8, 8, max_encoder_len=8, decode_sizes=(4,), mixed_sizes=(8,))
    groups = kv_groups(specs, page_size=4)
    with Runtime(
        model, specs, groups, vocab_size=32, device="cpu", num_pages=9, config=config, sampler=None
    ) as runtime:
        runtime.capture()
        k, v = torch.randn(2, 5, 1, 16, generator=torch.Generator().manual_seed(1))
        runtime.kv_cache.write(0, k, v, runtime.kv_cache.slots([3, 7], 5))
        lengths = [5, 0, 2]
        for order in ((0, 1, 2), (2, 0, 1)):
            rows = [Request(i, [1], 1, [3, 7][: -(-lengths[i] // 4)], encoder_len=lengths[i]) for i in order]
            logits = runtime.replay(Batch.from_requests(rows)).logits(copy=True)
            for at, i in enumerate(order):
                weights = (k[: lengths[i], 0].double().sum(-1) / 4).softmax(0)
                want = (weights @ v[: lengths[i], 0].double()).repeat(2)
                torch.testing.assert_close(logits[at].double(), want, atol=1e-5, rtol=1e-5)


def _expected_token(logits: torch.Tensor, row) -> int:
    """The token of a request that is sampled alone: it must not depend on the batch."""
    from graphrt.kernels.ops.sampling import sample

    device = logits.device
    return int(
        sample(
            logits[None],
            torch.tensor([row.temperature], device=device),
            torch.tensor([row.seed], device=device),
            torch.tensor([row.seq_len], dtype=torch.int32, device=device),
        )[0]
    )


def _check_kv(rig: Rig, chosen: list[Sequence], before: list[torch.Tensor]) -> list[torch.Tensor]:
    """Check that exactly the slots of the new tokens were written."""
    after = [t.clone() for _, t in rig.manager.kv_cache.named_tensors()]
    written = {(s.pages[(s.cached - 1) // rig.page_size], (s.cached - 1) % rig.page_size) for s in chosen}
    for old, new in zip(before, after, strict=True):
        same = (old == new) | (old.isnan() & new.isnan())
        changed = {tuple(x) for x in (~same).flatten(2).any(-1).nonzero().tolist()}
        assert changed == written
    return after
