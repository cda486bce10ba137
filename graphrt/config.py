"""Frozen configuration of a runtime, checked completely at construction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from graphrt import env
from graphrt.capture.descriptor import default_decode_sizes, default_mixed_sizes
from graphrt.kernels.checks import check_bool_field, check_instance, check_int_field, check_ints, check_sequence, shown
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.metadata.arguments import MAX_REQS, MAX_TOKENS
from graphrt.kernels.numbers import REQUEST_DTYPES, converted
from graphrt.kernels.ops.sampling_logprobs import MAX_TOP

_MAX_LENGTH = 1 << 30  # positions, and sums of a few positions, are int32 on the device
_MAX_RING = 1024
_MAX_BIAS = 1 << 16
_MAX_DRAFTS = 63

Need = tuple[str, int]
"""A field of RuntimeConfig, and the lowest value that some requests need (for a bool, 1 means True)."""


@dataclass(frozen=True, slots=True)
class RequestTensor:
    """A device tensor with one value per request index. Models and samplers read `Step.request_state(name)`.

        RequestTensor("adapter", dtype=torch.int32)             one number per request, 0 unless it is set
        RequestTensor("shift", (512,), initial=-1.0)            512 float32 per request

    name      name for `Step.request_state`
    shape     shape of one request's value; () is a number
    dtype     float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int64 to int8, uint8 or bool
    initial   value of padding requests, and of requests that set no value

    Raises: ConfigError: if `dtype` is not in this list or cannot represent `initial`, or if a field has the wrong type.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    initial: float = 0

    def __post_init__(self) -> None:
        check_instance("RequestTensor.name", self.name, str, advice="pass the name that Step.request_state takes")
        sizes = check_ints(
            "RequestTensor.shape", self.shape, 0, _MAX_LENGTH, advice="pass () for a number", error=ConfigError
        )
        object.__setattr__(self, "shape", tuple(sizes.tolist()))
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in REQUEST_DTYPES:
            raise ConfigError(
                f"RequestTensor.dtype: expected a float, signed int, uint8 or bool dtype, got {shown(self.dtype)}; "
                "pass such a torch.dtype"
            )
        check_instance("RequestTensor.initial", self.initial, (int, float), advice="pass a number")
        converted("RequestTensor.initial", self.initial, self.dtype, ConfigError)


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Capacities and options of a runtime.

    max_num_reqs    maximum number of requests in one step, up to 65,536; also the number of request indices
    max_num_tokens  maximum number of new tokens in one step (prefill chunks and decode together), up to 65,536
    max_seq_len     KV tokens of the longest sequence: prompt and output, except the last sampled token, whose KV is
                    never written. Determines the width of the block table
    num_speculative_tokens  maximum drafts K of a request in one step, up to 63; 0: no speculation. Each decode size has
                    a second graph, of 1 + K tokens per request. Mixed graphs compute logits of 1 + K tokens per request
    rejection_sampling  accept a draft with probability min(1, p / q), where p and q are its probabilities in the model
                    and the proposer. Tokens have the model's distribution, but depend on the drafts. Costs device
                    memory per request index: 4 bytes per draft and vocabulary entry. False: accept a draft if it equals
                    the token that is sampled
    tree_depth      maximum drafts of one path if the drafts of a request form a tree, up to num_speculative_tokens;
                    0: they form a chain. A step samples up to 1 + tree_depth times
    decode_sizes    numbers of requests to capture decode graphs for; None: the default sizes, (): no decode graph
    mixed_sizes     numbers of tokens to capture mixed graphs for; None: the default sizes, (): no mixed graph
    ring_depth      maximum number of launches in flight before `replay` waits. A larger value hides longer pauses of
                    the host. With `shadow_every`, the limit is doubled, because an eager step is such a pause
    launch_steps    maximum number of steps in one launch of a DecodeSession
    loop_sizes      decode sizes that can run many steps in one graph launch; other sizes are launched step by step
    backend         name of the attention backend; None: GRAPHRT_BACKEND, else the fastest supported backend
    prefill_backend name of the backend for the prefill part of mixed steps, while `backend` serves the decode part.
                    "none": `backend` serves whole mixed steps. None: the faster choice, as measured
    use_graphs      False: run every step eagerly; `stats()` counts these steps with the reason
    lazy_capture    `capture()` captures only the largest size of each kind, whose memory the other sizes reuse. The
                    first step of any other size captures it, on the thread that submits steps. If that fails, this and
                    all later steps of the size run eagerly, and `stats()` counts them with the reason
    check_weights   before each step, check the address of one weight or cache tensor, whether four names in the model
                    still refer to the same objects, and the state of one layer with adapters of PEFT, if there are any.
                    Steps check them in turn. The first step, and every step with GRAPHRT_DEBUG=1, checks all tensors
                    that graphs use
    shadow_every    number of launches from one shadow step to the next; 0: never. A shadow step also runs eagerly, and
                    results and state are compared bitwise. Differences are in `stats().shadow_differences`, and cause
                    a RuntimeWarning
    mixed_batches   False: `replay` accepts only batches in which every request has one new token, or up to
                    1 + num_speculative_tokens. No mixed graphs are captured, and backends without mixed batches can be
                    used
    max_encoder_len  maximum encoder tokens per request; determines the width of block tables of cross groups.
                    Required if the model has cross layers, else None
    batch_invariant select only backends whose result for a request does not depend on other requests, bitwise. Matrix
                    products of the model may still differ in their last bits between graph sizes
    truncation      allow top_k, top_p and min_p. With several GPUs, False saves the exchange of all logits in each step
    penalties       allow repetition, presence and frequency penalties. Costs two kernels per step, and device memory
                    per request index: 4.125 bytes per vocabulary entry, and 4 bytes per token of `max_seq_len`
    max_logit_bias  maximum tokens with a logit bias per request; each costs 8 bytes of device memory per request index
    max_logprobs    maximum top tokens per request whose log-probabilities are returned, up to 1,024. 0: only the
                    sampled token, None: no log-probabilities. Costs four kernels per step, and 8 bytes of pinned host
                    memory per request, token and step in flight
    token_masks     allow masks of permitted tokens, for constrained decoding. Costs one bit of device memory per
                    request index and vocabulary entry
    request_tensors per-request tensors of the model or the sampler

    Raises: ConfigError: if a field has the wrong type or is out of range, or if fields contradict each other.
    """

    max_num_reqs: int = 256
    max_num_tokens: int = 2048
    max_seq_len: int = 4096
    num_speculative_tokens: int = 0
    rejection_sampling: bool = False
    tree_depth: int = 0
    decode_sizes: tuple[int, ...] | None = None
    mixed_sizes: tuple[int, ...] | None = None
    ring_depth: int = 8
    launch_steps: int = 64
    loop_sizes: tuple[int, ...] = ()
    backend: str | None = None
    prefill_backend: str | None = None
    use_graphs: bool = True
    lazy_capture: bool = False
    check_weights: bool = True
    shadow_every: int = 0
    mixed_batches: bool = True
    batch_invariant: bool = False
    max_encoder_len: int | None = None
    truncation: bool = True
    penalties: bool = False
    max_logit_bias: int = 0
    max_logprobs: int | None = None
    token_masks: bool = False
    request_tensors: tuple[RequestTensor, ...] = ()

    def __post_init__(self) -> None:
        check_int_field(self, "max_num_reqs", 1, MAX_REQS, advice="pass the maximum number of requests in one step")
        check_int_field(self, "max_num_tokens", 1, MAX_TOKENS, advice="longer prompts run in chunks")
        check_int_field(self, "max_seq_len", 1, _MAX_LENGTH, advice="pass the length of the longest prompt plus output")
        if self.max_encoder_len is not None:
            check_int_field(self, "max_encoder_len", 1, _MAX_LENGTH, advice="pass None without cross layers")
        check_int_field(self, "num_speculative_tokens", 0, _MAX_DRAFTS, advice="pass 0 without speculation")
        check_int_field(self, "tree_depth", 0, self.num_speculative_tokens, advice="pass 0 for chains of drafts")
        check_int_field(self, "ring_depth", 2, _MAX_RING, advice="pass 8, the default")
        check_int_field(self, "launch_steps", 1, _MAX_RING, advice="pass 1 without DecodeSession.run(n)")
        check_int_field(self, "shadow_every", 0, _MAX_LENGTH, advice="pass 256, or 0 for no shadow steps")
        if (least := self.max_num_reqs * (1 + self.num_speculative_tokens)) > self.max_num_tokens:
            raise ConfigError(
                f"RuntimeConfig.max_num_tokens: expected at least max_num_reqs x (1 + num_speculative_tokens) = "
                f"{least}, got {self.max_num_tokens}; raise max_num_tokens, so that a full decode step fits"
            )
        for name, most, advice in (
            ("decode_sizes", self.max_num_reqs, "pass a tuple of sizes"),
            ("mixed_sizes", self.max_num_tokens, "pass a tuple of sizes"),
            ("loop_sizes", self.max_num_reqs, "pass sizes of decode_sizes"),
        ):
            if (sizes := getattr(self, name)) is not None or name == "loop_sizes":
                found = check_ints(f"RuntimeConfig.{name}", sizes, 1, most, advice=advice, error=ConfigError)
                object.__setattr__(self, name, tuple(sorted(set(found.tolist()))))
        decodes = self.decode_sizes if self.decode_sizes is not None else default_decode_sizes(self.max_num_reqs)
        if others := set(self.loop_sizes) - set(decodes):
            raise ConfigError(f"RuntimeConfig.loop_sizes: {sorted(others)} are not in decode_sizes; {advice}")
        for name in ("backend", "prefill_backend"):
            if (chosen := getattr(self, name)) is not None:
                check_instance(f"RuntimeConfig.{name}", chosen, str, advice="pass a name, or None to select one")
        for name in (
            "use_graphs", "lazy_capture", "check_weights", "batch_invariant", "mixed_batches", "penalties",
            "token_masks", "rejection_sampling", "truncation",
        ):  # fmt: skip
            check_bool_field(self, name, advice="pass a bool")
        check_int_field(self, "max_logit_bias", 0, _MAX_BIAS, advice="pass 0 without biases")
        if self.max_logprobs is not None:
            check_int_field(self, "max_logprobs", 0, MAX_TOP, advice="pass None without log-probabilities")
        check_sequence("RuntimeConfig.request_tensors", self.request_tensors, of="RequestTensor", error=ConfigError)
        for tensor in self.request_tensors:
            check_instance(
                "RuntimeConfig.request_tensors", tensor, RequestTensor, advice="pass RequestTensor(name, ...)"
            )
        if len({tensor.name for tensor in self.request_tensors}) < len(self.request_tensors):
            raise ConfigError("RuntimeConfig.request_tensors: two tensors have the same name; rename one")
        object.__setattr__(self, "request_tensors", tuple(self.request_tensors))
        if self.tree_depth and self.rejection_sampling:
            raise ConfigError(
                "RuntimeConfig.tree_depth: expected 0 with rejection_sampling=True, which verifies chains, got "
                f"{self.tree_depth}; set one of them"
            )
        if self.prefill_backend is not None and not self.mixed_batches:
            raise ConfigError(
                f"RuntimeConfig.prefill_backend: expected None with mixed_batches=False, got "
                f"{self.prefill_backend!r}; omit it, because there is no prefill"
            )
        if self.mixed_sizes and not self.mixed_batches:
            raise ConfigError(
                f"RuntimeConfig.mixed_sizes: expected () or None with mixed_batches=False, got {self.mixed_sizes}; "
                f"omit it, or set mixed_batches=True"
            )

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Maximum number of new tokens per request in each kind of decode graph: 1, and 1 + num_speculative_tokens."""
        return (1, 1 + self.num_speculative_tokens) if self.num_speculative_tokens else (1,)

    @property
    def most_in_flight(self) -> int:
        """Maximum number of launches in flight before the next launch waits; see `ring_depth`."""
        return 2 * self.ring_depth if self.shadow_every else self.ring_depth

    def check_needs(self, what: str, needs: Iterable[Need]) -> None:
        """Raise UnsupportedError if a field is below what requests need.

        what    name of the request or argument, for the error
        """
        for name, least in needs:
            value = getattr(self, name)
            if (-1 if value is None else int(value)) < least:
                wanted = f"{name}=True" if isinstance(value, bool) else f"{name}={least}"
                raise UnsupportedError(
                    f"{what}: needs a runtime with {wanted}, but this runtime has {name}={value}; build it with "
                    f"RuntimeConfig({wanted})"
                )

    def check_own_drafts(self, what: str) -> None:
        """Raise UnsupportedError if drafts need probabilities, which callers cannot pass. `what` names the argument."""
        if self.rejection_sampling:
            raise UnsupportedError(
                f"{what}: expected no drafts with rejection_sampling=True, because only a proposer returns their "
                "probabilities; build the runtime with rejection_sampling=False"
            )

    def too_many_tokens(self, query_lens: npt.NDArray[np.int32]) -> UnsupportedError:
        """Return the error of a batch that needs `mixed_batches`."""
        return UnsupportedError(
            f"batch: expected at most {self.query_lens[-1]} new tokens in every request, got "
            f"{shown(query_lens.tolist())}; compute prompts elsewhere, or build the runtime with "
            "RuntimeConfig(mixed_batches=True)"
        )

    def resolve(self) -> RuntimeConfig:
        """Return a config in which the default sizes, and the backend of the environment, replace None."""
        mixed = self.mixed_sizes
        if mixed is None:
            mixed = default_mixed_sizes(self.max_num_tokens) if self.mixed_batches else ()
        return replace(
            self,
            decode_sizes=default_decode_sizes(self.max_num_reqs) if self.decode_sizes is None else self.decode_sizes,
            mixed_sizes=mixed,
            backend=self.backend if self.backend is not None else env.backend(),
        )
