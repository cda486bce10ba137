"""Configuration of a runtime: frozen, checked, resolved into concrete numbers once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphrt import env
from graphrt.capture.descriptor import check_sizes, decode_ladder, mixed_ladder
from graphrt.kernels.checks import check_bool_field, check_int_field
from graphrt.kernels.errors import ConfigError

_MAX_REQS = (1 << 20) - 1
_MAX_TOKENS = 1 << 30  # positions, and sums of a few of them, are int32 on the device


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Capacities and choices of a runtime.

    max_num_reqs    most requests in one step; also the number of persistent row states
    max_num_tokens  most new tokens in one step (prompt chunks and decodes together)
    max_seq_len     longest sequence, prompt and output together; width of the block table
    query_len       new tokens per row in decode graphs: 1, or 1 + K with speculation
    decode_sizes    row counts to capture; None is the default ladder, () captures none
    mixed_sizes     token counts of mixed graphs to capture; None is the default ladder, () captures none
    ring_depth      steps in flight before `replay` waits
    backend         attention backend by name; None takes GRAPHRT_BACKEND, else the best that can run
    use_graphs      False runs every step eagerly (counted, with the reason)
    check_weights   compare all captured weight addresses before every step (microseconds)
    mixed_batches   False: `replay` takes only batches whose rows all have `query_len` new tokens, and refuses others.
                    Prompts are then computed elsewhere. Backends without mixed batches can serve, and no mixed graphs
                    are captured
    batch_invariant a row's result does not depend on its neighbours, bitwise: only backends that promise it for
                    attention are chosen. What a model computes besides is its own matter: a matrix product may differ
                    in its last bits between captured sizes
    """

    max_num_reqs: int = 256
    max_num_tokens: int = 2048
    max_seq_len: int = 4096
    query_len: int = 1
    decode_sizes: tuple[int, ...] | None = None
    mixed_sizes: tuple[int, ...] | None = None
    ring_depth: int = 4
    backend: str | None = None
    use_graphs: bool = True
    check_weights: bool = True
    mixed_batches: bool = True
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_int_field(self, "max_num_reqs", 1, _MAX_REQS, advice="pass what one step may hold")
        for name in ("max_num_tokens", "max_seq_len", "query_len"):
            check_int_field(self, name, 1, _MAX_TOKENS, advice="on the device it is an int32")
        check_int_field(self, "ring_depth", 2, advice="with one slot every step waits")
        check_bool_field(self, "mixed_batches", advice="False serves decode batches alone")
        if self.mixed_sizes and not self.mixed_batches:
            raise ConfigError(
                f"RuntimeConfig.mixed_sizes: expected none with mixed_batches=False, got {self.mixed_sizes}; "
                "drop the sizes, or allow mixed batches"
            )
        if self.max_num_reqs * self.query_len > self.max_num_tokens:
            raise ConfigError(
                f"RuntimeConfig.max_num_tokens: expected >= max_num_reqs x query_len = "
                f"{self.max_num_reqs * self.query_len}, got {self.max_num_tokens}; a full decode step must fit"
            )

    def resolve(self) -> RuntimeConfig:
        """A config with every None replaced: ladders sorted and in range, the backend from the environment."""
        decode = decode_ladder(self.max_num_reqs) if self.decode_sizes is None else self.decode_sizes
        mixed = self.mixed_sizes
        if mixed is None:
            mixed = mixed_ladder(self.max_num_tokens) if self.mixed_batches else ()
        return replace(
            self,
            decode_sizes=check_sizes("decode_sizes", decode, self.max_num_reqs),
            mixed_sizes=check_sizes("mixed_sizes", mixed, self.max_num_tokens),
            backend=self.backend if self.backend is not None else env.backend(),
        )
