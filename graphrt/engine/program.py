"""The decode step that is captured: refresh, schedule, model and sampling, on the static buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.cache.groups import KVLocation, longest_of
from graphrt.cache.kv_cache import KVCache
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.capture.guard import named_weights
from graphrt.config import RuntimeConfig
from graphrt.context_parallel import ContextParallel
from graphrt.draft_model import DraftModel, slots_ahead
from graphrt.engine.ranks import context_of
from graphrt.engine.request_tables import sampling_extents
from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.cache.path import PathMover
from graphrt.kernels.checks import check_instance, check_tensor, shown
from graphrt.kernels.errors import ConfigError, ShapeError
from graphrt.kernels.metadata.arguments import check_tables
from graphrt.kernels.metadata.buffers import Capacity, PageGroup, StaticBuffers
from graphrt.kernels.metadata.draft_tree import follow_tree, write_tree
from graphrt.kernels.metadata.localize_kv import localize_kv
from graphrt.kernels.metadata.logprobs import write_logprobs
from graphrt.kernels.metadata.refresh import refresh
from graphrt.kernels.metadata.step_inputs import inputs_size
from graphrt.kernels.metadata.unpack import unpack
from graphrt.kernels.metadata.write_drafts import write_drafts
from graphrt.kernels.metadata.write_outputs import write_outputs
from graphrt.kernels.ops.collectives import VocabShards, gather_logits
from graphrt.kernels.ops.rejection import store_draft_logprobs
from graphrt.kernels.ops.sampling_logprobs import token_logprobs
from graphrt.kernels.ops.sampling_state import record_tokens
from graphrt.layer import ModelLayers
from graphrt.metadata import StepMetadata
from graphrt.proposer import Proposer
from graphrt.sampling import sample_tokens, verify_drafts
from graphrt.spec import AttentionSpec
from graphrt.step import Model, Sampler, Step

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_TOKENS = (torch.int32, torch.int64)
_MOST_VIEWS = 256  # maximum of sizes whose views are cached, because eager batches may have any size


@dataclass(frozen=True, slots=True)
class StepProgram:
    """The model, sampler, backend and buffers of a decode step. Graphs capture `run`, and eager steps call it."""

    model: Model
    sampler: Sampler | None
    backend: AttentionBackend
    layers: tuple[AttentionLayer, ...]
    kv_cache: KVCache
    buffers: StaticBuffers
    vocab_size: int
    max_seq_len: int
    max_pages: tuple[int, ...]  # width of the block table of each KV group
    model_layers: ModelLayers
    proposer: Proposer | None = None
    page_tables: torch.Tensor | None = None  # owned by the caller
    request_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    shards: VocabShards | None = None  # set if the model's logits have the columns of this rank only
    truncation: bool = True  # whether requests may have top-k, top-p or min-p
    path_mover: PathMover | None = field(init=False, repr=False, compare=False)  # None: drafts form chains
    context: ContextParallel | None = field(init=False, repr=False, compare=False)  # None: ranks share no KV
    _views: dict[BatchDescriptor, tuple[StaticBuffers, StepMetadata]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        mover = _path_mover(self.kv_cache) if len(self.buffers.path_rows) else None
        object.__setattr__(self, "path_mover", mover)
        context = context_of(self.kv_cache.groups, None if self.shards is None else self.shards.group)
        object.__setattr__(self, "context", context)

    def run(self, descriptor: BatchDescriptor) -> torch.Tensor:
        """Run the step at one size, and return the logits [positions x padded_reqs, vocab_size]; without a sampler,
        any width.

        Capture-safe: the device reads all values that vary between steps from the static buffers.

        Raises: ShapeError: if the model or the sampler returns a wrong shape, dtype or device.
        """
        # A graph ignores the caller's autocast, so captured operations and eager steps must not depend on it.
        with torch.autocast(self.kv_cache.device.type, enabled=False):
            return self._run(descriptor)

    def _run(self, descriptor: BatchDescriptor) -> torch.Tensor:
        step = self.refresh(descriptor)
        self.backend.schedule(step.metadata)
        with self.model_layers.bound_to(step):
            logits = self.model(step)
        reqs, positions, device = descriptor.padded_reqs, self.positions(descriptor), self.kv_cache.device
        width = None if self.sampler is None else self.vocab_size
        if self.shards is not None and isinstance(logits, torch.Tensor) and logits.shape[-1] == self.shards.columns:
            if self.splits_logits:
                width = self.shards.columns
            else:
                logits = gather_logits(logits, self.shards)
        if width is not None and isinstance(logits, torch.Tensor) and logits.dim() == 2 and logits.shape[1] != width:
            raise ShapeError(
                f"logits: expected vocab_size={width} per request, got {logits.shape[1]}; pass that number as "
                f"vocab_size"
            )
        check_tensor("logits", logits, shape=(reqs * positions, width), dtype=_FLOATS, device=device)
        if self.sampler is None:
            write_outputs(step.buffers, None, vocab_size=self.vocab_size)
            return logits
        if depth := self.tree_depth(descriptor):
            self._sample(step, logits[:reqs], 0, False)
            for position, rows in enumerate(step.buffers.path_rows.view(depth, reqs), 1):
                self._sample(step, logits.index_select(0, rows), position, position == depth)
            assert self.path_mover is not None, "made with the buffers of trees"
            self.path_mover.move(step.buffers)
        else:
            for position, of_position in enumerate(logits.view(positions, reqs, -1)):
                self._sample(step, of_position, position, position == positions - 1)
        if self.proposer is not None:
            self._propose(step, self.proposer(step if self.draft_model else step.without_layers()))
        return logits

    def _sample(self, step: Step, logits: torch.Tensor, position: int, last: bool) -> None:
        """Sample one token of each request that has reached this position, and store the tokens."""
        b, reqs, device = step.buffers, step.descriptor.padded_reqs, self.kv_cache.device
        assert self.sampler is not None, "the caller checks it"
        if self.buffers.token_history.shape[1]:
            self._record(step, position)
        rejects = self.buffers.draft_logprobs.shape[2] and not last
        tokens = verify_drafts(logits, step, position) if rejects else self.sampler(logits, step)
        check_tensor("the sampler's tokens", tokens, shape=(reqs,), dtype=_TOKENS, device=device)
        if columns := self.buffers.logprob_ring.shape[3]:
            asked = torch.where(b.logprob_tokens >= 0, b.logprob_tokens, tokens.int()) if not position else tokens.int()
            result = token_logprobs(logits, asked, b.logprobs, max_top=columns - 1)
            write_logprobs(b, asked, result, position=position, last=last)
        if len(b.path_rows) and not last:
            follow_tree(b, tokens, position)
        write_outputs(b, tokens, vocab_size=self.vocab_size, position=position)

    def _propose(self, step: Step, proposed: object) -> None:
        """Store drafts for the next step, with their log-probabilities for rejection sampling, or their parents."""
        b = step.buffers
        found = proposed if isinstance(proposed, tuple) else (proposed, None)
        if len(found) != 2 or not isinstance(found[0], torch.Tensor):
            raise ShapeError(
                f"proposer: expected drafts {[*b.drafts.shape]} int32, or drafts and a second tensor, got "
                f"{shown(proposed)}; see graphrt.proposer.Proposer"
            )
        drafts, others = found
        if b.draft_logprobs.shape[2]:
            if others is None:
                raise ConfigError(
                    "proposer: expected drafts and their log-probabilities with rejection_sampling=True, got drafts "
                    "only; return both, or use rejection_sampling=False"
                )
            store_draft_logprobs(others, b.req_indices, b.draft_logprobs)
            others = None
        write_drafts(b, drafts, others, vocab_size=self.vocab_size)

    def _record(self, step: Step, position: int) -> None:
        """Record the tokens before this position, of the step or one accepted draft, in the request state."""
        b = step.buffers
        last = b.logits_indices.view(-1, len(b.req_indices))[position]
        if position and len(b.path_rows):
            last = b.logits_indices[b.path_rows.view(-1, len(b.req_indices))[position - 1]]
        if not position:
            record_tokens(
                b.input_ids, b.query_start_loc, last, b.sample_lens, b.req_indices, b.prompt_lens, step.token_counts
            )
        elif step.penalties is not None:  # `write_outputs` has stored the draft itself
            starts = torch.nn.functional.pad(last.int(), (0, 1))  # the last element is not read
            accepted = b.req_indices.where(b.drafts_left >= 0, -1)
            record_tokens(b.input_ids, starts, last, b.sample_lens, accepted, b.prompt_lens, step.token_counts)

    @property
    def splits_logits(self) -> bool:
        """Whether each rank has logits of its own tokens only, because nothing but `sample_tokens` reads them. A CUDA
        graph cannot choose the requests whose logits ranks exchange, so with truncation GPUs gather all logits."""
        b, own = self.buffers, self.sampler is not sample_tokens
        own |= self.truncation and self.kv_cache.device.type == "cuda"
        return not (self.shards is None or own or b.logprob_ring.shape[3] or b.draft_logprobs.shape[2])

    @property
    def draft_model(self) -> DraftModel | None:
        """The proposer, if it is a draft model."""
        return self.proposer if isinstance(self.proposer, DraftModel) else None

    @property
    def tokens_ahead(self) -> int:
        """Maximum number of tokens after those of the step for which the proposer writes KV."""
        return 0 if self.draft_model is None else self.buffers.drafts.shape[1]

    def slots(self, step: Step) -> tuple[torch.Tensor, ...]:
        """Return the KV slots that a refreshed step may write, by KV group; -1 for none."""
        mappings = step.metadata.slot_mappings
        if not (count := self.tokens_ahead):
            return mappings
        ahead = slots_ahead(step, self.positions(step.descriptor) - 1 + count)  # from the first sampled position on
        return tuple(torch.cat((of, ahead[:, group].flatten())) for group, of in enumerate(mappings))

    def weights(self, model: Model) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of the model and of its draft model, if they are modules."""
        yield from named_weights(model)
        if self.draft_model is not None:
            yield from ((f"draft model's {name}", of) for name, of in named_weights(self.draft_model.model))

    def refresh(self, descriptor: BatchDescriptor) -> Step:
        """Compute the derived buffers of one size from the input ring. Capture-safe, like `run`."""
        step = self.view(descriptor)
        unpack(step.buffers, self.positions(descriptor), only_chains=not descriptor.query_len)
        refresh(
            step.buffers,
            max_seq_len=self.max_seq_len,
            vocab_size=self.vocab_size,
            query_len=descriptor.query_len,
            seq_len_fill=self.backend.seq_len_fill,
            decode_len=self.decode_len(descriptor),
            tables=self.page_tables,
        )
        if self.tree_depth(descriptor):
            write_tree(step.buffers)
        if (context := self.context) is not None:
            ranks, rank = context.group.size(), context.group.rank()
            localize_kv(step.buffers, ranks=ranks, rank=rank, interleave_size=context.interleave_size)
        return step

    def positions(self, descriptor: BatchDescriptor) -> int:
        """Return the maximum number of tokens of a request that have logits in a step of this size."""
        return descriptor.query_len or 1 + self.buffers.drafts.shape[1]

    def tree_depth(self, descriptor: BatchDescriptor) -> int:
        """Return the maximum accepted drafts of a request in a step of this size if drafts form trees, else 0."""
        return len(self.buffers.path_rows) // len(self.buffers.req_indices) if descriptor.query_len > 1 else 0

    def logits_of(self, logits: torch.Tensor, descriptor: BatchDescriptor, num_reqs: int) -> torch.Tensor:
        """Return the logits of a step in the order of its batch; a copy if the step reordered requests.

        [num_reqs, vocab], or [positions, num_reqs, vocab] if the step may verify drafts.
        """
        rows = logits.view(self.positions(descriptor), descriptor.padded_reqs, -1)
        if self.decode_len(descriptor):
            rows = rows.index_select(1, self.buffers.buffer_rows[:num_reqs])
        return rows[:, :num_reqs] if len(rows) > 1 else rows[0, :num_reqs]

    def decode_len(self, descriptor: BatchDescriptor) -> int:
        """Return the number of new tokens per request of the decode part at this size; 0 if the step has only one
        part."""
        return self.backend.decode_len if descriptor.kind is GraphKind.MIXED else 0

    def view(self, descriptor: BatchDescriptor) -> Step:
        """Return a new Step over the static buffers at one size. Its views are cached."""
        if descriptor not in self._views:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # views of the same mode as the buffers, for any first caller
                sizes = descriptor.padded_reqs, descriptor.padded_tokens, self.positions(descriptor)
                buffers = self.buffers.cut(*sizes, self.tree_depth(descriptor))
                longest = self.max_seq_len + self.buffers.drafts.shape[1]  # drafts that are missing are padding
                of_size = (descriptor, longest, self.max_pages, self.decode_len(descriptor))
                self._views[descriptor] = buffers, StepMetadata.of(buffers, *of_size)
        buffers, metadata = self._views[descriptor]
        return Step(
            descriptor=descriptor,
            metadata=metadata,
            buffers=buffers,
            backend=self.backend,
            layers=self.layers,
            vocab_size=self.vocab_size,
            request_tensors=self.request_tensors,
            shards=self.shards,
            hidden_layers=() if self.draft_model is None else self.draft_model.hidden_layers,
            context=self.context,
        )


