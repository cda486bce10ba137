"""A draft model: a proposer with attention layers of its own, which runs in the launch of the model it drafts for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from graphrt.backends.base import AttentionLayer
from graphrt.cache.groups import kv_groups
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.config import RequestTensor, RuntimeConfig
from graphrt.kernels.checks import check_callable, check_int, check_tensor
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.types import NO_TOKEN, RequestStatus
from graphrt.layer import ModelLayers
from graphrt.metadata import StepMetadata
from graphrt.proposer import Proposer
from graphrt.sampling import draw_draft, sample_tokens
from graphrt.spec import AttentionKind, AttentionSpec, KVCacheSpec
from graphrt.step import Model, Step

HIDDEN = "hidden states of the draft model"
"""Name of the request tensor that keeps hidden states from one step to the next."""
_MOST_PADDING = 128
"""Maximum number of tokens by which vocabularies of one tokenizer differ. Models pad them: Qwen2.5 0.5B to 151,936, and
7B to 152,064. llama.cpp has the same bound."""


class DraftModel:
    """Proposes the tokens that a smaller model samples. Pass it as `proposer=` to Runtime.

    The draft model has KV groups of its own in the runtime's cache. After the tokens of a step are sampled, it first
    computes the tokens of the step, prompts included, so that its KV covers the same tokens. Then it computes
    `num_speculative_tokens` steps of one token per request. All this work is captured with the model.

    A draft is sampled with the request's own parameters, seed and position, like the token that it is compared with. So
    a draft model that equals the model drafts exactly the sampled tokens, at any temperature. With
    `RuntimeConfig.rejection_sampling`, drafts use different noise. Penalties count the tokens before the step. A token
    without a page for its KV is not computed, and ends the request's drafts.

    With `hidden_size`, the draft model is a head, such as EAGLE or MTP. Both models then call `step.keep_hidden`, and
    the head reads `step.previous_hidden`: for each token, the hidden state that predicted it. This is the model's
    hidden state for tokens of the sequence and the first draft, and the head's own for later drafts. An EAGLE-3 head
    reads the concatenated inputs of several layers of the model, and `combine` maps them to one state per token.

    model       maps a Step to logits [padded_reqs, vocab_size]; called with sizes that differ from the step's
    attention   the spec of every layer; None: the specs of the model's `Attention` layers
    vocab_size  width of the logits; may differ from the runtime's by up to 128 tokens of padding, which are not drafted
    hidden_size width of the hidden states that the draft model reads, in the dtype of its first layer; None: it reads
                tokens only
    hidden_layers  ascending indices of the model's layers whose inputs are read; (): the states that give the logits
    combine     maps the states that the model kept to [padded_tokens, hidden_size]. None: they have this width.
                Must be capture-safe

    Raises:
        ConfigError: if an argument has the wrong type, or the model has no layers.
        UnsupportedError: if a layer is not a decoder layer.
    """

    def __init__(
        self,
        model: Model,
        attention: Sequence[AttentionSpec] | None = None,
        *,
        vocab_size: int,
        hidden_size: int | None = None,
        hidden_layers: Sequence[int] = (),
        combine: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        check_callable("model", model, advice="pass a function of a Step, or a torch.nn.Module")
        self.model, self._model_layers = model, ModelLayers(model)
        self.specs = self._model_layers.resolve(attention, None)
        _check_decoder(self.specs)
        self.vocab_size = check_int("vocab_size", vocab_size, 1, advice="pass the width of the draft model's logits")
        if hidden_size is not None:
            check_int("hidden_size", hidden_size, 1, advice="pass the width that the model keeps, or None")
        self.hidden_size, self.hidden_layers, self.combine = hidden_size, tuple(hidden_layers), combine

    def layers_after(self, specs: Sequence[AttentionSpec]) -> tuple[AttentionSpec, ...]:
        """Return the layers of a runtime: those of its model, then those of the draft model.

        Raises: UnsupportedError: if a layer is not a decoder layer.
        """
        own = (
            spec if spec.kv_shared_with is None else replace(spec, kv_shared_with=spec.kv_shared_with + len(specs))
            for spec in self.specs
        )
        _check_decoder(specs)
        return *specs, *own

    def kv_groups(self, groups: Sequence[KVCacheSpec]) -> tuple[KVCacheSpec, ...]:
        """Return the KV groups of a runtime: those of its model, then those of the draft model, in pools of their own.

        Runtime calls it. With ReplayManager, allocate the cache for the result. Pages have the size, the layout and the
        null page of the model's first group.
        """
        layers, pools = sum(group.num_layers for group in groups), len({group.pool for group in groups})
        if len(groups) == 1:
            groups = [replace(groups[0], layers=tuple(range(layers)))]
        like = groups[0]
        own = kv_groups(self.specs, page_size=like.page_size, layout=like.layout, null_page=like.null_page)
        return *groups, *(
            replace(
                group,
                layers=tuple(layers + at for at in group.layers or range(group.num_layers)),
                pool=pools + group.pool,
            )
            for group in own
        )

    def __call__(self, step: Step) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return drafts [padded_reqs, num_speculative_tokens] int32; with `rejection_sampling`, also the
        log-probabilities [padded_reqs, num_speculative_tokens, vocab_size] from which they were drawn. Capture-safe.

        Raises: ShapeError: if the model returns a wrong shape, dtype or device. ConfigError: if `hidden_size` is set,
        but a model does not keep its hidden states.
        """
        b, own = step.buffers, step.layers[-len(self.specs) :]
        layers = tuple(replace(layer, spec=spec) for layer, spec in zip(own, self.specs, strict=True))
        previous = None if self.hidden_size is None else self._hidden_before(step)
        step = replace(step, hidden_layers=())
        hidden = None if self.hidden_size is None else step.state_after(HIDDEN)
        no_logits = replace(b, logits_indices=b.logits_indices[:0], input_ids=self._known(b.input_ids, step))
        self._logits(replace(step, layers=layers, buffers=no_logits, previous_hidden=previous))
        slots = slots_ahead(step, b.drafts.shape[1])
        fits = (slots >= 0).all(1) & (b.req_status == int(RequestStatus.SAMPLES))
        tokens, drafts = b.last_token[b.req_indices.long()], []
        logprobs: list[torch.Tensor] = []
        for ahead, (of_groups, has_page) in enumerate(zip(slots, fits, strict=True)):
            known = self._known(tokens, step)
            one = replace(_next_step(step, layers, ahead, known, of_groups, has_page), previous_hidden=hidden)
            step.backend.schedule(one.metadata)
            if b.draft_logprobs.shape[2]:
                tokens, of_draft = draw_draft(self._logits(one), one)
                logprobs.append(of_draft)
            else:
                tokens = sample_tokens(self._logits(one), one)
            tokens = tokens.where(has_page, NO_TOKEN)
            drafts.append(tokens)
            hidden = None if hidden is None else one.hidden
        return (torch.stack(drafts, 1), torch.stack(logprobs, 1)) if logprobs else torch.stack(drafts, 1)

    def _hidden_before(self, step: Step) -> torch.Tensor:
        """Return the hidden state of the token before each token of a step [padded_tokens, hidden_size], and keep those
        of this step."""
        b, hidden = step.buffers, step.hidden
        hidden = (hidden if self.combine is None else self.combine(hidden)).to(step.request_tensors[HIDDEN].dtype)
        earlier = step.state_before(HIDDEN)
        step.keep_state(HIDDEN, hidden)
        at = torch.arange(len(hidden), dtype=torch.int32, device=hidden.device)
        rows = torch.searchsorted(b.query_start_loc[1:], at, right=True).clamp_max(len(earlier) - 1)
        return earlier[rows].where((b.query_start_loc[rows] == at)[:, None], hidden.roll(1, 0))

    def _known(self, tokens: torch.Tensor, step: Step) -> torch.Tensor:
        """Return tokens of the model's vocabulary as tokens of the draft model's, which may have less padding."""
        return tokens.clamp_max(self.vocab_size - 1) if self.vocab_size < step.vocab_size else tokens

    def _logits(self, step: Step) -> torch.Tensor:
        """Return the logits [rows, step.vocab_size]; -inf for tokens that the draft model does not have."""
        with self._model_layers.bound_to(step):
            logits = self.model(step)
        check_tensor("the draft model's logits", logits, shape=(len(step.logits_indices), self.vocab_size))
        more = step.vocab_size - self.vocab_size
        return torch.nn.functional.pad(logits, (0, more), value=float("-inf")) if more else logits


