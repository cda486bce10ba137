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
import numpy.typing as npt
import torch

from graphrt.batch import Batch
from graphrt.cache.kv_cache import KVCache
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.engine.batch_delta import StopConditions
from graphrt.engine.handle import Launch, StepHandle
from graphrt.engine.lifecycle import State, wrong_state
from graphrt.kernels.checks import check_instance, check_int, check_sequence
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.metadata.buffers import STOP_TOKENS, BufferKind
from graphrt.kernels.types import NO_TOKEN
from graphrt.replay import ReplayManager
from graphrt.testing.verify.api import verify
from graphrt.testing.verify.batches import accept_drafts, generated_batches
from graphrt.testing.verify.report import VerifyReport

_COUNTERS = frozenset({"cursor", "step_counter", "last_writers", "write_conflicts", "loop_condition", "order"})
"""Persistent buffers that count launches and steps. The host also counts, so they are not restored between runs."""

_OMIT = "omit it for the default"


class RuntimeSubject:
    """The `Subject` of a captured manager. An input is {"batch": Batch} with literal tokens.

    Attributes:
        faults: the fault of each request that the device rejected, by batch and index in the batch.
        ran: the sizes whose graph was launched.
        accepted: whether a graph accepted a draft.
    """

    def __init__(self, manager: ReplayManager, model: object = None, oracle: ReplayManager | None = None) -> None:
        self.manager, self.oracle = manager, oracle
        # Do not search the manager, because its Python values count launches.
        self.host = (manager._program.model if model is None else model, "model")
        self.batch = Batch.empty()
        self.faults: dict[tuple[int, int], str] = {}
        self.ran, self.accepted = set[BatchDescriptor](), False
        self.derived = tuple(self.buffers)
        cache = manager.kv_cache
        self.state = {
            **{name: t for name, t in self._request_state(manager).items() if t.numel()},
            **{f"request tensor {name}": t for name, t in manager.request_tables.tensors.items() if t.numel()},
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
        handle = self._submit(eager=True)
        results = _results(self.manager, handle)
        self.faults |= {(id(self.batch), fault.index): str(fault) for fault in handle.faults}
        return results

    def capture(self, inputs: Mapping[str, Any]) -> Any:
        """Return the launch of a graph that the manager has already captured."""

        def launch() -> dict[str, torch.Tensor]:
            handle = self._submit()
            results = _results(self.manager, handle)
            if not handle.why_eager:
                self.ran.add(handle.descriptor)
                self.accepted |= handle.positions > 1 and bool((results["tokens"][:, 1:] >= 0).any())
            return results

        return launch

    def _submit(self, *, eager: bool = False) -> StepHandle | Launch:
        """Submit the batch. With rejection sampling, only sessions submit drafts, by `begin`."""
        if not self.manager.config.rejection_sampling:
            return self.manager.replay(self.batch, eager=eager)
        n = self.batch.num_reqs
        never = StopConditions(np.zeros(n, np.int32), np.full((STOP_TOKENS, n), NO_TOKEN, np.int32))
        return self.manager.begin(self.batch, never, eager=eager)

    def tokens(self, batch: Batch) -> npt.NDArray[np.int32]:
        """Run a batch eagerly, and return its tokens."""
        self.batch = batch
        return _tokens(self._submit(eager=True))

    def _by_oracle(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        assert self.oracle is not None, "eager is this method only with an oracle"
        theirs = self._request_state(self.oracle)
        for name, tensor in self._request_state(self.manager).items():
            if theirs[name].shape == tensor.shape:
                theirs[name].copy_(tensor)
        return {"logits": _results(self.oracle, self.oracle.replay(inputs["batch"], eager=True))["logits"]}

    def real(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part to compare, which is all pages except the null page, to which pad rows write."""
        device, masks = self.manager.kv_cache.device, []
        for num_pages, null_page in self.manager.kv_cache.pools:
            masks.append(torch.ones(num_pages, dtype=torch.bool, device=device))
            masks[-1][null_page] = False
        return {name: masks[pool] for name, pool in self._pools().items()}

    def unowned(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all pages that the batch does not list, except the null page."""
        cache, batch = self.manager.kv_cache, inputs["batch"]
        free = [np.ones(num_pages, np.bool_) for num_pages, _ in cache.pools]
        for pages, (_, null_page) in zip(free, cache.pools, strict=True):
            pages[null_page] = False
        lists, n = batch.page_indptr, batch.num_reqs
        for number, group in enumerate(cache.groups[: batch.num_groups]):
            free[group.pool][batch.page_ids[lists[number * n] : lists[(number + 1) * n]]] = False
        # Use indices, because a mask makes the host wait for the device once per tensor.
        indices = [torch.from_numpy(np.flatnonzero(pages)).to(cache.device) for pages in free]
        return {name: indices[pool] for name, pool in self._pools().items()}

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
    count: int | None = None,
    seed: int = 0,
    tolerance: float | None = None,
) -> VerifyReport:
    """Verify a captured manager over batches. See `graphrt.testing.verify.verify`.

    Args:
        manager: the manager. Call this function on its stream, with no step in flight.
        batches: steps that can run in any order, with literal tokens and full page lists. Default: generated batches,
            for which the cache is filled with random values. Some of their drafts are the tokens that the model
            samples, so that steps accept them.
        model: object to search for values that a graph may have frozen. Default: the manager's model.
        vocab_size: upper bound of generated tokens. Default: the manager's vocabulary size.
        oracle: a captured manager with the same model, config and KVCache, but with another backend and
            `use_graphs=False`. Its eager logits are the reference.
        count, seed: number and seed of generated batches. Default: one per captured size, and at least 8.
        tolerance: tolerance of logits against those of the oracle.

    Returns:
        The report. `not_checked` lists captured sizes at which no batch ran, and requests that the device rejected.

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
    logprobs = manager.buffers.draft_logprobs
    before = [t.clone() for t in (*tensors, logprobs)]
    try:
        if batches is None:
            count = max(8, len(manager.descriptors)) if count is None else check_int("count", count, 1, advice=_OMIT)
            seed = check_int("seed", seed, 0, 2**63 - 1, advice="pass any number")
            most = manager.vocab_size
            vocab_size = most if vocab_size is None else check_int("vocab_size", vocab_size, 1, most, advice=_OMIT)
            steps = generated_batches(manager, vocab_size=vocab_size, count=count, seed=seed)
            rng = torch.Generator(cache.device).manual_seed(seed)  # the host would take seconds per GiB
            for tensor in tensors:
                tensor.copy_(torch.randn(tensor.shape, generator=rng, device=tensor.device))
            logprobs.copy_(torch.randn(logprobs.shape, generator=rng, device=logprobs.device).log_softmax(-1))
        else:
            _check_batches(manager, batches)
            steps = list(batches)
        subject = RuntimeSubject(manager, model, oracle)
        if batches is None:
            accept_drafts(subject.tokens, steps, subject.state, seed=seed)
        report = verify(
            subject, lambda case: {"batch": steps[case]}, cases=len(steps), captures=[0], tolerance=tolerance
        )
    finally:
        for tensor, old in zip((*tensors, logprobs), before, strict=True):
            tensor.copy_(old)
    if subject.faults and len(subject.faults) == sum(batch.num_reqs for batch in steps):
        first = next(iter(subject.faults.values()))
        raise ConfigError(f"batches: the device rejected every request, first: {first}; fix the batches")
    return replace(report, not_checked={**report.not_checked, **_not_run(subject)})


def _not_run(subject: RuntimeSubject) -> dict[str, str]:
    """Return what no batch ran: captured sizes, loops, accepted drafts, and requests with faults."""
    manager, found = subject.manager, dict[str, str]()
    if left := [str(size) for size in manager.descriptors if size not in subject.ran]:
        found["sizes"] = f"no batch ran at {', '.join(left)}; omit count, or pass batches of these sizes"
    if manager.config.loop_sizes:
        found["loops"] = "sessions run several steps in one launch of a loop; each replay runs one step"
    if manager.config.num_speculative_tokens and not subject.accepted:
        found["drafts"] = "no step accepted a draft"
    if subject.faults:
        first = next(iter(subject.faults.values()))
        what = f"the device rejected {len(subject.faults)} requests, which wrote nothing; the first: {first}"
        found["rejected requests"] = what
    return found


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


def _results(manager: ReplayManager, handle: StepHandle | Launch) -> dict[str, torch.Tensor]:
    """Return the logits, tokens and faults of a step in batch order."""
    handle.wait()
    logits = manager.latest_logits(handle, copy=True)
    faults = [(fault.index, int(fault.code)) for fault in handle.faults]
    tokens = torch.from_numpy(np.array(_tokens(handle), dtype=np.int64))
    return {"logits": logits, "tokens": tokens, "faults": torch.tensor(faults, dtype=torch.int64, device="cpu")}


def _tokens(handle: StepHandle | Launch) -> npt.NDArray[np.int32]:
    return handle.results if isinstance(handle, StepHandle) else handle.tokens(raise_on_fault=False).T


def _tensors(cache: KVCache, group: int) -> list[torch.Tensor]:
    keys, values = cache.of_group(group)
    return [*keys, *values]