def page_groups(kv_cache: KVCache, max_seq_len: int, max_encoder_len: int) -> tuple[PageGroup, ...]:
    """Return the KV groups in the form that the refresh reads; at least one.

    writers_at numbers the pages of all pools consecutively, for the detection of write conflicts.
    """
    writers_at = [sum(kv_cache.pool_pages[:pool]) for pool in range(len(kv_cache.pool_pages))]
    groups = []
    for spec in kv_cache.groups:
        assert isinstance(spec.null_page, int), "resolved by the cache"
        groups.append(
            PageGroup(
                page_size=spec.page_tokens,
                num_pages=kv_cache.pool_pages[spec.pool],
                null_page=spec.null_page,
                max_pages=spec.pages_for(longest_of(spec, max_seq_len, max_encoder_len)),
                window=spec.sliding_window or 0,
                chunk=spec.attention_chunk_size or 0,
                writers_at=writers_at[spec.pool],
                max_encoder_len=max_encoder_len if spec.cross else 0,
            )
        )
    # Without KV groups, add one group in which no request needs a page and no page is written.
    return tuple(groups) or (PageGroup(page_size=1, num_pages=1, null_page=0, max_pages=1, max_encoder_len=1),)


def capacity_of(
    config: RuntimeConfig, groups: Sequence[PageGroup], vocab_size: int, *, interleaves: bool = False
) -> Capacity:
    """Return the extents of a runtime's static buffers, with room for the longest page list of every request."""
    rows, tokens = config.max_num_reqs, config.max_num_tokens
    return Capacity(
        reqs=rows,
        tokens=tokens,
        req_indices=rows,
        inputs=inputs_size(rows, tokens, rows * sum(group.max_pages for group in groups), len(groups)),
        ring=config.most_in_flight,
        page_groups=tuple(groups),
        launch_steps=config.launch_steps,
        interleaves=interleaves,
        **sampling_extents(config, vocab_size),
    )


