"""`from_transformers` with drafts: the tokens of transformers, from n-grams, a draft model and a head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import graphrt
from graphrt.draft_model import DraftModel
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import load_model
from graphrt.proposer import Proposer, ngram_drafts
from graphrt.step import Step
from tests.integrations.test_from_transformers import CONFIG, PROMPTS
from tests.support.model_fixtures import make_oracle, save_oracle

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


def test_inputs_of_layers_are_not_kept() -> None:
    draft = DraftModel(lambda step: step, [SPEC], vocab_size=97, hidden_size=48, hidden_layers=(1, 2))
    with pytest.raises(graphrt.ConfigError, match=r"the model kept no hidden states before layers \[1, 2\]"):
        graphrt.from_transformers(make_oracle("Llama"), config=CONFIG_3, num_pages=40, page_size=4, proposer=draft)
