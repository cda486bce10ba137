"""Queue replays on a stalled stream without waiting, as in a server whose host runs ahead of the device.

This exposes host memory that is overwritten before the device has read it, and copies on another stream for which the
launch does not wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt.testing.verify.blame import Captured
from graphrt.testing.verify.compare import differing, region
from graphrt.testing.verify.report import VerifyFinding
from graphrt.testing.verify.runs import SEED, Case, Contents, Outcome, one_seed
from graphrt.testing.verify.verification import Verification

_CYCLES = 40_000_000
"""About 20 ms, which is longer than the host takes to queue all replays."""
_MAIN, _SIDE = "the main stream is stalled", "the other streams are stalled"


class _StalledStreams(TorchDispatchMode):
    """Stall every stream other than the main one before refresh() runs its first op on it."""

    def __init__(self, main: torch.cuda.Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._main, self._stalled = main, set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        stream = torch.cuda.current_stream()
        if stream != self._main and stream.cuda_stream not in self._stalled:
            self._stalled.add(stream.cuda_stream)
            torch.cuda._sleep(_CYCLES)
        return func(*args, **(kwargs or {}))


def flight_findings(
    v: Verification, graph: Captured, order: Sequence[Case], known: Collection[str] = ()
) -> list[VerifyFinding]:
    """Queue every case without waiting, once with the main stream stalled and once with the side streams stalled.

    Cases in `known`, whose replays are already known to be wrong, are queued but not compared.
    """
    found = (_queue(v, graph, order, known, stalled) for stalled in (_MAIN, _SIDE))
    return [finding for finding in found if finding is not None]


def _queue(
    v: Verification, graph: Captured, order: Sequence[Case], known: Collection[str], stalled: str
) -> VerifyFinding | None:
    runs, target, device = v.runs, v.target, v.target.device
    torch.cuda.synchronize(device)
    results: list[tuple[dict[str, torch.Tensor], Contents]] = []
    if stalled == _MAIN:
        torch.cuda._sleep(_CYCLES)
    with one_seed(device):
        for case in order:
            runs.restore_state()
            if stalled == _MAIN:
                target.refresh(case.inputs)
            else:
                with _StalledStreams(torch.cuda.current_stream(device)):
                    target.refresh(case.inputs)
            contents = runs.contents()  # in stream order, as the graph reads them
            runs.replays += 1
            torch.manual_seed(SEED)  # as before every other run
            outputs = target.named(graph.launch())
            results.append(({name: t.clone() for name, t in outputs.items()}, contents))
    torch.cuda.synchronize(device)
    for case, (outputs, contents) in zip(order, results, strict=True):
        if case.name in known:
            continue
        clean, expected = v.reference[case.name]
        wrong = runs.difference(case, Outcome(outputs, expected.changes), expected)
        if wrong is None:
            continue
        blamed, because = [], []
        for name, mask in v.written[case.name].items():
            have, want = contents.get(name), clean.get(name)
            if have is None or want is None or have.shape != want.shape or not mask.any():
                continue
            other = differing(have, want) & mask
            if bool(other.any()):
                blamed.append(name)
                because.append(f"{region(name, other)} does not contain this case's values when the launch starts")
        advice = (
            "the host overwrites memory that the device has not read yet; use one buffer per launch in flight, each "
            "with an event"
            if stalled == _MAIN
            else "the launch does not wait for a copy on another stream; record an event there, and wait for it"
        )
        text = f"the replay differs when several launches are queued and {stalled}"
        return VerifyFinding(
            "in flight", case.name, graph.case.name, text, wrong, tuple(blamed), "; ".join([*because, advice])
        )
    return None
