"""Arguments of `sample`, and independent oracles: transformers' processors, Python's integers and float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from graphrt.generate.generator import TextGenerator
from graphrt.kernels.ops.sampling import LogitBias, TokenMask, Truncation, sample
from graphrt.kernels.ops.sampling_state import Penalties, PenaltyState, record_tokens, state_words
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from tests.support.toy import ToyModel

F32, I32 = torch.float32, torch.int32
INF = float("inf")
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@contextmanager
def reference_ops() -> Iterator[None]:
    """Run operators on a CPU as their references in the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphrt.kernels.library._cpu_runs_triton", False)
        yield


def column(values: list[float] | float, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    values = values if isinstance(values, list) else [values] * rows
    return torch.tensor(values, dtype=dtype, device=device)


def truncation(rows: int, device: torch.device, **options: list[float] | float) -> Truncation:
    values = OFF | options
    return Truncation(
        column(values["top_k"], rows, I32, device),
        column(values["top_p"], rows, F32, device),
        column(values["min_p"], rows, F32, device),
    )


def penalties_with(
    sequences: list[tuple[list[int], list[int]]],
    vocab: int,
    device: torch.device,
    repetition: list[float] | float = 1.0,
    presence: list[float] | float = 0.0,
    frequency: list[float] | float = 0.0,
) -> tuple[Penalties, torch.Tensor]:
    """Penalties and row ids of rows whose prompt and output tokens are given, entered in one step."""
    rows = len(sequences)
    state = PenaltyState.allocate(rows + 3, vocab, 1024, device)
    req_indices = torch.tensor([rows + 1 - r for r in range(rows)], dtype=I32, device=device)
    penalties = Penalties(
        column(repetition, rows, F32, device), column(presence, rows, F32, device),
        column(frequency, rows, F32, device), state,
    )  # fmt: skip
    tokens = [token for prompt, output in sequences for token in prompt + output]
    lengths = torch.tensor([len(prompt) + len(output) for prompt, output in sequences])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    record_tokens(
        torch.tensor(tokens, dtype=torch.int64, device=device), starts.int().to(device),
        (starts[1:] - 1).to(device), lengths.int().to(device), req_indices,
        torch.tensor([len(prompt) for prompt, _ in sequences], dtype=I32, device=device), penalties,
    )  # fmt: skip
    return penalties, req_indices


def biases(
    entries: list[dict[int, float]],
    req_indices: list[int],
    max_rows: int,
    device: torch.device,
    early: list[tuple[dict[int, float], int]] | None = None,
) -> LogitBias:
    """Bias lists of some requests; `early`: their second lists, and the length below which those apply."""
    early = early or [({}, 0)] * len(entries)
    width = max(1, *(len(entry) for entry in (*entries, *(entry for entry, _ in early))))
    bias = LogitBias.allocate(max_rows, width, device)
    for req_index, first, (second, length) in zip(req_indices, entries, early, strict=True):
        bias.lists[req_index] = torch.tensor([len(first), len(second), length], dtype=I32)
        for which, entry in enumerate((first, second)):
            bias.tokens[req_index, which, : len(entry)] = torch.tensor(sorted(entry), dtype=I32)
            bias.values[req_index, which, : len(entry)] = torch.tensor([entry[t] for t in sorted(entry)], dtype=F32)
    return bias


def packed(allowed: torch.Tensor) -> torch.Tensor:
    """Bits of a bool mask [masks, vocab] as words of 32; bits beyond the vocabulary are set, and must not matter."""
    masks, vocab = allowed.shape
    words = []
    for row in allowed.tolist():
        row += [True] * (32 * state_words(vocab) - vocab)
        values = (sum(1 << b for b in range(32) if row[at + b]) for at in range(0, len(row), 32))
        words.append([value - (1 << 32) if value >= 1 << 31 else value for value in values])
    return torch.tensor(words, dtype=I32).view(masks, -1)


def token_mask(allowed: torch.Tensor, index: list[int], device: torch.device) -> TokenMask:
    return TokenMask(packed(allowed).to(device), torch.tensor(index, dtype=I32, device=device))


def drawn(logits: torch.Tensor, count: int, temperature: float, first_seed: int = 0, **options: object) -> torch.Tensor:
    """`count` draws from one row of logits, with a seed each."""
    device = logits.device
    return sample(
        logits.expand(count, -1), torch.full((count,), temperature, device=device),
        torch.arange(first_seed, first_seed + count, device=device),
        torch.full((count,), 5, dtype=I32, device=device), **options,
    ).cpu()  # fmt: skip


def warped(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Logits of one row after transformers' processors, in vLLM's order; dropped tokens are -inf."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    chain: list[Callable[..., torch.Tensor]] = [TemperatureLogitsWarper(temperature)]
    if min_p > 0:
        chain.append(MinPLogitsWarper(min_p))
    if top_k > 0:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    scores = logits[None].double()
    for warper in chain:
        scores = warper(None, scores)
    return scores[0]


def arguments(
    logits: torch.Tensor, temperature: float | list[float], seed: int = 0, position: int = 5
) -> tuple[torch.Tensor, ...]:
    """Arguments of `sample` for some rows; row r has seed `seed + r`."""
    rows, device = logits.shape[0], logits.device
    heat = [temperature] * rows if isinstance(temperature, float) else temperature
    return (
        logits,
        torch.tensor(heat, dtype=F32, device=device),
        torch.arange(seed, seed + rows, device=device),
        torch.full((rows,), position, dtype=torch.int32, device=device),
    )


def finish(session: DecodeSession, steps: int = 5) -> None:
    """Run and collect launches of `steps` steps until no request runs."""
    while session.running:
        session.run(steps)
        session.collect(wait=True)


def generated(generator: TextGenerator, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """The tokens that a generator yields for each prompt."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for event in generator.generate(prompts, params):
        outputs[event.prompt] += [] if event.token is None else [event.token]
    return outputs


def one_hot_rows(vocab: int, *rows: dict[int, float], rest: float = 0.0) -> torch.Tensor:
    logits = torch.full((len(rows), vocab), rest)
    for r, values in enumerate(rows):
        for token, value in values.items():
            logits[r, token] = value
    return logits


def formula(
    logits: torch.Tensor, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> torch.Tensor:
    """Penalized logits [vocab] of a row: repetition by transformers' processor, the others by their formula."""
    from transformers import RepetitionPenaltyLogitsProcessor

    out = logits.clone()
    if prompt + output:
        out = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + output]), out[None])[0]
    counts = torch.tensor(output, dtype=torch.int64).bincount(minlength=len(out))
    return out - frequency * counts - presence * (counts > 0)


