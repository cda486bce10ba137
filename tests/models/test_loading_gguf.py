"""GGUF files: logits against `transformers`, the rules of llama.cpp for metadata, and damaged files."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from graphrt.kernels.errors import ConfigError, GraphRTError, UnsupportedError
from graphrt.models.config import ModelConfig
from graphrt.models.gguf import GGUFSource
from graphrt.models.gguf_file import read_gguf
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import load_model
from tests.engine.test_ranks import Group
from tests.support.model_fixtures import check_logits, check_shards, make_oracle

gguf = pytest.importorskip("gguf")

Q = gguf.GGMLQuantizationType
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows of q or k as llama.cpp stores them for the llama architecture: rotated pairs are neighbors."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder, model: transformers.PreTrainedModel, kind=Q.F32, *, keys=None, extra=None, drop=()):
    """Write a model of `transformers` as llama.cpp's converter would, with matrices as `kind`. Return the path."""
    config, name, path = model.config, model.config.model_type, folder / "model.gguf"
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(config.head_dim if name == "qwen3" else config.hidden_size // config.num_attention_heads)
    writer.add_eos_token_id(2)
    for key, value in (keys or {}).items():
        writer.add_key_value(f"{name}.{key}", value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, name.upper()), config.num_hidden_layers)
    tensors = {}
    for hf_name, weight in model.state_dict().items():
        base, suffix = hf_name.rsplit(".", 1)
        values = weight.float().numpy()
        if name == "llama" and "q_proj" in base:
            values = interleaved(values, config.num_attention_heads)
        if name == "llama" and "k_proj" in base:
            values = interleaved(values, config.num_key_value_heads)
        if not (config.tie_word_embeddings and base == "lm_head"):
            tensors[f"{names.get_name(base)}.{suffix}"] = np.ascontiguousarray(values)
    for tensor_name, values in (tensors | (extra or {})).items():
        if tensor_name not in drop:
            stored = kind if values.ndim == 2 else Q.F32
            writer.add_tensor(tensor_name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


FILES = {
    "llama-f32": ("Llama", {}, Q.F32),
    "llama-f16": ("Llama", {}, Q.F16),
    "llama-bf16": ("Llama", {}, Q.BF16),
    "llama-q8_0": ("Llama", {}, Q.Q8_0),
    "llama-q4_0": ("Llama", {"tie_word_embeddings": True}, Q.Q4_0),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}, Q.F32),
    "qwen2-q5_1": ("Qwen2", {}, Q.Q5_1),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}, Q.F32),
    "qwen3-q4_1": ("Qwen3", {"head_dim": 32}, Q.Q4_1),
}


