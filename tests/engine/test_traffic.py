"""Counts of batch sizes: advice about capture sizes, and trace files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.engine.traffic import FORCED, advise, read_trace, write_trace
from graphrt.kernels.errors import ConfigError
from tests.support.toy import make_rig

D = BatchDescriptor.decode
M = BatchDescriptor.mixed(512, 64)
CAPTURED = (M, D(64), D(8), D(2))
ADVICE = {
    # 80 steps of 41 and 20 of 47 in the graph of 64: 80 x 23 + 20 x 17 of 6,400 tokens are padding. A graph of 41
    # saves 80 x 23 of these 2,180, and one of 47 saves 100 x 17.
    "padding": (
        {(D(64), 41, ""): 80, (D(64), 47, ""): 20},
        "34% of the tokens of decode graphs were padding: 80 steps of size 41 ran with the graph of 64; capture 41, "
        "to save 84% of the padding",
    ),
    "a-range": (
        {(D(64), 38, ""): 40, (D(64), 40, ""): 60, (D(8), 8, ""): 9},
        "38% of the tokens of decode graphs were padding: 100 steps of sizes 38 to 40 ran with the graph of 64; "
        "capture 40, to save 97% of the padding",
    ),
    "speculation": (
        {(D(64, 4), 41 * 4, ""): 80, (D(64, 4), 47 * 4, ""): 20},
        "34% of the tokens of decode graphs were padding: 80 steps of size 41 ran with the graph of 64; capture 41, "
        "to save 84% of the padding",
    ),
    "mixed": (
        {(M, 100, ""): 100},
        "80% of the tokens of mixed graphs were padding: 100 steps of size 100 ran with the graph of 512; capture 100, "
        "to save 100% of the padding",
    ),
    "eager": (
        {(D(64), 64, ""): 88, (D(65), 65, "no decode graph for 65"): 7, (D(99), 99, "no decode graph for 99"): 5},
        "12% of decode steps ran without a graph: sizes 65 to 99 are above the largest captured size, 64; capture 99",
    ),
    "few-steps": ({(D(64), 33, ""): 99}, None),
    "little-padding": ({(D(64), 45, ""): 100}, None),
    "few-eager-steps": ({(D(64), 64, ""): 91, (D(65), 65, "no decode graph for 65"): 9}, None),
    "forced": ({(D(64), 33, FORCED): 100}, None),
    "no-graphs": ({(D(64), 33, "graphs are switched off (use_graphs=False)"): 100}, None),
    "eager-for-another-reason": (
        {(D(64), 33, "decode[64]: capture at first use failed: OutOfMemoryError"): 30, (D(8), 8, ""): 70},
        "30% of decode steps ran without a graph: decode[64]: capture at first use failed: OutOfMemoryError",
    ),
    "a-size-that-is-captured": ({(D(64), 8, ""): 100}, None),  # a caller chose the graph
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice(case: str) -> None:
    steps, text = ADVICE[case]
    assert advise(steps, CAPTURED) == (() if text is None else (text,))


def test_a_kind_without_graphs() -> None:
    steps = {(D(3), 3, "no decode graph for 3 requests; the largest captured size is 0"): 100}
    text = "100% of decode steps ran without a graph: size 3 is not captured; capture 3"
    assert advise(steps, (M,)) == advise(steps, ()) == (text,)


def test_each_kind_has_its_advice() -> None:
    steps = ADVICE["mixed"][0] | ADVICE["eager"][0]
    assert advise(steps, CAPTURED) == (ADVICE["eager"][1], ADVICE["mixed"][1])


def test_stats_of_a_runtime_give_advice_and_a_trace(device: torch.device, tmp_path: Path) -> None:
    rig = make_rig(device, decode_sizes=(4,), mixed_sizes=(8,))
    one = Batch(req_indices=[0], seq_lens=[1], tokens=[3], page_indptr=[0, 1], page_ids=[5])
    for _ in range(100):
        rig.manager.replay(one)
    rig.manager.replay(one, eager=True)
    rig.manager.replay(Batch.empty())
    three = Batch(req_indices=[0], seq_lens=[3], query_lens=[3], tokens=[1] * 3, page_indptr=[0, 1], page_ids=[5])
    rig.manager.replay(three).tokens()
    stats = rig.manager.stats()
    assert stats.advice == (
        "75% of the tokens of decode graphs were padding: 101 steps of size 1 ran with the graph of 4; capture 1, "
        "to save 100% of the padding",
    )
    stats.write_trace(tmp_path / "trace")
    assert (tmp_path / "trace").read_text().splitlines()[1:] == ["decode 1 102", "mixed 3 1"]
    assert read_trace(tmp_path / "trace", 1, 3) == {GraphKind.DECODE: {1: 102}, GraphKind.MIXED: {3: 1}}


def test_a_trace_is_what_was_written(tmp_path: Path) -> None:
    steps = {(D(64), 41, ""): 80, (D(64), 41, "why"): 5, (D(99, 3), 297, "why"): 2, (M, 100, ""): 7}
    write_trace(tmp_path / "trace", steps)
    assert read_trace(tmp_path / "trace", 99, 100) == {
        GraphKind.DECODE: Counter({41: 85, 99: 2}), GraphKind.MIXED: Counter({100: 7}),
    }  # fmt: skip


def test_lines_of_a_trace(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("# a server\ndecode 3\n\n  decode\t3 7  # twice\nmixed 20\n")
    assert read_trace(tmp_path / "trace", 3, 20) == {GraphKind.DECODE: {3: 8}, GraphKind.MIXED: {20: 1}}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("decode 1\ndecode x", r"trace: line 2: expected KIND SIZE \[STEPS\], got"),
        ("\n#\n12 40", "trace: line 3: expected KIND SIZE"),
        ("decode 0", "trace: line 1: expected KIND SIZE"),
        ("decode 1 0", "trace: line 1: expected KIND SIZE"),
        ("decode 1 2 3", "trace: line 1: expected KIND SIZE"),
        ("decode 8\ndecode 9", r"trace: line 2: expected at most 8 requests, got 9; raise max_num_reqs \(--rows\)"),
        ("mixed 17", r"trace: line 1: expected at most 16 tokens, got 17; raise max_num_tokens \(--step-tokens\)"),
        ("# nothing\n", "trace: '.*' has no steps; write a line per step, such as decode 12"),
        (None, "trace: '.*' cannot be read"),
        (b"\xff", "trace: '.*' cannot be read"),
    ],
)
def test_errors_of_a_trace(tmp_path: Path, text: str | bytes | None, error: str) -> None:
    path = tmp_path / "trace"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=error):
        read_trace(path, 8, 16)
