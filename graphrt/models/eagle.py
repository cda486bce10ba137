"""EAGLE and EAGLE-3 heads, from safetensors in the format that vLLM and SGLang read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphrt.draft_model import DraftModel
from graphrt.kernels.cache.write import Rotary
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.ops.collectives import VocabShards, embedding
from graphrt.kernels.ops.linear import Normed, linear
from graphrt.kernels.ops.norm import rms_norm
from graphrt.kernels.ops.quantized import Weight
from graphrt.models.config import ModelConfig
from graphrt.models.fields import FieldReader
from graphrt.models.hf import SafetensorsSource, read_json
from graphrt.models.llama import LlamaLayer, LlamaModel, run_layer
from graphrt.models.weights import check_weights

if TYPE_CHECKING:
    from graphrt.step import Step

_SPECULATORS = "transformer_layer_config"
_NESTED = ("model", _SPECULATORS)  # keys that may hold the config of the layer
_LEAST_SHARE = 1e-6  # so that 0 / 0 is 0, and rounding of the lse is not amplified without bound
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_para_norm": (False,),
    "logit_scale": (1.0,),
    "norm_before_fc": (False,),
    "quantization_config": (),
    "use_sliding_window": (False,),
}
_EAGLE_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "parallel_draft_step": (1,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Configuration of a head.

    Attributes:
        layer: dimensions and options of its layer. The vocabulary is that of the model.
        draft_vocab_size: number of tokens that it can draft.
        hidden_layers: layers of the model whose inputs an EAGLE-3 head reads.
        norm_before_residual: whether the residual stream of an EAGLE-3 head starts with the normed hidden state.
    """

    layer: ModelConfig
    draft_vocab_size: int
    hidden_layers: tuple[int, ...]
    norm_before_residual: bool

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], num_layers: int) -> EagleConfig:
        """Read the config.json of a head for a model of `num_layers` layers.

        Raises: UnsupportedError, ConfigError: see `ModelConfig.from_hf`.
        """
        flat = dict(raw)
        for key in _NESTED:
            flat |= FieldReader(raw, "config.json").mapping(key)
        layer = ModelConfig.from_hf(flat | {"architectures": None, "num_hidden_layers": 1})
        fields = FieldReader(flat, "config.json")
        fields.refuse(_UNSUPPORTED)
        if layer.qkv_bias:  # the key of token 0 must be 0
            fields.unsupported("biases of queries, keys and values")
        if "sliding_attention" in fields.texts("layer_types"):
            fields.unsupported("layer_types 'sliding_attention'")
        eagle = FieldReader(fields.mapping("eagle_config"), "config.json: eagle_config")
        eagle.refuse(_EAGLE_UNSUPPORTED)
        ids = "eagle_aux_hidden_state_layer_ids"
        # vLLM's list counts the embedding as layer 0, SGLang's list starts with the output of the first layer.
        layers = fields.integers(ids) or tuple(index + 1 for index in eagle.integers(ids))
        layers = layers or (2, num_layers // 2, num_layers - 3)
        eagle.refuse_unread("", ())
        eagle.finish()
        draft_vocab_size = fields.integer("draft_vocab_size", layer.vocab_size, most=layer.vocab_size)
        norm_before_residual = fields.flag("norm_before_residual", _SPECULATORS in raw)
        fields.finish()
        return cls(layer, draft_vocab_size, layers, norm_before_residual)


class EagleHead(nn.Module):
    """One layer that drafts from hidden states of a model. Weights are uninitialized until `load_eagle`.

    In EAGLE, the input of the layer is `fc` of the token's embedding, concatenated with the previous hidden state. In
    EAGLE-3, `fc` combines the inputs of several layers of the model to one hidden state. The input of the layer is then
    the norm of the embedding, concatenated with the norm of this hidden state. Only EAGLE-3 has a norm before lm_head.

    names   names of the checkpoint's tensors. A missing embedding or lm_head is shared with the model

    Raises: UnsupportedError: if the head would share the lm_head of a model that is split over ranks.
    """

    cos_sin: torch.Tensor
    norm: torch.Tensor
    token_ids: torch.Tensor | None

    def __init__(self, config: EagleConfig, model: LlamaModel, names: Collection[str]) -> None:
        super().__init__()
        self.config, layer, dtype, device = config, config.layer, model.dtype, model.device
        self.prefix = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
        self.combines = self.prefix + "hidden_norm.weight" in names  # EAGLE-3
        width, of_model, vocab_size = layer.hidden_size, model.config.hidden_size, layer.vocab_size

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.fc = weight(width, of_model * len(config.hidden_layers) if self.combines else width + of_model)
        self.fc_bias = weight(width) if "fc.bias" in names else None
        self.layer = LlamaLayer(layer, 0, dtype, device, qkv_inputs=2 * width if self.combines else width)
        self.hidden_norm = weight(width) if self.combines else None
        if self.combines:
            self.norm = weight(width)
        else:
            self.register_buffer("norm", torch.ones(width, dtype=dtype, device=device), persistent=False)
        same = width == of_model
        self._own_embedding = not same or "embed_tokens.weight" in names
        own_head = not same or config.draft_vocab_size < vocab_size or "lm_head.weight" in names
        self._own_head = own_head and not (layer.tie_word_embeddings and "lm_head.weight" not in names)
        self.embedding = weight(vocab_size, width) if self._own_embedding else model.embedding
        shared = self.embedding if layer.tie_word_embeddings else model.head
        self.head: Weight = weight(config.draft_vocab_size, width) if self._own_head else shared
        if model.group is not None and not self._own_head:
            raise UnsupportedError(
                "lm_head.weight: missing in the head, and the model's is split over ranks; use a head with lm_head, or "
                "one rank"
            )
        self.shards = None if self._own_embedding else VocabShards.of(vocab_size, model.group)
        positions = len(model.cos_sin), device
        table = layer.rope.cos_sin(layer.rotary_dim, layer.max_position_embeddings, *positions)
        self.register_buffer("cos_sin", table, persistent=False)
        self.register_buffer("token_ids", None, persistent=False)
        if "d2t" in names or config.draft_vocab_size < vocab_size:
            self.token_ids = torch.empty(config.draft_vocab_size, dtype=torch.int64, device=device)

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return one hidden state per token [tokens, hidden_size], from the concatenated states of several layers of
        the model. Capture-safe."""
        return linear(hidden, self.fc, self.fc_bias)

    def forward(self, step: Step) -> torch.Tensor:
        """Return the logits [rows, vocab_size] of the tokens at `step.logits_indices`; -inf for tokens that the head
        cannot draft. Capture-safe."""
        layer, eps, hidden = self.layer, self.config.layer.rms_norm_eps, step.previous_hidden
        embedded = embedding(step.input_ids, self.embedding, self.shards)
        assert hidden is not None, "the proposer of a head has a hidden_size"
        has_hidden = (step.positions > 0)[:, None]  # for token 0, the input of the layer is 0; see `_attend`
        if self.hidden_norm is None:
            x = residual = linear(torch.cat((embedded, hidden), 1), self.fc, self.fc_bias) * has_hidden
        else:
            normed = rms_norm(hidden, self.hidden_norm, eps)
            residual = normed if self.config.norm_before_residual else hidden.clone()
            x = torch.cat((rms_norm(embedded * has_hidden, layer.attention_norm, eps), normed), 1)
        rotary = Rotary(self.cos_sin, layer.q_norm, layer.k_norm, eps)
        gains = layer.mlp_norm, self.norm
        attend = partial(_attend, step)
        result = run_layer(step, 0, Normed(x), residual, layer.products(), gains, rotary, eps, attend=attend)
        step.keep_hidden(residual)
        logits = linear(result if self.combines else residual, self.head, rows=step.logits_indices)
        if self.token_ids is None:
            return logits
        of_model = logits.new_full((len(logits), self.config.layer.vocab_size), float("-inf"))
        return of_model.index_copy_(1, self.token_ids, logits)

    def ahead_model(self) -> Callable[[Step], torch.Tensor]:
        """Return a model that launches the kernels of `forward` and `combine`; see `graphrt.step.Model`."""

        def run(step: Step) -> torch.Tensor:
            if self.combines:
                self.combine(self.fc.new_empty(len(step.positions), self.fc.shape[1]))
            return self.forward(step)

        return run

    def weight_targets(self) -> dict[str, Weight]:
        """Return the destination of each tensor of the checkpoint, by name."""
        targets: dict[str, Weight | None] = {
            "fc.weight": self.fc,
            "fc.bias": self.fc_bias,
            self.prefix + "hidden_norm.weight": self.hidden_norm,
            "embed_tokens.weight": self.embedding if self._own_embedding else None,
            "lm_head.weight": self.head if self._own_head else None,
            "d2t": self.token_ids,
            **self.layer.weight_targets(self.config.layer, self.prefix),
        }
        if self.combines:
            targets["norm.weight"] = self.norm
        else:
            del targets[self.prefix + "input_layernorm.weight"]
        return {name: target for name, target in targets.items() if target is not None}


def _attend(step: Step, q: torch.Tensor) -> torch.Tensor:
    """Return attention to all tokens except token 0, for which EAGLE has no hidden state.

    The key and the value of token 0 are 0, so it adds exp(0) to the softmax denominator, and 0 to the sum of values.
    """
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    out = step.attend(0, q, lse=lse)
    share = -torch.expm1(-lse)  # share of the other tokens; 0 in the row of token 0
    return (out / share.clamp_min(_LEAST_SHARE)[..., None]).to(out.dtype)


def load_eagle(folder: Path, model: LlamaModel) -> DraftModel:
    """Load an EAGLE or EAGLE-3 head for `model`, in its dtype and on its device.

    Raises:
        ConfigError: if a file is missing or corrupt, tensors are missing, unknown or of the wrong shape, or the head
            does not fit the model.
        UnsupportedError: if graphrt does not support the head.
    """
    config = EagleConfig.from_hf(read_json(folder / "config.json"), len(model.layers))
    if config.layer.vocab_size != model.config.vocab_size:
        raise ConfigError(
            f"config.json: vocab_size: expected {model.config.vocab_size}, as in the model, got "
            f"{config.layer.vocab_size}; use the head of this model"
        )
    source = SafetensorsSource(folder, config.layer)
    shapes = source.shapes()
    head = EagleHead(config, model, shapes)
    width, targets = config.layer.hidden_size, head.weight_targets()
    expected = {name: tuple(target.shape) for name, target in targets.items()}
    if "t2d" in shapes:  # whether the head can draft each token. d2t implies it
        expected["t2d"] = (config.layer.vocab_size,)
    check_weights(config.layer, expected, source)
    layers, most = config.hidden_layers, len(model.layers)
    if head.combines and (sorted({*layers}) != [*layers] or layers[0] < 0 or layers[-1] > most):
        raise ConfigError(
            f"config.json: eagle_aux_hidden_state_layer_ids: expected ascending layers of a model of {most} layers, "
            f"got {[*layers]}; use the head of this model"
        )
    if not head.combines and width != model.config.hidden_size:
        raise ConfigError(
            f"config.json: hidden_size: expected {model.config.hidden_size}, as in the model, got {width}; use the "
            "head of this model"
        )
    with torch.no_grad():
        for name, target in targets.items():
            source.copy_into(name, target)
    if head.token_ids is not None:
        head.token_ids += torch.arange(len(head.token_ids), device=head.token_ids.device)  # d2t has differences
        ids = head.token_ids.unique()
        if len(ids) < len(head.token_ids) or ids[0] < 0 or ids[-1] >= config.layer.vocab_size:
            raise ConfigError(
                f"d2t: expected different tokens of a vocabulary of {config.layer.vocab_size}, got {len(ids)} from "
                f"{int(ids[0])} to {int(ids[-1])} for {len(head.token_ids)} drafts; download the head again"
            )
    return DraftModel(
        head,
        config.layer.attention_specs(model.dtype),
        vocab_size=config.layer.vocab_size,
        hidden_size=width,
        hidden_layers=config.hidden_layers if head.combines else (),
        combine=head.combine if head.combines else None,
    )
