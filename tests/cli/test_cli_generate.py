"""`graphrt generate`: answers on standard output, everything else on standard error."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import GraphReport
from graphrt.cli.generate import _print_stats
from graphrt.cli.values import check_length
from graphrt.engine.stats import Stats
from graphrt.kernels.errors import CapacityError
from graphrt.models.smollm import default_model_path
from graphrt.models.tokenizer import load_tokenizer
from tests.support.cli import ONE_TOKEN, SKY


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


def test_statistics_name_the_size_that_is_missing() -> None:
    size = BatchDescriptor.decode(64)
    stats = Stats("a recorder", "a backend", "a reason", "products", graphs=(GraphReport(size, 1.0, 0, 0, 5),))
    stats.count(size, 33, "", 100)
    text = io.StringIO()
    _print_stats(Console(file=text, width=200), stats, 100, 1.0)
    assert "sizes" in text.getvalue()
    assert stats.advice[0] in text.getvalue()
    assert "capture 33" in stats.advice[0]


def test_generate_verifies_ngrams(graphrt) -> None:
    options = ("--device", "cpu", "--max-new-tokens", "12")
    plain = graphrt("generate", SKY, *options)[1]
    code, drafted, log = graphrt("generate", SKY, *options, "--speculate", "ngram", "--drafts", "2", "--stats")
    assert (code, drafted) == (0, plain)
    assert "tokens per request and step" in log


def test_generate_verifies_drafts_of_a_model(graphrt) -> None:
    """The model itself drafts all of its tokens."""
    options = ("--device", "cpu", "--max-new-tokens", "10", "--no-graphs")
    plain = graphrt("generate", SKY, *options)[1]
    model = ("--speculate", str(default_model_path()), "--drafts", "2", "--stats")
    code, drafted, log = graphrt("generate", SKY, *options, *model)
    assert (code, drafted) == (0, plain)
    assert "3.00 tokens per request and step, in 3 steps" in log


def test_generate_samples_by_seed(graphrt) -> None:
    options = ("--device", "cpu", "--no-graphs", "--max-new-tokens", "8", "--temperature", "1.5")
    first, again, other = (graphrt("generate", SKY, *options, "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other
    _, best, _ = graphrt("generate", SKY, *options, "--top-k", "1", "--top-p", "0.9", "--min-p", "0.1")
    assert best == graphrt("generate", SKY, *options[:-1], "0")[1]
    assert best != first


def test_generate_takes_penalties_biases_and_log_probabilities(graphrt) -> None:
    options = ("--device", "cpu", "--no-graphs", "--max-new-tokens", "12")
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
    code, out, log = graphrt("generate", "Hi", *ONE_TOKEN, "--raw", "--prompt-logprobs", "1")
    assert (code, out) == (0, graphrt("generate", "Hi", *ONE_TOKEN, "--raw")[1])
    count = len(load_tokenizer(default_model_path()).encode_prompt("Hi", chat=False))
    assert len([line for line in log.split("\n") if line.startswith("[1] prompt token ")]) == count - 1


def test_generate_ends_answers_where_it_is_told(graphrt) -> None:
    options = ("--device", "cpu", "--no-graphs", "--max-new-tokens", "16")
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


def tokens_of(log: str) -> int:
    return int(log.split("tokens ")[1].split(" in ")[0])


def test_stop_and_end_tokens(graphrt) -> None:
    """A special token as a stop text is a stop token; min_tokens postpones end tokens, stop tokens and stop texts."""
    options = ("--device", "cpu", "--no-graphs", "--max-new-tokens", "16", "--stats")
    code, plain, log = graphrt("generate", "Hello", *options)
    assert code == 0
    assert tokens_of(log) < 13
    code, forced, log = graphrt("generate", "Hello", *options, "--min-tokens", "13")
    assert code == 0
    assert 13 <= tokens_of(log) <= 16
    assert forced.startswith(plain.rstrip("\n"))
    code, _, log = graphrt("generate", "Hello", *options, "--ignore-eos")
    assert (code, tokens_of(log)) == (0, 16)
    code, stopped, _ = graphrt("generate", "Hello", *options, "--ignore-eos", "--stop", "<|im_end|>")
    assert (code, stopped) == (0, plain)
    word = plain.split()[2]
    code, stopped, log = graphrt("generate", "Hello", *options, "--stop", word)
    assert (code, stopped.rstrip()) == (0, plain[: plain.index(word)].rstrip())
    early = str(tokens_of(log))  # the stop text ends in this token
    code, stopped, _ = graphrt("generate", "Hello", *options, "--stop", word, "--min-tokens", early)
    assert code == 0
    assert stopped.startswith(plain[: plain.index(word) + len(word)])


@pytest.mark.parametrize(
    ("lengths", "max_new_tokens", "text"),
    [
        ((3, 9), 1, "prompt 2: it has 9 tokens, but the model has 8 positions; shorten it"),
        ((3, 8), 2, "prompt 2: 8 tokens and --max-new-tokens 2 are more than the model's 8 positions; lower "
                    "--max-new-tokens to 1, or shorten the prompt"),
        ((3,), 99, "prompt: 3 tokens and --max-new-tokens 99 are more than the model's 8 positions; lower "
                   "--max-new-tokens to 6, or shorten the prompt"),
        ((3, 8), 1, None),
        ((3,), 6, None),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model(lengths: tuple[int, ...], max_new_tokens: int, text: str | None) -> None:
    prompts = [[1] * length for length in lengths]
    if text is None:
        check_length(prompts, max_new_tokens, 8)
        return
    with pytest.raises(CapacityError, match=f"^{re.escape(text)}$"):
        check_length(prompts, max_new_tokens, 8)


def test_prompts_of_a_file_and_of_standard_input(graphrt, tmp_path, monkeypatch) -> None:
    """Those of a file follow those of the command line."""
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfHi\r\n\n   \n" + "Größe\x0bA\n".encode())
    code, out, _ = graphrt("generate", SKY, "--prompts", str(path), *ONE_TOKEN)
    assert code == 0
    answers = [f"[1] {SKY}", "[2] Hi", "[3] Größe\x0bA"]
    assert sorted(line for line in out.split("\n") if line.startswith("[")) == answers
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{SKY}\nHi".encode())))
    code, out, _ = graphrt("generate", "--prompts", "-", *ONE_TOKEN)
    assert code == 0
    assert sorted(line for line in out.split("\n") if line.startswith("[")) == answers[:2]


BAD_PROMPTS = {
    "none": ((), None, "ConfigError: prompts: expected at least one prompt"),
    "empty": (("",), None, "ConfigError: prompt: expected some text, got ''"),
    "missing": (("--prompts", "/nowhere/file"), None, "'/nowhere/file' cannot be read ([Errno 2] No such file"),
    "folder": (("--prompts", "/"), None, "Is a directory: '/'); specify a file in it"),
    "blank": (("--prompts", "-"), b"\n \n", "ConfigError: prompts: expected at least one prompt"),
    "latin-1": (("--prompts", "-"), "Größe".encode("latin-1"), "--prompts: '-' is not UTF-8"),
    "no input": (("--prompts", "-"), None, "ConfigError: --prompts: '-' cannot be read"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_bad_prompts(refused, monkeypatch, case) -> None:
    arguments, given, text = BAD_PROMPTS[case]
    monkeypatch.setattr(sys, "stdin", None if given is None else io.TextIOWrapper(io.BytesIO(given)))
    assert text in refused("generate", *arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--model", "/nowhere/model.gguf"), "ConfigError: model: expected a folder, a .gguf file"),
        (("--model", "x" * 5000), "ConfigError: model: expected a folder, a .gguf file, a hub id such as org/name"),
        (("--model", "dummy:smollm2-135m"), "leave --model out for SmolLM2-135M-Instruct"),
        (
            ("--speculate", "NGRAM"),
            "--speculate: expected ngram or a draft model, got 'NGRAM': model: expected",
        ),
        (("--speculate", "/"), "--speculate: the folder '/' has no config.json; specify ngram, or a folder with"),
        (("--drafts", "3"), "--drafts: requires --speculate, got --drafts 3 alone; add --speculate ngram"),
        (("--device", "tpu"), "ConfigError: device: expected cpu, cuda or cuda:N, got 'tpu'"),
        (("--device", "cuda:99"), "ConfigError: device: expected one of"),
        (("--dtype", "int3"), "ConfigError: --dtype: expected auto, float32"),
        (("--temperature", "-1"), "ConfigError: temperature: expected a finite number >= 0, got -1.0"),
        (("--min-tokens", "129"), "min_tokens: expected an int from 0 to 128, got 129; lower it, or raise"),
        (("--max-new-tokens", str(10**18)), "ConfigError: max_new_tokens: expected an int from 1 to 1073741824"),
        (("--device", "cpu", "--backend", ""), "ConfigError: backend: expected one of triton"),
        ((*ONE_TOKEN, "--stop", ""), "ConfigError: stop: expected non-empty strings, got ''"),
        ((*ONE_TOKEN, "--logit-bias", "x"), "ConfigError: --logit-bias: expected ID=X"),
        ((*ONE_TOKEN, "--logit-bias", "5=1", "--logit-bias", "5=2"), "token 5 is given twice, again in '5=2'"),
        ((*ONE_TOKEN, "--logit-bias", f"{10**8}=1"), "--logit-bias: expected token ids below vocab_size="),
        ((*ONE_TOKEN, "--logprobs", "1025"), "--logprobs: expected at most 1024, got 1025"),
        ((*ONE_TOKEN, "--context-parallel-size", "2"), "context_parallel_size: expected a divisor of the 1 ranks"),
        ((*ONE_TOKEN, "--prompt-logprobs", "1025"), "--prompt-logprobs: expected at most 1024, got 1025"),
    ],
    ids=lambda x: x[-1][:20] if isinstance(x, tuple) else None,
)
def test_errors_have_text_and_no_traceback(refused, arguments: tuple[str, ...], text: str) -> None:
    assert text in refused("generate", SKY, *arguments)
