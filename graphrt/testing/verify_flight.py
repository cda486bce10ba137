"""Replays that are queued behind each other on a device that is late, as in a server whose host runs ahead.

What the host overwrites too early, and what another stream copies without waiting, shows only then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt.testing.verify_blame import Captured
from graphrt.testing.verify_report import VerifyFinding, differing, region
from graphrt.testing.verify_runs import SEED, Case, Contents, Outcome, Runs, one_seed

_CYCLES = 40_000_000
"""About 20 ms: longer than the host takes to queue every replay."""


class _LateStreams(TorchDispatchMode):
    """Every other stream that refresh() launches on is late."""

    def __init__(self, main: torch.cuda.Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._main, self._late = main, set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        stream = torch.cuda.current_stream()
        if stream != self._main and stream.cuda_stream not in self._late:
            self._late.add(stream.cuda_stream)
            torch.cuda._sleep(_CYCLES)
        return func(*args, **(kwargs or {}))


def flight_findings(
    runs: Runs,
    graph: Captured,
    order: Sequence[Case],
    reference: Mapping[str, tuple[Contents, Outcome]],
    written: Mapping[str, Mapping[str, torch.Tensor]],
    known: Collection[str] = (),
) -> list[VerifyFinding]:
    """Queue every case without waiting, once on a late main stream and once with late side streams.

    known   names of cases whose replays are wrong by themselves: these are queued, and not judged again
    """
    found = []
    for late in ("the device is late", "other streams are late"):
        if finding := _queue(runs, graph, order, reference, written, known, late):
            found.append(finding)
    return found


def _queue(
    runs: Runs,
    graph: Captured,
    order: Sequence[Case],
    reference: Mapping[str, tuple[Contents, Outcome]],
    written: Mapping[str, Mapping[str, torch.Tensor]],
    known: Collection[str],
    late: str,
) -> VerifyFinding | None:
    device, target = runs.target.device, runs.target
    torch.cuda.synchronize(device)
    results: list[tuple[dict[str, torch.Tensor], Contents]] = []
    if late == "the device is late":
        torch.cuda._sleep(_CYCLES)
    with one_seed(device):
        for case in order:
            runs.restore_state()
            if late == "the device is late":
                target.refresh(case.inputs)
            else:
                with _LateStreams(torch.cuda.current_stream(device)):
                    target.refresh(case.inputs)
            contents = runs.contents()  # as the graph will find them, in the order of the stream
            runs.replays += 1
            torch.manual_seed(SEED)  # as before each other run
            outputs = target.named(graph.launch())
            results.append(({name: t.clone() for name, t in outputs.items()}, contents))
    torch.cuda.synchronize(device)
    for case, (outputs, contents) in zip(order, results, strict=True):
        if case.name in known:
            continue
        clean, expected = reference[case.name]
        wrong = runs.difference(case, Outcome(outputs, expected.changes), expected)
        if wrong is None:
            continue
        blamed, because = [], []
        for name, mask in written[case.name].items():
            have, want = contents.get(name), clean.get(name)
            if have is None or want is None or have.shape != want.shape or not mask.any():
                continue
            other = differing(have, want) & mask
            if bool(other.any()):
                blamed.append(name)
                because.append(f"{region(name, other)} does not hold this case's values when the launch begins")
        advice = (
            "host memory is overwritten before the device has read it: keep a slot per launch in flight, with an event"
            if late == "the device is late"
            else "a copy on another stream is not waited for: record an event there, and wait for it before the launch"
        )
        text = f"the replay differs when {late} and launches queue behind each other"
        return VerifyFinding(
            "in flight", case.name, graph.case.name, text, wrong, tuple(blamed), "; ".join([*because, advice])
        )
    return None
