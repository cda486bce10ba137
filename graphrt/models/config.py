"""What a model of the Llama family is made of, read from a Hugging Face config.json or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from graphrt.cache.groups import kv_groups
from graphrt.kernels.checks import check_int, check_int_field, is_finite
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.models.fields import FieldReader, shown
from graphrt.models.rope import RopeConfig, rope_from_gguf, rope_from_hf, rope_parameters
from graphrt.spec import AttentionSpec, KVCacheSpec

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MAX_LAYERS, _MAX_HEADS, _MAX_HEAD_DIM = 4096, 4096, 4096
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model of the Llama family.

    architecture       llama, mistral, qwen2 or qwen3
    rotary_dim         leading dimensions of each head that are rotated
    sliding_windows    per layer: tokens a query sees, itself included, or None for all; empty means None everywhere
    qkv_bias, o_bias, mlp_bias   which projections have a bias
    qk_norm            RMS norm of each query and key head before the rotation
    max_position_embeddings      longest sequence that the model was made for
    dtype              of the checkpoint
    eos_ids            tokens that end a text
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    rotary_dim: int = 0  # 0 becomes head_dim
    sliding_windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    dtype: torch.dtype = torch.bfloat16
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_position_embeddings"):
            check_int_field(self, name, 1, advice="pass the model's")
        self._check_types()
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"ModelConfig.num_q_heads: expected a multiple of num_kv_heads={self.num_kv_heads}, "
                f"got {self.num_q_heads}"
            )
        if self.rotary_dim % 2 or not 4 <= self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"ModelConfig.rotary_dim: expected an even number from 4 to head_dim={self.head_dim}, "
                f"got {self.rotary_dim}"
            )
        if len(self.sliding_windows) != self.num_layers:
            raise ConfigError(
                f"ModelConfig.sliding_windows: expected {self.num_layers}, one per layer, "
                f"got {len(self.sliding_windows)}"
            )

    def _check_types(self) -> None:
        def check(name: str, good: bool, expected: str) -> None:
            if not good:
                raise ConfigError(f"ModelConfig.{name}: expected {expected}, got {shown(getattr(self, name))}")

        known = isinstance(self.architecture, str) and self.architecture in _CLASSES
        check("architecture", known, f"one of {', '.join(_CLASSES)}")
        check("rms_norm_eps", is_finite(self.rms_norm_eps) and self.rms_norm_eps > 0, "a finite number > 0")
        check("rope", isinstance(self.rope, RopeConfig), "a RopeConfig")
        for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tie_word_embeddings"):
            check(name, isinstance(getattr(self, name), bool), "True or False")
        check("dtype", self.dtype in _DTYPES.values(), f"one of {', '.join(_DTYPES)}")
        for name in ("sliding_windows", "eos_ids"):
            check(name, isinstance(getattr(self, name), tuple), "a tuple")
        check_int_field(self, "rotary_dim", 0, advice="0 means head_dim")
        if self.rotary_dim == 0:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        for window in self.sliding_windows:
            if window is not None:
                check_int("ModelConfig.sliding_windows", window, 1, advice="None sees everything")
        for token in self.eos_ids:
            check_int("ModelConfig.eos_ids", token, 0, advice="pass token ids")

    @property
    def num_parameters(self) -> int:
        """Weights in total; a tied output head counts once."""
        heads = (2 * self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size + 2)
        layer += self.qkv_bias * (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim
        layer += self.o_bias * self.hidden_size + self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        layer += self.qk_norm * 2 * self.head_dim
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * layer + embeddings + self.hidden_size

    def attention_specs(self, dtype: torch.dtype) -> tuple[AttentionSpec, ...]:
        """The attention of every layer, in order."""
        heads = (self.num_q_heads, self.num_kv_heads, self.head_dim)
        return tuple(AttentionSpec(*heads, dtype, sliding_window=window) for window in self.sliding_windows)

    def kv_groups(
        self, page_size: int, layout: KVLayout, dtype: torch.dtype, *, null_page: int | Literal["last"] = 0
    ) -> tuple[KVCacheSpec, ...]:
        """The KV cache that the model needs: one group where all layers have one window, or none."""
        layers = self.attention_specs(torch.float32)
        return kv_groups(layers, page_size=page_size, layout=layout, dtype=dtype, null_page=null_page)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read a config.json, and the end-of-text tokens of a generation_config.json if there is one.

        Raises: UnsupportedError with every reason when the model is none of ours, ConfigError with every missing or
        malformed value.
        """
        fields = FieldReader(raw, "config.json")
        architecture = _hf_architecture(raw, fields)
        heads = fields.integer("num_attention_heads", most=_MAX_HEADS)
        layers = fields.integer("num_hidden_layers", most=_MAX_LAYERS)
        hidden = fields.integer("hidden_size")
        default_head_dim = 128 if architecture == "qwen3" else max(hidden // heads, 1)
        head_dim = fields.integer("head_dim", default_head_dim, most=_MAX_HEAD_DIM)
        rotary_dim = int(head_dim * _partial_rotary_factor(fields))
        attention_bias = architecture in ("llama", "qwen3") and fields.flag("attention_bias")
        end = FieldReader({} if generation is None else generation, "generation_config.json")
        eos_ids = dict.fromkeys((*fields.token_ids("eos_token_id"), *end.token_ids("eos_token_id")))
        values: dict[str, Any] = {
            "num_kv_heads": fields.integer("num_key_value_heads", 8 if architecture == "mistral" else heads),
            "vocab_size": fields.integer("vocab_size"),
            "intermediate_size": fields.integer("intermediate_size"),
            "max_position_embeddings": fields.integer("max_position_embeddings"),
            "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
            "rope": rope_from_hf(fields, rotary_dim),
            "sliding_windows": _hf_windows(architecture, layers, raw, fields),
            "mlp_bias": architecture == "llama" and fields.flag("mlp_bias"),
            "tie_word_embeddings": fields.flag("tie_word_embeddings"),
            "dtype": _hf_dtype(fields),
        }
        fields.problems += end.problems
        fields.finish()
        return cls(
            architecture=architecture,
            hidden_size=hidden,
            num_layers=layers,
            num_q_heads=heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            qkv_bias=attention_bias or architecture == "qwen2",
            o_bias=attention_bias,
            qk_norm=architecture == "qwen3",
            eos_ids=tuple(eos_ids),
            **values,
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, Sequence[int]],
        freq_factors: tuple[float, ...] = (),
    ) -> ModelConfig:
        """Read the metadata of a GGUF file; `shapes` are its tensors' by name, outermost dimension first.

        Biases and a tied head show in the tensors only. Mistral is stored as "llama".

        Raises: as `from_hf`.
        """
        fields = FieldReader(metadata, "GGUF metadata")
        name = fields.text("general.architecture")
        if name not in ("llama", "qwen2", "qwen3"):
            if name:
                fields.unsupported(f"general.architecture {shown(name)} (supported: llama, qwen2, qwen3)")
            fields.finish()
        if fields.integer(f"{name}.expert_count", 0, least=0):
            fields.unsupported("expert_count: mixture of experts")
        if fields.has(f"{name}.attention.scale"):
            fields.unsupported("attention.scale")
        heads = fields.integer(f"{name}.attention.head_count", most=_MAX_HEADS, per_layer=True)
        layers = fields.integer(f"{name}.block_count", most=_MAX_LAYERS)
        hidden = fields.integer(f"{name}.embedding_length")
        head_dim = fields.integer(f"{name}.attention.key_length", max(hidden // heads, 1), most=_MAX_HEAD_DIM)
        value_dim = fields.integer(f"{name}.attention.value_length", head_dim)
        if value_dim != head_dim:
            fields.unsupported(f"attention.value_length {value_dim} other than key_length {head_dim}")
        trained = fields.integer(f"{name}.context_length")
        window = f"{name}.attention.sliding_window"
        values: dict[str, Any] = {
            "intermediate_size": fields.integer(f"{name}.feed_forward_length", per_layer=True),
            "num_kv_heads": fields.integer(f"{name}.attention.head_count_kv", heads, per_layer=True),
            "rms_norm_eps": fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
            "rotary_dim": fields.integer(f"{name}.rope.dimension_count", head_dim),
            "rope": rope_from_gguf(fields, name, trained, freq_factors),
            "sliding_windows": (fields.integer(window) if fields.has(window) else None,) * layers,
            "eos_ids": gguf_eos_ids(fields),
        }
        embedding = shapes.get("token_embd.weight")
        if embedding is None:
            fields.problems.append("token_embd.weight: expected this tensor, got none")
        fields.finish()
        return cls(
            architecture=name,
            vocab_size=embedding[0] if embedding else 1,
            hidden_size=hidden,
            num_layers=layers,
            num_q_heads=heads,
            head_dim=head_dim,
            max_position_embeddings=trained,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            o_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_gate.bias" in shapes,
            qk_norm=name == "qwen3",
            tie_word_embeddings="output.weight" not in shapes,
            **values,
        )


def _hf_architecture(raw: Mapping[str, Any], fields: FieldReader) -> str:
    """The architecture's short name; notes what rules the model out as a whole."""
    kind = fields.text("model_type")
    classes = fields.texts("architectures") or (_CLASSES.get(kind),)
    if kind and (kind not in _CLASSES or classes != (_CLASSES[kind],)):
        fields.unsupported(
            f"model_type {shown(kind)} with {shown(list(classes))} (supported: {', '.join(_CLASSES.values())})"
        )
    activation = fields.text("hidden_act", "silu")
    if activation and activation != "silu":
        fields.unsupported(f"hidden_act {shown(activation)} (supported: silu)")
    if fields.has("quantization_config"):
        fields.unsupported("quantization_config: quantised weights (a GGUF file is dequantised)")
    return kind


def _partial_rotary_factor(fields: FieldReader) -> float:
    nested = rope_parameters(fields).get("partial_rotary_factor")
    return fields.number("partial_rotary_factor", 1.0 if nested is None else nested, most=1.0)


def _hf_windows(architecture: str, layers: int, raw: Mapping[str, Any], fields: FieldReader) -> tuple[int | None, ...]:
    """The window of each layer: every layer in Mistral, those beyond max_window_layers in Qwen when switched on."""
    types = fields.texts("layer_types")
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        fields.unsupported(f"layer_types {shown(unknown)}")
    switched_on = architecture == "mistral" or (architecture != "llama" and fields.flag("use_sliding_window"))
    # A key that is missing stands for 4096, one that is null for no window.
    if not switched_on or raw.get("sliding_window", 4096) is None:
        return (None,) * layers
    window = fields.integer("sliding_window", 4096)
    if architecture == "mistral":
        return (window,) * layers
    if not types:
        first = fields.integer("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    if len(types) != layers:
        fields.problems.append(f"layer_types: expected {layers}, one per layer, got {len(types)}")
    return tuple(window if x == "sliding_attention" else None for x in types)


def _hf_dtype(fields: FieldReader) -> torch.dtype:
    name = fields.text("dtype", fields.text("torch_dtype", "float32"))
    if name and name not in _DTYPES:
        fields.unsupported(f"dtype {shown(name)} (supported: {', '.join(_DTYPES)})")
    return _DTYPES.get(name, torch.float32)


def gguf_eos_ids(fields: FieldReader) -> tuple[int, ...]:
    """The end-of-text tokens that a GGUF file names."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(i for name in names for i in fields.token_ids(f"tokenizer.ggml.{name}")))
