"""Which backends there are, and the choice among them: by name, or by capability and measured time."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

import torch

from graphrt import env
from graphrt.backends.base import AttentionBackend, BackendContext, Capabilities, GraphSupport
from graphrt.backends.ranking import Ranking, load_ranking
from graphrt.backends.two_parts import two_part_unsupported_reasons
from graphrt.kernels.checks import check_bool, check_instance, check_int, shown
from graphrt.kernels.errors import ConfigError, UnsupportedError

ENTRY_POINT_GROUP = "graphrt.backends"

# In order of preference where nothing is measured. The module of a backend is imported when it is first asked about,
# its package when it is used.
_BUILTIN = {
    "triton": "graphrt.backends.triton:TritonBackend",
    "flash_attn3": "graphrt.backends.flash_attn3:FlashAttention3Backend",
    "flash_attn2": "graphrt.backends.flash_attn2:FlashAttention2Backend",
    "flashinfer": "graphrt.backends.flashinfer:FlashInferBackend",
    "torch_reference": "graphrt.backends.torch_reference:TorchReferenceBackend",
}
_LAST_RESORT = "torch_reference"

ONE_PART = "none"
"""RuntimeConfig.prefill_backend of runtimes whose mixed steps are served by one kernel."""

_registered: dict[str, type[AttentionBackend]] = {}


def register_backend(cls: type[AttentionBackend]) -> type[AttentionBackend]:
    """Make a backend class known under its `name`; usable as a decorator.

    A package declares an entry point of the group `graphrt.backends` instead, and need not be imported.

    Raises: ConfigError for a name that is taken, and for a class that declares too little.
    """
    check_declaration(cls)
    if cls.name in _BUILTIN or _registered.get(cls.name, cls) is not cls:
        raise ConfigError(f"register_backend: expected a new name, got {cls.name!r}, which is taken; choose another")
    _registered[cls.name] = cls
    return cls


def registered() -> dict[str, type[AttentionBackend]]:
    """The backends that this process registered, by name."""
    return dict(_registered)


def check_declaration(cls: object) -> None:
    """Raise ConfigError for what is wrong with what a backend class declares about itself."""
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
        raise ConfigError(f"backend: expected a subclass of AttentionBackend, got {shown(cls)}; derive from it")
    own = cls.__name__
    name = getattr(cls, "name", None)
    if not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(f"{own}.name: expected an identifier, got {shown(name)}; set the class attribute")
    for attribute, kind in (("capabilities", Capabilities), ("graph_support", GraphSupport)):
        check_instance(f"{own}.{attribute}", getattr(cls, attribute, None), kind, advice="set the class attribute")
    check_int(f"{own}.seq_len_fill", cls.seq_len_fill, 0, 1, advice="a pad row has the null page alone")
    check_bool(f"{own}.quantises_queries", cls.quantises_queries, advice="set the class attribute")
    for final, hook in (
        ("unsupported_reasons", "extra_unsupported_reasons"),
        ("graph_unsupported_reason", "extra_graph_unsupported_reason"),
    ):
        if _definition(cls, final) is not vars(AttentionBackend)[final]:
            raise ConfigError(
                f"{own}.{final}: expected the inherited one, got another, which may pass over what the class "
                f"declares; define {hook} instead"
            )
    if inspect.isabstract(cls):
        raise ConfigError(f"{own}.run: expected a definition, got none; define it")


def backend_names() -> list[str]:
    """Every known backend in order of preference: our own, installed and registered ones, the torch reference last."""
    preferred = [name for name in _BUILTIN if name != _LAST_RESORT]
    return list(dict.fromkeys([*preferred, *_third_party(), *_registered, _LAST_RESORT]))


def backend_class(name: str, what: str = "backend") -> type[AttentionBackend]:
    """The class of a backend by name; `what` gave the name.

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
        raise ConfigError(f"{what}: expected one of {', '.join(backend_names())}, got {name!r}; choose one of these")
    return _load(entry)


