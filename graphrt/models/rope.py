"""Rotary position embedding: inverse frequencies for every scaling type, and the table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphrt.kernels.checks import check_int, check_int_field, is_finite
from graphrt.kernels.errors import ConfigError
from graphrt.models.fields import MAX_EXTENT, MAX_NUMBER, FieldReader, shown

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles. Names are those of `rope_parameters` in a Hugging Face config.json.

    original_positions   length that the model was trained for before its context was extended
    freq_factors         divisor of each inverse frequency (a GGUF file's `rope_freqs.weight`); empty means none
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
        def check(name: str, good: bool, expected: str) -> None:
            if not good:
                raise ConfigError(f"RopeConfig.{name}: expected {expected}, got {shown(getattr(self, name))}")

        def positive(value: object) -> bool:
            return is_finite(value) and 0 < value <= MAX_NUMBER  # type: ignore[operator]  # a number

        check("kind", isinstance(self.kind, str) and self.kind in KINDS, f"one of {', '.join(KINDS)}")
        check("theta", positive(self.theta) and self.theta > 1, f"a number > 1 and <= {MAX_NUMBER:g}")
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            check(name, positive(getattr(self, name)), f"a number > 0 and <= {MAX_NUMBER:g}")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            check(name, value is None or positive(value), f"None or a number > 0 and <= {MAX_NUMBER:g}")
        for name in ("short_factor", "long_factor", "freq_factors"):
            values = getattr(self, name)
            check(name, isinstance(values, tuple) and all(map(positive, values)), "a tuple of finite numbers > 0")
        check("truncate", isinstance(self.truncate, bool), "True or False")
        needed = {"yarn": 1, "llama3": 1, "longrope": 2}.get(self.kind, 0)
        check_int_field(self, "original_positions", needed, MAX_EXTENT, advice="pass the length before the extension")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"RopeConfig.high_freq_factor: expected more than low_freq_factor={self.low_freq_factor}, "
                f"got {self.high_freq_factor}"
            )

    def inverse_frequencies(
        self, rotary_dim: int, trained_positions: int, max_positions: int
    ) -> tuple[torch.Tensor, float]:
        """Angle per position of each pair [rotary_dim / 2] float32, and the factor on cosines and sines.

        A captured step cannot switch tables by length, so the types that depend on it are resolved once: `dynamic`
        for max(max_positions, trained_positions), `longrope` with its long factors if max_positions is beyond the
        original length.

        Raises: ConfigError for dimensions that cannot be rotated.
        """
        check_int("rotary_dim", rotary_dim, 4, advice="pass an even number of dimensions")
        pairs = {"short_factor": self.short_factor, "long_factor": self.long_factor, "freq_factors": self.freq_factors}
        for name, values in pairs.items():
            if len(values) != rotary_dim // 2 and (values or (self.kind == "longrope" and name != "freq_factors")):
                raise ConfigError(f"RopeConfig.{name}: expected {rotary_dim // 2} values, got {len(values)}")
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
            return self._yarn(inverse, rotary_dim)
        elif self.kind == "longrope":
            factors = self.long_factor if max_positions > self.original_positions else self.short_factor
            inverse = 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * theta**exponents)
            return inverse, self._longrope_attention_factor()
        if self.freq_factors:
            inverse = inverse / torch.tensor(self.freq_factors, dtype=torch.float32, device="cpu")
        return inverse, 1.0

    def cos_sin(
        self, rotary_dim: int, trained_positions: int, max_positions: int, device: torch.device
    ) -> torch.Tensor:
        """Table [max_positions, rotary_dim] float32: cosines of each position's angles, then sines."""
        inverse, scale = self.inverse_frequencies(rotary_dim, trained_positions, max_positions)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32, device=device), inverse.to(device))
        return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1)

    def _llama3(self, inverse: torch.Tensor) -> torch.Tensor:
        """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
        turns = self.original_positions * inverse / (2 * math.pi)  # full turns within the original length
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * inverse / self.factor + blend * inverse

    def _yarn(self, inverse: torch.Tensor, rotary_dim: int) -> tuple[torch.Tensor, float]:
        """Interpolate slow pairs, keep fast ones, with a ramp between (Peng et al. 2023, arXiv:2309.00071)."""

        def pair_with(turns: float) -> float:
            """Index of the pair that makes so many turns within the original length."""
            length = self.original_positions / (turns * 2 * math.pi)
            return rotary_dim * math.log(length) / (2 * math.log(self.theta))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        width = high - low if high != low else 0.001
        ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0.0, 1.0)
        return inverse / self.factor * ramp + inverse * (1 - ramp), self._yarn_attention_factor()

    def _yarn_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def magnitude(scale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return magnitude(self.mscale) / magnitude(self.mscale_all_dim)
        return magnitude(1.0)

    def _longrope_attention_factor(self) -> float:
        """sqrt(1 + ln(extension) / ln(original length)) (Ding et al. 2024, arXiv:2402.13753)."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original_positions))


