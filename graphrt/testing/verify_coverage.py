"""What a verification looked at, and what it could not: so that silence is never a check that did not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from graphrt.testing.verify_context import Verification
from graphrt.testing.verify_graph import GraphChecks
from graphrt.testing.verify_runs import Case, Outcome
from graphrt.testing.verify_slots import unreached
from graphrt.testing.verify_subject import PlainSubject
from graphrt.testing.verify_values import same

_MOST_NAMED = 6


@dataclass
class _Notes:
    """Names of checks with what each did, and of those that did not run with the reason."""

    done: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, happened: object, what: str, unsupported_reasons: str) -> None:
        if happened:
            self.done[name] = what
        else:
            self.left[name] = unsupported_reasons


def coverage(v: Verification, graphs: GraphChecks, captures: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Names of checks with what each did, and names of those that did not run with the reason."""
    target, cases, notes = v.target, list(v.cases), _Notes()
    cuda = target.device.type == "cuda"
    by = "the subject's own capture" if target.capture is not None else "a CUDA graph" if cuda else "an op trace"
    what = f"{by}, captured at {', '.join(captures)}; cases {', '.join(cases)}, the captured one last"
    notes.note("graph", cases, what, "no case ran")
    _note_oracle(notes, v)
    _note_buffers(notes, v)
    _note_state(notes, v)
    numbers = [name for name in v.changing if name not in v.ignored]
    ignored = f"no result of any case depends on {', '.join(v.ignored)}"
    why = ignored if v.ignored else "no number of make_inputs changes"
    notes.note("scalars", numbers, f"{', '.join(numbers)} changed after capture", why)
    what = f"{graphs.unwritten} results of torch.empty"
    if cuda:
        what = f"up to {graphs.pool_bytes >> 20} MiB of inactive blocks, and in {what}"
    why = "poison of inactive blocks needs CUDA, and the step calls no torch.empty" if not cuda else "no replay ran"
    notes.note("memory pool", graphs.pool_bytes if cuda else graphs.unwritten, f"poison in {what}", why)
    what = f"{graphs.in_flight} replays queued on a late device"
    notes.note("in flight", graphs.in_flight, what, "needs CUDA: an op trace runs at once")
    asked = any(name.endswith(" reversed") for name in cases)
    why = "no result has a row for each of the inputs" if asked else "no permute= is given"
    notes.note("permute", v.reversed, "rows in reverse order", why)
    if v.ignored and numbers:
        notes.left["ignored scalars"] = ignored
    if same_in_all := _unvaried(v.cases):
        notes.left["inputs"] = f"the same in every case, so nothing shows whether a graph froze them: {same_in_all}"
    if v.kept.untried:
        names = _some(v.kept.untried)
        notes.left["earlier tensors"] = f"of those that a run may have made before, too many to take away: {names}"
    if left := unreached(*target.root):
        why = "too many or too deep to look at, or tensors without memory of their own"
        notes.left["host values"] = f"{why}: {_some(left)}"
    if v.runs.standing:
        names = ", ".join(sorted(v.runs.standing))
        notes.left["old results"] = f"the step returns memory of before it, not poisoned: {names}"
    if v.unrepeatable:
        notes.left |= dict.fromkeys(notes.done, "the step does not repeat, so that nothing can be compared")
        notes.done.clear()
    return notes.done, notes.left


def _note_oracle(notes: _Notes, v: Verification) -> None:
    exact = {name: found for name, found in v.exact.items() if name in v.reference and _compares(found)}
    why = "the oracle gave no results" if v.target.has_oracle else "no eager oracle is given"
    notes.note("padding", exact, f"padded against exact results of {len(exact)} cases", why)
    given = {name for case in exact for name in exact[case].outputs}
    if unknown := sorted({name for case in exact for name in v.reference[case][1].outputs} - given):
        notes.left["outputs"] = f"the oracle gives none of {', '.join(unknown)}: their replays alone are compared"
    if fewer := {output: text for case in exact for output, text in _fewer_rows(v, case).items()}:
        notes.left["oracle"] = f"it gives {_some(list(fewer.values()))}: the others are not compared with it"


def _compares(exact: Outcome) -> bool:
    """Whether an oracle gave any element."""
    return any(tensor.numel() for tensor in exact.outputs.values())


def _fewer_rows(v: Verification, name: str) -> dict[str, str]:
    """Outputs of which the oracle gives fewer rows than each input of a case has, where the step gives them all."""
    case, found = v.cases[name], {}
    rows = min((len(t) for t in case.named.values() if isinstance(t, torch.Tensor) and t.dim()), default=0)
    for output, exact in v.exact[name].outputs.items():
        padded = v.reference[name][1].outputs.get(output)
        given = padded is not None and padded.dim() and exact.dim() and output not in case.real
        if given and padded is not None and len(exact) < rows <= len(padded):
            found[output] = f"{len(exact)} of {rows} rows of {output} in case {name}"
    return found


def _note_buffers(notes: _Notes, v: Verification) -> None:
    target, runs = v.target, v.runs
    poisoned = sorted(runs.rewritten | target.derived)
    why = "refresh() writes to no buffer"
    notes.note("history", poisoned, f"poison in {', '.join(poisoned)} before refresh()", why)
    if kept := sorted(set(target.buffers) - runs.rewritten - target.derived):
        names = ", ".join(kept)
        notes.left["poison"] = f"refresh() does not write to these in every case, so they keep their values: {names}"
    tails = [n for n in sorted(runs.rewritten) if any(not bool(w[n].all()) for w in v.written.values() if n in w)]
    what = f"parts that refresh() does not write: {', '.join(tails)}"
    notes.note("tails", tails, what, "refresh() writes all of each buffer")
    if target.found:
        names = ", ".join(target.found)
        notes.done["unnamed"] = f"buffers that were not named, and that refresh() writes to: {names}"
    plain = isinstance(target.subject, PlainSubject)
    what = "guards around every buffer" if plain else "guards of the subject's canaries"
    notes.note("canary", target.canaries is not None, what, "the buffers are not from a Canaries")


def _note_state(notes: _Notes, v: Verification) -> None:
    target, runs = v.target, v.runs
    notes.note("state", target.state, f"{', '.join(target.state)} after each run", "no state is named")
    if target.state:
        what = f"{v.from_others} cases from what another one left, by step and oracle"
        notes.note("state goes on", v.from_others, what, "no case changes it, or no oracle gives results")
    zeros = [name for name, t in runs.state.items() if t.is_floating_point() and t.numel() and not bool(t.any())]
    if zeros:
        names = ", ".join(zeros)
        notes.left["zeros"] = f"a write of zeros does not show, as these hold nothing else: {names}; fill them first"
    what = "poison in unowned parts of the state"
    notes.note("unowned", target.has_unowned, what, "unowned() is not given")
    if target.hidden:
        names = ", ".join(target.hidden)
        notes.left["unnamed state"] = (
            f"restored before each run, but for a walk through all cases, and not compared: {names}; name it in state"
        )


def _unvaried(cases: Mapping[str, Case]) -> str:
    """Inputs that are alike in all of several cases."""
    first, *others = (case.named for case in cases.values()) if len(cases) > 1 else ({},)
    return ", ".join(
        name for name in first if all(name in other and same(first[name], other[name]) for other in others)
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
