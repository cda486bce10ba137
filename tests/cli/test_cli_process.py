"""Options, streams and signals of the command line, mostly in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import graphrt as library
from tests.support.cli import ONE_TOKEN, ROOT, SKY, run

OUT_OF_RANGE = [
    *(("generate", SKY, "--seed", value) for value in ("-1", str(1 << 32), "x")),
    *(("generate", SKY, "--max-new-tokens", value) for value in ("0", "1.5")),
    *(("generate", SKY, "--page-size", value) for value in ("0", "1025")),
    ("bench", "decode", "--context", "0"),
    ("bench", "decode", "--steps", "0"),
    *(("bench", "serve", option, "0") for option in ("--requests", "--least", "--most", "--rows", "--step-tokens")),
    ("bench", "decode", "--page-size", "0"),
    ("bench", "prefill"),
    ("generate", SKY, "--no-such-option"),
]


@pytest.mark.parametrize("arguments", OUT_OF_RANGE, ids=" ".join)
def test_usage_errors_name_the_option(refused, arguments: tuple[str, ...]) -> None:
    err = refused(*arguments, code=2)
    assert "Usage: " in err
    assert next((a for a in reversed(arguments) if a.startswith("--")), arguments[-1]) in err


def test_version(graphrt) -> None:
    assert graphrt("--version") == (0, f"graphrt {library.__version__}\n", "")


def test_arguments_that_are_no_utf8(refused) -> None:
    done = run("generate", b"gr\xfc\xdfe")
    assert done.returncode == 1
    assert done.stderr.startswith(b"ConfigError: prompt: 'gr\\udcfc\\udcdfe' is not valid UTF-8")
    for arguments in (("bench", "decode", "--shape", "\udcff"), ("generate", SKY, "--model", "\udcff/x.gguf")):
        assert refused(*arguments).startswith("ConfigError: ")


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("--version",), ("env", "--json"), ("--help",)], ids=" ".join)
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with FULL.open("wb") as full:
        done = run(*arguments, stdout=full)
    assert done.returncode == 1
    assert done.stderr == b"OutputError: standard output: No space left on device\n"


def test_a_reader_that_leaves_early() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run("env", "--json", stdout=writer)
    os.close(writer)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


def in_shell(arguments: str, redirection: str) -> subprocess.CompletedProcess[bytes]:
    command = f"exec {sys.executable} -m graphrt {arguments} {redirection}"
    return subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, timeout=300)


@pytest.mark.parametrize("redirection", [">&-", "1</dev/null"])
def test_an_answer_that_cannot_be_written_is_an_error(redirection: str) -> None:
    done = in_shell("env --json", redirection)
    assert done.returncode == 1
    assert done.stderr.startswith(b"OutputError: standard output")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    "redirection",
    [pytest.param("2>/dev/full", marks=pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")), "2>&-"],
)
def test_a_log_that_cannot_be_written_costs_no_answer(graphrt, redirection: str) -> None:
    answer = graphrt("generate", "Hi", *ONE_TOKEN)[1]
    done = in_shell(f"generate Hi {' '.join(ONE_TOKEN)} --stats", redirection)
    assert (done.returncode, done.stdout.decode()) == (0, answer)
    assert len(answer.strip()) > 0
    assert in_shell("generate ''", redirection).returncode == 1


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_ctrl_c_in_an_import_exits_with_130(module: str, tmp_path: Path) -> None:
    """The interrupt comes while the module is imported, in code that turns any exception into another one."""
    package = tmp_path / module
    package.mkdir()
    package.joinpath("__init__.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    sum(range(1000))\n"
        "except BaseException:\n    raise AttributeError('half a module') from None\n"
    )
    paths = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    done = run("generate", "Hi", env=os.environ | paths, preexec_fn=default)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_ctrl_c_in_a_command_exits_with_130(monkeypatch, graphrt) -> None:
    def interrupted(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("graphrt.cli.env.run", interrupted)
    assert graphrt("env") == (130, "", "")


def test_an_ascii_terminal(tmp_path) -> None:
    """What cannot be shown is escaped: the table's frame, and the text of a prompt that is printed again."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = run("env", env=environment)
    assert done.returncode == 0, done.stderr
    assert b"torch_reference" in done.stdout
    assert max(done.stdout) < 128
    done = run("generate", "Größe", "Hi", *ONE_TOKEN, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"[1] Gr\\xf6\\xdfe" in done.stdout


# What each line may not load. `python -X importtime` names a module when its import ends.
HEAVY = {"torch", "triton", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub", "jinja2"}
LOADS = {
    ("-m", "graphrt", "--help"): HEAVY | {"numpy"},
    ("-m", "graphrt", "--version"): HEAVY | {"numpy"},
    ("-m", "graphrt", "generate", "--help"): HEAVY | {"numpy"},
    ("-m", "graphrt", "generate", SKY, "--seed", "-1"): HEAVY | {"numpy"},
    ("-m", "graphrt", "bench", "prefill"): HEAVY | {"numpy"},
    ("-c", "import graphrt"): HEAVY | {"numpy", "typer", "rich"},
    ("-c", "from graphrt import Runtime, TextGenerator, load_model, load_tokenizer"): (
        HEAVY - {"torch", "triton"} | {"torch._dynamo", "torch._inductor", "sympy", "pytest", "typer", "rich"}
    ),
}


@pytest.mark.parametrize("line", LOADS, ids=" ".join)
def test_packages_are_loaded_only_when_used(line: tuple[str, ...]) -> None:
    command = [sys.executable, "-X", "importtime", *line]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    loaded = {row.rsplit("|", 1)[-1].strip() for row in done.stderr.splitlines() if row.startswith("import time:")}
    assert "graphrt" in loaded
    assert loaded & LOADS[line] == set()
