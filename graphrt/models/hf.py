"""Weights from a Hugging Face folder: config.json and safetensors, in a single file or sharded."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import torch

from graphrt.kernels.checks import shown
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.ops.quantized import Int4Weight, Weight
from graphrt.models.config import ModelConfig
from graphrt.models.fields import printable
from graphrt.models.packages import require
from graphrt.models.packing import PackedWeights
from graphrt.models.quantization import Quantization
from graphrt.models.weights import Index

_MAX_NAME = 255
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_QUANTIZED = ("F8_E4M3", "I32")
_STORED = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_TOKEN_MAPS = ("d2t", "t2d")  # tensors of integers and bools, in a head that drafts only some tokens
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS_COMPARED = 1024


class SafetensorsSource:
    """The tensors in a folder's safetensors files. The constructor checks the table of contents of each file.

    As in transformers, a head that differs from the embedding is kept even if config.json declares them tied, and the
    stored dtype is used if config.json specifies none. If an index specifies the file of a tensor, copies of the tensor
    in other files are ignored. A module is quantized if its tensors are; the lists of quantization_config are not read.

    config  the config, if config.json is not that of a model
    """

    def __init__(self, folder: Path, config: ModelConfig | None = None) -> None:
        self.config = read_config(folder) if config is None else config
        safetensors = require("safetensors", "to read weights")
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._where: dict[str, Any] = {}
        files, index = _weight_files(folder)
        for file in files:
            try:
                opened = safetensors.safe_open(folder / file, framework="pt", device="cpu")
            except (OSError, safetensors.SafetensorError) as error:
                raise ConfigError(
                    f"{printable(folder / file)}: not an intact safetensors file ({printable(error)}); download it "
                    "again"
                ) from error
            for name in opened.keys():  # noqa: SIM118  not a mapping
                if index.get(name, file) == file:
                    self._add(name, opened, printable(folder / file))
        self._shapes = {name: tuple(self._where[name].get_slice(name).get_shape()) for name in self._where}
        self._packed: PackedWeights | None = None
        if self.config.quantization is not None:
            self._packed = PackedWeights(self.config, self.config.quantization, self._shapes, self._dtypes, self._read)
            self._shapes = self._packed.shapes
            plain = {name for name, shape in self._shapes.items() if len(shape) == 2} - self._packed.names
            for name in sorted(self._shapes.keys() - self._packed.names):
                self._check_dtype(name, _STORED)
            quantization = replace(self.config.quantization, plain=frozenset(n.removesuffix(".weight") for n in plain))
            self.config = replace(self.config, quantization=quantization)
        if self.config.tie_word_embeddings and self.has_own_head():
            self.config = replace(self.config, tie_word_embeddings=False)
        raw = read_json(folder / "config.json")
        if raw.get("dtype") is None and raw.get("torch_dtype") is None and self._dtypes.get(_EMBEDDING) in _STORED:
            stored = _STORED[self._dtypes[_EMBEDDING]]
            self.config = replace(self.config, dtype=torch.float32 if stored == torch.float64 else stored)

    @property
    def quantization(self) -> Quantization | None:
        """How the weights are quantized."""
        return self.config.quantization

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def copy_into(self, name: str, target: Weight, index: Index = ()) -> None:
        if not self._is_packed(name):
            assert isinstance(target, torch.Tensor), "check_weights refuses tensors for quantized weights"
            target.copy_(self._read(name, index))
            return
        assert self._packed is not None, "a packed weight was found"
        if isinstance(target, torch.Tensor):
            rows = self._packed.weight(name, target.dtype, target.device, index[:1]).dequantized()
            target.copy_(rows[:, index[1]] if len(index) > 1 else rows)
        else:
            group = target.group if isinstance(target, Int4Weight) else 0
            target.copy_(self._packed.weight(name, target.dtype, target.device, index, group))

    def has_own_head(self) -> bool:
        shapes = [self._shapes.get(name) for name in (_EMBEDDING, _HEAD)]
        if None in shapes:
            return False
        if shapes[0] != shapes[1] or not shapes[0] or self._is_packed(_HEAD):
            return True
        embedding, head = (self._where[name].get_slice(name) for name in (_EMBEDDING, _HEAD))
        pieces = (slice(first, first + _ROWS_COMPARED) for first in range(0, shapes[0][0], _ROWS_COMPARED))
        return not all(torch.equal(embedding[piece].double(), head[piece].double()) for piece in pieces)

    def _read(self, name: str, index: Index = ()) -> torch.Tensor:
        file = self._where[name]
        tensor: torch.Tensor = file.get_slice(name)[index] if index else file.get_tensor(name)
        return tensor

    def _is_packed(self, name: str) -> bool:
        return self._packed is not None and name in self._packed.names

    def _add(self, name: str, opened: Any, file: str) -> None:
        if name in self._where:
            raise ConfigError(
                f"{file}: the tensor {shown(name)} is also in another file; download the index file of "
                "the checkpoint too"
            )
        self._dtypes[name], self._where[name] = opened.get_slice(name).get_dtype(), opened
        self._check_dtype(name, _STORED if self.config.quantization is None else (*_STORED, *_QUANTIZED), file)

    def _check_dtype(self, name: str, supported: Collection[str], file: str = "weights") -> None:
        dtype = self._dtypes[name]
        if dtype not in supported and name not in _TOKEN_MAPS:
            raise UnsupportedError(
                f"{file}: {shown(name)} has dtype {dtype} (supported: {', '.join(supported)}); "
                "use a checkpoint that is not quantized in this way, or a GGUF file"
            )


def read_config(folder: Path) -> ModelConfig:
    """Read the model's config from config.json, and further end-of-text tokens from generation_config.json."""
    generation = folder / "generation_config.json"
    return ModelConfig.from_hf(
        read_json(folder / "config.json"), read_json(generation) if os.path.exists(generation) else None
    )


