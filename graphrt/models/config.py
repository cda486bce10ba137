"""The dimensions and options of a Llama-family model, read from a config.json or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from graphrt.cache.groups import kv_groups
from graphrt.kernels.checks import check_int_field, shown
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.models.fields import FieldReader
from graphrt.models.quantization import Quantization, quantization_from_hf
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

# All other keys of a config.json are applied below or not read by the classes of transformers.
_HF_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "compression_config": (),
    "is_causal": (True,),
    "per_layer_config": (),
}
# The caller sets sampling parameters. These keys forbid or force tokens, or end a text.
_GENERATION_UNSUPPORTED: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (
        "bad_words_ids", "begin_suppress_tokens", "force_words_ids", "forced_bos_token_id", "forced_decoder_ids",
        "forced_eos_token_id", "sequence_bias", "stop_strings", "suppress_tokens",
    ),
    (),
)  # fmt: skip
# An architecture key that is not in these tables and not read by `from_gguf` is rejected.
_GGUF_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
}
_GGUF_IRRELEVANT = {
    "attention.layer_norm_epsilon", "expert_used_count", "pooling_type", "rope.scale_linear", "rope.scaling.finetuned",
    "tensor_data_layout", "use_parallel_residual", "vocab_size",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a Llama-family model.

    Attributes:
        architecture: llama, mistral, qwen2 or qwen3.
        max_position_embeddings: longest sequence for which the model was trained.
        rotary_dim: number of leading dimensions of each head to rotate. 0 means head_dim.
        sliding_windows: per layer, the number of tokens that a query sees, including itself, or None for all.
            An empty tuple means None for every layer.
        qkv_bias, o_bias, mlp_bias: whether these projections have a bias.
        qk_norm: whether each query and key head is RMS-normalized before the rotation.
        dtype: dtype of the checkpoint.
        eos_ids: tokens that end a text.
        quantization: how the weight matrices are quantized, or None.
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
    rotary_dim: int = 0
    sliding_windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    dtype: torch.dtype = torch.bfloat16
    eos_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_position_embeddings"):
            check_int_field(self, name, 1, advice="pass the model's")
        if not self.rotary_dim:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"ModelConfig.num_q_heads: expected a multiple of num_kv_heads={self.num_kv_heads}, "
                f"got {self.num_q_heads}; all KV heads serve the same number of query heads, so pass a multiple"
            )
        if self.rotary_dim % 2 or not 4 <= self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"ModelConfig.rotary_dim: expected an even number from 4 to head_dim={self.head_dim}, "
                f"got {self.rotary_dim}; pass 0 to rotate whole heads"
            )
        if len(self.sliding_windows) != self.num_layers:
            raise ConfigError(
                f"ModelConfig.sliding_windows: expected {self.num_layers} values, one per layer, "
                f"got {len(self.sliding_windows)}; pass None for layers without a window"
            )

    def attention_specs(self, dtype: torch.dtype) -> tuple[AttentionSpec, ...]:
        """Return the attention spec of every layer, in order."""
        heads = (self.num_q_heads, self.num_kv_heads, self.head_dim)
        return tuple(AttentionSpec(*heads, dtype, sliding_window=window) for window in self.sliding_windows)

    def kv_groups(
        self, page_size: int, layout: KVLayout, dtype: torch.dtype, *, null_page: int | Literal["last"] = 0
    ) -> tuple[KVCacheSpec, ...]:
        """Return the KV cache groups of the model, one per distinct window."""
        layers = self.attention_specs(torch.float32)
        return kv_groups(layers, page_size=page_size, layout=layout, dtype=dtype, null_page=null_page)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read a config.json, and the end-of-text tokens in a generation_config.json.

        Every key is either applied as in the model classes of transformers or rejected.

        Raises:
            UnsupportedError: if graphrt does not implement the model. The message lists all reasons in a file.
            ConfigError: if values are missing or malformed. The message lists all of them in a file.
        """
        fields = FieldReader(raw, "config.json")
        architecture = _hf_architecture(fields)
        heads = fields.integer("num_attention_heads", most=_MAX_HEADS)
        layers = fields.integer("num_hidden_layers", most=_MAX_LAYERS)
        hidden = fields.integer("hidden_size")
        # As in transformers, a missing key differs from null, and some classes reject null.
        kv_heads: int | None = {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(architecture, heads)
        if "num_key_value_heads" in raw:
            kv_heads = None if architecture == "mistral" else heads
        default_head_dim: int | None = max(hidden // heads, 1)
        if architecture == "qwen3":
            default_head_dim = None if "head_dim" in raw else 128
        head_dim = fields.integer("head_dim", default_head_dim, most=_MAX_HEAD_DIM)
        _check_partial_rotation(fields, head_dim)
        attention_bias = architecture in ("llama", "qwen3") and fields.flag("attention_bias")
        end = FieldReader({} if generation is None else generation, "generation_config.json")
        end.refuse(_GENERATION_UNSUPPORTED)
        eos_ids = dict.fromkeys((*fields.token_ids("eos_token_id"), *end.token_ids("eos_token_id")))
        values: dict[str, Any] = {
            "num_kv_heads": fields.integer("num_key_value_heads", kv_heads),
            "vocab_size": fields.integer("vocab_size"),
            "intermediate_size": fields.integer("intermediate_size"),
            "max_position_embeddings": fields.integer("max_position_embeddings"),
            "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
            "rope": rope_from_hf(fields, head_dim),
            "sliding_windows": _hf_windows(architecture, layers, raw, fields),
            "mlp_bias": architecture == "llama" and fields.flag("mlp_bias"),
            "tie_word_embeddings": fields.flag("tie_word_embeddings"),
            "dtype": _hf_dtype(fields),
            "quantization": quantization_from_hf(fields),
        }
        fields.finish()
        end.finish()
        return cls(
            architecture=architecture,
            hidden_size=hidden,
            num_layers=layers,
            num_q_heads=heads,
            head_dim=head_dim,
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
        """Read the metadata of a GGUF file by the rules of llama.cpp. Mistral models are stored as "llama".

        Args:
            metadata: key-value pairs of the file.
            shapes: shapes of its tensors by name, outermost dimension first. They determine biases and a tied head.
            freq_factors: the tensor `rope_freqs.weight`, if the file has one.

        Raises:
            UnsupportedError, ConfigError: see `from_hf`.
        """
        fields = FieldReader(metadata, "GGUF metadata")
        name = fields.text("general.architecture")
        if name not in ("llama", "qwen2", "qwen3"):
            if name:
                fields.unsupported(f"general.architecture {shown(name)} (supported: llama, qwen2, qwen3)")
            fields.finish()
        heads = fields.integer(f"{name}.attention.head_count", most=_MAX_HEADS, per_layer=True)
        layers = fields.integer(f"{name}.block_count", most=_MAX_LAYERS)
        hidden = fields.integer(f"{name}.embedding_length")
        head_dim = fields.integer(f"{name}.attention.key_length", max(hidden // heads, 1), most=_MAX_HEAD_DIM)
        for key in ("attention.value_length", "rope.dimension_count"):  # llama.cpp rejects these models too
            value = fields.integer(f"{name}.{key}", head_dim)
            if value != head_dim:
                fields.unsupported(f"{key} {value} with attention.key_length {head_dim}")
        trained = fields.integer(f"{name}.context_length")
        window = fields.integer(f"{name}.attention.sliding_window", 0, least=0)
        if 0 < window < trained:  # llama.cpp does not apply it in these architectures
            fields.unsupported(f"attention.sliding_window {window}")
        fields.refuse({f"{name}.{key}": neutral for key, neutral in _GGUF_UNSUPPORTED.items()})
        values: dict[str, Any] = {
            "intermediate_size": fields.integer(f"{name}.feed_forward_length", per_layer=True),
            "num_kv_heads": fields.integer(f"{name}.attention.head_count_kv", heads, per_layer=True),
            "rms_norm_eps": fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
            "rope": rope_from_gguf(fields, name, trained, freq_factors),
            "eos_ids": gguf_eos_ids(fields),
        }
        fields.refuse_unread(f"{name}.", _GGUF_IRRELEVANT)
        if freq_factors and name != "llama":
            fields.unsupported(f"rope_freqs.weight in a {name} model")
        embedding, tokens = shapes.get("token_embd.weight"), metadata.get("tokenizer.ggml.tokens")
        if embedding is None:
            fields.problems.append("token_embd.weight: the file has no such tensor")
        elif isinstance(tokens, list) and len(tokens) != embedding[0]:
            fields.problems.append(
                f"token_embd.weight: expected {len(tokens)} rows, one per token of tokenizer.ggml.tokens, "
                f"got {embedding[0]}"
            )
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


def _hf_architecture(fields: FieldReader) -> str:
    """Return the architecture's short name, and record options that make the model unsupported."""
    kind = fields.text("model_type")
    classes = fields.texts("architectures") or (_CLASSES.get(kind),)
    if kind and (kind not in _CLASSES or classes != (_CLASSES[kind],)):
        fields.unsupported(
            f"model_type {shown(kind)} with {shown(list(classes))} (supported: {', '.join(_CLASSES.values())})"
        )
    activation = fields.text("hidden_act", "silu")
    if activation not in ("", "silu", "swish"):  # two names of one function
        fields.unsupported(f"hidden_act {shown(activation)} (supported: silu)")
    fields.refuse(_HF_UNSUPPORTED)
    return kind


def _check_partial_rotation(fields: FieldReader, head_dim: int) -> None:
    """Reject a partial rotation, which these classes of transformers ignore or fail on."""
    parameters = rope_parameters(fields)
    key = "partial_rotary_factor"
    source = FieldReader(parameters, fields.where) if parameters.get(key) is not None else fields
    factor = source.number(key, 1.0, most=1.0)
    if int(head_dim * factor) != head_dim:
        fields.unsupported(f"{key} {factor:g}")
    if source is not fields:
        fields.problems += source.problems


def _hf_windows(architecture: str, layers: int, raw: Mapping[str, Any], fields: FieldReader) -> tuple[int | None, ...]:
    """Return the window of each layer.

    Without layer_types, Mistral has a window in every layer. Qwen has one in layers max_window_layers and above, if
    enabled.
    """
    types = fields.texts("layer_types")
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        fields.unsupported(f"layer_types {shown(unknown)}")
    switched_on = architecture == "mistral" or (architecture != "llama" and fields.flag("use_sliding_window"))
    # A missing key means 4096; null means no window.
    if not switched_on or raw.get("sliding_window", 4096) is None:
        if architecture != "llama" and "sliding_attention" in types:
            fields.unsupported("layer_types 'sliding_attention' without a sliding_window")
        return (None,) * layers
    window = fields.integer("sliding_window", 4096)
    if not types:
        first = 0 if architecture == "mistral" else fields.integer("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    if len(types) != layers:
        fields.problems.append(f"layer_types: expected {layers} values, one per layer, got {len(types)}")
    return tuple(window if x == "sliding_attention" else None for x in types)


def _hf_dtype(fields: FieldReader) -> torch.dtype:
    name = fields.text("dtype", fields.text("torch_dtype", "float32"))
    if name and name not in _DTYPES:
        fields.unsupported(f"dtype {shown(name)} (supported: {', '.join(_DTYPES)})")
    return _DTYPES.get(name, torch.float32)


def gguf_eos_ids(fields: FieldReader) -> tuple[int, ...]:
    """Return the end-of-text tokens in a GGUF file."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(i for name in names for i in fields.token_ids(f"tokenizer.ggml.{name}")))
