"""Rotates queries and keys in the kernel that writes the cache, instead of in the modules of a decoder."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from graphrt.integrations.transformers.fuse import is_library_code
from graphrt.integrations.transformers.host import HostedModel, LayerCall, Rotating
from graphrt.integrations.transformers.probe import OwnTokens, sample_logits, sample_tokens
from graphrt.integrations.transformers.rotary import RotaryTable, is_rotary
from graphrt.integrations.transformers.trials import same_values
from graphrt.kernels.cache.write import Rotary, write_kv
from graphrt.kernels.errors import GraphRTError

_Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _UnlikeError(Exception):
    """The model rotates differently from the kernel."""


class RotarySource:
    """Replaces a rotary module with a table for the kernel. Its result only identifies the table."""

    def __init__(self, module: torch.nn.Module, length: int, device: torch.device) -> None:
        self._table = RotaryTable(module, length, None, device)
        self._made: dict[Any, tuple[torch.Tensor, Rotary]] = {}

    def __call__(
        self, calls: ContextVar[Any], x: torch.Tensor, position_ids: torch.Tensor, *extra: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = (x.dtype, extra, tuple(sorted(named.items())))
        if key not in self._made:  # in the check
            self._made[key] = self._build(*key)
        first, rotary = self._made[key]
        cos = first.expand(1, position_ids.shape[1], -1)
        calls.get().offer(cos, rotary)
        return cos, cos

    def tensors(self) -> list[torch.Tensor]:
        """Return the tables that steps read."""
        return [rotary.cos_sin for _, rotary in self._made.values()]

    def rebuild(self) -> None:
        """Recompute the table in place if a buffer of the module has changed."""
        if self._table.take_change():
            for key, (_, rotary) in self._made.items():
                rotary.cos_sin.copy_(self._build(*key)[1].cos_sin)

    def _build(
        self, dtype: torch.dtype, extra: tuple[Any, ...], named: tuple[tuple[str, Any], ...]
    ) -> tuple[torch.Tensor, Rotary]:
        found = self._table.build(dtype, extra, dict(named))
        halves = [part[0].float().chunk(2, dim=-1) for part in found] if isinstance(found, tuple) else []
        if len(halves) != 2 or not all(torch.equal(*pair) for pair in halves):
            raise _UnlikeError
        return found[0][:, :1], Rotary(torch.cat([pair[0] for pair in halves], -1))


def find_rotation(hosted: HostedModel, max_seq_len: int, vocab_size: int) -> dict[str, str]:
    """Let the kernel rotate, if it gives the same queries and keys in float32. Return the operator of each attention
    module.

    The function that rotates queries and keys is replaced in the module that defines the attention layers. Every layer
    must pass its result to the attention function unchanged.
    """
    model = hosted.model
    namespaces = {sys.modules[type(module).__module__] for module in hosted.attention_modules}
    namespaces = {space for space in namespaces if hasattr(space, "apply_rotary_pos_emb")}
    if not all(is_library_code(space.apply_rotary_pos_emb) for space in namespaces):
        return {}
    rotary = [module for module in model.modules() if is_rotary(module)]
    if not namespaces or not rotary or hosted.tables:
        return {}
    device = model.device
    sample = sample_tokens(model, max_seq_len, vocab_size)
    fused, hosted.fused = hosted.fused, {}  # without moved weights, which have no float32 copies
    runs: list[_KeptCalls] = []  # the last one computes the logits, in float32 if all modules can

    def keep(positions: torch.Tensor) -> _KeptCalls:
        runs.append(_KeptCalls(positions))
        return runs[-1]

    def compare(positions: torch.Tensor) -> _ComparedTokens:
        return _ComparedTokens(positions, hosted.rotaries, runs.pop(0).calls)

    sample_logits(hosted, keep, sample)
    hosted.rotations = {module: RotarySource(module, max_seq_len, device) for module in rotary}
    hosted.namespaces = sorted(namespaces, key=lambda space: space.__name__)
    try:
        with torch.no_grad():
            hosted.run(RotatedTokens(sample[1], hosted.rotaries), *sample)  # makes the tables of the model's dtype
        sample_logits(hosted, compare, sample)
        names = {module: name for name, module in model.named_modules()}
        return {names[module]: "write_kv" for module in hosted.attention_modules}
    except (_UnlikeError, GraphRTError, RuntimeError, TypeError):
        pass
    finally:
        hosted.fused = fused
    hosted.rotations, hosted.namespaces, hosted.rotaries = {}, [], {}
    return {}


class _KeptCalls(OwnTokens):
    """Attention as in OwnTokens, which keeps the queries, the keys and the result of each call."""

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__(positions)
        self.calls: list[_Kept] = []

    def attend(self, call: LayerCall) -> torch.Tensor:
        result = super().attend(call)
        self.calls.append((call.q.clone(), call.k.clone(), result.clone()))
        return result


class RotatedTokens(Rotating, OwnTokens):
    """Attention that rotates with the kernel, and returns values of the token itself.

    rotaries  receives the table of each attention module, or None, by the module and its dtype
    """

    def __init__(
        self, positions: torch.Tensor, rotaries: dict[tuple[torch.nn.Module, torch.dtype], Rotary | None]
    ) -> None:
        OwnTokens.__init__(self, positions)
        Rotating.__init__(self)
        self._rotaries = rotaries

    def attend(self, call: LayerCall) -> torch.Tensor:
        return super().attend(self._rotated_call(call))

    def _rotated_call(self, call: LayerCall) -> LayerCall:
        rotated = self.rotated
        rotary = self._rotaries[call.module, call.q.dtype] = self.take_rotary()
        if rotary is not None:
            if [x.data_ptr() for x in (call.q, call.k)] != [x.data_ptr() for x in rotated]:
                raise _UnlikeError
            q, k = (self._rotate(x.contiguous().clone(), rotary) for x in (call.q, call.k))
            call = call._replace(q=q, k=k)
        return call

    def _rotate(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        none = x[:, :0]
        write_kv(
            x, none, none, none[:, None], none[:, None], self.positions, self.positions,
            rotary=replace(rotary, k_norm=None),
        )  # fmt: skip
        return x


class _ComparedTokens(RotatedTokens):
    """Raises _UnlikeError if rotated queries or keys differ from those of an earlier run.

    kept  the calls of the earlier run, whose results are returned, so that rounding does not add up
    """

    def __init__(self, positions: torch.Tensor, rotaries: Any, kept: list[_Kept]) -> None:
        super().__init__(positions, rotaries)
        self._kept = iter(kept)

    def attend(self, call: LayerCall) -> torch.Tensor:
        call = self._rotated_call(call)
        q, k, result = next(self._kept)
        if not (same_values(call.q, q) and same_values(call.k, k)):
            raise _UnlikeError
        return result
