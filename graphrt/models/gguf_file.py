"""The table of contents of a GGUF file, with every length checked against the file size.

The package `gguf` dequantizes, but its reader trusts the lengths in the file. On a truncated or corrupt file, the
reader loops or returns short arrays. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from graphrt.kernels.checks import shown
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.models.fields import printable
from graphrt.models.packages import require

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_SMALLEST_PAIR = 8 + 1 + 4 + 1  # key length, key, type, value
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, dimensions, one extent, type, offset


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Location of a tensor. `shape` has the outermost dimension first; `offset` is from the start of the file."""

    shape: tuple[int, ...]
    quantization: int  # a gguf.GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Metadata and tensors of a GGUF file. `content` is the memory-mapped file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    content: mmap.mmap

    def raw(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes of a tensor as a read-only view of the file, [rows, bytes per row]."""
        tensor = self.tensors[name]
        flat = np.frombuffer(self.content, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return flat.reshape(prod(tensor.shape[:-1]), -1)


def read_gguf(path: Path) -> GGUFFile:
    """Read a file's table of contents. Tensor data is not read, but must be inside the file.

    Raises:
        ConfigError: if the file is missing, truncated, inconsistent or not a GGUF file.
        UnsupportedError: if the file is split, big-endian, or has an unknown version or quantization.
    """
    gguf = require("gguf", "to read GGUF files")
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ConfigError(
            f"{printable(path)}: not a readable GGUF file ({printable(error)}); check the path"
        ) from error
    cursor = _Cursor(content, path)
    if cursor.take(4) != b"GGUF":
        raise ConfigError(
            f"{printable(path)}: not a GGUF file, because it starts with {content[:4]!r}; download it again"
        )
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        # In a big-endian file, the version is in the upper half.
        raise UnsupportedError(
            f"{printable(path)}: expected little-endian GGUF of version 2 or 3, got version {version:#x}; convert the "
            "file with a current llama.cpp"
        )
    num_tensors, num_pairs = cursor.count(_SMALLEST_TENSOR), cursor.count(_SMALLEST_PAIR)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        cursor.check(key not in metadata, f"the key {shown(key)} occurs twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    if metadata.get("split.count", 1) != 1:
        raise UnsupportedError(
            f"{printable(path)}: the file is one of {shown(metadata['split.count'])} parts; "
            "merge the parts with llama-gguf-split --merge"
        )
    tensors = _read_tensors(cursor, num_tensors, metadata.get("general.alignment", 32), gguf)
    return GGUFFile(path, metadata, tensors, content)


def _read_tensors(cursor: _Cursor, count: int, alignment: Any, gguf: Any) -> dict[str, GGUFTensor]:
    good = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
    cursor.check(good, f"general.alignment is {shown(alignment)}, not a power of two")
    found: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        name = cursor.string()
        num_dims = cursor.scalar("I")
        cursor.check(1 <= num_dims <= _MAX_DIMS, f"{shown(name)} has {num_dims} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
        found.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, quantization, offset in found:
        sizes = gguf.GGML_QUANT_SIZES.get(quantization)
        if sizes is None:
            raise UnsupportedError(
                f"{printable(cursor.path)}: the package gguf does not know quantization {quantization} of "
                f"{shown(name)}; upgrade gguf"
            )
        block, block_bytes = sizes
        cursor.check(name not in tensors, f"the tensor {shown(name)} occurs twice")
        cursor.check(prod(shape) > 0 and shape[-1] % block == 0, f"{shown(name)} has the invalid shape {list(shape)}")
        num_bytes = prod(shape) // block * block_bytes
        end = start + offset + num_bytes
        cursor.check(
            offset % alignment == 0 and end <= cursor.size,
            f"the tensor {shown(name)} is at bytes {start + offset} to {end} of {cursor.size}",
        )
        tensors[name] = GGUFTensor(shape, quantization, start + offset, num_bytes)
    last_end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        cursor.check(tensor.offset >= last_end, f"the tensor {shown(name)} overlaps another")
        last_end = tensor.offset + tensor.num_bytes
    return tensors


class _Cursor:
    """Reads little-endian values in sequence. Reading past the end raises ConfigError."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self.path = path
        self.size = len(content)
        self.position = 0
        self._content = content

    def check(self, good: bool, found: str) -> None:
        if not good:
            raise ConfigError(f"{printable(self.path)}: the GGUF file is damaged: {found}; download it again")

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        self.check(end <= self.size, f"it has {self.size} bytes, but needs at least {end}")
        data = self._content[self.position : end]
        self.position = end
        return data

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value

    def count(self, smallest: int) -> int:
        """Read a number of items of at least `smallest` bytes each."""
        value: int = self.scalar("Q")
        left = self.size - self.position
        self.check(value * smallest <= left, f"it lists {value} items, but only {left} bytes are left")
        return value

    def string(self) -> str:
        data = self.take(self.count(1))
        try:
            return data.decode()
        except UnicodeDecodeError:
            # Some keys that are not read here contain partial characters.
            return data.decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("I"))
        self.check(kind in _SCALARS, f"a value has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: int) -> list[Any]:
        if kind in _SCALARS:
            code = _SCALARS[kind]
            size = struct.calcsize("<" + code)
            count = self.count(size)
            return list(struct.unpack(f"<{count}{code}", self.take(count * size)))
        self.check(kind == _STRING, f"an array has the unsupported type {kind}")
        read: Callable[[], str] = self.string
        return [read() for _ in range(self.count(8))]
