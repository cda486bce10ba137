"""`from_transformers` with drafts: the tokens of transformers, from n-grams, a draft model and a head."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import graphrt
from graphrt.draft_model import DraftModel
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import load_model
from graphrt.proposer import Proposer, ngram_drafts
from graphrt.step import Step
from tests.integrations.test_from_transformers import CONFIG, PROMPTS
from tests.support.model_fixtures import byte_tokenizer, make_oracle, save_oracle

SPEC = graphrt.AttentionSpec(2, 1, 8, torch.float32)
CONFIG_3 = replace(CONFIG, num_speculative_tokens=3, max_num_tokens=32, max_seq_len=40)


class Head(torch.nn.Module):
    """Drafts the tokens of an equal model, except after a token that the hidden state before it did not predict."""

    def __init__(self, model: LlamaModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, step: Step) -> torch.Tensor:
        logits, ends = self.model(step), step.logits_indices
        assert step.previous_hidden is not None
        wrong = (step.previous_hidden @ self.model.head.t()).argmax(1) != step.input_ids
        return torch.where(wrong[ends][:, None], logits.roll(1, 1), logits)


@pytest.mark.parametrize(
    ("family", "source"), [("Llama", "head"), ("Llama", "draft_model"), ("Mistral", "ngram"), ("GPT2", "draft_model")]
)
def test_tokens_equal_transformers(tmp_path: Path, family: str, source: str) -> None:
    """A draft model of the same weights drafts all tokens, as does a head that gets the right hidden states."""
    save_oracle(tmp_path, "Llama")
    model = make_oracle(family, **{"Mistral": {"sliding_window": 8}}.get(family, {}))
    proposer: Proposer = ngram_drafts
    if source != "ngram":
        draft = load_model(tmp_path, device="cpu").model
        proposer = DraftModel(
            Head(draft) if source == "head" else draft, draft.config.attention_specs(draft.dtype), vocab_size=97,
            hidden_size=48 if source == "head" else None,
        )  # fmt: skip
    with graphrt.from_transformers(model, config=CONFIG_3, num_pages=40, page_size=4, proposer=proposer) as runtime:
        found = runtime.generate(PROMPTS, max_new_tokens=17, eos_token_id=None)
        for prompt, result in zip(PROMPTS, found, strict=True):
            want = model.generate(torch.tensor([prompt]), max_new_tokens=17, do_sample=False, eos_token_id=None)
            assert result.token_ids == want[0, len(prompt) :].tolist()
        steps = runtime.stats().tokens_per_step
    if family == "Llama":
        assert max(steps) == steps.most_common(1)[0][0] == 4


def test_draft_models_are_loaded_for_models_of_load_model() -> None:
    with pytest.raises(graphrt.ConfigError, match=r"model: expected LlamaModel, got Llama.*build a Draft"):
        graphrt.load_draft_model("dummy:smollm2-135m", make_oracle("Llama"))


def test_a_model_is_no_proposer() -> None:
    with pytest.raises(graphrt.ConfigError, match=r"proposer: .* got LlamaForCausalLM; load it with load_model\(\)"):
        graphrt.from_transformers(make_oracle("Llama"), config=CONFIG_3, proposer=make_oracle("Llama"))


def test_blocks_of_the_docs_give_the_tokens_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 without a GPU: a model, then a draft model for it, then sampling and a stream."""
    for name in ("Qwen3-8B", "Qwen3-0.6B"):
        save_oracle(tmp_path / "Qwen" / name, "Qwen3", vocab_size=300, max_position_embeddings=160, head_dim=16)
        byte_tokenizer().save_pretrained(tmp_path / "Qwen" / name)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for source in (block for block in blocks if "XGLM" not in block and "import ray" not in block):
        exec(source.replace(".cuda()", "").replace('"bfloat16"', '"float32"'), names)
        for prompt in PROMPTS:
            (result,) = names["runtime"].generate([prompt], max_new_tokens=12, eos_token_id=None)
            want = names["model"].generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
            )
            assert result.sequence == want[0].tolist()
    assert max(names["runtime"].stats().tokens_per_step) == 4, "the drafts of an equal model are accepted"
    assert {names["result"].finish_reason, names["token"].finish_reason} <= {"max_length", "eos_token_id"}
    names["runtime"].close()


def test_inputs_of_layers_are_not_kept() -> None:
    draft = DraftModel(lambda step: step, [SPEC], vocab_size=97, hidden_size=48, hidden_layers=(1, 2))
    with pytest.raises(graphrt.ConfigError, match=r"the model kept no hidden states before layers \[1, 2\]"):
        graphrt.from_transformers(make_oracle("Llama"), config=CONFIG_3, num_pages=40, page_size=4, proposer=draft)
