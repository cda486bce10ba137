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
