"""What a verification looked at, and what it could not: so that silence is never a check that did not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphrt.testing.verify_context import Verification
from graphrt.testing.verify_graph import GraphChecks
from graphrt.testing.verify_runs import Case
from graphrt.testing.verify_subject import PlainSubject


def coverage(v: Verification, graphs: GraphChecks, captures: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Names of checks with what each did, and names of those that did not run with the reason."""
    target, runs, cases = v.target, v.runs, list(v.cases)
    cuda = target.device.type == "cuda"
    done: dict[str, str] = {}
    left: dict[str, str] = {}

    def note(name: str, happened: object, what: str, why_not: str) -> None:
        if happened:
            done[name] = what
        else:
            left[name] = why_not

    by = "the subject's own capture" if target.capture is not None else "a CUDA graph" if cuda else "an op tape"
    shown = ", ".join(captures)
    note("graph", cases, f"{by}, captured at {shown}; cases {', '.join(cases)}, the captured one last", "no case ran")
    exact = {name: outcome for name, outcome in v.exact.items() if name in v.reference and outcome.outputs}
    why = "no eager oracle is given" if target.eager is None else "the oracle gave no results"
    note("padding", exact, f"padded against exact results of {len(exact)} cases", why)
    if unknown := sorted(
        {name for case in exact for name in set(v.reference[case][1].outputs) - set(exact[case].outputs)}
    ):
        left["outputs"] = f"the oracle gives none of {', '.join(unknown)}: replays are compared with eager runs only"
    poisoned = sorted(runs.rewritten | target.derived)
    note("history", poisoned, f"poison in {', '.join(poisoned)} before refresh()", "refresh() writes to no buffer")
    kept = sorted(set(target.buffers) - runs.rewritten - target.derived)
    if kept:
        left["poison"] = (
            f"refresh() does not write to these in every case, so they keep their values: {', '.join(kept)}"
        )
    tails = [n for n in sorted(runs.rewritten) if any(not bool(w[n].all()) for w in v.written.values() if n in w)]
    note(
        "tails",
        tails,
        f"parts that refresh() does not write: {', '.join(tails)}",
        "refresh() writes all of each buffer",
    )
    note("state", target.state, f"{', '.join(target.state)} after each run", "no state is named")
    if target.state:
        what = "each case from what another one left, by step and oracle"
        note("state goes on", exact, what, "no oracle gives results")
    zeros = [name for name, t in runs.state.items() if t.is_floating_point() and t.numel() and not bool(t.any())]
    if zeros:
        left["zeros"] = (
            f"a write of zeros does not show, as these hold nothing else: {', '.join(zeros)}; fill them first"
        )
    note("unowned", target.has_unowned, "poison in unowned parts of the state", "unowned() is not given")
    numbers = _changing(v.cases)
    note("scalars", numbers, f"{', '.join(numbers)} changed after capture", "no number of make_inputs changes")
    if target.found:
        done["unnamed"] = f"buffers that were not named, and that refresh() writes to: {', '.join(target.found)}"
    what = f"{graphs.unwritten} results of torch.empty"
    if cuda:
        what = f"up to {graphs.pool_bytes >> 20} MiB of inactive blocks, and in {what}"
    why = "poison of inactive blocks needs CUDA, and the step calls no torch.empty" if not cuda else "no replay ran"
    note("memory pool", graphs.pool_bytes if cuda else graphs.unwritten, f"poison in {what}", why)
    note(
        "in flight",
        graphs.in_flight,
        f"{graphs.in_flight} replays queued on a late device",
        "needs CUDA: an op tape runs at once",
    )
    plain = isinstance(target.subject, PlainSubject)
    guarded = "guards around every buffer" if plain else "guards of the subject's canaries"
    note("canary", target.canaries is not None, guarded, "the buffers are not from a Canaries")
    asked = any(name.endswith(" reversed") for name in cases)
    why = "no result has a row for each of the inputs" if asked else "no permute= is given"
    note("permute", v.reversed, "rows in reverse order", why)
    if target.hidden:
        left["unnamed state"] = f"restored before each run, not compared: {', '.join(target.hidden)}; name it in state"
    if runs.standing:
        left["old results"] = f"the step returns memory of before it, not poisoned: {', '.join(sorted(runs.standing))}"
    if v.unrepeatable:
        left |= dict.fromkeys(done, "the step does not repeat, so that nothing can be compared")
        done.clear()
    return done, left


def _changing(cases: Mapping[str, Case]) -> list[str]:
    values: dict[str, set[object]] = {}
    for case in cases.values():
        for name, value in case.named.items():
            if isinstance(value, (int, float, bool, str)):
                values.setdefault(name, set()).add(value)
    return [name for name, seen in values.items() if len(seen) > 1]
