"""Hostile or broken files and wrong arguments end in typed errors, and no file outside the model is opened."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt.kernels.errors import ConfigError, GraphRTError, UnsupportedError
from graphrt.models.config import ModelConfig
from graphrt.models.loading import load_model
from graphrt.models.rope import RopeConfig
from graphrt.models.tokenizer import Tokenizer, load_tokenizer
from tests.support.model_fixtures import SIZES, byte_tokenizer, edit_json, edit_weights, save_oracle, write_index

LLAMA = SIZES | {"model_type": "llama"}
DEEP = "[" * 100_000 + "]" * 100_000  # Python 3.12 reads 5000 levels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_oracle(tmp_path / "model", "Llama")
    return tmp_path / "model"


# JSON files


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [DEEP, "{", "[1]", "\xff", "9" * 5000, None], ids=lambda text: len(text or ""))
def test_malformed_json_is_refused(folder: Path, name: str, content: str | None) -> None:
    """As is a pipe, without reading it."""
    (folder / name).unlink(missing_ok=True)
    (folder / "model.safetensors").unlink()  # the index counts without it
    if content is None:
        os.mkfifo(folder / name)
    else:
        (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"{name}: (not a readable JSON file|expected a JSON object)"):
        load_model(folder, device="cpu")


VALUES = [
    ({"rope_theta": [1]}, r"rope_theta: expected a number > 1 and <= 1e\+15, got \[1\]"),
    ({"rope_theta": 1}, "rope_theta: expected a number > 1"),
    ({"rope_theta": True}, "rope_theta: expected a number > 1"),
    ({"rope_theta": 10**400}, "rope_theta: expected a number > 1"),
    ({"rope_parameters": {"rope_theta": [5e5]}}, r"rope_theta: .* got \[500000\.0\]"),
    ({"rope_parameters": "abc"}, "rope_parameters: expected an object, got 'abc'"),
    ({"rope_scaling": 0}, "rope_scaling: expected an object, got 0"),
    ({"rope_scaling": {"rope_type": ["linear"]}}, r"rope_type: expected a string, got \['linear'\]"),
    ({"rope_scaling": {"rope_type": "linear", "factor": [2.0]}}, r"factor: expected .* got \[2\.0\]"),
    ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}}, "got 0"),
    ({"hidden_size": [48]}, r"hidden_size: expected an integer .*, got \[48\]"),
    ({"num_attention_heads": [6, 6, 6]}, "num_attention_heads: expected an integer"),
    ({"num_hidden_layers": 3.0}, r"num_hidden_layers: expected an integer .* got 3\.0"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps: expected a number > 0"),
    ({"attention_bias": [True]}, r"attention_bias: expected true or false, got \[True\]"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
    ({"hidden_act": ["silu"]}, r"hidden_act: expected a string, got \['silu'\]"),
    ({"dtype": ["float32"]}, r"dtype: expected a string, got \['float32'\]"),
    ({"architectures": "LlamaForCausalLM"}, "architectures: expected a list of strings"),
    ({"layer_types": [None]}, r"layer_types: expected a list of strings, got \[None\]"),
    ({"partial_rotary_factor": 1e300}, "partial_rotary_factor: expected a number > 0 and <= 1"),
    ({"rope_parameters": {"partial_rotary_factor": [0.5]}}, r"partial_rotary_factor: .* got \[0\.5\]"),
    ({"eos_token_id": "2"}, "eos_token_id: expected token ids"),
    ({"eos_token_id": 10**30}, "eos_token_id: expected token ids"),
    ({"eos_token_id": [[2]]}, "eos_token_id: expected token ids"),
]


@pytest.mark.parametrize(("change", "text"), VALUES, ids=lambda x: str(x)[:40])
def test_values_of_another_type_are_refused_by_key(change: dict, text: str) -> None:
    with pytest.raises(GraphRTError, match=text):
        ModelConfig.from_hf(LLAMA | change)


def test_a_generation_config_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^generation_config\.json: eos_token_id: expected token ids"):
        ModelConfig.from_hf(LLAMA, {"eos_token_id": {"a": 1}})
    with pytest.raises(ConfigError, match=r"generation_config\.json: expected an object of names and values"):
        ModelConfig.from_hf(LLAMA, [])  # type: ignore[arg-type]


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
    ["/tmp/x.safetensors", "../model.safetensors", "a/../../x.safetensors", "..", "", "config.json",
     "x" * 5000 + ".safetensors", "a\0.safetensors", None, ["model.safetensors"]],
    ids=lambda name: repr(name)[:24],
)  # fmt: skip
def test_an_index_may_not_lead_out_of_the_folder(folder: Path, name: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is refused although the file exists, and no file is opened."""
    (folder.parent / "x.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    write_index(folder, {"a": name})
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
    write_index(folder, {"a": "part/one.safetensors"})
    assert load_model(folder, device="cpu").config.num_layers == 3


@pytest.mark.parametrize(
    ("source", "text"),
    [(None, ""), ("", ""), ("~nobody-of-this-name/x", ""), ("x" * 5000, ""), ("a\0b", ""), (".", ""), ("dummy:", ""),
     ("dummy:gpt-5", ""), ("/nowhere/model", "'/nowhere/model', which does not exist"),
     ("some/model.gguf", "which does not exist"), ("llama", "'llama', which does not exist"),
     ("config.json", "'config.json' is neither a folder nor a .gguf file")],
    ids=repr,
)  # fmt: skip
def test_sources_that_name_no_model_are_refused(source: object, text: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=text):
        load_model(source, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        load_tokenizer(source)  # type: ignore[arg-type]


# Arguments


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("device", "abc"), ("device", 3), ("device", "meta"), ("dtype", "bfloat16"), ("dtype", torch.int8),
     ("max_positions", 1.5), ("max_positions", 1 << 62), ("seed", "a"), ("seed", -1), ("seed", 1 << 64)],
)  # fmt: skip
def test_wrong_arguments_of_load_model_are_refused(folder: Path, name: str, wrong: object) -> None:
    text = "the meta device cannot compute" if wrong == "meta" else "expected"
    with pytest.raises(ConfigError, match=rf"^{name}: {text}"):
        load_model(folder, **({"device": "cpu"} | {name: wrong}))


