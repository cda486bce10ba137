"""The step that `verify` checks: the caller's own runner of a captured step, or a plain function wrapped as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_map

from graphrt.kernels.checks import check_instance, shown
from graphrt.kernels.errors import ConfigError
from graphrt.testing.canary import Canaries
from graphrt.testing.verify.arguments import check_tensor, check_tensors
from graphrt.testing.verify.compare import same_bits

Inputs = Mapping[str, Any]
"""The inputs of a case: tensors and numbers by name. A `Subject` may take any other object."""

Output = torch.Tensor | Sequence[Any] | Mapping[str, Any] | None
"""The results of a step: tensors, or tuples, lists and dicts of them."""


class Subject(Protocol):
    """A captured step together with the host code that fills its static buffers.

    buffers            the current static tensors by name; `refresh` writes them, and the graph reads them
    refresh(inputs)    the host code before a launch. Equal inputs must produce equal buffer contents, so call an
                       allocator that assigns successive pages in make_inputs instead
    run()              the captured body. Returns a tensor, several tensors, or a dict of tensors; if None, its results
                       are the buffers that it changes

    Optional attributes and methods:

    state              tensors by name that persist between steps, such as a KV cache. They are restored before each
                       run and compared after it
    derived            names of buffers that `run` overwrites before it reads them
    eager(inputs)      the oracle, which is the same computation without padding, static buffers or a graph. It starts
                       from the same `state` as `run`, and may update the state as the step should
    real(inputs)       the part of each output and state tensor to compare, as an index: {"out": slice(0, n)}.
                       By default, determined by the shapes of the oracle's outputs; all of the state is compared
    unowned(inputs)    the part of each state tensor that the step must not read or write, as in {"kv": free_pages}
    capture(inputs)    captures with the caller's own code after refresh(inputs). Returns a function that launches the
                       graph and returns its outputs
    canaries           the `Canaries` from which the buffers were allocated
    host               (object, name): object to search for Python values that a graph may have frozen, and its name in
                       the report. The default is (self, "self")
    """

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]: ...

    def refresh(self, inputs: Inputs) -> None: ...

    def run(self) -> Output: ...


class Target:
    """A subject with defaults for its optional members.

    Attributes:
        found: buffers that `refresh` writes and that the caller did not name.
        hidden: tensors that `run` changes in place and that the caller did not name.
        results: names of the buffers that hold the results of a step that returns None.
    """

    def __init__(self, subject: Any, eager: Callable[..., Output] | None) -> None:
        for name in ("buffers", "refresh", "run"):
            if not hasattr(subject, name):
                raise ConfigError(
                    f"step: {shown(subject)} is not callable and has no attribute {name}; pass a function, or an "
                    "object as described by graphrt.testing.verify.Subject"
                )
        check_tensors("buffers", subject.buffers)
        self.subject = subject
        self._eager: Callable[[Inputs], Output] | None = getattr(subject, "eager", None)
        self.is_own_oracle = eager is None and isinstance(subject, PlainSubject)  # the step on tensors of exact size
        if eager is not None:
            self._eager = eager if not isinstance(subject, PlainSubject) else subject.oracle(eager)
        self.capture: Callable[[Inputs], Callable[[], Output]] | None = getattr(subject, "capture", None)
        self.canaries: Canaries | None = getattr(subject, "canaries", None)
        own = (subject.step, "step") if isinstance(subject, PlainSubject) else (subject, "self")
        self.root: tuple[Any, str] = getattr(subject, "host", own)
        self.derived = frozenset(getattr(subject, "derived", ()))
        self.found: dict[str, torch.Tensor] = {}
        self.hidden: dict[str, torch.Tensor] = {}
        self.results: frozenset[str] = frozenset()
        self._real = getattr(subject, "real", None)
        self._unowned = getattr(subject, "unowned", None)
        self.state = check_tensors("state", getattr(subject, "state", None) or {})
        if unknown := self.derived - set(self.buffers):
            raise ConfigError(f"derived: unknown buffers {sorted(unknown)}; use names of `buffers`")

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The current buffers."""
        return {**self.subject.buffers, **self.found}

    @property
    def has_oracle(self) -> bool:
        return self._eager is not None

    def eager(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Run the oracle on a copy of the inputs."""
        assert self._eager is not None, "callers check has_oracle"
        return named_outputs(self._eager(copied_inputs(inputs)))

    def refresh(self, inputs: Inputs) -> None:
        """Fill the buffers from a copy of the inputs."""
        self.subject.refresh(copied_inputs(inputs))

    def run(self) -> dict[str, torch.Tensor]:
        """Run the body and return its results by name."""
        return self.named(self.subject.run())

    def named(self, result: Output) -> dict[str, torch.Tensor]:
        """Return the results of a run or launch by name; if it returned None, the buffers that it changes."""
        found = named_outputs(result)
        return found or {name: tensor for name, tensor in self.buffers.items() if name in self.results}

    @property
    def device(self) -> torch.device:
        """The CUDA device of the buffers and state, or the CPU."""
        tensors = [*self.buffers.values(), *self.state.values()]
        return next((t.device for t in tensors if t.is_cuda), torch.device("cpu"))

    @property
    def has_unowned(self) -> bool:
        return self._unowned is not None

    def real(self, inputs: Inputs) -> dict[str, Any]:
        return _parts("real", self._real, inputs)

    def unowned(self, inputs: Inputs) -> dict[str, Any]:
        found = _parts("unowned", self._unowned, inputs)
        if unknown := set(found) - set(self.state):
            raise ConfigError(f"unowned: unknown state tensors {sorted(unknown)}; use names of `state`")
        return found

    @property
    def why_unwritten(self) -> str:
        """Advice for a part of a buffer that is not written for a case."""
        if isinstance(self.subject, PlainSubject):
            return "a smaller case does not write it; mask it, or set pad= to the value that your code writes there"
        return "refresh() does not write it for this case; write it, or mask it"


def _parts(what: str, method: Callable[[Inputs], Any] | None, inputs: Inputs) -> dict[str, Any]:
    found = method(inputs) if method is not None else {}
    return dict(check_instance(what, found, Mapping, advice="return a dict of indices by tensor name, {} for none"))


class PlainSubject:
    """A plain function with one static buffer for each input that is a tensor in some case.

    A buffer has the largest extents of its input. A smaller input is copied to its start. The rest is `pad[name]`
    if given; otherwise it keeps its old contents.
    """

    def __init__(
        self,
        step: Callable[..., Output],
        cases: Sequence[Inputs],
        pad: Mapping[str, float],
        state: Mapping[str, torch.Tensor],
    ) -> None:
        check_instance("pad", pad, Mapping, advice="pass a dict by input name")
        self.step, self.state = step, state
        self.canaries = Canaries()
        self.pad = dict(pad)
        self._in_place: dict[str, None] = {}
        self.scalars: dict[str, Any] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        first = cases[0]
        if unknown := set(pad) - set(first):
            raise ConfigError(f"pad: unknown inputs {sorted(unknown)}; use names that make_inputs returns")
        for inputs in cases:
            if not isinstance(inputs, Mapping) or set(inputs) != set(first):
                names = sorted(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
                raise ConfigError(
                    f"make_inputs: expected the names {sorted(first)} in every case, got {names}; return all of them"
                )
        for name in first:
            if tensors := [inputs[name] for inputs in cases if isinstance(inputs[name], torch.Tensor)]:
                self.buffers[name] = self._allocate(name, tensors)
            elif name in pad:
                raise ConfigError(f"pad: {name} is not a tensor and is not padded; remove it from pad")

    def _allocate(self, name: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
        for value in values:
            check_tensor(name, value)
        kinds = {(v.dtype, v.device, v.dim()) for v in values}
        if len(kinds) > 1:
            raise ConfigError(
                f"{name}: dtype, device or number of dimensions differ between cases: {kinds}; use the same in every "
                f"case"
            )
        shape = [max(v.shape[dim] for v in values) for dim in range(values[0].dim())]
        buffer = self.canaries.full(name, shape, values[0].dtype, values[0].device)
        try:
            return buffer.fill_(self.pad.get(name, 0))
        except (RuntimeError, TypeError) as error:
            text = f"{buffer.dtype} cannot hold {shown(self.pad[name])}; pass a value of the buffer's dtype"
            raise ConfigError(f"pad[{name!r}]: {text}") from error

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
        """Wrap the caller's oracle, a function of the same arguments."""
        return lambda inputs: self._eager(function, inputs)

    def _eager(self, function: Callable[..., Output], inputs: Inputs) -> dict[str, torch.Tensor]:
        """Run a function on copies of the inputs. Inputs that it changes in place are also results."""
        own = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
        before = {name: v.clone() for name, v in own.items() if isinstance(v, torch.Tensor)}
        result = {name: t.clone() for name, t in named_outputs(function(**own)).items()}
        for name, old in before.items():
            if not same_bits([old], [own[name]]):
                self._in_place[name] = None
        return result | {_in_place(name): own[name] for name in self._in_place}

    def __str__(self) -> str:
        return name_of(self.step)


def _in_place(name: str) -> str:
    return f"{name} (changed in place)"


def name_of(step: Any) -> str:
    """Return the name of a step for the report."""
    if isinstance(step, PlainSubject):
        return str(step)
    return str(getattr(step, "__qualname__", None) or type(step).__name__)


def copied_inputs(inputs: Any) -> Any:
    """Copy the tensors, arrays, dicts, lists and tuples of inputs, because the step or caller may change them."""
    return tree_map(_copied, inputs)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        with torch.inference_mode(value.is_inference()):  # keep version counters if there are any
            return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def named_outputs(result: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in a step's result by name: "out", or "out[0]", "out[1]", ..., or the keys of a dict.

    Dicts and tuples may be nested, as in "out[1][0]". None values are skipped.
    """
    named: dict[str, torch.Tensor] = {}
    _collect(named, result, "out", is_all=True)
    return named


def _collect(named: dict[str, torch.Tensor], value: Any, name: str, *, is_all: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, torch.Tensor):
        if name in named:
            raise ConfigError(f"step: two results are named {name!r}; rename one")
        named[name] = check_tensor(name, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(named, item, str(key) if is_all else f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            _collect(named, item, f"{name}[{index}]")
    else:
        raise ConfigError(f"{name}: expected a tensor, got {type(value).__name__}; return tensors only")


def is_plain(step: Any) -> bool:
    """Return whether a step is a plain function rather than an object with host code."""
    return callable(step) and not (hasattr(step, "refresh") and hasattr(step, "run"))
