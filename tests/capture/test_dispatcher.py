"""Capture sizes, graph keys and dispatch: padding to the next size, reasons for eager steps, capacity errors."""

from __future__ import annotations

import itertools

import pytest

from graphrt.capture.descriptor import BatchDescriptor, GraphKind, default_decode_sizes, default_mixed_sizes
from graphrt.capture.dispatcher import NOT_CAPTURED, Dispatcher
from graphrt.kernels.errors import CapacityError, ConfigError

EIGHTS = tuple(range(8, 257, 8))


def make(**changes) -> Dispatcher:
    settings = {
        "max_num_reqs": 10, "max_num_tokens": 40, "query_lens": (1,), "decode_sizes": (1, 2, 4, 10),
        "mixed_sizes": (16, 40), "graph_unsupported_reason": lambda descriptor: None, "use_graphs": True,
    }  # fmt: skip
    return Dispatcher(**(settings | changes))


# -- default capture sizes


@pytest.mark.parametrize(
    ("maximum", "expected"),
    [
        (1, (1,)), (3, (1, 2, 3)), (4, (1, 2, 4)), (9, (1, 2, 4, 8, 9)), (16, (1, 2, 4, 8, 16)),
        (255, (1, 2, 4, *EIGHTS[:-1], 255)), (256, (1, 2, 4, *EIGHTS)), (257, (1, 2, 4, *EIGHTS, 257)),
        (272, (1, 2, 4, *EIGHTS, 272)), (300, (1, 2, 4, *EIGHTS, 272, 288, 300)),
    ],
)  # fmt: skip
def test_default_decode_sizes(maximum: int, expected: tuple[int, ...]) -> None:
    assert default_decode_sizes(maximum) == expected


def test_default_mixed_sizes_and_a_maximum_below_one() -> None:
    for maximum, expected in (
        (1, (1,)),
        (64, (64,)),
        (65, (64, 65)),
        (129, (64, 128, 129)),
        (300, (64, 128, 256, 300)),
    ):
        assert default_mixed_sizes(maximum) == expected
    for sizes, maximum in itertools.product((default_decode_sizes, default_mixed_sizes), (0, -1)):
        with pytest.raises(ConfigError, match=f"expected at least 1, got {maximum}"):
            sizes(maximum)


# -- keys


def test_keys_differ_by_each_of_their_fields() -> None:
    keys = [
        BatchDescriptor.decode(4), BatchDescriptor.mixed(4, 4), BatchDescriptor.decode(2, 2),
        BatchDescriptor.mixed(4, 2), BatchDescriptor.decode(1, 4), BatchDescriptor.mixed(5, 4),
    ]  # fmt: skip
    assert len(set(keys)) == len({hash(key) for key in keys}) == len(keys)
    for key in keys:
        same = BatchDescriptor(key.kind, key.padded_reqs, key.padded_tokens, key.query_len)
        assert (same, hash(same)) == (key, hash(key))
    assert [(k.padded_reqs, k.padded_tokens, k.query_len) for k in keys] == [
        (4, 4, 1), (4, 4, 0), (2, 4, 2), (2, 4, 0), (1, 4, 4), (4, 5, 0)
    ]  # fmt: skip
    assert [str(k) for k in keys[:3]] == ["decode[4]", "mixed[4 tokens, 4]", "decode[2 x 2]"]
    assert BatchDescriptor(GraphKind.DECODE, 3, 3) == BatchDescriptor.decode(3)
    assert "hash" not in repr(keys[0])


@pytest.mark.parametrize(
    ("kind", "reqs", "tokens", "query_len", "text"),
    [
        (GraphKind.DECODE, 0, 0, 1, "padded_reqs: expected an int >= 1, got 0"),
        (GraphKind.MIXED, 1, 0, 0, "padded_tokens: expected an int >= 1, got 0"),
        (GraphKind.DECODE, 2, 3, 1, r"padded_tokens: expected padded_reqs \* query_len = 2 in a decode graph, got 3"),
    ],
    ids=str,
)
def test_inconsistent_keys_raise(kind: GraphKind, reqs: int, tokens: int, query_len: int, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"BatchDescriptor\.{text}"):
        BatchDescriptor(kind, reqs, tokens, query_len)


# -- dispatch


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_batch_is_padded_to_the_smallest_size_that_fits(query_len: int) -> None:
    dispatcher = make(query_lens=(1, query_len))
    for reqs in range(1, 11):
        target = dispatcher.dispatch(reqs, reqs * query_len, query_len)
        want = min(size for size in (1, 2, 4, 10) if size >= reqs)
        assert (target.descriptor, target.why_eager) == (BatchDescriptor.decode(want, query_len), "")
    for tokens in range(2, 41):
        target = dispatcher.dispatch(2, tokens, 0)
        assert (target.descriptor, target.why_eager) == (BatchDescriptor.mixed(16 if tokens <= 16 else 40, 10), "")
    assert dispatcher.dispatch(10, 40, 0).descriptor == BatchDescriptor.mixed(40, 10)


