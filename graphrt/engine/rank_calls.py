"""Repeats the launches and device writes of rank 0 on the other ranks of a group.

Only rank 0 schedules. It sends each launch, with its packed step inputs, before it queues the launch. It also sends
each call that writes device state between launches. The other ranks run both in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from graphrt import __version__
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.config import RuntimeConfig
from graphrt.engine.launch_inputs import LaunchInputs
from graphrt.engine.program import StepProgram
from graphrt.engine.ranks import CUDA_BACKENDS, Ranks
from graphrt.kernels.errors import ConfigError, RankError, UnsupportedError

_LAUNCH, _CALL, _CLOSE = range(3)

LaunchWords = Callable[[BatchDescriptor, int, int, bool, str, int, np.ndarray[Any, np.dtype[np.int32]]], None]
"""Queues a launch. Arguments: size, requests, steps, whether it loops, why it is eager, number of its first step, and
its packed step inputs."""


class RankCalls:
    """The calls of one manager on all ranks of a group.

    ranks     the ranks of the group
    follows   whether this rank repeats what rank 0 does
    groups    number of KV groups, which determines the layout of the step inputs
    parts     objects that every rank has, by name; an argument that is one of them becomes the receiving rank's own
    """

    def __init__(self, ranks: Ranks, groups: int, parts: Mapping[str, object]) -> None:
        self.ranks, self._groups, self._parts = ranks, groups, dict(parts)
        self._names = {id(part): name for name, part in parts.items()}
        self.follows = False
        # Rank 0 may close a manager that the other ranks did not follow. Its messages must not reach the next one.
        ranks.managers += 1
        self._number = ranks.managers
        self._end_watch = ranks.watch()
        weakref.finalize(self, self._end_watch)

    @classmethod
    def connect(cls, group: dist.ProcessGroup, config: RuntimeConfig, program: StepProgram, manager: Any) -> RankCalls:
        """Compare a manager with those of the other ranks, and return its calls.

        Raises: ConfigError: on every rank, with the rank and the values that differ. RankError: if a rank ends during
        the comparison. UnsupportedError: for options that ranks do not implement.
        """
        ranks, cache = Ranks.of(group), program.kv_cache
        _check_options(config, program, ranks)
        _check_equal(ranks, config, program)
        ranks.connect(cache.device)
        parts = {"manager": manager, "tables": manager.request_tables, "kv_cache": cache, "buffers": program.buffers}
        return cls(ranks, len(cache.groups), parts)

    def add_part(self, name: str, part: object) -> None:
        """Add an object that every rank has."""
        self._parts[name], self._names[id(part)] = part, name

    def launch(
        self, inputs: np.ndarray[Any, np.dtype[np.int32]], size: BatchDescriptor, why: str, first: int, loops: bool
    ) -> None:
        """Send a launch from rank 0, before it is queued there. Raises: ReplayError: on other ranks, unless they
        follow."""
        if self.follows:
            return
        found = LaunchInputs(inputs, self._groups)
        key = (size.kind.value, size.padded_reqs, size.padded_tokens, size.query_len)
        arguments = key, found.num_reqs, found.steps, loops, why, first, found.words.tobytes()
        self.ranks.send(pickle.dumps((self._number, _LAUNCH, arguments)))

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Send a call of a function, which is a method of a part or defined in a module, from rank 0."""
        content = io.BytesIO()
        _Pickler(content, self._names).dump((function, arguments))
        self.ranks.send(pickle.dumps((self._number, _CALL, content.getvalue())))

    def close(self) -> None:
        """On rank 0, let the other ranks return from `follow`. Does nothing if a rank has failed."""
        self._end_watch()  # from now on, the processes of other ranks may end
        with contextlib.suppress(RankError):
            if not self.ranks.rank:
                self.ranks.send(pickle.dumps((self._number, _CLOSE, None)))

    def follow(
        self, launch: LaunchWords, between_steps: Callable[[], contextlib.AbstractContextManager[object]]
    ) -> None:
        """Repeat what rank 0 does, until it closes.

        launch          queues a launch
        between_steps   returns a context for writes between two launches
        """
        self.follows = True
        with self.ranks.reporting():
            while True:
                number, kind, content = pickle.loads(self.ranks.receive())
                if number != self._number:
                    continue
                if kind == _CLOSE:
                    self._end_watch()
                    return
                if kind == _CALL:
                    function, arguments = _Unpickler(io.BytesIO(content), self._parts).load()
                    with between_steps():
                        function(*arguments)
                    continue
                (graph_kind, *size), num_reqs, steps, loops, why, first, words = content
                descriptor = BatchDescriptor(GraphKind(graph_kind), *size)
                launch(descriptor, num_reqs, steps, loops, why, first, np.frombuffer(words, np.int32))


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, found: object) -> str | None:
        return self._names.get(id(found))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parts: Mapping[str, object]) -> None:
        super().__init__(file)
        self._parts = parts

    def persistent_load(self, name: str) -> object:
        return self._parts[name]


@contextlib.contextmanager
def capturing(calls: RankCalls | None) -> Iterator[None]:
    """Return a context without a time limit, in which an error of this rank fails all ranks. None: a single rank.

    It ends on all ranks together, because a launch on the first rank has a time limit on the others.
    """
    if calls is None:
        yield
        return
    with calls.ranks.reporting(), calls.ranks.patient():
        yield
        calls.ranks.exchange(None)


def follower(calls: RankCalls | None) -> RankCalls:
    """Return `calls`. Raises: ConfigError: on rank 0, and without a group."""
    if calls is None or not calls.ranks.rank:
        raise ConfigError("follow: expected a rank other than 0; submit steps on rank 0, or without a group")
    return calls


def refuse_ranks(calls: RankCalls | None, call: str) -> None:
    """Raise UnsupportedError if there are several ranks."""
    if calls is not None:
        raise UnsupportedError(f"{call}: not supported with several ranks; use a runtime without a group")


def _check_options(config: RuntimeConfig, program: StepProgram, ranks: Ranks) -> None:
    """Raise UnsupportedError for options that ranks do not implement. The message lists all."""
    lacks_nccl = program.kv_cache.device.type == "cuda" and not ranks.on_cuda
    wrong = {
        f"CUDA without NCCL (call init_process_group('{CUDA_BACKENDS}'))": lacks_nccl,
        "shadow_every": bool(config.shadow_every),
        "page_tables": program.page_tables is not None,
        f"the backend {program.backend.name}, which plans on the host": program.backend.plans_on_host(),
    }
    if any(wrong.values()):
        listed = ", ".join(name for name, is_wrong in wrong.items() if is_wrong)
        raise UnsupportedError(f"group: several ranks do not support {listed}; omit it, or use one rank")


def _check_equal(ranks: Ranks, config: RuntimeConfig, program: StepProgram) -> None:
    digest = hashlib.sha256()
    for name, weight in program.weights(program.model):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype};".encode())
    described = {
        "graphrt": __version__,
        "torch": torch.__version__,
        **{f"config.{field.name}": repr(getattr(config, field.name)) for field in fields(config)},
        "vocab_size": repr(program.vocab_size),
        "layers": repr([layer.spec for layer in program.layers]),
        "KV groups": repr(program.kv_cache.groups),
        "pages": repr(program.kv_cache.pool_pages),
        "backend": program.backend.name,
        "sampler": _name(program.sampler),
        "proposer": _name(program.proposer),
        "names, shapes and dtypes of the weights": digest.hexdigest()[:12],
    }
    ranks.check_equal(described)


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
