"""What every call of a manager enters first: its state, one call at a time, and the manager's stream."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from threading import Lock, get_ident

import torch
from torch.cuda import nvtx

from graphrt.kernels.checks import check_instance, shown
from graphrt.kernels.errors import CaptureError, ConfigError, ReplayError
from graphrt.kernels.native.nvrtc import raw_stream

# The CPU build of torch lacks it, and needs it not.
_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
# What torch's functions of Python call, without these.
_nvtx = getattr(torch._C, "_nvtx", None)
_push_range: Callable[[str], int] = getattr(_nvtx, "rangePushA", nvtx.range_push)
_pop_range: Callable[[], int] = getattr(_nvtx, "rangePop", nvtx.range_pop)


class State(str, Enum):
    """Lifecycle of a replay manager."""

    NEW = "new"
    CAPTURED = "captured"
    CLOSED = "closed"


def wrong_state(state: State, needed: State, call: str) -> CaptureError:
    """The error of a call that needs a manager in another state."""
    needs = {State.NEW: "build a new one", State.CAPTURED: "call capture() first", State.CLOSED: "call close() first"}
    advice = "it was closed, build a new one" if state is State.CLOSED else needs[needed]
    return CaptureError(f"{call}: expected state '{needed.value}', got '{state.value}'; {advice}")


class Exclusive:
    """Lets one call at a time in. A flag that can be tested and set at once, not a lock: nobody waits for it.

    thread   that the last call came from
    leave    ends what `enter` began. Calls of each step use these two, as a `with` block takes twice as long
    """

    __slots__ = ("_flag", "leave", "thread")

    def __init__(self) -> None:
        self._flag = Lock()
        self.leave = self._flag.release
        self.thread = get_ident()

    def enter(self) -> None:
        """Raises: ReplayError during another call."""
        if not self._flag.acquire(False):
            raise ReplayError(
                "ReplayManager: expected one call at a time, got one during another; submit steps from one thread, and "
                "never from inside a model or sampler"
            )
        self.thread = get_ident()

    def __enter__(self) -> None:
        self.enter()

    def is_entered(self) -> bool:
        """Whether a call is under way."""
        return self._flag.locked()

    def __exit__(self, *error: object) -> None:
        self._flag.release()


class OnStream:
    """Runs a block on the manager's stream, inside an NVTX range; blocks may lie in each other.

    stream   None on a CPU

    Made once and entered at every step: where the stream is current already, which is the usual case, it costs a
    microsecond instead of ten. Launches call `enter` and `leave`, as a `with` block takes twice as long.
    """

    __slots__ = ("_handle", "_index", "_name", "_previous", "stream")

    def __init__(self, stream: torch.cuda.Stream | None, name: str) -> None:
        self.stream, self._name = stream, name
        # The raw handle: building a Stream object to compare with takes ten microseconds.
        self._index, self._handle = (0, 0) if stream is None else (stream.device.index, stream.cuda_stream)
        self._previous: list[torch.cuda.Stream | None] = []

    def enter(self) -> None:
        """Begin a block. `leave` ends it, after an error too."""
        if self.stream is None:
            return
        _push_range(self._name)
        if raw_stream(self._index) == self._handle and _device() == self._index:
            self._previous.append(None)
        else:
            self._previous.append(torch.cuda.current_stream())
            torch.cuda.set_stream(self.stream)

    def leave(self) -> None:
        """End what the last `enter` began."""
        if self.stream is None:
            return
        if (previous := self._previous.pop()) is not None:
            torch.cuda.set_stream(previous)
        _pop_range()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *error: object) -> None:
        self.leave()


def stream_on(device: torch.device, stream: object) -> torch.cuda.Stream | None:
    """The stream that steps run on: the given or the current one on CUDA, none on a CPU. Raises: ConfigError."""
    if device.type != "cuda":
        if stream is not None:
            raise ConfigError(f"stream: expected None with a cache on {device}, got {shown(stream)}; leave it out")
        return None
    if stream is None:
        return torch.cuda.current_stream(device)
    chosen = check_instance("stream", stream, torch.cuda.Stream, advice="leave it out for the current stream")
    if chosen.device != device:
        raise ConfigError(f"stream: expected one of {device}, as the cache, got one of {chosen.device}; make it there")
    return chosen
