"""Hostile or broken files and wrong arguments end in typed errors, and no file outside the model is opened."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from graphrt.kernels.errors import ConfigError, GraphRTError, UnsupportedError
from graphrt.models.config import ModelConfig
from graphrt.models.fields import FieldReader
from graphrt.models.gguf import GGUFSource
from graphrt.models.gguf_file import read_gguf
from graphrt.models.hf import SafetensorsSource, read_config
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import load_model, resolve_source
from graphrt.models.rope import RopeConfig
from graphrt.models.shapes import SHAPES, shape_config
from graphrt.models.tokenizer import Tokenizer, load_tokenizer
from tests.support.model_fixtures import SIZES, byte_tokenizer, save_oracle

LLAMA = SIZES | {"model_type": "llama"}
DEEP = "[" * 100_000 + "]" * 100_000  # Python 3.12 reads 5000 levels
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_oracle(tmp_path / "model", "Llama")
    return tmp_path / "model"


# JSON files


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "content", [DEEP, '{"a": ' + DEEP + "}", "{", "[1]", '"abc"', "null", "\xff", "9" * 5000], ids=len
)
def test_malformed_json_is_refused(folder: Path, name: str, content: str) -> None:
    (folder / name).write_bytes(content.encode("latin-1"))
    (folder / "model.safetensors").unlink()  # the index counts without it
    with pytest.raises(ConfigError, match=rf"{name}: (not a readable JSON file|expected a JSON object)"):
        load_model(folder, device="cpu")


VALUES = {
    "rope_theta-list": ({"rope_theta": [1]}, r"rope_theta: expected a number > 1 and <= 1e\+15, got \[1\]"),
    "rope_theta-one": ({"rope_theta": 1}, "rope_theta: expected a number > 1"),
    "rope_theta-bool": ({"rope_theta": True}, "rope_theta: expected a number > 1"),
    "rope_theta-huge": ({"rope_theta": 10**400}, "rope_theta: expected a number > 1"),
    "rope_theta-infinite": ({"rope_theta": float("inf")}, "rope_theta: expected a number > 1"),
    "rope_theta-nested": ({"rope_parameters": {"rope_theta": [5e5]}}, r"rope_theta: .* got \[500000\.0\]"),
    "rope-text": ({"rope_parameters": "abc"}, "rope_parameters: expected an object, got 'abc'"),
    "rope-number": ({"rope_scaling": 4}, "rope_scaling: expected an object, got 4"),
    "rope-zero": ({"rope_scaling": 0}, "rope_scaling: expected an object, got 0"),
    "rope-type": ({"rope_scaling": {"rope_type": ["linear"]}}, r"rope_type: expected a string, got \['linear'\]"),
    "rope-factor": ({"rope_scaling": {"rope_type": "linear", "factor": [2.0]}}, r"factor: expected .* got \[2\.0\]"),
    "rope-original": ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}}, "got 0"),
    "hidden_size-list": ({"hidden_size": [48]}, r"hidden_size: expected an integer .*, got \[48\]"),
    "heads-list": ({"num_attention_heads": [6, 6, 6]}, "num_attention_heads: expected an integer"),
    "layers-float": ({"num_hidden_layers": 3.0}, r"num_hidden_layers: expected an integer .* got 3\.0"),
    "eps-list": ({"rms_norm_eps": [1e-6]}, "rms_norm_eps: expected a number > 0"),
    "eps-text": ({"rms_norm_eps": "1e-6"}, "rms_norm_eps: expected a number > 0"),
    "bias-list": ({"attention_bias": [True]}, r"attention_bias: expected true or false, got \[True\]"),
    "tie-number": ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
    "act-list": ({"hidden_act": ["silu"]}, r"hidden_act: expected a string, got \['silu'\]"),
    "dtype-list": ({"dtype": ["float32"]}, r"dtype: expected a string, got \['float32'\]"),
    "architectures-text": ({"architectures": "LlamaForCausalLM"}, "architectures: expected a list of strings"),
    "layer_types-text": ({"layer_types": "full_attention"}, "layer_types: expected a list of strings"),
    "layer_types-mixed": ({"layer_types": [None]}, r"layer_types: expected a list of strings, got \[None\]"),
    "partial-large": ({"partial_rotary_factor": 1e300}, "partial_rotary_factor: expected a number > 0 and <= 1"),
    "partial-nested": (
        {"rope_parameters": {"partial_rotary_factor": [0.5]}},
        r"partial_rotary_factor: .* got \[0\.5\]",
    ),
    "eos-text": ({"eos_token_id": "2"}, "eos_token_id: expected token ids"),
    "eos-large": ({"eos_token_id": 10**30}, "eos_token_id: expected token ids"),
    "eos-nested": ({"eos_token_id": [[2]]}, "eos_token_id: expected token ids"),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_of_another_type_are_refused_by_key(case: str) -> None:
    change, text = VALUES[case]
    with pytest.raises(GraphRTError, match=text):
        ModelConfig.from_hf(LLAMA | change)


def test_a_generation_config_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="eos_token_id: expected token ids"):
        ModelConfig.from_hf(LLAMA, {"eos_token_id": {"a": 1}})
    for wrong in ([], 0, "abc"):
        with pytest.raises(ConfigError, match=r"generation_config\.json: expected an object of names and values"):
            ModelConfig.from_hf(LLAMA, wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="expected an object of names and values"):
            ModelConfig.from_hf(wrong)  # type: ignore[arg-type]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["yarn", "llama3"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = [
    *LLAMA, "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "rms_norm_eps", "tie_word_embeddings", "dtype",
    "architectures", "hidden_act", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers",
    "partial_rotary_factor", "attention_bias", "mlp_bias", "quantization_config", "original_max_position_embeddings",
]  # fmt: skip
ROPE_NAMES = [
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor", "short_factor", "long_factor",
]  # fmt: skip
ROPES = st.dictionaries(
    st.sampled_from(ROPE_NAMES),
    st.sampled_from(["linear", "dynamic", "llama3", "yarn", "longrope", 1, 2.0, 1e15, 1e-300, 0.5, [1.0] * 4]) | JSON,
)


@settings(max_examples=150, deadline=None)
@given(
    change=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3),
    rope=st.none() | ROPES,
    kind=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
)
def test_any_config_is_read_or_refused(change: dict, rope: dict | None, kind: str) -> None:
    """An accepted config has finite frequencies."""
    raw = LLAMA | {"model_type": kind} | ({} if rope is None else {"rope_parameters": rope}) | change
    try:
        config = ModelConfig.from_hf(raw)
    except (ConfigError, UnsupportedError):
        return
    inverse, scale = config.rope.inverse_frequencies(config.rotary_dim, config.max_position_embeddings, 64)
    assert inverse.shape == (config.rotary_dim // 2,)
    assert not inverse.isnan().any()
    assert scale == scale


# Names of files


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "/tmp/x.safetensors", "../model.safetensors", "a/../../x.safetensors", "..", "", ".", "config.json",
     "x" * 5000 + ".safetensors", "a\0.safetensors", None, 3, ["model.safetensors"], {"a": 1}],
    ids=lambda name: repr(name)[:24],
)  # fmt: skip
def test_an_index_may_not_lead_out_of_the_folder(folder: Path, name: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is refused although the file exists, and no file is opened."""
    (folder.parent / "x.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    opened: list[object] = []
    monkeypatch.setattr("safetensors.safe_open", lambda *arguments, **_: opened.append(arguments))
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json: expected .* in weight_map, got"):
        load_model(folder, device="cpu")
    assert opened == []


def test_an_index_may_name_a_subfolder_and_a_link(folder: Path) -> None:
    """The cache of the Hugging Face hub consists of links."""
    store = folder.parent / "store.safetensors"
    (folder / "model.safetensors").rename(store)
    (folder / "part").mkdir()
    (folder / "part" / "one.safetensors").symlink_to(store)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part/one.safetensors"}}))
    assert load_model(folder, device="cpu").config.num_layers == 3


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_is_refused_without_reading_it(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match=f"{name}: not a readable JSON file"):
        load_model(folder, device="cpu")


# Arguments of another type

WRONG = [None, 3, 1.5, b"abc", ["a"], object(), torch.zeros(2)]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda x: type(x).__name__)
def test_sources_of_another_type_are_refused(wrong: object) -> None:
    for call in (
        lambda: load_model(wrong, device="cpu"),
        lambda: resolve_source(wrong),
        lambda: load_tokenizer(wrong),
        lambda: read_gguf(wrong),
        lambda: GGUFSource(wrong),
        lambda: SafetensorsSource(wrong),
        lambda: read_config(wrong),
        lambda: shape_config(wrong),
        lambda: FieldReader(wrong, "x"),
    ):
        with pytest.raises(ConfigError, match="expected"):
            call()


