"""Run a step eagerly and as a graph, from the same state and with given buffer contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphrt.kernels.errors import ConfigError
from graphrt.testing.poison import poison
from graphrt.testing.verify.compare import Difference, differing, first_difference, same_bits
from graphrt.testing.verify.host import Change, assigned, same, torch_generators, unchanged, values_at
from graphrt.testing.verify.memory import zeroed
from graphrt.testing.verify.report import raised
from graphrt.testing.verify.subject import Inputs, Target

SEED, OTHER_SEED = 1234, 4321


class Contents(dict[str, torch.Tensor]):
    """The contents of every buffer at the start of a step.

    `host` contains the numbers and buffer references that `refresh` left in Python, by path. An example is the index
    of the filled buffer if two buffers alternate.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], host: Mapping[str, Any] | None = None) -> None:
        super().__init__(tensors)
        self.host = host or {}

    def but(self, tensors: Mapping[str, torch.Tensor]) -> Contents:
        """Return a copy with different contents for some buffers."""
        return Contents({**self, **tensors}, self.host)


class Fill(str, Enum):
    """The contents of the buffers before `refresh` writes to them.

    INITIAL    the values when `verify` was called
    PREVIOUS   the values that the previous case left
    HIGH       NaN, and the largest integer that the buffer has held
    LOW        large floats, and the smallest integer that the buffer has held

    Poison in integers stays in the observed range, because an out-of-range index on a device would end the process.
    """

    INITIAL = "their initial values"
    PREVIOUS = "the previous case's values"
    HIGH = "high poison"
    LOW = "low poison"


POISONED = (Fill.HIGH, Fill.LOW)


