"""Problems of prompt attention with a dense oracle: what the tests of its kernels share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.kernels.attention.prompt import prompt_attention
from graphrt.kernels.attention.prompt_plan import PromptPlan
from graphrt.kernels.attention.prompt_schedule import schedule_prompt
from tests.support.attention_cases import Case, Problem, make_problem

UNWRITTEN = 768.0  # which every dtype holds


@dataclass(frozen=True)
class PromptCase:
    """One problem.

    case        rows, heads, dtypes and options
    window      as `prompt_attention` takes it
    packed      K and V lie one row after another, not in pages
    first_row   rows before it belong to another kernel
    """

    case: Case
    window: tuple[int, int] | None = None
    packed: bool = False
    first_row: int = 0

    @property
    def id(self) -> str:
        return self.case.id

    def plan(self, num_tokens: int, native: bool) -> PromptPlan:
        case = self.case
        heads = {name: value for name, value in case.heads.items() if name != "v_head_dim"}
        sizes = {**heads, "kv_dtype": case.stored, "num_sms": case.num_sms}
        return PromptPlan.make(len(case.rows), num_tokens, causal=case.causal, native=native, **sizes)

    @property
    def reach(self) -> tuple[float, float]:
        """Positions before and behind its own that a token sees."""
        if self.case.causal:
            return (self.case.window - 1 if self.case.window else float("inf")), 0
        return self.window or (float("inf"), float("inf"))


def make_prompt(case: PromptCase, rng: torch.Generator, device: torch.device) -> Problem:
    return make_problem(case.case, rng, device)


def run_prompt(case: PromptCase, problem: Problem, *, native: bool = False) -> torch.Tensor:
    """Schedule and attend, every output poisoned first."""
    problem.out.fill_(UNWRITTEN)
    if problem.lse is not None:
        problem.lse.fill_(UNWRITTEN)
    launch_prompt(case, problem, native=native)
    return problem.out.cpu().clone()


def launch_prompt(case: PromptCase, problem: Problem, *, native: bool = False) -> None:
    """What a graph captures of a case, if all it allocates is there already."""
    plan = case.plan(problem.q.shape[0], native)
    device = problem.q.device
    if plan not in problem.workspaces:
        schedule = torch.full((plan.schedule_words,), -(1 << 30), dtype=torch.int32, device=device)
        problem.workspaces[plan] = schedule, problem.contiguous() if case.packed else None
    schedule, packed = problem.workspaces[plan]
    lens, k, v, table = problem.seq_lens, problem.k_cache, problem.v_cache, problem.block_table
    if packed is not None:
        (k, v, lens), table = packed, None
    starts = problem.query_start_loc
    if case.first_row:
        starts = starts.clamp(min=int(starts[case.first_row]))
    schedule_prompt(plan, lens, starts, schedule, seq_lens_are_starts=packed is not None)
    prompt_attention(
        problem.q, k, v, problem.out, plan, schedule, problem.options, block_table=table, window=case.window,
        lse=problem.lse,
    )  # fmt: skip


def expected_prompt(case: PromptCase, problem: Problem, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, row by row and head by head, with every operation in `dtype`: output and log-sum-exp."""
    of, q, options = case.case, problem.q.cpu().to(dtype), problem.options
    left, right = case.reach
    out, lse = torch.zeros(q.shape, dtype=dtype), torch.full(q.shape[:2], float("-inf"), dtype=dtype)
    start = 0
    for row, ((seq_len, query_len), (k, v)) in enumerate(zip(of.rows, problem.dense, strict=True)):
        if row < case.first_row:
            out[start : start + query_len], lse[start : start + query_len] = UNWRITTEN, UNWRITTEN
            start += query_len
            continue
        behind = torch.arange(seq_len) - torch.arange(seq_len - query_len, seq_len)[:, None]
        visible = (behind <= right) & (behind >= -left)
        for head in range(q.shape[1]):
            keys, values = (x[:, head // of.group].to(dtype) for x in (k, v))
            logits = q[start : start + query_len, head] @ keys.T * of.head_dim**-0.5
            if of.softcap:
                logits = of.softcap * torch.tanh(logits / of.softcap)
            if options.alibi_slopes is not None:
                distance = behind.abs().to(dtype)
                distance = distance.sqrt() if options.alibi_sqrt else distance
                logits = logits - options.alibi_slopes[head].cpu().to(dtype) * distance
            logits = logits.masked_fill(~visible, float("-inf"))
            if options.sinks is not None:
                sink = options.sinks[head].cpu().to(dtype).expand(query_len, 1)
                logits = torch.cat([logits, sink], 1)
            lse[start : start + query_len, head] = torch.logsumexp(logits, 1)
            shares = torch.softmax(logits, 1)[:, :seq_len].nan_to_num(0.0)
            out[start : start + query_len, head] = shares @ values
        if seq_len == 0:  # the queries of such a row are NaN
            out[start : start + query_len] = 0
        start += query_len
    return out, lse


def assert_right(case: PromptCase, problem: Problem, got: torch.Tensor) -> None:
    """Error at most twice that of plain torch in the same dtype, plus 1e-5; exact values where nothing is computed."""
    truth, true_lse = expected_prompt(case, problem, torch.float64)
    plain, plain_lse = expected_prompt(case, problem, problem.case.dtype)
    bound = 2 * (plain.double() - truth).abs().max().item() + 1e-5
    error = (got.double() - truth).abs().max().item()
    assert error <= bound, f"max error {error:.3g}, allowed {bound:.3g}"
    exact = ((truth == 0) | (truth == UNWRITTEN)).flatten(1).all(1)
    assert torch.equal(got[exact].double(), truth[exact])
    if problem.lse is None:
        return
    have = problem.lse.cpu().double()
    seen = true_lse.isfinite()
    assert torch.equal(have.isfinite(), seen), "log-sum-exp where nothing is seen"
    bound = 2 * (plain_lse.double() - true_lse)[seen].abs().max().item() + 1e-5 if seen.any() else 0.0
    error = (have - true_lse)[seen].abs().max().item() if seen.any() else 0.0
    assert error <= bound, f"max error of the log-sum-exp {error:.3g}, allowed {bound:.3g}"
