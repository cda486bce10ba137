"""The Llama family on graphrt's operators, with fused weights that are loaded in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist
from torch import nn

from graphrt.kernels.cache.write import Rotary
from graphrt.kernels.ops.collectives import VocabShards, embedding
from graphrt.kernels.ops.linear import Normed, linear, linear_add, linear_silu_mul
from graphrt.kernels.ops.norm import rms_norm
from graphrt.kernels.ops.quantized import Weight
from graphrt.models.config import ModelConfig
from graphrt.models.quantization import empty_weight
from graphrt.models.sharding import Sharding
from graphrt.models.weights import TensorSource, WeightSource, check_weights

if TYPE_CHECKING:
    from graphrt.step import Step

Product = tuple[Weight, torch.Tensor | None]
"""Weight and bias of a linear layer."""


class LlamaLayer(nn.Module):
    """The weights of one layer: q, k and v in one matrix, gate and up in another.

    qkv_inputs  columns of the matrix of q, k and v, if not hidden_size
    """

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device, *, qkv_inputs: int = 0
    ) -> None:
        super().__init__()
        hidden, intermediate, dim = config.hidden_size, config.intermediate_size, config.head_dim
        qkv_rows = (config.num_q_heads + 2 * config.num_kv_heads) * dim

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        def matrix(modules: list[str], rows: int, depth: int) -> Weight:
            names = [f"model.layers.{index}.{module}_proj" for module in modules]
            return empty_weight(config.quantization, names, (rows, depth), dtype, device)

        self.attention_norm = weight(hidden)
        self.qkv = matrix(["self_attn.q", "self_attn.k", "self_attn.v"], qkv_rows, qkv_inputs or hidden)
        self.qkv_bias = weight(qkv_rows) if config.qkv_bias else None
        self.q_norm = weight(dim) if config.qk_norm else None
        self.k_norm = weight(dim) if config.qk_norm else None
        self.o = matrix(["self_attn.o"], hidden, config.num_q_heads * dim)
        self.o_bias = weight(hidden) if config.o_bias else None
        self.mlp_norm = weight(hidden)
        self.gate_up = matrix(["mlp.gate", "mlp.up"], 2 * intermediate, hidden)
        self.gate_up_bias = weight(2 * intermediate) if config.mlp_bias else None
        self.down = matrix(["mlp.down"], hidden, intermediate)
        self.down_bias = weight(hidden) if config.mlp_bias else None

    def products(self) -> tuple[Product, ...]:
        """Return weights and biases, in the order of the products."""
        return (
            (self.qkv, self.qkv_bias),
            (self.o, self.o_bias),
            (self.gate_up, self.gate_up_bias),
            (self.down, self.down_bias),
        )

    def weight_targets(self, config: ModelConfig, prefix: str) -> dict[str, Weight]:
        """Return the destination of each Hugging Face checkpoint tensor of the layer, by its name after `prefix`."""
        heads = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
        rows = [count * config.head_dim for count in heads]
        targets: dict[str, Weight | None] = {
            "input_layernorm.weight": self.attention_norm,
            "post_attention_layernorm.weight": self.mlp_norm,
            "self_attn.q_norm.weight": self.q_norm,
            "self_attn.k_norm.weight": self.k_norm,
        }
        for kind, qkv, o, gate_up, down in (
            ("weight", self.qkv, self.o, self.gate_up, self.down),
            ("bias", self.qkv_bias, self.o_bias, self.gate_up_bias, self.down_bias),
        ):
            targets[f"self_attn.o_proj.{kind}"] = o
            targets[f"mlp.down_proj.{kind}"] = down
            if qkv is not None:
                names = [f"self_attn.{x}_proj.{kind}" for x in "qkv"]
                targets.update(zip(names, qkv.split(rows), strict=True))
            if gate_up is not None:
                names = [f"mlp.{x}_proj.{kind}" for x in ("gate", "up")]
                targets.update(zip(names, gate_up.split([config.intermediate_size] * 2), strict=True))
        return {prefix + name: target for name, target in targets.items() if target is not None}


def run_layer(
    step: Step,
    index: int,
    x: Normed,
    residual: torch.Tensor,
    products: Sequence[Product],
    gains: tuple[torch.Tensor, torch.Tensor],
    rotary: Rotary | None,
    eps: float,
    group: dist.ProcessGroup | None = None,
    attend: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Normed:
    """Add attention, then a gated MLP, to `residual` in place, and return the norm of the sum for the next layer.

    x         the norm of `residual`
    products  weights and biases of qkv, o, gate_up and down
    gains     weights of the norm before the MLP, and of the norm of the result
    attend    maps queries to the output of attention; None: `step.attend`
    """
    qkv, o, gate_up, down = products
    q = step.linear_rope_write(index, x, qkv[0], rotary=rotary, bias=qkv[1])
    attended = step.attend(index, q) if attend is None else attend(q)
    x = linear_add(attended.flatten(1), o[0], residual, gains[0], eps, bias=o[1], group=group)
    gated = linear_silu_mul(x, gate_up[0], bias=gate_up[1])
    return linear_add(gated, down[0], residual, gains[1], eps, bias=down[1], group=group)


class LlamaModel(nn.Module):
    """Computes the logits of a step. Weights are uninitialized until `load_weights`.

    Capture-safe: all shapes depend only on the step's padded size, and the host reads nothing from the device.

    Args:
        max_positions: rows of the rotation table, which limit the sequence length. Defaults to the model's limit.
        group: ranks that each hold a shard of the model; see `Sharding`.

    Attributes:
        config: the configuration of this rank's shard, `Sharding.config`.
    """

    cos_sin: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.group, self.sharding = group, Sharding.of(config, group)
        self.config = config = self.sharding.config
        trained = config.max_position_embeddings
        table = config.rope.cos_sin(config.rotary_dim, trained, max_positions or trained, device)
        self.register_buffer("cos_sin", table, persistent=False)
        shape = (self.sharding.vocab_columns, config.hidden_size)
        self.embedding = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self.layers = nn.ModuleList(LlamaLayer(config, i, dtype, device) for i in range(config.num_layers))
        self.norm = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype, device=device), requires_grad=False)
        quantization, tied = config.quantization, config.tie_word_embeddings
        self.head: Weight = self.embedding if tied else empty_weight(quantization, ["lm_head"], shape, dtype, device)

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
        """Return the logits [padded_reqs, vocab_size] of the tokens at `step.logits_indices`; with a group, the columns
        of this rank.

        Capture-safe.
        """
        eps, group = self.config.rms_norm_eps, self.group
        residual = embedding(step.input_ids, self.embedding, VocabShards.of(self.config.vocab_size, group))
        layers = [layer for layer in self.layers if isinstance(layer, LlamaLayer)]
        x = Normed(rms_norm(residual, layers[0].attention_norm, eps))
        for index, layer in enumerate(layers):
            step.keep_hidden(residual, before=index)
            rotary = Rotary(self.cos_sin, layer.q_norm, layer.k_norm, eps)
            norm = layers[index + 1].attention_norm if index + 1 < len(layers) else self.norm
            x = run_layer(step, index, x, residual, layer.products(), (layer.mlp_norm, norm), rotary, eps, group)
        step.keep_hidden(residual, before=len(layers))
        step.keep_hidden(x)
        return linear(x, self.head, rows=step.logits_indices)

    def ahead_model(self) -> LlamaModel:
        """Return a model of the first layer only. It launches the same kernels as all layers; see `Model`."""
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
                self.sharding.load(checkpoint, name, target)

    def check_weights(self, checkpoint: WeightSource) -> None:
        """Check the names and shapes of a checkpoint's tensors. A model on the meta device needs no memory for this.

        Raises:
            ConfigError: if tensors are missing, unknown or of the wrong shape, if the checkpoint has a head and the
                model has none, or if the model's weights are quantized differently.
        """
        shapes = {name: self.sharding.shape(name, target) for name, target in self.weight_targets().items()}
        check_weights(self.config, shapes, checkpoint)

    def weight_targets(self) -> dict[str, Weight]:
        """Return views of the weights by the name of the Hugging Face tensor that is copied there, maybe in part."""
        targets: dict[str, Weight] = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.config.tie_word_embeddings:
            targets["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer), "layers holds LlamaLayer only"
            targets |= layer.weight_targets(self.config, f"model.layers.{index}.")
        return targets
