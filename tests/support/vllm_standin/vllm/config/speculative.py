from dataclasses import dataclass


@dataclass
class SpeculativeConfig:
    num_speculative_tokens: int | None = None
