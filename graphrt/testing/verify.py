"""Verify a step that is captured as a graph: eagerly, padded and replayed it must give the same, whatever ran before.

    report = verify(step, make_inputs)              # step(**inputs) -> tensors; make_inputs(case) -> inputs
    report.raise_if_any()

`step` is any function of tensors, or an object with static buffers, host code that fills them, and a body that is
captured: see `graphrt.testing.verify_subject.Subject`. On CUDA the body is captured as a graph, on a CPU as an op
trace,
which freezes numbers and addresses in the same way. Nothing of graphrt's runtime takes part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphrt.capture.allocator import check_allocator
from graphrt.capture.garbage import older_objects_set_aside
from graphrt.kernels.checks import check_callable, check_instance, check_int, check_number
from graphrt.kernels.errors import ConfigError
from graphrt.testing.verify_checks import check_cases, check_dims, check_permute, check_tensors
from graphrt.testing.verify_context import Verification
from graphrt.testing.verify_coverage import coverage
from graphrt.testing.verify_eager import EagerChecks
from graphrt.testing.verify_graph import GraphChecks
from graphrt.testing.verify_report import VerifyReport
from graphrt.testing.verify_subject import (
    Inputs,
    Output,
    PlainSubject,
    Subject,
    Target,
    check_takes,
    copied_inputs,
    is_plain,
    name_of,
)  # fmt: skip


def verify(
    step: Callable[..., Output] | Subject,
    make_inputs: Callable[[int], Inputs],
    *,
    cases: int | Sequence[int] = 4,
    captures: Sequence[int] | None = None,
    eager: Callable[..., Output] | None = None,
    tolerance: float | None = None,
    pad: Mapping[str, float] | None = None,
    permute: Sequence[str] = (),
    dims: Mapping[str, Sequence[str]] | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> VerifyReport:
    """Run a step eagerly, padded and as a graph over several cases, and say what differs and why.

    step         a function of make_inputs' names, or a `Subject`
    make_inputs  maps the number of a case to its inputs. Tensors may be smaller in some cases than in others: a graph
                 is captured for the largest extents. Numbers that change from case to case are probed. Tensors,
                 arrays, dicts and lists are copied, so that they may be used again
    cases        how many, or which. Let lengths shrink, grow and stand on page boundaries
    captures     cases that a graph is captured at, each in turn; by default the first, the last and the middle one
    eager        the oracle, of the arguments of step, or of the inputs for a Subject; by default step itself on tensors
                 of exact size, or the subject's own `eager`
    tolerance    of padded against exact results: |a - b| <= tolerance * (1 + |b|); 0 is bit by bit. By default by
                 dtype. Replays are always compared with eager runs bit by bit
    pad          by name of an input of a plain step: what your code writes behind a smaller one. Left out, anything may
                 stand there
    permute      names of inputs whose first dimension is the rows: rows are also given in reverse order
    dims         by name of an output: names of its dimensions, for the report
    state        of a plain step: tensors by name that go on from step to step, such as a KV cache. Where pad rows may
                 write to a part of one, give a view of the rest. What an oracle does not take from them may not reach
                 the results: step and oracle also start from what another case left there

    The caller's buffers and state are as before afterwards. On CUDA, memory that torch's allocator holds unused is
    filled with poison, and with it results of other graphs that were not copied yet. Works in inference mode; not
    capture-safe.

    Raises: ConfigError for arguments that do not fit, for an oracle without results, and on CUDA where torch's
    allocator is not its native one. What is wrong with the step is in the report.
    """
    start = time.perf_counter()
    check_callable("make_inputs", make_inputs, advice="pass a function of the number of a case")
    if isinstance(cases, int):
        cases = range(check_int("cases", cases, 1, advice="4 is usual"))
    numbers = check_cases("cases", cases)
    if captures is not None:
        captures = check_cases("captures", captures)
    dims = check_dims({} if dims is None else dims)
    check_tensors("state", {} if state is None else state)
    if eager is not None:
        check_callable("eager", eager, advice="pass the oracle, or leave it out")
    if tolerance is not None:
        check_number("tolerance", tolerance, 0.0, advice="pass 0 for bit by bit, or leave it out")
    with torch.inference_mode(), older_objects_set_aside():
        inputs = {str(n): copied_inputs(make_inputs(n)) for n in numbers}
        permute = check_permute(permute, inputs[str(numbers[0])])
        if permute:
            inputs[f"{numbers[0]} reversed"] = _reversed(inputs[str(numbers[0])], permute)
        target = _target(step, list(inputs.values()), eager, {} if pad is None else pad, state or {})
        if target.device.type == "cuda":
            check_allocator()
        names = list(inputs) if captures is None else [str(n) for n in captures]
        if unknown := set(names) - set(inputs):
            raise ConfigError(f"captures: expected some of the cases {list(inputs)}, got {sorted(unknown)}; add them")
        if captures is None:
            names = list(dict.fromkeys((names[0], names[-1], names[len(names) // 2])))
        verification = Verification(target, inputs, dims, tolerance)
        eagerly, graphs = EagerChecks(verification), GraphChecks(verification)
        try:
            eagerly.prepare()
            eagerly.check(permute)
            if not verification.has_results:
                raise ConfigError(
                    "step: expected results, or buffers or state that it changes, got none; return what it computes"
                )
            for name in names:
                if not verification.unrepeatable:
                    graphs.check(name)
        finally:
            verification.restore()
            graphs.close()
    checked, not_checked = coverage(verification, graphs, names)
    seconds, runs = time.perf_counter() - start, verification.runs
    return VerifyReport(
        name_of(target.subject), tuple(verification.findings), checked, not_checked, runs.eager_runs, runs.replays,
        seconds, seconds - graphs.seconds,
    )  # fmt: skip


def _target(
    step: Callable[..., Output] | Subject,
    cases: Sequence[Inputs],
    eager: Callable[..., Output] | None,
    pad: Mapping[str, float],
    state: Mapping[str, torch.Tensor],
) -> Target:
    if is_plain(step):
        for values in cases:
            check_takes(step, values)  # type: ignore[arg-type]
        step = PlainSubject(step, cases, pad, state)  # type: ignore[arg-type]
    elif check_instance("pad", pad, Mapping, advice="pass a dict of input names"):
        raise ConfigError("pad: expected none beside a Subject, got some; refresh() writes what its buffers hold")
    elif state:
        raise ConfigError("state: expected none beside a Subject, got some; let it have an attribute state")
    return Target(step, eager)


def _reversed(inputs: Inputs, names: Sequence[str]) -> dict[str, Any]:
    return {name: value.flip(0) if name in names else value for name, value in inputs.items()}
