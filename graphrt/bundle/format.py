"""The file format of a replay bundle: tensors and JSON in one safetensors file, without code or pickles.

The reader checks names, types and shapes, and creates only objects of the classes listed here. A digest of the contents
detects damaged files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.config import RequestTensor, RuntimeConfig
from graphrt.kernels.checks import check_instance, shown
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.models.packages import require
from graphrt.spec import AttentionKind, AttentionSpec, KVCacheSpec

FORMAT = "graphrt replay bundle, version 2"
_CLASSES = {kind.__name__: kind for kind in (AttentionSpec, KVCacheSpec, RuntimeConfig, RequestTensor, BatchDescriptor)}
_ENUMS: dict[str, type[Enum]] = {kind.__name__: kind for kind in (AttentionKind, KVLayout, GraphKind)}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_MOST_JSON = 16 << 20


def checked_target(path: str | Path) -> str:
    """Return the file to write for `path`. Symbolic links are followed, and kept."""
    check_instance("path", path, (str, Path), advice="pass the name of a file")
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise ConfigError(f"bundle: {str(path)!r} is a folder; specify a file in it")
        if target.exists() and not target.is_file():
            raise ConfigError(f"bundle: {str(path)!r} is a pipe or a device; specify a regular file, or a new file")
        if not target.parent.is_dir():
            raise ConfigError(
                f"bundle: the folder {str(target.parent)!r} does not exist; create it, or specify another folder"
            )
    except (OSError, ValueError) as error:  # a name that the system rejects
        raise ConfigError(f"bundle: {str(path)!r:.200} cannot be written ({error}); specify another file") from error
    return str(target)


def write_file(path: str | Path, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file. A symbolic link is kept, and its target is replaced. Raises: ConfigError: if writing fails."""
    target = checked_target(path)
    safetensors = require("safetensors", "to write bundles")
    save = require("safetensors.torch", "to write bundles").save_file
    try:
        text = json.dumps(meta)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: cannot be written as JSON ({error}); pass strings and numbers") from error
    kept = {name: t.contiguous() for name, t in tensors.items()}
    try:
        save(kept, target, {"format": FORMAT, "meta": text, "digest": _digest(text, kept)})
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"bundle: {str(path)!r} cannot be written ({error}); check its folder and disk") from error


def read_file(path: str | Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the JSON value and the tensors that `write_file` wrote. Raises: ConfigError: if the file is damaged."""
    check_instance("path", path, (str, Path), advice="pass the name of a file")
    safetensors = require("safetensors", "to read bundles")
    if not Path(path).is_file():
        wrong = "is a folder; specify a file in it" if Path(path).is_dir() else "is not a file; check the path"
        raise ConfigError(f"bundle: {str(path)!r} {wrong}")
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                got = shown(header["format"]) if "format" in header else "another safetensors file"
                raise ConfigError(f"bundle: expected a {FORMAT}, got {got} at {path}; record it again")
            text = header.get("meta", "")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
        if len(text) > _MOST_JSON or header.get("digest") != _digest(text, tensors):
            raise ConfigError(f"bundle: the digest of {path} is wrong, so the file is damaged; copy it again")
        return json.loads(text), tensors
    except (OSError, safetensors.SafetensorError, ValueError, RuntimeError, MemoryError) as error:
        what = str(error) or type(error).__name__
        raise ConfigError(
            f"bundle: {path} is not a bundle, or is damaged ({what}); copy it again, or record a new bundle"
        ) from error


def _digest(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of the JSON and of each tensor's name, dtype, shape and bytes."""
    found = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    for name, tensor in sorted(tensors.items()):
        found.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        if tensor.numel():
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def to_plain(value: Any) -> Any:
    """Convert a value of the classes above to a JSON value."""
    if isinstance(value, Enum):
        return {"enum": type(value).__name__, "name": value.name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: to_plain(getattr(value, field.name)) for field in fields(value) if field.init}
        return {"class": type(value).__name__, "fields": named}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(value: Any) -> Any:
    """Convert a JSON value back; lists become tuples. Raises: ConfigError, or the error of the class."""
    if isinstance(value, list):
        return tuple(map(from_plain, value))
    if not isinstance(value, dict):
        return value
    with reading("meta"):
        if "dtype" in value:
            return _DTYPES[value["dtype"]]
        if "enum" in value:
            return _ENUMS[value["enum"]][value["name"]]
        return _CLASSES[value["class"]](**{str(name): from_plain(item) for name, item in value["fields"].items()})


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn errors in reading an unexpected value into a ConfigError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ConfigError(f"bundle: {what} cannot be read ({error!r}); record it again") from error
