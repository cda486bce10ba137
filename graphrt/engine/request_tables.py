"""Per-request state on the device, by request index: logit biases, token masks, and tensors of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from graphrt.config import RuntimeConfig
from graphrt.kernels.checks import FLOAT32_MAX, check_instance, check_int, check_ints, check_number, shown
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError
from graphrt.kernels.metadata.buffers import COPIED, StaticBuffers
from graphrt.kernels.numbers import converted
from graphrt.kernels.ops.sampling_state import Penalties, PenaltyState, record_tokens, state_words
from graphrt.kernels.types import NO_TOKEN

MaskWords = Sequence[int] | npt.NDArray[Any] | torch.Tensor
"""[ceil(vocab_size / 32)] words of 32 bits on the host. Token t is allowed if bit t % 32 of word t // 32 is set."""

_WORDS = (torch.int32, torch.uint32, torch.int64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_PROMPT = (1 << 31) - 1  # as Batch.prompt_lens, int32
_NOTHING_BANNED: tuple[frozenset[int], int] = frozenset(), 0

_T = TypeVar("_T")

RequestValues = Mapping[str, Any]
"""Values of one request by the name of a RequestTensor: a number, array or tensor of its shape.

The values must be in the range of the tensor's dtype. They are rounded to a float dtype.
"""


class RequestTables:
    """Writes per-request state on the stream of the steps, after all earlier launches and before all later launches.

        manager.request_tables.set_logit_bias({3: {42: -5.0, 7: 2.0}})  # request index 3
        manager.request_tables.set_token_masks({0: words})              # requests with Batch.token_masks 0
        manager.request_tables.set_state({3: {"adapter": 2}})           # Step.request_state("adapter") of request 3

    One call can write many requests. A request index keeps its state when its sequence finishes, so set the state again
    for the next sequence. A DecodeSession clears the state of released requests. No call waits for the device.

    tensors   [max_num_reqs + 1, ...] by name: RuntimeConfig.request_tensors; the last row is for padding
    left      request indices that sessions released. Their state is cleared before the next step outside of sessions

    Raises:
        ConfigError, ShapeError: if a value is wrong.
        UnsupportedError: if the runtime's config does not enable the option.
        CaptureError, ReplayError: see ReplayManager.between_steps.

    Every method may raise these errors, and then writes nothing.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        vocab_size: int,
        device: torch.device,
        between_steps: Callable[[Callable[[StaticBuffers], None]], None],
        within_call: Callable[[], AbstractContextManager[StaticBuffers]],
        mirror: Callable[..., None],
    ) -> None:
        self._config, self._vocab_size, self._device = config, vocab_size, device
        self._between_steps, self._within_call, self._mirror = between_steps, within_call, mirror
        self._last = config.max_num_reqs - 1
        self._specs = {spec.name: spec for spec in config.request_tensors}
        self._biased, self.left = set[int](), set[int]()
        self._stated: dict[str, set[int]] = {name: set() for name in self._specs}
        with torch.inference_mode(False):
            self.tensors = {
                spec.name: torch.full(
                    (config.max_num_reqs + 1, *spec.shape), spec.initial, dtype=spec.dtype, device=device
                )
                for spec in config.request_tensors
            }

    def check_bias(self, name: str, bias: Mapping[int, float]) -> None:
        """Raise ConfigError or UnsupportedError if this runtime cannot apply a logit bias."""
        check_instance(name, bias, Mapping, advice="pass a dict of biases by token")
        self._config.check_needs(name, (("max_logit_bias", len(bias)),))
        for token, value in bias.items():
            check_int(name, token, 0, self._vocab_size - 1, advice="pass token ids of the vocabulary")
            if not (isinstance(value, Real) and value == -math.inf):
                check_number(name, value, -FLOAT32_MAX, FLOAT32_MAX, advice="pass -inf to forbid a token")

    def set_logit_bias(
        self,
        biases: Mapping[int, Mapping[int, float] | None],
        *,
        banned: Mapping[int, tuple[Collection[int], int]] | None = None,
    ) -> None:
        """Set values to add to the logits of tokens, by request index.

        biases   values by token; -inf forbids a token, None or {}: no bias
        banned   pairs of tokens and a length; the tokens are also forbidden while `seq_lens` is below the length. For
        `min_tokens`, pass the stop tokens, and prompt length + min_tokens

        Together, they may name at most RuntimeConfig.max_logit_bias different tokens per request.
        """
        by_req = {
            at: ({} if bias is None else bias, _NOTHING_BANNED) for at, bias in self._by_request("biases", biases)
        }
        for at, (bias, _) in by_req.items():
            self.check_bias(f"logit_bias[{at}]", bias)
        for at, ban in self._by_request("banned", {} if banned is None else banned):
            bias = by_req.get(at, ({}, None))[0]
            by_req[at] = bias, self._checked_ban(f"banned[{at}]", ban, bias)
        chosen = {at: (bias, ban) for at, (bias, ban) in by_req.items() if bias or ban[0] or at in self._biased}
        if not chosen:
            return
        ids = list(chosen)
        tokens = np.zeros((len(ids), 2, self._config.max_logit_bias), np.int32)
        values, lists = np.zeros(tokens.shape, np.float32), np.zeros((len(ids), 3), np.int32)
        for at, (bias, (stops, length)) in enumerate(chosen.values()):
            for early, entries in enumerate((bias, {**bias, **dict.fromkeys(stops, -math.inf)} if stops else {})):
                tokens[at, early, : len(entries)] = sorted(entries)
                values[at, early, : len(entries)] = [entries[token] for token in sorted(entries)]
                lists[at, early] = len(entries)
            lists[at, 2] = length if stops else 0

        def write(buffers: StaticBuffers) -> None:
            self._biased.update(ids)  # before the write, so that the next write covers these if this one is interrupted
            for name, rows in (("bias_tokens", tokens), ("bias_values", values), ("bias_lists", lists)):
                self._mirror(self._write_buffer, buffers, name, ids, torch.from_numpy(rows))
            self._biased.difference_update([at for at, (bias, (stops, _)) in chosen.items() if not (bias or stops)])

        self._write_between_steps(write)

    def _checked_ban(self, name: str, ban: object, bias: Mapping[int, float]) -> tuple[frozenset[int], int]:
        """Return the tokens and the length of a ban, for a request with this bias. Raises: see `set_logit_bias`."""
        if not isinstance(ban, tuple) or len(ban) != 2 or not isinstance(ban[0], Collection):
            raise ConfigError(f"{name}: expected tokens and a length, got {shown(ban)}; pass ({{2}}, 30)")
        ids = check_ints(name, tuple(ban[0]), 0, self._vocab_size - 1, advice="pass token ids of the vocabulary")
        length = check_int(name, ban[1], 0, _MOST_PROMPT, advice="pass prompt length + min_tokens")
        tokens = frozenset(ids.tolist())
        self._config.check_needs(name, (("max_logit_bias", len(tokens | bias.keys())),))
        return tokens, length

    def mask_words(self, name: str, words: MaskWords) -> torch.Tensor:
        """Return a checked token mask as [ceil(vocab_size / 32)] int32 on the host."""
        self._config.check_needs(name, (("token_masks", 1),))
        count = state_words(self._vocab_size)
        try:
            values = words if isinstance(words, torch.Tensor) else torch.from_numpy(np.array(words))
        except (TypeError, ValueError) as error:
            raise ShapeError(
                f"{name}: expected an array of {count} words of 32 bits, got {shown(words)}; pass such an array"
            ) from error
        dense = values.layout is torch.strided and values.device.type == "cpu"
        if tuple(values.shape) != (count,) or values.dtype not in _WORDS or not dense:
            raise ShapeError(
                f"{name}: expected [{count}] words of 32 bits on the host, one bit per token, got "
                f"{list(values.shape)} {values.dtype} on {values.device}; pass the words of one request"
            )
        if values.dtype is torch.int32:
            return values.clone()
        wide = values.to(torch.int64)
        if ((wide < -(1 << 31)) | (wide >= 1 << 32)).any():
            raise ShapeError(f"{name}: expected words of 32 bits, got {shown(wide.tolist())}; pack 32 tokens per word")
        return (wide << 32 >> 32).to(torch.int32)

    def set_token_masks(self, masks: Mapping[int, MaskWords]) -> None:
        """Set token masks, which select the tokens that may be sampled.

        masks   by mask number, 0 to max_num_reqs - 1. `Batch.token_masks` specifies the mask of each request. A
                DecodeSession uses mask m for request index m
        """
        by_mask = self._by_request("masks", masks)
        self.write_masks({at: self.mask_words(f"token_masks[{at}]", words) for at, words in by_mask})

    def write_masks(self, masks: Mapping[int, torch.Tensor]) -> None:
        """Set token masks that `mask_words` returned."""
        if masks:
            ids, words = list(masks), torch.stack(list(masks.values()))
            self._write_between_steps(
                lambda buffers: self._mirror(self._write_buffer, buffers, "mask_words", ids, words)
            )

    def check_state(self, values: RequestValues) -> dict[str, torch.Tensor]:
        """Return checked copies of the values as host tensors with the shapes and dtypes of the request tensors."""
        check_instance("state", values, Mapping, advice="pass a dict of values by name")
        checked = {}
        for name, value in values.items():
            if name not in self._specs:
                known = ", ".join(self._specs) or "none"
                raise ConfigError(
                    f"state: expected names of RuntimeConfig.request_tensors ({known}), got {shown(name)}; declare it "
                    "there"
                )
            spec = self._specs[name]
            tensor = converted(name, value, spec.dtype, ShapeError)
            if tuple(tensor.shape) != spec.shape:
                raise ShapeError(
                    f"{name}: expected shape {list(spec.shape)}, got {list(tensor.shape)}; pass the value of one "
                    "request"
                )
            checked[name] = tensor
        return checked

    def set_state(self, states: Mapping[int, RequestValues]) -> None:
        """Set the request tensors of requests, by request index. Omitted tensors get their initial values."""
        checked = {at: self.check_state(values) for at, values in self._by_request("states", states)}
        for name, spec in self._specs.items():
            stated = self._stated[name]
            ids = [at for at, values in checked.items() if name in values or at in stated]
            if not ids:
                continue
            initial = torch.full(spec.shape, spec.initial, dtype=spec.dtype, device="cpu")
            rows = torch.stack([checked[at].get(name, initial) for at in ids])
            self._write_between_steps(partial(self._write_state, name, ids, rows))
            stated.difference_update([at for at in ids if name not in checked[at]])

    def set_drafts(self, drafts: Mapping[int, Sequence[int] | npt.NDArray[Any]]) -> None:
        """Set the tokens that requests verify in the next step of a session, after their last token, by request index.

        A draft is accepted while it equals the token that is sampled, so drafts change no tokens. A proposer replaces
        the drafts after that step. Raises: UnsupportedError: with more than num_speculative_tokens drafts, and
        with rejection_sampling.
        """
        by_req = self._by_request("drafts", drafts)
        self.write_drafts({at: self.check_drafts(f"drafts[{at}]", tokens) for at, tokens in by_req})

    def check_drafts(self, name: str, tokens: object, parents: object = None) -> torch.Tensor:
        """Return checked drafts, padded with -1, and their parents as [2, num_speculative_tokens] int32 on the host."""
        ids = check_ints(name, tokens, 0, self._vocab_size - 1, advice="pass token ids of the vocabulary")
        self._config.check_needs(name, (("num_speculative_tokens", len(ids)),))
        if len(ids):
            self._config.check_own_drafts(name)
        both = torch.full((2, self._config.num_speculative_tokens), NO_TOKEN, dtype=torch.int32, device="cpu")
        both[0, : len(ids)] = torch.from_numpy(ids)
        chain = torch.arange(both.shape[1], dtype=torch.int32, device="cpu")
        both[1] = chain
        if parents is not None:
            self._config.check_needs("parents", (("tree_depth", 1),))
            of_ids = torch.from_numpy(check_ints("parents", parents, 0, len(ids), advice="pass one parent per draft"))
            if len(of_ids) != len(ids) or (of_ids > chain[: len(ids)]).any():
                raise ShapeError(
                    f"parents: expected one number per draft, and each parent before its draft, got "
                    f"{shown(of_ids.tolist())}; pass 0 for the last sampled token, and i for draft i - 1"
                )
            both[1, : len(ids)] = of_ids
        return both

    def write_drafts(self, drafts: Mapping[int, torch.Tensor]) -> None:
        """Set drafts that `check_drafts` returned."""
        if drafts:
            ids, both = list(drafts), torch.stack(list(drafts.values()), 1)

            def write(buffers: StaticBuffers) -> None:
                self._mirror(self._write_buffer, buffers, "drafts", ids, both[0])
                if self._config.tree_depth:
                    self._mirror(self._write_buffer, buffers, "draft_parents", ids, both[1])

            self._write_between_steps(write)

    def record_prefix(self, req_index: int, tokens: Sequence[int] | npt.NDArray[Any], prompt_len: int = 0) -> None:
        """Store tokens that no step computes, such as a cached prefix, for the penalties and drafts of a request.

        tokens       the first tokens of the sequence, at most `max_seq_len`; the next step of the request starts after
                     them
        prompt_len   see Batch.prompt_lens; tokens at and after this position count as output

        Raises: CapacityError: if there are more than `max_seq_len` tokens. See also RequestTables.
        """
        self._check_index(req_index)
        if not self._config.num_speculative_tokens:
            self._config.check_needs("record_prefix", (("penalties", 1),))
        ids = check_ints("tokens", tokens, 0, self._vocab_size - 1, advice="pass token ids of the vocabulary")
        if len(ids) > (most := self._config.max_seq_len):
            raise CapacityError(f"tokens: expected at most max_seq_len={most}, got {len(ids)}; raise max_seq_len")
        prompt_len = check_int("prompt_len", prompt_len, 0, _MOST_PROMPT, advice="pass the number of prompt tokens")
        bounds, row = np.array([0, len(ids)], np.int32), np.array([req_index, prompt_len], np.int32)

        self._write_between_steps(lambda buffers: self._mirror(self._count, buffers, ids, bounds, row))

    def _count(self, b: StaticBuffers, ids: npt.NDArray[Any], bounds: npt.NDArray[Any], row: npt.NDArray[Any]) -> None:
        arrays = (ids, bounds, row, np.ones(1, np.float32), np.array([len(ids) - 1]))
        tokens, starts, words, on, last = (self._moved(torch.from_numpy(x)) for x in arrays)
        state = PenaltyState(b.penalty_seen, b.penalty_counts, b.token_history, b.counted_lens)
        record_tokens(tokens, starts, last, starts[1:], words[:1], words[1:], Penalties(on, on, on, state))

    def _write_state(self, name: str, ids: list[int], rows: torch.Tensor, buffers: StaticBuffers) -> None:
        self._stated[name].update(ids)  # before the write, as in set_logit_bias
        self._mirror(self._write_tensor, name, ids, rows)

    def fork(self, buffers: StaticBuffers, source: int, target: int, seed: int, masked: bool) -> None:
        """Copy the state of one request index to another, within ReplayManager.mirror; the copy has its own seed."""
        buffers.copy_request_state(source, target)
        seeds = buffers.req_values[COPIED.index("seeds")]
        # fill_ sends the number with the kernel. An assignment copies it from the host, and waits for the device.
        seeds[target].fill_(int(np.uint32(seed).view(np.int32)))
        if buffers.draft_logprobs.shape[2]:  # tokens of a different seed must not depend on the drafts of this seed
            buffers.drafts[target].masked_fill_(seeds[source] != seeds[target], NO_TOKEN)
        if masked:
            buffers.req_values[COPIED.index("token_masks"), target].fill_(target)
        buffers.page_spans[:, target].zero_()  # the first step of the copy lists all its pages
        for name, tensor in self.tensors.items():
            self._stated[name].add(target)  # before the write, as in set_logit_bias
            tensor[target].copy_(tensor[source])
        for indices in (self._biased, *self._stated.values()):
            (indices.add if source in indices else indices.discard)(target)

    def clear_left(self) -> None:
        """Clear the state of request indices that sessions released. Only the manager may call it, during its own
        calls."""
        if self.left:
            with self._within_call() as buffers:
                self._clear_left(buffers)

    def _clear_left(self, buffers: StaticBuffers) -> None:
        ids = sorted(self.left)
        self._mirror(self._clear, buffers, ids)
        for name, stated in self._stated.items():
            if stale := [at for at in ids if at in stated]:
                spec = self._specs[name]
                initial = torch.full((len(stale), *spec.shape), spec.initial, dtype=spec.dtype, device="cpu")
                self._mirror(self._write_tensor, name, stale, initial)
                stated.difference_update(stale)
        self._biased.difference_update(ids)
        self.left.difference_update(ids)  # not clear(), because garbage collection may release requests here

    def _write_between_steps(self, write: Callable[[StaticBuffers], None]) -> None:
        def cleared(buffers: StaticBuffers) -> None:
            if self.left:
                self._clear_left(buffers)
            write(buffers)

        self._between_steps(cleared)

    def switch_masks(self, masks: Mapping[int, int]) -> None:
        """Set the mask number that later launches of a session use, by request index; -1: no mask."""
        if masks:
            ids, numbers = list(masks), torch.tensor(list(masks.values()), dtype=torch.int32, device="cpu")
            self._write_between_steps(lambda buffers: self._mirror(self._write_mask_numbers, buffers, ids, numbers))

    def reset(self) -> None:
        """Reset the request tensors to their initial values. The device must be idle."""
        for name, tensor in self.tensors.items():
            tensor.fill_(self._specs[name].initial)
        self._have_nothing()

    def close(self) -> None:
        self.tensors.clear()
        self._have_nothing()

    def _have_nothing(self) -> None:
        """Record that no request has a bias or its own values."""
        self._biased.clear()
        self.left.clear()
        for stated in self._stated.values():
            stated.clear()

    def _by_request(self, name: str, values: Mapping[int, _T]) -> list[tuple[int, _T]]:
        """Return the items. Raises ConfigError if a key is not a request index."""
        check_instance(name, values, Mapping, advice="pass a dict by request index")
        for at in values:
            self._check_index(at)
        return list(values.items())

    def _check_index(self, at: object) -> None:
        check_int("req_index", at, 0, self._last, advice="pass a request index of the runtime")

    def _clear(self, buffers: StaticBuffers, ids: list[int]) -> None:
        buffers.clear_request_state(self._moved(torch.tensor(ids, device="cpu")))

    def _write_buffer(self, buffers: StaticBuffers, name: str, ids: list[int], rows: torch.Tensor) -> None:
        self._write(getattr(buffers, name), ids, rows)

    def _write_mask_numbers(self, buffers: StaticBuffers, ids: list[int], numbers: torch.Tensor) -> None:
        self._write(buffers.req_values[COPIED.index("token_masks")], ids, numbers)

    def _write_tensor(self, name: str, ids: list[int], rows: torch.Tensor) -> None:
        self._write(self.tensors[name], ids, rows)

    def _write(self, target: torch.Tensor, ids: list[int], rows: torch.Tensor) -> None:
        bits = _BITS[target.dtype.itemsize]  # index_copy_ does not support every dtype
        target.view(bits).index_copy_(0, self._moved(torch.tensor(ids, device="cpu")), self._moved(rows).view(bits))

    def _moved(self, values: torch.Tensor) -> torch.Tensor:
        """Copy values to the device through pinned memory; a copy from pageable memory would block the host."""
        return values.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else values


@dataclass(slots=True)
class TableUpdates:
    """Changes that a session writes to the tables before its next launch, by request index."""

    biases: dict[int, Mapping[int, float]] = field(default_factory=dict)
    banned: dict[int, tuple[Collection[int], int]] = field(default_factory=dict)
    states: dict[int, RequestValues] = field(default_factory=dict)
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    switched: dict[int, int] = field(default_factory=dict)
    drafts: dict[int, torch.Tensor] = field(default_factory=dict)

    def begin(
        self, at: int, bias: Mapping[int, float], banned: tuple[Collection[int], int] | None, values: RequestValues
    ) -> None:
        """Add the values of a new sequence, and drop changes of the previous sequence of the request index."""
        self.drop(at)
        self.biases[at], self.states[at] = bias, values
        if banned is not None:
            self.banned[at] = banned

    def drop(self, at: int) -> None:
        """Drop the changes of a released request."""
        for delta in (self.biases, self.banned, self.states, self.masks, self.switched, self.drafts):
            delta.pop(at, None)

    def write(self, tables: RequestTables) -> None:
        """Write all changes, and clear them."""
        tables.set_logit_bias(self.biases, banned=self.banned)
        tables.set_state(self.states)
        tables.write_masks(self.masks)
        tables.switch_masks(self.switched)
        tables.write_drafts(self.drafts)
        for delta in (self.biases, self.banned, self.states, self.masks, self.switched, self.drafts):
            delta.clear()


def sampling_extents(config: RuntimeConfig, vocab_size: int) -> dict[str, int]:
    """Return the extents of the static buffers for sampling options; 0 for options that are off."""
    return {
        "counted_tokens": vocab_size if config.penalties else 0,
        "history": config.max_seq_len + 1 if config.penalties or config.num_speculative_tokens else 0,
        "drafts": config.num_speculative_tokens,
        "draft_tokens": vocab_size if config.rejection_sampling else 0,
        "tree_depth": config.tree_depth,
        "masked_tokens": vocab_size if config.token_masks else 0,
        "bias_entries": config.max_logit_bias,
        "logprob_columns": 0 if config.max_logprobs is None else 1 + config.max_logprobs,
    }
