"""Loading from Hugging Face folders: fused and sharded weights, loading in place, and files that are refused."""

from __future__ import annotations

import shutil
import sys
import unittest.mock
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphrt.kernels.errors import CapacityError, ConfigError, UnsupportedError
from graphrt.models import hf, loading
from graphrt.models.hf import SafetensorsSource
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import load_model
from graphrt.models.shapes import SHAPES
from tests.support.model_fixtures import (
    DenseRunner,
    check_logits,
    edit_json,
    edit_weights,
    make_oracle,
    save_oracle,
    write_index,
)


@pytest.fixture
def folder(tmp_path):
    save_oracle(tmp_path, "Llama")
    return tmp_path


def test_sharded_checkpoints(tmp_path):
    oracle = make_oracle("Qwen2")
    oracle.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_logits(load_model(tmp_path, device="cpu").model, oracle)


def test_every_weight_is_written_and_fused_in_order(folder):
    config = SafetensorsSource(folder).config
    model = LlamaModel(config, dtype=torch.float32, device=torch.device("cpu"))
    for weight in model.parameters():
        weight.fill_(float("nan"))
    model.load_weights(SafetensorsSource(folder))
    assert all(weight.isfinite().all() for weight in model.parameters())
    stored = load_file(folder / "model.safetensors")
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    expected = torch.cat([stored[f"{attention}{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(model.layers[1].qkv, expected)
    assert torch.equal(model.layers[1].gate_up, torch.cat([stored[f"{mlp}{x}_proj.weight"] for x in ("gate", "up")]))


def test_a_reload_keeps_addresses_and_a_refused_checkpoint_changes_no_weight(folder):
    model = load_model(folder, device="cpu").model
    addresses = [p.data_ptr() for p in model.parameters()]
    other = make_oracle("Llama")
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.9)
    model.load_weights(other.state_dict())
    assert [p.data_ptr() for p in model.parameters()] == addresses
    check_logits(model, other)
    before = [p.clone() for p in model.parameters()]
    tensors = {name: torch.zeros_like(t) for name, t in load_file(folder / "model.safetensors").items()}
    del tensors["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"1 missing: model\.norm\.weight"):
        model.load_weights(tensors)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_head_that_differs_from_the_tied_embedding_is_kept(tmp_path, architecture):
    """Transformers does not tie them then."""
    save_oracle(tmp_path, architecture, tie_word_embeddings=False)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    loaded = load_model(tmp_path, device="cpu")
    check_logits(loaded.model, oracle)
    assert not loaded.config.tie_word_embeddings


def test_a_tied_model_refuses_a_checkpoint_with_a_head_of_its_own(folder):
    config = replace(SafetensorsSource(folder).config, tie_word_embeddings=True)
    model = LlamaModel(config, dtype=torch.float32, device=torch.device("cpu"))
    for source in (SafetensorsSource(folder), load_file(folder / "model.safetensors")):
        with pytest.raises(ConfigError, match=r"lm_head\.weight differs .*tie_word_embeddings=False"):
            model.load_weights(source)


@pytest.mark.parametrize("named", ["first", "second"])
def test_the_index_names_the_file_of_a_tensor_that_two_shards_hold(tmp_path, named):
    oracle = save_oracle(tmp_path, "Llama")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.norm.weight"
    other = {"first": "second", "second": "first"}[named]
    (tmp_path / "model.safetensors").rename(tmp_path / f"{named}.safetensors")
    save_file({name: torch.zeros_like(tensors[name])}, tmp_path / f"{other}.safetensors")
    write_index(tmp_path, dict.fromkeys(tensors, f"{named}.safetensors") | {"unused": f"{other}.safetensors"})
    check_logits(load_model(tmp_path, device="cpu").model, oracle)
    write_index(tmp_path, {"a": "first.safetensors", "b": "second.safetensors"})
    with pytest.raises(
        ConfigError, match=r"second\.safetensors: the tensor 'model\.norm\.weight' is also in another file"
    ):
        load_model(tmp_path, device="cpu")


def test_old_tensors_that_models_do_not_use_are_ignored(tmp_path):
    save_oracle(tmp_path, "Llama", tie_word_embeddings=True)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit_weights(tmp_path / "model.safetensors", add)
    write_index(tmp_path, {"a": "missing.safetensors"})  # a single file has priority over it
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu").model
    assert model.head is model.embedding


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, "auto"])
def test_weights_are_converted_to_the_dtype(folder, dtype):
    """The auto dtype is float32 on a CPU."""
    edit_json(folder / "config.json", dtype="bfloat16")
    loaded = load_model(folder, device="cpu", dtype=dtype)
    model, expected = loaded.model, torch.float32 if dtype == "auto" else dtype
    assert {model.dtype, *(p.dtype for p in model.parameters())} == {expected}
    assert (loaded.config.dtype, model.cos_sin.dtype) == (torch.bfloat16, torch.float32)
    assert (model.device.type, loaded.tokenizer_source) == ("cpu", folder)
    if dtype != "auto":  # a config without a dtype means that of the tensors
        make_oracle("Llama").to(dtype).save_pretrained(folder)
        edit_json(folder / "config.json", dtype=None)
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert load_model(folder, device="cpu").config.dtype == reference.dtype == dtype


@pytest.mark.gpu
def test_auto_dtype_is_the_dtype_of_the_checkpoint_on_cuda(folder):
    edit_json(folder / "config.json", dtype="bfloat16")
    model = load_model(folder, device="cuda").model
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.bfloat16, "cuda")}
    stored = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(model.layers[0].down.cpu(), stored.to(torch.bfloat16))