def rope_parameters(model: FieldReader) -> Mapping[str, Any]:
    """`rope_parameters` of a config.json, or the older `rope_scaling`."""
    return model.mapping("rope_parameters" if model.has("rope_parameters") else "rope_scaling")


def rope_from_hf(model: FieldReader, rotary_dim: int) -> RopeConfig:
    """Read the rotation of a config.json; `rope_theta` may stand beside the other parameters or above them."""
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
    if kind in ("linear", "dynamic", "llama3"):
        options["factor"] = fields.number("factor")
    elif kind == "yarn":
        options["factor"] = fields.number("factor", trained / original)
    elif kind == "longrope":
        options["factor"] = fields.number("factor", trained / original)
        options["short_factor"] = fields.numbers("short_factor", rotary_dim // 2)
        options["long_factor"] = fields.numbers("long_factor", rotary_dim // 2)
    if kind == "llama3":
        options["low_freq_factor"] = fields.number("low_freq_factor")
        options["high_freq_factor"] = fields.number("high_freq_factor")
        if options["high_freq_factor"] <= options["low_freq_factor"] and not fields.problems:
            fields.problems.append("high_freq_factor: expected more than low_freq_factor")
    if kind == "yarn":
        options |= {key: fields.number(key) for key in ("beta_fast", "beta_slow") if fields.has(key)}
        options |= {key: fields.number(key) for key in ("mscale", "mscale_all_dim") if fields.has(key)}
        options["truncate"] = fields.flag("truncate", True)
    if kind in ("yarn", "longrope") and fields.has("attention_factor"):
        options["attention_factor"] = fields.number("attention_factor")
    theta = (fields if fields.has("rope_theta") else model).number("rope_theta", 10_000.0, above=1.0)
    model.problems += fields.problems
    if fields.problems or model.problems:
        return RopeConfig()  # the problems are reported
    return RopeConfig(kind, theta, original_positions=original, **options)


def rope_from_gguf(
    fields: FieldReader, architecture: str, trained_positions: int, freq_factors: tuple[float, ...]
) -> RopeConfig:
    """Read the `rope.*` keys of a GGUF file; `freq_factors` is its tensor `rope_freqs.weight`, if any."""
    prefix = f"{architecture}.rope"
    kind = fields.text(f"{prefix}.scaling.type", "none")
    theta = fields.number(f"{prefix}.freq_base", 10_000.0, above=1.0)
    if kind not in ("none", "linear", "yarn"):
        fields.unsupported(f"rope.scaling.type {shown(kind)} (supported: none, linear, yarn)")
    if fields.has(f"{prefix}.scaling.attn_factor") and fields.number(f"{prefix}.scaling.attn_factor") != 1.0:
        fields.unsupported("rope.scaling.attn_factor other than 1")
    if kind != "none" and freq_factors:
        fields.unsupported(f"rope.scaling.type {kind!r} together with rope_freqs.weight")
    if kind == "yarn":
        original = fields.integer(f"{prefix}.scaling.original_context_length", trained_positions)
        return RopeConfig("yarn", theta, fields.number(f"{prefix}.scaling.factor"), original)
    if kind == "linear":
        return RopeConfig("linear", theta, fields.number(f"{prefix}.scaling.factor"))
    return RopeConfig(theta=theta, freq_factors=freq_factors)
