"""The ranks of a process group on one host: messages from rank 0 to the others, and the detection of failed ranks.

Ranks share a block of memory. Every wait for another rank polls, and checks in between whether a rank has failed. A
rank has failed if its process has ended or is stopped, if it has reported an error, or if it has not arrived at a
collective or queued a launch in time. The host also polls while it waits for a GPU, because a kernel may wait for
another rank. A thread checks too: some calls of the driver, such as loading a kernel, wait for running kernels.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import mmap
import os
import pickle
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from graphrt import env
from graphrt.capture import device_wait
from graphrt.context_parallel import ContextParallel
from graphrt.engine.shared_ring import SharedRing
from graphrt.kernels.checks import check_instance, shown
from graphrt.kernels.errors import ConfigError, RankError, ReplayError, UnsupportedError
from graphrt.kernels.ops import collectives
from graphrt.kernels.ops.all_reduce import SymmetricBuffer, symmetric_buffers
from graphrt.spec import KVCacheSpec

CUDA_BACKENDS = "cpu:gloo,cuda:nccl"
"""Backends of a group of GPUs. Ranks exchange by gloo at start, and by NCCL in a step."""

HANG_SECONDS = 8.0
"""How long a rank may be late at a collective of a step or at a launch, and how long its process may be stopped."""

PATIENT_SECONDS = 600.0
"""How long a rank may be late while ranks join, load and capture, because some compile kernels or read slow disks."""

_CHECK_SECONDS = 0.05
_THREAD_CHECK_SECONDS = 0.5
_SPIN_SECONDS = {False: 0.0005, True: 0.02}  # by `on_cuda`; with a GPU, a rank has its own cores
_SLEEP_SECONDS = 0.0001
_EXIT_SECONDS = 2.0  # longest time from the end of a connection to the end of its process
_QUEUE_SECONDS = 1.0  # how long the abort of NCCL waits for a collective that is being queued
_ABORT_SECONDS = 2.0  # longest time from the abort of NCCL to the end of its kernels
_RING_BYTES = 1 << 22
_TEXT_BYTES = 1024
_LINE = 8  # int64 per cache line
# Indices in a rank's line. Arrivals count collectives and launches. The counter belongs to the ring.
_ARRIVALS, _FAILED, _CULPRIT, _COUNTER = range(4)
_ADVICE = "close the runtime, and start all ranks again"

_of_group: dict[str, Ranks] = {}


class Ranks:
    """The ranks of one group.

    rank, size   this rank, and the number of ranks
    on_cuda      whether the group has NCCL, so that models may run on GPUs
    managers     number of managers that were built for the group
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        if "cpu:gloo" not in (backend := dist.get_backend_config(group)):
            raise UnsupportedError(
                f"group: expected gloo for CPU tensors, got {backend}; call init_process_group('gloo'), or "
                f"init_process_group('{CUDA_BACKENDS}') on GPUs"
            )
        self.on_cuda = "cuda:nccl" in backend
        if self.on_cuda:
            env.set_nccl_defaults()
        self.managers, self._hang_seconds, self._polled = 0, HANG_SECONDS, 0.0
        self._subgroups = dict[int, dist.ProcessGroup]()
        self._memory, self._pids = self._shared_memory()
        self._stopped_since = dict[int, float]()
        count = 1 + self.size
        words = np.frombuffer(self._memory, np.int64, count * _LINE).reshape(count, _LINE)
        texts = np.frombuffer(self._memory, np.uint8, self.size * _TEXT_BYTES, words.nbytes)
        self._lines, self._texts = words[1:], texts.reshape(self.size, _TEXT_BYTES)
        ring = np.frombuffer(self._memory, np.uint8, _RING_BYTES, words.nbytes + texts.nbytes)
        # The first line has the bytes that rank 0 has written. Rank 0 does not read.
        counters = words[:, _COUNTER]
        counters[1] = np.iinfo(np.int64).max
        self._ring = SharedRing(counters, ring, self.rank or None, self._until)
        self._ended, self._rank_of_fd = select.epoll(), dict[int, int]()  # threads may poll it together
        self._reporting = threading.Lock()
        self._queueing = threading.RLock()  # a signal handler may run a step
        for rank, pid in enumerate(self._pids):
            if rank != self.rank:
                try:
                    descriptor = os.pidfd_open(pid)
                except ProcessLookupError as error:
                    raise RankError(rank, f"the process of rank {rank} has ended; {_ADVICE}") from error
                self._rank_of_fd[descriptor] = rank
                self._ended.register(descriptor, select.EPOLLIN)
        collectives.runners[group.group_name] = self._run_collective
        if self.on_cuda:
            device_wait.watch = self

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ranks:
        """Return the ranks of a group. All ranks make the first call together."""
        check_instance("group", group, dist.ProcessGroup, advice="pass torch.distributed.group.WORLD, for example")
        if group.group_name not in _of_group:
            _of_group[group.group_name] = cls(group)
        return _of_group[group.group_name]

    def subgroup(self, size: int) -> dist.ProcessGroup:
        """Return the group of `size` consecutive ranks that this rank belongs to. All ranks call it together."""
        if size == self.size:
            return self.group
        if size not in self._subgroups:
            self.exchange(None)  # this wait notices failed ranks, new_group does not
            local = self.size < dist.get_world_size()  # other ranks of the world do not make this call
            global_ranks = [dist.get_global_rank(self.group, rank) for rank in range(self.size)]
            first = self.rank // size * size
            groups = {
                start: dist.new_group(global_ranks[start : start + size], use_local_synchronization=local)
                for start in ([first] if local else range(0, self.size, size))
            }
            self._subgroups[size] = own = groups[first]
            collectives.runners[own.group_name] = self._run_collective
        return self._subgroups[size]

    def connect(self, device: torch.device) -> None:
        """On GPUs, connect NCCL for all groups, and allocate symmetric buffers. A capture allows neither."""
        if device.type == "cuda":
            for group in (self.group, *self._subgroups.values()):
                collectives.gather(torch.zeros(1, device=device), group)
                device_wait.wait_for(torch.cuda.current_stream(device))
                name = group.group_name
                if name not in symmetric_buffers and (buffer := SymmetricBuffer.allocate(group, device)) is not None:
                    symmetric_buffers[name] = buffer

    def send(self, message: bytes) -> None:
        """Send a message from rank 0. Waits only while the ring is full, because a rank has not read it."""
        if self.rank:
            raise ReplayError(f"rank {self.rank}: expected this call on rank 0; call follow() on the other ranks")
        self.check()
        try:
            self._ring.send(message)
        except BaseException as error:  # an interrupt; a part of the message may be in the ring
            self.fail(error)
            raise

    def receive(self) -> bytes:
        """Wait for the next message of rank 0."""
        return self._ring.receive()

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. Ranks may be late, as in `patient`.

        Raises: RankError: if a rank fails.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        with self.patient():
            sizes = collectives.gather(torch.tensor([len(data)], device="cpu"), self.group).flatten().tolist()
            padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
            padded[: len(data)] = data
            every = collectives.gather(padded, self.group)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(every, sizes, strict=True)]

    def check_equal(self, values: Mapping[str, object]) -> None:
        """Compare values, which have the same names on all ranks. Ranks may be late, as in `patient`.

        Raises: ConfigError: on every rank, with the rank and the values that differ. RankError: if a rank fails.
        """
        first, *rest = self.exchange(values)
        for rank, found in enumerate(rest, 1):
            if different := [name for name in first if found[name] != first[name]]:
                listed = ", ".join(
                    f"{name}: {shown(found[name])} instead of {shown(first[name])}" for name in different
                )
                raise ConfigError(f"rank {rank} differs from rank 0 in {listed}; pass the same arguments on all ranks")

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Return a context in which ranks may be late by PATIENT_SECONDS, for example because they compile kernels."""
        before, self._hang_seconds = self._hang_seconds, PATIENT_SECONDS
        try:
            yield
        finally:
            self._hang_seconds = before

    def watch(self) -> Callable[[], None]:
        """Check for failed ranks in a thread, until the returned function is called. After a failure, kernels that wait
        for other ranks end."""
        ended = list[bool]()  # not an event: a finalizer may end the watch in any thread, even in this one
        threading.Thread(target=self._watch, args=(ended,), name="graphrt.ranks", daemon=True).start()
        return functools.partial(ended.append, True)

    def _watch(self, ended: list[bool]) -> None:
        with contextlib.suppress(RankError):  # the next call that waits raises it
            while not ended:
                self.check()
                self._check_stopped()
                time.sleep(_THREAD_CHECK_SECONDS)

    def arrive(self) -> None:
        """Count a collective or a launch of this rank, so that other ranks can detect that it is late."""
        self._lines[self.rank, _ARRIVALS] += 1

    def wait_for_device(self, done: Callable[[], bool]) -> None:
        """Wait for queued work. After a failure, waits at most 2 s for the aborted collectives.

        Raises: RankError: if a rank has failed. Finished work raises too, because its results may be wrong.
        """
        if self._has_failed:
            deadline = time.monotonic() + _ABORT_SECONDS
            while not done() and time.monotonic() < deadline:
                time.sleep(_SLEEP_SECONDS)
            self.check()
        self._until(done, self._hang_seconds)
        if self._has_failed:
            self.check()

    def poll(self) -> None:
        """Raise RankError if a rank has failed. Looks for failures of other ranks at most every 50 ms."""
        if self._has_failed or time.monotonic() - self._polled > _CHECK_SECONDS:
            self._polled = time.monotonic()
            self.check()
            self._check_stopped()

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Return a context in which an error of this rank fails all ranks."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Report an error of this rank to the others.

        Raises: RankError: if another rank has failed, which is then the cause: collectives raise after their abort.
        """
        if isinstance(error, RankError):
            return
        if isinstance(error, dist.DistBackendError):
            self._wait_for_cause()
        if self._has_failed and self._lines[self.rank, _CULPRIT] != self.rank and isinstance(error, Exception):
            self.check()
        self._report(self.rank, f"rank {self.rank} failed with {type(error).__name__}: {error}")

    def _wait_for_cause(self) -> None:
        """Wait until the rank whose connection has ended exits. Raises: RankError: when the rank has exited."""
        deadline = time.monotonic() + _EXIT_SECONDS
        while time.monotonic() < deadline:
            self.check()
            time.sleep(_SLEEP_SECONDS)

    def check(self) -> None:
        """Raise RankError if another rank has failed or ended."""
        failed = self._lines[:, _FAILED].nonzero()[0]
        if len(failed):
            reporter = int(failed[0])
            text = self._texts[reporter].tobytes().rstrip(b"\0").decode(errors="replace")
            raise self._failure(int(self._lines[reporter, _CULPRIT]), text)
        if ended := self._ended.poll(0):
            rank = self._rank_of_fd[ended[0][0]]
            raise self._failure(rank, f"the process of rank {rank} has ended")

    def _failure(self, culprit: int, text: str) -> RankError:
        self._report(culprit, text)
        return RankError(culprit, f"{text}; {_ADVICE}")

    @property
    def _has_failed(self) -> bool:
        """Whether this rank has failed, or knows that another has."""
        return bool(self._lines[self.rank, _FAILED])

    def _report(self, culprit: int, text: str) -> None:
        with self._reporting:
            if self._has_failed:
                return
            data = text.encode()[:_TEXT_BYTES]
            self._texts[self.rank, : len(data)] = np.frombuffer(data, np.uint8)
            self._lines[self.rank, _CULPRIT] = culprit
            self._lines[self.rank, _FAILED] = 1
        _keep_gloo(self.group)
        for group in (self.group, *self._subgroups.values()):  # stop kernels that wait for other ranks
            if (buffer := symmetric_buffers.get(group.group_name)) is not None:
                buffer.abort(culprit % group.size())
            if self.on_cuda:
                nccl = group._get_backend(torch.device("cuda"))
                thread = threading.Thread(target=self._abort, args=(nccl,), daemon=True)
                thread.start()
                # A thread that returns from torch while Python ends takes the process down with SIGABRT.
                atexit.register(thread.join, _ABORT_SECONDS)

    def _abort(self, nccl: Any) -> None:
        """Abort the collectives of a group. Returns only after all graphs are freed.

        abort() keeps a lock of torch that queueing takes, so it starts when no collective is being queued. But if
        queueing waits for the failed rank, only the abort ends this wait.
        """
        if self._queueing.acquire(timeout=_QUEUE_SECONDS):
            self._queueing.release()
        nccl.abort()

    def _until(self, done: Callable[[], bool], hang_seconds: float = float("inf")) -> None:
        """Wait for a condition. Raises RankError if a rank fails, or is late by `hang_seconds`."""
        start = checked = time.monotonic()
        while not done():
            now = time.monotonic()
            if now - checked > _CHECK_SECONDS:
                checked = now
                self.check()
                self._check_stopped()
                if now - start > hang_seconds:
                    self._check_arrivals(hang_seconds)
            time.sleep(0 if now - start < _SPIN_SECONDS[self.on_cuda] else _SLEEP_SECONDS)

    def _check_arrivals(self, seconds: float) -> None:
        arrivals = self._lines[:, _ARRIVALS]
        late = (arrivals < arrivals[self.rank]).nonzero()[0]
        if len(late):
            rank = int(late[0])
            raise self._failure(rank, f"rank {rank} did not arrive at a collective or launch for {seconds:g} s")

    def _check_stopped(self) -> None:
        """Raise RankError if the process of a rank has been stopped for HANG_SECONDS, for example by SIGSTOP."""
        now = time.monotonic()
        for rank, pid in enumerate(self._pids):
            if not _is_stopped(pid):
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) > HANG_SECONDS:
                raise self._failure(rank, f"the process of rank {rank} is stopped")

    def _run_collective(self, queue: collectives.Queue) -> None:
        with self._queueing:
            if self._has_failed:
                self.check()
            work = queue()
        self.arrive()
        if work is None:  # the stream waits
            return
        try:
            self._until(work.is_completed, self._hang_seconds)
            work.wait()
        except RankError:
            raise
        except RuntimeError as error:  # raised by the backend: a connection has ended, and its process ends soon
            self._wait_for_cause()
            raise self._failure(self.rank, f"a collective of rank {self.rank} failed: {error}") from error

    def _shared_memory(self) -> tuple[mmap.mmap, list[int]]:
        """Return memory that all ranks share, zeroed, and their process ids. The memory has no name in a file system.

        Raises: RankError: if a rank ends, or does not join for PATIENT_SECONDS. UnsupportedError: on two hosts.
        """
        size = (1 + self.size) * _LINE * 8 + self.size * _TEXT_BYTES + _RING_BYTES
        file = os.memfd_create("graphrt-ranks")
        os.ftruncate(file, size)
        pids, files, inodes = self._join(os.getpid(), file, os.stat(file).st_ino)
        path, memory = f"/proc/{pids[0]}/fd/{files[0]}", None
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == inodes[0]:  # on another host, the path may be of another file
                with open(path, "r+b") as opened:
                    memory = mmap.mmap(opened.fileno(), size)
        (has_memory,) = self._join(memory is not None)
        os.close(file)
        if memory is None or not all(has_memory):
            rank = has_memory.index(0)
            raise UnsupportedError(f"group: expected ranks on one host, but rank {rank} is on another one")
        return memory, pids

    def _join(self, *values: int) -> list[list[int]]:
        """Return `values` of all ranks: for each value, a list by rank. See `_shared_memory` for what it raises."""
        store, keys = self.group.get_group_store(), [f"graphrt {len(values)} {rank}" for rank in range(self.size)]
        store.set(keys[self.rank], "")
        own = torch.tensor(values, dtype=torch.int64, device="cpu")
        every, deadline = own.new_empty(self.size * len(own)), time.monotonic() + PATIENT_SECONDS
        try:
            work = collectives.all_gather_single(every, own, group=self.group, async_op=True)
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no answer for {PATIENT_SECONDS:g} s")
                time.sleep(_SLEEP_SECONDS)
            work.wait()
        except RuntimeError as error:  # of gloo, which does not name a rank
            missing, deadline = [0], time.monotonic() + _EXIT_SECONDS  # rank 0, if the store has ended
            with contextlib.suppress(RuntimeError):
                while len(missing := [r for r in range(self.size) if not store.check([keys[r]])]) > 1:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(_CHECK_SECONDS)
            rank = missing[0] if missing else -1
            _keep_gloo(self.group)
            raise RankError(rank, f"rank {rank} has ended, or did not join the group: {error}; {_ADVICE}") from error
        by_rank: list[list[int]] = every.view(self.size, -1).T.tolist()
        return by_rank


def _keep_gloo(group: dist.ProcessGroup) -> None:
    """Never free a group's gloo backend. Its destructor waits for collectives, so the process could not exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group._get_backend(torch.device("cpu"))))


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].startswith(b"T")
    except OSError:  # it has ended
        return False


def context_of(kv_groups: Sequence[KVCacheSpec], group: dist.ProcessGroup | None) -> ContextParallel | None:
    """Return the ranks that share the KV of each request; None if every rank keeps all tokens.

    Raises: ConfigError: if the ranks of `group` cannot be divided by context_parallel_size.
    """
    size = kv_groups[0].context_parallel_size if kv_groups else 1
    if size == 1:
        return None
    if group is None or group.size() % size:
        ranks = "no group" if group is None else f"{group.size()} ranks"
        raise ConfigError(
            f"context_parallel_size: expected a divisor of the number of ranks, got {size} with {ranks}; pass group="
        )
    return ContextParallel(Ranks.of(group).subgroup(size), kv_groups[0].interleave_size)