def test_dummy_weights_are_seeded_and_finite():
    a = load_model("dummy:smollm2-135m", device="cpu", dtype=torch.bfloat16, max_positions=64, seed=1)
    b = load_model(SHAPES["smollm2-135m"], device="cpu", dtype=torch.bfloat16, max_positions=64, seed=1)
    assert a.tokenizer_source is None
    assert all(torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True))
    logits = DenseRunner(a.model.float()).step({0: [1, 2, 3]}).float()
    assert 0.1 < logits.std() < 10


@pytest.mark.parametrize("source", ["dummy:smollm2-135m", "folder"])
def test_models_that_exceed_the_free_memory_are_refused(folder, source, monkeypatch):
    path = folder if source == "folder" else source
    model = load_model(path, device="cpu", dtype=torch.float16).model
    weights, table = sum(p.nbytes for p in model.parameters()), model.cos_sin.nbytes
    needed = weights + table
    monkeypatch.setattr(loading, "free_memory", lambda device: needed)
    load_model(path, device="cpu", dtype=torch.float16)
    monkeypatch.setattr(loading, "free_memory", lambda device: needed - 1)
    text = f"{weights} bytes of weights in float16 and {table} bytes of rotation table exceed the {needed - 1} bytes"
    with pytest.raises(CapacityError, match=text):
        load_model(path, device="cpu", dtype=torch.float16)


