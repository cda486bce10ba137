"""How `verify` runs a step: eagerly and as a graph, from one state, with chosen contents in the buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphrt.kernels.checks import shown
from graphrt.kernels.errors import ConfigError
from graphrt.testing.poison import poison_bits
from graphrt.testing.verify_host import Change, Held, as_now, assigned, generators, unchanged, values_at
from graphrt.testing.verify_memory import zeroed
from graphrt.testing.verify_report import (
    Difference,
    differing,
    first_difference,
    is_nan,
    other_bits,
    raised,
    same_bits,
)
from graphrt.testing.verify_subject import Inputs, Target, name_of

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SEED, OTHER_SEED = 1234, 4321


class Contents(dict[str, torch.Tensor]):
    """What every static buffer holds when the step begins. `host`: by path, what refresh() left beside it: numbers,
    such as which of two buffers it wrote to, and which of the buffers stands in a place."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], host: Mapping[str, Any] | None = None) -> None:
        super().__init__(tensors)
        self.host = host or {}

    def but(self, tensors: Mapping[str, torch.Tensor]) -> Contents:
        """The same, with other contents of some buffers."""
        return Contents({**self, **tensors}, self.host)


class World(str, Enum):
    """What stands in the buffers before `refresh` writes to them.

    REFERENCE  what stood there when `verify` was called
    NATURAL    what the case before left there
    HIGH       NaN, and the largest integers that the buffer ever held; LOW: large floats, and the smallest integers.
               Integers stay within the range that was seen: on a device a wilder index ends the process
    """

    REFERENCE = "reference"
    NATURAL = "natural"
    HIGH = "high poison"
    LOW = "low poison"


POISONED = (World.HIGH, World.LOW)


