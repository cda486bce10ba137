"""The file of a replay bundle: tensors and JSON in one safetensors file. No code, no pickle.

Reading trusts nothing: names, types and shapes are checked, and the classes that JSON may ask for are listed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.config import RowTensor, RuntimeConfig
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.models.packages import require
from graphrt.spec import AttentionKind, AttentionSpec, KVCacheSpec

FORMAT = "graphrt replay bundle, version 1"
_CLASSES = {kind.__name__: kind for kind in (AttentionSpec, KVCacheSpec, RuntimeConfig, RowTensor, BatchDescriptor)}
_ENUMS: dict[str, type[Enum]] = {kind.__name__: kind for kind in (AttentionKind, KVLayout, GraphKind)}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_MOST_JSON = 16 << 20


def write_file(path: str | Path, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file. Raises: ConfigError where it cannot be written, or safetensors is missing."""
    safetensors = require("safetensors", "to write bundles")
    save = require("safetensors.torch", "to write bundles").save_file
    try:
        save({name: t.contiguous() for name, t in tensors.items()}, path, {"format": FORMAT, "meta": json.dumps(meta)})
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"bundle: expected to write {path}, got {error}; check the folder") from error


def read_file(path: str | Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """What `write_file` wrote: the JSON's value and the tensors, in host memory.

    Raises: ConfigError for a file that is missing, damaged, or no bundle of this version.
    """
    safetensors = require("safetensors", "to read bundles")
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT or len(header.get("meta", "")) > _MOST_JSON:
                raise ConfigError(f"bundle: expected a {FORMAT}, got another file at {path}; record it again")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
            return json.loads(header["meta"]), tensors
    except (OSError, safetensors.SafetensorError, ValueError, RecursionError) as error:
        raise ConfigError(f"bundle: expected an intact file, got {error} in {path}; record it again") from error


def to_plain(value: Any) -> Any:
    """A value of the classes above as one that JSON takes."""
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
    """What `to_plain` was given; lists come as tuples. Raises: ConfigError and its kin for anything else."""
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
    """Turn the errors of a value that is not as expected into a ConfigError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"bundle: expected {what} as it was recorded, got {error!r} while reading it; record it again"
        ) from error