@pytest.mark.parametrize("query_len", [1, 0])
@pytest.mark.parametrize(("reqs", "tokens"), [(11, 11), (11, 40), (1, 41), (10, 41), (11, 41)])
def test_a_batch_over_capacity_raises(reqs: int, tokens: int, query_len: int) -> None:
    text = f"at most 10 requests and 40 tokens, got {reqs} requests and {tokens} tokens"
    with pytest.raises(CapacityError, match=text):
        make().dispatch(reqs, tokens, query_len)


@pytest.mark.parametrize(
    ("changes", "batch", "descriptor", "why"),
    [
        ({"decode_sizes": (4,)}, (5, 5, 1), BatchDescriptor.decode(5),
         "no decode graph for 5 requests; the largest captured size is 4"),
        ({"mixed_sizes": ()}, (2, 20, 0), BatchDescriptor.mixed(20, 10),
         "no mixed graph for 20 tokens; the largest captured size is 0"),
        ({"mixed_sizes": (5, 40)}, (2, 5, 0), BatchDescriptor.mixed(5, 5), ""),
        ({"max_num_reqs": 64}, (3, 12, 0), BatchDescriptor.mixed(16, 16), ""),
        ({"use_graphs": False}, (2, 2, 1), BatchDescriptor.decode(2),
         "graphs are switched off (use_graphs=False)"),
    ],
)  # fmt: skip
def test_a_size_without_a_graph_is_not_padded_and_has_a_reason(changes, batch, descriptor, why: str) -> None:
    target = make(**changes).dispatch(*batch)
    assert (target.descriptor, target.why_eager) == (descriptor, why)


def test_a_backend_may_support_some_sizes_only() -> None:
    reason = lambda d: "too small" if d.padded_tokens < 4 else None  # noqa: E731
    dispatcher = make(graph_unsupported_reason=reason)
    assert [str(d) for d in dispatcher.captured()] == [
        "mixed[40 tokens, 10]", "mixed[16 tokens, 10]", "decode[10]", "decode[4]",
    ], "mixed sizes first, and the largest first"  # fmt: skip
    assert dispatcher.dispatch(2, 2, 1).why_eager == "too small"
    assert dispatcher.dispatch(3, 3, 1).why_eager == ""
    off = make(use_graphs=False, graph_unsupported_reason=reason)
    assert off.captured() == ()
    assert off.dispatch(10, 10, 1).why_eager == "graphs are switched off (use_graphs=False)"


# -- dispatch to a given size


def test_a_given_size_must_fit_the_batch_and_be_one_that_batches_are_padded_to() -> None:
    dispatcher, mixed, decode = make(), BatchDescriptor.mixed(16, 10), BatchDescriptor.decode(2)
    assert dispatcher.at(mixed, 10, 16, query_len=0).descriptor == mixed
    assert dispatcher.at(decode, 2, 2, query_len=1).descriptor == decode
    for descriptor, reqs, tokens, uniform in ((mixed, 11, 16, False), (mixed, 10, 17, False), (decode, 2, 2, False)):
        with pytest.raises(CapacityError, match=f"does not fit {reqs} requests and {tokens} tokens"):
            dispatcher.at(descriptor, reqs, tokens, uniform)
    unknown = (BatchDescriptor.decode(3), BatchDescriptor.decode(11), BatchDescriptor.decode(2, 2))
    for descriptor in (*unknown, *(BatchDescriptor.mixed(*sizes) for sizes in ((16, 9), (41, 10), (15, 10)))):
        with pytest.raises(ConfigError, match="is not a size that this runtime pads to"):
            dispatcher.at(descriptor, 1, 1, query_len=1)


# -- captures at first use


def test_a_lazy_dispatcher_captures_the_largest_size_of_each_kind_that_can_be_captured() -> None:
    refuses = lambda size: "too large" if size.padded_reqs == 10 and size.kind is GraphKind.DECODE else None  # noqa: E731
    lazy = make(lazy=True, graph_unsupported_reason=refuses)
    assert [str(size) for size in lazy.captured()] == ["mixed[40 tokens, 10]", "decode[4]"]
    reasons = [lazy.dispatch(n, n, 1).why_eager for n in range(1, 11)]
    assert reasons == [NOT_CAPTURED] * 2 + [""] * 2 + ["too large"] * 6
    three, four = lazy.dispatch(2, 12, 0), lazy.dispatch(2, 16, 0)
    assert three is four is lazy.at(four.descriptor, 1, 1, True), "batches of a size share its object"
    four.why_eager = ""
    assert str(lazy.captured()[1]) == "mixed[16 tokens, 10]"
    assert not make(lazy=True, use_graphs=False).captured()
