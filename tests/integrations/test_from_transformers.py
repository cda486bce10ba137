"""Model families of `transformers` through `from_transformers`: tokens and logits against their own eager decoding.

tests/models/test_families.py has eight more, with the pages that they own.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import graphrt
from graphrt.integrations.transformers.experts import dense_experts
from graphrt.integrations.transformers.host import package
from graphrt.integrations.transformers.masks import Reach, reach_of
from graphrt.integrations.transformers.runtime import TransformersRuntime
from tests.models.test_families import Recorder
from tests.support.model_fixtures import PROMPT, SIZES, make_oracle, randomize

PROMPTS = [PROMPT[:7], [*PROMPT, 7, 64, 29]]
NEW_TOKENS, MAX_LEN = 4, 24
CONFIG = graphrt.RuntimeConfig(
    2, 16, MAX_LEN, launch_steps=1, decode_sizes=(2,), mixed_sizes=(16,), backend="torch_reference"
)
S, F = "sliding_attention", "full_attention"
WINDOWS = {"sliding_window": 8, "layer_types": [S, F, S]}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENTS = {"num_key_value_heads": 6, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENTS |= {"q_lora_rank": 24, "kv_lora_rank": 24}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.3, 1.1, 1.5]}
LONG |= {"long_factor": [3.0, 5.0, 2.0, 4.0], "original_max_position_embeddings": 12, "factor": 2.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "Apertus": {},
    "Arcee": {},
    "BitNet": {},
    "CodeGen": {"rotary_dim": 8, "n_ctx": 64},
    "Cohere": {"logit_scale": 0.5},
    "DeepseekV2": EXPERTS | LATENTS,
    "DeepseekV3": EXPERTS | LATENTS,
    "Ernie4_5": {},
    "Exaone4": WINDOWS,
    "GPT2": {"pad_token_id": 0},
    "GPTBigCode": {},
    "GPTJ": {"rotary_dim": 8},
    "GPTNeoX": {"rotary_pct": 0.5},
    "Gemma3n": WINDOWS | {  # the sparsity of the first layer is a number that becomes a tensor in each forward pass
        "head_dim": 8, "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
        "laurel_rank": 8, "altup_num_inputs": 2, "intermediate_size": [64] * 3,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0],
    },
    "Gemma4": WINDOWS | {
        "layer_types": [S, F, S, F], "num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 8,
        "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
    },
    "Glm": {"head_dim": 8},
    "Glm4": {"head_dim": 8},
    "Glm4Moe": EXPERTS,
    "Granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "HunYuanDenseV1": {"head_dim": 8},
    "Llama": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0}},
    "MiniMaxM2": EXPERTS | {"head_dim": 8, "rotary_dim": 8},
    "Mistral": {"sliding_window": 8},
    "Mixtral": EXPERTS,
    "Nemotron": {},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 48},
    "Olmo2": {},
    "Olmoe": EXPERTS,
    "Phi": {},
    "Phi3": {"sliding_window": 8},
    "Phimoe": EXPERTS,
    "Qwen2": WINDOWS | {"use_sliding_window": True},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": EXPERTS | {"head_dim": 8},
    "SeedOss": {"head_dim": 8},
    "SmolLM3": {"no_rope_layers": [1, 0, 1]},
    "StableLm": {},
    "Starcoder2": {"sliding_window": 8},
}  # fmt: skip


def make_model(name: str, **options: Any) -> Any:
    return make_oracle(name, **({"eos_token_id": None, "tie_word_embeddings": False} | options))


def answers(model: Any) -> list[tuple[list[int], torch.Tensor]]:
    """Greedy tokens and their logits, of each prompt alone, by `generate` with eager attention."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        alone = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, output_logits=True,
            return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        found.append((alone.sequences[0, len(prompt) :].tolist(), torch.cat(alone.logits)))
    return found


