"""What the caller does with a model before, during and after its capture by `from_transformers`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import graphrt
from graphrt.integrations.transformers.runtime import TransformersRuntime
from tests.integrations.test_from_transformers import CONFIG, EXPERTS, LONG, PROMPTS, make_model

NEW_TOKENS = 5
DEVICES = [("cpu", CONFIG), pytest.param("cuda", replace(CONFIG, backend=None), marks=pytest.mark.gpu)]


def tokens_of(runtime: TransformersRuntime) -> list[list[int]]:
    return [result.token_ids for result in runtime.generate(PROMPTS, max_new_tokens=NEW_TOKENS)]


def own_tokens(model: Any) -> list[list[int]]:
    """What transformers generates for each prompt alone."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=model.device)
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, pad_token_id=0)
        found.append(answer[0, len(prompt) :].tolist())
    return found


ROTARY = {
    "default": ("Llama", {}),
    "without write_kv": ("HunYuanDenseV1", {"head_dim": 8}),
    "two sets": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 12}),
}


@pytest.mark.parametrize(("device", "config"), DEVICES)
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("case", ROTARY)
def test_rotary_buffers_changed_in_place_are_followed(
    case: str, fuse: bool, device: str, config: graphrt.RuntimeConfig
) -> None:
    family, options = ROTARY[case]
    model = make_model(family, **options).to(device)
    with graphrt.from_transformers(model, config=config, fuse=fuse) as runtime:
        if device == "cpu":  # arguments of torch's CUDA kernels may have stale words, which one audit cannot rule out
            for size in runtime.manager.descriptors:
                runtime.manager.audit(size).raise_if_any()
        first = tokens_of(runtime)
        for name, buffer in model.named_buffers():
            if "inv_freq" in name:
                buffer.mul_(0.3)
        assert tokens_of(runtime) == own_tokens(model) != first


def replace_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