def check_page_tables(tables: torch.Tensor | None, buffers: StaticBuffers) -> torch.Tensor | None:
    """Return the caller's page tables, with a first dimension for KV groups. Raises: ShapeError: if the tables have the
    wrong shape."""
    if tables is None:
        return None
    check_instance("page_tables", tables, torch.Tensor, advice="pass an int32 tensor, or None", error=ShapeError)
    if tables.dim() == 2 and buffers.page_table.shape[0] == 1:
        check_tensor("page_tables", tables, shape=tuple(buffers.page_table.shape[1:]))
        tables = tables[None]
    check_tables("page_tables", tables, buffers)
    return tables


def _path_mover(kv_cache: KVCache) -> PathMover:
    """Return the mover of accepted drafts in all KV groups that steps write."""
    written = (() if spec.cross else kv_cache.of_group(group) for group, spec in enumerate(kv_cache.groups))
    return PathMover([[tensor for tensors in of_group for tensor in tensors] for of_group in written])


def attention_layers(
    specs: Sequence[AttentionSpec], locations: Sequence[KVLocation | None], kv_cache: KVCache
) -> tuple[AttentionLayer, ...]:
    """Return every layer with its tensors in the cache. Layers with equal ALiBi slopes share one tensor of slopes."""
    slopes = {
        values: torch.tensor(values, dtype=torch.float32, device=kv_cache.device)
        for values in {spec.alibi_slopes for spec in specs} - {None}
    }
    layers = []
    for index, (spec, location) in enumerate(zip(specs, locations, strict=True)):
        of_alibi = None if spec.alibi_slopes is None else slopes[spec.alibi_slopes]
        if location is None:
            nothing = torch.empty(0, 1, spec.num_kv_heads, 0, dtype=spec.dtype, device=kv_cache.device)
            layers.append(AttentionLayer(index, spec, nothing, nothing, alibi_slopes=of_alibi, writes=False))
            continue
        at, scaled = location.cache_layer, kv_cache.groups[location.group].dtype in FP8_DTYPES
        layers.append(
            AttentionLayer(
                index,
                spec,
                kv_cache.k[at],
                kv_cache.v[at],
                k_scale=kv_cache.k_scales[at] if scaled else None,
                v_scale=kv_cache.v_scales[at] if scaled else None,
                alibi_slopes=of_alibi,
                group=location.group,
                writes=location.writes,
            )
        )
    return tuple(layers)
