"""Calls a decoder of `transformers` on the packed tokens of a step. The only file that imports `transformers`.

Every layer calls `_attention` instead of its own attention function. What the call does depends on the `Calls` of the
forward pass: a step attends to the paged cache, and the run on the meta device records the layer. The caller's model is
changed only during a forward pass, and only for the thread of that pass.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from graphrt.engine.ranks import Ranks
from graphrt.integrations.transformers.experts import dense_experts
from graphrt.integrations.transformers.rotary import RotaryTable
from graphrt.integrations.transformers.sharding import GroupCollectives, group_of
from graphrt.kernels.cache.write import Rotary
from graphrt.kernels.errors import CaptureError, ConfigError, UnsupportedError
from graphrt.models.packages import INSTALL, require
from graphrt.spec import AttentionSpec
from graphrt.step import Step

ATTENTION = "graphrt"
RECORDING = "graphrt_recording"
"""Names of the same attention function. `transformers` builds masks for the second one only."""
_EXPERTS = "graphrt"
_OLDEST = 5, 4
"""The oldest supported version of `transformers`."""
_IMPLEMENTATIONS = "_attn_implementation_internal", "_experts_implementation_internal"
_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"


class LayerCall(NamedTuple):
    """A call of the attention function.

    module   the attention module
    q, k, v  [tokens, heads, size]
    mask     what `Calls.mask` returned, or None
    options  the other arguments
    """

    module: torch.nn.Module
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]


class Calls(Protocol):
    """What the attention layers of one forward pass do."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Return the output of a layer [tokens, num_q_heads, v_head_dim]."""

    def mask(self, predicate: Callable[..., Any]) -> torch.Tensor | None:
        """Return what the layers get as a mask; called only under the name RECORDING."""

    def exceeds(self, length: int) -> torch.Tensor:
        """Return whether each token's request may have more than `length` tokens, bool [tokens]."""


_CALLS: ContextVar[Calls] = ContextVar("graphrt_transformers_calls")
_FORCED: ContextVar[dict[str, str]] = ContextVar("graphrt_transformers_implementations")
_HOSTING = threading.RLock()
"""Held during a forward pass, so that two threads do not replace the same modules."""


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function, as `transformers` calls it, with tensors of [1, heads, tokens, size]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _CALLS.get().attend(LayerCall(module, q, k, v, attention_mask, options))[None], None


def _mask(*, mask_function: Callable[..., Any], **_: Any) -> torch.Tensor | None:
    return _CALLS.get().mask(mask_function)


class _Implementation:
    """A field of all configs, with a value of its own in the thread that runs a forward pass."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __get__(self, config: Any, kind: type) -> Any:
        if config is None:
            return self
        own = vars(config).get(self._field)
        replaced = self._field == _IMPLEMENTATIONS[0] or own in (None, "eager", "grouped_mm")
        return _FORCED.get({}).get(self._field, own) if replaced else own

    def __set__(self, config: Any, value: Any) -> None:
        vars(config)[self._field] = value


def _in_pass(ours: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `ours` in the thread of a forward pass, and `otherwise` in other threads."""
    return lambda *args, **options: (ours if _CALLS.get(None) else otherwise)(*args, **options)


@contextmanager
def reserved(model: Any) -> Iterator[None]:
    """Return a context in which forward passes by any caller except HostedModel raise CaptureError."""

    def refuse(*_: Any) -> None:
        if _CALLS.get(None) is None:
            raise CaptureError(
                "model: expected no forward pass while from_transformers captures the model; wait until it returns"
            )

    hook = model.register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def check_eval(model: Any) -> None:
    """Raise ConfigError if the model is in training mode, in which dropout is random."""
    if model.training:
        raise ConfigError("model: expected eval mode, got training mode; call model.eval()")


def check_attention_functions(model: Any) -> None:
    """Check that no layer calls a custom attention function, because steps would replace the function.

    Raises: UnsupportedError: if a function that is registered for the model is not one of `transformers`.
    """
    registered = require("transformers.modeling_utils", "for from_transformers").ALL_ATTENTION_FUNCTIONS
    for name in {config._attn_implementation for m in model.modules() if (config := getattr(m, "config", None))}:
        function = registered.get(name)
        while isinstance(function, functools.partial):
            function = function.func
        if function is not None and not function.__module__.startswith("transformers."):
            what = getattr(function, "__qualname__", type(function).__qualname__)
            raise UnsupportedError(
                f"model: its attention function is {what} of {function.__module__}, which a step "
                "would replace by paged attention; choose one of transformers, as set_attn_implementation('sdpa') does"
            )


@functools.cache
def package() -> Any:
    """Import `transformers` and register the attention function.

    Raises: ConfigError: if `transformers` is missing or too old.
    """
    transformers = require("transformers", "for from_transformers")
    found = transformers.__version__
    if tuple(int(part) for part in found.split(".")[:2]) < _OLDEST:  # older ones ask for autocast on the meta device
        oldest = ".".join(map(str, _OLDEST))
        raise ConfigError(f"transformers: expected version {oldest} or newer, got {found}; run {INSTALL}")
    for name in (ATTENTION, RECORDING):
        transformers.AttentionInterface.register(name, _attention)
    transformers.AttentionMaskInterface.register(RECORDING, _mask)
    require("transformers.integrations.moe", "for from_transformers").ExpertsInterface.register(_EXPERTS, dense_experts)
    for field in _IMPLEMENTATIONS:
        setattr(transformers.PreTrainedConfig, field, _Implementation(field))
    return transformers


