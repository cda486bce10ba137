"""The Llama family on graphrt's operators, with fused weights that are loaded in place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.nn import functional

from graphrt.kernels.cache.write import Rotary
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.ops.linear import Normed, linear, linear_add, linear_silu_mul
from graphrt.kernels.ops.norm import rms_norm
from graphrt.models.config import ModelConfig
from graphrt.models.fields import printable

if TYPE_CHECKING:
    from graphrt.step import Step


class WeightSource(Protocol):
    """A checkpoint, whose tensors are read one at a time by their Hugging Face names."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor, from the checkpoint's table of contents."""
        ...

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Copy one tensor into `target`, converting its dtype and device."""
        ...

    def has_own_head(self) -> bool:
        """Return whether the checkpoint has an output head that differs from its embedding."""
        ...


class TensorSource:
    """A WeightSource for tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        target.copy_(self._tensors[name])

    def has_own_head(self) -> bool:
        embedding, head = (self._tensors.get(f"{name}.weight") for name in ("model.embed_tokens", "lm_head"))
        return embedding is not None and head is not None and not torch.equal(embedding, head.to(embedding))


class LlamaLayer(nn.Module):
    """The weights of one layer: q, k and v in one matrix, gate and up in another."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, intermediate, dim = config.hidden_size, config.intermediate_size, config.head_dim
        qkv_rows = (config.num_q_heads + 2 * config.num_kv_heads) * dim

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.attention_norm = weight(hidden)
        self.qkv = weight(qkv_rows, hidden)
        self.qkv_bias = weight(qkv_rows) if config.qkv_bias else None
        self.q_norm = weight(dim) if config.qk_norm else None
        self.k_norm = weight(dim) if config.qk_norm else None
        self.o = weight(hidden, config.num_q_heads * dim)
        self.o_bias = weight(hidden) if config.o_bias else None
        self.mlp_norm = weight(hidden)
        self.gate_up = weight(2 * intermediate, hidden)
        self.gate_up_bias = weight(2 * intermediate) if config.mlp_bias else None
        self.down = weight(hidden, intermediate)
        self.down_bias = weight(hidden) if config.mlp_bias else None


class LlamaModel(nn.Module):
    """Computes the logits of a step. Weights are uninitialised until `load_weights`.

    Capture-safe: all shapes depend only on the step's padded size, and the host reads nothing from the device.

    Args:
        max_positions: rows of the rotation table, which limit the sequence length. Defaults to the model's limit.
    """

    cos_sin: torch.Tensor

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, max_positions: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        trained = config.max_position_embeddings
        table = config.rope.cos_sin(config.rotary_dim, trained, max_positions or trained, device)
        self.register_buffer("cos_sin", table, persistent=False)
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self.layers = nn.ModuleList(LlamaLayer(config, dtype, device) for _ in range(config.num_layers))
        self.norm = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype, device=device), requires_grad=False)
        self.head = self.embedding
        if not config.tie_word_embeddings:
            self.head = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, activations and logits."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding.device

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights that each step reads. The embedding is counted only if it is also the output head."""
        looked_up = {id(self.embedding)} - {id(self.head)}
        return sum(weight.nbytes for weight in self.parameters() if id(weight) not in looked_up)

    def forward(self, step: Step) -> torch.Tensor:
        """Return the logits [padded_reqs, vocab_size] of the tokens at `step.logits_indices`.

        Capture-safe.
        """
        eps = self.config.rms_norm_eps
        residual = functional.embedding(step.input_ids, self.embedding)
        layers = [layer for layer in self.layers if isinstance(layer, LlamaLayer)]
        x = Normed(rms_norm(residual, layers[0].attention_norm, eps))
        for index, layer in enumerate(layers):
            rotary = Rotary(self.cos_sin, layer.q_norm, layer.k_norm, eps)
            q = step.linear_rope_write(index, x, layer.qkv, rotary=rotary, bias=layer.qkv_bias)
            attended = step.attend(index, q).flatten(1)
            x = linear_add(attended, layer.o, residual, layer.mlp_norm, eps, bias=layer.o_bias)
            gated = linear_silu_mul(x, layer.gate_up, bias=layer.gate_up_bias)
            norm = layers[index + 1].attention_norm if index + 1 < len(layers) else self.norm
            x = linear_add(gated, layer.down, residual, norm, eps, bias=layer.down_bias)
        return linear(x, self.head, rows=step.logits_indices)

    def ahead_model(self) -> LlamaModel:
        """Return the model with its first layer only, which launches the kernels of all layers; see `Model`."""
        model = copy.copy(self)
        model._modules = {**self._modules, "layers": self.layers[:1]}
        return model

    def load_weights(self, source: WeightSource | Mapping[str, torch.Tensor]) -> None:
        """Copy a checkpoint into the weights in place. Addresses do not change, so captured graphs use the new values.

        Tensors are looked up by their Hugging Face names and read one at a time.

        Raises:
            ConfigError: see `check_weights`. In this case, no weight has changed.
        """
        checkpoint = TensorSource(source) if isinstance(source, Mapping) else source
        self.check_weights(checkpoint)
        with torch.no_grad():
            for name, target in self.weight_targets().items():
                checkpoint.copy_into(name, target)

    def check_weights(self, checkpoint: WeightSource) -> None:
        """Check the names and shapes of a checkpoint's tensors. A model on the meta device needs no memory for this.

        Raises:
            ConfigError: if tensors are missing, unknown or of the wrong shape, or the checkpoint has a head and the
                model has none.
        """
        targets, shapes = self.weight_targets(), checkpoint.shapes()
        ignored = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        unknown = [n for n in shapes if n not in targets and n not in ignored and "rotary_emb." not in n]
        missing = [name for name in targets if name not in shapes]
        misshaped = [
            f"{name} {list(shapes[name])} instead of {list(target.shape)}"
            for name, target in targets.items()
            if name in shapes and tuple(shapes[name]) != tuple(target.shape)
        ]
        found = {"missing": missing, "unknown": unknown, "of another shape": misshaped}
        if any(found.values()):
            text = "; ".join(f"{len(names)} {kind}: {_listing(names)}" for kind, names in found.items() if names)
            raise ConfigError(
                f"weights: expected the {len(targets)} tensors of this {self.config.architecture} model, got {text}; "
                "use the config that belongs to the checkpoint"
            )
        if self.config.tie_word_embeddings and checkpoint.has_own_head():
            raise ConfigError(
                "weights: lm_head.weight differs from model.embed_tokens.weight, and this model uses one tensor for "
                "both; build the model with tie_word_embeddings=False"
            )

    def weight_targets(self) -> dict[str, torch.Tensor]:
        """Return a view of the weights for each tensor of a Hugging Face checkpoint, by name."""
        config = self.config
        heads = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
        rows = [count * config.head_dim for count in heads]
        targets: dict[str, torch.Tensor | None] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm,
            "lm_head.weight": None if config.tie_word_embeddings else self.head,
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer), "layers holds LlamaLayer only"
            prefix = f"model.layers.{index}."
            targets[prefix + "input_layernorm.weight"] = layer.attention_norm
            targets[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm
            targets[prefix + "self_attn.q_norm.weight"] = layer.q_norm
            targets[prefix + "self_attn.k_norm.weight"] = layer.k_norm
            for kind, qkv, o, gate_up, down in (
                ("weight", layer.qkv, layer.o, layer.gate_up, layer.down),
                ("bias", layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias),
            ):
                targets[prefix + f"self_attn.o_proj.{kind}"] = o
                targets[prefix + f"mlp.down_proj.{kind}"] = down
                if qkv is not None:
                    names = [prefix + f"self_attn.{x}_proj.{kind}" for x in "qkv"]
                    targets.update(zip(names, qkv.split(rows), strict=True))
                if gate_up is not None:
                    names = [prefix + f"mlp.{x}_proj.{kind}" for x in ("gate", "up")]
                    targets.update(zip(names, gate_up.chunk(2), strict=True))
        return {name: target for name, target in targets.items() if target is not None}


def _listing(names: list[str], most: int = 6) -> str:
    return printable(", ".join(names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