@pytest.mark.parametrize(
    "source", ["", "~nobody-of-this-name/x", "x" * 5000, "a\0b", ".", "/", "dummy:", "dummy:gpt-5"]
)
def test_sources_that_name_no_model_are_refused(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        load_model(source, device="cpu")


ARGUMENTS = {
    "device-name": {"device": "abc"},
    "device-empty": {"device": ""},
    "device-none": {"device": None},
    "device-number": {"device": 3},
    "device-list": {"device": []},
    "device-meta": {"device": "meta"},
    "dtype-text": {"dtype": "bfloat16"},
    "dtype-none": {"dtype": None},
    "dtype-list": {"dtype": []},
    "positions-text": {"max_positions": "many"},
    "positions-float": {"max_positions": 1.5},
    "positions-bool": {"max_positions": True},
    "positions-large": {"max_positions": 1 << 62},
    "seed-text": {"seed": "a"},
    "seed-negative": {"seed": -1},
    "seed-large": {"seed": 1 << 64},
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_wrong_arguments_of_load_model_are_refused(case: str, folder: Path) -> None:
    (name,) = ARGUMENTS[case]
    text = "the meta device cannot compute" if case == "device-meta" else "expected"
    with pytest.raises(ConfigError, match=rf"^{name}: {text}"):
        load_model(folder, **({"device": "cpu"} | ARGUMENTS[case]))


def test_wrong_arguments_of_the_model_are_refused(folder: Path) -> None:
    config = read_config(folder)
    for wrong in (*WRONG, "abc"):
        with pytest.raises(ConfigError, match=r"^config: expected a ModelConfig"):
            LlamaModel(wrong, dtype=torch.float32, device=CPU)
        with pytest.raises(ConfigError, match=r"^dtype: expected one of"):
            LlamaModel(config, dtype=wrong, device=CPU)
        with pytest.raises(ConfigError, match=r"^device: expected a torch\.device"):
            LlamaModel(config, dtype=torch.float32, device=wrong)


@pytest.mark.parametrize("wrong", [*WRONG, "abc", {"a": 1}, {3: torch.zeros(2)}], ids=lambda x: type(x).__name__)
def test_weights_of_another_type_are_refused(folder: Path, wrong: object) -> None:
    model = load_model(folder, device="cpu").model
    before = [weight.clone() for weight in model.parameters()]
    with pytest.raises(ConfigError, match=r"^weights: expected"):
        model.load_weights(wrong)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


CONFIGS = {
    "architecture": ["gpt", None, []],
    "rms_norm_eps": ["a", float("nan"), 0.0, None, True],
    "rope": [None, "yarn", {}],
    "rotary_dim": ["a", 1.5, -2],
    "sliding_windows": [[None] * 32, ("a",) * 32, (0,) * 32],
    "qkv_bias": [1, "yes", None],
    "tie_word_embeddings": ["no"],
    "dtype": ["float32", torch.int8, []],
    "eos_ids": [[2], ("a",), (-1,), 2],
    "num_layers": ["a", 1.5, None, True],
}


@pytest.mark.parametrize("field", CONFIGS)
def test_wrong_fields_of_a_model_config_are_refused(field: str) -> None:
    for wrong in CONFIGS[field]:
        with pytest.raises(ConfigError, match=rf"^ModelConfig\.{field}: expected"):
            replace(SHAPES["llama-3.1-8b"], **{field: wrong})


ROPE_FIELDS = {
    "kind": ["abc", None, []],
    "theta": [1.0, 0, "a", None, float("inf"), 1e300, True],
    "factor": [0, -1.0, "a", [2.0]],
    "original_positions": [-1, 1.5, "a"],
    "attention_factor": ["a", 0.0],
    "truncate": [1, None],
    "short_factor": [[1.0], (0.0,), ("a",), 3],
    "freq_factors": [(float("nan"),), "abc"],
}


@pytest.mark.parametrize("field", ROPE_FIELDS)
def test_wrong_fields_of_a_rope_config_are_refused(field: str) -> None:
    for wrong in ROPE_FIELDS[field]:
        with pytest.raises(ConfigError, match=rf"^RopeConfig\.{field}: expected"):
            RopeConfig(**{field: wrong})


def test_incomplete_rope_configs_are_refused() -> None:
    for kind in ("yarn", "llama3", "longrope"):
        with pytest.raises(ConfigError, match=r"RopeConfig\.original_positions: expected an int"):
            RopeConfig(kind)
    with pytest.raises(ConfigError, match=r"high_freq_factor: expected more than low_freq_factor=4\.0, got 4\.0"):
        RopeConfig("llama3", original_positions=8, low_freq_factor=4.0)
    with pytest.raises(ConfigError, match=r"RopeConfig\.short_factor: expected 4 values, got 0"):
        RopeConfig("longrope", original_positions=8).inverse_frequencies(8, 64, 64)
    with pytest.raises(ConfigError, match="rotary_dim: expected an int >= 4, got 2"):
        RopeConfig("dynamic").inverse_frequencies(2, 64, 64)


# The tokenizer


def test_wrong_arguments_of_the_tokenizer_are_refused() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    for wrong in (None, 3, "", "a\udcff", b"abc", ["a"]):
        with pytest.raises(ConfigError, match=r"^prompt: "):
            tokenizer.encode_prompt(wrong, chat=False)
    for wrong in (None, 3, "abc", [1.5], [-1], [1 << 40], ["a"], [None]):
        with pytest.raises(ConfigError, match=r"^ids: expected"):
            tokenizer.decode(wrong)
    for wrong in (None, "a", -1, 1.5, 1 << 40):
        with pytest.raises(ConfigError, match=r"^token: expected"):
            tokenizer.stream().push(wrong)
    with pytest.raises(ConfigError, match=r"^backend: expected"):
        Tokenizer("abc")
    with pytest.raises(ConfigError, match=r"^chat_template: expected"):
        Tokenizer(byte_tokenizer(), 3)
    with pytest.raises(ConfigError, match=r"^eos_ids: expected"):
        Tokenizer(byte_tokenizer(), None, "abc")
    assert tokenizer.decode(torch.tensor([3]).tolist()) == tokenizer.decode((3,))


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ messages[9].content }}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}"]
)
def test_failing_chat_templates_are_reported(template: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), template)
    with pytest.raises(ConfigError, match=r"^chat template: cannot render a user message"):
        tokenizer.encode_prompt("hi", chat=True)


