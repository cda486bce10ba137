"""The step that a model receives: its inputs, and attention over the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.context_parallel import ContextParallel
from graphrt.kernels.cache.write import Rotary, write_kv
from graphrt.kernels.checks import check_instance, check_int, check_no_overlap, check_tensor, check_unit_stride
from graphrt.kernels.errors import ConfigError, ShapeError, UnsupportedError
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.ops.collectives import VocabShards
from graphrt.kernels.ops.linear import Normed, linear_rope_write
from graphrt.kernels.ops.quantized import Weight, check_weight
from graphrt.kernels.ops.sampling import LogitBias, TokenMask
from graphrt.kernels.ops.sampling_state import Penalties, PenaltyState
from graphrt.metadata import StepMetadata


class _Buffer:
    """An attribute of a step that reads the static buffer of the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, step: Step, owner: type) -> torch.Tensor:
        tensor: torch.Tensor = getattr(step.buffers, self._name)
        return tensor


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of a decode step at one size. A model is any callable `model(step) -> logits [padded_reqs, vocab]`.

    input_ids       [padded_tokens] int64    token ids; 0 in padding tokens
    positions       [padded_tokens] int64    position of each token in its sequence; 0 in padding tokens
    logits_indices  [rows]          int64    index of the token whose hidden state gives a row of the logits, or 0.
                                             rows is padded_reqs, times the maximum number of tokens that a request
                                             samples in this graph: 1, or 1 + num_speculative_tokens
    sample_lens     [padded_reqs]   int32    number of tokens before the one that is sampled
    req_indices     [padded_reqs]   int32    request index; -1 in padding and invalid requests, so clamp it first
    req_status      [padded_reqs]   int32    RequestStatus: padding, invalid, running, or running and sampled
    temperatures    [padded_reqs]   float32  sampling temperatures; 0 is greedy
    top_ks          [padded_reqs]   int32    0 keeps all tokens
    top_ps          [padded_reqs]   float32  1 keeps all tokens
    min_ps          [padded_reqs]   float32  0 keeps all tokens
    seeds           [padded_reqs]   int64    sampling seeds
    vocab_size      int                      width of the logits that are sampled
    previous_hidden [padded_tokens, hidden_size]  in a draft model with `hidden_size`, else None: the hidden state of
                                             the token before each token; 0 at position 0

    All tensors are views of static buffers on the device, so a replayed graph reads the values of the current step. Any
    other value that varies between steps must be in a tensor too, because graphs contain Python numbers as constants. A
    model or sampler with state per request, such as an adapter index, declares it in `RuntimeConfig.request_tensors`
    and reads `request_state(name)`. State that steps advance follows rollbacks by `state_before` and `keep_state`. A
    model may also index its own tensor [max_num_reqs, ...] by `req_indices`. Do not rely on the order of the batch. In
    mixed steps with two parts, decode requests come first.
    """

    descriptor: BatchDescriptor
    metadata: StepMetadata
    buffers: StaticBuffers
    backend: AttentionBackend
    layers: tuple[AttentionLayer, ...]
    vocab_size: int
    request_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    previous_hidden: torch.Tensor | None = None
    shards: VocabShards | None = None  # set if each rank of a group has a part of the logits
    hidden_layers: tuple[int, ...] = ()  # layers of the model whose inputs the proposer reads
    context: ContextParallel | None = None  # set if ranks share the KV of each request
    _written: set[int] = field(default_factory=set, init=False, repr=False, compare=False)  # indices of layers
    _kept: dict[int | None, torch.Tensor | Normed] = field(default_factory=dict, init=False, repr=False, compare=False)

    input_ids = _Buffer()
    positions = _Buffer()
    logits_indices = _Buffer()
    sample_lens = _Buffer()
    req_indices = _Buffer()
    req_status = _Buffer()
    temperatures = _Buffer()
    top_ks = _Buffer()
    top_ps = _Buffer()
    min_ps = _Buffer()
    seeds = _Buffer()

    def request_state(self, name: str) -> torch.Tensor:
        """Return the values of this step's requests in a tensor of `RuntimeConfig.request_tensors`.

        Returns [padded_reqs, ...] with the initial value in padding and invalid requests. Each call is a gather;
        `request_tensors[name]` is the whole tensor, by request index.

        Raises: ConfigError: if there is no such tensor.
        """
        return self._request_tensor("request_state", name)[self.req_indices.long()]  # -1 is the last row, for padding

    def state_before(self, name: str) -> torch.Tensor:
        """Return the state of each request before its first token in this step, [padded_reqs, ...].

        name    a request tensor that `keep_state` writes, of shape (period, ...)

        This is the state after the preceding token, or the initial value at position 0, in padding and in invalid
        requests. Call it before `keep_state`. Capture-safe. Raises: see `keep_state`.
        """
        tensor, reqs = self._state("state_before", name), self.req_indices.long()
        first = self.positions[self.metadata.query_start_loc[:-1].clamp_max(len(self.positions) - 1)]
        reqs = reqs.where(first > 0, -1)
        return tensor[reqs, (first - 1) % tensor.shape[1]]

    def keep_state(self, name: str, values: torch.Tensor) -> None:
        """Keep the state after each token that may become the last accepted token of its request.

        name    a request tensor of shape (period, ...); the state after position p is in row p % period. The period is
                2 + num_speculative_tokens, or longer, so that callers of `replay` can step back further
        values  [padded_tokens, ...]  the state after each token, in the dtype of the tensor

        Capture-safe. Raises: ConfigError: if there is no such tensor, or its period is too short. UnsupportedError: if
        drafts form trees.
        """
        if len(self.buffers.tree_masks):
            raise UnsupportedError(
                "keep_state: tokens of several branches have the same position; build the runtime with tree_depth=0"
            )
        tensor, ends = self._state("keep_state", name), self.logits_indices
        reqs = self.req_indices.long().repeat(len(ends) // len(self.req_indices))
        valid = (reqs >= 0).view(-1, *(1 for _ in tensor.shape[2:]))
        tensor[reqs, self.positions[ends] % tensor.shape[1]] = values[ends].where(valid, tensor[-1, 0])

    def state_after(self, name: str) -> torch.Tensor:
        """Return the state after the last accepted token of each request, [padded_reqs, ...], for a proposer.

        Capture-safe. Raises: see `keep_state`.
        """
        tensor = self._state("state_after", name)
        return tensor[self.req_indices.long(), (self.sample_lens.long() - 1) % tensor.shape[1]]

    def _state(self, call: str, name: str) -> torch.Tensor:
        tensor, period = self._request_tensor(call, name), 2 + self.buffers.drafts.shape[1]
        if tensor.dim() < 2 or tensor.shape[1] < period:
            raise ConfigError(
                f"{call}: {name!r} has shape {tuple(tensor.shape[1:])} per request; declare RequestTensor({name!r}, "
                f"({period}, ...)), because the period is 2 + num_speculative_tokens"
            )
        return tensor

    def _request_tensor(self, call: str, name: str) -> torch.Tensor:
        if name not in self.request_tensors:
            known = ", ".join(self.request_tensors) or "none"
            raise ConfigError(
                f"{call}: expected a name of RuntimeConfig.request_tensors ({known}), got {name!r}; declare it there"
            )
        return self.request_tensors[name]

    def keep_hidden(self, hidden: torch.Tensor | Normed, *, before: int | None = None) -> None:
        """Offer hidden states of the step's tokens to the proposer, which reads them as `step.hidden`.

        hidden  [padded_tokens, width]  or a Normed
        before  index of the layer whose input these states are, or the number of layers for the output of the last
                layer. They are copied if the proposer reads them. None: the states that give the logits. They are not
                copied, so the model must not change them later

        Capture-safe. Raises: ShapeError: if the number of tokens differs.
        """
        states = hidden.x if isinstance(hidden, Normed) else hidden
        check_tensor("hidden", states, shape=(self.descriptor.padded_tokens, None), device=self.positions.device)
        if before in self.hidden_layers:
            self._kept[before] = (hidden.finished() if isinstance(hidden, Normed) else hidden).clone()
        elif before is None:
            self._kept[None] = hidden

    @property
    def hidden(self) -> torch.Tensor:
        """The hidden states that the model kept [padded_tokens, width]; with `hidden_layers`, the concatenated inputs
        of these layers. Raises: ConfigError: if the model kept none."""
        names = self.hidden_layers or (None,)
        if missing := [name for name in names if name not in self._kept]:
            what, argument = ("", "") if missing == [None] else (f" before layers {missing}", ", before=layer")
            raise ConfigError(
                f"hidden: the model kept no hidden states{what}; call step.keep_hidden(...{argument}) in the model"
            )
        states = [kept.finished() if isinstance(kept, Normed) else kept for kept in map(self._kept.__getitem__, names)]
        return states[0] if len(states) == 1 else torch.cat(states, 1)

    def without_layers(self) -> Step:
        """Return this step for a proposer without attention layers, which may read its hidden states."""
        step = replace(self, layers=())
        step._kept.update(self._kept)
        return step

    @property
    def penalties(self) -> Penalties | None:
        """Penalties of each request, and the token counts of each sequence; None without RuntimeConfig.penalties."""
        return self.token_counts if self.buffers.penalty_counts.shape[1] else None

    @property
    def token_counts(self) -> Penalties:
        """As `penalties`; without RuntimeConfig.penalties, it has only the tokens of each sequence, and no counts."""
        b = self.buffers
        state = PenaltyState(b.penalty_seen, b.penalty_counts, b.token_history, b.counted_lens)
        return Penalties(b.repetition_penalties, b.presence_penalties, b.frequency_penalties, state)

    @property
    def logit_bias(self) -> LogitBias | None:
        """Logit biases by request index; None without RuntimeConfig.max_logit_bias."""
        b = self.buffers
        return LogitBias(b.bias_tokens, b.bias_values, b.bias_lists) if b.bias_tokens.shape[2] else None

    @property
    def token_mask(self) -> TokenMask | None:
        """All token masks, and the mask that each request uses; None without RuntimeConfig.token_masks."""
        b = self.buffers
        return TokenMask(b.mask_words, b.token_masks) if b.mask_words.shape[1] else None

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        rotary: Rotary | None = None,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write K and V of this step to the cache, and attend to all cached tokens, causally.

        A cross layer writes nothing, and attends to all encoder outputs of the request (see `KVCache.write`). An
        encoder layer has no cache. Each token attends to the tokens of its request in this step, before and after it.

        Call a layer that writes K and V once per step, and before the layers that share its KV. Other layers may be
        called again, for example if all layers of an encoder share one spec.

        layer  index of the layer
        q      [padded_tokens, num_q_heads, head_dim]      rotated in place if `rotary` is given; must not overlap k
        k      [padded_tokens, num_kv_heads, head_dim]     may be a slice of a qkv tensor, as may q and v; None after
                                                           `linear_rope_write`, for cross layers and layers with
                                                           kv_shared_with
        v      [padded_tokens, num_kv_heads, v_head_dim]   None if k is None
        rotary norm and rotary embedding to apply to q and k, or None
        sinks  [num_q_heads]                 float32       required if the spec has sinks; finite or -inf
        lse    [padded_tokens, num_q_heads]  float32       written in place if given: natural log of the softmax
                                                           denominator, including the sink; -inf, or the sink, in
                                                           padding tokens
        out    [padded_tokens, num_q_heads, v_head_dim]    contiguous, written in place; must not overlap q, k and v

        q, k, v and out have the dtype of the layer. Returns `out`, or a new tensor of its shape, with zeros in padding
        tokens.

        Capture-safe: shapes depend only on the descriptor; the device reads lengths, sinks and KV scales.

        Raises:
            ShapeError: if a shape, dtype or device does not match the layer, or sinks do not match its spec.
            UnsupportedError: if the backend cannot write lse, if a layer that writes is called twice, or if a layer is
                called before the layer whose KV it shares.

        If it raises, nothing is written.
        """
        layer = self._check_layer(layer)
        target, tokens = self.layers[layer], self.descriptor.padded_tokens
        spec, device = target.spec, self.positions.device
        writes = target.writes and not (k is None and layer in self._written)
        takes_kv = writes or not spec.is_cached
        check_tensor("q", q, shape=(tokens, spec.num_q_heads, spec.head_dim), dtype=spec.dtype, device=device)
        for name, tensor, dim in (("k", k, spec.head_dim), ("v", v, spec.value_dim)):
            if (tensor is None) == takes_kv:
                raise ShapeError(
                    f"{name}: expected {'a tensor' if takes_kv else 'None'} for layer {layer}, got "
                    f"{'None' if takes_kv else 'a tensor'}; pass None only after linear_rope_write, and for cross "
                    "layers and kv_shared_with"
                )
            if tensor is not None:
                check_tensor(name, tensor, shape=(tokens, spec.num_kv_heads, dim), dtype=spec.dtype, device=device)
        self._check_options(layer, sinks, lse)
        if out is not None:
            check_tensor("out", out, shape=(tokens, spec.num_q_heads, spec.value_dim), dtype=spec.dtype, device=device)
            if not out.is_contiguous():
                raise ShapeError(f"out: not contiguous (strides {list(out.stride())}); pass a contiguous tensor")
        self._check_rotary(rotary)
        self._check_order(layer, writes)
        if out is None:
            out = torch.empty(tokens, spec.num_q_heads, spec.value_dim, dtype=q.dtype, device=device)
        if writes and k is not None and v is not None:  # never None if the layer writes
            write_kv(
                q, k, v, target.k_cache, target.v_cache, self.metadata.slot_mappings[target.group], self.positions,
                rotary=rotary, k_scale=target.k_scale, v_scale=target.v_scale,
            )  # fmt: skip
            self._written.add(layer)
        elif rotary is not None:
            self._rotate(q, rotary)
            if k is not None:  # an encoder layer must not modify the caller's tensor
                k = k.clone()
                self._rotate(k, replace(rotary, q_norm=rotary.k_norm))
        if self.context is not None:
            self.context.attend(self.backend, target, q, self.metadata, out, sinks=sinks, lse=lse)
        elif k is None or v is None or writes:
            self.backend.run(target, q, self.metadata, out, sinks=sinks, lse=lse)
        else:
            self.backend.run_encoder(target, q, k, v, self.metadata, out, sinks=sinks, lse=lse)
        return out

    def linear_rope_write(
        self,
        layer: int,
        x: torch.Tensor | Normed,
        weight: Weight,
        *,
        rotary: Rotary | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute queries, keys and values of a layer, and write keys and values to the cache; call `attend` next.

        layer    index of a layer that writes keys and values
        x        [padded_tokens, depth]  or a Normed
        weight   [(num_q_heads + num_kv_heads) * head_dim + num_kv_heads * v_head_dim, depth]  or a quantized weight
        returns  the queries [padded_tokens, num_q_heads, head_dim], rotated

        Other arguments, and what runs, are described in `graphrt.kernels.ops.linear.linear_rope_write`. Capture-safe.

        Raises:
            ShapeError: if a tensor does not match the layer.
            UnsupportedError: if this step has already written the layer.
        """
        layer = self._check_layer(layer)
        target = self.layers[layer]
        if not target.writes:
            raise ShapeError(f"layer: layer {layer} writes no keys and values; compute its queries with linear()")
        spec = target.spec
        rows = (spec.num_q_heads + spec.num_kv_heads) * spec.head_dim + spec.num_kv_heads * spec.value_dim
        check_weight("weight", weight, rows=rows, dtype=spec.dtype, device=self.positions.device)
        check_tensor("x", x.x if isinstance(x, Normed) else x, shape=(self.descriptor.padded_tokens, weight.shape[1]))
        self._check_rotary(rotary)
        self._check_order(layer, True)
        q = linear_rope_write(
            x, weight, target.k_cache, target.v_cache, self.metadata.slot_mappings[target.group], self.positions,
            rotary=rotary, bias=bias, k_scale=target.k_scale, v_scale=target.v_scale,
        )  # fmt: skip
        self._written.add(layer)
        return q

    def _rotate(self, x: torch.Tensor, rotary: Rotary) -> None:
        """Apply norm and rotary embedding to [padded_tokens, heads, head_dim] in place, without a KV write."""
        none, positions = x[:, :0], self.positions
        write_kv(x, none, none, none[:, None], none[:, None], positions, positions, rotary=replace(rotary, k_norm=None))

    def _check_rotary(self, rotary: Rotary | None) -> None:
        if rotary is not None:
            check_instance("rotary", rotary, Rotary, advice="pass Rotary(...)", error=ShapeError)
            check_tensor("rotary.cos_sin", rotary.cos_sin, shape=(None, None))
        positions = self.metadata.max_seq_len - self.buffers.drafts.shape[1]  # missing drafts are at position 0
        if rotary is not None and rotary.cos_sin.shape[0] < positions:
            raise ShapeError(
                f"rotary.cos_sin: expected at least max_seq_len={positions} rows, one per position, "
                f"got {rotary.cos_sin.shape[0]}; build a longer table, or lower RuntimeConfig.max_seq_len"
            )

    def _check_order(self, layer: int, writes: bool) -> None:
        source = self.layers[layer].spec.kv_shared_with
        if writes and layer in self._written:
            raise UnsupportedError(
                f"layer: second attend() for layer {layer} in one step, which would overwrite the keys and values of "
                "the first; give each attention layer of the model its own index"
            )
        if source is not None and self.layers[source].writes and source not in self._written:
            raise UnsupportedError(
                f"layer: layer {layer} reads the keys and values of layer {source}, which this step has not written "
                f"yet; call attend() for layer {source} first"
            )

    def _check_layer(self, layer: int) -> int:
        if not self.layers:
            raise ConfigError(
                "proposer: expected a DraftModel, or a function that calls no attention layer, got a model; pass "
                "load_draft_model(source, model), or DraftModel(model, attention, vocab_size=...)"
            )
        last = len(self.layers) - 1
        return check_int("layer", layer, 0, last, advice="pass the index of an attention layer", error=ShapeError)

    def _check_options(self, layer: int, sinks: torch.Tensor | None, lse: torch.Tensor | None) -> None:
        spec, device = self.layers[layer].spec, self.positions.device
        if spec.sinks and sinks is None:
            raise ShapeError(
                f"sinks: layer {layer} has learned sinks, so a tensor [{spec.num_q_heads}] is required; pass it to "
                "attend(), or build the AttentionSpec with sinks=False"
            )
        if sinks is not None:
            if not spec.sinks:
                raise ShapeError(
                    f"sinks: expected None for layer {layer}, got a tensor; build the AttentionSpec with sinks=True"
                )
            check_tensor("sinks", sinks, shape=(spec.num_q_heads,), dtype=torch.float32, device=device)
            check_unit_stride("sinks", sinks)
        if lse is not None:
            if not self.backend.capabilities.lse:
                raise UnsupportedError(
                    f"lse: backend {self.backend.name} cannot write the log-sum-exp; pass None, or use another backend"
                )
            tokens = self.descriptor.padded_tokens
            check_tensor("lse", lse, shape=(tokens, spec.num_q_heads), dtype=torch.float32, device=device)
            check_unit_stride("lse", lse)
            check_no_overlap("lse", lse)


Model = Callable[[Step], torch.Tensor]
"""Maps a step to logits [padded_reqs, vocab_size]; runs in inference mode, captured once per size. Without a sampler,
the result may have any width, for example that of the pooled embeddings of an encoder.

A model may have a method `ahead_model()`, which returns a model that launches the same kernels, but fewer times, and
keeps no results. `capture` runs it to compile them in parallel. No kernel runs then, so its inputs and outputs are
undefined."""

Sampler = Callable[[torch.Tensor, Step], torch.Tensor]
"""Maps logits [padded_reqs, vocab_size] to token ids [padded_reqs] int32 or int64; captured with the model."""