@dataclass(frozen=True, slots=True)
class Standing:
    """How a backend stands for one context.

    unsupported_reasons     every reason why it cannot serve the context; empty when it can
    by_name     why it is chosen only by name though it can, or None
    rank        1 for the one that is chosen unless another is named, and so on; None with a reason against it
    relative    its measured time over that of the fastest that can serve; None where the order is static
    """

    name: str
    unsupported_reasons: list[str]
    by_name: str | None = None
    rank: int | None = None
    relative: float | None = None


def standings(context: BackendContext) -> list[Standing]:
    """Every known backend, in static order, with its rank or all reasons against it."""
    return _judge_all(context, stop_at_the_first=False)


def select_backend(context: BackendContext, name: str | None = None) -> tuple[type[AttentionBackend], str]:
    """The backend for `context`, and why it was chosen.

    It is the named one. Without a name it is the one that `standings` ranks first: the fastest that can serve by the
    measured table (see ranking.py), else the first in static order that can.

    Raises: ConfigError for an unknown name; UnsupportedError, with every reason, where nothing fits.
    """
    if name is not None:
        return _named(name, context)
    found = _judge_all(context, stop_at_the_first=True)
    refused = [f"{s.name} ({', '.join(s.unsupported_reasons) or s.by_name})" for s in found if s.rank is None]
    chosen = next((s for s in found if s.rank == 1), None)
    if chosen is None:
        raise UnsupportedError(
            f"backend: expected one that serves this model on {context.device}, got none: {'; '.join(refused)}; "
            "change the model's options or the device"
        )
    why = f"{chosen.name}: first in order of preference that serves device {context.device.type}"
    if chosen.relative is not None:
        why = _fastest(sorted((s for s in found if s.relative is not None), key=lambda s: s.relative or 0.0))
    return backend_class(chosen.name), "; ".join([why, *(f"not {text}" for text in refused)])


def select_prefill(
    context: BackendContext, decode: type[AttentionBackend], name: str | None
) -> tuple[type[AttentionBackend] | None, str]:
    """The class that serves the prompts of mixed steps beside `decode`, and why; None: `decode` serves whole steps.

    It is the named one. Without a name it is what the measured table says is fastest for a mixed step of a runtime of
    this size. Without figures of its GPU and of 16 bits, steps stay whole.

    Raises: ConfigError for an unknown name; UnsupportedError, with every reason, where the named one does not fit.
    """
    if not context.mixed_batches:
        return None, ""
    if name == ONE_PART:
        return None, f"{decode.name}, as asked for"
    if name is not None:
        cls = backend_class(name, "prefill_backend").prefill_class()
        reasons = two_part_unsupported_reasons(context, decode, cls)
        if cls is None or reasons:
            raise UnsupportedError(
                f"prefill_backend {name}: expected one for the prompts of mixed steps beside {decode.name}, got "
                f"{len(reasons)} reason{'s' if len(reasons) > 1 else ''} against it: {'; '.join(reasons)}; choose "
                f"another, or {ONE_PART!r}"
            )
        return cls, f"{name}, chosen by name"
    ranking = load_ranking().mixed if _is_measured(context) else Ranking()
    found: dict[str, type[AttentionBackend] | None] = {decode.name: None}
    for pair in ranking.names - {decode.name}:
        ours, _, other = pair.partition("+")
        if ours == decode.name:
            with contextlib.suppress(ConfigError, UnsupportedError):  # not installed here, or not to be loaded
                cls = backend_class(other).prefill_class()
                if not two_part_unsupported_reasons(context, decode, cls):
                    found[pair] = cls
    relative = ranking.relative_times(found, max_num_reqs=context.max_num_reqs, max_seq_len=context.max_seq_len)
    if not relative:
        return None, ""
    first, *others = relative
    slower = "".join(f"; {pair} {relative[pair]:.2f}" for pair in others)
    return found[first], f"{first}, fastest of {len(relative)} (1.00{slower} on {ranking.gpu})"


