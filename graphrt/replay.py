"""The replay manager, which captures one graph per batch size, then replays one graph per step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from graphrt.backends.choice import get_attn_backend
from graphrt.batch import Batch
from graphrt.cache.groups import kv_locations
from graphrt.cache.kv_cache import KVCache
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.capture.device_wait import empty_cache, wait_for
from graphrt.capture.dispatcher import Dispatch, Dispatcher
from graphrt.capture.graph import CapturedGraph, GraphReport
from graphrt.capture.guard import named_weights
from graphrt.capture.inspect.findings import Audit
from graphrt.capture.inspect.memory import MemoryMap
from graphrt.capture.recorder import make_recorder
from graphrt.capture.staging import StagingSlot
from graphrt.config import RuntimeConfig
from graphrt.context_parallel import backend_specs
from graphrt.draft_model import resolve_layers, with_draft_state
from graphrt.engine.batch_delta import BatchDelta, StopConditions
from graphrt.engine.graphs import StepGraphs
from graphrt.engine.guards import Guards
from graphrt.engine.handle import InFlight, Launch, StepHandle
from graphrt.engine.late_capture import LateCapture
from graphrt.engine.launch_inputs import LaunchInputs
from graphrt.engine.launch_queue import LaunchQueue
from graphrt.engine.lifecycle import Exclusive, OnStream, State, stream_on, wrong_state
from graphrt.engine.program import StepProgram, attention_layers, capacity_of, check_page_tables, page_groups
from graphrt.engine.rank_calls import RankCalls, capturing, follower, refuse_ranks
from graphrt.engine.recording import Recording
from graphrt.engine.request_tables import RequestTables
from graphrt.engine.shadow import StepComparison, StepResult, compare_results
from graphrt.engine.stats import Stats, choose_plans
from graphrt.engine.traffic import FORCED
from graphrt.engine.undo import StepUndo
from graphrt.kernels.checks import check_bool, check_callable, check_instance, check_int, check_named_tensors
from graphrt.kernels.compile_ahead import compiled
from graphrt.kernels.errors import CaptureError, RankError, ReplayError, ShapeError, UnsupportedError
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.ops.collectives import VocabShards
from graphrt.kernels.ops.sampling import MAX_VOCAB_SIZE
from graphrt.layer import ModelLayers
from graphrt.proposer import Proposer, check_proposer
from graphrt.sampling import sample_tokens
from graphrt.spec import AttentionSpec
from graphrt.step import Model, Sampler

_T = TypeVar("_T")

_CAPTURED = State.CAPTURED  # the lookup of an enum member takes as long as a call


class ReplayManager:
    """The decode step of one model over one paged KV cache, captured and replayed.

    Use Runtime, which owns a manager, if graphrt should size the cache and allocate pages and request indices.

    model       maps a Step to logits [padded_reqs, vocab_size]
    kv_cache    the cache; may consist of tensors that the caller owns
    attention   the spec of every layer, or one spec for all layers; None: the specs of the model's `Attention` layers
    vocab_size  width of the logits; at most 2 ** 20 with the built-in sampler
    config      capacities and options
    sampler     maps logits and Step to tokens, in the graph; None: the caller samples from `handle.logits()`
    stream      stream of all steps; None: the current stream. Graphs share memory, so all steps run on one stream
    weights     named tensors that must not move; None: parameters and buffers of the model, if it is a Module
    proposer    maps a Step to drafts, as a DraftModel does; needs num_speculative_tokens. None: callers send drafts.
                `replay` verifies only the drafts in its batch; the steps of a session also verify the proposer's drafts
    page_tables [groups, max_num_reqs, pages_per_request] int32 on the device, contiguous: block tables that the caller
                owns, by request index; with one group, also [max_num_reqs, pages_per_request]. Batches list no pages
    group       ranks that each hold a shard of the model; see docs/parallel.md. Rank 0 submits steps, others `follow`
    `request_tables` writes per-request state: logit biases, token masks and request tensors.

    Call `capture()` once, then `replay(batch)` per step, then `close()`. Steps run in inference mode. A concurrent or
    nested call raises ReplayError. Any thread may read tokens. Only the thread that submits steps may read logits.

    Raises:
        ConfigError: if an argument has the wrong type, or arguments do not match.
        UnsupportedError: if no attention backend supports them.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        attention: AttentionSpec | Sequence[AttentionSpec] | None = None,
        *,
        vocab_size: int,
        config: RuntimeConfig | None = None,
        sampler: Sampler | None = sample_tokens,
        stream: torch.cuda.Stream | None = None,
        weights: Iterable[tuple[str, torch.Tensor]] | None = None,
        proposer: Proposer | None = None,
        page_tables: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_callable("model", model, advice="pass a function of a Step, or a torch.nn.Module")
        check_instance("kv_cache", kv_cache, KVCache, advice="wrap your tensors: KVCache(spec, k, v)")
        if sampler is not None:
            check_callable("sampler", sampler, advice="pass a function of logits and Step, or None")
        config = RuntimeConfig() if config is None else config
        check_instance("config", config, RuntimeConfig, advice="pass a RuntimeConfig")
        self.config = config = with_draft_state(config.resolve(), proposer)
        device, model_layers = kv_cache.device, ModelLayers(model)
        recorder = make_recorder(device)  # first, because it checks torch's allocator
        specs = resolve_layers(model_layers, attention, len(kv_cache.group_of), proposer, vocab_size, config.tree_depth)
        locations = kv_locations(specs, kv_cache.groups)
        most = MAX_VOCAB_SIZE if sampler is sample_tokens else (1 << 31) - 1
        vocab_size = check_int("vocab_size", vocab_size, 1, most, advice="pass the width of the model's logits")
        chosen = get_attn_backend(backend_specs(specs, kv_cache.groups), kv_cache.groups, device, config=config)
        named = check_named_tensors("weights", named_weights(model) if weights is None else weights)
        self._stream, self._backend = stream_on(device, stream), chosen.make()
        self._kv_cache: KVCache | None = kv_cache
        check_proposer(proposer, config, sampler=sampler, plans_on_host=self.plans_on_host)
        self.vocab_size, self.proposes, self.has_ranks = vocab_size, proposer is not None, group is not None
        self._num_groups, self._whole_rows = len(kv_cache.groups), not all(spec.is_cached for spec in specs)
        self._on_stream = OnStream(self._stream, "graphrt.replay")
        self._exclusive = Exclusive("ReplayManager", "submit steps from one thread, and not from inside a model")
        longest = config.max_seq_len + config.num_speculative_tokens  # includes missing drafts, which are padding
        groups = page_groups(kv_cache, longest, config.max_encoder_len or 0)
        capacity = capacity_of(config, groups, vocab_size, interleaves=chosen.context.context_parallel)
        self._inputs_words, self._buffers = capacity.inputs, StaticBuffers.allocate(capacity, device)
        self.request_tables = RequestTables(
            config, vocab_size, device, self.between_steps, self._on_steps_stream, self.mirror
        )
        self._program = StepProgram(
            model=model, sampler=sampler, backend=self._backend, layers=attention_layers(specs, locations, kv_cache),
            kv_cache=kv_cache, buffers=self._buffers, vocab_size=vocab_size, max_seq_len=config.max_seq_len,
            max_pages=tuple(group.max_pages for group in groups[: self._num_groups]), model_layers=model_layers,
            proposer=proposer, page_tables=check_page_tables(page_tables, self._buffers), truncation=config.truncation,
            request_tensors=self.request_tables.tensors, shards=VocabShards.of(vocab_size, group),
        )  # fmt: skip
        self._graphs = StepGraphs(self._program, recorder, config.loop_sizes)
        self._dispatcher = Dispatcher(
            max_num_reqs=config.max_num_reqs, max_num_tokens=config.max_num_tokens, query_lens=config.query_lens,
            decode_sizes=config.decode_sizes or (), mixed_sizes=config.mixed_sizes or (), use_graphs=config.use_graphs,
            graph_unsupported_reason=self._backend.graph_unsupported_reason, lazy=config.lazy_capture,
        )  # fmt: skip
        products = choose_plans(device, specs[0].dtype)
        self._stats = Stats(self._graphs.name, self._backend.name, chosen.reason, products)
        self._guards = Guards(
            self._program, self._graphs, self._exclusive, self._stats,
            weights=None if weights is None else named, page_tables=page_tables, check_weights=config.check_weights,
        )  # fmt: skip
        self._calls = None if group is None else RankCalls.connect(group, config, self._program, self)
        self.queue = LaunchQueue(self._program, self._graphs, self._stats, config, self._on_stream, self._calls)
        self._why_eager = LateCapture(self.queue, self._graphs, self._guards, self._stats)
        self._launch_steps, self._state = config.launch_steps, State.NEW
        self._order: object = None  # the BatchDelta.order that is on the device

    @property
    def kv_cache(self) -> KVCache:
        """The KV cache. Raises CaptureError if the Runtime that owned the cache was closed."""
        if self._kv_cache is None:
            raise CaptureError("kv_cache: freed by close() of the runtime that owned it; build a new runtime")
        return self._kv_cache

    def forget_cache(self) -> None:
        """Drop the KV cache after `close()`. Handles keep references to the manager, and so to the cache."""
        self._require(State.CLOSED, "forget_cache")
        self._kv_cache = None

    @property
    def buffers(self) -> StaticBuffers:
        """The static buffers, for audits and tests. Raises CaptureError after `close()`."""
        if self._state is State.CLOSED:
            raise CaptureError("buffers: freed by close(); build a new manager")
        return self._buffers

    @property
    def state(self) -> State:
        """State of the lifecycle: new, captured or closed."""
        return self._state

    @property
    def descriptors(self) -> tuple[BatchDescriptor, ...]:
        """The captured sizes, largest first. With `lazy_capture`, a size is added at its first use."""
        return self._dispatcher.captured()

    def graph(self, descriptor: BatchDescriptor) -> CapturedGraph:
        """Return the graph of a size, for `capture.inspect`. Raises ConfigError if the size is not captured, and
        CaptureError before `capture()` and after `close()`."""
        self._require(State.CAPTURED, "graph")
        return self._graphs.graph(descriptor)

    def memory_map(self, descriptor: BatchDescriptor) -> MemoryMap:
        """Return the memory that the graph of a size may address, for an audit. Raises: see `graph`."""
        self._require(State.CAPTURED, "memory_map")
        return self._guards.memory(descriptor)

    def audit(self, descriptor: BatchDescriptor) -> Audit:
        """Check that every address in the graph of a size is in memory that outlives the graph. Print the result, or
        call its `raise_if_any()`. Raises: see `graph`."""
        self._require(State.CAPTURED, "audit")
        return self._guards.audit(descriptor)

    def capture(self, progress: Callable[[GraphReport], None] | None = None) -> None:
        """Capture one graph per size, or per kind with `lazy_capture`.

        progress   called with the report of each graph

        Captures nothing with `use_graphs=False` or a backend without graph support; `stats()` then counts eager steps
        by reason.

        Raises:
            CaptureError: if the step cannot be captured (a host read, a moved buffer, a wrong shape), or if the manager
                is not new.
            ConfigError: if a null page that attention may read contains NaN or infinity, or if a scale of an fp8 cache
                is NaN, infinite or 0.

        After a failed capture, the manager is still new.
        """
        if progress is not None:
            check_callable("progress", progress, advice="pass a function of a GraphReport, or None")
        with self._exclusive:
            self._require(State.NEW, "capture")
            self.kv_cache.check_contents(has_drafts=self.config.num_speculative_tokens > 0)
            start = time.perf_counter()
            self._guards.before_capture()
            with capturing(self._calls), OnStream(self._stream, "graphrt.capture", waits=True), torch.inference_mode():
                with torch.inference_mode(False):  # `reset` may write these tensors outside of inference mode
                    self._backend.allocate()
                self._graphs.capture(self._dispatcher.captured(), self._dispatcher.captured(late=True), progress)
                self._buffers.cursor.zero_()
                wait_for(self._stream)
            self._buffers.step_ring.fill_(-1)  # remove the outputs of warm-up steps
            self._stats.graphs = self._graphs.reports
            self._stats.compiled_kernels.update(compiled)
            self._stats.capture_seconds = time.perf_counter() - start
            self._guards.after_capture()
            self._state = State.CAPTURED

    def replay(self, batch: Batch, *, eager: bool = False, descriptor: BatchDescriptor | None = None) -> StepHandle:
        """Submit one decode step, and return its handle. Waits only if `config.most_in_flight` launches are in flight.

        eager       run the step outside of a graph, on the same static buffers. The step changes state and KV like any
        other step, so submitting a batch twice runs two steps. Use `compare` to run one step both ways
        descriptor  run at this captured size instead of the smallest size that fits, so that all ranks of a group use
        the same size; an idle rank submits `Batch.empty()`

        Raises:
            ShapeError: if `batch` is not a Batch, or if an encoder model gets a partial sequence.
            CapacityError: if the batch is too large.
            ConfigError: if `descriptor` is not a captured size, or `eager` is not a bool.
            ReplayError: if a weight was moved, or if another call is running.
            UnsupportedError: if requests need options that the config does not enable (mixed_batches, penalties, ...).
            CaptureError: before `capture()` and after `close()`.

        If it raises, nothing has been written. The handle raises faults that only the device can detect.
        """
        eager = check_bool("eager", eager, advice="pass a bool")
        with self._exclusive:
            self.request_tables.clear_left()  # a session may have released a request index of this batch
            # 1 check the batch, and choose the captured size that serves it
            target = self._dispatch("replay", batch, descriptor)
            why_eager = FORCED if eager else self._why_eager(target)
            # 2 write the batch to an input slot that no launch in flight uses
            slot, step = self.queue.slot()
            batch.write_inputs(slot.inputs, step, self._num_groups)
            # 3 launch the graph, which reads the input slot
            self.queue.launch(slot, target.descriptor, batch.num_reqs, batch, why_eager)
            # 4 return a handle, which waits for this step only
            handle = self._handle(step, batch, target.descriptor, why_eager, slot)
            self._stats.count(target.descriptor, batch.num_tokens, why_eager)
            return handle

    def _dispatch(self, call: str, batch: Batch, descriptor: BatchDescriptor | None) -> Dispatch:
        """Run all checks on the host. Return the size that serves the batch, or the reason why no size does."""
        self._require(_CAPTURED, call)
        check_instance("batch", batch, Batch, advice="use Batch(...) or Batch.from_requests", error=ShapeError)
        config, num_reqs, num_tokens = self.config, len(batch.req_indices), len(batch.tokens)
        self._dispatcher.check_room(num_reqs, num_tokens)
        batch.check_capacity(
            config.max_seq_len, self._inputs_words, self._num_groups, config.max_encoder_len or 0, self._whole_rows
        )
        if self._program.page_tables is not None and len(batch.page_ids):
            raise ShapeError("batch.page_ids: must be empty with page_tables; write the page ids to your tables")
        if batch.needs:
            batch.check_needs(config, self._program.vocab_size)
        if call != "begin" and batch.sample.max(initial=0) > 1:
            config.check_own_drafts("batch.sample")
        self._guards.before_step()
        query_len = batch.decode_query_len(config.num_speculative_tokens)
        if not (query_len or config.mixed_batches):
            raise config.too_many_tokens(batch.query_lens)
        if descriptor is None:
            return self._dispatcher.dispatch(num_reqs, num_tokens, query_len)
        check_instance("descriptor", descriptor, BatchDescriptor, advice="pass one of manager.descriptors")
        if descriptor.kind is GraphKind.MIXED and not config.mixed_batches:
            raise UnsupportedError(
                f"descriptor: expected a decode size with mixed_batches=False, got {descriptor}; pass a decode size"
            )
        return self._dispatcher.at(descriptor, num_reqs, num_tokens, query_len)

    def begin(self, batch: Batch, ends: StopConditions, *, eager: bool = False) -> Launch:
        """Submit one step as `replay` does, and keep the requests on the device, so that `advance` can continue them.

        A request with seq_len SEQ_LEN_FROM_DEVICE continues from the length on the device. If its sequence has already
        finished, the request runs as padding. Raises: see `replay`.
        """
        with self._exclusive:
            target = self._dispatch("begin", batch, None)
            why_eager = FORCED if eager else self._why_eager(target)
            queue = self.queue
            slot, step = queue.slot()
            ends.write(slot.inputs, batch.write_inputs(slot.inputs, step, self._num_groups))
            self._order = None
            queue.launch(slot, target.descriptor, batch.num_reqs, batch, why_eager, flag=ends.flag)
            self._stats.count(target.descriptor, batch.num_tokens, why_eager)
            asks, ids = batch.asks_logprobs, batch.req_indices
            return Launch(step, 1, batch.num_reqs, target.descriptor, why_eager, slot, queue.rings, asks, ids)

    def advance(self, delta: BatchDelta, *, steps: int = 1, eager: bool = False, query_len: int = 1) -> Launch:
        """Continue the requests of `begin` for `steps` steps. Waits only if `most_in_flight` launches are in flight.

        query_len   1 + num_speculative_tokens to verify drafts, else 1

        Raises: see `replay`; these errors change nothing. If a step raises, earlier steps may have run; see ChangeFlag.
        """
        steps = check_int("steps", steps, 1, self._launch_steps, advice="raise RuntimeConfig.launch_steps")
        with self._exclusive:
            self._require(_CAPTURED, "advance")
            self._guards.before_step()
            queue, order, num_reqs = self.queue, delta.order, len(delta.order)
            target = self._dispatcher.dispatch(num_reqs, num_reqs * query_len, query_len)
            descriptor, why_eager = target.descriptor, FORCED if eager else self._why_eager(target)
            loops = steps > 1 and queue.can_loop(descriptor, why_eager)
            slot, step = queue.slot(steps)
            delta.write(slot.inputs, step, steps, loops, order is not self._order)
            self._order = None
            queue.launch(slot, descriptor, num_reqs, None, why_eager, steps, loops, delta.flag)
            self._order = order
            self._stats.count(descriptor, num_reqs * query_len, why_eager, steps)
            return Launch(step, steps, num_reqs, descriptor, why_eager, slot, queue.rings, delta.logprobs, order)

    def replay_words(self, words: LaunchInputs, descriptor: BatchDescriptor) -> Launch:
        """Submit a recorded launch at its size; see graphrt.bundle.bundle. Raises: see `begin`."""
        with self._exclusive:
            self._require(State.CAPTURED, "replay_words")
            self._guards.before_step()
            slot, step = self.queue.slot(words.steps)
            words.write(slot.inputs, step)
            self._order = None
            batch = words.batch() if self.plans_on_host is not None else None
            self.queue.launch(slot, descriptor, words.num_reqs, batch, "", steps=words.steps)
            return Launch(step, words.steps, words.num_reqs, descriptor, "", slot, self.queue.rings)

    def _handle(
        self, step: int, batch: Batch, descriptor: BatchDescriptor, why_eager: str, slot: StagingSlot
    ) -> StepHandle:
        sampled, asks = self._program.sampler is not None, batch.asks_logprobs
        return StepHandle(step, batch.num_reqs, descriptor, why_eager, slot, self.queue.rings, self, sampled, asks)

    def record(self, launches: int = 1, *, max_bytes: int = 1 << 30) -> Recording:
        """Record the next launches for a replay bundle; see graphrt.bundle.bundle. Each launch waits for the device.

        max_bytes   maximum host memory of the recording. A launch that needs more raises CapacityError, does not run,
                    and ends the recording

        Raises: ReplayError: while another recording is active; `stop()` it, or run its launches. ConfigError: if a
        number is below 1. CaptureError: before `capture()` and after `close()`.
        """
        with self._exclusive:
            self._require(State.CAPTURED, "record")
            refuse_ranks(self._calls, "record")
            return self.queue.record(launches, max_bytes)

    def compare(self, batch: Batch, *, descriptor: BatchDescriptor | None = None) -> StepComparison:
        """Run one step as a graph and eagerly from the same state, and restore what the step changed.

        Waits for the device, and overwrites the logits of the previous step. Restores request state and the KV slots
        that the step writes, but not state that the model owns. `stats()` does not count the step.

        Raises: see `replay`, and ReplayError if the batch has no graph.
        """
        with self._exclusive:
            self.request_tables.clear_left()
            target = self._dispatch("compare", batch, descriptor)
            refuse_ranks(self._calls, "compare")
            if why_eager := self._why_eager(target):
                raise ReplayError(f"compare: this batch has no graph ({why_eager}); pass a batch that has a graph")
            self.queue.drain()
            undo, size, results = StepUndo(self._program), target.descriptor, []
            for why_eager in ("", "compared with its graph"):
                slot, step = self.queue.slot()
                batch.write_inputs(slot.inputs, step, self._num_groups)
                logits = self.queue.try_out(slot, size, batch, undo, eager=bool(why_eager))
                handle = self._handle(step, batch, size, why_eager, slot)
                results.append(StepResult(handle.results, handle.faults, logits))
            return compare_results(size, *results)

    @property
    def plans_on_host(self) -> str | None:
        """Name of the backend if it plans each step on the host from the lengths in the batch, else None."""
        return self._backend.name if self._backend.plans_on_host() else None

    def between_steps(self, work: Callable[[StaticBuffers], _T]) -> _T:
        """Call `work` with the static buffers. Work that it queues on the current stream runs after all earlier
        launches and before all later launches. Returns the result of `work`.

        Raises: CaptureError: in the wrong state. ReplayError: during another call.
        """
        with self._exclusive:
            self._require(State.CAPTURED, "between_steps")
            with self._on_steps_stream() as buffers:
                return work(buffers)

    def mirror(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Within `between_steps`, call a function on every rank: a method of the tables, cache or static buffers."""
        if self._calls is not None:
            self._calls.call(function, *arguments)
        return function(*arguments)

    def follow(self) -> None:
        """Run what rank 0 launches, on another rank of the group, until rank 0 closes its manager.

        Raises: RankError: if another rank fails. ConfigError: on rank 0. CaptureError: in the wrong state.
        """
        with self._exclusive:
            self._require(State.CAPTURED, "follow")
            follower(self._calls).follow(self.queue.follow, self._on_steps_stream)

    @contextlib.contextmanager
    def _on_steps_stream(self) -> Iterator[StaticBuffers]:
        with self._on_stream, torch.inference_mode(), self._graphs.off_graph():
            yield self._buffers

    def stats(self) -> Stats:
        """Return the counters. The returned object is updated until `close()`."""
        self._stats.ring_waits = self.queue.waits
        self._guards.poll()
        self.queue.poll_shadow()
        return self._stats

    def check_weights(self, model: torch.nn.Module) -> None:
        """Check that every parameter and buffer of `model` is still the tensor that was captured.

        Slower than the check before every step, but it checks all tensors, and finds replaced parameters. Raises
        ReplayError if a tensor was moved, replaced or added. Only for managers built without `weights=`.
        """
        check_instance("model", model, torch.nn.Module, advice="pass weights= to the manager for other models")
        with self._exclusive:
            self._require(State.CAPTURED, "check_weights")
            self._guards.check_names(model)

    def reset(self) -> None:
        """Wait for the device, and reset request state, derived buffers and backend counters, for example after an
        aborted launch. Overwrites the logits of the previous step."""
        with self._exclusive:
            self._require(State.CAPTURED, "reset")
            self.queue.synchronize()
            self._order = None
            with self._on_stream, self._graphs.off_graph():
                self.mirror(self._reset)

    def _reset(self) -> None:
        self.queue.restart()
        self._buffers.reset()
        self.request_tables.reset()
        self._backend.reset()

    def latest_logits(self, handle: InFlight, copy: bool) -> torch.Tensor:
        """Return the logits of a launch's last step, which must be the latest step; see `StepHandle.logits`."""
        with self._exclusive:
            self._require(State.CAPTURED, "logits")
            return self.queue.latest_logits(handle, copy)

    def close(self) -> None:
        """Wait for steps in flight, then free graphs and buffers. The caller owns the KV cache and the weights.

        Handles keep the results of their steps. A second call does nothing.
        """
        with self._exclusive:
            if self._state is State.CLOSED:
                return
            with contextlib.suppress(RankError):  # steps in flight have ended, or wait for a rank that has failed
                self.queue.synchronize()
            self.stats()
            self._graphs.close()
            self._backend.close()
            self.request_tables.close()
            self.queue.close()
            self._guards.close()
            self._calls = None
            for name in ("_buffers", "_program"):  # already deleted if an earlier call was interrupted
                vars(self).pop(name, None)
            empty_cache(self.kv_cache.device)
            self._state = State.CLOSED

    def _require(self, state: State, call: str) -> None:
        if self._state is not state:
            raise wrong_state(self._state, state, call)
