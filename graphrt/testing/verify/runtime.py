"""Verify the graphs of a captured `ReplayManager` against its eager steps and against another backend.

    report = verify_runtime(manager)
    report = verify_runtime(manager, oracle=other)     # e.g. backend="torch_reference", with the same KVCache

It verifies the graphs that the manager captured. The KV cache and the state of its requests are restored afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from graphrt.batch import Batch, Request
from graphrt.cache.kv_cache import KVCache
from graphrt.engine.handle import StepHandle
from graphrt.engine.lifecycle import State, wrong_state
from graphrt.kernels.checks import check_instance, check_int, check_sequence
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.metadata.buffers import BufferKind
from graphrt.replay import ReplayManager
from graphrt.testing.verify.api import verify
from graphrt.testing.verify.report import VerifyReport

_COUNTERS = frozenset({"cursor", "step_counter", "last_writers", "write_conflicts", "loop_condition", "order"})
"""Persistent buffers that count launches and steps. The host also counts, so they are not restored between runs."""


class RuntimeSubject:
    """The `Subject` of a captured manager. An input is {"batch": Batch} with literal tokens.

    Attributes:
        faults: the fault of each request that the device rejected, by batch and index in the batch.
    """

    def __init__(self, manager: ReplayManager, model: object = None, oracle: ReplayManager | None = None) -> None:
        self.manager, self.oracle = manager, oracle
        # Do not search the manager, because its Python values count launches.
        self.host = (manager._program.model if model is None else model, "model")
        self.batch = Batch.empty()
        self.faults: dict[tuple[int, int], str] = {}
        self.derived = tuple(self.buffers)
        cache = manager.kv_cache
        self.state = {
            **{name: t for name, t in self._request_state(manager).items() if t.numel()},
            **{name: t for name, t in cache.named_tensors() if not name.endswith("scales")},
        }
        if oracle is not None:
            self.eager = self._by_oracle

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The derived buffers. Each step rewrites them from the packed step inputs, so they may contain poison."""
        return {name: t for name, t in self.manager.buffers.named(BufferKind.DERIVED) if t.numel()}

    @staticmethod
    def _request_state(manager: ReplayManager) -> dict[str, torch.Tensor]:
        kept = manager.buffers.named(BufferKind.PERSISTENT, BufferKind.CARRIED)
        return {name: tensor for name, tensor in kept if name not in _COUNTERS}

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        self.batch = inputs["batch"]

    def run(self) -> dict[str, torch.Tensor]:
        handle = self.manager.replay(self.batch, eager=True)
        results = _results(handle)
        self.faults |= {(id(self.batch), fault.index): str(fault) for fault in handle.faults}
        return results

    def capture(self, inputs: Mapping[str, Any]) -> Any:
        """Return the launch of a graph that the manager has already captured."""
        return lambda: _results(self.manager.replay(self.batch))

    def _by_oracle(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        assert self.oracle is not None, "eager is this method only with an oracle"
        theirs = self._request_state(self.oracle)
        for name, tensor in self._request_state(self.manager).items():
            if theirs[name].shape == tensor.shape:
                theirs[name].copy_(tensor)
        return {"logits": _results(self.oracle.replay(inputs["batch"], eager=True))["logits"]}

    def real(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part to compare, which is all pages except the null page, to which pad rows write."""
        device, masks = self.manager.kv_cache.device, []
        for num_pages, null_page in self.manager.kv_cache.pools:
            masks.append(torch.ones(num_pages, dtype=torch.bool, device=device))
            masks[-1][null_page] = False
        return {name: masks[pool] for name, pool in self._pools().items()}

    def unowned(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all pages that the batch does not list, except the null page; none if there are several pools."""
        cache = self.manager.kv_cache
        if len(cache.pools) != 1:
            return {}
        ((num_pages, null_page),) = cache.pools
        free = np.ones(num_pages, np.bool_)
        free[null_page] = free[inputs["batch"].page_ids] = False
        # Use indices, because a mask makes the host wait for the device once per tensor.
        return dict.fromkeys(self._pools(), torch.from_numpy(np.flatnonzero(free)).to(cache.device))

    def _pools(self) -> dict[str, int]:
        """Return the pool of each cache tensor."""
        cache = self.manager.kv_cache
        of = {t.data_ptr(): spec.pool for group, spec in enumerate(cache.groups) for t in _tensors(cache, group)}
        return {name: of[tensor.data_ptr()] for name, tensor in self.state.items() if tensor.data_ptr() in of}


def verify_runtime(
    manager: ReplayManager,
    batches: Sequence[Batch] | None = None,
    *,
    model: object = None,
    vocab_size: int | None = None,
    oracle: ReplayManager | None = None,
    count: int = 8,
    seed: int = 0,
    tolerance: float | None = None,
) -> VerifyReport:
    """Verify a captured manager over batches. See `graphrt.testing.verify.verify`.

    Args:
        manager: the manager. Call this function on its stream, with no step in flight.
        batches: steps that can run in any order, with literal tokens and full page lists. Default: generated batches,
            for which the cache is filled with random values.
        model: object to search for values that a graph may have frozen. Default: the manager's model.
        vocab_size: upper bound of generated tokens. Default: the manager's vocabulary size.
        oracle: a captured manager with the same model, config and KVCache, but with another backend and
            `use_graphs=False`. Its eager logits are the reference.
        count, seed: number and seed of generated batches.
        tolerance: tolerance of logits against those of the oracle.

    Returns:
        The report. Requests that the device rejected are listed in `not_checked`.

    Raises:
        ConfigError: if an argument is invalid, or the device rejects every request.
        CaptureError: if the manager or the oracle is not captured.

    Cache and request state are copied before each run, so use a manager with a small cache.
    """
    check_instance("manager", manager, ReplayManager, advice="of a Runtime, pass runtime.manager")
    if oracle is not None:
        check_instance("oracle", oracle, ReplayManager, advice="pass a captured manager, or leave it out")
    for name, given in (("manager", manager), ("oracle", oracle)):
        if given is not None and given.state is not State.CAPTURED:
            raise wrong_state(given.state, State.CAPTURED, name)
    if oracle is not None and oracle.kv_cache is not manager.kv_cache:
        raise ConfigError("oracle: uses a different KVCache; build it with the KVCache of the manager")
    cache = manager.kv_cache
    tensors = [tensor for group in range(len(cache.groups)) for tensor in _tensors(cache, group)]
    before = [t.clone() for t in tensors]
    if batches is None:
        count = check_int("count", count, 1, advice="8 is usual")
        seed = check_int("seed", seed, 0, 2**63 - 1, advice="pass any number")
        most = manager.vocab_size
        vocab_size = most if vocab_size is None else check_int("vocab_size", vocab_size, 1, most, advice="leave it out")
        batches = generated_batches(manager, vocab_size=vocab_size, count=count, seed=seed)
        rng = torch.Generator(cache.device).manual_seed(seed)  # the host would take seconds per GiB
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=rng, device=tensor.device))
    else:
        _check_batches(manager, batches)
    steps = list(batches)
    try:
        subject = RuntimeSubject(manager, model, oracle)
        report = verify(
            subject, lambda case: {"batch": steps[case]}, cases=len(steps), captures=[0], tolerance=tolerance
        )
    finally:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
    if not subject.faults:
        return report
    first = next(iter(subject.faults.values()))
    if len(subject.faults) == sum(batch.num_reqs for batch in steps):
        raise ConfigError(f"batches: the device rejected every request, first: {first}; fix the batches")
    what = f"the device rejected {len(subject.faults)} requests, which wrote nothing; the first: {first}"
    return replace(report, not_checked={**report.not_checked, "rejected requests": what})


