"""Typed access to the values of a config or metadata file. All problems in a file are reported together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from graphrt.kernels.checks import is_finite, shown
from graphrt.kernels.errors import ConfigError, UnsupportedError

T = TypeVar("T")

MAX_EXTENT = 1 << 24
"""Upper bound of all model sizes. It protects against damaged files that would cause huge allocations."""

MAX_NUMBER = 1e15
"""Upper bound of all other numbers, so that powers and products stay finite."""

_MAX_TEXT = 2000


class FieldReader:
    """Read typed values from a flat mapping, and collect problems instead of stopping at the first problem.

    Attributes:
        problems: missing or malformed values.
        reasons: options that graphrt does not implement.

    Raises:
        ConfigError: if `values` is not a mapping.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            got = type(values).__name__
            raise ConfigError(f"{where}: expected an object of names and values, got {got}; pass a dict")
        self.where = where
        self.problems: list[str] = []
        self.reasons: list[str] = []
        self._values = values
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Return whether `key` is present with a value other than null."""
        return self.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the unchecked value of `key`, or `default` if it is missing or null."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_EXTENT, per_layer: bool = False
    ) -> int:
        """Return an integer. With `per_layer`, a list of equal integers counts as one integer."""
        value = self.get(key, default)
        if per_layer and isinstance(value, list) and value and all(type(x) is int and x == value[0] for x in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            return self._problem(key, f"an integer from {least} to {most}", value, least)
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0, most: float = MAX_NUMBER) -> float:
        """Return a number greater than `above`."""
        value = self.get(key, default)
        if not _is_number(value, above, most):
            return self._problem(key, f"a number > {above:g} and <= {most:g}", value, min(above + 1.0, most))
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.get(key, default)
        return value if isinstance(value, bool) else self._problem(key, "true or false", value, False)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a non-empty string, or "" after a problem."""
        value = self.get(key, default)
        return value if isinstance(value, str) and value else self._problem(key, "a string", value, "")

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """Return a list of `length` numbers > 0."""
        return self._items(key, _is_number, f"{length} numbers > 0", length)

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers, empty if the key is missing."""
        return self._items(key, lambda x: type(x) is int, "a list of integers")

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings, empty if the key is missing."""
        return self._items(key, lambda x: isinstance(x, str), "a list of strings")

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return an object of names and values, empty if the key is missing."""
        value = self.get(key, {})
        return value if isinstance(value, Mapping) else self._problem(key, "an object", value, {})

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return token ids, written as one id or a list; empty if the key is missing."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(x) is int and 0 <= x < MAX_EXTENT for x in ids):
            return self._problem(key, f"token ids from 0 to {MAX_EXTENT - 1}", value, tuple[int, ...]())
        return tuple(ids)

    def expect(self, key: str, good: bool, expected: str) -> None:
        """Record a problem with `key` unless `good`."""
        if not good:
            self._problem(key, expected, self.get(key), None)

    def unsupported(self, reason: str) -> None:
        """Record an option that graphrt does not implement."""
        self.reasons.append(reason)

    def refuse(self, keys: Mapping[str, Collection[Any]]) -> None:
        """Record each of `keys` as unsupported unless its value is null, empty, or a listed neutral value."""
        for key, neutral in keys.items():
            value = self.get(key)
            if value is not None and value not in ([], {}, "", *neutral):
                self.unsupported(f"{key} {shown(value)}")

    def refuse_unread(self, prefix: str, irrelevant: Collection[str]) -> None:
        """Record each unread key that starts with `prefix` as unsupported, unless `irrelevant` contains the rest of the
        key."""
        for key in self._values:
            if key.startswith(prefix) and key not in self._read and key.removeprefix(prefix) not in irrelevant:
                self.unsupported(f"the key {printable(key)}, whose meaning is not known")

    def finish(self) -> None:
        """Raise UnsupportedError with all reasons, or else ConfigError with all problems, if there are any."""
        if self.reasons:
            raise UnsupportedError(f"{self.where}: graphrt does not implement " + "; ".join(self.reasons))
        if self.problems:
            raise ConfigError(f"{self.where}: " + "; ".join(self.problems))

    def _items(
        self, key: str, good: Callable[[Any], bool], expected: str, length: int | None = None
    ) -> tuple[Any, ...]:
        value = self.get(key, [])
        if isinstance(value, list | tuple) and length in (None, len(value)) and all(map(good, value)):
            return tuple(value)
        return self._problem(key, expected, value, ())

    def _problem(self, key: str, expected: str, value: Any, stand_in: T) -> T:
        self.problems.append(f"{key}: expected {expected}, got {'nothing' if value is None else shown(value)}")
        return stand_in


def printable(text: object) -> str:
    """Return text from a file or another package with control characters escaped and its length bounded.

    Such text may contain escape sequences, which a terminal would execute.
    """
    whole = str(text)
    cut = whole if len(whole) <= _MAX_TEXT else whole[:_MAX_TEXT] + " ..."
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in cut)


def check_path(name: str, path: str | Path) -> Path:
    """Return `path` as a Path with `~` expanded. The file may be missing.

    Raises:
        ConfigError: if `path` has the wrong type, is empty, or the system rejects it (too long, NUL, no permission).
    """
    if not isinstance(path, str | Path) or path == "":
        raise ConfigError(f"{name}: expected a path, got {shown(path)}; pass a string or a pathlib.Path")
    try:
        expanded = Path(path).expanduser()
        expanded.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{name}: {shown(str(path))} is not a usable path ({printable(error)}); pass an existing "
            f"path that you may read"
        ) from error
    return expanded


def _is_number(value: Any, above: float = 0.0, most: float = MAX_NUMBER) -> bool:
    return is_finite(value) and above < value <= most
