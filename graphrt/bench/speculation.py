"""The speculation benchmark: time per token with drafts, by prompt lookup or a draft model, against plain decoding."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import nn

from graphrt.bench.decode import DecodeWork, kv_memory
from graphrt.config import RuntimeConfig
from graphrt.draft_model import DraftModel
from graphrt.models.llama import LlamaModel
from graphrt.proposer import Proposer, ngram_drafts
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.requests import SessionRequest
from graphrt.session.session import DecodeSession
from graphrt.spec import KVCacheSpec
from graphrt.step import Model, Step

_ROUNDS = 5
_CYCLE = 32  # tokens that the predictable model repeats
_STEPS_PER_LAUNCH = 16


@dataclass(frozen=True, slots=True)
class SpeculationResult:
    """Milliseconds per token of a request, for one batch size; medians over several rounds.

    In each round, a request emits the same number of tokens at the same positions in all three cases, because step
    times depend on sequence lengths.

    plain_ms            plain decoding
    accepted_ms         all drafts are accepted
    rejected_ms         no draft is accepted
    accepted_per_step   tokens per step where all drafts are accepted
    plain_host_us       host microseconds of `DecodeSession.run(1)` with no launch in flight, without drafts
    host_us             the same with drafts; measured in turns with `plain_host_us`
    """

    batch: int
    context: int
    num_drafts: int
    plain_ms: float
    accepted_ms: float
    rejected_ms: float
    accepted_per_step: float
    plain_host_us: float
    host_us: float


class _Predictable(nn.Module):
    """A model that always predicts the last token plus `ahead`, at the cost of one small kernel per step."""

    def __init__(self, model: Model, ahead: int = 1) -> None:
        super().__init__()
        self.model, self.ahead = model, ahead

    def forward(self, step: Step) -> torch.Tensor:
        logits: torch.Tensor = self.model(step)
        last = step.input_ids.index_select(0, step.logits_indices)
        return logits.scatter_(1, ((last + self.ahead) % _CYCLE).long().unsqueeze(1), 1e4)


def _unlikely_drafts(step: Step) -> torch.Tensor:
    """Run the lookup, but propose a token that the predictable model never samples."""
    return torch.full_like(ngram_drafts(step), _CYCLE)


def _drafter(draft: DraftModel, ahead: int) -> DraftModel:
    result = copy.copy(draft)
    result.model = _Predictable(draft.model, ahead)
    return result


def longest_sequence(context: int, steps: int, num_drafts: int) -> int:
    """Return the tokens of a request at the end of `bench_speculation`, including drafts."""
    return context + (_ROUNDS + 3) * steps * (1 + num_drafts) + 1 + num_drafts


def bench_speculation(
    model: LlamaModel,
    kv_groups: Sequence[KVCacheSpec],
    work: DecodeWork,
    num_drafts: int,
    draft: DraftModel | None = None,
) -> list[SpeculationResult]:
    """Time greedy decoding in sessions, with and without `num_drafts` drafts per step.

    draft   the draft model; None: prompt lookup

    The benchmark changes the logits of the models so that the tokens repeat. Drafts are all right, or all wrong.

    Raises: ConfigError: if the draft model has a different vocabulary.
    """
    right, wrong = (ngram_drafts, _unlikely_drafts) if draft is None else (_drafter(draft, 1), _drafter(draft, 2))
    results, tokens = [], work.steps * (1 + num_drafts)
    longest = longest_sequence(work.context, work.steps, num_drafts)
    for batch in work.batches:
        begin = partial(_decoding, model, kv_groups, work, longest, batch)
        with begin(0, None) as plain, begin(num_drafts, right) as accepted:
            plain_ms, _ = _time(plain, tokens)
            accepted_ms, accepted_per_step = _time(accepted, work.steps)
            plain_host_us, host_us = _host_us((plain, accepted), work.steps)
        with begin(num_drafts, wrong) as rejected:
            rejected_ms, _ = _time(rejected, tokens)
        times = plain_ms, accepted_ms, rejected_ms, accepted_per_step, plain_host_us, host_us
        results.append(SpeculationResult(batch, work.context, num_drafts, *times))
    return results


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Requests of a session that decode, without launches in flight."""

    session: DecodeSession
    requests: list[SessionRequest]
    launch_steps: int

    def tokens(self) -> int:
        return sum(len(request.tokens) for request in self.requests)


@contextmanager
def _decoding(
    model: LlamaModel,
    kv_groups: Sequence[KVCacheSpec],
    work: DecodeWork,
    max_seq_len: int,
    batch: int,
    drafts: int,
    proposer: Proposer | None,
) -> Iterator[_Decoding]:
    """Capture a runtime, and run the prompts of a batch."""
    step_tokens = max(batch * (1 + drafts), min(batch * work.context, 1024))
    config = RuntimeConfig(
        max_num_reqs=batch,
        max_num_tokens=step_tokens,
        max_seq_len=max_seq_len,
        decode_sizes=(batch,),
        mixed_sizes=(step_tokens,),
        loop_sizes=(batch,),
        launch_steps=min(work.steps, _STEPS_PER_LAUNCH),
        num_speculative_tokens=drafts,
        backend=work.backend,
    )
    groups = proposer.kv_groups(kv_groups) if isinstance(proposer, DraftModel) else kv_groups
    pages, _ = kv_memory(groups, batch, 1, max_seq_len)
    with Runtime(
        _Predictable(model),
        model.config.attention_specs(model.dtype),
        kv_groups,
        vocab_size=model.config.vocab_size,
        device=model.device,
        config=config,
        num_pages=pages,
        proposer=proposer,
    ) as runtime:
        runtime.capture()
        with DecodeSession(runtime) as session:
            prompt = [i % _CYCLE for i in range(work.context)]
            requests = [session.add(prompt, SamplingParams(max_seq_len - work.context)) for _ in range(batch)]
            while session.table.prefills:
                session.run(1)
            session.collect(wait=True)
            yield _Decoding(session, requests, config.launch_steps)


def _time(decoding: _Decoding, steps: int) -> tuple[float, float]:
    """Return milliseconds per token of a request, and tokens per step, for rounds of `steps` steps."""
    session, batch = decoding.session, len(decoding.requests)

    def run() -> float:
        before, start = decoding.tokens(), time.perf_counter()
        for at in range(0, steps, decoding.launch_steps):
            session.run(min(decoding.launch_steps, steps - at))
        session.collect(wait=True)
        return (time.perf_counter() - start) * batch / (decoding.tokens() - before)

    run()  # warms up
    before = decoding.tokens()
    seconds = median(run() for _ in range(_ROUNDS))
    return 1e3 * seconds, (decoding.tokens() - before) / (_ROUNDS * steps * batch)


def _host_us(decodings: Sequence[_Decoding], steps: int) -> list[float]:
    """Return host microseconds per launch of one step. Sessions take turns, because the speed of a host changes."""
    seconds: list[list[float]] = [[] for _ in decodings]
    for _ in range(steps):
        for decoding, taken in zip(decodings, seconds, strict=True):
            start = time.perf_counter()
            decoding.session.run(1)
            taken.append(time.perf_counter() - start)
            decoding.session.collect(wait=True)  # CUDA may let a launch wait for an earlier launch of the same graph
    return [1e6 * median(taken) for taken in seconds]
