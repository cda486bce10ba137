"""Batches for `verify_runtime`: steps of every captured size, ragged, and with drafts that are accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import numpy as np
import numpy.typing as npt
import torch

from graphrt.batch import Batch, Request
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.kernels.errors import ConfigError
from graphrt.replay import ReplayManager


def generated_batches(manager: ReplayManager, *, vocab_size: int, count: int, seed: int) -> list[Batch]:
    """Return ragged batches of all captured sizes in turn, with lengths before, at and after page boundaries.

    They shrink and grow, and list requests in any order. Kinds of graphs alternate, each with its largest size first.
    With `num_speculative_tokens`, one request has the maximum number of drafts, and others have fewer or none. Half of
    the requests are sampled at temperature 1.

    Raises:
        ConfigError: if the cache has no KV groups, or fewer pages than requests.
    """
    cache, config, rng = manager.kv_cache, manager.config, np.random.default_rng(seed)
    if not cache.groups:
        raise ConfigError("batches: cannot generate them for a cache without KV groups; pass your own batches")
    pages = [np.delete(np.arange(num_pages), null_page) for num_pages, null_page in cache.pools]
    sharing = Counter(group.pool for group in cache.groups)
    each = [len(pages[group.pool]) // (config.max_num_reqs * sharing[group.pool]) for group in cache.groups]
    if not all(each):
        raise ConfigError(
            f"cache: expected at least one page per request and KV group, got {min(map(len, pages))} pages for "
            f"{config.max_num_reqs} requests; add pages"
        )
    room = [n * group.page_tokens for n, group in zip(each, cache.groups, strict=True)]
    longest = min(config.max_seq_len, *(n for n, group in zip(room, cache.groups, strict=True) if not group.cross))
    encoded = min(
        [config.max_encoder_len or 0, *(n for n, group in zip(room, cache.groups, strict=True) if group.cross)]
    )
    edges = [n for group in cache.groups for n in range(group.page_tokens, longest, group.page_tokens)]
    near = [longest, *(edge + d for edge in edges for d in (-1, 0, 1))]
    sizes, batches = _in_turn(manager, rng, longest), list[Batch]()
    for number in range(count):
        new_tokens = _new_tokens(manager, *sizes[number % len(sizes)], rng, longest)
        owned, chosen = [rng.permutation(of_pool) for of_pool in pages], list[Request]()
        for req, new in zip(rng.permutation(config.max_num_reqs).tolist(), new_tokens, strict=False):
            length = int(rng.choice(near) if rng.random() < 0.5 else rng.integers(1, longest + 1))
            length, encoder_len = max(length, new), int(rng.integers(1, encoded + 1)) if encoded else 0
            lists, used = [], Counter[int]()
            for n, group in zip(each, cache.groups, strict=True):
                start = (used[group.pool] * config.max_num_reqs + req) * n
                used[group.pool] += 1
                held = group.pages_for(encoder_len if group.cross else length)
                lists.append(owned[group.pool][start : start + held])
            most = min(new - 1, config.num_speculative_tokens)
            drafts = int(rng.integers(0, most + 1)) if chosen else most
            tokens, sampling = (
                rng.integers(0, vocab_size, new).tolist(),
                (float(rng.random() < 0.5), int(rng.integers(99))),
            )
            chosen.append(Request(req, tokens, length, lists, 1 + drafts, *sampling, encoder_len=encoder_len))
        batches.append(Batch.from_requests(chosen))
    return batches


def _in_turn(manager: ReplayManager, rng: np.random.Generator, longest: int) -> list[tuple[BatchDescriptor, int]]:
    """Return the captured sizes that batches can run at, each with the next smaller size of its kind or 0."""
    config = manager.config
    kinds: dict[tuple[GraphKind, int], list[tuple[BatchDescriptor, int]]] = {}
    for size in reversed(manager.descriptors):
        if size.kind is GraphKind.DECODE or min(size.size, longest) > config.query_lens[-1]:
            of_kind = kinds.setdefault((size.kind, size.query_len), [])
            of_kind.append((size, of_kind[-1][0].size if of_kind else 0))
    orders = []
    for of_kind in kinds.values():
        orders.append([of_kind[-1], *(of_kind[at] for at in rng.permutation(len(of_kind) - 1).tolist())])
    found = [each for of_turn in zip_longest(*orders) for each in of_turn if each is not None]
    return found or [(BatchDescriptor.decode(config.max_num_reqs), 0)]


def _new_tokens(
    manager: ReplayManager, size: BatchDescriptor, smaller: int, rng: np.random.Generator, longest: int
) -> list[int]:
    """Return the new tokens of each request of a batch for a size, above the next smaller size."""
    config = manager.config
    amount = size.size if rng.random() < 0.5 else int(rng.integers(smaller + 1, size.size + 1))
    if size.kind is GraphKind.DECODE:
        most = min(size.query_len, longest)
        return [most, *rng.integers(1, most + 1, amount - 1).tolist()]
    # A batch runs in a mixed graph if a request has more new tokens than a decode graph has.
    least = config.query_lens[-1] + 1
    left, found = min(max(amount, least), config.max_num_reqs * longest), list[int]()
    num_reqs = int(rng.integers(-(-left // longest), min(config.max_num_reqs, left - least + 1) + 1))
    for others in reversed(range(num_reqs)):
        low = max(1 if found else least, left - others * longest)
        found.append(int(rng.integers(low, min(longest, left - others) + 1)))
        left -= found[-1]
    return found


def accept_drafts(
    run: Callable[[Batch], npt.NDArray[np.int32]],
    batches: Sequence[Batch],
    state: Mapping[str, torch.Tensor],
    *,
    seed: int,
) -> None:
    """Replace some drafts of the batches by the tokens that the model samples, so that steps accept these drafts.

    run    runs a batch, and returns its tokens [num_reqs, positions]: which token follows the accepted drafts
    state  tensors that are restored after each run
    """
    before, rng = {name: tensor.clone() for name, tensor in state.items()}, np.random.default_rng(seed)
    for batch in batches:
        wanted = rng.integers(0, batch.sample.clip(1))
        wanted[:1] = batch.sample[:1] - 1
        for position in range(int(wanted.max(initial=0))):
            sampled = run(batch)[:, position]
            for name, tensor in state.items():
                tensor.copy_(before[name])
            rows = (wanted > position) & (sampled >= 0)
            drafts = batch.query_lens.cumsum() - batch.sample + 1 + position
            batch.tokens[drafts[rows]] = sampled[rows]
