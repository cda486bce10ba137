"""Rotary position embedding: inverse frequencies for all scaling types, and the table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphrt.kernels.checks import check_int_field, shown
from graphrt.kernels.errors import ConfigError
from graphrt.models.fields import MAX_EXTENT, FieldReader

_ROWS_AT_ONCE = 1 << 16  # limits the temporary memory when computing a table
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The mapping of positions to angles. Names are as in `rope_parameters` of a Hugging Face config.json.

    Attributes:
        original_positions: training context length before the context was extended.
        attention_factor: factor for cosines and sines. None means the default of `kind`.
        freq_factors: divisors of the inverse frequencies (a GGUF file's `rope_freqs.weight`). Empty means none.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    freq_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"RopeConfig.kind: expected one of {', '.join(KINDS)}, got {shown(self.kind)}; choose one of these"
            )
        needed = {"yarn": 1, "llama3": 1, "longrope": 2}.get(self.kind, 0)
        check_int_field(self, "original_positions", needed, MAX_EXTENT, advice="pass the length before the extension")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"RopeConfig.high_freq_factor: expected more than low_freq_factor={self.low_freq_factor}, "
                f"got {self.high_freq_factor}; pass the factors of the model"
            )

    def inverse_frequencies(
        self, rotary_dim: int, trained_positions: int, max_positions: int
    ) -> tuple[torch.Tensor, float]:
        """Return the angle per position of each pair, and the factor for cosines and sines.

        A captured step cannot switch tables by sequence length, so types that depend on the length are resolved once.
        `dynamic` uses max(max_positions, trained_positions), and `longrope` uses its long factors if max_positions
        exceeds the original length.

        Returns:
            float32 [rotary_dim / 2] on the CPU, and the factor.

        Raises:
            ConfigError: if the length of a factor list is not rotary_dim / 2.
        """
        pairs = {"short_factor": self.short_factor, "long_factor": self.long_factor, "freq_factors": self.freq_factors}
        for name, values in pairs.items():
            if len(values) != rotary_dim // 2 and (values or (self.kind == "longrope" and name != "freq_factors")):
                raise ConfigError(
                    f"RopeConfig.{name}: expected {rotary_dim // 2} values, got {len(values)}; pass one per pair"
                )
        theta = self.theta
        if self.kind == "dynamic":
            stretch = self.factor * max(max_positions, trained_positions) / trained_positions - (self.factor - 1)
            theta *= stretch ** (rotary_dim / (rotary_dim - 2))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / rotary_dim
        inverse = 1.0 / theta**exponents
        if self.kind == "linear":
            inverse = inverse / self.factor
        elif self.kind == "llama3":
            inverse = self._llama3(inverse)
        elif self.kind == "yarn":
            inverse = self._yarn(inverse, rotary_dim)
        elif self.kind == "longrope":
            factors = self.long_factor if max_positions > self.original_positions else self.short_factor
            inverse = 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * theta**exponents)
        if self.freq_factors:
            inverse = inverse / torch.tensor(self.freq_factors, dtype=torch.float32, device="cpu")
        return inverse, self._default_attention_factor() if self.attention_factor is None else self.attention_factor

    def cos_sin(
        self, rotary_dim: int, trained_positions: int, max_positions: int, device: torch.device
    ) -> torch.Tensor:
        """Return the cosines, then the sines, of each position's angles, float32 [max_positions, rotary_dim]."""
        inverse, scale = self.inverse_frequencies(rotary_dim, trained_positions, max_positions)
        table = torch.empty((max_positions, rotary_dim), dtype=torch.float32, device=device)
        if device.type == "meta":  # torch's functions for it import torch._dynamo, which takes 1 to 3 s
            return table
        inverse = inverse.to(device)
        for first in range(0, max_positions, _ROWS_AT_ONCE):
            rows = table[first : first + _ROWS_AT_ONCE]
            positions = torch.arange(first, first + len(rows), dtype=torch.float32, device=device)
            angles = torch.outer(positions, inverse)
            rows.copy_(torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1))
        return table

    def _llama3(self, inverse: torch.Tensor) -> torch.Tensor:
        """Stretch long waves by `factor`, keep short waves, and blend in between (Llama 3.1)."""
        turns = self.original_positions * inverse / (2 * math.pi)  # full turns within the original length
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * inverse / self.factor + blend * inverse

    def _yarn(self, inverse: torch.Tensor, rotary_dim: int) -> torch.Tensor:
        """Interpolate slow pairs and keep fast pairs, with a ramp in between (Peng et al. 2023, arXiv:2309.00071)."""

        def pair_with(turns: float) -> float:
            """Return the index of the pair that makes `turns` full turns within the original length."""
            length = self.original_positions / (turns * 2 * math.pi)
            return rotary_dim * math.log(length) / (2 * math.log(self.theta))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        width = high - low if high != low else 0.001
        ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0.0, 1.0)
        return inverse / self.factor * ramp + inverse * (1 - ramp)

    def _default_attention_factor(self) -> float:
        """Return the factor for a type if the file specifies none."""

        def magnitude(scale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

        if self.kind == "longrope":  # Ding et al. 2024, arXiv:2402.13753
            return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original_positions))
        if self.kind != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return magnitude(self.mscale) / magnitude(self.mscale_all_dim)
        return magnitude(1.0)


