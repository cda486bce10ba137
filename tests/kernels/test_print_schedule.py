"""The printed schedule: the numbers that docs/attention.md computes by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from graphrt.kernels.errors import ConfigError
from scripts import print_schedule
from scripts.print_schedule import parse_seq_lens

PAGE = Path(print_schedule.__file__).resolve().parent.parent / "docs" / "attention.md"


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["print_schedule.py", *arguments])
        assert print_schedule.main() == 0
        return capsys.readouterr().out

    return run


LONG_AMONG_SHORT = ("--seq-lens", "1x32768+63x512")
DRAWN = ("--seq-lens", "96+32+160", "--num-q-heads", "16", "--num-kv-heads", "4", "--num-sms", "2", "--triton")


def test_chunks_and_two_head_sizes(printed: Callable[..., str]) -> None:
    arguments = ("--seq-lens", "100+40", "--head-dim", "192", "--v-head-dim", "128", "--chunk", "64", "--num-sms", "2")
    lines = printed(*arguments).splitlines()
    assert "heads        32 query, 8 KV, of 192, V of 128" in lines
    assert "2         0     request 0 tiles 5 to 7 (split 1 of 2)" in lines  # position 99 sees 64 to 99: tiles 4 to 7
    assert "5         0     request 1 tiles 1 to 3 (split 1 of 2)" in lines


@pytest.mark.parametrize("arguments", [LONG_AMONG_SHORT, DRAWN], ids=["long_request", "drawn"])
def test_docs_show_the_output(arguments: tuple[str, ...], printed: Callable[..., str]) -> None:
    text = PAGE.read_text()
    assert f"python scripts/print_schedule.py {' '.join(arguments)}" in text
    assert printed(*arguments).strip() in text


def test_other_kinds_of_partitions(printed: Callable[..., str]) -> None:
    one = printed("--seq-lens", "9000")
    assert "partitions   1 per KV head, one for each cluster of 8 blocks" in one
    assert "cost         of a query tile: KV tiles + 7, at least 1" in one
    fixed = printed("--seq-lens", "3x20000+0+1", "--batch-invariant", "--all")
    assert "partitions   16 per KV head, one for each block" in fixed
    assert "KV splits    fixed: at most 16 per query tile, of at least 4 tiles" in fixed
    assert "request 2 tiles 293 to 313 (split 15 of 16); request 4 tiles 0 to 1 (not split)" in fixed
    assert "more" not in fixed
    fp8 = printed("--seq-lens", "2x100", "--kv-dtype", "float8_e4m3fn", "--window", "40")
    assert "KV tiles     of 32 tokens" in fp8
    assert "0        0      3      6      3 to 6             3 to 5       3" in fp8  # tiles 1 to 3; overhead 3
    assert "3         0     request 0 tiles 1 to 2 (split 0 of 3)" in fp8


def test_parse_seq_lens() -> None:
    assert parse_seq_lens("2x5+7 + 1x0") == [5, 5, 7, 0]
    for text in ("", "5x", "x5", "-1", "3x4x5", "1.5", "1++2"):
        with pytest.raises(ConfigError, match="seq_lens: expected counts and lengths such as 1x32768"):
            parse_seq_lens(text)


def test_wrong_arguments_exit_with_the_error(printed: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (("--seq-lens", "0x5"), "at least 1 request"),
        (("--seq-lens", "5", "--num-q-heads", "7"), "num_q_heads: expected a multiple of num_kv_heads=8"),
        (("--seq-lens", "5", "--query-len", "17"), "query_len: expected an int from 1 to 16, got 17"),
        (("--seq-lens", "5", "--window", "-1"), "sliding_window: expected an int from 0"),
        (("--seq-lens", "5", "--num-sms", "0"), "num_sms: expected an int >= 1, got 0"),
    ):
        with pytest.raises(SystemExit) as exit_code:
            printed(*arguments)
        assert exit_code.value.code == 2
        assert text in capsys.readouterr().err
