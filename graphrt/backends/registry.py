"""The known backends, and selection among them by name, or by capability and measured time."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points

import torch

from graphrt import env
from graphrt.backends.base import AttentionBackend
from graphrt.backends.capabilities import BackendContext, Capabilities, GraphSupport
from graphrt.backends.ranking import Ranking, load_ranking
from graphrt.backends.two_parts import two_part_unsupported_reasons
from graphrt.kernels.checks import check_bool, check_instance, check_int, shown
from graphrt.kernels.errors import ConfigError, UnsupportedError

ENTRY_POINT_GROUP = "graphrt.backends"

# In order of preference without measured times. The module of a backend is imported when it is first considered, its
# package when it is used.
_BUILTIN = {
    "triton": "graphrt.backends.triton:TritonBackend",
    "flash_attn3": "graphrt.backends.flash_attn3:FlashAttention3Backend",
    "flash_attn2": "graphrt.backends.flash_attn2:FlashAttention2Backend",
    "flashinfer": "graphrt.backends.flashinfer:FlashInferBackend",
    "torch_reference": "graphrt.backends.torch_reference:TorchReferenceBackend",
}
_LAST_RESORT = "torch_reference"

ONE_PART = "none"
"""Value of RuntimeConfig.prefill_backend for which one backend serves whole mixed steps."""

_registered: dict[str, type[AttentionBackend]] = {}


def register_backend(cls: type[AttentionBackend]) -> type[AttentionBackend]:
    """Register a backend class under its `name`. Usable as a decorator.

    A package can declare an entry point of the group `graphrt.backends` instead, and then need not be imported.

    Raises:
        ConfigError: if the name is taken, or a required class attribute or method is missing or wrong.
    """
    check_declaration(cls)
    if cls.name in _BUILTIN or _registered.get(cls.name, cls) is not cls:
        raise ConfigError(f"register_backend: the name {cls.name!r} is taken; choose another name")
    _registered[cls.name] = cls
    return cls


def check_declaration(cls: object) -> None:
    """Check the class attributes and methods of a backend class.

    Raises:
        ConfigError: if a class attribute or method is missing or wrong.
    """
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
        raise ConfigError(f"backend: expected a subclass of AttentionBackend, got {shown(cls)}; derive from it")
    own = cls.__name__
    name = getattr(cls, "name", None)
    if not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(f"{own}.name: expected an identifier, got {shown(name)}; set the class attribute")
    for attribute, kind in (("capabilities", Capabilities), ("graph_support", GraphSupport)):
        check_instance(f"{own}.{attribute}", getattr(cls, attribute, None), kind, advice="set the class attribute")
    check_int(f"{own}.seq_len_fill", cls.seq_len_fill, 0, 1, advice="padding requests have only the null page")
    check_bool(f"{own}.quantizes_queries", cls.quantizes_queries, advice="set the class attribute")
    for final, hook in (
        ("unsupported_reasons", "extra_unsupported_reasons"),
        ("graph_unsupported_reason", "extra_graph_unsupported_reason"),
    ):
        if inspect.getattr_static(cls, final) is not inspect.getattr_static(AttentionBackend, final):
            raise ConfigError(
                f"{own}.{final}: must not be overridden, because it enforces the class attributes; define {hook} "
                f"instead"
            )
    if inspect.isabstract(cls):
        raise ConfigError(f"{own}.run: not defined; define it")


def backend_names() -> list[str]:
    """Return all known backends in order of preference: built-in, installed, registered, then torch_reference.

    Measured times, where a device has them, replace this order; see `standings`.
    """
    preferred = [name for name in _BUILTIN if name != _LAST_RESORT]
    return list(dict.fromkeys([*preferred, *_third_party(), *_registered, _LAST_RESORT]))


def backend_class(name: str, what: str = "backend") -> type[AttentionBackend]:
    """Return the class of a backend by name.

    what   the option that specified it, for errors

    Raises:
        ConfigError: if the name is unknown, or its entry point cannot be loaded.
    """
    if name in _BUILTIN:
        module, attribute = _BUILTIN[name].split(":")
        cls: type[AttentionBackend] = getattr(importlib.import_module(module), attribute)
        return cls
    if name in _registered:
        return _registered[name]
    entry = _third_party().get(name)
    if entry is None:
        raise ConfigError(
            f"{what}: expected one of {', '.join(backend_names())}, got {name!r}; choose one of these, or register a "
            f"backend with graphrt.register_backend"
        )
    return _load(entry)


@dataclass(frozen=True, slots=True)
class Standing:
    """The rank of a backend for one context.

    unsupported_reasons   every reason why it cannot serve the context; empty if it can
    rank                  1 for the backend that is selected by default, then 2, ...; None if it cannot serve
    relative              its measured time relative to the fastest backend that can serve; None in order of preference
    """

    name: str
    unsupported_reasons: list[str]
    rank: int | None = None
    relative: float | None = None


def select_backend(context: BackendContext, name: str | None = None) -> tuple[type[AttentionBackend], str]:
    """Return the backend for `context`, and why it was selected.

    With a name, the result is the named backend. Without a name, it is the first of `standings`, which is the fastest
    supported backend of the measured table (see ranking.py), else the first supported backend in order of preference.

    Raises:
        ConfigError: if the name is unknown.
        UnsupportedError: if no backend supports the context; the message lists every reason.
    """
    if name is not None:
        what = "backend, by name or GRAPHRT_BACKEND" if name == env.backend() else "backend"
        cls, reasons = backend_class(name, what), unsupported_reasons(name, context)
        if reasons:
            raise UnsupportedError(
                f"{what} {name}: does not support this model and device: {'; '.join(reasons)}; choose another backend"
            )
        return cls, f"{name}: chosen by name"
    found = standings(context, stop_at_the_first=True)
    skipped = [f"{s.name} ({', '.join(s.unsupported_reasons)})" for s in found if s.rank is None]
    chosen = next((s for s in found if s.rank == 1), None)
    if chosen is None:
        raise UnsupportedError(
            f"backend: no backend supports this model on {context.device}: {'; '.join(skipped)}; change the model's "
            "options or the device"
        )
    why = f"{chosen.name}: first in order of preference that supports device {context.device.type}"
    others = sorted((s.relative, s.name) for s in found if s.relative is not None and s is not chosen)
    if chosen.relative is not None and others:
        slower = ", ".join(f"{name} {relative:.2f}" for relative, name in others)
        why = f"{chosen.name}: fastest of {len(others) + 1} supported backends (1.00; {slower} on {load_ranking().gpu})"
    elif chosen.relative is not None:
        why = f"{chosen.name}: the only supported backend of those measured on {load_ranking().gpu}"
    return backend_class(chosen.name), "; ".join([why, *(f"not {text}" for text in skipped)])


def select_prefill(
    context: BackendContext, decode: type[AttentionBackend], name: str | None
) -> tuple[type[AttentionBackend] | None, str]:
    """Return the class that serves the prefill part of mixed steps, and why; None: `decode` serves whole steps.

    With a name, the result is the named backend. Without a name, it is the fastest combination in the measured table
    for a runtime of this size. If the table was measured on another GPU, or the layers are not 16-bit, `decode` serves
    whole steps.

    Raises:
        ConfigError: if the name is unknown.
        UnsupportedError: if the named backend cannot serve the part; the message lists every reason.
    """
    if not context.mixed_batches:
        return None, ""
    if name == ONE_PART:
        return None, f"{decode.name}, as requested"
    if name is not None:
        cls = backend_class(name, "prefill_backend").prefill_class()
        reasons = two_part_unsupported_reasons(context, decode, cls)
        if cls is None or reasons:
            raise UnsupportedError(
                f"prefill_backend {name}: cannot serve the prefill part of mixed steps with {decode.name}: "
                f"{'; '.join(reasons)}; choose another, or {ONE_PART!r}"
            )
        return cls, f"{name}, chosen by name"
    ranking = load_ranking().mixed
    sizes = {dtype.itemsize for dtype in (*(s.dtype for s in context.attention), *(g.dtype for g in context.kv_groups))}
    measured = context.device.type == "cuda" and torch.cuda.is_available() and sizes == {2}
    if not measured or torch.cuda.get_device_name(context.device) != ranking.gpu:
        return None, ""
    found: dict[str, type[AttentionBackend] | None] = {decode.name: None}
    for pair in ranking.names - {decode.name}:
        ours, _, other = pair.partition("+")
        if ours == decode.name:
            with contextlib.suppress(ConfigError, UnsupportedError):  # not installed, or cannot be loaded
                cls = backend_class(other).prefill_class()
                if not two_part_unsupported_reasons(context, decode, cls):
                    found[pair] = cls
    relative = ranking.relative_times(found, max_num_reqs=context.max_num_reqs, max_seq_len=context.max_seq_len)
    if not relative:
        return None, ""
    first, *others = relative
    slower = "".join(f"; {pair} {relative[pair]:.2f}" for pair in others)
    return found[first], f"{first}, fastest of {len(relative)} (1.00{slower} on {ranking.gpu})"


def unsupported_reasons(name: str, context: BackendContext) -> list[str]:
    """Return every reason why a known backend cannot serve `context`, such as a package that cannot be loaded."""
    return _standing(name, context).unsupported_reasons


def standings(context: BackendContext, *, stop_at_the_first: bool = False) -> list[Standing]:
    """Return all known backends, in order of preference, with their ranks or the reasons against them.

    Backends with a measured time are considered first, since the fastest of them is selected. With `stop_at_the_first`,
    the others are considered only until one is supported, because importing a backend takes seconds.
    """
    # On a CPU, kernels of Triton are interpreted, which takes thousands of times as long as any other backend.
    names = sorted(backend_names(), key=lambda name: context.device.type == "cpu" and name == "triton")
    ranking = load_ranking() if context.device.type == "cuda" else Ranking()  # measured on GPUs only
    measured = [name for name in names if name in ranking.names and name != _LAST_RESORT]
    found = {name: _standing(name, context) for name in measured}
    relative = ranking.relative_times(
        [name for name in measured if not found[name].unsupported_reasons],
        max_num_reqs=context.max_num_reqs,
        max_seq_len=context.max_seq_len,
    )
    order = list(relative)
    for name in names:
        if stop_at_the_first and order:
            break
        if name not in found:
            found[name] = _standing(name, context)
        if not found[name].unsupported_reasons and name not in relative:
            order.append(name)
    return [
        replace(found[name], rank=order.index(name) + 1 if name in order else None, relative=relative.get(name))
        for name in names
        if name in found
    ]


def _standing(name: str, context: BackendContext) -> Standing:
    """Return the standing of one backend, without its rank.

    An exception in a third-party class is a reason against it, so that other backends are still considered. An
    exception in a built-in class is a bug and propagates.
    """
    question = "loading it"
    try:
        cls = backend_class(name)
        question = "unsupported_reasons"
        return Standing(name, cls.unsupported_reasons(context))
    except (ConfigError, UnsupportedError) as error:
        return Standing(name, [str(error)])
    except Exception as error:
        if name in _BUILTIN:
            raise
        return Standing(name, [f"{question} raised {type(error).__name__}: {error}"])


def _third_party() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP) if entry.name not in _BUILTIN}


def _load(entry: EntryPoint) -> type[AttentionBackend]:
    try:
        cls = entry.load()
    except Exception as error:  # an import of a third-party module may raise anything
        raise ConfigError(
            f"backend {entry.name}: {entry.value} cannot be imported ({type(error).__name__}: {error}); repair or "
            "uninstall the package that declares it"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend) and getattr(cls, "name", None) == entry.name):
        raise ConfigError(
            f"backend {entry.name}: expected {entry.value} to be an AttentionBackend subclass of that name, got "
            f"{cls!r}; repair or uninstall the package that declares it"
        )
    return register_backend(cls)
