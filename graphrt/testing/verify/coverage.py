"""List what `verify` checked, and what it could not check and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from graphrt.testing.verify.graph import GraphChecks
from graphrt.testing.verify.host import same
from graphrt.testing.verify.locations import unreached
from graphrt.testing.verify.runs import Case
from graphrt.testing.verify.subject import PlainSubject
from graphrt.testing.verify.verification import Verification

_MOST_NAMED = 6


Row = tuple[str, object, str, str]
"""A check's name, whether it ran, what it did, and why it did not run or what it could not detect."""


def coverage(v: Verification, graphs: GraphChecks, captures: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return `VerifyReport.checked` and `VerifyReport.not_checked`."""
    rows = [*_of_graphs(v, graphs, captures), *_of_oracle(v), *_of_buffers(v), *_of_state(v)]
    done = {name: what for name, ran, what, _ in rows if ran}
    left = {name: why_not for name, ran, _, why_not in rows if not ran and why_not}
    if v.unrepeatable:
        return {}, left | dict.fromkeys(done, "the step is not deterministic, so nothing can be compared")
    return done, left


def _of_graphs(v: Verification, graphs: GraphChecks, captures: Sequence[str]) -> Iterator[Row]:
    target, cases = v.target, list(v.cases)
    cuda = target.device.type == "cuda"
    kind = "the subject's own capture" if target.capture is not None else "a CUDA graph" if cuda else "an op trace"
    what = f"{kind}, captured at {', '.join(captures)}; cases {', '.join(cases)}, the captured one last"
    yield "graph", cases, what, "no case ran"
    what = f"{', '.join(v.changing)} changed after capture"
    yield "scalars", v.changing, what, "no Python number of the inputs differs between cases"
    what = f"{graphs.unwritten} results of torch.empty"
    if cuda:
        what = f"up to {graphs.pool_bytes >> 20} MiB of inactive blocks, and in {what}"
    why_not = "poison in inactive blocks needs CUDA, and the step does not call torch.empty"
    why_not = "no replay ran" if cuda else why_not
    yield "memory pool", graphs.pool_bytes if cuda else graphs.unwritten, f"poison in {what}", why_not
    what = f"{graphs.in_flight} replays queued on stalled streams"
    yield "in flight", graphs.in_flight, what, "needs CUDA, because an op trace runs synchronously"
    if same_in_all := _unvaried(v.cases):
        text = f"equal in every case, so no result shows whether a graph froze them: {same_in_all}"
        yield "inputs", False, "", text
    if left := unreached(*target.root):
        text = f"too many or too deep to search, or tensors without their own memory: {_some(left)}"
        yield "host values", False, "", text
    if v.runs.old:
        names = ", ".join(sorted(v.runs.old))
        yield "old results", False, "", f"the step returns memory that existed before, which is not poisoned: {names}"


def _of_oracle(v: Verification) -> Iterator[Row]:
    """Report on the oracle, which counts as run in a case if it returned any element."""
    exact = {
        name: found
        for name, found in v.exact.items()
        if name in v.reference and any(tensor.numel() for tensor in found.outputs.values())
    }
    why_not = "the oracle gave no results" if v.target.has_oracle else "there is no eager oracle"
    yield "padding", exact, f"padded against exact results of {len(exact)} cases", why_not
    given = {name for case in exact for name in exact[case].outputs}
    if unknown := sorted({name for case in exact for name in v.reference[case][1].outputs} - given):
        yield (
            "outputs",
            False,
            "",
            f"the oracle does not return {', '.join(unknown)}: only replays are compared for these",
        )
    if fewer := {output: text for case in exact for output, text in _fewer_rows(v, case).items()}:
        yield "oracle", False, "", f"it returns {_some(list(fewer.values()))}: the other rows are not compared with it"


def _fewer_rows(v: Verification, name: str) -> dict[str, str]:
    """Describe the outputs for which the oracle returns fewer rows than the inputs and the step have."""
    case, found = v.cases[name], {}
    rows = min((len(t) for t in case.named.values() if isinstance(t, torch.Tensor) and t.dim()), default=0)
    for output, exact in v.exact[name].outputs.items():
        padded = v.reference[name][1].outputs.get(output)
        if padded is None or not padded.dim() or not exact.dim() or output in case.real:
            continue
        if len(exact) < rows <= len(padded):
            found[output] = f"{len(exact)} of {rows} rows of {output} in case {name}"
    return found


def _of_buffers(v: Verification) -> Iterator[Row]:
    target, runs = v.target, v.runs
    poisoned = sorted(runs.rewritten | target.derived)
    what = f"poison in {', '.join(poisoned)} before refresh()"
    yield "history", poisoned, what, "refresh() does not write to any buffer in every case"
    if kept := sorted(set(target.buffers) - runs.rewritten - target.derived):
        text = f"refresh() does not write to these in every case, so they keep their values: {', '.join(kept)}"
        yield "poison", False, "", text
    tails = [n for n in sorted(runs.rewritten) if any(not bool(w[n].all()) for w in v.written.values() if n in w)]
    what = f"parts that refresh() does not write: {', '.join(tails)}"
    yield "tails", tails, what, "refresh() writes all of each buffer"
    what = f"buffers that refresh() writes and that are not named: {', '.join(target.found)}"
    yield "unnamed", target.found, what, ""
    what = "guards around every buffer" if isinstance(target.subject, PlainSubject) else "guards of the canaries"
    yield "canary", target.canaries is not None, what, "the buffers were not allocated from a Canaries"


def _of_state(v: Verification) -> Iterator[Row]:
    target, runs = v.target, v.runs
    yield "state", target.state, f"{', '.join(target.state)} after each run", "no state is named"
    floats = {name: t for name, t in runs.state.items() if t.is_floating_point() and t.numel()}
    # any() is not implemented for fp8 on CUDA
    zeros = [name for name, t in floats.items() if not bool((t.view(torch.uint8) if t.itemsize == 1 else t).any())]
    if zeros:
        text = f"a write of zeros to these is invisible, as they are all zero: {', '.join(zeros)}; fill them first"
        yield "zeros", False, "", text
    yield "unowned", target.has_unowned, "poison in unowned parts of the state", "there is no unowned()"
    if target.hidden:
        names = ", ".join(target.hidden)
        text = f"restored before each run, except in a walk through all cases, and not compared: {names}"
        yield "unnamed state", False, "", f"{text}; name it in state"


def _unvaried(cases: Mapping[str, Case]) -> str:
    """Return the inputs that are equal in all cases, if there are several."""
    first, *others = (case.named for case in cases.values()) if len(cases) > 1 else ({},)
    return ", ".join(
        name for name in first if all(name in other and same(first[name], other[name]) for other in others)
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
