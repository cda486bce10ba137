"""The examples of README and docs/embedding.md give right tokens, commands are where CI finds them, and generated
documentation is up to date."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EMBEDDING = (ROOT / "docs" / "embedding.md").read_text()


def block(mark: str, language: str) -> str:
    found = re.search(rf"<!-- {mark} -->\n```{language}\n(.*?)```", README, re.DOTALL)
    assert found, f"README.md has no {language} block after <!-- {mark} -->"
    return found.group(1)


def test_the_embedding_example_runs() -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(compile(block("embed", "python"), "README.md", "exec"), names)
    handle = names["manager"].replay(names["again"])
    assert len(handle.tokens()) == 1
    assert names["first"].tokens().tolist() != [-1]
    # An independent answer for the first token: dense attention over the three prompt tokens.
    embed, qkv = names["embed"].double(), names["qkv"].double()
    q, k, v = (embed[[11, 12, 13]] @ qkv).view(3, 8, 64).split([4, 2, 2], dim=1)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    p = (torch.einsum("hd,khd->hk", q[2], k) * 64**-0.5).softmax(-1)
    logits = torch.einsum("hk,khd->hd", p, v).flatten() @ embed.t()
    assert names["first"].tokens()[0] == logits.argmax()


@pytest.mark.gpu
def test_the_example_of_the_kit_finds_nothing() -> None:
    """In a process of its own, as a reader runs it: no other test has begun the libraries."""
    checks = "assert held.ok\nassert same.ok\nassert held.nodes >= 1\n"
    command = [sys.executable, "-c", block("kit", "python") + checks]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stdout + result.stderr


def decoder_oracle(names: dict, tokens: list[int]) -> torch.Tensor:
    """Logits after the last of `tokens` of the decoder in docs/embedding.md: dense, float64, without a cache."""
    weights = {name: w.detach().double() for name, w in names["model"].named_parameters()}
    x = weights["embedding.weight"][tokens] + weights["places.weight"][: len(tokens)]
    future = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    for layer in range(names["LAYERS"]):
        qkv = (x @ weights[f"blocks.{layer}.qkv.weight"].t()).view(len(tokens), 8, 16)
        q, k, v = (t.repeat_interleave(4 // t.shape[1], 1) for t in qkv.split([4, 2, 2], dim=1))
        scores = (torch.einsum("qhd,khd->hqk", q, k) / 4).masked_fill(future, float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + mixed @ weights[f"blocks.{layer}.out.weight"].t()
    return x[-1] @ weights["head.weight"].t()


def test_the_blocks_of_the_embedding_page_run_one_after_another() -> None:
    """Tokens as the oracle has them, by both classes; a ban of one row's token leaves the other row as it was."""
    torch.manual_seed(0)
    names: dict = {}
    source = "\n".join(re.findall(r"^```python\n(.*?)^```", EMBEDDING, re.DOTALL | re.MULTILINE))
    exec(compile(source, "docs/embedding.md", "exec"), names)
    for index, prompt in enumerate(([11, 12, 13], [21, 22])):
        tokens = list(prompt)
        for _ in range(6):
            tokens.append(int(decoder_oracle(names, tokens).argmax()))
        answer = tokens[len(prompt) :]
        assert len(set(answer)) > 3, "an oracle that repeats itself shows little"
        assert names["answers"][index] == answer
        assert names["tokens"][:, index].tolist() == answer
        assert names["free"][index] == answer[0]
    second = decoder_oracle(names, [21, 22]).topk(2).indices[1]
    assert names["held"].tolist() == [names["free"][0], int(second)]


def test_the_numbers_of_the_embedding_page_have_a_script_that_runs() -> None:
    command = [sys.executable, "scripts/bench_batch.py", "--rows", "3", "--pages", "5"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    timed = re.findall(r"^ +\d+  (.+)$", result.stdout, re.MULTILINE)
    assert len(timed) == 6
    assert [name for name in timed if name not in EMBEDDING] == []


def test_commands_are_marked() -> None:
    assert "pip install -e" in block("install", "bash")
    assert "graphrt generate" in block("install", "bash")
    assert "pytest" in block("test", "bash")


def test_the_tree_names_what_is_there() -> None:
    """Folders by their indentation of two; a file is in the folder above it."""
    tree = (ROOT / "docs" / "dev" / "tree.md").read_text().split("```")[1]
    folders: dict[int, str] = {-1: ""}
    missing, named = [], set()
    for line in tree.strip("\n").splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        head = line.split()[0]
        if head.endswith("/"):
            folders[depth] = folders[depth - 1] + head
            named.add(folders[depth])
            missing += [] if (ROOT / folders[depth]).is_dir() else [folders[depth]]
        base = folders[depth] if head.endswith("/") else folders[depth - 1]
        files = re.findall(r"\b\w+\.py\b", line)
        missing += [base + name for name in files if not (ROOT / base / name).is_file()]
    assert missing == []
    packages = {path.parent.relative_to(ROOT).as_posix() + "/" for path in ROOT.glob("graphrt/*/__init__.py")}
    assert packages - named == set()


def test_generated_documentation_is_up_to_date() -> None:
    command = [sys.executable, "scripts/make_docs.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stdout + result.stderr
