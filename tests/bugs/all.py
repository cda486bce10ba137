"""The whole catalogue. Importing this module adds every bug."""

from __future__ import annotations

from tests.bugs import bug, captures, device, frozen, padding, stale
from tests.bugs.bug import Bug, Seen

__all__ = ["CATALOGUE", "Bug", "Seen"]

_MODULES = [module.__name__ for module in (stale, frozen, padding, captures, device)]
CATALOGUE = dict(sorted(bug.CATALOGUE.items(), key=lambda item: _MODULES.index(item[1].module)))
