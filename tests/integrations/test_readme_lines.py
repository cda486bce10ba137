"""The README's three lines for a model from transformers, on 44 families: tokens and texts against its `generate`."""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from tests.integrations.test_from_transformers import FAMILIES, make_model
from tests.models import test_families
from tests.support.model_fixtures import SIZES
from tests.test_readme import block

PROMPTS, NEW_TOKENS = ["Why is the sky blue?", "Name three fruits."], 20
"""Those of the README, of 20 and 18 tokens. Windows are of 8 tokens."""
MAKERS: dict[str, Callable[[], Any]] = {name: partial(make_model, name, **FAMILIES[name]) for name in FAMILIES}
MAKERS |= {name: partial(test_families.make_model, name) for name in test_families.FAMILIES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of one token per character."""
    path = tmp_path_factory.mktemp("tokenizer")
    characters = string.printable[: SIZES["vocab_size"]]
    raw = Tokenizer(BPE({character: index for index, character in enumerate(characters)}, []))
    raw.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", MAKERS)
def test_three_lines_give_the_tokens_of_transformers(name: str, folder: Path) -> None:
    model = MAKERS[name]()
    model.name_or_path = str(folder)
    names: dict[str, Any] = {"model": model}
    exec(block("transformers", "python"), names)
    assert not names["runtime"].stats().eager_steps
    names["runtime"].close()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt, result in zip(PROMPTS, names["results"], strict=True):
        sequence = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=NEW_TOKENS)[0]
        assert result.sequence == sequence.tolist()
        assert prompt + result.text == tokenizer.decode(sequence)