def _check_batches(manager: ReplayManager, batches: object) -> None:
    """Check the caller's batches.

    Raises:
        ConfigError: if there are none, one is not a Batch, or a page is outside the cache.
    """
    given = check_sequence("batches", batches, of="batches", error=ConfigError)
    if not given:
        raise ConfigError("batches: the list is empty; omit it to generate batches")
    num_pages = max(pages for pages, _ in manager.kv_cache.pools)
    for index, batch in enumerate(given):
        check_instance(f"batches[{index}]", batch, Batch, advice="make it with Batch(...) or Batch.from_requests")
        ids = batch.page_ids
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_pages:
            raise ConfigError(
                f"batches[{index}].page_ids: expected 0 <= id < {num_pages}, got {int(ids.min())} to {int(ids.max())}; "
                "list pages of this cache"
            )


def generated_batches(manager: ReplayManager, *, vocab_size: int, count: int, seed: int) -> list[Batch]:
    """Return ragged batches that shrink and grow, with lengths before, at and after page boundaries.

    They are decode steps of 1 to max_num_reqs requests in any order and, if the config allows them, mixed steps and
    drafts.

    Raises:
        ConfigError: if the cache has several KV groups, or fewer pages than requests.
    """
    cache, config = manager.kv_cache, manager.config
    if len(cache.groups) != 1:
        raise ConfigError(
            f"batches: cannot generate them for a cache of {len(cache.groups)} KV groups; pass your own batches"
        )
    rng = np.random.default_rng(seed)
    ((num_pages, null_page),) = cache.pools
    page_size = cache.groups[0].page_size
    pages = [page for page in range(num_pages) if page != null_page]
    each = min(len(pages) // config.max_num_reqs, config.max_seq_len // page_size)
    if not each:
        raise ConfigError(
            f"cache: expected at least one page per request, got {len(pages)} for {config.max_num_reqs} requests; "
            f"add pages"
        )
    longest = each * page_size
    boundaries = [n + d for n in range(page_size, longest + 1, page_size) for d in (-1, 0, 1)]
    batches = []
    for number in range(count):
        num_reqs = config.max_num_reqs if number % 3 == 0 else int(rng.integers(1, config.max_num_reqs + 1))
        mixed = config.mixed_batches and bool(config.mixed_sizes) and number % 4 == 2
        room, chosen = config.max_num_tokens, []
        owned = rng.permutation(pages)
        for req in rng.permutation(config.max_num_reqs)[:num_reqs].tolist():
            length = int(rng.choice(boundaries) if rng.random() < 0.5 else rng.integers(1, longest + 1))
            length = min(max(length, config.query_lens[-1]), longest)
            new = min(int(rng.integers(1, 6)), length) if mixed else config.query_lens[-1]
            if new > room:
                break
            room -= new
            mine = owned[req * each : req * each + -(-length // page_size)].tolist()
            tokens = rng.integers(0, vocab_size, new).tolist()
            drafts = int(rng.integers(0, min(new, config.query_lens[-1])))
            chosen.append(Request(req, tokens, length, tuple(mine), sample=1 + drafts))
        batches.append(Batch.from_requests(chosen))
    return batches


def _results(handle: StepHandle) -> dict[str, torch.Tensor]:
    """Return the logits, tokens and faults of a step in batch order."""
    handle.wait()
    logits = handle.logits(copy=True)
    faults = [(fault.index, int(fault.code)) for fault in handle.faults]
    tokens = torch.from_numpy(np.array(handle.results, dtype=np.int64))
    return {"logits": logits, "tokens": tokens, "faults": torch.tensor(faults, dtype=torch.int64, device="cpu")}


def _tensors(cache: KVCache, group: int) -> list[torch.Tensor]:
    keys, values = cache.of_group(group)
    return [*keys, *values]
