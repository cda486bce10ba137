"""Record launches of a manager: their inputs, the state before them, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from graphrt.batch import Int32Array
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.config import RuntimeConfig
from graphrt.engine.handle import Rings
from graphrt.engine.launch_inputs import LaunchInputs
from graphrt.engine.program import StepProgram
from graphrt.kernels.errors import CapacityError
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.buffers import BufferKind
from graphrt.spec import KVCacheSpec

NOT_STATE = ("cursor", "last_writers", "write_conflicts", "step_counter", "loop_condition", "page_table")
"""Persistent buffers that are not recorded: state of the manager, and page tables, whose page ids are renumbered."""

_FAR = 1 << 30  # added to page ids outside of their pool, so that they stay out of range


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """One launch, with all state that it needs to run again without earlier launches.

    descriptor   the captured size that it ran at
    words        its input from the host, with the number of steps that ran
    state        request state before the launch by name, on the host, including request tensors. `page_table` contains
                 the renumbered page ids
    page_ids     by KV group, [pages] int64: the pages that its requests can read. The pages of a pool are renumbered
                 from 1; 0 is the null page
    pages        by KV group, [pages, bytes] uint8: their contents before the launch
    pool_pages   pages of each pool, including the null page
    tokens       [steps, num_reqs] int32: its tokens; -1 for a request that had finished
    logits       [num_reqs, vocab] of its last step
    """

    descriptor: BatchDescriptor
    words: LaunchInputs
    state: Mapping[str, torch.Tensor]
    page_ids: tuple[npt.NDArray[np.int64], ...]
    pages: tuple[torch.Tensor, ...]
    pool_pages: tuple[int, ...]
    tokens: npt.NDArray[np.int32]
    logits: torch.Tensor


@dataclass(slots=True)
class Recording:
    """A recording of the next `count` launches of a manager. Each launch waits for the device before and after it.

    recording = manager.record(100)
    ...                                     # keep serving
    recording.stop()                        # `launches` contains the launches that ran
    """

    config: RuntimeConfig
    program: StepProgram
    rings: Rings
    count: int
    max_bytes: int
    launches: list[RecordedLaunch] = field(default_factory=list)
    _begun: RecordedLaunch | None = None

    @property
    def done(self) -> bool:
        """Whether all launches have been recorded, or `stop` was called."""
        return len(self.launches) == self.count

    def stop(self) -> None:
        """Stop recording and keep the recorded launches. The manager may record again. May be called twice."""
        self.count = len(self.launches)

    def before(self, record: Int32Array, descriptor: BatchDescriptor) -> None:
        """Record the inputs of a launch and the state before it. Raises: CapacityError: if `max_bytes` is exceeded."""
        if self.done:
            return
        program = self.program
        groups = program.kv_cache.groups
        words = LaunchInputs(record, len(groups))
        persistent = dict(program.buffers.named(BufferKind.PERSISTENT))
        tables = persistent["page_table"] if program.page_tables is None else program.page_tables
        state = {name: _copied(t) for name, t in persistent.items() if name not in NOT_STATE}
        state |= {f"row tensor {name}": _copied(t) for name, t in program.request_tensors.items()}
        table = _copied(tables).numpy()
        seen = _pages_seen(words, state, table, groups, program)
        of_pool = [
            [ids for ids, spec in zip(seen, groups, strict=True) if spec.pool == pool]
            for pool in range(len(program.kv_cache.pool_pages))
        ]
        pools = [np.unique(np.concatenate(lists)) for lists in of_pool]
        packers = [program.kv_cache.packer(group) for group in range(len(groups))]
        sizes = [len(ids) * packer.page_bytes for ids, packer in zip(seen, packers, strict=True)]
        held = sum(t.nbytes for launch in self.launches for t in (*launch.pages, *launch.state.values()))
        needed = held + sum(sizes) + sum(t.nbytes for t in state.values())
        if needed > self.max_bytes:
            self.stop()  # later launches run without recording
            raise CapacityError(
                f"record: expected at most max_bytes={self.max_bytes} for {len(self.launches) + 1} launches, got "
                f"{needed}; record fewer launches or a smaller batch, or raise max_bytes"
            )
        pages = []
        for ids, packer, size in zip(seen, packers, sizes, strict=True):
            block = torch.empty(size, dtype=torch.uint8, device=packer.device)
            if len(ids):
                packer.pack(torch.from_numpy(ids).to(packer.device), block)
            pages.append(block.view(len(ids), packer.page_bytes).cpu())
        counts, nulls = program.kv_cache.pool_pages, [int(spec.null_page) for spec in groups]
        for at, _, _, listed in words.listed():
            pool = groups[at].pool
            listed[:] = _renamed(listed, pools[pool], counts[pool], nulls[at])
        for index, spec in enumerate(groups):
            table[index] = _renamed(table[index], pools[spec.pool], counts[spec.pool], nulls[index], stale=0)
        state["page_table"] = torch.from_numpy(table)
        names = tuple(1 + np.searchsorted(pools[spec.pool], ids) for ids, spec in zip(seen, groups, strict=True))
        nothing = np.empty((0, 0), np.int32)
        pool_pages = tuple(max(2, 1 + len(ids)) for ids in pools)
        self._begun = RecordedLaunch(
            descriptor, words, state, names, tuple(pages), pool_pages, nothing, torch.empty(0, device="cpu")
        )

    def after(self, step: int, logits: torch.Tensor) -> None:
        """Record the results of a launch. `step` is the number of its first step, `logits` are the logits of its last
        step."""
        if self.done:
            return
        begun, self._begun = self._begun, None
        assert begun is not None, "before() is called first"
        on_host = _copied(logits)  # waits for the device, so the rings are written
        at = self.rings.entries(step, begun.words.steps)
        ran = self.rings.steps[at] == np.arange(step, step + begun.words.steps)  # a loop may have ended early
        tokens = self.rings.rows(self.rings.tokens, at, begun.words.num_reqs)[ran.repeat(self.rings.positions)]
        words = begun.words.with_steps(int(ran.sum()))
        self.launches.append(replace(begun, words=words, tokens=tokens, logits=on_host))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty_like(tensor, device="cpu").copy_(tensor)


def _pages_seen(
    words: LaunchInputs,
    state: Mapping[str, torch.Tensor],
    table: npt.NDArray[np.int32],
    groups: Sequence[KVCacheSpec],
    program: StepProgram,
) -> list[npt.NDArray[np.int64]]:
    """Return the pages that a launch can read, by KV group, sorted; write the listed pages into `table`."""
    n, req_indices = words.num_reqs, words.order
    if req_indices is None:
        req_indices = state["order"].numpy()[:n]
    known = (req_indices >= 0) & (req_indices < len(state["req_seq_lens"]))
    listed: list[list[Int32Array]] = [[] for _ in groups]
    for index, row, place, pages in words.listed():
        listed[index].append(pages.copy())
        if known[row] and place >= 0:
            room = table[index, req_indices[row], place : place + len(pages)]
            room[:] = pages[: len(room)]
    of_rows = state["req_seq_lens"].numpy()[np.where(known, req_indices, 0)].astype(np.int64)
    if words.is_delta:
        starts, ends = of_rows, of_rows + words.steps * (1 + program.buffers.drafts.shape[1])
    else:
        new, ends = words.rows(layout.REQ_QUERY_LEN).astype(np.int64), words.rows(layout.REQ_SEQ_LEN).astype(np.int64)
        ends = np.where(ends == layout.SEQ_LEN_FROM_DEVICE, of_rows + new, ends)
        starts = ends - new
    ends += program.tokens_ahead
    seen = []
    for index, spec in enumerate(groups):
        last = ends if not spec.cross else words.rows(layout.REQ_ENCODER_LEN).astype(np.int64)
        found = [np.concatenate(listed[index])] if listed[index] else []
        for row in np.flatnonzero(known).tolist():
            first = 0 if spec.cross else spec.first_page_seen(max(0, int(starts[row])))
            found.append(table[index, req_indices[row], first : -(-max(0, int(last[row])) // spec.page_tokens)])
        ids = np.unique(np.concatenate(found)).astype(np.int64) if found else np.empty(0, np.int64)
        count = program.kv_cache.pool_pages[spec.pool]
        seen.append(ids[(ids >= 0) & (ids < count) & (ids != spec.null_page)])
    return seen


def _renamed(
    pages: npt.NDArray[np.int32], ids: npt.NDArray[np.int64], count: int, null_page: int, stale: int | None = None
) -> npt.NDArray[np.int32]:
    """Replace page ids with their index in `ids`, starting at 1; the null page becomes 0.

    Ids outside of the pool of `count` pages stay out of range. With `stale`, they and pages that are not in `ids` get
    this value. Without it, `ids` must contain all pages.
    """
    at = np.searchsorted(ids, pages).clip(max=max(0, len(ids) - 1))
    found = (ids[at] == pages) if len(ids) else np.zeros(pages.shape, np.bool_)
    if stale is not None:
        return np.where(found, at + 1, stale).astype(np.int32)
    outside = (pages < 0) | (pages >= count)
    assert bool((found | outside | (pages == null_page)).all()), "all listed pages are kept"
    return np.where(found, at + 1, np.where(outside, pages | _FAR, 0)).astype(np.int32)