class NoCache:
    """The cache that the layers get: it stores nothing.

    length  the length that it reports: a tensor [tokens], so that index + length is the position of each token in its
            own sequence, or 0 for models that need a number
    """

    def __init__(self, length: torch.Tensor | int) -> None:
        self._length = length

    def get_seq_length(self, layer: int = 0) -> torch.Tensor | int:
        return self._length

    def get_query_offset(self, layer: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        return query_length, 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the layers need {name!r} of their cache, but graphrt caches keys and values only")

    def update(self, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return k, v


class HostedModel(torch.nn.Module):
    """A decoder of `transformers` as a model of graphrt.

    specs   one per call of the attention function, in the order of the calls
    tables  the rotary modules that are replaced by tables
    fused   the operators that replace other modules; see fuse.py
    rotations, namespaces   rotary modules that only name a table for the kernel, and the Python modules whose function
                            `apply_rotary_pos_emb` leaves the rotation to the kernel; see rotation.py
    rotaries    the table of each attention module, or None, by the module and its dtype, if the kernel rotates
    layers      whole layers that are replaced; see layers.py
    attention_modules       the modules that call the attention function
    places  whether the cache reports the position of each token, as a tensor
    group   the ranks over which the model is sharded, or None
    collectives   a context in which graphrt computes the collectives of a sharded model

    Raises: see `group_of`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        package()  # registers the attention function
        self.model = model
        self.specs: list[AttentionSpec] = []
        self.tables: dict[torch.nn.Module, RotaryTable] = {}
        self.fused: dict[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]] = {}
        self.rotations: dict[torch.nn.Module, Any] = {}
        self.namespaces: list[Any] = []
        self.rotaries: dict[tuple[torch.nn.Module, torch.dtype], Rotary | None] = {}
        self.layers: dict[torch.nn.Module, Any] = {}
        self.attention_modules: list[torch.nn.Module] = []
        self.places = True
        self.group = group_of(model)
        self.collectives = nullcontext() if self.group is None else GroupCollectives(self.group)
        parameters = _parameters(model)
        self._cache_name = next((name for name in ("cache", "past_key_values") if name in parameters), None)
        self._keeps_logits = "logits_to_keep" in parameters
        self._routes = "output_router_logits" in parameters
        self._models = [module for module in model.modules() if hasattr(module, _PADDING_CHECK)]

    def register_tables(self) -> None:
        """Register the tables as buffers, so that guards and audits of graphs know their memory."""
        tables = [tensor for of in (*self.tables.values(), *self.rotations.values()) for tensor in of.tensors()]
        for index, table in enumerate(tables):
            self.register_buffer(f"rotary_table_{index}", table, persistent=False)

    def forward(self, step: Step) -> torch.Tensor:
        """Return the logits [padded_reqs, vocab_size], and keep the hidden states that the base model returns.

        Raises: see `check_eval`.
        """
        check_eval(self.model)
        calls = StepCalls(step, self.specs)

        def keep(_: Any, __: Any, output: Any) -> None:
            if _CALLS.get(None) is calls and hasattr(output, "last_hidden_state"):
                step.keep_hidden(output.last_hidden_state[0])

        hook = self.model.base_model.register_forward_hook(keep)
        try:
            return self.run(calls, step.input_ids, step.positions, step.logits_indices)
        finally:
            hook.remove()

    def run(
        self, calls: Calls, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, *, name: str = ATTENTION
    ) -> torch.Tensor:
        """Return the logits of the tokens at `keep`."""
        options: dict[str, Any] = {}
        if self._cache_name is not None:
            before = positions - torch.arange(len(positions), device=positions.device) if self.places else 0
            options[self._cache_name] = NoCache(before)
        if self._keeps_logits:
            options["logits_to_keep"] = keep
        if self._routes:
            options["output_router_logits"] = False  # only training reads them
        with _HOSTING, self._hosting(name, ids.device), _bound(_CALLS, calls), _FilledNumbers(), self.collectives:
            try:
                found = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **options)
            except torch.OutOfMemoryError as error:
                if self.group is not None:
                    Ranks.of(self.group).fail(error)  # the other ranks wait for a collective of this run
                raise
        logits: torch.Tensor = found.logits[0]
        return logits if self._keeps_logits else logits[keep]

    @contextmanager
    def _hosting(self, name: str, device: torch.device) -> Iterator[None]:
        """Set the implementations of attention and experts, and replace modules, for one forward pass."""
        tables: dict[torch.nn.Module, Callable[..., Any]] = {**self.tables, **self.rotations, **self.layers}
        replaced = {module: functools.partial(table, _CALLS) for module, table in tables.items()} | self.fused
        fast = device.type == "cuda" and _has_grouped_mm(self.model.dtype, device)
        forced = dict(zip(_IMPLEMENTATIONS, (name, "grouped_mm" if fast else _EXPERTS), strict=True))
        patched = {module: vars(module)["forward"] for module in replaced if "forward" in vars(module)}
        rotates = [(space, space.apply_rotary_pos_emb) for space in self.namespaces]
        validates = Distribution._validate_args
        try:
            Distribution.set_default_validate_args(False)  # argument checks read values on the host
            for module, forward in replaced.items():
                vars(module)["forward"] = _in_pass(forward, module.forward)
            for module in self._models:  # the check looks for padding on the host
                vars(module)[_PADDING_CHECK] = _in_pass(lambda *_: None, getattr(module, _PADDING_CHECK))
            for space, function in rotates:
                space.apply_rotary_pos_emb = _in_pass(_rotate, function)
            with _bound(_FORCED, forced):
                yield
        finally:
            Distribution.set_default_validate_args(validates)
            for space, function in rotates:
                space.apply_rotary_pos_emb = function
            for module in replaced:
                vars(module).pop("forward", None)
            for module, forward in patched.items():  # set by the caller after the capture
                vars(module)["forward"] = forward
            for module in self._models:
                vars(module).pop(_PADDING_CHECK, None)


def _parameters(model: Any) -> set[str]:
    """Return the arguments of forward. If it takes any by name, it may pass them to the forward of a base class."""
    found = [inspect.signature(model.forward).parameters]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in found[0].values()):
        forwards = [vars(cls)["forward"] for cls in type(model).__mro__ if "forward" in vars(cls)]
        found += [inspect.signature(forward).parameters for forward in forwards]
    return set().union(*found)


class _FilledNumbers(TorchFunctionMode):
    """Makes `torch.tensor(number)` a fill on the device, because a graph cannot copy from the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        number = args[0] if args else options.get("data")
        if func is torch.tensor and isinstance(number, bool | int | float):
            return torch.full((), number, dtype=options.get("dtype"), device=options.get("device"))
        return func(*args, **options)


def _rotate(*args: Any, **options: Any) -> Any:
    calls: Any = _CALLS.get()
    return calls.rotate(*args, **options)


class Rotating:
    """Keeps queries and keys as they are where a layer rotates them, for the attention function to rotate.

    rotated   queries and keys of the next layer
    carried   what a replaced layer returned, the norm that it computed for the next layer, and the weight of this norm
    """

    def __init__(self) -> None:
        self._offered: list[tuple[torch.Tensor, Rotary]] = []
        self._rotary: Rotary | None = None
        self.rotated: tuple[torch.Tensor, ...] = ()
        self.carried: tuple[Any, Any, Any] = None, None, None

    def offer(self, cos: torch.Tensor, rotary: Rotary) -> None:
        """Register a table under the tensor that the layers get in its place."""
        self._offered.append((cos, rotary))

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace `apply_rotary_pos_emb`: return q and k unchanged, and note the table."""
        self._rotary = next((rotary for name, rotary in self._offered if name is cos), None)
        if self._rotary is None:
            raise UnsupportedError("apply_rotary_pos_emb: the model changed what its rotary module returned")
        self.rotated = q, k
        return q, k

    def take_rotary(self) -> Rotary | None:
        """Return the table of the layer, once."""
        rotary, self._rotary = self._rotary, None
        return rotary


class StepCalls(Rotating):
    """Attention over the paged cache of a step."""

    def __init__(self, step: Step, specs: list[AttentionSpec]) -> None:
        super().__init__()
        self._step, self._specs, self._layer = step, specs, 0

    def attend(self, call: LayerCall) -> torch.Tensor:
        layer, sinks = self._layer, call.options.get("s_aux")
        spec = self._specs[layer]
        self._layer += 1
        q, k, v = (_ready(x, spec.dtype) for x in (call.q, call.k, call.v))
        new = (k, v) if spec.kv_shared_with is None else (None, None)
        sinks = None if sinks is None else sinks.float()
        return self._step.attend(layer, q, *new, rotary=self.take_rotary(), sinks=sinks)

    def next_layer(self) -> tuple[Step, int]:
        """Return the step, and the index of the next layer, which calls its operators instead of `attend`."""
        self._layer += 1
        return self._step, self._layer - 1

    def mask(self, predicate: Callable[..., Any]) -> torch.Tensor | None:
        return None

    def exceeds(self, length: int) -> torch.Tensor:
        step = self._step
        request = step.req_indices.long().clamp(min=0)
        limits = torch.maximum(step.metadata.seq_lens, step.buffers.length_limits[request]) > length
        tokens = torch.arange(len(step.positions), device=step.positions.device)
        row = torch.searchsorted(step.metadata.query_start_loc.long(), tokens, right=True) - 1
        return limits[row.clamp(0, len(limits) - 1)]


def _ready(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


@contextmanager
def _bound(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _has_grouped_mm(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `grouped_mm` is one kernel. Otherwise torch reads the group sizes on the host."""
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)
