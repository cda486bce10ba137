"""The command line as a user meets it: answers on standard output, all else on standard error, no tracebacks."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import graphrt as library
from graphrt.cli import main as cli
from graphrt.cli import options
from graphrt.models.smollm import default_model_path
from graphrt.models.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SKY = "Why is the sky blue?"
TINY = ("--device", "cpu", "--max-new-tokens", "1", "--no-graphs")


def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["graphrt", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capfd.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.fixture
def graphrt(monkeypatch, capfd):
    return lambda *arguments: call(monkeypatch, capfd, *arguments)


def run(*arguments: str | bytes, **streams: object) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own, with the streams and arguments of a real one."""
    command = [sys.executable, "-m", "graphrt", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | streams
    return subprocess.run(command, cwd=ROOT, timeout=300, **streams)


def test_generate_answers_alone_in_a_batch_and_without_graphs(graphrt) -> None:
    options = ("--device", "cpu", "--max-new-tokens", "16")
    code, alone, log = graphrt("generate", SKY, *options)
    assert code == 0
    assert "light" in alone
    assert "captured" in log
    assert "op trace" in log
    code, batch, _ = graphrt("generate", SKY, "Hi", *options)
    assert code == 0
    assert batch.startswith("[")
    assert f"[1] {SKY}\n{alone.strip()}\n" in batch
    assert "[2] Hi\n" in batch
    code, eager, log = graphrt("generate", SKY, *options, "--no-graphs", "--stats")
    assert (code, eager) == (0, alone)
    assert "graphs are switched off" in log
    assert "captured" not in log


def test_generate_samples_by_seed(graphrt) -> None:
    options = ("--device", "cpu", "--max-new-tokens", "8", "--temperature", "1.5")
    first, again, other = (graphrt("generate", SKY, *options, "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other
    _, best, _ = graphrt("generate", SKY, *options, "--top-k", "1", "--top-p", "0.9", "--min-p", "0.1")
    assert best == graphrt("generate", SKY, *options[:-1], "0")[1]
    assert best != first


def test_generate_takes_penalties_biases_and_log_probabilities(graphrt) -> None:
    options = ("--device", "cpu", "--max-new-tokens", "12")
    _, plain, log = graphrt("generate", SKY, *options, "--logprobs", "2")
    lines = [line for line in log.split("\n") if line.startswith("[1] token ")]
    assert len(lines) == 12
    ids = [int(line.split()[2].rstrip(":")) for line in lines]
    assert all(", rank 1; " in line and f"  {token}: " in line for line, token in zip(lines, ids, strict=True))
    assert graphrt("generate", SKY, *options)[1] == plain
    for extra in (
        ("--repetition-penalty", "5"), ("--presence-penalty", "-50"), ("--frequency-penalty", "-50"),
        ("--logit-bias", f"{ids[0]}=-inf", "--logit-bias", f"{ids[1]}=-30"),
    ):  # fmt: skip
        code, other, _ = graphrt("generate", SKY, *options, *extra)
        assert code == 0
        assert other != plain, extra
    code, out, log = graphrt("generate", "Hi", *TINY, "--raw", "--prompt-logprobs", "1")
    assert (code, out) == (0, graphrt("generate", "Hi", *TINY, "--raw")[1])
    count = len(load_tokenizer(default_model_path()).encode_prompt("Hi", chat=False))
    assert len([line for line in log.split("\n") if line.startswith("[1] prompt token ")]) == count - 1
    code, out, log = graphrt("generate", SKY, *TINY, "--logit-bias", "x")
    assert (code, out) == (1, "")
    assert "ConfigError: --logit-bias: expected ID=X" in log
    for extra, text in (
        (
            ("--logit-bias", "5=1", "--logit-bias", "5=2"),
            "--logit-bias: expected each token once, got 5 again in '5=2'",
        ),
        (("--logit-bias", f"{10**8}=1"), "--logit-bias: expected token ids below "),
        (("--logprobs", "1025"), "--logprobs: expected at most 1024, got 1025"),
        (("--prompt-logprobs", "1025"), "--prompt-logprobs: expected at most 1024, got 1025"),
    ):
        code, out, log = graphrt("generate", SKY, *TINY, *extra)
        assert (code, out) == (1, "")
        assert text in log


def test_generate_ends_answers_where_it_is_told(graphrt) -> None:
    options = ("--device", "cpu", "--max-new-tokens", "16")
    _, plain, log = graphrt("generate", SKY, *options, "--logprobs", "0")
    ids = [line.split()[2].rstrip(":") for line in log.split("\n") if line.startswith("[1] token ")]
    words = plain.split()
    assert len(words) > 6
    code, out, _ = graphrt("generate", SKY, *options, "--stop", words[5], "--stop", "no such text")
    assert (code, out.strip()) == (0, plain[: plain.index(words[5])].strip())
    code, both, _ = graphrt("generate", SKY, "Hi", *options, "--stop", words[5])
    assert code == 0
    assert f"[1] {SKY}\n{out.strip()}\n" in both
    code, out, log = graphrt("generate", SKY, *options, "--stop-id", ids[3], "--logprobs", "0")
    assert code == 0
    assert plain.startswith(out.rstrip("\n"))
    assert len([line for line in log.split("\n") if line.startswith("[1] token ")]) == ids.index(ids[3])
    code, out, log = graphrt("generate", SKY, *TINY, "--stop", "")
    assert (code, out) == (1, "")
    assert "ConfigError: stop: expected strings of a character or more, got ''" in log


def test_generate_goes_on_behind_the_models_own_end(graphrt) -> None:
    options = ("--device", "cpu", "--max-new-tokens", "40", "--stats")
    _, _, log = graphrt("generate", "Say hi.", *options)
    _, _, ignored = graphrt("generate", "Say hi.", *options, "--ignore-eos")
    count = lambda text: int(text.split("tokens ")[1].split(" in ")[0])  # noqa: E731
    assert count(log) < count(ignored) == 40


def test_prompts_of_a_file_follow_those_of_the_command_line(graphrt, tmp_path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfHi\r\n\n   \n" + "Größe\x0bA\n".encode())
    code, out, _ = graphrt("generate", SKY, "--prompts", str(path), *TINY)
    assert code == 0
    assert sorted(line for line in out.split("\n") if line.startswith("[")) == [
        f"[1] {SKY}",
        "[2] Hi",
        "[3] Größe\x0bA",
    ]


def test_prompts_of_standard_input(graphrt, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{SKY}\nHi".encode())))
    code, out, _ = graphrt("generate", "--prompts", "-", *TINY)
    assert code == 0
    assert sorted(line for line in out.split("\n") if line.startswith("[")) == [f"[1] {SKY}", "[2] Hi"]


BAD_PROMPTS = {
    "none": ((), None, "ConfigError: prompts: expected one or more, got none"),
    "empty": (("",), None, "ConfigError: prompt: expected some text, got ''"),
    "missing": (("--prompts", "/nowhere/file"), None, "No such file or directory: '/nowhere/file'"),
    "folder": (("--prompts", "/"), None, "ConfigError: --prompts: expected a file of UTF-8 text"),
    "unnamed": (("--prompts", ""), None, "ConfigError: --prompts: expected a file of UTF-8 text"),
    "blank": (("--prompts", "-"), b"\n \n", "ConfigError: prompts: expected one or more, got none"),
    "latin-1": (("--prompts", "-"), "Größe".encode("latin-1"), "ConfigError: --prompts: expected a file of UTF-8 text"),
    "no input": (("--prompts", "-"), None, "ConfigError: --prompts: expected a file of UTF-8 text"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_bad_prompts(graphrt, monkeypatch, case) -> None:
    arguments, given, text = BAD_PROMPTS[case]
    monkeypatch.setattr(sys, "stdin", None if given is None else io.TextIOWrapper(io.BytesIO(given)))
    code, out, err = graphrt("generate", *arguments)
    assert (code, out) == (1, "")
    assert text in err
    assert "Traceback" not in err


def test_a_file_of_prompts_without_end_is_refused(graphrt) -> None:
    code, _, err = graphrt("generate", "--prompts", "/dev/zero")
    assert code == 1
    assert "ConfigError: --prompts: expected at most 64 MiB, got more" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--model", "/nowhere/model.gguf"), "ConfigError: model: expected a folder, a .gguf file"),
        (("--model", ""), "ConfigError: model: expected a folder, a .gguf file, a hub id such as org/name or dummy"),
        (("--model", "~nobody-of-this-name/model"), "ConfigError: model: expected a folder, a .gguf file"),
        (("--model", "x" * 5000), "ConfigError: model: expected a folder, a .gguf file"),
        (("--model", "dummy:smollm2-135m"), "llama-3.1-8b, llama-3.2-1b, qwen3-0.6b, smollm2-135m, mistral-7b"),
        (("--model", "dummy:smollm2-135m"), "leave --model out for SmolLM2-135M-Instruct"),
        (("--device", "tpu"), "ConfigError: device: expected cpu, cuda or cuda:N, got 'tpu'"),
        (("--device", ""), "ConfigError: device: expected cpu, cuda or cuda:N, got ''"),
        (("--device", "cuda:99"), "ConfigError: device: expected one of"),
        (("--dtype", "int3"), "ConfigError: --dtype: expected auto, float32"),
        (("--temperature", "-1"), "ConfigError: temperature: expected a finite number >= 0, got -1.0"),
        (("--temperature", "nan"), "temperature: expected a finite number >= 0, got nan"),
        (("--max-new-tokens", "9999"), "CapacityError: prompt: expected prompt and output within the model's"),
        (
            ("--max-new-tokens", str(10**18)),
            f"ConfigError: max_new_tokens: expected an int from 1 to 1073741824, got {10**18}",
        ),
        (("--device", "cpu", "--backend", ""), "ConfigError: backend: expected one of triton"),
    ],
    ids=lambda x: x[-1][:20] if isinstance(x, tuple) else None,
)
def test_errors_have_text_and_no_traceback(graphrt, arguments: tuple[str, ...], text: str) -> None:
    code, out, err = graphrt("generate", SKY, *arguments)
    assert code == 1
    assert out == ""
    assert text in err.replace("\n", " ")
    assert "Traceback" not in err


OUT_OF_RANGE = [
    *(("generate", SKY, *case) for case in (("--seed", "-1"), ("--seed", str(1 << 32)), ("--seed", "x"))),
    *(("generate", SKY, "--max-new-tokens", value) for value in ("0", "-3", "1.5", "")),
    *(("generate", SKY, "--page-size", value) for value in ("0", "1025")),
    *(("bench", "decode", "--context", value) for value in ("0", "-1", "x")),
    *(("bench", "decode", "--steps", value) for value in ("0", "-1")),
    *(("bench", "serve", option, "0") for option in ("--requests", "--least", "--most", "--rows", "--step-tokens")),
    ("bench", "decode", "--page-size", "0"),
    ("bench", "prefill"),
    ("generate", SKY, "--no-such-option"),
]


@pytest.mark.parametrize("arguments", OUT_OF_RANGE, ids=" ".join)
def test_usage_errors_name_the_option(graphrt, arguments: tuple[str, ...]) -> None:
    code, out, err = graphrt(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: " in err
    assert next((a for a in reversed(arguments) if a.startswith("--")), arguments[-1]) in err
    assert "Traceback" not in err


def test_version(graphrt) -> None:
    assert graphrt("--version") == (0, f"graphrt {library.__version__}\n", "")


def test_bench_decode_ends_in_one_json_line(graphrt) -> None:
    sizes = ("--batch", "1,2", "--context", "16", "--steps", "2")
    code, out, _ = graphrt("bench", "decode", "--shape", "smollm2-135m", *sizes, "--device", "cpu")
    assert code == 0
    record = json.loads(out.splitlines()[-1])
    assert [r["batch"] for r in record["results"]] == [1, 2]
    assert all(r["replay_ms"] > r["floor_ms"] > 0 for r in record["results"])
    assert record["results"][0]["kv_bytes"] * 2 == record["results"][1]["kv_bytes"]
    assert record["decode_graphs"] == 2
    assert record["baselines"] == []


def test_bench_serve_ends_in_one_json_line(graphrt) -> None:
    sizes = ("--requests", "3", "--least", "2", "--most", "5", "--rows", "2", "--step-tokens", "8")
    code, out, _ = graphrt("bench", "serve", "--shape", "smollm2-135m", *sizes, "--device", "cpu")
    assert code == 0
    assert "output tokens/s" in out
    record = json.loads(out.splitlines()[-1])
    assert record["workload"] == {
        "requests": 3, "least": 2, "most": 5, "seed": 0, "sampling": {"temperature": 0.6}
    }  # fmt: skip
    assert record["tokens_per_s"] == record["output_tokens"] / record["seconds"] > 0
    assert 0 < record["busy_share"] < 1
    assert 0 < record["share_of_floor"] < 1


SAMPLED = (
    "--temperature", "0.7", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.1",
    "--presence-penalty", "0.2", "--frequency-penalty", "0.3", "--logit-bias", "5=-inf", "--logprobs", "2",
)  # fmt: skip
SAMPLING = {
    "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.2,
    "frequency_penalty": 0.3, "logit_bias": {"5": "-inf"}, "logprobs": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "sizes", "found"),
    [
        ("decode", ("--batch", "2", "--context", "16", "--steps", "2"), lambda record: record["sampling"]),
        (
            "serve", ("--requests", "2", "--least", "2", "--most", "3", "--rows", "2", "--step-tokens", "8"),
            lambda record: record["workload"]["sampling"],
        ),
    ],
)  # fmt: skip
def test_benchmarks_sample_as_they_are_told(graphrt, command: str, sizes: tuple[str, ...], found) -> None:
    shape = ("--shape", "smollm2-135m", "--device", "cpu")
    code, out, _ = graphrt("bench", command, *shape, *sizes, *SAMPLED)
    assert code == 0
    assert found(json.loads(out.splitlines()[-1])) == SAMPLING
    code, out, err = graphrt("bench", command, *shape, *sizes, "--logit-bias", "99999999=1")
    assert (code, out) == (1, "")
    assert "--logit-bias: expected token ids below " in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--shape", "llama-9000"), "shape: expected one of llama-3.1-8b"),
        (("--least", "9", "--most", "3"), "least: expected an int from 1 to 3, got 9"),
        (("--shape", "smollm2-135m", "--device", "cpu", "--step-tokens", "3"), "step_tokens: expected at least 256"),
        (("--temperature", "-1"), "temperature: expected a finite number >= 0, got -1.0"),
    ],
    ids=lambda x: " ".join(x)[-30:] if isinstance(x, tuple) else "",
)
def test_bench_serve_errors(graphrt, arguments: tuple[str, ...], text: str) -> None:
    code, out, err = graphrt("bench", "serve", *arguments)
    assert (code, out) == (1, "")
    assert text in err.replace("\n", " ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "expected one of --shape and --model, got none"),
        (("--shape", "smollm2-135m", "--model", "x"), "expected one of --shape and --model, got both"),
        (("--shape", "llama-9000"), "shape: expected one of llama-3.1-8b"),
        (("--shape", "smollm2-135m", "--batch", "1,x"), "--batch: expected comma-separated numbers >= 1, got '1,x'"),
        (("--shape", "smollm2-135m", "--batch", ""), "--batch: expected comma-separated numbers >= 1, got ''"),
        (("--shape", "smollm2-135m", "--batch", "1,"), "--batch: expected comma-separated numbers >= 1, got '1,'"),
        (("--shape", "smollm2-135m", "--batch", "0"), "--batch: expected comma-separated numbers >= 1, got '0'"),
        (("--shape", "smollm2-135m", "--batch", "9" * 5000), "--batch: expected comma-separated numbers >= 1"),
        (("--shape", "smollm2-135m", "--baseline", "vllm"), "--baseline: expected transformers, got 'vllm'"),
        (("--model", "dummy:llama-9000"), "shape: expected one of llama-3.1-8b"),
        (("--shape", "smollm2-135m", "--context", str(10**12)), "ConfigError: max_positions: expected"),
        (("--shape", "smollm2-135m", "--device", "cpu", "--batch", "65536", "--context", "99999"), "CapacityError"),
        (
            ("--shape", "smollm2-135m", "--device", "cpu", "--batch", "999999"),
            "ConfigError: RuntimeConfig.max_num_reqs: expected an int from 1 to 65536, got 999999",
        ),
    ],
    ids=lambda x: " ".join(x)[-30:] if isinstance(x, tuple) else "",
)
def test_bench_errors(graphrt, arguments: tuple[str, ...], text: str) -> None:
    code, out, err = graphrt("bench", "decode", *arguments)
    assert (code, out) == (1, "")
    assert text in err.replace("\n", " ")
    assert "Traceback" not in err


def test_env_reports_backends_and_reasons(graphrt) -> None:
    code, out, _ = graphrt("env", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["packages"]["torch"]
    names = {b["name"]: b["unsupported_reasons"] for b in report["backends"]["known"]}
    assert names["torch_reference"] == []
    assert report["backends"]["chosen"] in names
    code, table, _ = graphrt("env")
    assert code == 0
    assert "torch_reference" in table
    assert "triton" in table


# What only a process of its own shows


def test_arguments_that_are_no_utf8(tmp_path) -> None:
    done = run("generate", b"gr\xfc\xdfe")
    assert done.returncode == 1
    assert done.stderr.startswith(b"ConfigError: prompt: expected text in UTF-8, got 'gr\\udcfc\\udcdfe'")
    for arguments in (("bench", "decode", "--shape", b"\xff"), ("generate", SKY, "--model", b"\xff/x.gguf")):
        done = run(*arguments)
        assert done.returncode == 1
        assert done.stderr.startswith(b"ConfigError: ")


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


def test_no_standard_output_at_all() -> None:
    command = f"exec {sys.executable} -m graphrt env --json >&-"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_ascii_terminal(tmp_path) -> None:
    """What cannot be shown is escaped: the table's frame, and the text of a prompt that is printed again."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = run("env", env=environment)
    assert done.returncode == 0, done.stderr
    assert b"torch_reference" in done.stdout
    assert max(done.stdout) < 128
    done = run("generate", "Größe", "Hi", *TINY, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"[1] Gr\\xf6\\xdfe" in done.stdout


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['graphrt', 'generate', '--help']\n"
        "from graphrt.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--prompts" in done.stdout


@pytest.mark.parametrize(
    "cls", [options.GenerateOptions, options.DecodeOptions, options.ServeOptions, options.EnvOptions]
)
def test_options_are_declared_once(cls, graphrt, monkeypatch) -> None:
    """Every field of the options is an option of the command."""
    monkeypatch.setenv("COLUMNS", "100")  # long names are cut in narrow terminals
    names = {"GenerateOptions": ["generate"], "DecodeOptions": ["bench", "decode"], "EnvOptions": ["env"]}
    names["ServeOptions"] = ["bench", "serve"]
    code, text, _ = graphrt(*names[cls.__name__], "--help")
    assert code == 0
    for field in fields(cls):
        shown = {"prompt_file": "--prompts", "as_json": "--json", "prompts": "prompts", "chat": "--chat"}
        assert shown.get(field.name, "--" + field.name.replace("_", "-")) in text.lower()
