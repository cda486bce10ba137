"""Stop strings: a text that comes in pieces ends before the first of some strings."""

from __future__ import annotations

from collections.abc import Sequence

from graphrt.kernels.checks import check_instance, check_sequence, shown
from graphrt.kernels.errors import ConfigError


class StopStrings:
    """Cuts a text where one of some strings begins in it: the one that is complete first, however the text is cut.

        stop = StopStrings(["\\n\\n", "User:"])
        stop.push("Fine. Us")     # "Fine. ": the rest may be the beginning of "User:"
        stop.push("er: and")      # "", and stop.stopped is True

    Device and session know tokens, not texts: whoever shows the text ends it, and releases the row.

    stops     strings, none of them empty
    stopped   whether one was found: nothing comes any more

    Raises: ConfigError for an empty string, and for what is none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        check_sequence("stop", stops, of="strings", error=ConfigError)
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ConfigError(f"stop: expected strings of a character or more, got {shown(stop)}; leave it out")
        self.stopped = False
        self._stops, self._held = tuple(stops), ""
        self._early = 0  # characters of the held text in which no stop string ends

    def push(self, piece: str, *, early: bool = False) -> str:
        """Return the text that may be shown with one more piece: no part of a stop string, nor what may become one.

        early   no stop string ends in this piece, as before `min_tokens`; one may begin in it

        Raises: ConfigError: if `piece` is not a string.
        """
        check_instance("piece", piece, str, advice="pass text")
        if self.stopped:
            return ""
        text = self._held + piece
        if early:
            self._early = len(text)
        found = [
            (at + len(stop), at)
            for stop in self._stops
            if (at := text.find(stop, max(0, self._early - len(stop) + 1))) >= 0
        ]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        held = next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0)
        shown_now = text[: len(text) - held]
        self._held = text[len(text) - held :]
        self._early = max(0, self._early - len(shown_now))
        return shown_now

    def finish(self) -> str:
        """What was held back, where the text has ended otherwise."""
        held, self._held = self._held, ""
        return held
