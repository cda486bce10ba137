"""Logits against `transformers` in float32, for every architecture and option, and the keys of config.json."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.types import KVLayout
from graphrt.models.config import ModelConfig
from graphrt.models.hf import SafetensorsSource
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import load_model
from graphrt.models.rope import RopeConfig
from graphrt.models.shapes import SHAPES, shape_config
from tests.support.model_fixtures import (
    PROMPT,
    SIZES,
    DenseRunner,
    check_logits,
    edit_json,
    make_oracle,
    oracle_logits,
    save_oracle,
)

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
LONG |= {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [2.0, 3.0, 5.0, 8.0]}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": LLAMA3 | {"rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 32},
    "yarn": YARN,
    "yarn-ramp": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "mscale": 1.3, "mscale_all_dim": 0.7, "truncate": False},
    "yarn-attention-factor": YARN | {"rope_theta": 1e4, "attention_factor": 1.7},
    "longrope-short": LONG | {"original_max_position_embeddings": 64},
    "longrope-long": LONG | {"original_max_position_embeddings": 8},
}
LAYER_TYPES = {"use_sliding_window": True, "sliding_window": 3}
LAYER_TYPES |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

MODELS = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 16}),
    "llama-eps": ("Llama", {"rms_norm_eps": 0.1}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, "rms_norm_eps": 0.01}),
    "qwen3-layer-types": ("Qwen3", {"head_dim": 8} | LAYER_TYPES),
    **{f"rope-{name}": ("Llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
}


@pytest.mark.parametrize(("architecture", "options"), MODELS.values(), ids=MODELS)
def test_logits_equal_transformers(tmp_path, architecture, options):
    oracle = save_oracle(tmp_path, architecture, **options)
    assert oracle_logits(oracle, PROMPT).std() > 0.3, "logits too small to tell models apart"
    check_logits(load_model(tmp_path, device="cpu").model, oracle)


def test_layer_types_of_mistral_choose_the_layers_with_a_window(tmp_path):
    """transformers loads such a folder as Ministral."""
    oracle = save_oracle(tmp_path, "Ministral", head_dim=8, **LAYER_TYPES)
    edit_json(tmp_path / "config.json", model_type="mistral", architectures=["MistralForCausalLM"])
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(oracle.config)
    check_logits(load_model(tmp_path, device="cpu").model, oracle)


def test_a_ragged_batch_equals_separate_sequences(tmp_path):
    oracle = save_oracle(tmp_path, "Qwen3", head_dim=16)
    runner = DenseRunner(load_model(tmp_path, device="cpu").model)
    texts = {4: PROMPT, 0: PROMPT[3:9], 9: PROMPT[1:2]}
    runner.step({row: text[:-1] for row, text in texts.items() if len(text) > 1})
    logits = runner.step({row: text[-1:] for row, text in texts.items()})
    expected = torch.stack([oracle_logits(oracle, text)[-1] for text in texts.values()])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_partial_rotation(tmp_path):
    """`transformers` rotates whole heads. With zero frequencies, and q and k reordered, it is the same model."""
    head_dim, rotary_dim = 8, 4
    oracle = save_oracle(tmp_path, "Llama")
    source = SafetensorsSource(tmp_path)
    config = replace(source.config, rotary_dim=rotary_dim)
    model = LlamaModel(config, dtype=torch.float32, device=torch.device("cpu"))
    model.load_weights(source)
    assert model.cos_sin.shape == (64, rotary_dim)
    frequencies = 1e4 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    oracle.model.rotary_emb.inv_freq = torch.cat((frequencies, torch.zeros(2)))
    # graphrt rotates row i with row i + 2, transformers with row i + 4.
    order = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    for layer in oracle.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            rows = projection.weight.data.unflatten(0, (-1, head_dim))
            projection.weight.data = rows[:, order].flatten(0, 1)
    check_logits(model, oracle)


@pytest.mark.parametrize("name", [name for name in ROPES if name != "default"])
@pytest.mark.parametrize("length", [64, 256], ids=["trained-length", "beyond"])
def test_rope_frequencies_equal_transformers(name, length):
    config = make_oracle("Llama", rope_parameters=dict(ROPES[name])).config
    seq_len = length if name.startswith(("dynamic", "longrope")) else None
    expected, scale = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](config, torch.device("cpu"), seq_len=seq_len)
    ours = ModelConfig.from_hf(config.to_dict() | {"architectures": None})
    frequencies, our_scale = ours.rope.inverse_frequencies(8, 64, length)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert our_scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_rotation_table_of_real_sizes(theta):
    """128 dimensions at 131,072 positions, in float64."""
    table = RopeConfig(theta=theta).cos_sin(128, 131_072, 131_072, torch.device("cpu"))
    rows = torch.tensor([0, 1, 4095, 131_071])
    frequencies = theta ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    angles = torch.outer(rows.double(), frequencies)
    # float32 angles of up to 131,071 radians are off by half a unit in the last place, 2^-8
    bounds = torch.maximum(angles * 2.0**-22, torch.tensor(1e-6))
    error = (table[rows].double() - torch.cat((angles.cos(), angles.sin()), dim=1)).abs()
    assert (error <= bounds.repeat(1, 2)).all()


SPELLINGS = {
    "older names": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 3e4},
    "both names": {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
        "rope_theta": 3e4,
    },
    "an empty older name": {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "theta in both places": {"rope_parameters": {"rope_theta": 3e4}, "rope_theta": 5.0},
    "no factor key": {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": None}, "rope_theta": 3e4},
    "original length at the top": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("options", SPELLINGS.values(), ids=SPELLINGS)
def test_spellings_of_the_rotation_mean_what_transformers_reads(options):
    raw = SIZES | {"model_type": "llama"} | options
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(raw)))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    frequencies, scale = ModelConfig.from_hf(raw).rope.inverse_frequencies(8, 64, 64)
    torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(rotary.attention_scaling)


@pytest.mark.parametrize("options", [{}, {"num_key_value_heads": None}, {"head_dim": None}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_defaults_of_heads_are_those_of_transformers(kind, options):
    raw = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    raw |= {"model_type": kind, "num_attention_heads": 32, "hidden_size": 256} | options
    try:
        config = transformers.AutoConfig.for_model(**raw)
    except StrictDataclassFieldValidationError:  # the class takes no null
        with pytest.raises(ConfigError, match=f"{next(iter(options))}: expected an integer"):
            ModelConfig.from_hf(raw)
        return
    ours = ModelConfig.from_hf(raw)
    assert ours.num_kv_heads == config.num_key_value_heads
    assert ours.head_dim == (getattr(config, "head_dim", None) or 256 // 32)


UNSUPPORTED = {
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "rotation of no dimension": ({"partial_rotary_factor": 0.05}, "partial_rotary_factor 0.05"),
    "nested partial rotation": ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    "bidirectional attention": ({"is_causal": False}, "is_causal False"),
    "a config per layer": ({"per_layer_config": {"0": {}}}, "per_layer_config"),
    "older name of quantization": ({"compression_config": {"quant_method": "int"}}, "compression_config"),
    "window layers without a window": (
        {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3},
        "layer_types 'sliding_attention' without a sliding_window",
    ),
}


@pytest.mark.parametrize(("options", "text"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_keys_are_refused_by_name(options, text):
    with pytest.raises(UnsupportedError) as caught:
        ModelConfig.from_hf(SIZES | {"model_type": "llama"} | options)
    assert text in str(caught.value)


def test_keys_that_change_nothing_other_names_and_two_lists_of_end_tokens():
    options = {"partial_rotary_factor": 1.0, "is_causal": True, "quantization_config": None, "hidden_act": "swish"}
    options |= {"attention_dropout": 0.1, "pretraining_tp": 2, "sliding_window": 4, "use_cache": False}
    raw = SIZES | {"model_type": "llama"}
    assert ModelConfig.from_hf(raw | options) == ModelConfig.from_hf(raw)
    assert ModelConfig.from_hf(raw, {"suppress_tokens": [], "temperature": 0.6}) == ModelConfig.from_hf(raw)
    assert ModelConfig.from_hf(raw | {"torch_dtype": "bfloat16"}).dtype == torch.bfloat16, "an older name"
    assert ModelConfig.from_hf(raw | {"dtype": "bfloat16", "torch_dtype": "float16"}).dtype == torch.bfloat16
    assert ModelConfig.from_hf(raw | {"eos_token_id": 2}, {"eos_token_id": [5, 2, 7]}).eos_ids == (2, 5, 7)
    assert ModelConfig.from_hf(raw | {"eos_token_id": None}).eos_ids == ()


@pytest.mark.parametrize("key", ["suppress_tokens", "bad_words_ids", "forced_eos_token_id", "stop_strings"])
def test_generation_keys_that_forbid_or_force_tokens_are_refused(key):
    with pytest.raises(UnsupportedError, match=rf"^generation_config\.json: .*{key} .3"):
        ModelConfig.from_hf(SIZES | {"model_type": "llama"}, {key: [3]})


WINDOWS = {
    "mistral-default": ({"model_type": "mistral"}, (4096, 4096, 4096)),
    "mistral-none": ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
    "llama-ignores": ({"model_type": "llama", "sliding_window": 7}, (None, None, None)),
    "qwen2-off": ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": False}, (None, None, None)),
    "qwen3-beyond": (
        {"model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
        (None, 7, 7),
    ),
    "qwen2-from-the-first": (
        {"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0},
        (7, 7, 7),
    ),
}


@pytest.mark.parametrize(("options", "expected"), WINDOWS.values(), ids=WINDOWS)
def test_sliding_windows(options, expected):
    config = ModelConfig.from_hf(SIZES | options)
    assert config.sliding_windows == expected
    assert tuple(s.sliding_window for s in config.attention_specs(torch.float16)) == expected


def test_all_unsupported_missing_and_malformed_options_are_listed():
    raw = SIZES | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "gelu",
        "quantization_config": {"quant_method": "bitnet"},
        "layer_types": ["chunked_attention"] * 3,
        "rope_scaling": {"rope_type": "mrope"},
        "torch_dtype": "float8_e4m3fn",
    }
    with pytest.raises(UnsupportedError) as caught:
        ModelConfig.from_hf(raw)
    for part in ("MixtralForCausalLM", "gelu", "quantization_config", "chunked_attention", "mrope", "float8_e4m3fn"):
        assert part in str(caught.value)
    raw = {k: v for k, v in SIZES.items() if k not in ("hidden_size", "vocab_size")} | {"model_type": "llama"}
    raw |= {"num_hidden_layers": "three", "rms_norm_eps": -1.0, "rope_scaling": {"rope_type": "linear"}}
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(raw)
    for part in ("hidden_size", "vocab_size", "num_hidden_layers", "'three'", "rms_norm_eps", "factor"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"num_q_heads": 5}, {"rotary_dim": 7}, {"rotary_dim": 2}, {"sliding_windows": (4,)}, {"num_layers": 0}]
)
def test_inconsistent_sizes_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(SHAPES["llama-3.1-8b"], **change)


PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
    "smollm2-135m": 134_515_008,
    "mistral-7b": 7_241_732_096,
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_number_of_parameters(name):
    config = shape_config(name)
    model = LlamaModel(config, dtype=torch.bfloat16, device=torch.device("meta"), max_positions=8)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
    (spec,) = config.kv_groups(16, KVLayout.HND, torch.bfloat16)
    sizes = (config.num_layers, config.num_kv_heads, config.head_dim)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == sizes
