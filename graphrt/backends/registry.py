"""Which backends there are, and the choice among them: by capability and measured time, or by name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from graphrt.backends.base import AttentionBackend, BackendContext, Capabilities, GraphSupport
from graphrt.backends.ranking import Ranking, load_ranking
from graphrt.kernels.errors import ConfigError, UnsupportedError

ENTRY_POINT_GROUP = "graphrt.backends"

# In order of preference where nothing is measured. A backend's module is imported when it is first asked about, its
# package when it is used.
_BUILTIN = {
    "triton": "graphrt.backends.triton:TritonBackend",
    "flash_attn3": "graphrt.backends.flash_attn3:FlashAttention3Backend",
    "flash_attn2": "graphrt.backends.flash_attn2:FlashAttention2Backend",
    "flashinfer": "graphrt.backends.flashinfer:FlashInferBackend",
    "torch_reference": "graphrt.backends.torch_reference:TorchReferenceBackend",
}
_LAST_RESORT = "torch_reference"

_registered: dict[str, type[AttentionBackend]] = {}


def register_backend(cls: type[AttentionBackend]) -> type[AttentionBackend]:
    """Make a backend class known under its `name`; usable as a decorator. Naming it again replaces nothing: it raises.

    Packages that are installed declare an entry point of the group `graphrt.backends` instead.

    Raises: ConfigError.
    """
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
        raise ConfigError(f"register_backend: expected a subclass of AttentionBackend, got {cls!r}; derive from it")
    name = getattr(cls, "name", "")
    if not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(f"{cls.__name__}.name: expected an identifier, got {name!r}; set the class attribute")
    if name in _BUILTIN or _registered.get(name, cls) is not cls:
        raise ConfigError(f"register_backend: expected a new name, got {name!r}, which is taken; choose another")
    if fault := _declaration_fault(cls):
        raise ConfigError(f"register_backend: {fault}; set the class attribute")
    _registered[name] = cls
    return cls


def _declaration_fault(cls: type[AttentionBackend]) -> str | None:
    """What is wrong with what a class declares about itself, or None."""
    for attribute, kind in (("capabilities", Capabilities), ("graph_support", GraphSupport)):
        if not isinstance(value := getattr(cls, attribute, None), kind):
            return f"expected {cls.__name__}.{attribute} to be of {kind.__name__}, got {value!r}"
    if cls.capabilities.page_sizes is not None and not cls.capabilities.page_sizes:
        return f"expected {cls.__name__}.capabilities.page_sizes to name some, or None for all, got none"
    return None


def backend_names() -> list[str]:
    """Every known backend in order of preference: our own, installed and registered ones, the torch reference last."""
    preferred = [name for name in _BUILTIN if name != _LAST_RESORT]
    return list(dict.fromkeys([*preferred, *_third_party(), *_registered, _LAST_RESORT]))


def backend_class(name: str) -> type[AttentionBackend]:
    """The class of a backend by name.

    Raises: ConfigError for an unknown name, and for an entry point that cannot be loaded.
    """
    if name in _BUILTIN:
        module, attribute = _BUILTIN[name].split(":")
        cls: type[AttentionBackend] = getattr(importlib.import_module(module), attribute)
        return cls
    if name in _registered:
        return _registered[name]
    entry = _third_party().get(name)
    if entry is None:
        raise ConfigError(f"backend: expected one of {', '.join(backend_names())}, got {name!r}; choose one of these")
    return _load(entry)


def select_backend(context: BackendContext, name: str | None = None) -> tuple[type[AttentionBackend], str]:
    """The backend for `context` and why it was chosen: the named one, else the fastest that can serve it by the
    measured table (see ranking.py), else the first in order that can.

    Raises: ConfigError for an unknown name; UnsupportedError, with every reason, where nothing fits.
    """
    if name is not None:
        cls = backend_class(name)
        reasons = cls.why_not(context)
        if reasons:
            raise UnsupportedError(
                f"backend {name}: expected a model and device that it supports, got {len(reasons)} "
                f"reason{'s' if len(reasons) > 1 else ''} against it: "
                f"{'; '.join(reasons)}; choose another backend"
            )
        return cls, f"{name}: chosen by name"
    ranking, names = _ranking_for(context), backend_names()
    refusals: dict[str, list[str]] = {}
    measured = [candidate for candidate in names if candidate in ranking.names and candidate != _LAST_RESORT]
    for candidate in measured:
        refusals[candidate] = _why_not_chosen(candidate, context)
    relative = _relative(ranking, [candidate for candidate in measured if not refusals[candidate]], context)
    if relative:
        chosen = next(iter(relative))
        return backend_class(chosen), "; ".join([_fastest(relative, ranking), *_refused(names, refusals)])
    # Nothing measured fits. The others are asked one by one: to ask is to import, which takes some packages seconds.
    for candidate in names:
        if candidate not in refusals:
            refusals[candidate] = _why_not_chosen(candidate, context)
        if not refusals[candidate]:
            explanation = f"{candidate}: first in order of preference that serves device {context.device.type}"
            return backend_class(candidate), "; ".join([explanation, *_refused(names, refusals)])
    raise UnsupportedError(
        f"backend: expected one that serves this model on {context.device}, got none: "
        f"{'; '.join(text.removeprefix('not ') for text in _refused(names, refusals))}; "
        "change the model's options or the device"
    )


@dataclass(frozen=True, slots=True)
class Standing:
    """How a backend stands for one context.

    why_not     every reason why it cannot serve the context; empty when it can
    by_name     why it is chosen only by name though it can, or None
    rank        1 for the one that is chosen unless another is named, and so on; None with a reason against it
    relative    its measured time over that of the fastest that can serve; None where the order is static
    """

    name: str
    why_not: list[str]
    by_name: str | None = None
    rank: int | None = None
    relative: float | None = None


def standings(context: BackendContext) -> list[Standing]:
    """Every known backend, in static order, with its rank or all reasons against it."""
    found = {name: _judge(name, context) for name in backend_names()}
    fit = [name for name, (reasons, by_name) in found.items() if not reasons and by_name is None]
    relative = _relative(_ranking_for(context), [name for name in fit if name != _LAST_RESORT], context)
    order = [*relative, *(name for name in fit if name not in relative)]
    return [
        Standing(name, reasons, by_name, order.index(name) + 1 if name in order else None, relative.get(name))
        for name, (reasons, by_name) in found.items()
    ]


def explain(context: BackendContext) -> list[tuple[str, list[str]]]:
    """Each known backend, in static order, with every reason why it cannot serve `context`.

    That its package cannot be loaded is one: whoever asks about all of them wants to hear of the others too.
    """
    return [(name, why_not(name, context)) for name in backend_names()]


def why_not(name: str, context: BackendContext) -> list[str]:
    """Every reason why a known backend cannot serve `context`; that its package cannot be loaded is one."""
    try:
        return backend_class(name).why_not(context)
    except (ConfigError, UnsupportedError) as error:
        return [str(error)]
    except Exception as error:
        return [_raised(name, "why_not", error)]


def _raised(name: str, predicate: str, error: Exception) -> str:
    """The reason that a third party's predicate is when it raises: the others are still to be asked. Raises: the
    error of one of ours, which would be a bug."""
    if name in _BUILTIN:
        raise error
    return f"{predicate} raised {type(error).__name__}: {error}"


def _judge(name: str, context: BackendContext) -> tuple[list[str], str | None]:
    """Every reason why it cannot serve; and why it is chosen only by name, where it can."""
    reasons = why_not(name, context)
    if reasons:
        return reasons, None
    try:
        return [], backend_class(name).why_only_by_name(context)
    except Exception as error:
        return [_raised(name, "why_only_by_name", error)], None


def _why_not_chosen(name: str, context: BackendContext) -> list[str]:
    """Reasons against choosing it where none is named."""
    reasons, by_name = _judge(name, context)
    return reasons if by_name is None else [by_name]


def _ranking_for(context: BackendContext) -> Ranking:
    """The measured table, which says nothing of other kinds of device."""
    return load_ranking() if context.device.type == "cuda" else Ranking()


def _relative(ranking: Ranking, names: list[str], context: BackendContext) -> dict[str, float]:
    return ranking.relative_times(names, max_num_reqs=context.max_num_reqs, max_seq_len=context.max_seq_len)


def _fastest(relative: dict[str, float], ranking: Ranking) -> str:
    (chosen, own), *others = relative.items()
    if not others:
        return f"{chosen}: the only one that can serve of those measured on {ranking.gpu}"
    slower = ", ".join(f"{name} {time:.2f}" for name, time in others)
    return f"{chosen}: fastest of {len(relative)} that can serve ({own:.2f}; {slower} on {ranking.gpu})"


def _refused(names: list[str], refusals: dict[str, list[str]]) -> list[str]:
    return [f"not {name} ({', '.join(refusals[name])})" for name in names if refusals.get(name)]


def _third_party() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP) if entry.name not in _BUILTIN}


def _load(entry: EntryPoint) -> type[AttentionBackend]:
    try:
        cls = entry.load()
    except Exception as error:  # whatever a third-party module raises on import
        raise ConfigError(
            f"backend {entry.name}: expected {entry.value} to be importable, got {type(error).__name__}: {error}; "
            "repair or uninstall the package that declares it"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend) and cls.name == entry.name):
        raise ConfigError(
            f"backend {entry.name}: expected {entry.value} to be an AttentionBackend of that name, got {cls!r}; "
            "repair or uninstall the package that declares it"
        )
    return register_backend(cls)
