"""A module-level context and number, as in a serving stack."""

from __future__ import annotations

from typing import Any

_current: Any = None
limit: int = 1


def set_current(value: Any) -> None:
    global _current
    _current = value


def current() -> Any:
    return _current