def is_eagle(folder: Path) -> bool:
    """Return whether the model in a folder is an EAGLE or EAGLE-3 head."""
    raw = read_json(folder / "config.json")
    return "draft_vocab_size" in raw or "eagle" in f"{raw.get('architectures')} {raw.get('model_type')}".lower()


def download(repo_id: str) -> Path:
    """Download a model from the Hugging Face hub into its cache. Weights are downloaded only if the config is
    supported."""
    hub = require("huggingface_hub", "to download models")
    patterns = ["*.json", "*.txt", "*.jinja", "*.model"]
    try:
        folder = Path(hub.snapshot_download(repo_id, allow_patterns=patterns))
        if not is_eagle(folder):
            read_config(folder)
        return Path(hub.snapshot_download(repo_id, allow_patterns=[*patterns, "*.safetensors"]))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        if isinstance(error, ConfigError | UnsupportedError):
            raise
        raise ConfigError(
            f"{printable(repo_id)}: not a folder, not a .gguf file, and not available from the Hugging Face hub "
            f"({type(error).__name__}: {printable(error).strip()}); check the name, or pass a path"
        ) from error


def _weight_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the names of a model's safetensors files, all of which exist, and the index (file names by tensor).

    As in transformers, a single file takes precedence over an index.
    """
    index = folder / _INDEX
    names, weight_map = [_SINGLE], {}
    if os.path.exists(index) and not os.path.isfile(folder / _SINGLE):
        found = read_json(index).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise ConfigError(f"{printable(index)}: weight_map is missing or empty; download it again")
        weight_map = {tensor: _inside(index, name) for tensor, name in found.items()}
        names = sorted(set(weight_map.values()))
    missing = [name for name in names if not os.path.isfile(folder / name)]
    if missing:
        raise ConfigError(
            f"{printable(folder)}: expected {_SINGLE}, or {_INDEX} with all its files; "
            f"missing: {printable(', '.join(missing))}; complete the download, or save the model as safetensors"
        )
    return names, weight_map


def _inside(index: Path, name: object) -> str:
    """Check a file name in an index. The index may be downloaded, so names must not point outside the folder.

    Symbolic links in the folder are followed, because the cache of the Hugging Face hub uses them, and the text of a
    download cannot create them.
    """
    good = isinstance(name, str) and "\0" not in name and len(name) <= _MAX_NAME and name.endswith(".safetensors")
    if not isinstance(name, str) or not good or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise ConfigError(
            f"{printable(index)}: expected .safetensors files inside the model's folder in weight_map, "
            f"got {shown(name)}; do not use this model unless you trust its origin"
        )
    return name


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises: ConfigError: if the file is missing or has something else."""
    try:
        if not path.is_file():  # reading a pipe would wait for a writer
            raise FileNotFoundError("no such file")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: thousands of nested brackets
        raise ConfigError(
            f"{printable(path)}: not a readable JSON file ({printable(error)}); download it again"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{printable(path)}: expected a JSON object, got {type(content).__name__}; download it again")
    return content