def test_incomplete_rope_configs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"RopeConfig\.kind: expected one of default, linear, .* got 'yarm'"):
        RopeConfig("yarm")
    for kind in ("yarn", "llama3", "longrope"):
        with pytest.raises(ConfigError, match=r"RopeConfig\.original_positions: expected an int"):
            RopeConfig(kind)
    with pytest.raises(ConfigError, match=r"high_freq_factor: expected more than low_freq_factor=4\.0, got 4\.0"):
        RopeConfig("llama3", original_positions=8, low_freq_factor=4.0)
    with pytest.raises(ConfigError, match=r"RopeConfig\.short_factor: expected 4 values, got 0"):
        RopeConfig("longrope", original_positions=8).inverse_frequencies(8, 64, 64)


# The tokenizer


def test_wrong_arguments_and_failing_templates_of_the_tokenizer_are_refused() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    for wrong in (None, "", "a\udcff"):
        with pytest.raises(ConfigError, match=r"^prompt: "):
            tokenizer.encode_prompt(wrong, chat=False)  # type: ignore[arg-type]
    for wrong in (None, "abc", [1.5], [-1], [1 << 40]):
        with pytest.raises(ConfigError, match=r"^ids: expected"):
            tokenizer.decode(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^token: expected"):
        tokenizer.stream().push(-1)
    with pytest.raises(ConfigError, match=r"^eos_ids: expected"):
        Tokenizer(byte_tokenizer(), None, "abc")  # type: ignore[arg-type]
    for template in ("{% if %}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}"):
        with pytest.raises(ConfigError, match=r"^chat template: cannot render a user message"):
            Tokenizer(byte_tokenizer(), template).encode_prompt("hi", chat=True)


@pytest.mark.parametrize("content", [DEEP, "{}", "\xff", '{"version": "1.0", "model": {"type": "BPE"}}'], ids=len)
def test_damaged_tokenizer_files_are_refused(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="cannot read a tokenizer"):
        load_tokenizer(folder)


def test_a_folder_without_a_tokenizer_names_the_remedy(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read a tokenizer: (?s:.*); copy all files of the tokenizer again$"):
        load_tokenizer(folder)


def test_a_rust_panic_becomes_a_typed_error(folder: Path) -> None:
    """The panics of the package tokenizers are no Exception."""
    byte_tokenizer().save_pretrained(folder)
    edit_json(folder / "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(ConfigError, match="PanicException"):
        load_tokenizer(folder).encode_prompt("hi", chat=False)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("eos_token", 3), ("eos_token", {"a": 1}), ("chat_template", [{"name": "default"}]),
     ("chat_template", {"default": 3}), ("added_tokens_decoder", {"a": 1}), ("additional_special_tokens", [[1]]),
     ("model_max_length", "a"), ("tokenizer_class", 3)],
)  # fmt: skip
def test_a_wrong_type_in_tokenizer_config_is_a_typed_error_or_harmless(folder: Path, key: str, wrong: object) -> None:
    byte_tokenizer().save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", **{key: wrong})
    with contextlib.suppress(ConfigError):
        tokenizer = load_tokenizer(folder)
        ids = tokenizer.encode_prompt("hi", chat=tokenizer.has_chat_template)
        assert tokenizer.decode(ids) == "hi"


# Terminals


ESCAPE = "\x1b]0;owned\x07"


def test_names_in_a_file_reach_no_terminal_as_escape_sequences(folder: Path) -> None:
    weights = folder / "model.safetensors"

    def load(tensor: torch.Tensor) -> None:
        edit_weights(weights, lambda tensors: tensors.update({f"a{ESCAPE}": tensor}))
        load_model(folder, device="cpu")

    def index(name: str) -> None:
        weights.unlink()
        write_index(folder, {"a": name})
        load_model(folder, device="cpu")

    template = f"{{{{ raise_exception('{ESCAPE}') }}}}"
    for call in (
        lambda: load(torch.ones(1)),
        lambda: load(torch.ones(1, dtype=torch.int8)),
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


def test_code_in_a_tokenizer_folder_does_not_run(folder: Path, tmp_path: Path) -> None:
    """Code that a folder contains never runs, and no question is asked."""
    byte_tokenizer().save_pretrained(folder)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    edit_json(folder / "tokenizer_config.json", **own)
    with contextlib.suppress(ConfigError):
        load_tokenizer(folder)
    assert not (tmp_path / "ran").exists()
