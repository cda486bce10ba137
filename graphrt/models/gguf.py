"""Weights from a GGUF file, dequantized into the model in groups of rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.ops.quantized import Weight
from graphrt.models.config import ModelConfig
from graphrt.models.fields import printable
from graphrt.models.gguf_file import GGUFFile, read_gguf
from graphrt.models.packages import require
from graphrt.models.weights import Index

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQ_FACTORS = "rope_freqs.weight"
_CHUNK_ELEMENTS = 1 << 24  # elements dequantized at a time: 64 MiB of float32
_ROTATED = re.compile(r"self_attn\.[qk]_proj\.")


class GGUFSource:
    """The tensors of a GGUF file, with the names and the layout of a Hugging Face checkpoint."""

    quantization = None  # tensors are dequantized

    def __init__(self, path: Path) -> None:
        self._gguf = require("gguf", "to read GGUF files")
        self._file: GGUFFile = read_gguf(path)
        self._check_quantizations()
        shapes = {name: tensor.shape for name, tensor in self._file.tensors.items()}
        freq_factors: tuple[float, ...] = ()
        if _FREQ_FACTORS in shapes:
            freq_factors = tuple(self._dequantize(_FREQ_FACTORS, 0, 1)[0].tolist())
        self.config = ModelConfig.from_gguf(self._file.metadata, shapes, freq_factors)
        if freq_factors and shapes[_FREQ_FACTORS] != (self.config.head_dim // 2,):
            raise ConfigError(
                f"{_FREQ_FACTORS}: expected {self.config.head_dim // 2} values, got {list(shapes[_FREQ_FACTORS])}; "
                "convert the model again"
            )
        self._stored = {_hf_name(name): name for name in shapes if name != _FREQ_FACTORS}
        # In this architecture, llama.cpp rotates adjacent pairs of dimensions, and its files reorder q and k for this.
        self._reordered = self._file.metadata["general.architecture"] == "llama"

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Key-value pairs of the file."""
        return self._file.metadata

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._file.tensors[stored].shape for name, stored in self._stored.items()}

    def copy_into(self, name: str, target: Weight, index: Index = ()) -> None:
        assert isinstance(target, torch.Tensor), "check_weights refuses tensors for quantized weights"
        stored = self._stored[name]
        if target.dim() == 1:
            rows = torch.from_numpy(self._dequantize(stored, 0, 1)[0])[index]
            target.copy_(self._in_halves(rows) if self._is_reordered(name) else rows)
            return
        start = (index[0].start or 0) if index else 0
        columns = index[1] if len(index) > 1 else slice(0, target.shape[1])
        step = max(1, _CHUNK_ELEMENTS // target.shape[1])
        if self._is_reordered(name):
            step = -(-step // self.config.head_dim) * self.config.head_dim  # reorder only whole heads
        for first in range(0, target.shape[0], step):
            last = min(first + step, target.shape[0])
            rows = torch.from_numpy(self._dequantize(stored, start + first, start + last, columns))
            target[first:last].copy_(self._in_halves(rows) if self._is_reordered(name) else rows)

    def has_own_head(self) -> bool:
        return "output.weight" in self._file.tensors

    def _is_reordered(self, name: str) -> bool:
        return self._reordered and _ROTATED.search(name) is not None

    def _in_halves(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder rows of whole heads from pairs (2i, 2i + 1) to pairs (i, i + head_dim / 2)."""
        head_dim = self.config.head_dim
        heads: torch.Tensor = rows.unflatten(0, (-1, head_dim))
        return heads[:, [*range(0, head_dim, 2), *range(1, head_dim, 2)]].flatten(0, 1)

    def _dequantize(
        self, stored: str, first: int, last: int, columns: slice | None = None
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the rows [first, last) of a tensor as float32; with `columns`, whose bounds are ints, only these
        columns."""
        kind = self._gguf.GGMLQuantizationType(self._file.tensors[stored].quantization)
        raw = self._file.raw(stored)[first:last]
        if columns is None:
            values = self._gguf.dequantize(raw, kind)
        else:  # only the blocks that contain the columns
            size, nbytes = self._gguf.GGML_QUANT_SIZES[kind]
            start, end = columns.start // size, -(-columns.stop // size)
            blocks = self._gguf.dequantize(np.ascontiguousarray(raw[:, start * nbytes : end * nbytes]), kind)
            values = blocks[:, columns.start - start * size : columns.stop - start * size]
        return np.require(values, np.float32, "W")  # a float32 tensor is a view of the read-only file

    def _check_quantizations(self) -> None:
        """Reject quantizations that gguf cannot dequantize, before weights are allocated."""
        kinds = {tensor.quantization for tensor in self._file.tensors.values()}
        unknown = []
        for kind in sorted(kinds):
            block, num_bytes = self._gguf.GGML_QUANT_SIZES[kind]
            try:
                self._gguf.dequantize(np.zeros((1, num_bytes), dtype=np.uint8), self._gguf.GGMLQuantizationType(kind))
            except NotImplementedError:
                unknown.append(f"{self._gguf.GGMLQuantizationType(kind).name} (blocks of {block})")
        if unknown:
            raise UnsupportedError(
                f"{printable(self._file.path)}: the package gguf cannot dequantize {', '.join(unknown)}; "
                "use another quantization"
            )


def _hf_name(stored: str) -> str:
    """Return the Hugging Face name of a GGUF tensor. Unknown names are unchanged, and reported as unknown."""
    name, _, kind = stored.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", name)
    layer, base = (f"model.layers.{match[1]}.", match[2]) if match else ("", name)
    return f"{layer}{_NAMES[base]}.{kind}" if base in _NAMES else stored
