"""The whole catalogue: importing this file enters every bug."""

from __future__ import annotations

from tests.bugs import device, frozen, padding, stale  # noqa: F401  # entering is their effect
from tests.bugs.bug import CATALOGUE, Bug, Seen

__all__ = ["CATALOGUE", "Bug", "Seen"]