def add_bias(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.bias = torch.nn.Parameter(torch.ones(64))


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(
    ("change", "name"), [(replace_frequencies, r"rotary_emb\.inv_freq"), (add_bias, r"up_proj\.bias")]
)
def test_tensors_replaced_or_added_after_capture_are_noticed(
    change: Callable[[Any], None], name: str, fuse: bool
) -> None:
    model = make_model("Llama")
    with graphrt.from_transformers(model, config=CONFIG, fuse=fuse) as runtime:
        params = graphrt.SamplingParams(max_new_tokens=18)
        list(graphrt.TextGenerator(runtime).generate(PROMPTS[:1], params))
        change(model)
        with pytest.raises(graphrt.ReplayError, match=name):
            runtime.generate(PROMPTS, max_new_tokens=1)
        events = (graphrt.TextGenerator(runtime).generate(PROMPTS[:1], params) for _ in range(5))
        with pytest.raises(graphrt.ReplayError, match=name):
            list(itertools.chain.from_iterable(events))


class LoraLinear(torch.nn.Module):
    """A linear layer with an adapter, and the attributes of the layers of PEFT."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a = torch.nn.Parameter(torch.randn(base_layer.in_features, 2) / 4)
        self.lora_b = torch.nn.Parameter(torch.randn(2, base_layer.out_features))
        self.merged_adapters = list[str]()
        self.disable_adapters, self.active_adapters, self.scaling = False, ["default"], {"default": 0.5}

    @property
    def merged(self) -> bool:
        return bool(self.merged_adapters)

    @torch.no_grad()
    def merge(self) -> None:
        self.base_layer.weight.data += self.scaling["default"] * (self.lora_a @ self.lora_b).t()
        self.merged_adapters.append("default")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.disable_adapters or self.merged:
            return self.base_layer(x)
        return self.base_layer(x) + self.scaling["default"] * (x @ self.lora_a @ self.lora_b)


ADAPTERS: dict[str, tuple[Callable[[LoraLinear], object], str]] = {
    "merge": (LoraLinear.merge, "merged: expected False as captured, got True"),
    "disable": (lambda layer: setattr(layer, "disable_adapters", True), "disable_adapters: expected False"),
    "choose": (lambda layer: layer.active_adapters.append("other"), "active_adapters: expected .'default'. as"),
    "scale": (lambda layer: layer.scaling.update(default=2.0), "scaling: expected .'default': 0.5. as captured"),
}


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_changed_after_capture_are_noticed(name: str, fuse: bool) -> None:
    change, text = ADAPTERS[name]
    torch.manual_seed(1)
    model = make_model("Llama")
    for layer in model.model.layers:
        layer.mlp.down_proj = LoraLinear(layer.mlp.down_proj)
    with graphrt.from_transformers(model, config=CONFIG, fuse=fuse) as runtime:
        assert tokens_of(runtime) == own_tokens(model) != own_tokens(make_model("Llama"))
        change(model.model.layers[1].mlp.down_proj)
        with pytest.raises(graphrt.ReplayError, match=rf"model\.layers\.1\.mlp\.down_proj\.{text}"):
            tokens_of(runtime)
        with pytest.raises(graphrt.ReplayError, match=text):
            next(runtime.generate_stream(PROMPTS))
        params = graphrt.SamplingParams(max_new_tokens=18)
        with pytest.raises(graphrt.ReplayError, match=text):
            list(graphrt.TextGenerator(runtime).generate(PROMPTS[:1], params))


def test_autocast_changes_no_tokens_and_keeps_no_modules() -> None:
    model = make_model("Llama")
    expected = own_tokens(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        runtime = graphrt.from_transformers(model, config=replace(CONFIG, decode_sizes=()))
        assert tokens_of(runtime) == expected
    assert runtime.stats().eager_steps
    assert set(runtime.fused.values()) == {"decoder_layer", "linear", "rms_norm"}
    runtime.close()


@pytest.mark.parametrize(("device", "config"), DEVICES)
def test_another_thread_uses_the_model_during_eager_steps(device: str, config: graphrt.RuntimeConfig) -> None:
    model = make_model("Qwen3Moe", **EXPERTS, head_dim=8).to(device)
    expected, found = own_tokens(model), list[Any]()
    done = threading.Event()

    def generate() -> None:
        while not done.is_set():
            try:
                found.append(own_tokens(model))
            except Exception as error:
                found.append(repr(error))

    with graphrt.from_transformers(model, config=replace(config, use_graphs=False)) as runtime:
        thread = threading.Thread(target=generate)
        thread.start()
        try:
            for _ in range(3):
                assert tokens_of(runtime) == expected
        finally:
            done.set()
            thread.join()
        assert runtime.stats().eager_steps
    assert found == [expected] * len(found)


def test_forward_passes_of_another_thread_are_refused_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = make_model("Llama"), list[Any]()

    def generate() -> None:
        try:
            model.generate(torch.tensor([[1, 2]]), max_new_tokens=1, pad_token_id=0)
        except graphrt.CaptureError as error:
            found.append(str(error))

    def use(*_: Any) -> None:
        thread = threading.Thread(target=generate)
        thread.start()
        thread.join()

    hook = model.model.norm.register_forward_hook(use)
    with graphrt.from_transformers(model, config=CONFIG) as runtime:
        hook.remove()
        assert found
        assert set(found) == {
            "model: expected no forward pass while from_transformers captures the model; wait until it returns"
        }
        assert tokens_of(runtime) == own_tokens(model)


@pytest.mark.parametrize("bias", [False, True])
def test_two_runtimes_of_one_model(bias: bool) -> None:
    model = make_model("Llama", attention_bias=bias, mlp_bias=bias)
    expected = own_tokens(model)
    with graphrt.from_transformers(model, config=CONFIG) as first:
        places = [weight.data_ptr() for weight in model.parameters()]
        with graphrt.from_transformers(model, config=CONFIG) as second:
            assert [weight.data_ptr() for weight in model.parameters()] == places
            assert first.fused == second.fused
            assert [tokens_of(runtime) for runtime in (first, second, first)] == [expected] * 3
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.neg_()
        assert tokens_of(first) == own_tokens(model) != expected


def test_capture_in_inference_mode_leaves_a_model_that_can_be_trained() -> None:
    model = make_model("Llama")
    ids = torch.tensor(PROMPTS[:1])
    with torch.inference_mode():
        runtime = graphrt.from_transformers(model, config=CONFIG)
        inside = tokens_of(runtime)
    assert inside == tokens_of(runtime) == own_tokens(model)
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    runtime.close()


@pytest.mark.parametrize("name", ["model.layers.1", "model.layers.1.mlp", "model.rotary_emb"])
def test_forward_patched_after_capture_stays(name: str) -> None:
    """Eager steps replace `forward` of the same modules."""
    model = make_model("Llama")
    with graphrt.from_transformers(model, config=replace(CONFIG, use_graphs=False)) as runtime:
        module = model.get_submodule(name)
        forward = module.forward
        patch = module.forward = lambda *args, **options: forward(*args, **options)
        tokens_of(runtime)
        assert module.forward is patch


@pytest.mark.parametrize("graphs", [True, False])
def test_training_mode_changes_no_tokens(graphs: bool) -> None:
    """Captured steps run as at the capture. Eager steps would apply dropout."""
    model = make_model("GPT2", pad_token_id=0)
    with graphrt.from_transformers(model, config=replace(CONFIG, use_graphs=graphs)) as runtime:
        expected = tokens_of(runtime)
        model.train()
        if graphs:
            assert tokens_of(runtime) == expected
        else:
            with pytest.raises(graphrt.ConfigError, match="eval mode"):
                tokens_of(runtime)
        model.eval()
        assert tokens_of(runtime) == expected


@pytest.mark.parametrize("fuse", [True, False])
def test_model_built_in_inference_mode(fuse: bool) -> None:
    with torch.inference_mode():
        model = make_model("Llama")
    with graphrt.from_transformers(model, config=CONFIG, fuse=fuse) as runtime:
        assert tokens_of(runtime) == own_tokens(model)


@pytest.mark.parametrize("argument", [{"config": {}}, {"kv_dtype": "bfloat16"}])
def test_arguments_of_wrong_types_are_named(argument: dict[str, Any]) -> None:
    (name,) = argument
    with pytest.raises(graphrt.ConfigError, match=rf"^{name}: expected "):
        graphrt.from_transformers(make_model("Llama"), **argument)


def test_config_without_a_length_takes_that_of_the_model() -> None:
    config = graphrt.RuntimeConfig(2, 16, max_logprobs=0)
    with graphrt.from_transformers(make_model("Llama"), config=config) as runtime:
        assert runtime.config.max_seq_len == 64
        (result,) = runtime.generate(PROMPTS[:1], max_new_tokens=2, logprobs=0)
        assert len(result.logprobs) == 2


def test_generation_config_of_the_model_is_that_of_generate() -> None:
    model = make_model("Llama")
    plain = own_tokens(model)
    model.generation_config = GenerationConfig(eos_token_id=plain[0][2], repetition_penalty=1.5, pad_token_id=0)
    expected = [
        tokens[: tokens.index(plain[0][2]) + 1] if plain[0][2] in tokens else tokens for tokens in own_tokens(model)
    ]
    with graphrt.from_transformers(model) as runtime:
        assert tokens_of(runtime) == expected
        events = graphrt.TextGenerator(runtime).generate(PROMPTS, graphrt.SamplingParams(max_new_tokens=NEW_TOKENS))
        found: dict[int, list[int | None]] = {0: [], 1: []}
        for event in events:
            found[event.prompt].append(event.token)
        assert list(found.values()) == plain