def check(
    model: Any, expected: list[tuple[list[int], torch.Tensor]], config: graphrt.RuntimeConfig = CONFIG
) -> TransformersRuntime:
    """Run both prompts at once, captured, and compare with `expected`."""
    runtime = graphrt.from_transformers(model, config=config, page_size=4)
    watch, tokens = Recorder(runtime), dict[int, list[int]]({0: [], 1: []})
    params = graphrt.SamplingParams(max_new_tokens=NEW_TOKENS)
    for event in graphrt.TextGenerator(runtime).generate(PROMPTS, params):
        tokens[event.prompt].append(event.token)
    for row, (prompt, (wanted, logits)) in enumerate(zip(PROMPTS, expected, strict=True)):
        atol = 1e-4 if runtime.device.type == "cpu" else 1e-3
        found = watch.logits(row, len(prompt), NEW_TOKENS).cpu()
        torch.testing.assert_close(found, logits, atol=atol, rtol=1e-4)
        assert tokens[row] == wanted
    assert not runtime.stats().eager_steps
    return runtime


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_logits_equal_transformers(name: str) -> None:
    model = make_model(name, **FAMILIES[name])
    expected = answers(model)
    check(model, expected).close()


@pytest.mark.parametrize("name", ["Mixtral", "Olmoe"])
def test_logits_of_routers_are_left_out(name: str) -> None:
    """Checkpoints of fine-tuned models may ask for them, for a loss of the training."""
    model = make_model(name, **FAMILIES[name], output_router_logits=True)
    check(model, answers(model)).close()


def test_text_of_a_multimodal_model() -> None:
    """Its forward pass looks for image tokens, and needs the padding token of the config."""
    text = SIZES | {"head_dim": 16, "pad_token_id": 0, "eos_token_id": None, "query_pre_attn_scalar": 4} | WINDOWS
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=96, boi_token_id=95,
        eoi_token_id=94, eos_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomize(model)
    expected = answers(model)
    check(model, expected).close()
    with graphrt.from_transformers(model) as runtime:
        text = {"input_ids": PROMPTS, "token_type_ids": [[0] * len(prompt) for prompt in PROMPTS]}  # of a processor
        found = runtime.generate(**text, max_new_tokens=NEW_TOKENS)
        assert [result.token_ids for result in found] == [tokens for tokens, _ in expected]


