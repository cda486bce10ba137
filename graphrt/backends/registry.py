"""Which backends there are, and the choice among them: by capability and preference, or by name."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points

from graphrt.backends.base import AttentionBackend, BackendContext
from graphrt.kernels.errors import ConfigError, UnsupportedError

ENTRY_POINT_GROUP = "graphrt.backends"

# In order of preference. A backend's module is imported when it is first asked about, its package when it is used.
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
    _registered[name] = cls
    return cls


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
    """The backend for `context` and why it was chosen: the named one, else the first in order that can serve it.

    Raises: ConfigError for an unknown name; UnsupportedError, with every reason, where nothing fits.
    """
    if name is not None:
        cls = backend_class(name)
        reasons = cls.why_not(context)
        if reasons:
            raise UnsupportedError(
                f"backend {name}: expected a model and device that it supports, got {len(reasons)} reasons against it: "
                f"{'; '.join(reasons)}; choose another backend"
            )
        return cls, f"{name}: chosen by name"
    passed_over: list[str] = []
    for candidate in backend_names():
        cls = backend_class(candidate)
        reasons = cls.why_not(context) or [r for r in (cls.why_only_by_name(context),) if r is not None]
        if not reasons:
            explanation = f"{candidate}: first in order of preference that serves device {context.device.type}"
            return cls, "; ".join([explanation, *(f"not {text}" for text in passed_over)])
        passed_over.append(f"{candidate} ({', '.join(reasons)})")
    raise UnsupportedError(
        f"backend: expected one that serves this model on {context.device}, got none: {'; '.join(passed_over)}; "
        "change the model's options or the device"
    )


def explain(context: BackendContext) -> list[tuple[str, list[str]]]:
    """Each known backend, in order of preference, with every reason why it cannot serve `context`."""
    return [(name, backend_class(name).why_not(context)) for name in backend_names()]


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
