"""Runs a decoder twice on a few tokens, to find modules that mix tokens outside of the attention function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from graphrt.integrations.transformers.discovery import place, refuse
from graphrt.integrations.transformers.host import HostedModel, LayerCall

_TRIALS = 3


def check_independence(hosted: HostedModel, max_seq_len: int, vocab_size: int) -> None:
    """Check that a token's logits depend on other tokens through the attention function only.

    Three tokens run among others, in two orders. The attention function returns values of the token itself. Models with
    convolutions, recurrences, attention of their own or positions by index give these tokens other logits.

    Raises: UnsupportedError: if all three tokens change in each of several trials, with the module to blame.
    """
    blamed = ""
    for trial in range(_TRIALS):
        first, second = (_run(hosted, trial, other, max_seq_len, vocab_size) for other in (False, True))
        found = _first_difference(first, second, 1e-3 if hosted.model.dtype == torch.float32 else 0.05)
        if found is None:
            return
        blamed = blamed or _blamed(hosted.model, found)
    raise refuse(
        hosted.model, f"{blamed} gives a token other values if other tokens run in the same step. It mixes tokens "
        "outside of the attention function, or takes positions from the order of the tokens"
    )  # fmt: skip


_Trace = list[tuple[torch.nn.Module, torch.Tensor]]


def sample_tokens(model: Any, max_seq_len: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return seven random token ids and positions, and their indices, on the device of the model."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, vocab_size, 7), rng.integers(0, max_seq_len, 7), np.arange(7)
    ids, positions, keep = (torch.from_numpy(x).to(model.device) for x in values)
    return ids, positions, keep


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether logits [tokens, vocab] are equal up to rounding for most tokens. Rounding may choose other experts
    for a token."""
    bound = 1e-4 if expected.dtype == torch.float32 else 0.05
    change = (found.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1).clamp(min=1e-30)
    return bool((change <= bound).sum() > len(change) // 2)


def _run(hosted: HostedModel, trial: int, other: bool, max_seq_len: int, vocab_size: int) -> _Trace:
    """Run seven tokens. Return the outputs of all modules for the three tokens under test, in order of completion."""
    rng = np.random.default_rng(trial)
    ids, noise = rng.integers(0, vocab_size, (2, 7))
    positions, far = rng.integers(0, max_seq_len, (2, 7))
    first, second = [0, 2, 5], [5, 1, 3]  # indices of the three tokens in the two orders
    if other:
        noise[second], far[second] = ids[first], positions[first]
        ids, positions = noise, far
    of_tested = second if other else first
    device = hosted.model.device
    on_device = [torch.from_numpy(x).to(device) for x in (ids, positions, np.arange(7))]
    found: _Trace = []

    def note(module: torch.nn.Module, _: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) and output else output
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and list(tensor.shape[:2]) == [1, 7]:
            found.append((module, tensor[0][of_tested].float().cpu()))

    hooks = [module.register_forward_hook(note) for module in hosted.model.modules()]
    try:
        with torch.no_grad():
            logits = hosted.run(OwnTokens(on_device[1]), *on_device)
    finally:
        for hook in hooks:
            hook.remove()
    return [*found, (hosted.model, logits[of_tested].float().cpu())]


def _first_difference(first: _Trace, second: _Trace, bound: float) -> torch.nn.Module | None:
    """Return the first module whose outputs for all tested tokens differ; None if the logits of one are equal."""

    def differs(a: torch.Tensor, b: torch.Tensor) -> bool:
        if a.shape != b.shape:
            return False
        change = (a - b).flatten(1).norm(dim=1) / a.flatten(1).norm(dim=1).clamp(min=1e-30)
        return bool((change > bound).all())

    if not differs(first[-1][1], second[-1][1]):
        return None
    pairs = zip(first, second, strict=False)
    return next((module for (module, a), (_, b) in pairs if differs(a, b)), first[-1][0])


def _blamed(model: torch.nn.Module, found: torch.nn.Module) -> str:
    """Return the class and place of a module, or of the module of the model that calls it if it is one of torch."""
    names = {module: name for name, module in model.named_modules()}
    while type(found).__module__.startswith("torch.") and names[found]:
        found = model.get_submodule(names[found].rpartition(".")[0])
    if isinstance(found, torch.nn.ModuleList):
        found = model
    return f"{type(found).__name__} at {place(type(found).forward)}"


class OwnTokens:
    """Attention that returns values of the token itself, which show its query, key and value."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions

    def attend(self, call: LayerCall) -> torch.Tensor:
        heads, size = call.q.shape[1], call.v.shape[2]
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (call.k, call.v))
        return v + sum(_fitted(x, size).to(v.dtype) for x in (call.q, k))

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
