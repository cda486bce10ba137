"""Cells of the attention benchmark by part: uniform and ragged batches, page sizes, fp8, shapes, head sizes, chunks,
drafts, prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch

from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout
from scripts.rigs.cells import SEED, Cell, uniform_cell

SCHEDULE = "schedule"
"""The part of the benchmark that has no cells: the schedule alone."""

UNIFORM = (
    *((1, context) for context in (512, 2048, 8192, 32768)),
    *((4, 2048), (16, 512), (16, 2048), (64, 512), (64, 2048), (64, 8192)),
    *((128, 512), (128, 2048), (256, 512), (256, 2048)),
)
RAGGED_BATCHES = (16, 64, 256)

_ZIPF_EXPONENT, _ZIPF_LONGEST = 1.2, 16384


def make_cells(parts: Iterable[str]) -> list[Cell]:
    """Return the cells of the named parts. Raises: ConfigError: if a name is not in PARTS."""
    names = list(parts)
    if unknown := [name for name in names if name not in PARTS]:
        raise ConfigError(
            f"parts: expected some of {', '.join((*PARTS, SCHEDULE))}, got {', '.join(unknown)}; name others"
        )
    return [cell for name in names for cell in PARTS[name]()]


def shrink(cell: Cell) -> Cell:
    """Return the cell at a size that the CPU reference runs in seconds, for a dry run without meaningful times."""
    lengths = tuple(1 + (length - 1) // 512 for length in cell.lengths[:4])
    query_len = min(cell.query_len, *lengths) if cell.query_len > 1 else 1
    chunk = -(-cell.attention_chunk_size // 512)
    return replace(cell, lengths=lengths, query_len=query_len, attention_chunk_size=chunk)


def _uniform_cells() -> list[Cell]:
    return [uniform_cell("uniform", batch, context) for batch, context in UNIFORM]


def _ragged_cells() -> list[Cell]:
    cells = []
    for batch in RAGGED_BATCHES:
        rng = np.random.default_rng((SEED, batch))
        spread = rng.integers(1, 4096, size=batch, endpoint=True)
        zipf = np.minimum(rng.zipf(_ZIPF_EXPONENT, size=batch), _ZIPF_LONGEST)
        one_long = [256] * batch
        one_long[int(rng.integers(batch))] = 32768
        for name, lengths in (("1 to 4096", spread), ("one of 32768", one_long), ("Zipf", zipf)):
            cells.append(Cell("ragged", f"{batch} x {name}", tuple(int(length) for length in lengths)))
    return cells


def _page_cells() -> list[Cell]:
    return [
        Cell(
            "pages", f"{batch} x 2048, {page_size} {layout.value}", (2048,) * batch, page_size=page_size, layout=layout
        )
        for batch in (16, 64)
        for page_size in (16, 64, 128)
        for layout in KVLayout
    ]


def _fp8_cells() -> list[Cell]:
    sizes = ((1, 2048), (1, 32768), (16, 2048), (64, 512), (64, 2048), (64, 8192), (256, 512), (256, 2048))
    return [uniform_cell("fp8", batch, context, kv_dtype=torch.float8_e4m3fn) for batch, context in sizes]


def _shape_cells() -> list[Cell]:
    return [
        Cell(
            "shapes", f"{q_heads}/{kv_heads} x {head_dim}, {b} x {context}", (context,) * b, q_heads, kv_heads, head_dim
        )
        for q_heads, kv_heads, head_dim in ((9, 3, 64), (32, 32, 128), (64, 8, 128), (16, 1, 128))
        for b, context in ((1, 2048), (16, 2048), (64, 2048), (256, 512))
    ]


def _head_cells() -> list[Cell]:
    """K and V heads of different sizes, like DeepSeek V3 in expanded form, with and without a CUDA kernel for them."""
    expanded = [
        Cell("heads", f"16/16 x 192/128, {b} x {context}", (context,) * b, 16, 16, 192, v_head_dim=128)
        for b, context in ((1, 2048), (16, 2048), (64, 2048), (256, 512))
    ]
    others = [
        Cell("heads", f"32/8 x {head_dim}, {b} x 2048", (2048,) * b, 32, 8, head_dim)
        for head_dim in (72, 80, 256, 512)
        for b in (16, 64)
    ]
    return expanded + others


def _chunk_cells() -> list[Cell]:
    """Llama 4: most layers attend within a chunk of 8192 tokens, the others to all tokens."""
    lengths = tuple(int(n) for n in np.random.default_rng((SEED, 8192)).integers(1, 32768, size=16, endpoint=True))
    return [
        Cell("chunks", f"{name}, {shown}", rows, 40, 8, attention_chunk_size=chunk)
        for name, rows in (("16 x 32768", (32768,) * 16), ("16 x 1 to 32768", lengths))
        for shown, chunk in (("chunks", 8192), ("full", 0))
    ]


def _draft_cells() -> list[Cell]:
    """Requests with 3 and 4 drafts, and without."""
    return [
        Cell("drafts", f"{batch} x 8192, {new} new", (8192,) * batch, query_len=new)
        for batch in (1, 64)
        for new in (1, 4, 5)
    ]


def _varlen_cells() -> list[Cell]:
    return [
        Cell("varlen", "4 x 2048 causal", (2048,) * 4, query_len=2048),
        Cell("varlen", "1 x 2048 causal", (2048,), query_len=2048),
        Cell("varlen", "1 x 2048 after 6144", (8192,), query_len=2048),
        Cell("varlen", "1 x 8192 causal", (8192,), query_len=8192),
        Cell("varlen", "16 x 512 causal", (512,) * 16, query_len=512),
        Cell("varlen", "4 x 2048 causal, heads of 64", (2048,) * 4, head_dim=64, query_len=2048),
    ]


PARTS: dict[str, Callable[[], list[Cell]]] = {
    "uniform": _uniform_cells,
    "ragged": _ragged_cells,
    "pages": _page_cells,
    "fp8": _fp8_cells,
    "shapes": _shape_cells,
    "heads": _head_cells,
    "chunks": _chunk_cells,
    "drafts": _draft_cells,
    "varlen": _varlen_cells,
}