def _is_measured(context: BackendContext) -> bool:
    """Whether the figures of mixed steps are of this device, and of layers and caches of this width."""
    if context.device.type != "cuda" or not torch.cuda.is_available():
        return False
    wide = [spec.dtype.itemsize for spec in context.attention] + [group.dtype.itemsize for group in context.kv_groups]
    return torch.cuda.get_device_name(context.device) == load_ranking().gpu and set(wide) == {2}


def unsupported_reasons(name: str, context: BackendContext) -> list[str]:
    """Every reason why a known backend cannot serve `context`; that its package cannot be loaded is one."""
    return _judge(name, context).unsupported_reasons


def _named(name: str, context: BackendContext) -> tuple[type[AttentionBackend], str]:
    what = "backend, by name or GRAPHRT_BACKEND" if name == env.backend() else "backend"
    cls, reasons = backend_class(name, what), unsupported_reasons(name, context)
    if reasons:
        raise UnsupportedError(
            f"{what} {name}: expected a model and device that it supports, got {len(reasons)} "
            f"reason{'s' if len(reasons) > 1 else ''} against it: {'; '.join(reasons)}; choose another backend"
        )
    return cls, f"{name}: chosen by name"


def _judge_all(context: BackendContext, *, stop_at_the_first: bool) -> list[Standing]:
    """The one judgement: every backend against `context`, in static order, ranked.

    Those with a measured time come first, since the fastest of them is chosen. With `stop_at_the_first` the others are
    judged only until there is one to choose: to ask about a backend is to import it, which takes some seconds.
    """
    names = backend_names()
    ranking = load_ranking() if context.device.type == "cuda" else Ranking()  # it says nothing of other devices
    measured = [name for name in names if name in ranking.names and name != _LAST_RESORT]
    found = {name: _judge(name, context) for name in measured}
    relative = ranking.relative_times(
        [name for name in measured if _serves(found[name])],
        max_num_reqs=context.max_num_reqs,
        max_seq_len=context.max_seq_len,
    )
    order = list(relative)
    for name in names:
        if stop_at_the_first and order:
            break
        if name not in found:
            found[name] = _judge(name, context)
        if _serves(found[name]) and name not in relative:
            order.append(name)
    return [
        Standing(
            name,
            found[name].unsupported_reasons,
            found[name].by_name,
            order.index(name) + 1 if name in order else None,
            relative.get(name),
        )
        for name in names
        if name in found
    ]


def _serves(standing: Standing) -> bool:
    return not standing.unsupported_reasons and standing.by_name is None


def _judge(name: str, context: BackendContext) -> Standing:
    """One backend against `context`, without its rank.

    What a third party's class raises is a reason against it: the others are still to be asked. What one of our own
    raises is a bug, and is raised.
    """
    question = "loading it"
    try:
        cls = backend_class(name)
        question = "unsupported_reasons"
        reasons = cls.unsupported_reasons(context)
        question = "why_only_by_name"
        return Standing(name, reasons, None if reasons else cls.why_only_by_name(context))
    except (ConfigError, UnsupportedError) as error:
        return Standing(name, [str(error)])
    except Exception as error:
        if name in _BUILTIN:
            raise
        return Standing(name, [f"{question} raised {type(error).__name__}: {error}"])


def _fastest(ranked: list[Standing]) -> str:
    """Why the first of the measured ones is chosen."""
    gpu, (chosen, *others) = load_ranking().gpu, ranked
    if not others:
        return f"{chosen.name}: the only one that can serve of those measured on {gpu}"
    slower = ", ".join(f"{standing.name} {standing.relative:.2f}" for standing in others)
    return f"{chosen.name}: fastest of {len(ranked)} that can serve ({chosen.relative:.2f}; {slower} on {gpu})"


def _definition(cls: type[AttentionBackend], name: str) -> object:
    """The attribute as the class that defines it has it."""
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base))


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
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend) and getattr(cls, "name", None) == entry.name):
        raise ConfigError(
            f"backend {entry.name}: expected {entry.value} to be an AttentionBackend of that name, got {cls!r}; "
            "repair or uninstall the package that declares it"
        )
    return register_backend(cls)
