"""The launches of a session that are not collected yet, and the update of its requests from their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat, starmap
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt.batch import Int32Array
from graphrt.engine.handle import Launch, RequestFault, StepFaultError, StepLogprobs
from graphrt.engine.stats import Stats
from graphrt.kernels.errors import ReplayError
from graphrt.kernels.metadata.buffers import STOP_TOKENS
from graphrt.kernels.types import FinishReason
from graphrt.session.requests import NO_INDEX, Ids, SessionRequest, split_logprobs
from graphrt.session.table import RequestTable


@dataclass(slots=True)
class PendingLaunch:
    """A launch that is not collected yet.

    requests  the request of each column
    promised  tokens by which the launch raised `most` of each request: one number, or [columns]. With drafts, a step
              may yield fewer
    known     [columns], how many of these tokens do not depend on whether a token was sampled; None: none
    forks     requests that were forked while the launch was in flight, with the column that they share
    early     [columns], number of tokens that each request has already received; empty: none
    """

    launch: Launch
    requests: tuple[SessionRequest, ...]
    ids: Ids
    promised: int | Ids
    known: Ids | None = None
    forks: tuple[tuple[int, SessionRequest], ...] = ()
    early: Sequence[int] = ()


def atomically(*calls: Iterable[Any]) -> None:
    """Run iterators over calls of C functions, such as `map(list.extend, lists, values)`.

    The whole run is one call instruction, and Python handles signals and switches threads only between instructions.
    """
    deque(chain.from_iterable(calls), maxlen=0)


class Launches:
    """Launches in flight, in order of submission.

    An interrupted collect can be repeated, because the tokens of a launch are appended, and the launch is removed, in
    one step that no signal can split. With `must_advance`, an unfinished request without a token is an error.
    """

    def __init__(self, table: RequestTable, stats: Stats) -> None:
        self.pending: deque[PendingLaunch] = deque()
        self.must_advance = False
        self._table, self._stats = table, stats
        self._collected: dict[SessionRequest, list[int]] = {}  # the result of the next collect()

    def join(self, fork: SessionRequest, request: SessionRequest) -> None:
        """Let a fork receive the tokens of its request from launches in flight."""
        for pending in self.pending:
            columns = [*enumerate(pending.requests), *pending.forks]
            pending.forks += tuple((column, fork) for column, other in columns if other is request)

    def contain(self, request: SessionRequest) -> bool:
        return any(request in pending.requests for pending in self.pending)

    def wait(self) -> None:
        for pending in self.pending:
            pending.launch.wait()

    def collect(self, wait: bool) -> list[tuple[SessionRequest, list[int]]]:
        """Return each request with new tokens, and these tokens. With `wait`, wait for all launches first.

        Raises: StepFaultError: if requests are faulty. The next call returns the tokens.
        """
        faults: list[tuple[int, RequestFault]] = []
        while self.pending and (wait or self.pending[0].launch.done()):
            faults += self._take(self._finished(wait))
        if faults:
            raise StepFaultError(faults[0][0], [fault for _, fault in faults])
        if self.pending and self.pending[0].launch.steps > 1:
            self._take_arrived(self.pending[0])
        found = [(request, new) for request, new in self._collected.items() if new]
        self._collected = {}
        return found

    def _finished(self, wait: bool) -> list[PendingLaunch]:
        """Return the first launch, which has finished, and the finished launches after it with the same requests and
        size. They are collected together."""
        first = self.pending[0]
        taken, requests = [first], first.requests
        for pending in islice(self.pending, 1, None):
            alike = pending.requests is requests and pending.launch.descriptor == first.launch.descriptor
            if not alike or pending.forks or first.forks or not (wait or pending.launch.done()):
                break
            taken.append(pending)
        return taken

    def _take(self, taken: list[PendingLaunch]) -> list[tuple[int, RequestFault]]:
        """Update requests from the first launches, which have the same requests. Return the faults of live requests."""
        first, table = taken[0], self._table
        tokens = np.concatenate([pending.launch.tokens(raise_on_fault=False) for pending in taken])
        ends = np.concatenate([pending.launch.ends() for pending in taken]).max(0, initial=0)
        sampled = tokens >= 0
        advanced = sampled.sum(0)
        if first.known is not None:
            wrote = advanced.astype(np.bool_) | (ends != int(FinishReason.FAULT))
            advanced = np.where(first.known > 0, first.known * wrote, advanced)
        lost = sum(pending.promised for pending in taken) - advanced
        requests, ids, columns = first.requests, first.ids, None
        if requests is not table.order_requests:
            columns, requests, ids = self._live(first)
            tokens, sampled, ends, advanced, lost = (v[..., columns] for v in (tokens, sampled, ends, advanced, lost))
        new = tokens.T.tolist()
        for place in (~sampled.all(0)).nonzero()[0].tolist():
            new[place] = [token for token in new[place] if token >= 0]
        if first.early:
            early = first.early if columns is None else [first.early[column] for column in columns.tolist()]
            new = [got[count:] for got, count in zip(new, early, strict=True)]
        kept = sampled
        if table.many_stops or table.detached:
            kept = _stop_on_host(requests, new, ends, sampled)
        add_logprobs: Iterable[Any] = ()
        if first.launch.logprobs() is not None:
            joined = StepLogprobs.joined([pending.launch.logprobs() for pending in taken], columns)
            split = [split_logprobs(joined, at, sampled[:, at], len(new[at])) for at in range(len(requests))]
            targets = [target for request in requests for target in (request.logprobs, request.prompt_logprobs)]
            add_logprobs = map(list.extend, targets, [values for pair in split for values in pair])
        faults = self._faults(taken, requests, ends, columns)
        finished = [requests[place] for place in ends.nonzero()[0].tolist()]
        reasons = list(map(FinishReason, ends[ends > 0].tolist()))
        table.flag.changing = True
        atomically(
            map(list.extend, [request.tokens for request in requests], new),
            add_logprobs,
            map(setattr, finished, repeat("finish_reason"), reasons),
            self._add(requests, new),
            starmap(self.pending.popleft, repeat((), len(taken))),
        )
        if first.launch.positions > 1:
            self._count_drafts(taken, requests, kept, columns)
        if columns is not None and (detached := ids == NO_INDEX).any():
            ids, advanced, lost = ids[~detached], advanced[~detached], lost[~detached]
        table.reached[ids] += advanced
        if lost.any():
            table.most[ids] -= lost
        if finished:
            table.finish(finished)
        table.flag.changing = False
        if self.must_advance and not faults:
            self._check_advanced(taken)
        return faults

    def _count_drafts(
        self,
        taken: Sequence[PendingLaunch],
        requests: Sequence[SessionRequest],
        kept: npt.NDArray[np.bool_],
        columns: Ids | None,
    ) -> None:
        """Count the drafts of each request, and the tokens that it got in each step that could verify drafts."""
        first, positions = taken[0], taken[0].launch.positions
        counts = kept.reshape(len(kept) // positions, positions, len(requests)).sum(1)
        if first.known is not None:
            verifies = (first.known == 0) & (first.promised > 1)
            counts *= verifies if columns is None else verifies[columns]
        elif first.launch.descriptor.query_len == 1:
            return
        drafts = np.concatenate([pending.launch.draft_counts() for pending in taken])
        drafts = (drafts if columns is None else drafts[:, columns]) * (counts > 0)
        totals = [each.sum(0).tolist() for each in (counts > 0, drafts, counts)]
        for request, steps, verified, tokens in zip(requests, *totals, strict=True):
            request.verify_steps += steps
            request.num_draft_tokens += verified
            request.num_accepted_tokens += tokens - steps
        if columns is not None:  # a fork shares the column of its request
            own = np.unique(columns, return_index=True)[1]
            counts, drafts = counts[:, own], drafts[:, own]
        self._stats.tokens_per_step.update(counts[counts > 0].tolist())
        self._stats.num_draft_tokens += int(drafts.sum())

    def _add(self, requests: Sequence[SessionRequest], new: list[list[int]]) -> Iterable[Any]:
        """Return the calls that add tokens to the result of the next collect()."""
        if not self._collected:
            return map(self._collected.update, (zip(requests, new, strict=True),))
        return map(list.extend, [self._collected.setdefault(request, []) for request in requests], new)

    def _take_arrived(self, pending: PendingLaunch) -> None:
        """Take the tokens that have arrived from a running launch, except tokens that finish a request."""
        tokens, ends = pending.launch.arrived()
        by_step = tokens.reshape(len(ends), pending.launch.positions, tokens.shape[1]) >= 0
        running = by_step[:, 0] & (ends == int(FinishReason.RUNNING))
        counts = (running.cumprod(0) * by_step.sum(1)).sum(0).tolist()
        arrived = [[token for token in column if token >= 0] for column in tokens.T.tolist()]
        before = pending.early or [0] * len(counts)
        columns, requests, _ = self._live(pending)
        new: list[list[int]] = []
        for column, request in zip(columns.tolist(), requests, strict=True):
            if len(request.params.stop_ids) > STOP_TOKENS or request.params.logprobs is not None:
                counts[column] = 0  # the device knows only the first stop tokens
            new.append(arrived[column][before[column] : counts[column]])
        atomically(
            map(list.extend, [request.tokens for request in requests], new),
            self._add(requests, new),
            map(setattr, (pending,), ("early",), (counts,)),
        )

    def _live(self, pending: PendingLaunch) -> tuple[Ids, tuple[SessionRequest, ...], Ids]:
        """Return the requests of a launch, including forks, that were neither released nor finished since: their
        columns, the requests, and their request indices."""
        every = (*enumerate(pending.requests), *pending.forks)
        live = [(column, request) for column, request in every if self._table.is_live(request)]
        columns = np.array([column for column, _ in live], np.int64)
        return columns, tuple(request for _, request in live), np.array([r.req_index for _, r in live], np.int64)

    @staticmethod
    def _faults(
        taken: list[PendingLaunch], requests: Sequence[SessionRequest], ends: Int32Array, columns: Ids | None
    ) -> list[tuple[int, RequestFault]]:
        """Return the faults of requests, each with the number of its step. A fork shares its request's column."""
        faulty: dict[int, list[SessionRequest]] = {}
        # A request that the host finished at a stop token before the fault has another finish reason.
        for at in np.flatnonzero(ends == int(FinishReason.FAULT)).tolist():
            faulty.setdefault(at if columns is None else int(columns[at]), []).append(requests[at])
        return [
            (pending.launch.step, replace(fault, index=request.req_index, by_req_index=True))
            for pending in (taken if faulty else ())
            for fault in pending.launch.faults
            for request in faulty.get(fault.index, ())
        ]

    def _check_advanced(self, taken: list[PendingLaunch]) -> None:
        for pending in taken:
            if pending.known is not None:
                continue
            sampled = (pending.launch.tokens(raise_on_fault=False) >= 0).sum(0)
            for column in np.flatnonzero(sampled < np.minimum(pending.promised, pending.launch.steps)).tolist():
                if self._table.is_live(pending.requests[column]):
                    raise ReplayError(
                        f"request {pending.ids[column]}: launch {pending.launch.step} has {sampled[column]} tokens, "
                        "fewer than one per step; check the model's logits for NaN, and the sampler"
                    )


def _stop_on_host(
    requests: Sequence[SessionRequest],
    new: list[list[int]],
    ends: npt.NDArray[np.int32],
    sampled: npt.NDArray[np.bool_],
) -> npt.NDArray[np.bool_]:
    """Finish requests at stop tokens that the device does not know. Return `sampled` without the tokens after them."""
    kept: npt.NDArray[np.bool_] = sampled.copy()
    for place, request in enumerate(requests):
        for index, token in enumerate(new[place] if len(request.params.stop_ids) > STOP_TOKENS else ()):
            if token in request.params.stop_ids:
                new[place], ends[place] = new[place][: index + 1], int(FinishReason.STOP_TOKEN)
                kept[:, place] &= sampled[:, place].cumsum() <= index + 1
                break
    return kept
