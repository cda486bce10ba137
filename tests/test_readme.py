"""The README's example runs, its commands are where CI finds them, and generated documentation is up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def block(mark: str, language: str) -> str:
    found = re.search(rf"<!-- {mark} -->\n```{language}\n(.*?)```", README, re.DOTALL)
    assert found, f"README.md has no {language} block after <!-- {mark} -->"
    return found.group(1)


def test_the_embedding_example_runs() -> None:
    import torch

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


def test_commands_are_marked() -> None:
    assert "pip install -e" in block("install", "bash")
    assert "graphrt generate" in block("install", "bash")
    assert "pytest" in block("test", "bash")


def test_the_tree_names_what_is_there() -> None:
    tree = README.split("## Tree")[1].split("```")[1]
    folder, missing = "", []
    for line in tree.strip().splitlines():
        head = re.match(r"(\s*)([\w./*]+)", line)
        if head and head.group(2).endswith("/"):
            parent = "" if not head.group(1) else folder.split("/")[0] + "/"
            folder = parent + head.group(2)
            missing += [] if (ROOT / folder).is_dir() else [folder]
        for name in re.findall(r"[\w*]+\.(?:py|md)", line):
            base = folder if (list((ROOT / folder).glob(name))) else folder.split("/")[0] + "/"
            missing += [] if list((ROOT / base).glob(name)) else [f"{folder}{name}"]
    assert not missing


def test_generated_documentation_is_up_to_date() -> None:
    command = [sys.executable, "scripts/make_docs.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stdout + result.stderr
