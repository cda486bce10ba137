"""The step as a model sees it: inputs, and attention over the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.cache.write import Rotary, write_kv
from graphrt.kernels.checks import check_instance, check_int, check_no_overlap, check_tensor, check_unit_stride
from graphrt.kernels.errors import ConfigError, ShapeError, UnsupportedError
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.ops.sampling import LogitBias, TokenMask
from graphrt.kernels.ops.sampling_state import Penalties, PenaltyState
from graphrt.metadata import StepMetadata


@dataclass(frozen=True, slots=True)
class Step:
    """One captured size of the decode step. A model is any callable `model(step) -> logits [padded_reqs, vocab]`.

    The tensors are views of static buffers: a graph that reads them sees every later step's values. Whatever else
    varies from step to step must be in a tensor too; a Python number is frozen at capture. A model or sampler with
    state per row, as adapters, declares it in `RuntimeConfig.request_tensors` and reads `request_state(name)`, or
    keeps a
    tensor [max_num_reqs, ...] and indexes it by `req_indices`. The order of the batch does not do: in a mixed step of
    two
    parts the rows that decode stand first.
    """

    descriptor: BatchDescriptor
    metadata: StepMetadata
    buffers: StaticBuffers
    backend: AttentionBackend
    layers: tuple[AttentionLayer, ...]
    request_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _written: set[int] = field(default_factory=set, init=False, repr=False, compare=False)  # layers, in this step

    def request_state(self, name: str) -> torch.Tensor:
        """[padded_reqs, ...] what each row has of a tensor of `RuntimeConfig.request_tensors`; its initial value in
        pad and
        invalid rows. A gather per call; `request_tensors` has the whole, by row id. Raises: ConfigError."""
        if name not in self.request_tensors:
            known = ", ".join(self.request_tensors) or "none"
            raise ConfigError(
                f"request_state: expected a name of RuntimeConfig.request_tensors ({known}), got {name!r}"
            )
        return self.request_tensors[name][self.req_indices.long()]  # -1 is the last row, which is that of pads

    @property
    def input_ids(self) -> torch.Tensor:
        """[padded_tokens] int64; 0 in pad tokens."""
        return self.buffers.input_ids

    @property
    def positions(self) -> torch.Tensor:
        """[padded_tokens] int64, place of each token in its sequence; 0 in pad tokens."""
        return self.buffers.positions

    @property
    def logits_indices(self) -> torch.Tensor:
        """[padded_reqs] int64, token whose hidden state gives the row's logits; 0 in pad rows."""
        return self.buffers.logits_indices

    @property
    def req_indices(self) -> torch.Tensor:
        """[padded_reqs] int32, the row state that each row uses; -1 in pad and invalid rows: clamp before indexing."""
        return self.buffers.req_indices

    @property
    def req_status(self) -> torch.Tensor:
        """[padded_reqs] int32, RequestStatus: whether a row is a pad, runs, or runs and is sampled from."""
        return self.buffers.req_status

    @property
    def temperatures(self) -> torch.Tensor:
        """[padded_reqs] float32, for samplers; 0 is greedy."""
        return self.buffers.temperatures

    @property
    def top_ks(self) -> torch.Tensor:
        """[padded_reqs] int32, for samplers; 0 keeps all tokens."""
        return self.buffers.top_ks

    @property
    def top_ps(self) -> torch.Tensor:
        """[padded_reqs] float32, for samplers; 1 keeps all tokens."""
        return self.buffers.top_ps

    @property
    def min_ps(self) -> torch.Tensor:
        """[padded_reqs] float32, for samplers; 0 keeps all tokens."""
        return self.buffers.min_ps

    @property
    def seeds(self) -> torch.Tensor:
        """[padded_reqs] int64, for samplers."""
        return self.buffers.seeds

    @property
    def penalties(self) -> Penalties | None:
        """Of each row, and the tokens that each sequence has, for samplers; None without RuntimeConfig.penalties."""
        b = self.buffers
        if not b.penalty_counts.shape[1]:
            return None
        state = PenaltyState(b.penalty_seen, b.penalty_counts)
        return Penalties(b.repetition_penalties, b.presence_penalties, b.frequency_penalties, state)

    @property
    def logit_bias(self) -> LogitBias | None:
        """By row id, for samplers; None without RuntimeConfig.max_logit_bias."""
        b = self.buffers
        return LogitBias(b.bias_tokens, b.bias_values, b.bias_lists) if b.bias_tokens.shape[2] else None

    @property
    def token_mask(self) -> TokenMask | None:
        """Which mask each row uses, and all masks, for samplers; None without RuntimeConfig.token_masks."""
        b = self.buffers
        return TokenMask(b.mask_words, b.token_masks) if b.mask_words.shape[1] else None

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        *,
        rotary: Rotary | None = None,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's K and V to the cache and attend to everything cached so far, causally.

        A cross layer writes nothing, and attends to all that the row's encoder wrote (`KVCache.write`). An encoder
        layer has no cache: each token attends to those of its row in this step, before and behind it.

        A layer that writes is attended to once per step, and before those that share its keys and values. Others may
        be attended to again, as an encoder does whose layers are one.

        q      [padded_tokens, num_q_heads, head_dim]   rotated in place if `rotary` is given: no memory of k's then
        k, v   [padded_tokens, num_kv_heads, head_dim]  may be slices of one qkv tensor; None for a cross layer and one
                                                        that shares another's (AttentionSpec.kv_shared_with); values may
                                                        have another head size, and `returns` has that one then
        sinks  [num_q_heads]                 float32    the layer's learned sinks, if its spec has them; finite or -inf
        lse    [padded_tokens, num_q_heads]  float32    written in place: natural log of the softmax's denominator, sink
                                                        included; in pad tokens -inf, or the sink
        out    [padded_tokens, num_q_heads, head_dim]   contiguous; written in place, and returned; other memory than
                                                        that of q, k and v
        returns [padded_tokens, num_q_heads, head_dim]; zeros in pad tokens

        Capture-safe: shapes depend on the descriptor only; lengths, sinks and KV scales are read on the device.
        Raises: ShapeError when a shape, dtype or device does not match the layer, or sinks do not match its spec;
        UnsupportedError when the backend gives no lse, for a second call of a layer that writes, and for a layer whose
        keys and values are not written yet. Nothing is written then.
        """
        last = len(self.layers) - 1
        layer = check_int("layer", layer, 0, last, advice="the KV cache has one per layer", error=ShapeError)
        target, tokens = self.layers[layer], self.descriptor.padded_tokens
        spec, device = target.spec, self.positions.device
        takes_kv = target.writes or not spec.is_cached
        check_tensor("q", q, shape=(tokens, spec.num_q_heads, spec.head_dim), dtype=spec.dtype, device=device)
        for name, tensor, dim in (("k", k, spec.head_dim), ("v", v, spec.value_dim)):
            if (tensor is None) == takes_kv:
                raise ShapeError(
                    f"{name}: expected {'a tensor' if takes_kv else 'None'} for layer {layer}, got "
                    f"{'None' if takes_kv else 'a tensor'}; cross layers and those with kv_shared_with take None"
                )
            if tensor is not None:
                check_tensor(name, tensor, shape=(tokens, spec.num_kv_heads, dim), dtype=spec.dtype, device=device)
        self._check_options(layer, sinks, lse)
        if out is not None:
            check_tensor("out", out, shape=(tokens, spec.num_q_heads, spec.value_dim), dtype=spec.dtype, device=device)
            if not out.is_contiguous():
                raise ShapeError(f"out: expected a contiguous tensor, got strides {list(out.stride())}; make a new one")
        if rotary is not None:
            check_instance("rotary", rotary, Rotary, advice="pass Rotary(...)", error=ShapeError)
            check_tensor("rotary.cos_sin", rotary.cos_sin, shape=(None, None))
        if rotary is not None and rotary.cos_sin.shape[0] < self.metadata.max_seq_len:
            raise ShapeError(
                f"rotary.cos_sin: expected rows for max_seq_len={self.metadata.max_seq_len} positions, got "
                f"{rotary.cos_sin.shape[0]}; make the table longer, or lower RuntimeConfig.max_seq_len"
            )
        self._check_order(layer)
        if out is None:
            out = torch.empty(tokens, spec.num_q_heads, spec.value_dim, dtype=q.dtype, device=device)
        if target.writes:
            assert k is not None, "checked above"
            assert v is not None, "checked above"
            write_kv(
                q, k, v, target.k_cache, target.v_cache, self.metadata.slot_mappings[target.group], self.positions,
                rotary=rotary, k_scale=target.k_scale, v_scale=target.v_scale,
            )  # fmt: skip
            self._written.add(layer)
        elif rotary is not None:
            self._rotate(q, rotary)
            if k is not None:  # of an encoder layer: the caller's stays as it is
                k = k.clone()
                self._rotate(k, replace(rotary, q_norm=rotary.k_norm))
        if k is None or v is None or target.writes:
            self.backend.run(target, q, self.metadata, out, sinks=sinks, lse=lse)
        else:
            self.backend.run_encoder(target, q, k, v, self.metadata, out, sinks=sinks, lse=lse)
        return out

    def _rotate(self, x: torch.Tensor, rotary: Rotary) -> None:
        """Norm and rotate heads [padded_tokens, heads, head_dim] in place, as queries, and store nothing."""
        none, positions = x[:, :0], self.positions
        write_kv(x, none, none, none[:, None], none[:, None], positions, positions, rotary=replace(rotary, k_norm=None))

    def _check_order(self, layer: int) -> None:
        source = self.layers[layer].spec.kv_shared_with
        if layer in self._written:
            raise UnsupportedError(
                f"layer: expected one attend() per step for layer {layer}, got a second; it would overwrite the keys "
                "and values of the first, number the layers of the model from 0 on"
            )
        if source is not None and self.layers[source].writes and source not in self._written:
            raise UnsupportedError(
                f"layer: expected layer {source} before layer {layer}, which reads its keys and values, got it before "
                "they were written in this step; call attend() for that one first"
            )

    def _check_options(self, layer: int, sinks: torch.Tensor | None, lse: torch.Tensor | None) -> None:
        spec, device = self.layers[layer].spec, self.positions.device
        if spec.sinks and sinks is None:
            raise ShapeError(
                f"sinks: expected the learned sinks of layer {layer}, a tensor [{spec.num_q_heads}], got None; "
                "pass them to attend(), or build its AttentionSpec with sinks=False"
            )
        if sinks is not None:
            if not spec.sinks:
                raise ShapeError(
                    f"sinks: expected None for layer {layer}, got a tensor; build its AttentionSpec with sinks=True"
                )
            check_tensor("sinks", sinks, shape=(spec.num_q_heads,), dtype=torch.float32, device=device)
            check_unit_stride("sinks", sinks)
        if lse is not None:
            if not self.backend.capabilities.lse:
                raise UnsupportedError(
                    f"lse: expected None, got a tensor; backend {self.backend.name} gives none, choose another"
                )
            tokens = self.descriptor.padded_tokens
            check_tensor("lse", lse, shape=(tokens, spec.num_q_heads), dtype=torch.float32, device=device)
            check_unit_stride("lse", lse)
            check_no_overlap("lse", lse)


Model = Callable[[Step], torch.Tensor]
"""Maps a step to logits [padded_reqs, vocab]; run in inference mode, captured once per size. Without a sampler these
may be of any width, as the pooled embeddings of an encoder are."""

Sampler = Callable[[torch.Tensor, Step], torch.Tensor]
"""Maps logits [padded_reqs, vocab] to token ids [padded_reqs], int32 or int64; captured with the model."""
