"""EAGLE and EAGLE-3 heads from a folder: their drafts are those of a forward pass in float64 torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional

from graphrt.config import RuntimeConfig
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.models.eagle import EagleConfig
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import load_draft_model, load_model, make_runtime
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from tests.support.model_fixtures import PROMPT, edit_weights, save_oracle
from tests.support.sampling_cases import finish

VOCAB, WIDTH, INTERMEDIATE, HEADS, KV_HEADS, DIM, LAYERS = 97, 48, 40, 4, 2, 12, 8
SIZES_3 = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32, "rope_theta": 500.0, "hidden_act": "silu",
}  # fmt: skip
EAGLE3 = {**SIZES_3, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 30}
EAGLE = {**SIZES_3, "architectures": ["EagleLlamaForCausalLM"]}


def head_tensors(config: dict[str, Any], prefix: str, *left_out: str) -> dict[str, torch.Tensor]:
    """Random tensors of a head, as its checkpoint has them."""
    is_3, draws = "draft_vocab_size" in config, torch.Generator().manual_seed(1)
    rows = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    inputs = 2 * WIDTH if is_3 else WIDTH
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{x}_proj.weight": (count, inputs) for x, count in rows.items()}
    shapes |= {"self_attn.o_proj.weight": (WIDTH, HEADS * DIM), "mlp.gate_proj.weight": (INTERMEDIATE, WIDTH)}
    shapes |= {"mlp.up_proj.weight": (INTERMEDIATE, WIDTH), "mlp.down_proj.weight": (WIDTH, INTERMEDIATE)}
    shapes |= {"post_attention_layernorm.weight": (WIDTH,)}
    if is_3:
        shapes |= {"hidden_norm.weight": (WIDTH,), "input_layernorm.weight": (WIDTH,)}
    shapes = {prefix + name: shape for name, shape in shapes.items()}
    if is_3:
        shapes |= {"fc.weight": (WIDTH, 3 * WIDTH), "norm.weight": (WIDTH,)}
    else:
        shapes |= {"fc.weight": (WIDTH, 2 * WIDTH), "fc.bias": (WIDTH,)}
    shapes |= {"embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (config.get("draft_vocab_size", VOCAB), WIDTH)}
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=draws)
        tensors[name] = 1 + 0.2 * noise if "norm" in name else 1.5 * noise / shape[-1] ** 0.5
    if is_3:
        ids = torch.randperm(VOCAB, generator=draws)[: config["draft_vocab_size"]].sort().values
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
        tensors["t2d"][ids] = True
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class Oracle:
    """The drafts of a head, by the equations of EAGLE and EAGLE-3 in float64."""

    def __init__(
        self, target: transformers.PreTrainedModel, config: dict[str, Any], tensors: dict[str, torch.Tensor]
    ) -> None:
        self.target, self.config, self.is_3 = target, config, "draft_vocab_size" in config
        self.prefix = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
        self.of = {name: tensor.double() for name, tensor in tensors.items()}
        self.embed = self.of.get("embed_tokens.weight", target.get_input_embeddings().weight.double())
        self.lm_head = self.of.get("lm_head.weight", target.get_output_embeddings().weight.double())
        self.layers = (2, LAYERS // 2, LAYERS - 3)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.of[name]

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(x)).double()[:, None] / self.config["rope_theta"] ** (
            torch.arange(0, DIM, 2).double() / DIM
        )
        (a, b), cos, sin = x.chunk(2, -1), angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def layer(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """The residual stream after the layer of the head."""
        p, embedded = self.prefix, self.embed[torch.tensor(tokens)]
        if self.is_3:
            normed = self.norm(hidden, p + "hidden_norm.weight")
            x = torch.cat((self.norm(embedded, p + "input_layernorm.weight"), normed), 1)
            residual = normed if "transformer_layer_config" in self.config else hidden
        else:
            x = residual = torch.cat((embedded, hidden), 1) @ self.of["fc.weight"].T + self.of["fc.bias"]
        q, k, v = (
            (x @ self.of[f"{p}self_attn.{name}_proj.weight"].T).unflatten(1, (-1, DIM)) for name in ("q", "k", "v")
        )
        q, k, v = (t.transpose(0, 1)[None] for t in (self.rotated(q), self.rotated(k), v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        residual = residual + out.flatten(1) @ self.of[p + "self_attn.o_proj.weight"].T
        x = self.norm(residual, p + "post_attention_layernorm.weight")
        gate, up = (x @ self.of[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return residual + (functional.silu(gate) * up) @ self.of[p + "mlp.down_proj.weight"].T

    @torch.no_grad()
    def drafts(self, tokens: list[int], most: int) -> list[int]:
        """Greedy drafts after the tokens, of which the last has just been sampled."""
        body, ids, found, last = self.target.double().model, torch.tensor([tokens[:-1]]), list[int](), []
        hook = body.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
        *states, hidden = body(ids, output_hidden_states=True).hidden_states
        hook.remove()
        if self.is_3:
            hidden = torch.cat([(*states, *last)[at] for at in self.layers], 2) @ self.of["fc.weight"].T
        hidden = hidden[0]
        for _ in range(most):
            state = self.layer([*tokens[1:], *found], hidden)[-1:]
            hidden = torch.cat((hidden, state))
            draft = int(((self.norm(state, "norm.weight") if self.is_3 else state) @ self.lm_head.T).argmax())
            found.append(draft + int(self.of["d2t"][draft]) if "d2t" in self.of else draft)
        return found


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[transformers.PreTrainedModel, LlamaModel]:
    folder = tmp_path_factory.mktemp("target")
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 32}
    return save_oracle(folder, "Llama", **sizes), load_model(folder, device="cpu").model


def captured(model: LlamaModel, head: Path | None, most: int = 3, **options: Any) -> Runtime:
    config = RuntimeConfig(
        max_num_reqs=4, max_num_tokens=16, max_seq_len=56, num_speculative_tokens=most if head else 0, **options
    )
    proposer = load_draft_model(head, model) if head else None
    runtime = make_runtime(model, config, page_size=4, num_pages=80, proposer=proposer)
    runtime.capture()
    return runtime


SPECULATORS = {"architectures": ["Eagle3Speculator"], "transformer_layer_config": SIZES_3, "draft_vocab_size": 30}
SPECULATORS |= {"eagle_aux_hidden_state_layer_ids": [0, 5, LAYERS]}
CASES = {
    "eagle3": (EAGLE3, head_tensors(EAGLE3, "midlayer."), (2, 4, 5)),
    "speculators": (SPECULATORS, head_tensors(EAGLE3, "layers.0.", "embed_tokens.weight", "t2d"), (0, 5, LAYERS)),
    "eagle": (
        {"model_type": "eagle", "model": SIZES_3},
        head_tensors(EAGLE, "layers.0.", "embed_tokens.weight", "lm_head.weight"),
        (),
    ),
}


def test_options_of_config_json() -> None:
    """Layer ids of SGLang count from the output of the first layer."""
    for config, value in ((EAGLE3, False), (EAGLE3 | {"norm_before_residual": True}, True), (SPECULATORS, True)):
        assert EagleConfig.from_hf(config, LAYERS).norm_before_residual == value
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    assert EagleConfig.from_hf(EAGLE3 | {"eagle_config": ids}, LAYERS).hidden_layers == (2, 4, 7)
    assert EagleConfig.from_hf(EAGLE3 | ids, LAYERS).hidden_layers == (1, 3, 6)


@pytest.mark.parametrize("name", CASES)
def test_drafts_equal_a_forward_pass_in_float64(
    tmp_path: Path, target: tuple[transformers.PreTrainedModel, LlamaModel], name: str
) -> None:
    hf, model = target
    config, tensors, layers = CASES[name]
    head = save_head(tmp_path, config, tensors)
    oracle = Oracle(hf, SIZES_3 | config, tensors)
    oracle.layers = layers
    runtime, prompts, compared = captured(model, head), [PROMPT[:14], PROMPT[4:7]], list[int]()
    with DecodeSession(runtime) as session:
        requests = [session.add(prompt, SamplingParams(20)) for prompt in prompts]
        for _ in range(5):
            session.run(1)
            session.collect(wait=True)
            for request in (request for request in requests if request.tokens):  # the second prompt is in two chunks
                tokens = [*request.prompt.tolist(), *request.tokens]
                found = runtime.manager.buffers.drafts[request.req_index].tolist()
                known = [draft for draft in found if draft >= 0]  # a draft without a page is missing
                assert known == oracle.drafts(tokens, 3)[: len(known)]
                compared.append(len(known))
        finish(session)
    for size in runtime.manager.descriptors:
        runtime.manager.audit(size).raise_if_any()
    runtime.close()
    assert sum(compared) > 18
    for prompt, request in zip(prompts, requests, strict=True):
        generated_ids = hf.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert request.tokens == generated_ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("rejection_sampling", [False, True])
def test_a_head_that_knows_the_next_tokens_drafts_all_of_them(
    tmp_path: Path, device: torch.device, rejection_sampling: bool
) -> None:
    """The model maps token t to t + 7. The head maps the hidden state of t to that of t + 7, and drafts 30 tokens."""
    tokens, most = 30, 3
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 32}
    save_oracle(tmp_path / "target", "Llama", **sizes)
    successor = torch.zeros(WIDTH, WIDTH)
    successor[(torch.arange(tokens) + 7) % tokens, torch.arange(tokens)] = 1

    def count_on(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            weight.fill_(0.0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
        weights["model.embed_tokens.weight"].copy_(torch.eye(VOCAB, WIDTH))
        weights["lm_head.weight"].zero_()[:WIDTH] = 9 * successor

    edit_weights(tmp_path / "target" / "model.safetensors", count_on)
    config = EAGLE3 | {"intermediate_size": WIDTH, "draft_vocab_size": tokens}
    tensors = {name: torch.ones_like(tensor) for name, tensor in head_tensors(config, "midlayer.").items()}
    tensors |= {"fc.weight": torch.eye(WIDTH, 3 * WIDTH), "lm_head.weight": 9 * successor[:tokens].clone()}
    tensors |= {"d2t": torch.zeros(tokens, dtype=torch.int64), "t2d": torch.arange(VOCAB) < tokens}
    for name in ("q", "k", "v"):
        tensors[f"midlayer.self_attn.{name}_proj.weight"].zero_()
    root = WIDTH**0.5  # of the normed unit vector, which the MLP maps to the difference of two unit vectors
    factor = float(functional.silu(torch.tensor(root))) * root
    for name in ("gate", "up"):
        tensors[f"midlayer.mlp.{name}_proj.weight"] = torch.eye(WIDTH)
    tensors["midlayer.mlp.down_proj.weight"] = (successor - torch.eye(WIDTH)) / factor
    head = save_head(tmp_path / "head", config, tensors)
    runtime = captured(
        load_model(tmp_path / "target", device=device).model, head, most, rejection_sampling=rejection_sampling
    )
    with DecodeSession(runtime) as session:
        requests = [session.add([start], SamplingParams(41, temperature=0.3, seed=start)) for start in (3, 11)]
        finish(session)
        for start, request in zip((3, 11), requests, strict=True):
            assert request.tokens == [(start + 7 * i) % tokens for i in range(1, 42)]
            assert request.verify_steps <= 1 + 40 // (1 + most)
    runtime.close()


REFUSED = {
    "unknown": ({}, {"midlayer.self_attn.extra": torch.ones(1)}, ConfigError, "1 unknown: midlayer.self_attn.extra"),
    "missing": ({}, {"d2t": None}, ConfigError, "1 missing: d2t"),
    "shape": ({}, {"fc.weight": torch.ones(WIDTH, WIDTH)}, ConfigError, r"fc.weight \[48, 48\] instead of \[48, 144\]"),
    "tokens": ({}, {"d2t": torch.full((30,), 80)}, ConfigError, "d2t: expected different tokens .* from 80 to 109"),
    "vocabulary": ({"draft_vocab_size": 98}, {}, ConfigError, "draft_vocab_size: expected an integer from 1 to 97"),
    "layers": ({"eagle_aux_hidden_state_layer_ids": [2, 9]}, {"fc.weight": torch.ones(WIDTH, 2 * WIDTH)}, ConfigError,
               "expected ascending layers of a model of 8 layers, got"),
    "scale": ({"logit_scale": 0.5}, {}, UnsupportedError, "does not implement logit_scale 0.5"),
    "option": ({"eagle_config": {"new_norm": True}}, {}, UnsupportedError, "the key new_norm, whose meaning"),
    "window": ({"layer_types": ["sliding_attention"]}, {}, UnsupportedError, "layer_types 'sliding_attention'"),
    "biases": ({"attention_bias": True}, {}, UnsupportedError, "does not implement biases of queries, keys and values"),
    "windows": ({"use_sliding_window": True}, {}, UnsupportedError, "does not implement use_sliding_window True"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, target: tuple[transformers.PreTrainedModel, LlamaModel], name: str) -> None:
    changes, tensors, error, message = REFUSED[name]
    changed = {name: tensor for name, tensor in (CASES["eagle3"][1] | tensors).items() if tensor is not None}
    head = save_head(tmp_path, EAGLE3 | changes, changed)
    with pytest.raises(error, match=message):
        load_draft_model(head, target[1])


def test_a_model_is_no_proposer(target: tuple[transformers.PreTrainedModel, LlamaModel]) -> None:
    config = RuntimeConfig(max_num_reqs=4, max_num_tokens=16, max_seq_len=56, num_speculative_tokens=2)
    draft = load_model("dummy:smollm2-135m", device="cpu", max_positions=56).model
    runtime = make_runtime(target[1], config, page_size=4, num_pages=80, proposer=draft)
    with pytest.raises(ConfigError, match=r"proposer: expected a DraftModel, .* got a model; pass load_draft_model"):
        runtime.capture()
    runtime.close()


def test_heads_of_the_hub(
    tmp_path: Path, target: tuple[transformers.PreTrainedModel, LlamaModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config of a head, which is not that of a model, does not end the download."""
    head, calls = save_head(tmp_path, *CASES["eagle3"][:2]), list[str]()

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        calls.append(repo_id)
        return str(head)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load_draft_model("org/head", target[1]).hidden_layers == (2, 4, 5)
    assert calls == ["org/head"] * 2


def test_heads_of_other_models_are_refused(
    tmp_path: Path, target: tuple[transformers.PreTrainedModel, LlamaModel]
) -> None:
    config = EAGLE | {"vocab_size": 96}
    head = save_head(tmp_path, config, head_tensors(config, "layers.0.", "embed_tokens.weight", "lm_head.weight"))
    with pytest.raises(ConfigError, match=r"config.json: vocab_size: expected 97, as in the model, got 96"):
        load_draft_model(head, target[1])