def resolve_layers(
    model_layers: ModelLayers,
    attention: object,
    kv_layers: int,
    proposer: Proposer | None,
    vocab_size: int,
    tree_depth: int,
) -> tuple[AttentionSpec, ...]:
    """Return the spec of every layer of a runtime whose cache has `kv_layers` layers.

    Raises: ConfigError: see `ModelLayers.resolve`; or if the draft model has a different vocabulary. UnsupportedError:
    see `DraftModel`; or if drafts form trees, because a draft model proposes chains.
    """
    if not isinstance(proposer, DraftModel):
        return model_layers.resolve(attention, kv_layers)
    if tree_depth:
        raise UnsupportedError(
            f"tree_depth: expected 0 with a draft model, which proposes chains, got {tree_depth}; set tree_depth=0"
        )
    if abs(proposer.vocab_size - vocab_size) > _MOST_PADDING:
        raise ConfigError(
            f"DraftModel.vocab_size: expected {vocab_size}, as in the model, up to {_MOST_PADDING} more or less, "
            f"got {proposer.vocab_size}; use a draft model with the same tokenizer"
        )
    own = sum(spec.kv_shared_with is None for spec in proposer.specs)
    return proposer.layers_after(model_layers.resolve(attention, kv_layers - own))


def with_draft_state(config: RuntimeConfig, proposer: Proposer | None) -> RuntimeConfig:
    """Return the config of a runtime with this proposer: a head keeps hidden states in a request tensor."""
    if not isinstance(proposer, DraftModel) or proposer.hidden_size is None:
        return config
    shape = 2 + config.num_speculative_tokens, proposer.hidden_size
    kept = RequestTensor(HIDDEN, shape, proposer.specs[0].dtype)
    return replace(config, request_tensors=tuple(dict.fromkeys((*config.request_tensors, kept))))


