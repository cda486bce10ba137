"""The one door for values that a file brings: each is read as the type that it must have, and all problems are
reported at once."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from graphrt.kernels.checks import is_finite
from graphrt.kernels.errors import ConfigError, UnsupportedError

T = TypeVar("T")

MAX_EXTENT = 1 << 24
"""Bound on every size of a model: no real one comes near, and a damaged file must not ask for endless memory."""

MAX_NUMBER = 1e15
"""Bound on every other number: powers and products of these stay finite."""


class FieldReader:
    """Reads typed values from a flat mapping and collects what is wrong instead of stopping at the first problem.

    `problems` are missing or malformed values, `reasons` are options that the models here do not implement.

    Raises: ConfigError for values that are no mapping.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: expected a mapping of names to values, got {type(values).__name__}")
        self.where = where
        self.problems: list[str] = []
        self.reasons: list[str] = []
        self._values = values

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self._values.get(key) is not None

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_EXTENT, per_layer: bool = False
    ) -> int:
        """A whole number. `per_layer`: a list of equal numbers counts as one number."""
        value = self._get(key, default)
        if per_layer and isinstance(value, list) and value and all(type(x) is int and x == value[0] for x in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            return self._problem(key, f"an integer from {least} to {most}", value, least)
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0, most: float = MAX_NUMBER) -> float:
        """A number > `above`."""
        value = self._get(key, default)
        if not _is_number(value, above, most):
            return self._problem(key, f"a number > {above:g} and <= {most:g}", value, min(above + 1.0, most))
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._get(key, default)
        return value if isinstance(value, bool) else self._problem(key, "true or false", value, False)

    def text(self, key: str, default: str | None = None) -> str:
        """A string that is not empty; "" stands for one that was refused."""
        value = self._get(key, default)
        return value if isinstance(value, str) and value else self._problem(key, "a string", value, "")

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` numbers > 0."""
        value = self._values.get(key)
        if not isinstance(value, list | tuple) or len(value) != length or not all(_is_number(x) for x in value):
            return self._problem(key, f"{length} numbers > 0", value, tuple[float, ...]())
        return tuple(float(x) for x in value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty where there is none."""
        value = self._get(key, [])
        if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
            return self._problem(key, "a list of strings", value, tuple[str, ...]())
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object of names and values; empty where there is none."""
        value = self._get(key, {})
        return value if isinstance(value, Mapping) else self._problem(key, "an object", value, {})

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids: one, a list or none."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(x) is int and 0 <= x < MAX_EXTENT for x in ids):
            return self._problem(key, f"token ids from 0 to {MAX_EXTENT - 1}", value, tuple[int, ...]())
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

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def _problem(self, key: str, expected: str, value: Any, stand_in: T) -> T:
        self.problems.append(f"{key}: expected {expected}, got {'nothing' if value is None else shown(value)}")
        return stand_in


def shown(value: object) -> str:
    """A value of any size and depth, as an error text can hold it."""
    try:
        return reprlib.repr(value)
    except Exception:  # a stranger's __repr__, or a number with more digits than Python prints
        return type(value).__name__


def check_path(name: str, path: str | Path) -> Path:
    """`path` as a Path. Raises: ConfigError for another type, an empty name, and the home of no user."""
    if not isinstance(path, str | Path) or path == "":
        raise ConfigError(f"{name}: expected a path, got {shown(path)}; pass a string or a pathlib.Path")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{name}: expected a path, got {shown(str(path))} ({error}); write it without ~") from error


def _is_number(value: Any, above: float = 0.0, most: float = MAX_NUMBER) -> bool:
    return is_finite(value) and above < value <= most
