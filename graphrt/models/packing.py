"""Quantized weights of safetensors files: AWQ, GPTQ, and fp8 with one scale per matrix or row.

A module stores these tensors in place of `weight` [rows, depth]. A 32-bit word holds 8 values of 4 bits, the first one
in its lowest bits:

    awq   qweight [depth, rows / 8]  8 rows of a word in the order 0 2 4 6 1 3 5 7; qzeros likewise
    gptq  qweight [depth / 8, rows]  8 adjacent k; qzeros [groups, rows / 8] in order; format gptq stores zero - 1
          g_idx   [depth]            group of each k, which must be k / group
          bias    [rows]             zeros, in models without biases too
    both  scales  [groups, rows]
    fp8   weight  [rows, depth]      float8_e4m3fn; weight_scale: one, or one per row; input_scale: not used.
                                     The names of transformers: weight_scale_inv, activation_scale
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.ops.quantized import NIBBLE_ORDER, Fp8Weight, Int4Weight, QuantizedWeight, check_group, nibbles
from graphrt.kernels.sizes import ceil_div
from graphrt.models.config import ModelConfig
from graphrt.models.fields import printable
from graphrt.models.quantization import Quantization
from graphrt.models.weights import Index

Shape = tuple[int, ...]

_ONE_IN_EACH_NIBBLE = 0x11111111
_FP8_OF_TRANSFORMERS = ("weight_scale_inv", "activation_scale")


class PackedWeights:
    """The quantized weights of a checkpoint, by the names that they would have without quantization.

    config   of the model
    shapes   of all tensors of the checkpoint
    dtypes   of all tensors, as safetensors names them
    read     returns a tensor, or `tensor[index]`

    Attributes:
        shapes: the checkpoint's shapes with one `weight` in place of the tensors of each quantized module.
        names: names of the quantized weights.

    Raises:
        ConfigError: if a module's tensors do not fit together.
        UnsupportedError: if weights were reordered by activation (`desc_act`).
    """

    def __init__(
        self,
        config: ModelConfig,
        quantization: Quantization,
        shapes: Mapping[str, Shape],
        dtypes: Mapping[str, str],
        read: Callable[[str, Index], torch.Tensor],
    ) -> None:
        self._quantization, self._read = quantization, read
        is_fp8 = quantization.bits == 8
        marker = ".weight" if is_fp8 else ".qweight"
        of_module: tuple[str, ...] = ("scales", "qweight", "qzeros", "g_idx")
        if is_fp8:
            of_transformers = any(name.endswith(".weight_scale_inv") for name in shapes)
            of_module = _FP8_OF_TRANSFORMERS if of_transformers else ("weight_scale", "input_scale")
        self._scale = of_module[0]
        self.shapes, self.names = dict(shapes), set[str]()
        for name, dtype in dtypes.items():
            if not name.endswith(marker) or (is_fp8 and dtype != "F8_E4M3"):
                continue
            module = name.removesuffix(marker)
            parts = {part: self.shapes.pop(f"{module}.{part}", None) for part in of_module}
            self._check(module, shapes[name], parts, dtypes)
            bias = f"{module}.bias"
            if bias in shapes and not _has_bias(config, module) and not read(bias, ()).any():
                del self.shapes[bias]
            self.names.add(f"{module}.weight")
            self.shapes[f"{module}.weight"] = self._shape(shapes[name])

    def weight(
        self, name: str, dtype: torch.dtype, device: torch.device, index: Index = (), group: int = 0
    ) -> QuantizedWeight:
        """Read `weight[index]` of a quantized weight for activations of `dtype`, and convert it on `device`.

        Only the words, scales and zeros of `index` are read.

        Args:
            group: group of the result, which divides the checkpoint's and the bounds of the columns. Scales and zeros
                are repeated. 0: as in the checkpoint.
        """
        module, shape = name.removesuffix(".weight"), self.shapes[name]
        parts = zip(shape, (*index, slice(None), slice(None)), strict=False)
        rows, columns = (slice(*part.indices(size)[:2]) for size, part in parts)

        def read(part: str, *where: slice) -> torch.Tensor:
            return self._read(f"{module}.{part}", where).to(device)

        if self._quantization.bits == 8:
            scale = read(self._scale).float().flatten().expand(shape[0])
            return Fp8Weight(read("weight", rows, columns).contiguous(), scale[rows].contiguous(), dtype)
        packing, stored_group = self._quantization.packing, self._quantization.group
        group = group or stored_group
        words = slice(rows.start // 8, ceil_div(rows.stop, 8))
        groups = slice(columns.start // stored_group, ceil_div(columns.stop, stored_group))
        one = _ONE_IN_EACH_NIBBLE if packing == "gptq" else 0  # adds to the whole word, as the subtraction did

        def by_row(part: str, where: slice) -> torch.Tensor:
            """Read words of 8 rows, and return their values [rows, columns or groups]."""
            values = nibbles(read(part, where, words) + one)
            values = (values[..., _INVERSE] if packing == "awq" else values).flatten(1)
            return values.narrow(1, rows.start % 8, rows.stop - rows.start).t().contiguous()

        if packing == "awq":
            values = by_row("qweight", columns)
        else:
            values = nibbles(read("qweight", slice(columns.start // 8, columns.stop // 8), rows))
            values = values.transpose(0, 1).flatten(1)
        scale, zero = (
            stored.repeat_interleave(stored_group // group, 1).narrow(
                1, columns.start % stored_group // group, values.shape[1] // group
            )
            for stored in (read("scales", groups, rows).t().to(dtype), by_row("qzeros", groups))
        )
        return Int4Weight.pack(values, scale, zero)

    def _shape(self, stored: Shape) -> Shape:
        """Return [rows, depth] for the stored shape of a weight."""
        if self._quantization.bits == 8:
            return stored
        first, second = stored
        return (8 * second, first) if self._quantization.packing == "awq" else (second, 8 * first)

    def _check(self, module: str, stored: Shape, parts: Mapping[str, Shape | None], dtypes: Mapping[str, str]) -> None:
        if len(stored) != 2:
            raise ConfigError(f"{printable(module)}: expected a quantized matrix, got shape {list(stored)}")
        rows, depth = self._shape(stored)
        wanted: dict[str, list[Shape | None]]
        if self._quantization.bits == 8:
            wanted = {self._scale: [(), (1,), (1, 1), (rows,), (rows, 1)]}
        else:
            check_group(self._quantization.group, depth)
            groups = depth // self._quantization.group
            wanted = {"qzeros": [(groups, rows // 8)], "scales": [(groups, rows)], "g_idx": [None, (depth,)]}
        for part, shapes in wanted.items():
            if parts[part] not in shapes:
                found = "nothing" if parts[part] is None else f"shape {list(parts[part] or ())}"
                raise ConfigError(
                    f"{printable(module)}.{part}: expected shape {list(shapes[-1] or ())} for a weight "
                    f"[{rows}, {depth}], got {found}; use the config that belongs to the checkpoint"
                )
        packed = () if self._quantization.bits == 8 else ("qweight", "qzeros")
        if any(dtypes[f"{module}.{part}"] != "I32" for part in packed):
            raise ConfigError(f"{printable(module)}: {' and '.join(packed)} must be int32; quantize the model again")
        if (dtype := dtypes[f"{module}.{self._scale}"]) not in ("F16", "BF16", "F32", "F64"):
            raise UnsupportedError(
                f"{printable(module)}.{self._scale}: expected floats of 16 to 64 bits, got {dtype}; "
                "use another checkpoint"
            )
        if parts.get("g_idx") is not None:
            groups_of_k = torch.arange(depth, dtype=torch.int32, device="cpu") // self._quantization.group
            if not torch.equal(self._read(f"{module}.g_idx", ()).int(), groups_of_k):
                raise UnsupportedError(
                    f"{printable(module)}.g_idx: graphrt does not implement weights that are reordered by activation "
                    "(quantization_config: desc_act); use a checkpoint with desc_act=false"
                )


def _has_bias(config: ModelConfig, module: str) -> bool:
    """Whether the model has a bias in a module such as "model.layers.0.mlp.down_proj"."""
    name = module.rpartition(".")[2].removesuffix("_proj")
    if name in ("q", "k", "v"):
        return config.qkv_bias
    return config.o_bias if name == "o" else config.mlp_bias and name != "lm_head"


_INVERSE = [NIBBLE_ORDER.index(i) for i in range(8)]