TOKENIZERS = [DEEP, "{}", "[]", "\xff", '{"version": "1.0", "model": {"type": "BPE"}}']


@pytest.mark.parametrize("content", TOKENIZERS, ids=len)
def test_damaged_tokenizer_files_are_refused(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="cannot read a tokenizer"):
        load_tokenizer(folder)


def test_a_rust_panic_becomes_a_typed_error(folder: Path) -> None:
    """The panics of the package tokenizers are no Exception."""
    byte_tokenizer().save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="PanicException"):
        load_tokenizer(folder).encode_prompt("hi", chat=False)


WRONG_TOKENIZER_CONFIGS = {
    "eos_token": [3, [1], {"a": 1}],
    "chat_template": [3, [1], [{"name": "default"}], {"default": 3}],
    "added_tokens_decoder": [3, {"a": 1}, {"1": 3}],
    "additional_special_tokens": [3, [[1]]],
    "model_max_length": ["a", {}],
    "tokenizer_class": [3, ["a"]],
}


@pytest.mark.parametrize("key", WRONG_TOKENIZER_CONFIGS)
def test_a_wrong_type_in_tokenizer_config_is_a_typed_error_or_harmless(folder: Path, key: str) -> None:
    byte_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    original = json.loads(path.read_text())
    for wrong in WRONG_TOKENIZER_CONFIGS[key]:
        path.write_text(json.dumps(original | {key: wrong}))
        with contextlib.suppress(ConfigError):
            tokenizer = load_tokenizer(folder)
            ids = tokenizer.encode_prompt("hi", chat=tokenizer.has_chat_template)
            assert tokenizer.decode(ids) == "hi"


