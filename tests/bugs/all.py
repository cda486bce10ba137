"""The whole catalogue. Importing this module adds every bug."""

from tests.bugs import captures, device, frozen, padding, stale  # noqa: F401
from tests.bugs.bug import CATALOGUE, Bug, Seen

__all__ = ["CATALOGUE", "Bug", "Seen"]
