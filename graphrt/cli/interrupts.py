"""Handling of Ctrl-C while a command imports its modules."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Make Ctrl-C exit immediately, with code 130, while modules are imported.

    A KeyboardInterrupt during an import may be lost or leave a partial module, because extensions' C code replaces it.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as in a background process
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
