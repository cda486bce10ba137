"""Stop strings cut a streamed text where they would cut the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphrt.kernels.errors import ConfigError
from graphrt.models.stop_strings import StopStrings

TEXTS = st.text("ab", max_size=12)


@given(st.lists(TEXTS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_is_returned_as_early_as_possible(pieces: list[str], stops: list[str]) -> None:
    stop, shown = StopStrings(stops), ""
    for index, piece in enumerate(pieces):
        so_far = "".join(pieces[: index + 1])
        shown += stop.push(piece)
        if stop.stopped:
            ends = [(at + len(s), at) for s in stops if (at := so_far.find(s)) >= 0]
            assert shown == so_far[: min(ends)[1]], "and nothing after a stop string"
            continue
        assert not any(s in so_far for s in stops)
        held = so_far[len(shown) :]
        assert shown + held == so_far
        # The held text may become a stop string, and no longer suffix may.
        assert not held or any(s.startswith(held) for s in stops)
        longer = [so_far[at:] for at in range(len(shown))]
        assert not any(s.startswith(text) for s in stops for text in longer)
    if not stop.stopped:
        assert shown + stop.finish() == "".join(pieces)
    assert stop.finish() == ""


EARLY = {
    "within": (["ab"], [("xab", True), ("y", False)], ("xaby", False)),
    "across": (["abc"], [("xab", True), ("cd", False)], ("x", True)),
    "again": (["ab"], [("ab", True), ("a", True), ("b", False)], ("ab", True)),
    "held": (["abc"], [("a", False), ("b", True), ("z", False)], ("abz", False)),
    "at the end": (["ab"], [("a", True), ("b", True), ("", False)], ("ab", False)),
    "of several": (["ab", "b!"], [("ab", True), ("!?", False)], ("a", True)),
}


@pytest.mark.parametrize("case", EARLY)
def test_no_stop_string_ends_in_an_early_piece(case: str) -> None:
    stops, pieces, want = EARLY[case]
    stop = StopStrings(stops)
    shown = "".join(stop.push(piece, early=early) for piece, early in pieces) + stop.finish()
    assert (shown, stop.stopped) == want


@pytest.mark.parametrize("stops", [[""], [None], "ab", 3])
def test_other_values_than_non_empty_strings_are_refused(stops: object) -> None:
    with pytest.raises(ConfigError, match="stop: expected"):
        StopStrings(stops)  # type: ignore[arg-type]
