"""Drafts of any quality, and what the device keeps of requests that verified them."""

from __future__ import annotations

import random

import torch

from graphrt.runtime import Runtime
from graphrt.session.session import DecodeSession, SessionRequest
from graphrt.step import Step
from tests.support.toy import MAX_LEN, VOCAB


class Table:
    """A proposer that looks drafts up by request index and position. -1 is a missing draft."""

    def __init__(self, most: int, device: torch.device) -> None:
        self.tokens = torch.full((4, MAX_LEN + most + 1), -1, dtype=torch.int32, device=device)
        self.ahead = torch.arange(1, most + 1, device=device)

    def __call__(self, step: Step) -> torch.Tensor:
        places = (step.sample_lens[:, None] + self.ahead).clamp_max(self.tokens.shape[1] - 1)
        return self.tokens[step.req_indices.long()[:, None], places]

    def fill(self, requests: list[SessionRequest], pick: random.Random, right: float) -> None:
        """Put in the tokens of finished requests, most of them wrong or missing if `right` is small."""
        self.tokens.fill_(-1)
        for request in requests:
            drafts = [*request.prompt.tolist(), *request.tokens]
            for at in range(len(drafts)):
                if pick.random() >= right:
                    drafts[at] = pick.choice([-1, (drafts[at] + 1) % VOCAB])
            self.tokens[request.req_index, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32)


def results(requests: list[SessionRequest]) -> list[object]:
    return [(r.tokens, r.finish_reason, [(p.token, p.rank) for p in r.logprobs]) for r in requests]


State = tuple[list[object], list[torch.Tensor]]


def state_of(runtime: Runtime, session: DecodeSession, requests: list[SessionRequest]) -> State:
    """What the device keeps of finished requests: lengths, last tokens and counts; and the keys and values."""
    b, cache, state, kv = runtime.manager.buffers, runtime.kv_cache, list[object](), list[torch.Tensor]()
    for request in requests:
        at = request.req_index
        length = int(b.req_seq_lens[at])
        slots = torch.arange(length)
        pages = torch.from_numpy(session.pages.pages(at)[0]).long()
        kv += [tensor[pages[slots // 4], slots % 4].cpu() for tensor in (*cache.k, *cache.v)]
        tokens = b.token_history[at, : length + 1].tolist()
        state.append((length, tokens, b.penalty_counts[at].tolist(), b.penalty_seen[at].tolist()))
    return state, kv