# Terminals


ESCAPE = "\x1b]0;owned\x07"


def test_names_in_a_file_reach_no_terminal_as_escape_sequences(folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)

    def load(**tensor: torch.Tensor) -> None:
        save_file(tensors | {f"a{ESCAPE}": value for value in tensor.values()}, weights)
        load_model(folder, device="cpu")

    def index(name: str) -> None:
        weights.unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        load_model(folder, device="cpu")

    template = f"{{{{ raise_exception('{ESCAPE}') }}}}"
    for call in (
        lambda: load(extra=torch.ones(1)),
        lambda: load(extra=torch.ones(1, dtype=torch.int8)),
        lambda: index(f"{ESCAPE}.safetensors"),
        lambda: ModelConfig.from_hf(LLAMA | {"model_type": ESCAPE, "hidden_act": ESCAPE}),
        lambda: ModelConfig.from_hf(LLAMA | {"rms_norm_eps": ESCAPE}),
        lambda: ModelConfig.from_gguf({"general.architecture": "llama", f"llama.{ESCAPE}": 1}, {}),
        lambda: Tokenizer(byte_tokenizer(), template).encode_prompt("hi", chat=True),
        lambda: load_model(f"/nowhere/{ESCAPE}", device="cpu"),
    ):
        with pytest.raises(GraphRTError) as caught:
            call()
        text = str(caught.value)
        assert "owned" in text or "1b" in text
        assert text.isprintable(), text


@pytest.mark.parametrize(
    "path", ["x" * 5000, "a\0b", "/".join("a" * 200 for _ in range(30))], ids=["name", "NUL", "path"]
)
def test_paths_that_the_system_refuses_are_typed_errors(path: str) -> None:
    for call in (load_tokenizer, read_gguf, GGUFSource, SafetensorsSource, read_config, resolve_source):
        with pytest.raises(ConfigError, match="is not a usable path"):
            call(path)


def test_code_in_a_tokenizer_folder_does_not_run(folder: Path, tmp_path: Path) -> None:
    """Code that a folder contains never runs, and no question is asked."""
    byte_tokenizer().save_pretrained(folder)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    path = folder / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    with contextlib.suppress(ConfigError):
        load_tokenizer(folder)
    assert not (tmp_path / "ran").exists()
