"""Typed reading of a model's description, with all problems reported at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from graphrt.kernels.errors import ConfigError, UnsupportedError

T = TypeVar("T")

MAX_EXTENT = 1 << 24
"""Bound on every size of a model: no real one comes near, and a damaged file must not ask for endless memory."""


class FieldReader:
    """Reads typed values from a flat mapping and collects what is wrong instead of stopping at the first problem.

    `problems` are missing or malformed values, `reasons` are options that the models here do not implement.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.problems: list[str] = []
        self.reasons: list[str] = []
        self._values = values

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_EXTENT) -> int:
        """A whole number. A list of equal numbers (one per layer) counts as one number."""
        value = self._scalar(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            return self._problem(key, f"an integer from {least} to {most}", value, least)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number > 0."""
        value = self._scalar(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            return self._problem(key, "a finite number > 0", value, 1.0)
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._scalar(key, default)
        return value if isinstance(value, bool) else self._problem(key, "true or false", value, False)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._scalar(key, default)
        return value if isinstance(value, str) else self._problem(key, "a string", value, "")

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` finite numbers > 0."""
        value = self._values.get(key)
        good = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == length
        if not good or not all(isinstance(x, int | float) and math.isfinite(x) and x > 0 for x in value or ()):
            return self._problem(key, f"{length} finite numbers > 0", value, tuple[float, ...]())
        return tuple(float(x) for x in value or ())

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids: one, a list or none."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in ids):
            return self._problem(key, "token ids", value, tuple[int, ...]())
        return tuple(ids)

    def unsupported(self, reason: str) -> None:
        """Note an option that is not implemented."""
        self.reasons.append(reason)

    def finish(self) -> None:
        """Raise UnsupportedError with every reason, else ConfigError with every problem, else return."""
        if self.reasons:
            raise UnsupportedError(
                f"{self.where}: expected a model that graphrt implements, got " + "; ".join(self.reasons)
            )
        if self.problems:
            raise ConfigError(f"{self.where}: " + "; ".join(self.problems))

    def _scalar(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if isinstance(value, list) and value and all(x == value[0] for x in value):
            return value[0]
        return default if value is None else value

    def _problem(self, key: str, expected: str, value: Any, stand_in: T) -> T:
        self.problems.append(f"{key}: expected {expected}, got {'nothing' if value is None else repr(value)[:80]}")
        return stand_in
