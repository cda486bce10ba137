"""Time of sampling in graph replays, against torch's sort-based sampling and FlashInfer's kernels in the same run.

    python -m scripts.bench_sampling [--rows 1,16,256] [--vocab 128256,151936]

Logits are bfloat16 and normally distributed. Top-p keeps most tokens of flat logits. Peaked logits have four times the
standard deviation. Times are microseconds of one call. `torch` sorts, like vLLM's native path. Small batches are in the
L2 cache, as after a model's head. The last line is one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from graphrt.bench.environment import provenance
from graphrt.bench.timer import rotations, time_calls
from graphrt.kernels.ops.sampling import Truncation, sample
from graphrt.kernels.ops.sampling_logprobs import token_logprobs
from graphrt.kernels.ops.sampling_state import Penalties, PenaltyState, record_tokens
from scripts.rigs.measure import make_parser, parse

MAX_CALLS = 16
CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "greedy, options compiled in": {"temperature": 0.0, "options": 1},
    "temperature, options compiled in": {"options": 1},
    "top-k 50, top-p 0.9, penalties": {"top_k": 50, "top_p": 0.9, "penalties": 1},
    "top-k 50, top-p 0.9, penalties, peaked": {"top_k": 50, "top_p": 0.9, "penalties": 1, "scale": 4.0},
    "top-k 1024": {"top_k": 1024},
    "top-k 1024, top-p 0.9, penalties": {"top_k": 1024, "top_p": 0.9, "penalties": 1},
    "top-k 5000": {"top_k": 5000},
    "top-p 0.9, flat": {"top_p": 0.9},
    "top-p 0.9, peaked": {"top_p": 0.9, "scale": 4.0},
    "min-p 0.05": {"min_p": 0.05},
    "log-probabilities, top 20": {"logprobs": 20},
    "log-probabilities, unasked": {"logprobs": -1},
    "record a token, penalties off": {"record": 1.0},
    "record a token, penalties on": {"record": 1.2},
}


class Inputs:
    """The tensors of one call. Each call has its own logits, so that calls do not share cached data."""

    def __init__(self, case: dict[str, float], rows: int, vocab: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device=device).manual_seed(seed)
        logits = torch.randn(rows, vocab, generator=generator, device=device)
        self.logits = (case.get("scale", 1.0) * logits).bfloat16()

        def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        self.temperatures = column(case.get("temperature", 0.8))
        self.seeds = torch.arange(rows, device=device)
        self.seq_lens = column(1001, torch.int32)
        self.req_indices = torch.arange(rows, dtype=torch.int32, device=device)
        self.truncation = Truncation(
            column(case.get("top_k", 0), torch.int32), column(case.get("top_p", 1.0)), column(case.get("min_p", 0.0))
        )
        on = case.get("penalties", 0)
        repetition = case.get("record", 1.2 if on else 1.0)
        self.penalties = None
        if on or "options" in case or "record" in case:
            state = PenaltyState.allocate(rows, vocab, 1001, device)
            penalties = Penalties(column(1.2), column(0.0), column(0.0), state)
            tokens = torch.randint(0, vocab, (rows * 1000,), generator=generator, device=device)
            starts = torch.arange(0, rows * 1000 + 1, 1000, dtype=torch.int32, device=device)
            lengths, prompts = column(1000, torch.int32), column(800, torch.int32)
            record_tokens(tokens, starts, starts[1:].long() - 1, lengths, self.req_indices, prompts, penalties)
            self.penalties = Penalties(column(repetition), column(0.3 * on), column(0.2 * on), state)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.wanted = column(case.get("logprobs", 0), torch.int32)


def our_call(case: dict[str, float], x: Inputs) -> Callable[[], object]:
    if "logprobs" in case:
        return lambda: token_logprobs(x.logits, x.req_indices, x.wanted, max_top=20)
    if "record" in case:
        assert x.penalties is not None, "a case of records has penalties"
        penalties = x.penalties
        rows = x.starts[:-1].long()
        return lambda: record_tokens(x.tokens, x.starts, rows, x.seq_lens, x.req_indices, x.req_indices, penalties)
    plain = not {"options", "top_k", "top_p", "min_p", "penalties"} & case.keys()
    return lambda: sample(
        x.logits, x.temperatures, x.seeds, x.seq_lens, req_indices=None if plain else x.req_indices,
        truncation=None if plain else x.truncation, penalties=x.penalties,
    )  # fmt: skip


def torch_call(case: dict[str, float], x: Inputs) -> Callable[[], object] | None:
    """Sample like an engine without its own kernels, which has dense counts already."""
    if "record" in case or "options" in case or case.get("logprobs", 0) < 0:
        return None
    top_k, top_p, min_p = (int(case.get("top_k", 0)), case.get("top_p", 1.0), case.get("min_p", 0.0))
    counts = x.penalties.state.counts if x.penalties is not None else None

    def call() -> torch.Tensor:
        logits = x.logits.float()
        if "logprobs" in case:
            return torch.topk(logits.log_softmax(-1), 20, dim=-1).values
        if counts is not None:
            seen = counts > 0  # counts of output tokens; prompt bits are omitted, which favors this variant
            logits = torch.where(seen, torch.where(logits > 0, logits / 1.2, logits * 1.2), logits)
            logits = logits - 0.2 * counts - 0.3 * seen
        if case.get("temperature") == 0.0:
            return logits.argmax(-1)
        logits = logits / x.temperatures[:, None]
        if min_p > 0:
            probs = logits.softmax(-1)
            logits = logits.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), float("-inf"))
        if top_k or top_p < 1:
            ordered, order = logits.sort(dim=-1, descending=False)
            if top_k:
                ordered = ordered.masked_fill(ordered < ordered[:, -top_k, None], float("-inf"))
            if top_p < 1:
                dropped = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
                dropped[:, -1] = False
                ordered = ordered.masked_fill(dropped, float("-inf"))
            logits = torch.empty_like(ordered).scatter_(-1, order, ordered)
        probs = logits.softmax(-1)
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1)

    return call


def flashinfer_call(case: dict[str, float], x: Inputs) -> Callable[[], object] | None:
    """FlashInfer's kernels on float32 probabilities or logits. It has no penalties."""
    try:
        import flashinfer.sampling as kernels
    except ImportError:
        return None
    if {"logprobs", "record", "options", "penalties"} & case.keys() or case.get("temperature") == 0.0:
        return None
    logits = x.logits.float() / 0.8
    top_k, top_p, min_p = x.truncation.top_k, x.truncation.top_p, x.truncation.min_p
    if "min_p" in case:
        return lambda: kernels.min_p_sampling_from_probs(logits.softmax(-1), min_p)
    if "top_k" in case:
        return lambda: kernels.top_k_top_p_sampling_from_logits(logits, top_k, top_p)
    if "top_p" in case:
        return lambda: kernels.top_p_sampling_from_probs(logits.softmax(-1), top_p)
    return lambda: kernels.sampling_from_logits(logits)


