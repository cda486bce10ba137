"""docs/sampling.md runs as it stands; its grammar needs llguidance."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sampling.md").read_text()
BLOCKS = re.findall(r"^```python(| grammar)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def run(*kinds: str) -> dict:
    names: dict = {}
    state = torch.random.get_rng_state()
    source = "\n".join(text for kind, text in BLOCKS if kind.strip() in kinds)
    exec(compile(source, "docs/sampling.md", "exec"), names)
    torch.random.set_rng_state(state)
    return names


def test_the_page_runs() -> None:
    names = run("")
    assert len(names["plain"].tokens) == 20
    first, second = names["requests"]
    assert first.tokens != second.tokens, "two adapters"


def test_the_grammar_holds() -> None:
    pytest.importorskip("llguidance")
    blocks = [text for kind, text in BLOCKS if kind.strip() == "grammar"]
    assert len(blocks) == 1
    names: dict = {}
    exec(compile(f"{BLOCKS[0][1]}\n{blocks[0]}", "docs/sampling.md", "exec"), names)
    assert re.fullmatch(r'\{"name": "[a-z]{3,8}", "age": [1-9][0-9]?\}', names["text"])
    assert names["request"].tokens[-1] == 128
    free = names["free"].tokens
    assert len(free) >= len(names["request"].tokens)
    assert free != names["request"].tokens
    names["runtime"].close()