def test_a_rotation_table_of_128_gib_is_not_allocated(tmp_path, monkeypatch):
    """The weights of this model have 100 KB."""
    sizes = {"hidden_size": 2, "intermediate_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1}
    save_oracle(tmp_path, "Llama", **sizes, num_key_value_heads=1, head_dim=2048, vocab_size=97)
    edit_json(tmp_path / "config.json", max_position_embeddings=1 << 24)
    monkeypatch.setattr(loading, "free_memory", lambda device: 1 << 36)
    with pytest.raises(CapacityError, match=r"and 137438953472 bytes of rotation table exceed .*lower max_positions"):
        load_model(tmp_path, device="cpu")
    assert load_model(tmp_path, device="cpu", max_positions=64).model.cos_sin.shape == (64, 2048)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/meminfo")
def test_free_memory(monkeypatch, tmp_path):
    cpu = torch.device("cpu")
    assert 1 << 20 < loading.free_memory(cpu) < 1 << 50
    monkeypatch.setattr(loading, "_MEMINFO", tmp_path / "meminfo")
    assert loading.free_memory(cpu) is None, "a system without the file"
    (tmp_path / "meminfo").write_text("MemFree: 3 kB\nMemAvailable:       12 kB\n")
    assert loading.free_memory(cpu) == 12 * 1024


def without_weights(folder, weight_map):
    (folder / "model.safetensors").unlink()
    write_index(folder, weight_map)


def weights(change):
    return lambda folder: edit_weights(folder / "model.safetensors", change)


def config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


UP = "model.layers.2.mlp.up_proj"
BROKEN = {
    "no config": (lambda d: (d / "config.json").unlink(), r"config\.json: not a readable JSON file"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"missing: model\.safetensors"),
    "missing tensor": (weights(lambda t: t.pop(f"{UP}.weight")), rf"1 missing: {UP}\.weight"),
    "bias not in the config": (weights(lambda t: t.update({f"{UP}.bias": torch.ones(64)})), rf"1 unknown: {UP}\.bias"),
    "missing layer": (config(num_hidden_layers=4), r"9 missing: model\.layers\.3.*and 3 more"),
    "wrong shape": (
        config(intermediate_size=32),
        r"9 of the wrong shape: model\.layers\.0\.mlp\.down_proj\.weight \[48, 64\] instead of \[48, 32\]",
    ),
    "truncated weights": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-1]),
        "not an intact safetensors file",
    ),
    "weights are text": (lambda d: (d / "model.safetensors").write_text("x" * 99), "not an intact safetensors file"),
    "index without map": (lambda d: without_weights(d, {}), "weight_map is missing or empty"),
    "missing shard": (lambda d: without_weights(d, {"a": "b.safetensors"}), r"missing: b\.safetensors"),
    "quantized": (weights(lambda t: t.update(extra=torch.ones(4, dtype=torch.uint8))), "'extra' has dtype U8 .*GGUF"),
}


@pytest.mark.parametrize(("damage", "match"), BROKEN.values(), ids=BROKEN)
def test_broken_folders_are_refused(folder, damage, match, monkeypatch):
    damage(folder)
    monkeypatch.setattr(LlamaModel, "load_weights", lambda *_: pytest.fail("weights were written"))
    with pytest.raises(UnsupportedError if "dtype" in match else ConfigError, match=match):
        load_model(folder, device="cpu")


@pytest.mark.parametrize("package", ["safetensors", "huggingface_hub"])
def test_missing_packages_name_the_pip_command(folder, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf'{package}: .*; run pip install "graphrt\[models\]"'):
        load_model(folder if package == "safetensors" else "org/name", device="cpu")


def test_unsupported_hub_models_are_refused_before_their_weights_are_downloaded(folder, tmp_path_factory, monkeypatch):
    cache, calls = tmp_path_factory.mktemp("hub"), []

    def snapshot_download(repo_id, *, allow_patterns):
        calls.append("*.safetensors" in allow_patterns)
        for name in ("config.json", *(["model.safetensors"] if calls[-1] else [])):
            shutil.copy(folder / name, cache / name)
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load_model("org/name", device="cpu").tokenizer_source == cache
    assert calls == [False, True]
    edit_json(folder / "config.json", model_type="gemma3")
    with pytest.raises(UnsupportedError, match="gemma3"):
        load_model("org/name", device="cpu")
    assert calls == [False, True, False]


def test_failed_downloads_name_a_remedy(monkeypatch):
    failing = unittest.mock.Mock(side_effect=OSError("no route to host"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", failing)
    with pytest.raises(ConfigError, match=r"org/name: .*no route to host.; check the name, or pass a path"):
        hf.download("org/name")
