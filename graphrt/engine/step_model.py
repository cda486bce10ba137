"""A module that takes token ids and positions, as a model that takes a Step; and what torch.compile needs of a step."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from graphrt.kernels.checks import check_callable, check_instance, check_tensor
from graphrt.step import Step


class StepModel(torch.nn.Module):
    """See `as_step_model`."""

    def __init__(self, module: torch.nn.Module, head: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        super().__init__()
        self.module, self.head = module, head

    def forward(self, step: Step) -> torch.Tensor:
        """Logits [padded_reqs, vocab_size].

        Raises: ShapeError where the module returns no tensor with a row per token.
        """
        mark_varying(step.input_ids, step.positions)
        hidden: torch.Tensor = self.module(step.input_ids, step.positions)
        tokens = step.descriptor.padded_tokens
        check_tensor("module(input_ids, positions)", hidden, shape=(tokens, None), device=step.positions.device)
        rows = hidden[step.logits_indices]
        if self.head is None:
            return rows
        mark_varying(rows)
        return self.head(rows)


def as_step_model(module: torch.nn.Module, *, head: Callable[[torch.Tensor], torch.Tensor] | None = None) -> StepModel:
    """The model `step -> logits` that Runtime and ReplayManager take, of a module that knows nothing of steps.

        model = graphrt.as_step_model(module, head=module.compute_logits)
        # = lambda step: head(module(step.input_ids, step.positions)[step.logits_indices])

    module   called as `module(input_ids, positions)`, both [tokens] int64, the tokens of all sequences one after the
             other. It returns hidden states [tokens, width], or logits [tokens, vocab_size] where there is no head. Its
             attention layers are `graphrt.Attention`. It may be compiled: `torch.compile(module, fullgraph=True)`
    head     maps hidden states of one token per row [rows, width] to logits [rows, vocab_size]; None: the module gives
             logits, of every token

    Capture-safe, if the module and the head are: they run once per captured size, and once more before where the module
    or one in it is compiled.

    Raises: ConfigError for a module that is none and a head that cannot be called.
    """
    check_instance("module", module, torch.nn.Module, advice="other models are called as model(step)")
    if head is not None:
        check_callable("head", head, advice="pass the module or function that makes logits, or None")
    return StepModel(module, head)


def mark_varying(*tensors: torch.Tensor) -> None:
    """Tell torch.compile that the first extent of these differs from size to size of a capture_sizes.

    Else it would compile the first size for itself and a second time for all others. Then a step could run other
    kernels eagerly than its graph holds.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and not torch.compiler.is_compiling():
        for tensor in tensors:
            dynamo.maybe_mark_dynamic(tensor, 0)


def is_compiled(model: object) -> bool:
    """Whether a module in the model is compiled, by `torch.compile(module)` or `module.compile()`."""
    if not isinstance(model, torch.nn.Module):
        return False
    return any(hasattr(x, "_orig_mod") or x._compiled_call_impl is not None for x in model.modules())
