"""Weights from a Hugging Face directory: config.json and safetensors, whole or sharded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch

from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.models.config import ModelConfig
from graphrt.models.fields import check_path, shown
from graphrt.models.packages import require

_MAX_NAME = 255
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_STORED = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


class SafetensorsSource:
    """The tensors of a directory's safetensors files. Every file's table of contents is checked at construction."""

    def __init__(self, folder: Path) -> None:
        folder = check_path("folder", folder)
        self.config = read_config(folder)
        safetensors = require("safetensors", "to read weights")
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._where: dict[str, Any] = {}
        for file in _weight_files(folder):
            try:
                opened = safetensors.safe_open(file, framework="pt", device="cpu")
            except (OSError, safetensors.SafetensorError) as error:
                raise ConfigError(
                    f"{file}: expected an intact safetensors file, got {error}; download it again"
                ) from error
            for name in opened.keys():  # noqa: SIM118  not a mapping
                self._add(name, opened, file)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        target.copy_(self._where[name].get_tensor(name))

    def _add(self, name: str, opened: Any, file: Path) -> None:
        if name in self._where:
            raise ConfigError(f"{file}: expected each tensor once, got {name} in another file too")
        content = opened.get_slice(name)
        if content.get_dtype() not in _STORED:
            raise UnsupportedError(
                f"{file}: expected {', '.join(_STORED)} weights, got {content.get_dtype()} in {name}; "
                "use a checkpoint that is not quantised, or a GGUF file"
            )
        self._shapes[name] = tuple(content.get_shape())
        self._where[name] = opened


def read_config(folder: Path) -> ModelConfig:
    """The model's config from config.json and, for the end-of-text tokens, generation_config.json."""
    folder = check_path("folder", folder)
    generation = folder / "generation_config.json"
    return ModelConfig.from_hf(
        _read_json(folder / "config.json"), _read_json(generation) if generation.exists() else None
    )


def download(repo_id: str, *, revision: str | None = None) -> Path:
    """Fetch a model of the Hugging Face hub into its cache: the config first, weights only if the model is ours."""
    hub = require("huggingface_hub", "to download models")
    patterns = ["*.json", "*.txt", "*.jinja", "*.model"]
    try:
        folder = Path(hub.snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
        read_config(folder)
        return Path(hub.snapshot_download(repo_id, revision=revision, allow_patterns=[*patterns, "*.safetensors"]))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        if isinstance(error, ConfigError | UnsupportedError):
            raise
        raise ConfigError(
            f"{repo_id}: expected a folder, a .gguf file or a model on the Hugging Face hub, got "
            f"{type(error).__name__}: {str(error).strip()}; check the name, or pass a path"
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, all of which exist."""
    index = folder / _INDEX
    names = [_SINGLE]
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index}: expected a weight_map, got none; download it again")
        names = sorted({_inside(index, name) for name in weight_map.values()})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder}: expected {_SINGLE}, or {_INDEX} with all its files; missing: {', '.join(missing)}; "
            "complete the download, or save the model as safetensors"
        )
    return [folder / name for name in names]


def _inside(index: Path, name: object) -> str:
    """A file name of an index, which comes with a download: it may not lead out of the model's folder.

    Links within the folder are followed wherever they lead, as the cache of the Hugging Face hub is made of them: they
    were made on this machine, and not by the download's text.
    """
    if not isinstance(name, str) or not name or "\0" in name or len(name) > _MAX_NAME:
        raise ConfigError(f"{index}: expected file names in weight_map, got {shown(name)}; download it again")
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
        raise ConfigError(
            f"{index}: expected .safetensors files within the model's folder in weight_map, got {shown(name)}; "
            "do not use this model unless you know where it is from"
        )
    return name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():  # a pipe would be waited for
            raise FileNotFoundError("no such file")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: thousands of brackets
        raise ConfigError(f"{path}: expected a JSON file, got none that can be read ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content
