"""The replay manager: capture a capture_sizes of decode steps once, then replay one graph per step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from graphrt.backends.choice import get_attn_backend
from graphrt.batch import Batch
from graphrt.cache.groups import layer_places
from graphrt.cache.kv_cache import KVCache
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.capture.dispatcher import Dispatch, Dispatcher
from graphrt.capture.graph import CapturedGraph, GraphReport, ordinary
from graphrt.capture.guard import named_weights
from graphrt.capture.inspect.findings import Audit
from graphrt.capture.inspect.memory import MemoryMap
from graphrt.capture.recorder import make_recorder
from graphrt.capture.staging import StagingSlot
from graphrt.config import RuntimeConfig
from graphrt.engine.batch_delta import BatchDelta, StopConditions
from graphrt.engine.compare import StepComparison, StepResult, compare_results
from graphrt.engine.graphs import StepGraphs
from graphrt.engine.guards import Guards
from graphrt.engine.handle import InFlight, StepHandle
from graphrt.engine.launch import Launch
from graphrt.engine.launch_inputs import LaunchInputs
from graphrt.engine.launch_queue import LaunchQueue
from graphrt.engine.lifecycle import Exclusive, OnStream, State, stream_on, wrong_state
from graphrt.engine.program import StepProgram, attention_layers, capacity_of, kept_tables, page_groups
from graphrt.engine.recording import Recording
from graphrt.engine.request_tables import RequestTables
from graphrt.engine.stats import Stats
from graphrt.engine.undo import StepUndo
from graphrt.kernels.checks import check_bool, check_callable, check_instance, check_int, check_named_tensors
from graphrt.kernels.errors import CaptureError, ReplayError, ShapeError, UnsupportedError
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.ops.sampling import MAX_VOCAB_SIZE
from graphrt.layer import ModelLayers
from graphrt.sampling import sample_tokens
from graphrt.spec import AttentionSpec
from graphrt.step import Model, Sampler

_T = TypeVar("_T")

_CAPTURED = State.CAPTURED  # to find a member of an enumeration takes as long as a call


class ReplayManager:
    """The decode step of one model over one paged KV cache, captured and replayed.

    Which to use: `ReplayManager` where pages and row ids are handed out by your scheduler; `Runtime`, which owns one
    manager, where graphrt is to size the cache and hand them out.

    model       maps a Step to logits [padded_reqs, vocab_size]
    kv_cache    its pages; may wrap tensors that the caller owns
    attention   the spec of every layer, or one spec for all; None takes those of the model's `Attention` layers
    vocab_size  width of the logits; the built-in sampler takes up to 2 ** 20
    sampler     maps logits and Step to tokens, in the graph; None leaves sampling to the caller (`handle.logits()`)
    stream      stream that steps run on; None is the stream current at construction. Graphs share memory, so all
                steps of one manager run on this one stream
    weights     named tensors that must not move; None takes the model's parameters and buffers if it is a Module
    page_tables [groups, max_num_reqs, pages_per_req] int32 device, contiguous: each row id's pages, where the caller
                keeps them; one group may leave the first dimension out. Each step reads them, and batches list no pages
    `request_tables` is what rows have by row id: logit biases, token masks, row tensors.

    Lifecycle: `capture()` once, then `replay(batch)` per step, then `close()`. Steps run in inference mode, whatever
    mode the caller is in. One call at a time: a second one, from another thread or from inside a model, raises
    ReplayError. Any thread may read tokens; logits belong to the thread that submits.

    Raises: ConfigError for arguments of wrong types or that do not fit each other, UnsupportedError where no attention
    backend serves them.
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
        page_tables: torch.Tensor | None = None,
    ) -> None:
        check_callable("model", model, advice="pass a function of a Step, or a torch.nn.Module")
        check_instance("kv_cache", kv_cache, KVCache, advice="wrap your tensors: KVCache(spec, k, v)")
        if sampler is not None:
            check_callable("sampler", sampler, advice="pass a function of logits and Step, or None")
        self.config = config = check_instance(
            "config", RuntimeConfig() if config is None else config, RuntimeConfig, advice="pass a RuntimeConfig"
        ).resolve()
        device = kv_cache.device
        recorder = make_recorder(device)  # first: it checks the allocator
        model_layers = ModelLayers(model)
        specs = model_layers.resolve(attention, len(kv_cache.group_of))
        places = layer_places(specs, kv_cache.groups)
        most = MAX_VOCAB_SIZE if sampler is sample_tokens else (1 << 31) - 1
        vocab_size = check_int("vocab_size", vocab_size, 1, most, advice="pass the width of the model's logits")
        self.vocab_size = vocab_size
        chosen = get_attn_backend(specs, kv_cache.groups, device, config=config)
        named = check_named_tensors("weights", named_weights(model) if weights is None else weights)
        self._stream = stream_on(device, stream)
        self._kv_cache: KVCache | None = kv_cache
        self._backend = chosen.make()
        self._num_groups = len(kv_cache.groups)
        self._whole_rows = not all(spec.is_cached for spec in specs)
        self._device = device
        self._on_stream = OnStream(self._stream, "graphrt.replay")
        self._exclusive = Exclusive("ReplayManager", "submit steps from one thread, and not from inside a model")
        max_encoder_len = config.max_encoder_len or 0
        groups = page_groups(kv_cache, config.max_seq_len, max_encoder_len)
        capacity = capacity_of(config, groups, vocab_size)
        self._inputs_words, self._buffers = capacity.inputs, StaticBuffers.allocate(capacity, device)
        self.request_tables = RequestTables(config, vocab_size, device, self.between_steps, self._on_steps_stream)
        self._program = StepProgram(
            model=model, sampler=sampler, backend=self._backend, layers=attention_layers(specs, places, kv_cache),
            kv_cache=kv_cache, buffers=self._buffers, vocab_size=vocab_size, max_seq_len=config.max_seq_len,
            max_encoder_len=max_encoder_len, model_layers=model_layers,
            page_tables=kept_tables(page_tables, self._buffers), request_tensors=self.request_tables.tensors,
        )  # fmt: skip
        with self._on_stream, torch.inference_mode():
            # Make the buffers valid: all requests are padding. It also loads Triton's first kernel before the capture.
            self._program.refresh(BatchDescriptor.mixed(config.max_num_tokens, config.max_num_reqs))
        self._graphs = StepGraphs(self._program, recorder, config.loop_sizes)
        assert config.decode_sizes is not None, "resolve() fills the capture_sizes"
        assert config.mixed_sizes is not None, "resolve() fills the capture_sizes"
        self._dispatcher = Dispatcher(
            max_num_reqs=config.max_num_reqs,
            max_num_tokens=config.max_num_tokens,
            query_len=config.query_len,
            decode_sizes=config.decode_sizes,
            mixed_sizes=config.mixed_sizes,
            graph_unsupported_reason=self._backend.graph_unsupported_reason,
            use_graphs=config.use_graphs,
        )
        self._stats = Stats(self._graphs.name, self._backend.name, chosen.reason)
        self._guards = Guards(
            self._program, self._graphs, self._exclusive, self._stats,
            weights=None if weights is None else named, page_tables=page_tables, check_weights=config.check_weights,
        )  # fmt: skip
        self.queue = LaunchQueue(self._program, self._graphs, self._stats, config, self._on_stream)
        self._launch_steps = config.launch_steps
        self._order: object = None  # that of `BatchDelta` which the device has
        self._state = State.NEW

    @property
    def kv_cache(self) -> KVCache:
        """The KV cache. Raises: CaptureError when the Runtime that owned it was closed."""
        if self._kv_cache is None:
            raise CaptureError(
                "kv_cache: the runtime that owned it was closed, and its memory given back; build a new one"
            )
        return self._kv_cache

    def forget_cache(self) -> None:
        """Let go of the KV cache after `close()`: handles that the caller keeps hold the manager."""
        self._require(State.CLOSED, "forget_cache")
        self._kv_cache = None

    @property
    def buffers(self) -> StaticBuffers:
        """The static buffers, for audits and tests. Raises: CaptureError after `close()`."""
        if self._state is State.CLOSED:
            raise CaptureError("buffers: this manager was closed, and its buffers were given back; build a new one")
        return self._buffers

    @property
    def state(self) -> State:
        return self._state

    @property
    def descriptors(self) -> tuple[BatchDescriptor, ...]:
        """The sizes that are captured, largest first."""
        return self._dispatcher.captured()

    def graph(self, descriptor: BatchDescriptor) -> CapturedGraph:
        """The graph of a size, as `graphrt.capture.inspect` takes it. Raises: ConfigError for one that is not captured,
        CaptureError in the wrong state."""
        self._require(State.CAPTURED, "graph")
        return self._graphs.graph(descriptor)

    def memory_map(self, descriptor: BatchDescriptor) -> MemoryMap:
        """Whose memory the graph of a size may work on, for an audit. Raises: as `graph`."""
        self._require(State.CAPTURED, "memory_map")
        return self._guards.memory(descriptor)

    def audit(self, descriptor: BatchDescriptor) -> Audit:
        """Whether every address that the graph of a size holds lies in memory that stays: `print` it, or
        `raise_if_any()`. Raises: as `graph`."""
        self._require(State.CAPTURED, "audit")
        return self._guards.audit(descriptor)

    def capture(self, progress: Callable[[GraphReport], None] | None = None) -> None:
        """Capture a graph per size of the capture_sizes; `progress` is called with the report of each.

        Nothing is captured with `use_graphs=False` or a backend without graph support; `replay` then says why.

        Raises: CaptureError when the step cannot be captured (a host read, a moved buffer, a wrong shape) or the
        manager is not new; ConfigError where a null page that attention may read holds NaN or infinity, or a scale of
        an fp8 cache is one of these or 0. After a failed capture the manager is still new.
        """
        if progress is not None:
            check_callable("progress", progress, advice="pass a function of a GraphReport, or None")
        with self._exclusive:
            self._require(State.NEW, "capture")
            self.kv_cache.check_contents()
            start = time.perf_counter()
            self._guards.before_capture()
            with OnStream(self._stream, "graphrt.capture"), torch.inference_mode():
                with torch.inference_mode(False):  # what `reset` changes, in whatever mode
                    self._backend.allocate()
                self._graphs.capture(self._dispatcher.captured(), progress)
            if self._stream is not None:
                self._stream.synchronize()
            self._buffers.step_ring.fill_(-1)  # what a warm-up published must not pass for a step
            self._buffers.cursor.zero_()
            self._stats.graphs = self._graphs.reports
            self._stats.capture_seconds = time.perf_counter() - start
            self._guards.after_capture()
            self._state = State.CAPTURED

    def replay(self, batch: Batch, *, eager: bool = False, descriptor: BatchDescriptor | None = None) -> StepHandle:
        """Submit one decode step and return its handle; waits only when `config.most_in_flight` are in flight.

        eager       run the same verbs on the same static buffers outside of a graph. The step changes row state and KV
                    as any step does: submitting a batch twice is two steps. `compare` runs one step both ways
        descriptor  run at this size of the capture_sizes, not at the smallest with room: ranks of a group agree on
                    one, and
                    an idle rank submits `Batch.empty()` at it

        Raises: ShapeError for what is no batch, and for a row that is no whole sequence where there are encoder layers,
        CapacityError for one that is too large, ConfigError for a descriptor that is not of the capture_sizes or an
        `eager`
        that is no bool, ReplayError for a moved weight or a call inside another one, UnsupportedError for rows that the
        config does not allow (mixed_batches, penalties, token_masks), CaptureError in the wrong state; nothing has been
        written then. Faults that only the device sees are raised by the handle.
        """
        eager = check_bool("eager", eager, advice="pass a bool")
        with self._exclusive:
            self.request_tables.clear_left()  # a row here may have the id of a session's row that is gone
            target = self._dispatch("replay", batch, descriptor)
            why_eager = "asked for by the caller" if eager else target.why_eager
            slot, step = self._launch(batch, target.descriptor, why_eager)
            handle = self._handle(step, batch, target.descriptor, why_eager, slot)
            self._stats.count(target.descriptor, batch.num_tokens, why_eager, eager)
            return handle

    def _dispatch(self, call: str, batch: Batch, descriptor: BatchDescriptor | None) -> Dispatch:
        """Step 1, after everything that the host can check."""
        self._require(_CAPTURED, call)
        check_instance(
            "batch", batch, Batch, advice="make one with Batch(...) or Batch.from_requests", error=ShapeError
        )
        config, num_reqs, num_tokens = self.config, len(batch.req_indices), len(batch.tokens)
        self._dispatcher.check_room(num_reqs, num_tokens)
        batch.check_capacity(
            config.max_seq_len, self._inputs_words, self._num_groups, config.max_encoder_len or 0, self._whole_rows
        )
        if self._program.page_tables is not None and len(batch.page_ids):
            raise ShapeError("batch.page_ids: expected none beside page_tables, got some; write them to your tables")
        if batch.needs:
            batch.check_needs(config, self._program.vocab_size)
        self._guards.before_step()
        uniform = batch.is_uniform(config.query_len)
        if not (uniform or config.mixed_batches):
            raise batch.mixed_error(config.query_len)
        # 1 dispatch: the captured size that serves this batch, or the reason why none does
        if descriptor is None:
            return self._dispatcher.dispatch(num_reqs, num_tokens, uniform)
        check_instance("descriptor", descriptor, BatchDescriptor, advice="take one of manager.descriptors")
        if descriptor.kind is GraphKind.MIXED and not config.mixed_batches:
            raise UnsupportedError(
                f"descriptor: expected a decode size with mixed_batches=False, got {descriptor}; take a decode one"
            )
        return self._dispatcher.at(descriptor, num_reqs, num_tokens, uniform)

    def begin(self, batch: Batch, ends: StopConditions, *, eager: bool = False) -> Launch:
        """Submit one step as `replay` does, and keep what it says of its rows: `advance` may follow.

        A row whose seq_len is SEQ_LEN_FROM_DEVICE goes on from the length that the device knows; if its sequence has
        ended
        there, the row is nobody's. Raises: as `replay`.
        """
        with self._exclusive:
            target = self._dispatch("begin", batch, None)
            why_eager = "asked for by the caller" if eager else target.why_eager
            slot, step = self._launch(batch, target.descriptor, why_eager, ends)
            self._stats.count(target.descriptor, batch.num_tokens, why_eager, eager)
            asks = batch.asks_logprobs
            rings, ids = self.queue.rings, batch.req_indices
            return Launch(step, 1, batch.num_reqs, target.descriptor, why_eager, slot, rings, asks, ids)

    def advance(self, delta: BatchDelta, *, steps: int = 1, eager: bool = False) -> Launch:
        """Let rows go on by up to `steps` tokens, each from its last token on, with what `begin` said of it. Waits only
        when `most_in_flight` launches of the config are in flight.

        Raises: as `replay`; nothing has been written then. If a step raises, earlier ones may have run; see ChangeFlag.
        """
        steps = check_int("steps", steps, 1, self._launch_steps, advice="raise RuntimeConfig.launch_steps")
        with self._exclusive:
            self._require(_CAPTURED, "advance")
            self._guards.before_step()
            queue, order, num_reqs = self.queue, delta.order, len(delta.order)
            target = self._dispatcher.dispatch(num_reqs, num_reqs, True)
            descriptor, why_eager = target.descriptor, "asked for by the caller" if eager else target.why_eager
            loops = steps > 1 and queue.can_loop(descriptor, why_eager)
            slot, step = queue.slot(steps)
            delta.write(slot.inputs, step, steps, loops, order is not self._order)
            self._order = None
            queue.launch(slot, descriptor, num_reqs, None, why_eager, steps, loops, delta.flag)
            self._order = order
            self._stats.count(descriptor, num_reqs, why_eager, eager, steps)
            return Launch(step, steps, num_reqs, descriptor, why_eager, slot, queue.rings, delta.logprobs, order)

    def replay_words(self, words: LaunchInputs, descriptor: BatchDescriptor) -> Launch:
        """Submit a launch as it was recorded, at its size; see graphrt.bundle.bundle. Raises: as `begin`."""
        with self._exclusive:
            self._require(State.CAPTURED, "replay_words")
            self._guards.before_step()
            slot, step = self.queue.slot(words.steps)
            words.write(slot.inputs, step)
            self._order = None
            batch = words.batch() if self.plans_on_host is not None else None
            self.queue.launch(slot, descriptor, words.num_reqs, batch, "", steps=words.steps)
            return Launch(step, words.steps, words.num_reqs, descriptor, "", slot, self.queue.rings)

    def _launch(
        self, batch: Batch, descriptor: BatchDescriptor, why_eager: str, ends: StopConditions | None = None
    ) -> tuple[StagingSlot, int]:
        """Steps 2 and 3, at a size or eagerly with a reason: the slot, and the step's number."""
        slot, step = self._write(batch, ends)
        # 3 one launch, which reads the slot
        self.queue.launch(slot, descriptor, batch.num_reqs, batch, why_eager, flag=ends.flag if ends else None)
        return slot, step

    def _write(self, batch: Batch, ends: StopConditions | None = None) -> tuple[StagingSlot, int]:
        # 2 write the batch into a slot that no launch in flight uses
        slot, step = self.queue.slot()
        words = batch.write_inputs(slot.inputs, step, self._num_groups)
        if ends is not None:
            ends.write(slot.inputs, words)
            self._order = None
        return slot, step

    def _handle(
        self, step: int, batch: Batch, descriptor: BatchDescriptor, why_eager: str, slot: StagingSlot
    ) -> StepHandle:
        # 4 a handle, which waits for this step alone
        sampled, asks = self._program.sampler is not None, batch.asks_logprobs
        return StepHandle(step, batch.num_reqs, descriptor, why_eager, slot, self.queue.rings, self, sampled, asks)

    def record(self, launches: int = 1, *, max_bytes: int = 1 << 30) -> Recording:
        """Record the next launches, for a replay bundle: see graphrt.bundle.bundle. Each of them waits for the device.

        max_bytes   that they may take on the host; a launch that would take more raises CapacityError, and is not run.
                    The recording ends there

        Raises: ReplayError while another recording is under way: `stop()` that one, or run its launches; ConfigError
        for numbers below 1, CaptureError in the wrong state.
        """
        with self._exclusive:
            self._require(State.CAPTURED, "record")
            launches = check_int("launches", launches, 1, advice="pass how many to record")
            max_bytes = check_int("max_bytes", max_bytes, 1, advice="pass what the host can spare")
            return self.queue.record(launches, max_bytes)

    def compare(self, batch: Batch, *, descriptor: BatchDescriptor | None = None) -> StepComparison:
        """Run one step as a graph and eagerly, from the same state, and restore what the step changed.

        Waits for the device, and counts as no step; logits of the step before are gone. Row state and the KV slots that
        the step writes are as before afterwards, so `replay` of the same batch may follow. State that the model itself
        keeps is not restored.

        Raises: as `replay`; and ReplayError for a batch that has no graph.
        """
        with self._exclusive:
            self.request_tables.clear_left()
            target = self._dispatch("compare", batch, descriptor)
            if target.why_eager:
                raise ReplayError(
                    f"compare: expected a batch that replays a graph, got one that does not: {target.why_eager}"
                )
            self.queue.drain()
            undo, size, results = StepUndo(self._program), target.descriptor, []
            for why_eager in ("", "compared with its graph"):
                slot, step = self._write(batch)
                logits = self.queue.try_out(slot, size, batch, undo, eager=bool(why_eager))
                handle = self._handle(step, batch, size, why_eager, slot)
                results.append(StepResult(handle.results, handle.faults, logits))
            return compare_results(size, *results)

    @property
    def plans_on_host(self) -> str | None:
        """The backend's name where it plans each step on the host, from the batch's lengths."""
        return self._backend.name if self._backend.plans_on_host() else None

    def between_steps(self, work: Callable[[StaticBuffers], _T]) -> _T:
        """Call `work` with the static buffers. What it queues on the current stream runs after all launches so far and
        before later ones. Returns the result of `work`.

        Raises: CaptureError: in the wrong state. ReplayError: during another call.
        """
        with self._exclusive:
            self._require(State.CAPTURED, "between_steps")
            with self._on_steps_stream() as buffers:
                return work(buffers)

    @contextlib.contextmanager
    def _on_steps_stream(self) -> Iterator[StaticBuffers]:
        with self._on_stream, torch.inference_mode(), self._graphs.off_graph():
            yield self._buffers

    def stats(self) -> Stats:
        """Counters so far; a live object. After `close()` the last ones."""
        self._stats.ring_waits = self.queue.waits
        self._guards.poll()
        self.queue.poll_shadow()
        return self._stats

    def check_weights(self, model: torch.nn.Module) -> None:
        """Raise ReplayError if a parameter or buffer of `model` is no longer the tensor that was captured.

        Slower and wider than the check before every step: it also sees parameters that were replaced by new objects.
        """
        check_instance("model", model, torch.nn.Module, advice="other models name their tensors by weights=")
        with self._exclusive:
            self._require(State.CAPTURED, "check_weights")
            self._guards.check_names(model)

    def reset(self) -> None:
        """Wait for the device and put row states, derived buffers and the backend's counters back to their initial
        contents, as after a launch that was aborted. Logits of the step before are gone."""
        with self._exclusive:
            self._require(State.CAPTURED, "reset")
            self.queue.drain()
            self.queue.restart()
            self._order = None
            with self._on_stream, self._graphs.off_graph():
                if self._stream is not None:
                    self._stream.synchronize()
                self._buffers.reset()
                self.request_tables.reset()
                self._backend.reset()

    def latest_logits(self, handle: InFlight, copy: bool) -> torch.Tensor:
        """Logits of a launch's last step, which must be the latest; see `StepHandle.logits`."""
        step, descriptor, num_reqs = handle.step + handle.steps - 1, handle.descriptor, handle.num_reqs
        with self._exclusive:
            self._require(State.CAPTURED, "logits")
            latest = self.queue.next_step - 1
            if step != latest:
                raise ReplayError(
                    f"logits: expected the latest step {latest}, got step {step}; its logits were overwritten, "
                    "use logits(copy=True) before the next replay"
                )
            moved = bool(self._program.decode_len(descriptor))
            with self._on_stream:  # between this step and the next, which overwrites them
                logits = ordinary(self.queue.logits(descriptor, num_reqs))
                if copy and not moved:
                    logits = logits.clone()
            if self._stream is not None:
                reader = torch.cuda.current_stream(self._device)
                reader.wait_stream(self._stream)
                if copy or moved:
                    logits.record_stream(reader)
            return logits

    def close(self) -> None:
        """Wait for steps in flight, then drop graphs and buffers. The KV cache and the weights are the caller's.

        Handles keep the results of their steps. Closing twice is fine.
        """
        with self._exclusive:
            if self._state is State.CLOSED:
                return
            self.queue.drain()
            if self._stream is not None:
                self._stream.synchronize()
            self.stats()
            self._graphs.close()
            self._backend.close()
            self.request_tables.close()
            self.queue.close()
            self._guards.close()
            for name in ("_buffers", "_program"):  # gone already if this call repeats one that was interrupted
                vars(self).pop(name, None)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._state = State.CLOSED

    def _require(self, state: State, call: str) -> None:
        if self._state is not state:
            raise wrong_state(self._state, state, call)