def model_of(runtime: Runtime) -> ToyModel:
    return runtime.manager._program.model


def greedy_output(
    model: ToyModel, prompt: list[int], params: SamplingParams, allowed: set[int] | None = None
) -> list[int]:
    """Greedy output with its stop token: mask, bias, stop tokens, penalties on the float64 logits of the oracle."""
    output: list[int] = []
    while len(output) < params.max_new_tokens and (not output or output[-1] not in params.stop_ids):
        logits = model.oracle(prompt + output)
        if allowed is not None:
            logits[[token for token in range(len(logits)) if token not in allowed]] = -INF
        for token, value in params.logit_bias.items():
            logits[token] += value
        if len(output) < params.min_tokens:
            logits[list(params.stop_ids)] = -INF
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        output.append(int(formula(logits, prompt, output, *penalties).argmax()))
    return output


def python_philox(seed: int, c0: int, c1: int, c2: int = 0) -> tuple[int, int, int, int]:
    """Philox-4x32-10 at counter (c0, c1, c2, 0), on Python's integers, from the paper's definition."""
    key, counter = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], [c0, c1, c2, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ key[0], b & 0xFFFFFFFF, a >> 32 ^ counter[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(counter)


def exact_noise(seed: int, position: int, token: int) -> float:
    """The noise of a token in float64, from Python's Philox: its group's least variate, or above that."""
    word = python_philox(seed, token // 128, position, 1)[token // 32 % 4]
    variate = -math.log1p(-((word >> 5) + 0.5) / 2**27) / 32
    if word % 32 != token % 32:
        variate -= math.log1p(-(python_philox(seed, token, position)[0] + 0.5) / 2**32)
    return -math.log(variate)


def exact_draws(logits: torch.Tensor, temperature: list[float], seed: int, position: int) -> tuple[list[int], float]:
    """The draws in float64, and by how much the closest of them was decided."""
    tokens, margin = [], INF
    for r, row in enumerate(logits.double().tolist()):
        scores = [logit + temperature[r] * exact_noise(seed + r, position, token) for token, logit in enumerate(row)]
        best, second = sorted(scores, reverse=True)[:2]
        tokens.append(scores.index(best))
        margin = min(margin, (best - second) / max(temperature[r], 1.0))
    return tokens, margin
