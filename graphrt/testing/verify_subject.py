"""What `verify` verifies: the caller's own runner of a captured step, or a plain function made into one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_map

from graphrt.kernels.checks import check_instance, shown
from graphrt.kernels.errors import ConfigError
from graphrt.testing.canary import BrokenCanary, Canaries
from graphrt.testing.verify_checks import check_pad, check_parts, check_subject, check_tensor_value
from graphrt.testing.verify_report import same_bits

Inputs = Mapping[str, Any]
"""What one case hands to `refresh`: tensors, numbers, and in the object form whatever the caller's code takes."""

Output = torch.Tensor | Sequence[Any] | Mapping[str, Any] | None
"""What a step returns: tensors, in tuples, lists and dicts."""

Parts = Mapping[str, Any]
"""By name of an output or of a state tensor: an index of torch that says which part is meant."""


class Subject(Protocol):
    """A captured step with the host code around it.

    buffers            the static tensors by name, as they are now: the graph reads these, `refresh` fills them
    refresh(inputs)    the host code before a launch. The same inputs must leave the same contents in the buffers. If an
                       allocator hands out places in turn, call it in make_inputs
    run()              the body that is captured; returns a tensor, several, or a dict of tensors. If it returns None,
                       its results are the buffers that it changes

    These are optional, and looked up by name:

    state              tensors by name that persist from step to step: KV cache, counters. Restored before every run,
                       and compared after it
    derived            names of buffers that `run` itself rewrites in full before it reads them
    eager(inputs)      the same computation without padding, static buffers or a graph: the oracle. It returns results.
                       It starts from the same `state` as `run`, as given and as another case left it, and reads what is
                       to go on; it may change the state as the step should
    real(inputs)       which part of each output, and of each state tensor, counts: {"out": slice(0, n)}. Left out, the
                       shapes of what `eager` returns say it for outputs, and else everything counts
    unowned(inputs)    which part of each state tensor the step may neither read nor write: {"kv": free_pages}
    capture(inputs)    captures by the caller's own code, after refresh(inputs), and returns a function that launches
                       the graph and returns its outputs
    canaries           a `Canaries` from which the buffers were allocated
    host               (object, name): where numbers and tensors are looked for that a graph may have frozen, and what
                       to call it. By default the subject itself, "self"
    """

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]: ...

    def refresh(self, inputs: Inputs) -> None: ...

    def run(self) -> Output: ...