@dataclass(frozen=True)
class Case:
    """One case of make_inputs. `exact_shapes` are the shapes of the oracle's results."""

    name: str
    inputs: Inputs
    real: Mapping[str, Any]
    exact_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def named(self) -> Mapping[str, Any]:
        """The inputs by name, or an empty dict if they are not a mapping."""
        return self.inputs if isinstance(self.inputs, Mapping) else {}

    def check_real(self, *tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ConfigError if a name of `real` is not among `tensors`."""
        known = {name: tensor for group in tensors for name, tensor in group.items()}
        if unknown := set(self.real) - set(known):
            raise ConfigError(
                f"real: {sorted(map(str, unknown))} are neither outputs nor state; use names of {sorted(known)}"
            )

    def counted(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a mask of the elements to compare of an output or of "state NAME". None means all."""
        index = self.real.get(name.removeprefix("state "))
        if index is None:
            shape = self.exact_shapes.get(name)
            if shape is None or shape == tuple(tensor.shape) or len(shape) != tensor.dim():
                return None
            index = tuple(slice(0, extent) for extent in shape)
        return masked(tensor, index)


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    outputs  copies of the outputs
    changes  for each state tensor: flat indices of the elements that the run changed, and their new values
    error    the exception text, or ""
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    changes: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    error: str = ""


class Runs:
    """Run a target, and count its runs.

    ranges     smallest and largest value of each integer buffer so far
    rewritten  names of the buffers to which `refresh` writes in every case
    refreshed  paths of the numbers and buffer references that `refresh` changes in Python
    initial    initial contents of the buffers; those of other tensors are in `state` and `hidden`
    filled     tensors that the first run filled and later runs only read, with their initial contents
    kept       names of the hidden tensors that are not restored between runs
    old        outputs in memory that existed before the run, with the name of the tensor if known
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.eager_runs = self.replays = 0
        self.ranges: dict[str, tuple[float, float]] = {}
        self.rewritten: frozenset[str] = frozenset()
        self.refreshed: frozenset[str] = frozenset()
        self.initial = {name: t.clone() for name, t in target.buffers.items()}
        self.state = {name: t.clone() for name, t in target.state.items()}
        self.hidden: dict[str, torch.Tensor] = {}
        self.filled: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.kept: frozenset[str] = frozenset()
        self.generators = [(g, g.get_state()) for g in torch_generators(*target.root)]
        self.old: dict[str, str] = {}
        self._last: dict[str, torch.Tensor] = {}
        self._raw: dict[str, torch.Tensor] = {}

    def restore_state(self) -> None:
        """Restore the state, the hidden tensors and the torch generators."""
        for name, tensor in self.target.state.items():
            tensor.copy_(self.state[name])
        for name, tensor in self.target.hidden.items():
            if name not in self.kept:
                tensor.copy_(self.hidden[name])
        for generator, state in self.generators:
            generator.set_state(state)

    def contents(self) -> Contents:
        """Return a copy of the buffers, and the values that `refresh` left in Python."""
        host = self._of_buffers(values_at(*self.target.root, self.refreshed))  # keeps no other tensor alive
        return Contents({name: t.clone() for name, t in self.target.buffers.items()}, host)

    def put(self, contents: Mapping[str, torch.Tensor]) -> None:
        """Write contents to the buffers."""
        for name, tensor in self.target.buffers.items():
            if name in contents and contents[name].shape == tensor.shape:
                tensor.copy_(contents[name])

    def numbers_of(self, contents: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Assign the Python values that `refresh` left together with these contents."""
        host = contents.host if isinstance(contents, Contents) else {}
        return assigned(*self.target.root, self._of_buffers(host))

    def _of_buffers(self, host: Mapping[str, Any]) -> dict[str, Any]:
        """Drop tensors that are not buffers, because their contents at that moment are unknown."""
        now = {tensor.untyped_storage().data_ptr() for tensor in self.target.buffers.values()}
        return {
            path: value
            for path, value in host.items()
            if not isinstance(value, torch.Tensor) or value.untyped_storage().data_ptr() in now
        }

    def note_refreshed(self, refresh: Callable[[], object]) -> None:
        """Refresh, and record which numbers and tensor references this changes in Python."""
        before = values_at(*self.target.root)
        refresh()
        after = values_at(*self.target.root)
        for path in before.keys() & after.keys():
            old, new = before[path], after[path]
            is_other = old is not new if isinstance(old, torch.Tensor) else not same(old, new)
            # Container items move, so a path may refer to a different object in a later run.
            if is_other and isinstance(old, torch.Tensor) == isinstance(new, torch.Tensor) and "[" not in path:
                self.refreshed |= {path}

    @contextmanager
    def as_at_first(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Restore old Python values, and the initial contents of the unnamed tensors that depend on them.

        An example is a dict of the lengths for which cache tensors were filled.
        """
        every = [(t, self.initial[name]) for name, t in self.target.found.items()] + [*self.filled.values()]
        tensors = [(tensor, first) for tensor, first in every if tensor.shape == first.shape]
        now = [(tensor, tensor.clone()) for tensor, _ in tensors]
        with assigned(*self.target.root, values):
            try:
                for tensor, first in tensors:
                    tensor.copy_(first)
                yield
            finally:
                for tensor, last in now:
                    tensor.copy_(last)

    def note_ranges(self) -> None:
        """Record the range of the values in integer buffers."""
        for name, tensor in self.target.buffers.items():
            if tensor.numel() and not (tensor.is_floating_point() or tensor.is_complex()):
                low, high = _span(tensor)
                old = self.ranges.get(name, (low, high))
                self.ranges[name] = (min(low, old[0]), max(high, old[1]))

    def fill(self, name: str, tensor: torch.Tensor, value: Fill) -> None:
        """Write poison to a tensor of a buffer's dtype and range."""
        fill(tensor, value, self.ranges.get(name, (0.0, 0.0)))

    def enter(self, case: Case, value: Fill) -> Contents:
        """Restore the state, fill the buffers, refresh them, and return their contents."""
        self.restore_state()
        self._fill_all(self.rewritten, value)
        self.target.refresh(case.inputs)
        self._fill_all(self.target.derived, value)
        return self.contents()

    def before(self, change: Change) -> Any:
        """Return the old value of a change: a buffer itself, a copy of another tensor's contents, or None."""
        is_named = change.tensor is not None and change.tensor.untyped_storage().data_ptr() in self.storages
        return change.tensor if is_named else change.old

    @property
    def storages(self) -> dict[int, str]:
        """Return the names of all buffers, state and hidden tensors by storage address."""
        target = self.target
        tensors = {**target.buffers, **target.state, **target.hidden}
        return {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items()}

    def _fill_all(self, names: frozenset[str], value: Fill) -> None:
        for name, tensor in self.target.buffers.items() if value is not Fill.PREVIOUS else ():
            if name in names and value is Fill.INITIAL:
                self.put({name: self.initial[name]} if name in self.initial else {})
            elif name in names:
                self.fill(name, tensor, value)

    def run(
        self,
        case: Case,
        body: Callable[[], Any],
        contents: Contents,
        *,
        entered: bool = False,
        put: bool = True,
        inputs: Inputs | None = None,
        host: Mapping[str, Any] | None = None,
        earlier: Mapping[str, Any] | None = None,
        unowned: Fill | None = None,
        skip: frozenset[str] = frozenset(),
        before: Callable[[], object] | None = None,
        seed: int = SEED,
    ) -> Outcome:
        """Run a body once, from the initial state. An exception in refresh() or the body is an outcome.

        Args:
            case: the case.
            body: the function to run.
            contents: contents of the buffers.
            entered: `enter` was just called, so the buffers contain `contents`.
            put: write `contents` to the buffers for the run. False keeps the values from refresh().
            inputs: inputs for refresh() instead of the case's. The buffers still contain `contents`.
            host: Python values by path, for the duration of the run.
            earlier: Python values by path, assigned before refresh(), whose changes to them are undone.
            unowned: poison for unowned parts of the state, except the tensors in `skip`.
            before: called right before the body.
            seed: seed of torch's random numbers.
        """
        root = self.target.root
        with ExitStack() as stack:
            if earlier:
                stack.enter_context(unchanged(*root))
                stack.enter_context(self.as_at_first(earlier))
            try:
                if not entered:
                    self.restore_state()
                    for generator, _ in self.generators if seed != SEED else ():
                        generator.manual_seed(seed)
                    self.target.refresh(case.inputs if inputs is None else inputs)
                    if put:
                        self._put_for(stack, contents)
                        stack.enter_context(self.numbers_of(contents if inputs is None else {}))
                start = self._poison_unowned(case, unowned, skip)
                if before is not None:
                    before()
                stack.enter_context(assigned(*root, host or {}))
                stack.enter_context(one_seed(self.target.device, seed))
                raw = self.target.named(body())
            except Exception as error:
                if "CUDA error" in str(error):  # the context is lost, so every later call also fails
                    raise
                return Outcome(error=raised(error))
            outputs = {name: t.clone() for name, t in raw.items()}
            changes = {name: changed(start.get(name, self.state[name]), t) for name, t in self.target.state.items()}
        if start:
            self.restore_state()
        self._raw = raw
        return Outcome(outputs, changes)

    def _put_for(self, stack: ExitStack, contents: Contents) -> None:
        """Write contents to the buffers. At the end, restore buffers that refresh() may skip in some cases."""
        skipped = {n: t for n, t in self.target.buffers.items() if n not in self.rewritten | self.target.derived}
        stack.callback(self.put, {name: tensor.clone() for name, tensor in skipped.items()})
        self.put(contents)

    def eager(self, case: Case, contents: Contents, **options: Any) -> Outcome:
        """Run the step itself. See `run`."""
        self.eager_runs += 1
        self._raw = {}

        def body() -> Any:
            with zeroed(self.target.device), as_recorded(self.target.device):
                return self.target.run()

        outcome = self.run(case, body, contents, **options)
        named = self.storages
        for name, tensor in self._raw.items():
            last = self._last.get(name)
            address = tensor.untyped_storage().data_ptr()
            if address in named or (last is not None and last.untyped_storage().data_ptr() == address):
                self.old[name] = named.get(address, "")
        self._last = self._raw  # kept alive until the next run, so that it cannot get the same memory
        return outcome

    def _poison_unowned(self, case: Case, value: Fill | None, skip: frozenset[str]) -> dict[str, torch.Tensor]:
        """Poison the unowned parts of the state, and return copies of the poisoned state tensors."""
        if value is None:
            return {}
        start = {}
        for name, index in self.target.unowned(case.inputs).items():
            tensor = self.target.state[name]
            if name not in skip and tensor.numel():
                low, high = (0.0, 0.0) if tensor.is_floating_point() or tensor.is_complex() else _span(tensor)
                part = tensor[index].clone()
                fill(part, value, (low, high))
                tensor[index] = part
                start[name] = tensor.clone()
        return start

    def difference(self, case: Case, have: Outcome, want: Outcome) -> Difference | None:
        """Return the first compared element in which two runs of a case differ, ignoring errors."""
        for name, expected in want.outputs.items():
            found = have.outputs.get(name)
            if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
                got = "nothing" if found is None else f"{list(found.shape)} {found.dtype}"
                return Difference(name, (), got, f"{list(expected.shape)} {expected.dtype}", 1, 1)
            if wrong := first_difference(name, found, expected, counted=case.counted(name, expected)):
                return wrong
        if not same_bits(_flat(have.changes), _flat(want.changes)):
            for name, change in want.changes.items():
                if wrong := self._state_difference(case, name, have.changes[name], change):
                    return wrong
        return None

    def _state_difference(self, case: Case, name: str, have: Any, want: Any) -> Difference | None:
        alike = have[0].shape == want[0].shape and bool((have[0] == want[0]).all())
        if alike and not bool(differing(have[1], want[1]).any()):
            return None
        label = f"state {name}"
        tensors = [self.state_after(name, change) for change in (have, want)]
        return first_difference(label, *tensors, counted=case.counted(label, tensors[0]))

    def state_after(self, name: str, change: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return a state tensor after a run."""
        flat = self.state[name].clone().flatten()
        flat[change[0]] = change[1]
        return flat.view(self.state[name].shape)

    def trespasses(self, case: Case, outcome: Outcome) -> Difference | None:
        """Return the first unowned element of the state that a run changed, or None."""
        for name, index in self.target.unowned(case.inputs).items():
            old, new = self.state[name], self.state_after(name, outcome.changes[name])
            if found := first_difference(f"state {name}", new, old, counted=masked(old, index)):
                return found
        return None

    def same(self, case: Case, have: Outcome, want: Outcome) -> bool:
        """Return whether two runs gave equal results or raised the same error."""
        if have.error or want.error:
            return have.error == want.error
        return self.difference(case, have, want) is None


def _flat(changes: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for change in changes.values() for tensor in change]


def _span(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value of integers."""
    wide = tensor.dtype in (torch.uint16, torch.uint32, torch.uint64)  # torch has no min and max for these
    values = tensor.double() if wide else tensor
    return float(values.min()), float(values.max())


def masked(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Return an index as a bool mask of a tensor's shape."""
    mask = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    mask[index] = True
    return mask


def changed(before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the flat indices of the elements that differ, and their new values. NaN equals NaN."""
    indices = differing(after, before).flatten().nonzero().flatten()
    return indices, after.flatten()[indices]


def fill(tensor: torch.Tensor, value: Fill, span: tuple[float, float]) -> None:
    """Write poison in place. `span` is the smallest and largest value for integers."""
    if tensor.is_conj():
        tensor = tensor.conj()  # the same memory without the lazy conjugation
    if tensor.is_complex():
        fill(torch.view_as_real(tensor), value, span)
    elif tensor.dtype == torch.bool:
        tensor.fill_(value is Fill.HIGH)
    elif not tensor.is_floating_point():
        most = min(torch.iinfo(tensor.dtype).max, torch.iinfo(torch.int64).max)  # fill_() accepts at most int64
        tensor.fill_(min(int(span[1] if value is Fill.HIGH else span[0]), most))
    elif value is Fill.HIGH:
        poison(tensor)
    else:
        tensor.copy_(torch.full_like(tensor, min(1e4, torch.finfo(tensor.dtype).max / 2)))


class _Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def as_recorded(device: torch.device) -> AbstractContextManager[object]:
    """Make torch choose the same kernels as in an op trace.

    Under a dispatch mode, torch avoids some fused kernels, such as the kernels of `torch.nn.TransformerEncoderLayer`.
    """
    return nullcontext() if device.type == "cuda" else _Passing()


@contextmanager
def one_seed(device: torch.device, seed: int = SEED) -> Iterator[None]:
    """Seed torch's default generators within a block, then restore the caller's state."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
