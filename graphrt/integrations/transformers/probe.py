"""Runs a few tokens among different neighbors, to find modules that mix tokens outside of the attention function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from graphrt.integrations.transformers.discovery import place, refuse
from graphrt.integrations.transformers.float32 import in_float32
from graphrt.integrations.transformers.host import Calls, HostedModel, LayerCall

_TRIALS, _ALONE = 3, 7
_MOST_TOKENS = 128
_SHOWN = 4  # tokens whose values are compared module by module

Tokens = tuple[Any, Any, Any]
"""Ids and positions [tokens], and the indices of the tokens under test."""


def check_independence(hosted: HostedModel, max_seq_len: int, vocab_size: int) -> None:
    """Check that a token's logits depend on other tokens through the attention function only.

    Half of up to 128 tokens run twice, at different places among different tokens. Seven of them also run alone. The
    attention function returns values of the token itself. Models with convolutions, recurrences, attention of their own
    or positions by index give these tokens other logits. So do modules that treat a single token differently, and
    change most of the seven.

    The model runs in float32, because rounding in 16 bits may choose different experts for a token, which changes it as
    much as a different neighbor. Kernels that support only 16 bits run in their own dtype, without the tokens that run
    alone.

    Raises: UnsupportedError: if tokens change in each of several trials, with the module to blame.
    """
    try:
        with in_float32(hosted.model):
            blamed = _mixing(hosted, max_seq_len, vocab_size, alone=True)
    except (RuntimeError, TypeError, ValueError):
        blamed = _mixing(hosted, max_seq_len, vocab_size, alone=False)
    if blamed is not None:
        raise refuse(
            hosted.model, f"{blamed} gives a token different values if other tokens run in the same step. It mixes "
            "tokens outside of the attention function, takes positions from the order of the tokens, or depends on "
            "their number. Change its forward to depend on each token and its position id only"
        )  # fmt: skip


def _mixing(hosted: HostedModel, max_seq_len: int, vocab_size: int, *, alone: bool) -> str | None:
    """Return the class and place of a module that gives tokens different values in each trial, or None."""
    blamed = None
    for trial in range(_TRIALS):
        first, second = _draw(trial, max_seq_len, vocab_size)
        ids, positions, rows = first
        some = rows[:_ALONE]
        single = [(ids[[row]], positions[[row]], np.zeros(1, dtype=np.int64)) for row in some]
        compared = [(first, [second], len(rows) // 32), ((ids, positions, some), single, len(some) // 2)]
        for before, after, most in compared if alone else compared[:1]:
            changed = _changed(_logits(hosted, [before]), _logits(hosted, after))
            if changed.sum() > most:
                blamed = blamed or _blame(hosted, before, after, changed.nonzero()[0][:_SHOWN])
                break
        else:
            return None
    return blamed


def sample_tokens(
    model: Any, max_seq_len: int, vocab_size: int, count: int = 7
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random token ids and positions, and their indices, on the device of the model."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, vocab_size, count), rng.integers(0, max_seq_len, count), np.arange(count)
    ids, positions, keep = (torch.from_numpy(x).to(model.device) for x in values)
    return ids, positions, keep


def sample_logits(
    hosted: HostedModel, calls: Callable[[torch.Tensor], Calls], sample: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return the logits of sample tokens, in float32 unless a module has kernels for 16 bits only.

    calls   makes the Calls of a run from the positions
    """
    with torch.no_grad():
        try:
            with in_float32(hosted.model):
                return hosted.run(calls(sample[1]), *sample)
        except (RuntimeError, TypeError, ValueError):
            return hosted.run(calls(sample[1]), *sample)


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether logits [tokens, vocab] are equal up to rounding for most tokens. Rounding may choose different
    experts for a token."""
    bound = 1e-3 if expected.dtype == torch.float32 else 0.05
    change = (found.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1).clamp(min=1e-30)
    return bool((change <= bound).sum() > len(change) // 2)


def _draw(trial: int, max_seq_len: int, vocab_size: int) -> tuple[Tokens, Tokens]:
    """Return two steps with the same tokens under test, at random places among random tokens."""
    count = max(7, min(_MOST_TOKENS, max_seq_len))
    rng = np.random.default_rng(trial)
    tested, *others = rng.integers(0, [[vocab_size], [max_seq_len]], (3, 2, count))
    steps = []
    for ids, positions in others:
        rows = rng.permutation(count)[: count // 2]
        ids[rows], positions[rows] = tested[:, : count // 2]
        steps.append((ids, positions, rows))
    return steps[0], steps[1]


def _logits(hosted: HostedModel, steps: list[Tokens]) -> torch.Tensor:
    """Run steps, and return the logits of the tokens under test, float32 [tokens, vocab]."""
    found = []
    for step in steps:
        ids, positions, rows = (torch.from_numpy(x).to(hosted.model.device) for x in step)
        with torch.no_grad():
            found.append(hosted.run(OwnTokens(positions), ids, positions, rows).float())
    return torch.cat(found)


def _changed(first: torch.Tensor, second: torch.Tensor) -> Any:
    """Return which rows differ by more than rounding, bool [rows]."""
    change = (first - second).flatten(1).norm(dim=1) / first.flatten(1).norm(dim=1).clamp(min=1e-30)
    return (change > 1e-3).cpu().numpy()


def _blame(hosted: HostedModel, before: Tokens, after: list[Tokens], which: Any) -> str:
    """Run again, and return the class and place of the first module whose outputs for all these tokens differ."""
    first = _trace(hosted, (before[0], before[1], before[2][which]))
    if len(after) > 1:  # one token each
        traces = [_trace(hosted, after[index]) for index in which]
        second = [(parts[0][0], torch.cat([x for _, x in parts])) for parts in zip(*traces, strict=False)]
    else:
        second = _trace(hosted, (after[0][0], after[0][1], after[0][2][which]))
    pairs = zip(first, second, strict=False)
    found = (module for (module, a), (_, b) in pairs if a.shape == b.shape and _changed(a, b).all())
    return _name(hosted.model, next(found, hosted.model))


def _trace(hosted: HostedModel, step: Tokens) -> list[tuple[torch.nn.Module, torch.Tensor]]:
    """Return the outputs of all modules for the tokens under test, in order of completion."""
    ids, _, rows = step
    found: list[tuple[torch.nn.Module, torch.Tensor]] = []

    def note(module: torch.nn.Module, _: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) and output else output
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and list(tensor.shape[:2]) == [1, len(ids)]:
            found.append((module, tensor[0][rows].float().cpu()))

    hooks = [module.register_forward_hook(note) for module in hosted.model.modules()]
    try:
        _logits(hosted, [step])
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _name(model: torch.nn.Module, found: torch.nn.Module) -> str:
    """Return the class and place of a module, or if the module is one of torch, of the model's module that calls it."""
    names = {module: name for name, module in model.named_modules()}
    while type(found).__module__.startswith("torch.") and names[found]:
        found = model.get_submodule(names[found].rpartition(".")[0])
    if isinstance(found, torch.nn.ModuleList):
        found = model
    return f"{type(found).__name__} at {place(type(found).forward)}"


class OwnTokens:
    """Attention that returns v + 2 q - 3 k of the token itself, which changes if the model swaps or changes any of
    them."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions

    def attend(self, call: LayerCall) -> torch.Tensor:
        heads, size = call.q.shape[1], call.v.shape[2]
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (call.k, call.v))
        return v + 2 * _fitted(call.q, size).to(v.dtype) - 3 * _fitted(k, size).to(v.dtype)

    def mask(self, predicate: Callable[..., Any]) -> torch.Tensor | None:
        return None

    def exceeds(self, length: int) -> torch.Tensor:
        return self.positions >= length


def _fitted(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return values [tokens, heads, size] that depend on all dims of x."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % size))
    parts = padded.view(*x.shape[:2], -1, size)
    factors = torch.linspace(1, 2, parts.shape[2], dtype=x.dtype, device=x.device)
    return (parts * factors[:, None]).sum(2)
