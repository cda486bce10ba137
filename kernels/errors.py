"""The exceptions of graphrt, re-exported by `graphrt`."""

from __future__ import annotations


class GraphRTError(RuntimeError):
    """Base class of all errors that graphrt raises."""


class ConfigError(GraphRTError):
    """An invalid configuration: a wrong value, an unknown name, a missing or corrupt file."""


class ShapeError(GraphRTError, ValueError):
    """A tensor or list with the wrong shape, dtype or device, or a malformed batch."""


class UnsupportedError(GraphRTError):
    """A combination that no backend or kernel implements. The message lists all reasons."""


class CapacityError(GraphRTError):
    """More requests, tokens or pages than the configured capacity. No state has changed."""


class CaptureError(GraphRTError):
    """A failed capture, or a call in the wrong state of the capture lifecycle."""


class ReplayError(GraphRTError):
    """A step with an invalid input or result: a device fault, a moved weight, an overwritten result."""


class RankError(GraphRTError):
    """Another rank of the process group exited, failed or stopped responding. The runtime can only be closed.

    rank   the rank that failed first; -1 if it is not known, because it has never joined the group
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank

    def __reduce__(self) -> tuple[type[RankError], tuple[int, str]]:
        return type(self), (self.rank, str(self))
