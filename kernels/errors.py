"""The exceptions of graphrt. They live in the lowest layer and are re-exported by `graphrt`."""

from __future__ import annotations


class GraphRTError(RuntimeError):
    """Base of every error that graphrt raises on purpose."""


class ConfigError(GraphRTError):
    """A configuration that cannot work: wrong value, unknown name, missing or corrupt file."""


class ShapeError(GraphRTError, ValueError):
    """A tensor or list with the wrong shape, dtype or device, or a batch that is malformed."""


class UnsupportedError(GraphRTError):
    """A combination that a backend or kernel does not implement. The text lists every reason."""


class CapacityError(GraphRTError):
    """More requests, tokens or pages than were provided for. Nothing has been changed."""


class CaptureError(GraphRTError):
    """A capture that failed, or a call in the wrong state of the capture lifecycle."""


class ReplayError(GraphRTError):
    """A step whose input or result is invalid: a device fault, a moved weight, a result no longer there."""