def _check_decoder(specs: Sequence[AttentionSpec]) -> None:
    if others := {spec.kind.value for spec in specs} - {AttentionKind.DECODER.value}:
        raise UnsupportedError(
            f"attention: expected decoder layers with a draft model, got {', '.join(sorted(others))} layers; use "
            "another proposer"
        )


def slots_ahead(step: Step, count: int) -> torch.Tensor:
    """Return the KV slots of `count` tokens, starting at `sample_lens`, [count, groups, padded_reqs] int64.

    -1 where the page is unknown or the position exceeds `max_seq_len`.
    """
    b = step.buffers
    positions = b.sample_lens + torch.arange(count, dtype=torch.int32, device=b.sample_lens.device)[:, None, None]
    sizes = b.page_groups[:, :1]
    columns = positions // sizes
    known = (columns < b.table_to) & (positions < step.metadata.max_seq_len - b.drafts.shape[1])
    at = columns.clamp_max(b.block_table.shape[2] - 1).long()
    pages = b.block_table.gather(2, at.permute(1, 2, 0)).permute(2, 0, 1)
    return torch.where(known, pages.long() * sizes + positions % sizes, -1)


def _next_step(
    step: Step,
    layers: tuple[AttentionLayer, ...],
    ahead: int,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    has_page: torch.Tensor,
) -> Step:
    """Return a step of one token per request, `ahead` positions after the sampled token; requests without a page are
    padding."""
    b, size = step.buffers, BatchDescriptor.decode(step.descriptor.padded_reqs)
    positions = torch.where(has_page, b.sample_lens + ahead, 0)
    rows = torch.arange(size.padded_reqs + 1, dtype=torch.int32, device=positions.device)
    buffers = replace(
        b,
        input_ids=torch.where(has_page, tokens, 0).clamp_min(0).long(),
        positions=positions.long(),
        slot_mapping=torch.where(has_page, slots, -1),
        query_start_loc=rows,
        seq_lens=torch.where(has_page, positions + 1, step.backend.seq_len_fill),
        logits_indices=rows[:-1].long(),
        sample_lens=positions + 1,
    )
    widths = [table.shape[1] for table in step.metadata.block_tables]
    metadata = StepMetadata.of(buffers, size, step.metadata.max_seq_len, widths)
    return replace(step, descriptor=size, metadata=metadata, buffers=buffers, layers=layers)