@pytest.mark.parametrize(("architecture", "options", "kind"), FILES.values(), ids=FILES)
def test_logits_equal_transformers_on_the_same_file(tmp_path, architecture, options, kind):
    original = make_oracle(architecture, **(SIZES | options))
    path = write_gguf(tmp_path, original, kind)
    loaded = load_model(path, device="cpu")
    # head_dim of qwen3 is not read from the file by transformers
    fix = {"head_dim": options["head_dim"]} if architecture == "Qwen3" else {}
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf", **fix)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", config=config, dtype=torch.float32, attn_implementation="eager"
    )
    check_logits(loaded.model, oracle.eval())
    if kind == Q.F32:
        check_logits(loaded.model, original)
    assert loaded.config.tie_word_embeddings == original.config.tie_word_embeddings
    assert loaded.config.eos_ids == (2,)
    assert loaded.tokenizer_source == path


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_KEYS = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 16}
ROPES = {
    "linear": ({"scaling.type": "linear", "scaling.factor": 4.0}, LINEAR),
    "factor without a type": ({"scaling.factor": 4.0}, LINEAR),
    "older key": ({"scale_linear": 4.0}, LINEAR),
    "both keys": ({"scaling.factor": 4.0, "scale_linear": 2.0}, LINEAR),
    "older key with a type": ({"scaling.type": "linear", "scale_linear": 4.0}, LINEAR),
    "factor 0 is 1": ({"scaling.factor": 0.0}, {"rope_type": "default"}),
    "type without a factor": ({"scaling.type": "linear"}, {"rope_type": "default"}),
    "none ignores the factor": ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope_type": "default"}),
    "base": ({"freq_base": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
    "yarn": (YARN_KEYS, YARN),
    "yarn ramp": (
        YARN_KEYS | {"scaling.yarn_beta_fast": 2.0, "scaling.yarn_beta_slow": 0.1},
        YARN | {"beta_fast": 2.0, "beta_slow": 0.1},
    ),
    "yarn attention": (
        YARN_KEYS | {"scaling.attn_factor": 1.7},
        YARN | {"attention_factor": 1.7 * (1 + 0.1 * math.log(4))},
    ),
}


@pytest.mark.parametrize(("keys", "rope"), ROPES.values(), ids=ROPES)
def test_rope_scaling(tmp_path, keys, rope):
    """Of a model with biases, of which those of q and k are reordered like the weights."""
    biases = {"attention_bias": True, "mlp_bias": True}
    original = make_oracle("Llama", **SIZES, **biases, rope_parameters={"rope_theta": 1e4} | rope)
    path = write_gguf(tmp_path, original, keys={f"rope.{k}": v for k, v in keys.items()})
    loaded = load_model(path, device="cpu")
    check_logits(loaded.model, original)
    assert (loaded.config.qkv_bias, loaded.config.o_bias, loaded.config.mlp_bias) == (True, True, True)


def test_attention_factor_and_frequency_factors_apply_to_every_scaling(tmp_path):
    """llama.cpp divides all frequencies by `rope_freqs`, and multiplies cosines and sines by `attn_factor`.

    Factors must be finite numbers > 0.
    """
    original = make_oracle("Llama", **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    factors = torch.linspace(1, 3, 8)
    original.model.rotary_emb.inv_freq /= factors
    original.model.rotary_emb.attention_scaling = 1.5
    keys = {"rope.scale_linear": 4.0, "rope.scaling.attn_factor": 1.5}
    path = write_gguf(tmp_path, original, keys=keys, extra={"rope_freqs.weight": factors.numpy()})
    check_logits(load_model(path, device="cpu").model, original)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        factors[3] = wrong
        write_gguf(tmp_path, original, keys=keys, extra={"rope_freqs.weight": factors.numpy()})
        with pytest.raises(ConfigError, match=r"rope_freqs\.weight: expected finite numbers > 0"):
            load_model(path, device="cpu")


def test_the_output_tensor_is_always_the_head(tmp_path):
    original = make_oracle("Qwen2", **SIZES, tie_word_embeddings=False)
    path = write_gguf(tmp_path, original)
    loaded = load_model(path, device="cpu")
    assert not loaded.config.tie_word_embeddings
    config = replace(loaded.config, tie_word_embeddings=True)
    model = LlamaModel(config, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs"):
        model.load_weights(GGUFSource(path))


def test_frequency_factors_of_llama3(tmp_path):
    """llama.cpp stores Llama 3's scaling as a tensor of divisors."""
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = make_oracle("Llama", **SIZES, rope_parameters=rope | {"original_max_position_embeddings": 32})
    plain = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    factors = plain / original.model.rotary_emb.inv_freq
    assert factors.max() > 7
    path = write_gguf(tmp_path, original, extra={"rope_freqs.weight": factors.numpy()})
    check_logits(load_model(path, device="cpu").model, original)


def test_large_tensors_are_dequantized_in_parts(tmp_path, monkeypatch):
    path = write_gguf(tmp_path, make_oracle("Llama", **SIZES), Q.Q8_0)
    whole = load_model(path, device="cpu").model
    monkeypatch.setattr("graphrt.models.gguf._CHUNK_ELEMENTS", 5 * 64)
    parts = load_model(path, device="cpu").model
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.Q8_0])
def test_a_rank_reads_its_part_of_each_tensor(tmp_path, kind):
    """Three KV heads of 32 and one of zeros, and columns that start inside a block of 32."""
    sizes = SIZES | {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 192, "intermediate_size": 160}
    source = GGUFSource(write_gguf(tmp_path, make_oracle("Llama", **sizes), kind))
    whole = LlamaModel(source.config, dtype=torch.float32, device=torch.device("cpu"))
    whole.load_weights(source)
    for name, tensor in whole.weight_targets().items():
        rows = [slice(0, 96), slice(96, len(tensor))] if tensor.shape[0] >= 192 else [slice(None)]
        for index in [(row,) for row in rows] + [(slice(None), slice(40, 100))] * (tensor.dim() == 2):
            part = torch.empty_like(tensor[index])
            source.copy_into(name, part, index)
            assert torch.equal(part, tensor[index]), (name, index)


def test_table_of_contents_equals_the_readers_of_gguf(tmp_path):
    path = write_gguf(tmp_path, make_oracle("Llama", **SIZES), Q.Q4_0)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {name: f.contents() for name, f in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(tensor.shape.tolist()[::-1])
        assert (mine.offset, mine.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert ours.raw(tensor.name).tobytes() == tensor.data.tobytes()


@pytest.fixture
def intact(tmp_path):
    return write_gguf(tmp_path, make_oracle("Llama", **SIZES, num_hidden_layers=1), Q.Q8_0)


def test_a_file_truncated_anywhere_is_refused(intact):
    content = intact.read_bytes()
    tensors = read_gguf(intact).tensors.values()
    header, end = min(t.offset for t in tensors), max(t.offset + t.num_bytes for t in tensors)
    for length in [*range(0, header, 7), header, (header + end) // 2, end - 1]:
        intact.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"model\.gguf: (the GGUF file is damaged|not a )"):
            GGUFSource(intact)


def test_a_flipped_byte_in_the_header_is_refused_or_harmless(intact):
    """No hang, no crash, no other error. What is accepted has the right shapes."""
    content = intact.read_bytes()
    header = min(t.offset for t in read_gguf(intact).tensors.values())
    refused = 0
    for position in range(0, header, 5):
        for bits in (0x01, 0x80):
            damaged = bytearray(content)
            damaged[position] ^= bits
            intact.write_bytes(damaged)
            try:
                source = GGUFSource(intact)
                model = LlamaModel(source.config, dtype=torch.float32, device=torch.device("meta"), max_positions=1)
                model.check_weights(source)
            except GraphRTError:
                refused += 1
    assert refused > header // 5


DAMAGE = [
    (0, b"GGML", ConfigError, "because it starts with b'GGML'; download it again"),
    (4, b"\x09\0\0\0", UnsupportedError, "version 0x9"),
    (4, b"\0\0\0\x03", UnsupportedError, "little-endian.*0x3000000"),
    *((place, b"\xff" * 8, ConfigError, "it lists 18446744073709551615 items") for place in (8, 16, 24)),
]
"""Numbers of tensors and keys, and the length of a key, at bytes 8, 16 and 24."""


@pytest.mark.parametrize(("offset", "data", "error", "match"), DAMAGE)
def test_damaged_headers_say_what_is_wrong(intact, offset, data, error, match):
    content = bytearray(intact.read_bytes())
    content[offset : offset + len(data)] = data
    intact.write_bytes(content)
    with pytest.raises(error, match=match):
        load_model(intact, device="cpu")


UNUSUAL = {
    "mixture of experts": ({"expert_count": 8}, "llama.expert_count 8"),
    "rope scaling": ({"rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope'"),
    "value heads": ({"attention.value_length": 32}, "attention.value_length 32"),
    "attention scale": ({"attention.scale": 0.5}, "attention.scale"),
    "logit scale": ({"logit_scale": 0.5}, "llama.logit_scale 0.5"),
    "bidirectional": ({"attention.causal": False}, "llama.attention.causal False"),
    "partial rotation": ({"rope.dimension_count": 8}, "rope.dimension_count 8"),
    "window": ({"attention.sliding_window": 8}, "attention.sliding_window 8"),
    "yarn": ({"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor 0.5"),
    "unknown key": ({"rope.nonsense": 1}, "the key llama.rope.nonsense"),
}


@pytest.mark.parametrize(("keys", "match"), UNUSUAL.values(), ids=UNUSUAL)
def test_unsupported_metadata_is_refused_by_key(tmp_path, keys, match):
    path = write_gguf(tmp_path, make_oracle("Llama", **SIZES), keys=keys)
    with pytest.raises(UnsupportedError, match=match):
        load_model(path, device="cpu")


def test_other_architectures_are_refused():
    with pytest.raises(UnsupportedError, match=r"'gemma3' \(supported: llama, qwen2, qwen3"):
        ModelConfig.from_gguf({"general.architecture": "gemma3"}, {})


def test_missing_unknown_and_misshaped_tensors_are_listed(tmp_path):
    extra = {"blk.0.attn_sinks.weight": np.ones(3, np.float32), "output_norm.weight": np.ones(32, np.float32)}
    path = write_gguf(tmp_path, make_oracle("Llama", **SIZES), extra=extra, drop=["blk.1.ffn_up.weight"])
    with pytest.raises(ConfigError) as caught:
        load_model(path, device="cpu")
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "1 unknown: blk.0.attn_sinks.weight" in str(caught.value)
    assert "1 of the wrong shape: model.norm.weight [32] instead of [64]" in str(caught.value)


def edit_metadata(path, key, value):
    """Read the file's config with another value in its metadata, as a damaged or hostile file would have it."""
    file = read_gguf(path)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    return lambda: ModelConfig.from_gguf(file.metadata | {key: value}, shapes)


WRONG_FIELDS = {
    "general.architecture": ["", 3, None],
    "llama.embedding_length": [[64], 64.0, "64", True, 1 << 40, None],
    "llama.block_count": [[3, 3, 3], 1 << 20],
    "llama.attention.head_count": [[4, 3], [], [True], [4.0]],
    "llama.attention.head_count_kv": [[2, 2, "a"], 0],
    "llama.attention.layer_norm_rms_epsilon": [[1e-6], "a", float("nan"), 0.0, True],
    "llama.rope.freq_base": [[1e4], 1.0, float("inf"), "a"],
    "llama.rope.scaling.type": [["yarn"], 3],
    "llama.attention.sliding_window": [[7], "a"],
    "tokenizer.ggml.eos_token_id": ["a", -1, [[2]], True, 1 << 60],
    "tokenizer.ggml.tokens": [["a"] * 96],  # token_embd.weight has 97 rows
}


@pytest.mark.parametrize("key", WRONG_FIELDS)
def test_metadata_of_another_type_is_refused_by_key(tmp_path, key):
    path = write_gguf(tmp_path, make_oracle("Llama", **SIZES))
    for wrong in WRONG_FIELDS[key]:
        with pytest.raises((ConfigError, UnsupportedError), match=re.escape(key.removeprefix("llama."))):
            edit_metadata(path, key, wrong)()
    assert edit_metadata(path, "llama.attention.head_count_kv", [2, 2, 2])().num_kv_heads == 2, "equal in all layers"


SHARDS = {  # architecture, its sizes, ranks; 2 heads of 24 end inside a block of 32
    "blocks": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2}, Q.Q4_0, 2),
    "padded": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 3}, Q.Q8_0, 2),
    "copies": ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 1}, Q.Q5_1, 4),
}


@pytest.mark.parametrize("case", SHARDS)
def test_shards_are_slices_of_the_whole_model(tmp_path, case):
    family, sizes, kind, ranks = SHARDS[case]
    oracle = make_oracle(family, **{"hidden_size": 96, "intermediate_size": 160} | sizes)
    source, shards = GGUFSource(write_gguf(tmp_path, oracle, kind)), []
    for group in (None, *(Group(rank, ranks) for rank in range(ranks))):
        model = LlamaModel(source.config, dtype=torch.float32, device=torch.device("cpu"), group=group)
        for weight in model.parameters():
            weight.fill_(math.nan)  # padding must be written
        model.load_weights(source)
        shards.append(model.weight_targets())
    check_shards(shards[1:], shards[0], model.sharding.kv_copies)
