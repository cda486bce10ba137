"""`verify`: run a step eagerly, padded and as a graph, and find where and why the results differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from graphrt.capture.allocator import check_allocator
from graphrt.kernels.checks import check_callable, check_instance, check_int, check_number, check_sequence
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.garbage import older_objects_set_aside
from graphrt.testing.verify.arguments import check_tensors
from graphrt.testing.verify.coverage import coverage
from graphrt.testing.verify.eager import EagerChecks
from graphrt.testing.verify.graph import GraphChecks
from graphrt.testing.verify.host import unchanged
from graphrt.testing.verify.report import VerifyReport
from graphrt.testing.verify.subject import (
    Inputs,
    Output,
    PlainSubject,
    Subject,
    Target,
    copied_inputs,
    is_plain,
    name_of,
)  # fmt: skip
from graphrt.testing.verify.verification import Verification


def verify(
    step: Callable[..., Output] | Subject,
    make_inputs: Callable[[int], Inputs],
    *,
    cases: int | Sequence[int] = 4,
    captures: Sequence[int] | None = None,
    eager: Callable[..., Output] | None = None,
    tolerance: float | None = None,
    pad: Mapping[str, float] | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> VerifyReport:
    """Run a step eagerly, padded and as a graph in several cases, and report which results differ and why.

    Args:
        step: a function that takes the inputs as keyword arguments, or a `Subject`.
        make_inputs: maps a case number to its inputs. A tensor may be smaller in some cases than in others, because the
            graph has buffers for the largest extents. Tensors, arrays, dicts and lists are copied and may be reused.
        cases: the number of cases, or a list of case numbers. Lengths should shrink, grow and fall on page boundaries.
        captures: cases at which to capture, one graph each. Default: the first, last and middle case.
        eager: the oracle. It takes the arguments of `step`, or the inputs of a `Subject`. Default: `step` itself on
            tensors of exact size, or the subject's `eager`.
        tolerance: allowed difference of padded from exact results, |a - b| <= tolerance * (1 + |b|). 0 compares bits.
            Default: by dtype. Replays are always compared with eager runs bit by bit.
        pad: for a plain function, the values by input name that your code writes after a smaller input. Other
            inputs keep arbitrary values there.
        state: for a plain function, tensors by name that persist between steps, such as a KV cache. If pad rows may
            write to part of a tensor, pass a view of the rest.

    Returns:
        The report. Faults of the step are findings, not exceptions.

    Raises:
        ConfigError: if an argument is invalid, the oracle or the step returns nothing, or torch's CUDA allocator is
            not the native one.

    The caller's tensors and Python values are restored before the function returns. On CUDA, unused memory of
    torch's allocator is filled with poison, including results of other graphs that have not been copied. Works in
    inference mode. Not capture-safe.
    """
    start = time.perf_counter()
    check_callable("make_inputs", make_inputs, advice="pass a function of the case number")
    if isinstance(cases, int):
        cases = range(check_int("cases", cases, 1, advice="4 is usual"))
    elif not check_sequence("cases", cases, of="case numbers", error=ConfigError):
        raise ConfigError("cases: the list is empty; specify at least one case")
    check_tensors("state", {} if state is None else state)
    if tolerance is not None:
        check_number("tolerance", tolerance, 0.0, advice="pass 0 to compare bits, or leave it out")
    with torch.inference_mode(), older_objects_set_aside():
        inputs = {str(n): copied_inputs(make_inputs(n)) for n in cases}
        target = _target(step, list(inputs.values()), eager, {} if pad is None else pad, state or {})
        if target.device.type == "cuda":
            check_allocator()
        names = [str(n) for n in captures or inputs]
        if unknown := set(names) - set(inputs):
            raise ConfigError(f"captures: {sorted(unknown)} are not among the cases {list(inputs)}; add them to cases")
        if not captures:
            names = list(dict.fromkeys((names[0], names[-1], names[len(names) // 2])))
        with unchanged(*target.root):
            verification = Verification(target, inputs, tolerance)
            eagerly, graphs = EagerChecks(verification), GraphChecks(verification)
            try:
                eagerly.prepare()
                eagerly.check()
                if not verification.has_results:
                    raise ConfigError("step: returns no tensor, and changes no buffer or state; return the results")
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
        step = PlainSubject(step, cases, pad, state)  # type: ignore[arg-type]
    elif check_instance("pad", pad, Mapping, advice="pass a dict by input name"):
        raise ConfigError("pad: only plain functions take it; let refresh() of the Subject write the pad values")
    elif state:
        raise ConfigError("state: only plain functions take it; give the Subject an attribute state")
    return Target(step, eager)