def test_text_of_a_model_with_three_positions_per_token() -> None:
    """Those of a token of text are equal."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 48}
    config = transformers.Qwen2_5_VLConfig(
        text_config=SIZES | {"eos_token_id": None, "rope_parameters": rope}, vision_config=vision, image_token_id=96,
        video_token_id=95, vision_start_token_id=94, vision_end_token_id=93, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    randomize(model)
    check(model, answers(model)).close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "Gemma4", "Phimoe", "Qwen3Moe", "DeepseekV2"])
def test_graphs_on_a_gpu_give_the_same(name: str) -> None:
    """In float32, so that experts run without `grouped_mm`; Phimoe has rotary tables."""
    model = make_model(name, **FAMILIES[name])
    expected = answers(model)
    check(model.cuda(), expected, replace(CONFIG, backend=None)).close()


@pytest.mark.gpu
def test_grouped_mm_is_captured_on_a_gpu() -> None:
    model = make_model("Qwen3Moe", **(FAMILIES["Qwen3Moe"] | {"hidden_size": 64})).bfloat16().cuda()
    tokens = []
    for use_graphs in (True, False):
        config = replace(CONFIG, backend=None, use_graphs=use_graphs)
        with graphrt.from_transformers(model, config=config) as runtime:
            events = graphrt.TextGenerator(runtime).generate(PROMPTS, graphrt.SamplingParams(max_new_tokens=4))
            tokens.append(sorted((event.prompt, event.token) for event in events))
            assert bool(runtime.stats().eager_steps) is not use_graphs
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("name", ["Phi3", "Phimoe"])
def test_rows_take_the_rotary_factors_of_their_own_length(name: str) -> None:
    """The second prompt is longer than the original maximum, 12, and the first stays below it. Phimoe also scales, by
    the length that it reads on the host."""
    options = {"rope_parameters": LONG, "original_max_position_embeddings": 12}
    if name == "Phimoe":
        options = EXPERTS | options | {"rope_parameters": LONG | {"short_mscale": 1.1, "long_mscale": 1.3}}
    model = make_model(name, **options)
    expected, kept = answers(model), {key: x.clone() for key, x in model.named_buffers()}
    check(model, expected).close()
    assert all(torch.equal(x, kept[key]) for key, x in model.named_buffers())
    assert answers(model)[0][0] == expected[0][0]


def test_known_modules_are_replaced_and_named() -> None:
    """Llama's layers are. Exaone 4 has its norms after attention and MLP. Gemma 2 scales by 1 + weight, and has another
    activation. HunYuan has norms between rotation and attention, and GLM rotates neighbors."""
    model = make_model("Llama", tie_word_embeddings=True)
    expected = answers(model)
    runtime = check(model, expected)
    layers = {f"model.layers.{i}": "decoder_layer" for i in range(3)}
    assert runtime.fused == layers | {"model.norm": "rms_norm", "lm_head": "linear"}
    runtime.close()
    with graphrt.from_transformers(model, config=CONFIG, fuse=False) as runtime:
        assert not runtime.fused
    for name, operators in (
        ("Exaone4", {"linear", "linear_silu_mul", "rms_norm", "write_kv"}),
        ("Gemma2", {"linear", "write_kv"}),
        ("HunYuanDenseV1", {"linear", "linear_silu_mul", "rms_norm"}),
        ("Glm", {"linear", "linear_silu_mul", "rms_norm"}),
    ):
        with graphrt.from_transformers(make_model(name, **FAMILIES.get(name, {})), config=CONFIG) as runtime:
            assert set(runtime.fused.values()) == operators


def state_of(model: Any) -> Any:
    """What the caller can see of a model: names and addresses of its tensors, attributes of its modules, its config."""
    attributes = {name: {k: id(v) for k, v in vars(module).items()} for name, module in model.named_modules()}
    tensors = {name: x.data_ptr() for name, x in (*model.named_parameters(), *model.named_buffers())}
    return attributes, tensors, copy.deepcopy(vars(model.config))


def test_model_is_unchanged_and_still_runs_by_itself() -> None:
    """`fuse` moves weights, and changes nothing else."""
    model = make_model("Qwen3Moe", **FAMILIES["Qwen3Moe"])
    expected, before = answers(model), state_of(model)
    values = {name: x.clone() for name, x in model.state_dict().items()}
    with graphrt.from_transformers(model, config=CONFIG, fuse=False):
        assert state_of(model) == before
    runtime = check(model, expected)
    assert state_of(model)[::2] == before[::2]
    torch.testing.assert_close(model.state_dict(), values, atol=0, rtol=0)
    assert answers(model)[0][0] == expected[0][0]
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1)  # in place, as a new checkpoint is loaded
    fresh = answers(model)
    events = graphrt.TextGenerator(runtime).generate(PROMPTS[:1], graphrt.SamplingParams(max_new_tokens=NEW_TOKENS))
    assert [event.token for event in events] == fresh[0][0] != expected[0][0]
    runtime.close()


def double(model: Any) -> None:
    model.double()


def merge(model: Any) -> None:
    """As an adapter does it, into a new parameter."""
    weight = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight + 1, requires_grad=False)


@pytest.mark.parametrize("change", [double, merge])
def test_model_that_changed_after_capture_is_noticed(change: Callable[[Any], None]) -> None:
    model = make_model("Llama")
    with graphrt.from_transformers(model, config=CONFIG) as runtime:
        change(model)
        with pytest.raises(graphrt.ReplayError, match=r"model\.model\.\S+: "):
            list(graphrt.TextGenerator(runtime).generate(PROMPTS[:1], graphrt.SamplingParams(max_new_tokens=18)))


@pytest.mark.parametrize("tied", ["lm_head", "model.embed_tokens"])
def test_tied_weights_that_part_after_capture_are_noticed_by_the_next_call(tied: str) -> None:
    model = make_model("Llama", tie_word_embeddings=True)
    with graphrt.from_transformers(model, config=CONFIG) as runtime:
        module = model.get_submodule(tied)
        module.weight = torch.nn.Parameter(module.weight + 1, requires_grad=False)
        for call in (runtime.generate, runtime.generate_stream):
            with pytest.raises(graphrt.ReplayError, match=rf"model\.{tied}\.weight: "):
                call(PROMPTS[:1], max_new_tokens=1)


HYBRID = {"layer_types": ["conv", F, "conv"], "conv_L_cache": 3, "block_multiple_of": 8}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Bloom": ({}, r"no layer calls the attention function.*modeling_bloom\.py:\d+"),
    "Mpt": ({"d_model": 48, "n_heads": 6, "n_layers": 2}, r"attention is computed at .*modeling_mpt\.py:\d+"),
    "Falcon": ({}, r"copies values from the host at .*modeling_falcon\.py:\d+; keep the tensor in a buffer"),
    "Roberta": ({"pad_token_id": 0}, r"modeling_roberta\.py:\d+ is not causal; set is_decoder=True"),
    "Lfm2": (HYBRID, r"modeling_lfm2\.py:\d+: .* caches keys and values only"),
    "Moshi": ({"sliding_window": 8, "ffn_dim": 64}, r"modeling_moshi\.py:\d+ sees all tokens, .* keeps only 8"),
    "Gemma3": ({"use_bidirectional_attention": True}, r"modeling_gemma3\.py:\d+ is not causal"),
    "Llama": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        r"rope_type 'dynamic' at .*modeling_llama\.py:\d+",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_a_graph_cannot_contain_are_refused_with_the_line(name: str) -> None:
    options, text = REFUSED[name]
    model = make_model(name, **options)
    before = state_of(model)
    with pytest.raises(graphrt.UnsupportedError, match=text):
        graphrt.from_transformers(model, config=CONFIG)
    assert state_of(model) == before


def test_attention_module_of_the_docs_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text()
    (block,) = (
        block for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "XGLM" in block
    )
    model = make_model("XGLM", d_model=48, ffn_dim=64, num_layers=2, attention_heads=6, pad_token_id=0)
    expected = answers(model)
    with pytest.raises(graphrt.UnsupportedError, match=r"modeling_xglm\.py:\d+\. .* as docs/hosts\.md shows"):
        graphrt.from_transformers(model, config=CONFIG)
    exec(block, names := {"model": model, "graphrt": graphrt})
    names["runtime"].close()
    check(model, expected).close()


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(graphrt.UnsupportedError, match=r"LlamaModel: has no head.*AutoModelForCausalLM"):
        graphrt.from_transformers(make_model("Llama").model, config=CONFIG)


@pytest.mark.filterwarnings("ignore")
def test_weights_without_a_meta_implementation_are_refused() -> None:
    model = torch.ao.quantization.quantize_dynamic(make_model("Llama"), {torch.nn.Linear})
    with pytest.raises(
        graphrt.UnsupportedError, match=r"modeling_llama\.py:\d+: quantized::\w+ has no meta .*quantization$"
    ):
        graphrt.from_transformers(model, config=CONFIG)
    with pytest.raises(graphrt.ConfigError, match=r"in the memory of one device, got \['meta'\]; load it by"):
        graphrt.from_transformers(make_model("Llama").to("meta"), config=CONFIG)


def test_mask_without_a_cache_is_blamed_on_the_line_that_builds_it() -> None:
    model = make_model("Llama")
    model.forward = lambda input_ids, position_ids, use_cache: type(model).forward(
        model, input_ids, position_ids=position_ids, use_cache=use_cache
    )
    with pytest.raises(graphrt.UnsupportedError, match=r"_local_scalar_dense.* at .*modeling_llama\.py:\d+; compute"):
        graphrt.from_transformers(model, config=CONFIG)


def test_forward_of_a_subclass_may_pass_arguments_by_name() -> None:
    class Passing(transformers.LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
            return super().forward(input_ids, **options)

    model = make_model("Llama")
    expected = answers(model)
    model.__class__ = Passing
    check(model, expected).close()


def test_an_attention_function_of_the_caller_is_refused() -> None:
    def halved(*args: Any, **options: Any) -> tuple[torch.Tensor, None]:
        return transformers.AttentionInterface()["sdpa"](*args, **options)[0] * 0.5, None

    transformers.AttentionInterface.register("halved", halved)
    model = make_model("Llama")
    model.set_attn_implementation("halved")
    with pytest.raises(graphrt.UnsupportedError, match=r"halved of .*test_from_transformers.*set_attn_implementation"):
        graphrt.from_transformers(model, config=CONFIG)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tokenizer": "Qwen/Qwen3-8B"}, "tokenizer: expected PreTrainedTokenizerBase, got 'Qwen"),
        ({"fuse": "no"}, "fuse: expected True or False"),
        (
            {"kv_dtype": torch.float16},
            r"kv_dtype: expected fp8 or torch\.float32, the dtype of the keys, got .*pass None",
        ),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(graphrt.ConfigError, match=text):
        graphrt.from_transformers(make_model("Llama"), config=CONFIG, **options)


def test_tensors_of_numbers_are_filled_on_the_device() -> None:
    model = make_model("Llama")
    mlp = model.model.layers[0].mlp

    def forward(x: torch.Tensor) -> torch.Tensor:
        return type(mlp).forward(mlp, x) * torch.tensor(2.0, device=x.device) + torch.tensor(data=1, device=x.device)

    mlp.forward = forward
    check(model, answers(model)).close()


def reads_host(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * float(x.mean())


def copies_from_host(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([2.0], device=x.device)


def mixes_tokens(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(1)


def counts_tokens(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(x.shape[1], device=x.device)[:, None]


FAULTS = {
    reads_host: "_local_scalar_dense.default reads values on the host at",
    copies_from_host: "copies values from the host",
    mixes_tokens: "mixes tokens outside of the attention function",
    counts_tokens: "takes positions from the order of the tokens",
}


@pytest.mark.parametrize("forward", FAULTS)
def test_modules_that_a_graph_cannot_contain_are_blamed(forward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Llama")
    monkeypatch.setattr(type(model.model.layers[1].mlp), "forward", forward)
    line = forward.__code__.co_firstlineno
    with pytest.raises(graphrt.UnsupportedError, match=re.escape(FAULTS[forward])) as found:
        graphrt.from_transformers(model, config=CONFIG)
    assert re.search(rf"test_from_transformers\.py:({line}|{line + 1})\b", str(found.value))


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_dense_experts_equal_grouped_mm(name: str) -> None:
    model = make_model(name, **EXPERTS)
    experts = next(module for module in model.modules() if type(module).__name__.endswith("Experts"))
    hidden, scores = torch.randn(5, 48), torch.rand(5, 4)
    weights, index = scores.topk(2)
    with torch.no_grad():
        torch.testing.assert_close(dense_experts(experts, hidden, index, weights), experts(hidden, index, weights))


MASKS: dict[str, tuple[Callable[..., Any], Reach | None]] = {
    "causal": (lambda b, h, q, k: k <= q, Reach()),
    "window": (lambda b, h, q, k: (k <= q) & (k > q - 5), Reach(sliding_window=5)),
    "itself": (lambda b, h, q, k: k == q, Reach(sliding_window=1)),
    "window-longer-than-the-sequence": (lambda b, h, q, k: (k <= q) & (k > q - 100), Reach()),
    "chunk": (lambda b, h, q, k: (k <= q) & (k // 6 == q // 6), Reach(attention_chunk_size=6)),
    "bidirectional": (lambda b, h, q, k: q >= 0, None),
    "prefix": (lambda b, h, q, k: (k <= q) | (k < 3), None),
    "sinks": (lambda b, h, q, k: (k <= q) & ((k > q - 5) | (k < 2)), None),
    "nothing": (lambda b, h, q, k: q < 0, None),
}


@pytest.mark.parametrize("name", MASKS)
def test_reach_of_a_mask_function(name: str) -> None:
    predicate, expected = MASKS[name]
    assert reach_of(predicate, 64) == expected


def test_default_capacities_come_from_the_model() -> None:
    with graphrt.from_transformers(make_model("Llama")) as runtime:
        assert (runtime.config.max_seq_len, runtime.config.max_num_reqs) == (64, 8)
        assert runtime.memory_plan.num_pages == 1 + 8 * 4
    with pytest.raises(graphrt.ConfigError, match="expected at most 64"):
        graphrt.from_transformers(make_model("Llama"), config=graphrt.RuntimeConfig(max_seq_len=65))
    with pytest.raises(graphrt.ConfigError, match=r"call model\.eval\(\)"):
        graphrt.from_transformers(make_model("Llama").train())


@pytest.mark.parametrize("version", ["4.57.6", "5.3.0"])
def test_an_older_transformers_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(graphrt.ConfigError, match=rf"transformers: expected version 5\.4 or newer, got {version}"):
        package.__wrapped__()


def test_import_of_graphrt_does_not_import_transformers() -> None:
    code = "import sys, graphrt; graphrt.from_transformers; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
