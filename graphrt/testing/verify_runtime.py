"""A captured `ReplayManager` as what `verify` takes: batches as graphs, eagerly, and by another backend.

    report = verify_runtime(manager)
    report = verify_runtime(manager, oracle=other)     # e.g. backend="torch_reference", over the same KVCache

The graphs are those that the manager captured itself. Keys and values, and what rows have on the device, are as before
afterwards.
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
from graphrt.testing.verify import verify
from graphrt.testing.verify_report import VerifyReport

_COUNTERS = frozenset({"cursor", "step_counter", "last_writers", "write_conflicts", "loop_condition", "order"})
"""Persistent buffers that count launches and steps: the host counts along, so these go on from run to run."""


class RuntimeSubject:
    """The `Subject` of a captured manager. An input is {"batch": Batch}; its tokens must be literal.

    faults  what the device refused rows for, by batch and row
    """

    def __init__(self, manager: ReplayManager, model: object = None, oracle: ReplayManager | None = None) -> None:
        self.manager, self.oracle = manager, oracle
        # What the manager itself keeps counts its launches.
        self.host = (manager._program.model if model is None else model, "model")
        self.batch = Batch.empty()
        self.faults: dict[tuple[int, int], str] = {}  # of rows of batches
        self.derived = tuple(name for name, _ in manager.buffers.named(BufferKind.DERIVED))
        cache = manager.kv_cache
        self.state = {
            **{name: t for name, t in self._request_state(manager).items() if t.numel()},
            **{name: t for name, t in cache.named_tensors() if not name.endswith("scales")},
        }
        if oracle is not None:
            self.eager = self._by_oracle

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The derived buffers: each step rewrites them from the slot of the input_ring, so they may hold poison."""
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
        """The graphs are there already."""
        return lambda: _results(self.manager.replay(self.batch))

    def _by_oracle(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        assert self.oracle is not None, "given where this is called"
        theirs = self._request_state(self.oracle)
        for name, tensor in self._request_state(self.manager).items():
            if theirs[name].shape == tensor.shape:
                theirs[name].copy_(tensor)
        return {"logits": _results(self.oracle.replay(inputs["batch"], eager=True))["logits"]}

    def real(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Pages that no sequence owns, the null page, take what pad rows write."""
        device, masks = self.manager.kv_cache.device, []
        for num_pages, null_page in self.manager.kv_cache.pools:
            masks.append(torch.ones(num_pages, dtype=torch.bool, device=device))
            masks[-1][null_page] = False
        return {name: masks[pool] for name, pool in self._pools().items()}

    def unowned(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Every page that the batch does not list, but for the null page. With several pools: none."""
        cache = self.manager.kv_cache
        if len(cache.pools) != 1:
            return {}
        ((num_pages, null_page),) = cache.pools
        free = np.ones(num_pages, np.bool_)
        free[null_page] = free[inputs["batch"].page_ids] = False
        # Numbers, not a mask: the host would wait for the device to count those of a mask, once per tensor.
        return dict.fromkeys(self._pools(), torch.from_numpy(np.flatnonzero(free)).to(cache.device))

    def _pools(self) -> dict[str, int]:
        """The pool of each part of the cache."""
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
    """Verify a captured manager over batches; see `graphrt.testing.verify.verify`.

    batches     steps that can run at any time: tokens are literal, and pages are listed in full. None: generated ones,
                for which the cache is filled with random values meanwhile
    model       searched for numbers and tensors that a graph may have frozen. None: the manager's own
    vocab_size  of generated tokens; None is the manager's
    oracle      a captured manager of the same model and config, with another backend and `use_graphs=False`, over the
                same KVCache: its eager steps are what logits are compared with
    count, seed of generated batches
    tolerance   of logits against the oracle's

    Call it on the manager's stream, with no step in flight. Cache and row state are copied before each run: verify a
    manager over a small cache, as a test builds one. Rows that the device refuses are named under "not checked".

    Raises: ConfigError for arguments that do not fit, and where the device refuses every row; CaptureError for a
    manager or an oracle that is not captured.
    """
    check_instance("manager", manager, ReplayManager, advice="of a Runtime, pass runtime.manager")
    if oracle is not None:
        check_instance("oracle", oracle, ReplayManager, advice="pass a manager over the same KVCache, or leave it out")
    for name, given in (("manager", manager), ("oracle", oracle)):
        if given is not None and given.state is not State.CAPTURED:
            raise wrong_state(given.state, State.CAPTURED, name)
    if oracle is not None and oracle.kv_cache is not manager.kv_cache:
        raise ConfigError("oracle: expected a manager over the same KVCache, got one over another; pass it that cache")
    cache = manager.kv_cache
    tensors = [tensor for group in range(len(cache.groups)) for tensor in _tensors(cache, group)]
    before = [t.clone() for t in tensors]
    if batches is None:
        count = check_int("count", count, 1, advice="8 is usual")
        seed = check_int("seed", seed, 0, 2**63 - 1, advice="pass any number")
        most = manager.vocab_size
        vocab_size = most if vocab_size is None else check_int("vocab_size", vocab_size, 1, most, advice="leave it out")
        batches = generated_batches(manager, vocab_size=vocab_size, count=count, seed=seed)
        rng = torch.Generator(cache.device).manual_seed(seed)  # a host would take seconds for a gigabyte
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
        raise ConfigError(f"batches: expected rows that the device takes, got none: {first}")
    what = f"{len(subject.faults)} rows wrote nothing, as the device refused them; the first is {first}"
    return replace(report, not_checked={**report.not_checked, "faulty rows": what})


def _check_batches(manager: ReplayManager, batches: object) -> None:
    """Raises: ConfigError for what are no batches, for none, and for pages that there are not."""
    given = check_sequence("batches", batches, of="batches", error=ConfigError)
    if not given:
        raise ConfigError("batches: expected at least one, got none; leave them out for generated ones")
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
    """Steps of rows in any order that are ragged, shrink, grow, and have lengths on, before and behind page borders.

    Each has a graph: decodes of 1 to max_num_reqs rows, and, where the config allows them, prompt chunks beside them.
    Raises: ConfigError for a cache of several groups, or one with fewer pages than rows.
    """
    cache, config = manager.kv_cache, manager.config
    if len(cache.groups) != 1:
        raise ConfigError(
            f"batches: expected them for a cache of {len(cache.groups)} KV groups, got none; pass your own"
        )
    rng = np.random.default_rng(seed)
    ((num_pages, null_page),) = cache.pools
    page_size = cache.groups[0].page_size
    pages = [page for page in range(num_pages) if page != null_page]
    each = min(len(pages) // config.max_num_reqs, config.max_seq_len // page_size)
    if not each:
        raise ConfigError(f"cache: expected a page per row, got {len(pages)} for {config.max_num_reqs}; add pages")
    longest = each * page_size
    borders = [n + d for n in range(page_size, longest + 1, page_size) for d in (-1, 0, 1)]
    batches = []
    for number in range(count):
        rows = config.max_num_reqs if number % 3 == 0 else int(rng.integers(1, config.max_num_reqs + 1))
        mixed = config.mixed_batches and bool(config.mixed_sizes) and number % 4 == 2
        room, chosen = config.max_num_tokens, []
        owned = rng.permutation(pages)
        for row in rng.permutation(config.max_num_reqs)[:rows].tolist():
            length = int(rng.choice(borders) if rng.random() < 0.5 else rng.integers(1, longest + 1))
            length = min(max(length, config.query_len), longest)
            new = min(int(rng.integers(1, 6)), length) if mixed else config.query_len
            if new > room:
                break
            room -= new
            mine = owned[row * each : row * each + -(-length // page_size)].tolist()
            tokens = rng.integers(0, vocab_size, new).tolist()
            chosen.append(Request(row, tokens, length, tuple(mine)))
        batches.append(Batch.from_requests(chosen))
    return batches


def _results(handle: StepHandle) -> dict[str, torch.Tensor]:
    """What a step gave, in the batch's order; faults too, which `verify` compares as it does tokens."""
    handle.wait()
    logits = handle.logits(copy=True)
    faults = [(fault.index, int(fault.code)) for fault in handle.faults]
    tokens = torch.from_numpy(np.array(handle.results, dtype=np.int64))
    return {"logits": logits, "tokens": tokens, "faults": torch.tensor(faults, dtype=torch.int64, device="cpu")}


def _tensors(cache: KVCache, group: int) -> list[torch.Tensor]:
    keys, values = cache.of_group(group)
    return [*keys, *values]