@dataclass(frozen=True)
class Case:
    """One case of make_inputs. `exact_shapes`: of what the oracle returns for it."""

    name: str
    inputs: Inputs
    real: Mapping[str, Any]
    exact_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def named(self) -> Mapping[str, Any]:
        """The inputs by name: none where they are something else, which the caller's own refresh() takes."""
        return self.inputs if isinstance(self.inputs, Mapping) else {}

    def check_real(self, *tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises: ConfigError where `real` names none of these, or gives an index that does not fit."""
        known = {name: tensor for group in tensors for name, tensor in group.items()}
        if unknown := set(self.real) - set(known):
            raise ConfigError(
                f"real: expected names of outputs or state, {sorted(known)}, got {sorted(map(str, unknown))}; name "
                "what run() returns, or what state has"
            )
        for name, index in self.real.items():
            check_part("real", name, known[name], index)

    def counted(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Which elements of an output, or of "state NAME", count; None: all."""
        index = self.real.get(name.removeprefix("state "))
        if index is None:
            shape = self.exact_shapes.get(name)
            if shape is None or shape == tuple(tensor.shape) or len(shape) != tensor.dim():
                return None
            index = tuple(slice(0, extent) for extent in shape)
        return masked(tensor, index)


@dataclass(frozen=True)
class Outcome:
    """What a run gave.

    outputs  copies
    changes  of each state tensor: flat indices of the elements that the run changed, and their new values
    after    the buffers after the run, where they were asked for
    error    what was raised, or ""
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    changes: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    after: dict[str, torch.Tensor] = field(default_factory=dict)
    error: str = ""


class Runs:
    """A target with what is known of its buffers, and counters of what was run."""

    def __init__(self, target: Target, dims: Mapping[str, Sequence[str]]) -> None:
        self.target, self.dims = target, dims
        self.eager_runs = self.replays = 0
        self.ranges: dict[str, tuple[float, float]] = {}
        self.rewritten: frozenset[str] = frozenset()  # buffers that refresh writes to in every case
        self.refreshed: frozenset[str] = frozenset()  # paths of what refresh changes on the host: numbers, which tensor
        self.initial = {name: t.clone() for name, t in target.buffers.items()}
        self.state = {name: t.clone() for name, t in target.state.items()}
        self.hidden: dict[str, torch.Tensor] = {}
        self.carried: Sequence[Held] = ()  # what run() changes on the host: as it is before each run
        self.kept: frozenset[str] = frozenset()  # of both, what a run finds as the run before left it
        self.generators = generators(*target.root)
        self.standing: dict[str, str] = {}  # outputs in memory of before the run -> the tensor that it is, where known
        self._last: dict[str, torch.Tensor] = {}
        self._raw: dict[str, torch.Tensor] = {}

    def restore_state(self) -> None:
        """State and hidden tensors, generators, and host values that run() changes, as at first."""
        self.restore_tensors()
        self.restore_host(self.generators, self.carried)

    def host_state(self) -> tuple[Sequence[tuple[torch.Generator, torch.Tensor]], Sequence[Held]]:
        """Generators, and host values that run() changes, as they are now: for `restore_host`."""
        return [(g, g.get_state()) for g, _ in self.generators], as_now(*self.target.root, self.carried)

    def restore_host(self, standing: Sequence[tuple[torch.Generator, torch.Tensor]], held: Sequence[Held]) -> None:
        for generator, state in standing:
            generator.set_state(state)
        for one in held:
            if one.path not in self.kept:
                one.put_back()

    def restore_tensors(self) -> None:
        for name, tensor in self.target.state.items():
            tensor.copy_(self.state[name])
        for name, tensor in self.target.hidden.items():
            if name not in self.kept:
                tensor.copy_(self.hidden[name])

    @contextmanager
    def starting_from(self, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """A block in which runs start from another state than the first one, and are compared with that."""
        first, self.state = self.state, dict(state)
        try:
            yield
        finally:
            self.state = first

    def contents(self) -> Contents:
        host = self._of_buffers(values_at(*self.target.root, self.refreshed))  # others are not kept: they may be freed
        return Contents({name: t.clone() for name, t in self.target.buffers.items()}, host)

    def put(self, contents: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self.target.buffers.items():
            if name in contents and contents[name].shape == tensor.shape:
                tensor.copy_(contents[name])

    def numbers_of(self, contents: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """A block in which what refresh() left beside these contents stands on the host. Of tensors only those that are
        buffers now: nobody knows what others held."""
        host = contents.host if isinstance(contents, Contents) else {}
        return assigned(*self.target.root, self._of_buffers(host))

    def _of_buffers(self, host: Mapping[str, Any]) -> dict[str, Any]:
        """Without tensors that are no buffers."""
        now = {tensor.untyped_storage().data_ptr() for tensor in self.target.buffers.values()}
        return {
            path: value
            for path, value in host.items()
            if not isinstance(value, torch.Tensor) or value.untyped_storage().data_ptr() in now
        }

    def note_ranges(self) -> None:
        """Widen what is known of the values of integer buffers."""
        for name, tensor in self.target.buffers.items():
            if tensor.numel() and not (tensor.is_floating_point() or tensor.is_complex()):
                low, high = _span(tensor)
                old = self.ranges.get(name, (low, high))
                self.ranges[name] = (min(low, old[0]), max(high, old[1]))

    def fill(self, name: str, tensor: torch.Tensor, world: World) -> None:
        """Poison of a world for all of a buffer, or of a part of it."""
        fill(tensor, world, self.ranges.get(name, (0.0, 0.0)))

    def enter(self, case: Case, world: World) -> Contents:
        """State as at first, a world in the buffers, then `refresh`: what the buffers hold after it."""
        self.restore_state()
        self._set_world(self.rewritten, world)
        self.target.refresh(case.inputs)
        self._set_world(self.target.derived, world)
        return self.contents()

    def before(self, change: Change) -> Any:
        """What stood in the place of a change. One of the buffers itself, as these hold what they should; of another
        tensor a copy of what it held, or None."""
        named = change.tensor is not None and change.tensor.untyped_storage().data_ptr() in self.storages
        return change.tensor if named else change.old

    @property
    def storages(self) -> dict[int, str]:
        """Addresses of the storages of everything that is named, or that was found, with the names."""
        target = self.target
        tensors = {**target.buffers, **target.state, **target.hidden}
        return {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items()}

    def _set_world(self, names: frozenset[str], world: World) -> None:
        if world is World.NATURAL:
            return
        for name, tensor in self.target.buffers.items():
            if name in names:
                if world is World.REFERENCE:
                    self.put({name: self.initial[name]} if name in self.initial else {})
                else:
                    self.fill(name, tensor, world)

    def run(
        self,
        case: Case,
        body: Callable[[], Any],
        contents: Contents,
        *,
        entered: bool = False,
        put: bool = True,
        inputs: Inputs | None = None,
        slots: Mapping[str, Any] | None = None,
        earlier: Mapping[str, Any] | None = None,
        unowned: World | None = None,
        skip: frozenset[str] = frozenset(),
        before: Callable[[], object] | None = None,
        after: bool = False,
        seed: int = SEED,
    ) -> Outcome:
        """One run from the first state with these contents.

        entered  `enter` was just called, and the buffers hold the contents
        put      whether the buffers are to hold the contents, not what refresh left there
        inputs   what refresh is called with, whose numbers stay; the buffers hold `contents` all the same
        slots    host values by path, for the time of the run
        earlier  host values by path that already refresh finds; what it makes of them is undone
        unowned  poison for unowned parts of the state, but for those tensors in `skip`
        before   called last
        after    keep the buffers after the run too
        seed     of torch's random numbers
        """
        root = self.target.root
        with ExitStack() as stack:
            if earlier:
                stack.enter_context(unchanged(*root))
                stack.enter_context(assigned(*root, earlier))
            if not entered:
                self.restore_state()
                for generator, _ in self.generators if seed != SEED else ():
                    generator.manual_seed(seed)
                self.target.refresh(case.inputs if inputs is None else inputs)
                if put:
                    self.put(contents)
                    stack.enter_context(self.numbers_of(contents if inputs is None else {}))
            start = self._poison_unowned(case, unowned, skip)
            if before is not None:
                before()
            stack.enter_context(assigned(*root, slots or {}))
            stack.enter_context(one_seed(self.target.device, seed))
            try:
                raw = self.target.named(body())
            except Exception as error:
                if "CUDA error" in str(error):  # the device is lost: nothing that follows would mean anything
                    raise
                return Outcome(error=raised(error))
        outputs = {name: t.clone() for name, t in raw.items()}
        changes = {name: changed(start.get(name, self.state[name]), t) for name, t in self.target.state.items()}
        if start:
            self.restore_state()
        self._raw = raw
        return Outcome(outputs, changes, self.contents() if after else {})

    def eager(self, case: Case, contents: Contents, **options: Any) -> Outcome:
        """`run` of the subject itself."""
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
                self.standing[name] = named.get(address, "")
        self._last = self._raw  # alive until the next run, which cannot get the same memory then
        return outcome

    def _poison_unowned(self, case: Case, world: World | None, skip: frozenset[str]) -> dict[str, torch.Tensor]:
        """The state as it is then, of the tensors that took poison."""
        if world is None:
            return {}
        start = {}
        for name, index in self.target.unowned(case.inputs).items():
            tensor = self.target.state[name]
            if name not in skip and tensor.numel():
                low, high = (0.0, 0.0) if tensor.is_floating_point() or tensor.is_complex() else _span(tensor)
                part = tensor[index].clone()
                fill(part, world, (low, high))
                tensor[index] = part
                start[name] = tensor.clone()
        return start

    def difference(self, case: Case, have: Outcome, want: Outcome, tolerance: float = 0.0) -> Difference | None:
        """The first output, or state, in which two runs of a case differ where it counts; errors are not looked at."""
        for name, expected in want.outputs.items():
            found = have.outputs.get(name)
            if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
                got = "nothing" if found is None else f"{list(found.shape)} {found.dtype}"
                return Difference(name, (), got, f"{list(expected.shape)} {expected.dtype}", 1, 1, ())
            counted, dims = case.counted(name, expected), self.dims.get(name)
            if wrong := first_difference(name, found, expected, counted=counted, tolerance=tolerance, dims=dims):
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
        tensors = []
        for indices, values in (have, want):
            tensor = self.state[name].clone().flatten()
            tensor[indices] = values
            tensors.append(tensor.view(self.state[name].shape))
        label = f"state {name}"
        counted, dims = case.counted(label, tensors[0]), self.dims.get(name)
        return first_difference(label, *tensors, counted=counted, dims=dims)

    def trespasses(self, case: Case, outcome: Outcome) -> Difference | None:
        """The first unowned element of the state that a run changed."""
        for name, index in self.target.unowned(case.inputs).items():
            indices, values = outcome.changes[name]
            owned = self.state[name].clone()
            touched = owned.clone().flatten()
            touched[indices] = values
            counted = masked(owned, index)
            found = first_difference(f"state {name}", touched.view(owned.shape), owned, counted=counted)
            if found is not None:
                return found
        return None

    def same(self, case: Case, have: Outcome, want: Outcome) -> bool:
        """Whether two runs came to the same: results where they count, or the same error."""
        if have.error or want.error:
            return have.error == want.error
        return self.difference(case, have, want) is None

    @property
    def name(self) -> str:
        return name_of(self.target.subject)


def _flat(changes: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for change in changes.values() for tensor in change]


def _span(tensor: torch.Tensor) -> tuple[float, float]:
    """Smallest and largest of integers. torch has none of either for wide unsigned ones."""
    wide = tensor.dtype in (torch.uint16, torch.uint32, torch.uint64)
    values = tensor.double() if wide else tensor
    return float(values.min()), float(values.max())


def check_part(what: str, name: str, tensor: torch.Tensor, index: Any) -> None:
    """Raises: ConfigError for an index that a tensor does not take."""
    try:
        masked(tensor, index)
    except (IndexError, TypeError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{what}[{name!r}]: expected an index of a tensor of shape {list(tensor.shape)}, got {shown(index)}; "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error


def masked(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """An index as a bool tensor of a tensor's shape."""
    mask = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    mask[index] = True
    return mask


def changed(before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat indices of the elements that differ, and what they are after it. Two NaN do not differ."""
    if after.is_complex():
        indices = differing(after, before).flatten().nonzero().flatten()
        return indices, after.flatten()[indices]
    indices = other_bits(after, before).flatten().nonzero().flatten()
    values = after.flatten()[indices]
    # Of the few that differ, not of a whole cache.
    if len(values) and values.is_floating_point() and bool(is_nan(values).any()):
        differ = differing(values, before.flatten()[indices])
        indices, values = indices[differ], values[differ]
    return indices, values


def fill(tensor: torch.Tensor, world: World, span: tuple[float, float]) -> None:
    """Write poison in place. `span`: smallest and largest value for integers."""
    if tensor.is_conj():
        tensor = tensor.conj()  # the same memory, as it lies there
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    if tensor.is_complex():
        fill(torch.view_as_real(tensor), world, span)
    elif tensor.dtype == torch.bool:
        tensor.fill_(world is World.HIGH)
    elif not tensor.is_floating_point():
        value = min(int(span[1] if world is World.HIGH else span[0]), torch.iinfo(tensor.dtype).max)
        if value >= 1 << 63:  # of uint64 alone, which torch fills with no more than an int64 has
            tensor.view(torch.int64).fill_(value - (1 << 64))
        else:
            tensor.fill_(value)
    elif world is World.HIGH:
        tensor.view(_INTEGERS[tensor.element_size()]).fill_(poison_bits(tensor.dtype))
    else:
        tensor.copy_(torch.full_like(tensor, min(1e4, torch.finfo(tensor.dtype).max / 2)))


class _Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def as_recorded(device: torch.device) -> AbstractContextManager[object]:
    """A block in which torch chooses its kernels as it does for an op trace: some fused ones, as those of
    `torch.nn.TransformerEncoderLayer`, it leaves aside where anything watches."""
    return nullcontext() if device.type == "cuda" else _Passing()


@contextmanager
def one_seed(device: torch.device, seed: int = SEED) -> Iterator[None]:
    """The same random numbers in every run; the caller's generators are as before afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
