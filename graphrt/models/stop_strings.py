"""Stop strings, which end a streamed text before the first occurrence of any of them."""

from __future__ import annotations

from collections.abc import Sequence

from graphrt.kernels.checks import check_instance, check_sequence, shown
from graphrt.kernels.errors import ConfigError


class StopStrings:
    """Truncate a streamed text at the first complete stop string. The result does not depend on how the text is split.

        stop = StopStrings(["\\n\\n", "User:"])
        stop.push("Fine. Us")     # "Fine. ", because "Us" may start "User:"
        stop.push("er: and")      # "", and stop.stopped is True

    A session has tokens, not text, so the caller must release the request when `stopped` becomes True.

    Args:
        stops: non-empty strings.

    Attributes:
        stopped: whether a stop string was found. From then on, `push` returns "".

    Raises:
        ConfigError: if `stops` is not a sequence of non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        check_sequence("stop", stops, of="strings", error=ConfigError)
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ConfigError(f"stop: expected non-empty strings, got {shown(stop)}; remove this string")
        self.stopped = False
        self._stops, self._held = tuple(stops), ""
        self._early = 0  # leading characters of the buffered text in which no stop string ends

    def push(self, piece: str, *, early: bool = False) -> str:
        """Add a piece, and return the text that can be shown. The text contains no part of a possible stop string.

        early   ignore stop strings that end in this piece, as before `min_tokens`. A stop string may still start in it

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
        """Return the text that `push` has not returned yet. Call it if the text ends without a stop string."""
        held, self._held = self._held, ""
        return held