class Target:
    """A subject with all of its optional parts there."""

    def __init__(self, subject: Any, eager: Callable[..., Output] | None) -> None:
        for name in ("buffers", "refresh", "run"):
            if not hasattr(subject, name):
                raise ConfigError(
                    f"step: expected a function, or an object with buffers, refresh and run, got one without {name}; "
                    "see graphrt.testing.verify_subject.Subject"
                )
        check_subject(subject)
        self.subject = subject
        self._eager: Callable[[Inputs], Output] | None = getattr(subject, "eager", None)
        self.is_own_oracle = eager is None and isinstance(subject, PlainSubject)  # on tensors of exact size
        if eager is not None:
            self._eager = eager if not isinstance(subject, PlainSubject) else subject.oracle(eager)
        self.capture: Callable[[Inputs], Callable[[], Output]] | None = getattr(subject, "capture", None)
        self.canaries: Canaries | None = getattr(subject, "canaries", None)
        own = (subject.step, "step") if isinstance(subject, PlainSubject) else (subject, "self")
        self.root: tuple[Any, str] = getattr(subject, "host", own)
        self.derived = frozenset(getattr(subject, "derived", ()))
        self.found: dict[str, torch.Tensor] = {}  # buffers that the caller did not name
        self.hidden: dict[str, torch.Tensor] = {}  # tensors that run() changes in place, and that nobody named
        self.results: frozenset[str] = frozenset()  # buffers that hold the results of a step that returns nothing
        self._real = getattr(subject, "real", None)
        self._unowned = getattr(subject, "unowned", None)
        self.state: dict[str, torch.Tensor] = dict(getattr(subject, "state", None) or {})
        if unknown := self.derived - set(self.buffers):
            raise ConfigError(f"derived: expected names of buffers, got {sorted(unknown)}; name what buffers has")

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now."""
        return {**self.subject.buffers, **self.found}

    @property
    def has_oracle(self) -> bool:
        return self._eager is not None

    def eager(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """What the oracle makes of inputs, of which it gets copies, by name."""
        assert self._eager is not None, "asked for where there is one"
        return named_outputs(self._eager(copied_inputs(inputs)))

    def refresh(self, inputs: Inputs) -> None:
        """Fill the buffers from inputs, of which the subject gets copies."""
        self.subject.refresh(copied_inputs(inputs))

    def run(self) -> dict[str, torch.Tensor]:
        """Run the body: what it returns by name, or, where it returns nothing, the buffers that it changes."""
        return self.named(self.subject.run())

    def named(self, result: Output) -> dict[str, torch.Tensor]:
        """What a run, or a launch of the caller's own graph, returned."""
        found = named_outputs(result)
        return found or {name: tensor for name, tensor in self.buffers.items() if name in self.results}

    @property
    def device(self) -> torch.device:
        """Where the step runs: on CUDA if any of its tensors is there."""
        tensors = [*self.buffers.values(), *self.state.values()]
        return next((t.device for t in tensors if t.is_cuda), torch.device("cpu"))

    @property
    def has_unowned(self) -> bool:
        return self._unowned is not None

    def real(self, inputs: Inputs) -> dict[str, Any]:
        return check_parts("real", self._real(inputs)) if self._real is not None else {}

    def unowned(self, inputs: Inputs) -> dict[str, Any]:
        found = check_parts("unowned", self._unowned(inputs)) if self._unowned is not None else {}
        if unknown := set(found) - set(self.state):
            raise ConfigError(f"unowned: expected names of state, got {sorted(unknown)}; name what state has")
        return found

    @property
    def makes_of_inputs(self) -> str:
        """Who makes values of the host out of its inputs."""
        who = "the step" if isinstance(self.subject, PlainSubject) else "refresh()"
        return f"{who} makes of its inputs"

    @property
    def why_unwritten(self) -> str:
        """What to do about a part of a buffer that is not written for a case."""
        if isinstance(self.subject, PlainSubject):
            return "a smaller case writes nothing there; mask what is read of it, or say with pad= what stands there"
        return "refresh() does not write it for this case; write it, or mask what is read of it"

    def broken(self) -> list[BrokenCanary]:
        return self.canaries.broken() if self.canaries is not None else []


