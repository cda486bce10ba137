"""Ladders, keys and dispatch: padding upwards, counted reasons, capacity errors."""

from __future__ import annotations

import pytest

from graphrt.capture.descriptor import BatchDescriptor, GraphKind, default_decode_sizes, default_mixed_sizes
from graphrt.capture.dispatcher import Dispatcher
from graphrt.kernels.errors import CapacityError, ConfigError


def make(**changes) -> Dispatcher:
    settings = {
        "max_num_reqs": 16,
        "max_num_tokens": 64,
        "query_len": 1,
        "decode_sizes": (1, 2, 4, 8),
        "mixed_sizes": (32, 64),
        "graph_unsupported_reason": lambda descriptor: None,
        "use_graphs": True,
    }
    return Dispatcher(**(settings | changes))


@pytest.mark.parametrize(
    ("maximum", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (4, (1, 2, 4)),
        (10, (1, 2, 4, 8, 10)),
        (256, (1, 2, 4, *range(8, 257, 8))),
        (300, (1, 2, 4, *range(8, 257, 8), 272, 288, 300)),
    ],
)
def test_decode_ladder(maximum: int, expected: tuple[int, ...]) -> None:
    assert default_decode_sizes(maximum) == expected


def test_the_default_ladder_has_35_sizes() -> None:
    assert len(default_decode_sizes(256)) == 35


@pytest.mark.parametrize(
    ("maximum", "expected"), [(1, (1,)), (64, (64,)), (100, (64, 100)), (2048, (64, 128, 256, 512, 1024, 2048))]
)
def test_mixed_ladder(maximum: int, expected: tuple[int, ...]) -> None:
    assert default_mixed_sizes(maximum) == expected


@pytest.mark.parametrize(("num_reqs", "padded"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8)])
def test_decode_pads_up(num_reqs: int, padded: int) -> None:
    target = make().dispatch(num_reqs, num_reqs, uniform=True)
    assert target.descriptor == BatchDescriptor.decode(padded)
    assert target.why_eager == ""


def test_mixed_pads_tokens_and_bounds_rows() -> None:
    target = make().dispatch(3, 33, uniform=False)
    assert target.descriptor == BatchDescriptor.mixed(64, 16)
    assert make(max_num_reqs=64).dispatch(3, 20, uniform=False).descriptor == BatchDescriptor.mixed(32, 32)


def test_query_len_multiplies_tokens() -> None:
    descriptor = make(query_len=3, decode_sizes=(4,)).dispatch(3, 9, uniform=True).descriptor
    assert (descriptor.padded_reqs, descriptor.padded_tokens, descriptor.query_len) == (4, 12, 3)


@pytest.mark.parametrize(
    ("changes", "num_reqs", "num_tokens", "uniform", "reason"),
    [
        ({}, 9, 9, True, "no decode graph for 9 rows: the largest captured is 8"),
        ({"mixed_sizes": ()}, 2, 20, False, "no mixed graph for 20 tokens: the largest captured is 0"),
        ({"use_graphs": False}, 2, 2, True, "graphs are switched off"),
        ({"graph_unsupported_reason": lambda d: "backend says no"}, 2, 2, True, "backend says no"),
    ],
    ids=["over-capture_sizes", "no-capture_sizes", "off", "backend"],
)
def test_steps_without_a_graph_say_why(changes, num_reqs, num_tokens, uniform, reason) -> None:
    assert reason in make(**changes).dispatch(num_reqs, num_tokens, uniform).why_eager


@pytest.mark.parametrize(("num_reqs", "num_tokens"), [(17, 17), (2, 65)])
def test_over_capacity_raises_with_the_numbers(num_reqs: int, num_tokens: int) -> None:
    with pytest.raises(CapacityError, match=f"at most 16 requests and 64 tokens, got {num_reqs} .* {num_tokens}"):
        make().dispatch(num_reqs, num_tokens, uniform=num_reqs == num_tokens)


def test_keys_are_mixed_first_and_largest_first() -> None:
    keys = make().captured()
    assert [k.kind for k in keys] == [GraphKind.MIXED] * 2 + [GraphKind.DECODE] * 4
    assert [k.padded_tokens for k in keys] == [64, 32, 8, 4, 2, 1]
    assert make(use_graphs=False).captured() == ()


def test_a_descriptor_is_consistent() -> None:
    with pytest.raises(ConfigError, match="padded_reqs x query_len = 4"):
        BatchDescriptor(GraphKind.DECODE, 2, 5, 2)
    with pytest.raises(ConfigError, match=r"BatchDescriptor\.padded_reqs: expected an int >= 1, got 0"):
        BatchDescriptor.decode(0)
    assert str(BatchDescriptor.decode(8)) == "decode[8]"
    assert str(BatchDescriptor.decode(8, 3)) == "decode[8 x 3]"
    assert str(BatchDescriptor.mixed(64, 16)) == "mixed[64 tokens, 16]"