def timed(make: Callable[[Inputs], Callable[[], object] | None], inputs: list[Inputs], samples: int) -> float | None:
    """Return microseconds of a call, or None if it is missing or cannot be captured (prints the reason)."""
    calls = [call for x in inputs if (call := make(x)) is not None]
    if not calls:
        return None
    try:
        return time_calls(calls, device=inputs[0].logits.device, num_samples=samples).median_us
    except Exception as error:  # a peer that cannot be built or captured must not end the run
        print(f"not timed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None


def main() -> None:
    """Print one line per case and size, and one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", default="1,16,256")
    parser.add_argument("--vocab", default="128256,151936")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    options = parse(parser)
    if not any(options.only in name for name in CASES):
        parser.error(f"--only: expected a part of a case's name, got {options.only!r}: {', '.join(CASES)}")
    device = torch.device(options.device)
    results: list[dict[str, object]] = []
    print(f"{'case':42} {'rows':>5} {'vocab':>7} {'graphrt':>9} {'torch':>9} {'flashinfer':>10}  us")
    for name, case in CASES.items():
        if options.only not in name:
            continue
        for vocab in map(int, options.vocab.split(",")):
            for rows in map(int, options.rows.split(",")):
                count = min(rotations(2 * rows * vocab, device), MAX_CALLS)
                inputs = [Inputs(case, rows, vocab, device, seed) for seed in range(count)]
                few = inputs[: max(2, min(4, count))]  # sorts write gigabytes and evict the cache anyway
                row: dict[str, object] = {"case": name, "rows": rows, "vocab": vocab}
                row["graphrt_us"] = timed(lambda x, case=case: our_call(case, x), inputs, options.samples)
                row["torch_us"] = timed(lambda x, case=case: torch_call(case, x), few, 5)
                row["flashinfer_us"] = timed(lambda x, case=case: flashinfer_call(case, x), few, options.samples)
                results.append(row)
                shown = [row[f"{who}_us"] for who in ("graphrt", "torch", "flashinfer")]
                cells = [f"{value:9.1f}" if isinstance(value, float) else f"{'-':>9}" for value in shown]
                print(f"{name:42} {rows:5} {vocab:7} {cells[0]} {cells[1]}  {cells[2]}", flush=True)
                del inputs, few
    print(json.dumps({"name": "sampling", "results": results, **provenance()}), flush=True)


if __name__ == "__main__":
    main()
