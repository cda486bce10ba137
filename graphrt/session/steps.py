"""Builds the launches of a session: steps that only continue, and steps with all inputs, which also compute prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphrt.batch import Batch, Int32Array
from graphrt.engine.handle import Launch
from graphrt.kernels.metadata.step_inputs import SEQ_LEN_FROM_DEVICE
from graphrt.kernels.types import DRAFT_FROM_DEVICE, TOKEN_FROM_DEVICE
from graphrt.replay import ReplayManager
from graphrt.session.launches import Launches, PendingLaunch
from graphrt.session.pages import SessionPages
from graphrt.session.table import RequestTable


class StepLauncher:
    """Launches the next steps of a session's requests.

    A launch sets the flag of the table. This class resets it once the launch is in `launches` and the table is updated.
    """

    def __init__(self, manager: ReplayManager, table: RequestTable, pages: SessionPages, launches: Launches) -> None:
        config = manager.config
        self._manager, self._table, self._pages, self._launches = manager, table, pages, launches
        self._budget = config.max_num_tokens
        self._chunk = config.max_num_tokens if config.mixed_batches else 1
        self._in_full = manager.plans_on_host is not None
        self._most_new = config.query_lens[-1]
        self._usual_new = self._most_new if manager.proposes else 1
        self.with_drafts = set[int]()  # requests for which the caller has set drafts, which the next step verifies

    def launch(self, steps: int, eager: bool) -> Launch | None:
        """Launch one step with all inputs, or up to `steps` steps of the requests that decode. Returns None if all
        requests are at their limits. Raises: CapacityError: if no request has a page for its next token."""
        with_drafts, self.with_drafts = self.with_drafts, set()
        if self._in_full or not self._table.prefills.keys() <= self._table.held:
            return self._full_step(eager, with_drafts)
        if with_drafts and self._usual_new == 1:
            return self._decode(1, eager, self._most_new)
        return self._decode(steps, eager, self._usual_new)

    def launch_quietly(self, steps: int, eager: bool) -> Launch:
        """Launch steps for which the device needs no new pages, and in which no request can reach its limit."""
        table, tokens = self._table, steps * self._usual_new
        launch = self._manager.advance(table.no_delta, steps=steps, eager=eager, query_len=self._usual_new)
        self._launches.pending.append(PendingLaunch(launch, table.order_requests, table.order, tokens))
        table.quiet -= steps
        table.ahead += tokens
        table.flag.changing = False
        return launch

    def _decode(self, steps: int, eager: bool, new: int) -> Launch | None:
        """Launch steps of the requests that decode, with up to `new` tokens per step."""
        table, tokens = self._table, steps * new
        if steps <= table.quiet and new == self._usual_new:
            return self.launch_quietly(steps, eager)
        table.catch_up()
        ids = table.order
        before, limits = table.most[ids], table.limits[ids]
        short = before < limits
        if not short.any():
            return None
        self._pages.free_passed(ids, table.reached[ids])
        self._pages.reserve(ids[short], before[short], limits[short], tokens)
        room = self._pages.room(ids)
        ends = np.minimum(limits, room)  # a request waits at the end of its pages
        # With drafts, `before` is a bound. The device may continue a request at the bound, or let it wait and ignore
        # its listed pages, which are then listed again.
        continuing = before < ends if self._most_new == 1 else np.ones(len(ids), np.bool_)
        listed = continuing if self._most_new == 1 else before < room
        lists, pages = self._pages.delta(ids, continuing)
        delta = replace(table.no_delta, lists=lists, pages=pages)
        after = np.minimum(before + steps, ends) if self._most_new == 1 else before + tokens
        launch = self._manager.advance(delta, steps=steps, eager=eager, query_len=new)
        self._launches.pending.append(PendingLaunch(launch, table.order_requests, ids, after - before))
        self._pages.submitted(ids[listed])
        table.most[ids] = after
        table.quiet = max(0, int((ends - after).min()) // self._usual_new)
        table.flag.changing = False
        return launch

    def _full_step(self, eager: bool, with_drafts: set[int]) -> Launch | None:
        """Launch one step with all inputs: the requests that decode, and prompts as far as tokens and pages allow.

        The host does not know how many drafts a request has, so it reserves tokens for the maximum number of drafts.
        """
        table = self._table
        table.catch_up()
        decoding = table.order[table.most[table.order] < table.limits[table.order]]
        if not len(decoding) and table.held.issuperset(table.prefills):
            return None
        self._pages.free_passed(decoding, table.reached[decoding])
        decoding = self._pages.with_pages(decoding, table.most[decoding] + 1)
        new = np.full(len(decoding), self._usual_new, np.int64)
        new[np.isin(decoding, list(with_drafts))] = self._most_new
        if self._most_new > 1:  # the device drops drafts without pages
            self._pages.with_pages(decoding, np.minimum(table.most[decoding] + new, table.limits[decoding]))
        chunks = self._chunks(self._budget - int(new.sum()))
        ids = np.concatenate((decoding, np.fromiter(chunks, np.int64, len(chunks))))
        if not len(ids):
            raise self._pages.none_left()
        known = np.array([0] * len(decoding) + [len(chunk) for chunk in chunks.values()], np.int64)
        whole = [table.prefills[at] + len(chunk) == len(table.known[at]) for at, chunk in chunks.items()]
        promised = np.concatenate((new, known[len(decoding) :]))
        places = np.full(int(new.sum()), DRAFT_FROM_DEVICE, np.int32)
        places[new.cumsum() - new] = TOKEN_FROM_DEVICE
        seq_lens = table.most[ids] + promised
        if not self._in_full:  # the device also knows which requests have finished
            seq_lens[: len(decoding)] = SEQ_LEN_FROM_DEVICE
        first_pages, page_indptr, page_ids = self._pages.listed(ids)
        batch = Batch(
            req_indices=ids.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            query_lens=promised.astype(np.int32),
            tokens=np.concatenate((places, *chunks.values())),
            page_indptr=page_indptr,
            page_ids=page_ids,
            first_pages=first_pages,
            sample=np.concatenate((new, whole)).astype(np.int32),
            **table.sampling.of(ids),
        )
        requests = tuple(map(table.requests.__getitem__, ids.tolist()))
        launch = self._manager.begin(batch, table.stop_conditions(ids), eager=eager)
        self._launches.pending.append(PendingLaunch(launch, requests, ids, promised, known))
        self._pages.submitted(ids)
        table.quiet = 0
        table.most[ids] += promised
        for at, chunk in chunks.items():
            table.prefills[at] += len(chunk)
        if done := [at for at, last in zip(chunks, whole, strict=True) if last]:
            for at in done:
                del table.prefills[at]
            table.reorder(np.append(table.order, done))
        table.flag.changing = False
        return launch

    def _chunks(self, budget: int) -> dict[int, Int32Array]:
        """Return the next tokens of prompts by request index, at most `budget`, with their pages allocated."""
        table, chunks = self._table, dict[int, Int32Array]()
        for at, start in table.prefills.items():
            if budget < 1:
                break
            if at in table.held:
                continue
            ids, tokens, request = np.array([at]), table.known[at], table.requests[at]
            self._pages.free_passed(ids, table.most[ids])
            longest = self._chunk if request.params.prompt_logprobs is None else 1
            count = self._pages.fitting(ids, start, min(budget, longest, len(tokens) - start))
            if not count:
                if self._pages.are_external:
                    continue  # the caller may have appended pages to a later request
                break  # later requests must not take the pages that this one needs
            table.sampling.ask_of_prompt(at, request.params, tokens[start + 1 :], len(request.prompt) - start - 1)
            chunks[at] = tokens[start : start + count]
            budget -= count
        return chunks
