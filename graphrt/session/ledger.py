"""What a session has taken from its runtime, recorded in one place so that it can be returned at any time."""

from __future__ import annotations

import warnings

from graphrt.cache.page_allocator import PageLease
from graphrt.kernels.errors import CapacityError
from graphrt.runtime import Runtime


class Ledger:
    """The pages and request indices of a session: a lease per pool, none with external pages.

    Taking an object and recording it is one step that no exception in a signal handler can split. So `close` returns
    everything, no matter how far the session's last call got, and can be repeated if it is interrupted itself.
    """

    def __init__(self, runtime: Runtime, *, external_pages: bool) -> None:
        self.pages = () if external_pages else tuple(map(PageLease, runtime.allocators))
        self._free_indices = runtime.free_req_indices
        self._left = runtime.manager.request_tables.left
        self._indices: list[int] = []

    def check_index(self) -> None:
        if not self._free_indices:
            raise CapacityError("requests: no request index is free; release() a request, or raise max_num_reqs")

    def take_index(self) -> int:
        """Take a free request index."""
        self._indices.extend(map(self._free_indices.pop, (-1,)))  # one C call moves it
        return self._indices[-1]

    def return_index(self, req_index: int) -> None:
        """Return a request index. Its state on the device is cleared before a step outside of sessions uses it."""
        self._left.add(req_index)
        self._free_indices.extend(map(self._indices.pop, (self._indices.index(req_index),)))

    def close(self) -> None:
        """Return everything. Closing twice is fine."""
        for lease in self.pages:
            lease.close()
        self._left.update(self._indices)
        self._free_indices.extend(map(self._indices.pop, [-1] * len(self._indices)))

    def drop(self) -> None:
        """Return everything of a session that was garbage-collected. Later steps run after its launches."""
        held = sum(lease.num_held for lease in self.pages)
        if held or self._indices:
            warnings.warn(
                f"DecodeSession: dropped with {len(self._indices)} requests and {held} pages; close() it, or use it in "
                "a `with` block",
                ResourceWarning,
                stacklevel=2,
            )
        self.close()
