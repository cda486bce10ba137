"""Wraps a module that takes token ids and positions as a model that takes a Step; supports torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from graphrt.kernels.checks import check_callable, check_instance, check_tensor
from graphrt.step import Step


class StepModel(torch.nn.Module):
    """The model that `as_step_model` returns."""

    def __init__(self, module: torch.nn.Module, head: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        super().__init__()
        self.module, self.head = module, head

    def forward(self, step: Step) -> torch.Tensor:
        """Return the logits [padded_reqs, vocab_size]. Raises: ShapeError: if the module returns wrong hidden
        states."""
        mark_varying(step.input_ids, step.positions)
        hidden: torch.Tensor = self.module(step.input_ids, step.positions)
        tokens = step.descriptor.padded_tokens
        check_tensor("module(input_ids, positions)", hidden, shape=(tokens, None), device=step.positions.device)
        rows = hidden[step.logits_indices]
        if self.head is None:
            return rows
        step.keep_hidden(hidden)
        mark_varying(rows)
        return self.head(rows)


def as_step_model(module: torch.nn.Module, *, head: Callable[[torch.Tensor], torch.Tensor] | None = None) -> StepModel:
    """Wrap a module that takes token ids and positions as a model that takes a Step, for Runtime and ReplayManager.

        model = graphrt.as_step_model(module, head=module.compute_logits)
        # = lambda step: head(module(step.input_ids, step.positions)[step.logits_indices])

    module   called as `module(input_ids, positions)`, both [tokens] int64, the packed tokens of all sequences. Returns
             hidden states [tokens, width], or logits [tokens, vocab_size] if `head` is None. Its attention layers are
             `graphrt.Attention`. It may be compiled: `torch.compile(module, fullgraph=True)`
    head     maps hidden states [padded_reqs, width], one token per request, to logits [padded_reqs, vocab_size]; None:
             the module returns the logits of every token

    Capture-safe if the module and the head are.

    Raises: ConfigError: if `module` is not a torch.nn.Module, or `head` is not callable.
    """
    check_instance("module", module, torch.nn.Module, advice="pass a function of a Step to the runtime itself")
    if head is not None:
        check_callable("head", head, advice="pass the module or function that computes logits, or None")
    return StepModel(module, head)


def mark_varying(*tensors: torch.Tensor) -> None:
    """Tell torch.compile that the first extent of these tensors differs between sizes, so that sizes share kernels."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and not torch.compiler.is_compiling():
        for tensor in tensors:
            dynamo.maybe_mark_dynamic(tensor, 0)


def is_compiled(model: object) -> bool:
    """Return whether a module of the model is compiled, by `torch.compile(module)` or `module.compile()`."""
    if not isinstance(model, torch.nn.Module):
        return False
    return any(hasattr(x, "_orig_mod") or x._compiled_call_impl is not None for x in model.modules())
