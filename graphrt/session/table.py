"""The requests of a session by request index: their lengths, their sampling values, and which requests continue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphrt.batch import Int32Array
from graphrt.batch_values import Values, copied_values, singular
from graphrt.engine.batch_delta import BatchDelta, ChangeFlag, StopConditions
from graphrt.kernels.metadata.buffers import STOP_TOKENS
from graphrt.kernels.types import NO_TOKEN
from graphrt.sampling_params import SamplingParams
from graphrt.session.requests import Ids, SessionRequest

_OF_PARAMS = (
    "temperatures", "seeds", "top_ks", "top_ps", "min_ps", "repetition_penalties", "presence_penalties",
    "frequency_penalties",
)  # fmt: skip
"""Fields of a Batch that SamplingParams has under their singular name."""


class SamplingValues:
    """One array per sampling value of a `Batch`, by field name, with an entry per request index."""

    def __init__(self, num_indices: int) -> None:
        names = (*_OF_PARAMS, "prompt_lens", "token_masks", "logprobs", "logprob_tokens")
        self.arrays: dict[str, Values] = {name: copied_values(name, None, num_indices).copy() for name in names}
        self._plain = {name: copied_values(name, None, 1)[0] for name in names}
        self._used: dict[str, Values] = {}

    def set(self, at: int, params: SamplingParams, prompt_len: int) -> None:
        """Set the values of a request that starts at this index."""
        for name in _OF_PARAMS:
            self.put(name, at, getattr(params, singular(name)))
        self.put("prompt_lens", at, prompt_len if params.penalized else 0)
        self.put("token_masks", at, -1)
        self.ask_logprobs(at, params.logprobs)

    def put(self, name: str, at: int, value: float) -> None:
        self.arrays[name][at] = value
        if value != self._plain[name]:
            self._used[name] = self.arrays[name]

    def ask_logprobs(self, at: int, count: int | None, token: int = -1) -> None:
        """Request log-probabilities of the next sampled token, or of a given token; None requests no
        log-probabilities."""
        self.put("logprobs", at, -1 if count is None else count)
        self.put("logprob_tokens", at, token)

    def ask_of_prompt(self, at: int, params: SamplingParams, left: Values, of_prompt: int) -> None:
        """Request log-probabilities of the next prompt token, `left[0]`, if the request has `prompt_logprobs`.

        `left` contains the tokens after this step. The first `of_prompt` of them belong to the prompt.
        """
        if params.prompt_logprobs is None:
            return
        if not len(left):
            self.ask_logprobs(at, params.logprobs)
        elif of_prompt > 0:
            self.ask_logprobs(at, params.prompt_logprobs, int(left[0]))
        else:
            self.ask_logprobs(at, None)

    def copy(self, source: int, target: int) -> None:
        for values in self._used.values():
            values[target] = values[source]

    def of(self, places: Values) -> dict[str, Values]:
        """Return the values of some indices as arguments of a Batch. Values that no request has used are left out."""
        return {name: values[places] for name, values in self._used.items()}


class RequestTable:
    """The host's copy of the state of a session's requests.

    Lengths are KV tokens, by request index. The last sampled token is not in the cache yet, so a request with a prompt
    of 3 tokens and max_new_tokens=30 has the limit 3 + 30 - 1. An example, with pages for all tokens:

                        reached   most   ahead   quiet   limits
            run(1)            0      3       0       0       32    the prompt is in flight
            collect           3      3       0       0       32
            run(8)            3     11       0      21       32    32 - 11 steps need no page list
            run(8)            3     11       8      13       32    a quiet launch: at most 11 + 8 tokens now
            collect          19     11       8      13       32    both launches have finished
            run(8)           19     11      16       5       32    quiet
            run(8)           19     32       0       0       32    8 > 5: `most` is updated first

    requests        by request index, including finished requests
    detached        preempted requests that still receive the tokens of launches in flight
    prefills        by request index, the number of known tokens already submitted, for requests with tokens left
    known           by request index, the tokens that were known when the request started
    held            request indices whose prefill is paused
    order           request indices of the requests that decode, in the order of the batch. Launches keep a reference,
                    so it is replaced, never changed
    order_requests  the requests of `order`
    reached         length after the launches that were collected
    most            longest possible length after all launches; `collect` lowers it if a request finished early, or if
                    drafts were rejected. With drafts it may exceed the limit
    ahead           tokens of the requests in `order` that `most` does not include yet
    quiet           steps that can be launched before a request of `order` reaches its limit or the end of its pages
    least           lowest possible length after all launches: `most`, or with drafts `reached`
    limits          length at which a request finishes
    asking          request indices that need log-probabilities
    many_stops      request indices with more stop tokens than the device knows
    flag            tells whether a change of this table is incomplete
    """

    def __init__(self, num_indices: int, *, has_drafts: bool = False) -> None:
        self.requests: dict[int, SessionRequest] = {}
        self.detached = set[SessionRequest]()
        self.prefills: dict[int, int] = {}
        self.known: dict[int, Int32Array] = {}
        self.held = set[int]()
        self.flag = ChangeFlag()
        self.order: Ids = np.empty(0, np.int64)
        self.order_requests: tuple[SessionRequest, ...] = ()
        self.no_delta = BatchDelta(self.order, flag=self.flag)
        self.many_stops, self.asking = set[int](), set[int]()
        self.quiet = self.ahead = 0
        self.reached, self.most, self.limits = (np.zeros(num_indices, np.int64) for _ in range(3))
        self.least = self.reached if has_drafts else self.most
        self.sampling = SamplingValues(num_indices)
        self._stops = np.full((STOP_TOKENS, num_indices), NO_TOKEN, np.int32)

    @property
    def running(self) -> bool:
        """True if a collected request has not finished, or a prefill has tokens left."""
        return bool(self.prefills) or bool(len(self.order))

    def begin(self, request: SessionRequest, known: Int32Array, start: int) -> None:
        """Add a request with known tokens. The KV cache already contains the first `start` tokens."""
        at, params = request.req_index, request.params
        self.requests[at] = request
        self.reached[at] = self.most[at] = start
        self.known[at] = known
        self.limits[at] = len(request.prompt) + params.max_new_tokens - 1
        self.sampling.set(at, params, len(request.prompt))
        if params.logprobs is not None:
            self.asking.add(at)
        if len(params.stop_ids) > STOP_TOKENS:
            self.many_stops.add(at)
        stops = sorted(params.stop_ids)[:STOP_TOKENS]
        self._stops[:, at] = NO_TOKEN
        self._stops[: len(stops), at] = stops
        self.prefills[at] = start

    def fork(self, request: SessionRequest, fork: SessionRequest, seed: int) -> None:
        """Add a request that continues from the state of `request`, but with a different seed."""
        at, to = request.req_index, fork.req_index
        self.requests[to] = fork
        for indices in (self.asking, self.many_stops):
            if at in indices:
                indices.add(to)
        for values in (self.reached, self.most, self.limits):
            values[to] = values[at]
        self.sampling.copy(at, to)
        self.sampling.put("seeds", to, seed)
        self._stops[:, to] = self._stops[:, at]
        if at in self.order:
            self.reorder(np.append(self.order, to))

    def remove(self, request: SessionRequest) -> None:
        """Remove a request. Its index can be reused."""
        at = request.req_index
        for indices in (self.asking, self.many_stops, self.held):
            indices.discard(at)
        self.known.pop(at, None)
        self.prefills.pop(at, None)
        self.remove_from_order([at])
        del self.requests[at]

    def detach(self, request: SessionRequest) -> None:
        """Let a removed request receive the tokens of launches in flight."""
        if not request.finish_reason:
            self.detached.add(request)

    def reorder(self, order: Ids) -> None:
        """Set the requests that decode."""
        self.catch_up()
        order.flags.writeable = False  # launches expose it to callers
        self.order, self.order_requests = order, tuple(map(self.requests.__getitem__, order.tolist()))
        self.no_delta, self.quiet = BatchDelta(order, logprobs=bool(self.asking), flag=self.flag), 0

    def remove_from_order(self, indices: Sequence[int]) -> None:
        """Remove requests from the requests that decode."""
        kept = self.order[~np.isin(self.order, indices)]
        if len(kept) < len(self.order):
            self.reorder(kept)

    def catch_up(self) -> None:
        """Update `most`."""
        self.most[self.order] += self.ahead
        self.ahead = 0

    def length(self, req_index: int) -> int:
        """Return the longest possible length of a request after all launches."""
        self.catch_up()
        return int(self.most[req_index])

    def tokens_left(self, ids: Ids) -> Ids:
        """Return the number of tokens until each request reaches its limit; with drafts, a lower bound."""
        self.catch_up()
        tokens: Ids = np.maximum(self.limits[ids] - self.most[ids], 0)
        return tokens

    def is_live(self, request: SessionRequest) -> bool:
        """Return True if launches in flight may add tokens to a request, that is, if it is neither released nor
        finished."""
        in_table = self.requests.get(request.req_index) is request or request in self.detached
        return in_table and not request.finish_reason

    def finish(self, requests: Sequence[SessionRequest]) -> None:
        """Stop requests that have finished. They remain in `requests` until they are released."""
        for request in requests:
            self.detached.discard(request)
            self.prefills.pop(request.req_index, None)
        self.remove_from_order([request.req_index for request in requests])

    def stop_conditions(self, ids: Ids) -> StopConditions:
        """Return the conditions that the device checks."""
        return StopConditions(self.limits[ids].astype(np.int32), self._stops[:, ids], self.flag)
