"""The lifecycle of a manager, the lock that admits one call at a time, and the stream that calls run on."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from itertools import repeat
from threading import Lock, get_ident

import torch
from torch.cuda import nvtx

from graphrt.kernels.checks import check_instance, shown
from graphrt.kernels.errors import CaptureError, ConfigError, ReplayError
from graphrt.kernels.native.nvrtc import raw_stream

# The CPU build of torch does not have this function, and does not need it.
_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
# The C functions that torch.cuda.nvtx calls. Calling them directly avoids the Python wrappers.
_nvtx = getattr(torch._C, "_nvtx", None)
_push_range: Callable[[str], int] = getattr(_nvtx, "rangePushA", nvtx.range_push)
_pop_range: Callable[[], int] = getattr(_nvtx, "rangePop", nvtx.range_pop)


class State(str, Enum):
    """Lifecycle of a replay manager."""

    NEW = "new"
    CAPTURED = "captured"
    CLOSED = "closed"


def wrong_state(state: State, needed: State, call: str) -> CaptureError:
    """Return the error for a call that needs a manager in a different state."""
    needs = {
        State.NEW: "build a new manager",
        State.CAPTURED: "call capture() first",
        State.CLOSED: "call close() first",
    }
    advice = "it was closed, build a new manager" if state is State.CLOSED else needs[needed]
    return CaptureError(f"{call}: expected state '{needed.value}', got '{state.value}'; {advice}")


class Exclusive:
    """Admit one call at a time. `with exclusive:` raises ReplayError during another call, and never waits.

    An exception in a signal handler, such as KeyboardInterrupt, can be raised after every call instruction and at the
    entry of every Python function. Such an exception must not leave the lock held. So `__exit__` is the C method of a
    lock, and `__enter__` runs no call instruction after it has the lock. `thread` is the thread of the last call.
    """

    __slots__ = ("__exit__", "_advice", "_attempts", "_owner", "is_entered", "thread")

    def __init__(self, owner: str, advice: str) -> None:
        lock = Lock()
        self._attempts = map(lock.acquire, repeat(False))  # without waiting
        self.__exit__, self.is_entered = lock.__exit__, lock.locked
        self._owner, self._advice = owner, advice
        self.thread = get_ident()

    def __enter__(self) -> None:
        thread = get_ident()
        for entered in self._attempts:  # acquires the lock without a call instruction
            if entered:
                self.thread = thread
                return
            raise ReplayError(
                f"{self._owner}: expected one call at a time, but another call is in progress; {self._advice}"
            )


class OnStream:
    """Run a block on the manager's stream, inside an NVTX range. Blocks may nest.

    The object is built once and entered at every step. Entering takes one microsecond instead of ten if the stream is
    already current, which is the usual case. Launches call `enter` and `leave`, because a `with` block takes twice as
    long.

    waits   the block waits for earlier work of the current stream, which may still fill buffers and weights
    """

    __slots__ = ("_handle", "_index", "_name", "_previous", "_waits", "stream")

    def __init__(self, stream: torch.cuda.Stream | None, name: str, *, waits: bool = False) -> None:
        self.stream, self._name, self._waits = stream, name, waits
        # Compare raw handles, because building a Stream object takes ten microseconds.
        self._index, self._handle = (0, 0) if stream is None else (stream.device.index, stream.cuda_stream)
        self._previous: list[torch.cuda.Stream | None] = []

    def enter(self) -> None:
        """Start a block. Call `leave` after it, even after an error."""
        if self.stream is None:
            return
        _push_range(self._name)
        if raw_stream(self._index) == self._handle and _device() == self._index:
            self._previous.append(None)
        else:
            self._previous.append(torch.cuda.current_stream())
            if self._waits:
                self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            torch.cuda.set_stream(self.stream)

    def leave(self) -> None:
        """Finish the block of the last `enter`."""
        if self.stream is None:
            return
        if (previous := self._previous.pop()) is not None:
            torch.cuda.set_stream(previous)
        _pop_range()

    __enter__ = enter

    def __exit__(self, *error: object) -> None:
        self.leave()


def stream_on(device: torch.device, stream: object) -> torch.cuda.Stream | None:
    """Return the stream that steps run on: the given or the current stream on CUDA, and None on a CPU."""
    if device.type != "cuda":
        if stream is not None:
            raise ConfigError(f"stream: expected None with a cache on {device}, got {shown(stream)}; omit it")
        return None
    if stream is None:
        return torch.cuda.current_stream(device)
    chosen = check_instance("stream", stream, torch.cuda.Stream, advice="omit it to use the current stream")
    if chosen.device != device:
        raise ConfigError(
            f"stream: expected a stream on {device}, the device of the cache, got one on "
            f"{chosen.device}; create it there"
        )
    return chosen
