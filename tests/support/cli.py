"""The command line called in this process and in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from graphrt.cli import main as cli
from graphrt.models.config import ModelConfig
from graphrt.models.rope import RopeConfig

ROOT = Path(__file__).resolve().parents[2]
SKY = "Why is the sky blue?"
ONE_TOKEN = ("--device", "cpu", "--max-new-tokens", "1", "--no-graphs")
TINY = ModelConfig(
    architecture="llama", vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_q_heads=4,
    num_kv_heads=2, head_dim=16, max_position_embeddings=128, rope=RopeConfig(theta=10_000.0), eos_ids=(2,),
)  # fmt: skip


def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    """Call the command in this process. Return the exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["graphrt", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capfd.readouterr()
    return int(caught.value.code or 0), out, err


def run(*arguments: str | bytes, **streams: object) -> subprocess.CompletedProcess[bytes]:
    """Call the command in a process of its own, with the streams and arguments of a real one."""
    command = [sys.executable, "-m", "graphrt", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | streams
    return subprocess.run(command, cwd=ROOT, timeout=300, **streams)