def rope_parameters(model: FieldReader) -> Mapping[str, Any]:
    """Return the rotation parameters of a config.json. A non-empty `rope_scaling` (older name) takes precedence."""
    return model.mapping("rope_scaling") or model.mapping("rope_parameters")


def rope_from_hf(model: FieldReader, rotary_dim: int) -> RopeConfig:
    """Read the rotation of a config.json. `rope_theta` is among the rotation parameters or at the top level."""
    parameters = rope_parameters(model)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        model.unsupported("rope_parameters that differ between layers")
        return RopeConfig()
    fields = FieldReader(parameters, model.where)
    kind = fields.text("rope_type", fields.text("type", "default"))
    model.problems += fields.problems
    if kind and kind not in KINDS:
        model.unsupported(f"rope_type {shown(kind)} (supported: {', '.join(KINDS)})")
    if kind not in KINDS:
        return RopeConfig()
    trained = model.integer("max_position_embeddings", 1)
    least = 2 if kind == "longrope" else 1
    name = "original_max_position_embeddings"
    source = model if model.has(name) else fields
    fields.problems.clear()
    original = source.integer(name, max(trained, least), least=least)
    options: dict[str, Any] = {}
    if kind != "default":
        options["factor"] = fields.number("factor", trained / original if kind in ("yarn", "longrope") else None)
    if kind == "longrope":
        options |= {name: fields.numbers(name, rotary_dim // 2) for name in ("short_factor", "long_factor")}
    if kind == "llama3":
        options |= {name: fields.number(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        options |= {key: fields.number(key) for key in names if fields.has(key)}
        options["truncate"] = fields.flag("truncate", "truncate" not in parameters)
    if kind in ("yarn", "longrope") and fields.has("attention_factor"):
        options["attention_factor"] = fields.number("attention_factor")
    theta = (fields if fields.has("rope_theta") else model).number("rope_theta", 10_000.0, above=1.0)
    model.problems += fields.problems
    if fields.problems or model.problems:
        return RopeConfig()  # finish() raises
    return RopeConfig(kind, theta, original_positions=original, **options)


def rope_from_gguf(
    fields: FieldReader, architecture: str, trained_positions: int, freq_factors: tuple[float, ...]
) -> RopeConfig:
    """Read the `rope.*` keys of a GGUF file by the rules of llama.cpp.

    A missing type means "linear"; a missing or zero factor means 1. Older files call the factor `scale_linear`.
    `freq_factors` is the tensor `rope_freqs.weight`, if the file has one.
    """
    prefix = f"{architecture}.rope."
    scaling = f"{prefix}scaling."
    kind = fields.text(f"{scaling}type", "linear")
    if kind not in ("none", "linear", "yarn"):
        fields.unsupported(f"rope.scaling.type {shown(kind)} (supported: none, linear, yarn)")
    factor_key = f"{scaling}factor" if fields.has(f"{scaling}factor") else f"{prefix}scale_linear"
    factor = 1.0 if fields.get(factor_key, 0) == 0 else fields.number(factor_key)
    theta = fields.number(f"{prefix}freq_base", 10_000.0, above=1.0)
    original = fields.integer(f"{scaling}original_context_length", trained_positions)
    fast, slow = fields.number(f"{scaling}yarn_beta_fast", 32.0), fields.number(f"{scaling}yarn_beta_slow", 1.0)
    attention = fields.number(f"{scaling}attn_factor", 1.0)
    fields.refuse({f"{scaling}yarn_ext_factor": (1.0, -1.0), f"{scaling}yarn_attn_factor": (1.0,)})
    if not all(0 < factor < math.inf for factor in freq_factors):
        fields.problems.append("rope_freqs.weight: expected finite numbers > 0")
    common: dict[str, Any] = {"theta": theta, "freq_factors": freq_factors}
    if kind == "yarn":
        rope = RopeConfig("yarn", factor=factor, original_positions=original, beta_fast=fast, beta_slow=slow, **common)
    elif kind == "linear" and factor != 1.0:
        rope = RopeConfig("linear", factor=factor, **common)
    else:
        rope = RopeConfig(**common)
    # llama.cpp multiplies its default factor by the file's.
    return rope if attention == 1.0 else replace(rope, attention_factor=attention * rope._default_attention_factor())
