"""Drafts of any quality, as chains and as trees, and what the device keeps of requests that verified them."""

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


class TreeTable:
    """A proposer that looks up trees of any shape by request index and position. Some drafts or parents are bad."""

    def __init__(self, most: int, device: torch.device) -> None:
        self.trees = torch.full((4, MAX_LEN + 2, 2, most), -1, dtype=torch.int32, device=device)

    def __call__(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, parents = self.trees[step.req_indices.long(), step.sample_lens.long()].unbind(1)
        return tokens.contiguous(), parents.contiguous()

    def fill(self, requests: list[SessionRequest], pick: random.Random, right: float) -> None:
        """Hide the tokens of finished requests in random trees, fewer of them if `right` is small."""
        self.trees.fill_(-1)
        for request in requests:
            known = [*request.prompt.tolist(), *request.tokens]
            for at in range(len(known) - 1):
                self.trees[request.req_index, at] = torch.tensor(tree(known[at:], self.trees.shape[3], pick, right))


def tree(
    known: list[int], most: int, pick: random.Random, right: float, bad: bool = True
) -> tuple[list[int], list[int]]:
    """Return drafts after known[0] and their parents, of which one path may be the known tokens."""
    tokens, parents, last, following = list[int](), list[int](), 0, 1
    for node in range(1, most + 1):
        extends = following < len(known) and pick.random() < right
        parent = last if extends else pick.randint(0, node - 1)
        wrong = pick.choice([-1, VOCAB]) if bad and pick.random() < 0.1 else pick.randrange(50)
        tokens.append(known[following] if extends else wrong)
        parents.append(pick.choice([-1, node]) if bad and pick.random() < 0.02 else parent)
        if extends and pick.random() < 0.9:  # else another draft may extend the path
            last, following = node, following + 1
    return tokens, parents


class ByHistory:
    """A proposer that finds its drafts by the tokens so far, so that they follow a request to other indices."""

    def __init__(
        self, known: list[list[int]], most: int, is_tree: bool, length: int, pick: random.Random, device: torch.device
    ) -> None:
        self.is_tree = is_tree
        self.known = torch.full((len(known), length), -1, dtype=torch.int32)
        self.trees = torch.full((len(known), length, 2, most), -1, dtype=torch.int32)
        for of, tokens in enumerate(known):
            self.known[of, : len(tokens)] = torch.tensor(tokens)
            for at in range(len(tokens) - 1):
                self.trees[of, at] = torch.tensor(tree(tokens[at:], most, pick, 0.8 if is_tree else 1.0))
        self.known, self.trees = self.known.to(device), self.trees.to(device)

    def __call__(self, step: Step) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        history = step.buffers.token_history[step.req_indices.long(), : self.known.shape[1]]
        later = torch.arange(history.shape[1], device=history.device) > step.sample_lens[:, None]
        same = (history[:, None] == self.known) | later[:, None]
        found = self.trees[same.all(2).int().argmax(1), step.sample_lens.long().clamp_max(self.known.shape[1] - 1)]
        tokens, parents = (part.contiguous() for part in found.unbind(1))
        return (tokens, parents) if self.is_tree else tokens


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
