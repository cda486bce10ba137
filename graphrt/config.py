"""Configuration of a runtime: frozen, checked in full where it is made, resolved into concrete numbers once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from graphrt import env
from graphrt.capture.descriptor import default_decode_sizes, default_mixed_sizes
from graphrt.kernels.checks import check_bool_field, check_instance, check_int_field, check_ints, check_sequence, shown
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.metadata.arguments import MAX_REQS, MAX_TOKENS
from graphrt.kernels.numbers import REQUEST_DTYPES, converted
from graphrt.kernels.ops.sampling_logprobs import MAX_TOP

_MAX_LENGTH = 1 << 30  # positions, and sums of a few of them, are int32 on the device
_MAX_RING = 1024
_MAX_BIAS = 1 << 16

Need = tuple[str, int]
"""A field of RuntimeConfig, and the least value of it that some rows need; of a bool 1 is True."""


@dataclass(frozen=True, slots=True)
class RequestTensor:
    """A tensor of a runtime with a row per row id, which the model and the sampler read: `Step.request_state(name)`.

        RequestTensor("adapter", dtype=torch.int32)             a number per row, 0 where a row says nothing
        RequestTensor("shift", (512,), initial=-1.0)            512 float32 per row

    shape     of one row's value; () is a number
    dtype     a float of 64, 32, 16 or 8 bits (float8_e4m3fn, float8_e5m2), bfloat16, int64 to int8, uint8 or bool
    initial   what rows have that were told nothing, and pad rows; a number of `dtype`

    Raises: ConfigError for another dtype, and for an `initial` that `dtype` does not have.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    initial: float = 0

    def __post_init__(self) -> None:
        check_instance("RequestTensor.name", self.name, str, advice="name it as Step.request_state does")
        sizes = check_ints(
            "RequestTensor.shape", self.shape, 0, _MAX_LENGTH, advice="() is a number", error=ConfigError
        )
        object.__setattr__(self, "shape", tuple(sizes.tolist()))
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in REQUEST_DTYPES:
            raise ConfigError(
                f"RequestTensor.dtype: expected a float, a signed int, uint8 or bool, got {shown(self.dtype)}; pass a "
                "torch.dtype of these"
            )
        check_instance("RequestTensor.initial", self.initial, (int, float), advice="pass a number")
        converted("RequestTensor.initial", self.initial, self.dtype, ConfigError)


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Capacities and choices of a runtime.

    max_num_reqs    most requests in one step, up to 65,536; also the number of persistent row states
    max_num_tokens  most new tokens in one step (prompt chunks and decodes together), up to 65,536
    max_seq_len     KV tokens of the longest sequence: prompt and output together, but for the last sampled token, which
                    no step writes. Width of the block table
    query_len       new tokens per row in decode graphs: 1, or 1 + K with speculation
    decode_sizes    row counts to capture; None is the default capture_sizes, () captures none
    mixed_sizes     token counts of mixed graphs to capture; None is the default capture_sizes, () captures none
    ring_depth      launches in flight before `replay` waits. A larger value hides longer pauses of the host. With
                    `shadow_every` twice as many may be in flight, as an eager step is such a pause
    launch_steps    most steps of one launch of a DecodeSession
    loop_sizes      decode sizes whose steps can run many times in one launch; other sizes are launched step by step
    backend         attention backend by name; None takes GRAPHRT_BACKEND, else the best that can run
    prefill_backend serves the prompts of mixed steps, by name, while `backend` serves the rows that decode. "none": one
                    kernel of `backend` serves both. None takes what was measured to be fastest
    use_graphs      False runs every step eagerly (counted, with the reason)
    check_weights   before each step one address of a weight or cache is compared, and four names of the model are
                    looked up, in turns. A weight that moved is found within (weights and cache tensors) steps, one that
                    was replaced within (weights, buffers and submodules) / 4. The first step has everything checked
                    that a graph holds whatever this says, and every step with GRAPHRT_DEBUG=1
    shadow_every    every so many launches one step runs eagerly too, from the same state as its graph, and what both
                    leave is compared bit by bit: `stats().shadow_differences`, and a RuntimeWarning. A launch of many
                    steps is replayed step by step then. A shadow takes about as long as an eager step. 0: never
    mixed_batches   False: `replay` takes only batches whose rows all have `query_len` new tokens, and refuses others.
                    Prompts are then computed elsewhere. Backends without mixed batches can serve, and no mixed graphs
                    are captured
    max_encoder_len  most tokens that an encoder writes for a row; width of the cross groups' tables. Needed where the
                    model has cross layers, and refused where it has none
    batch_invariant a row's result does not depend on its neighbours, bitwise: only backends that promise it for
                    attention are chosen. What a model computes besides is its own matter: a matrix product may differ
                    in its last bits between captured sizes
    penalties       rows may have repetition, presence and frequency penalties. Takes 4.125 bytes of device memory per
                    row state and vocabulary entry, and a kernel per step
    max_logit_bias  most tokens of a request with a logit bias; with SamplingParams.min_tokens its stop tokens count
                    too. Takes 16 bytes of device memory per request index for each
    max_logprobs    most of the best tokens whose log-probabilities a row may ask for, up to 1,024; 0: of the sampled
                    token alone, None: no row asks for any. Takes four kernels per step, 8 bytes of pinned host memory
                    per row, token and step in flight
    token_masks     rows may have masks that say which tokens are allowed, as grammars need; a bit of device memory per
                    row state and vocabulary entry
    request_tensors     tensors of the model or sampler with a row per row id
    """

    max_num_reqs: int = 256
    max_num_tokens: int = 2048
    max_seq_len: int = 4096
    query_len: int = 1
    decode_sizes: tuple[int, ...] | None = None
    mixed_sizes: tuple[int, ...] | None = None
    ring_depth: int = 8
    launch_steps: int = 64
    loop_sizes: tuple[int, ...] = ()
    backend: str | None = None
    prefill_backend: str | None = None
    use_graphs: bool = True
    check_weights: bool = True
    shadow_every: int = 0
    mixed_batches: bool = True
    batch_invariant: bool = False
    max_encoder_len: int | None = None
    penalties: bool = False
    max_logit_bias: int = 0
    max_logprobs: int | None = None
    token_masks: bool = False
    request_tensors: tuple[RequestTensor, ...] = ()

    def __post_init__(self) -> None:
        check_int_field(self, "max_num_reqs", 1, MAX_REQS, advice="pass what one step may hold")
        check_int_field(self, "max_num_tokens", 1, MAX_TOKENS, advice="longer prompts run in chunks")
        check_int_field(self, "max_seq_len", 1, _MAX_LENGTH, advice="pass the longest prompt and output together")
        if self.max_encoder_len is not None:
            check_int_field(self, "max_encoder_len", 1, _MAX_LENGTH, advice="None without cross layers")
        check_int_field(self, "query_len", 1, MAX_TOKENS, advice="1 without speculation")
        check_int_field(self, "ring_depth", 2, _MAX_RING, advice="with one slot every step waits, and 8 are usual")
        check_int_field(self, "launch_steps", 1, _MAX_RING, advice="1 without DecodeSession.run(n)")
        check_int_field(self, "shadow_every", 0, _MAX_LENGTH, advice="256 is often enough; 0 without shadow steps")
        if self.max_num_reqs * self.query_len > self.max_num_tokens:
            raise ConfigError(
                f"RuntimeConfig.max_num_tokens: expected >= max_num_reqs x query_len = "
                f"{self.max_num_reqs * self.query_len}, got {self.max_num_tokens}; a full decode step must fit"
            )
        for name, most in (("decode_sizes", self.max_num_reqs), ("mixed_sizes", self.max_num_tokens)):
            if (sizes := getattr(self, name)) is not None:
                advice = "pass a tuple of sizes"
                found = check_ints(f"RuntimeConfig.{name}", sizes, 1, most, advice=advice, error=ConfigError)
                object.__setattr__(self, name, tuple(sorted(set(found.tolist()))))
        decodes = self.decode_sizes if self.decode_sizes is not None else default_decode_sizes(self.max_num_reqs)
        advice = "pass some of decode_sizes"
        loops = check_ints(
            "RuntimeConfig.loop_sizes", self.loop_sizes, 1, self.max_num_reqs, advice=advice, error=ConfigError
        )
        object.__setattr__(self, "loop_sizes", tuple(sorted(set(loops.tolist()))))
        if others := set(self.loop_sizes) - set(decodes):
            raise ConfigError(f"RuntimeConfig.loop_sizes: expected decode sizes, got {sorted(others)} too; {advice}")
        for name in ("backend", "prefill_backend"):
            if (chosen := getattr(self, name)) is not None:
                check_instance(f"RuntimeConfig.{name}", chosen, str, advice="name one, or None to have one chosen")
        for name in ("use_graphs", "check_weights", "batch_invariant", "mixed_batches", "penalties", "token_masks"):
            check_bool_field(self, name, advice="pass a bool")
        check_int_field(self, "max_logit_bias", 0, _MAX_BIAS, advice="0 without biases")
        if self.max_logprobs is not None:
            check_int_field(self, "max_logprobs", 0, MAX_TOP, advice="None without log-probabilities")
        check_sequence("RuntimeConfig.request_tensors", self.request_tensors, of="RequestTensor", error=ConfigError)
        for tensor in self.request_tensors:
            check_instance(
                "RuntimeConfig.request_tensors", tensor, RequestTensor, advice="pass RequestTensor(name, ...)"
            )
        if len({tensor.name for tensor in self.request_tensors}) < len(self.request_tensors):
            raise ConfigError("RuntimeConfig.request_tensors: expected names that differ, got some twice; rename them")
        object.__setattr__(self, "request_tensors", tuple(self.request_tensors))
        if self.prefill_backend is not None and not self.mixed_batches:
            raise ConfigError(
                f"RuntimeConfig.prefill_backend: expected None with mixed_batches=False, got {self.prefill_backend!r}; "
                "there are no prompts, leave it out"
            )
        if self.mixed_sizes and not self.mixed_batches:
            raise ConfigError(
                f"RuntimeConfig.mixed_sizes: expected none with mixed_batches=False, got {self.mixed_sizes}; drop the "
                "sizes, or allow mixed batches"
            )

    @property
    def most_in_flight(self) -> int:
        """Launches in flight before the next one waits; see `ring_depth`."""
        return 2 * self.ring_depth if self.shadow_every else self.ring_depth

    def check_needs(self, what: str, needs: Iterable[Need]) -> None:
        """Raise UnsupportedError that names the field of this config which some rows need otherwise."""
        for name, least in needs:
            value = getattr(self, name)
            if (-1 if value is None else int(value)) < least:
                wanted = f"{name}=True" if isinstance(value, bool) else f"{name}={least}"
                raise UnsupportedError(
                    f"{what}: expected a runtime with {wanted}, got {name}={value}; build it with "
                    f"RuntimeConfig({wanted})"
                )

    def resolve(self) -> RuntimeConfig:
        """A config with every None replaced: the default capture_sizes, and the backend from the environment."""
        mixed = self.mixed_sizes
        if mixed is None:
            mixed = default_mixed_sizes(self.max_num_tokens) if self.mixed_batches else ()
        return replace(
            self,
            decode_sizes=default_decode_sizes(self.max_num_reqs) if self.decode_sizes is None else self.decode_sizes,
            mixed_sizes=mixed,
            backend=self.backend if self.backend is not None else env.backend(),
        )