class PlainSubject:
    """A plain function with static buffers around it, one for each input that is a tensor in some case.

    A buffer has the largest extents that its input has in any case. A smaller input fills the beginning; what stands
    behind it is `pad[name]` where that is given, and else whatever was there.
    """

    def __init__(
        self,
        step: Callable[..., Output],
        cases: Sequence[Inputs],
        pad: Mapping[str, float],
        state: Mapping[str, torch.Tensor],
    ) -> None:
        check_instance("pad", pad, Mapping, advice="pass a dict of input names")
        self.step, self.state = step, state
        self.canaries = Canaries()
        self.pad = dict(pad)
        self._in_place: dict[str, None] = {}
        self.scalars: dict[str, Any] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        first = cases[0]
        if unknown := set(pad) - set(first):
            raise ConfigError(f"pad: expected names of inputs, got {sorted(unknown)}; name what make_inputs gives")
        for inputs in cases:
            if not isinstance(inputs, Mapping) or set(inputs) != set(first):
                raise ConfigError(
                    f"make_inputs: expected the names {sorted(first)} in every case, got "
                    f"{sorted(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__}; give all in each"
                )
        for name in first:
            if tensors := [inputs[name] for inputs in cases if isinstance(inputs[name], torch.Tensor)]:
                self.buffers[name] = self._allocate(name, tensors)
            elif name in pad:
                raise ConfigError(f"pad: expected names of tensors, got {name}, which is none; leave it out")

    def _allocate(self, name: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
        for value in values:
            check_tensor_value(name, value)
        kinds = {(v.dtype, v.device, v.dim()) for v in values}
        if len(kinds) > 1:
            raise ConfigError(f"{name}: expected one dtype, device and number of dimensions, got {kinds}; convert it")
        if name in self.pad:
            check_pad(name, self.pad[name], values[0].dtype)
        shape = [max(v.shape[dim] for v in values) for dim in range(values[0].dim())]
        return self.canaries.full(name, shape, values[0].dtype, values[0].device, self.pad.get(name, 0))

    def refresh(self, inputs: Inputs) -> None:
        self.scalars = {name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor)}
        for name, buffer in self.buffers.items():
            if name in self.scalars:
                continue
            if name in self.pad:
                buffer.fill_(self.pad[name])
            buffer[tuple(slice(0, extent) for extent in inputs[name].shape)].copy_(inputs[name])

    def run(self) -> Output:
        result = named_outputs(self.step(**{**self.buffers, **self.scalars}))
        return result | {_in_place(name): self.buffers[name] for name in self._in_place}

    def eager(self, inputs: Inputs) -> Output:
        return self._eager(self.step, inputs)

    def oracle(self, function: Callable[..., Output]) -> Callable[[Inputs], Output]:
        """The caller's own oracle: a function of the same arguments."""
        return lambda inputs: self._eager(function, inputs)

    def _eager(self, function: Callable[..., Output], inputs: Inputs) -> dict[str, torch.Tensor]:
        """On copies of its own, which also show what the function changes in place: that is a result as well."""
        own = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
        before = {name: v.clone() for name, v in own.items() if isinstance(v, torch.Tensor)}
        result = {name: t.clone() for name, t in named_outputs(function(**own)).items()}
        for name, old in before.items():
            if old.dtype.itemsize and not same_bits([old], [own[name]]):
                self._in_place[name] = None
        return result | {_in_place(name): own[name] for name in self._in_place}

    def __str__(self) -> str:
        return name_of(self.step)


def _in_place(name: str) -> str:
    return f"{name} (changed in place)"


def name_of(step: Any) -> str:
    """What to call a step in a report."""
    if isinstance(step, PlainSubject):
        return str(step)
    return str(getattr(step, "__qualname__", None) or type(step).__name__)


def copied_inputs(inputs: Any) -> Any:
    """Inputs with tensors, arrays, dicts, lists and tuples of their own: whoever has the others may write to them.
    Objects, and mappings that are no dicts, stay what they are."""
    return tree_map(_copied, inputs)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        with torch.inference_mode(value.is_inference()):  # other tensors count who wrote to them
            return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def named_outputs(result: Any) -> dict[str, torch.Tensor]:
    """The tensors that a step returned, by name: "out", or "out[0]", "out[1]", ..., or the keys of a dict. Dicts and
    tuples may lie in each other, as "out[1][0]", and hold None for what there is not."""
    named: dict[str, torch.Tensor] = {}
    _collect(named, result, "out", is_all=True)
    return named


def _collect(named: dict[str, torch.Tensor], value: Any, name: str, *, is_all: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, torch.Tensor):
        if name in named:
            raise ConfigError(f"step: expected results of different names, got two called {name!r}; rename one")
        named[name] = check_tensor_value(name, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(named, item, str(key) if is_all else f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            _collect(named, item, f"{name}[{index}]")
    elif is_all:
        raise ConfigError(
            f"step: expected a tensor, a tuple or a dict of tensors, got {type(value).__name__}; return its tensors"
        )
    else:
        raise ConfigError(f"{name}: expected a tensor, got {type(value).__name__}; return tensors only")


def is_plain(step: Any) -> bool:
    """Whether a step is a plain function, not an object with host code around one."""
    return callable(step) and not (hasattr(step, "refresh") and hasattr(step, "run"))


def check_takes(step: Callable[..., Any], inputs: Inputs) -> None:
    """Raises: ConfigError where a step does not take what make_inputs gives."""
    if not isinstance(inputs, Mapping) or not all(isinstance(name, str) for name in inputs):
        raise ConfigError(f"make_inputs: expected arguments by name, got {shown(inputs)}; return a dict")
    try:
        inspect.signature(step).bind(**inputs)
    except TypeError as error:
        raise ConfigError(f"make_inputs: expected the arguments of {name_of(step)}, got others: {error}") from error
    except ValueError:  # a builtin without a signature
        return
