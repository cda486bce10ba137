"""Runs a 16-bit model with float32 values, using the additional memory of one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor


@contextmanager
def replaced_tensors(
    modules: Iterable[torch.nn.Module], replace: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Replace parameters, buffers and tensor attributes of modules; then restore all attributes.

    replace   returns the tensor that replaces another one; of a DTensor, it gets the local tensor
    """
    made: dict[int, torch.Tensor] = {}
    saved = []

    def replaced(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            is_parameter = isinstance(value, torch.nn.Parameter)
            local = local_tensor(value)
            old = torch.nn.Parameter(local, False) if is_parameter and local is not value else local
            new = replace(old)
            if new is old:
                new = value
            elif isinstance(value, DTensor):
                mesh, placements, sizes = value.device_mesh, value.placements, (value.shape, value.stride())
                new = DTensor.from_local(new, mesh, placements, run_check=False, shape=sizes[0], stride=sizes[1])
            made[id(value)] = torch.nn.Parameter(new, False) if is_parameter and new is not value else new
        return made[id(value)]

    try:
        for module in modules:
            fields = vars(module)
            for holder in (fields, fields["_parameters"], fields["_buffers"]):
                saved.append((holder, dict(holder)))
                holder.update({name: replaced(value) for name, value in holder.items()})
        yield
    finally:
        for holder, values in reversed(saved):
            holder.clear()
            holder.update(values)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor on this rank, and other tensors as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def in_float32(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a model computes as if it were loaded in float32, without TF32."""
    return replaced_by_layer(model, widened)


@contextmanager
def replaced_by_layer(model: torch.nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Return a context in which all tensors of a model are replaced, without TF32.

    The tensors of a layer are replaced while it runs, and those of modules outside of layers all the time.
    """
    layers = list(_layers(model))
    inside = {module for layer in layers for module in layer.modules()}
    with ExitStack() as stack:
        stack.enter_context(without_tf32())
        for layer in layers:
            stack.enter_context(_replaced_while_it_runs(layer, replace))
        stack.enter_context(replaced_tensors([m for m in model.modules() if m not in inside], replace))
        yield


@contextmanager
def without_tf32() -> Iterator[None]:
    """Return a context without TF32, set by the API that has set TF32, because products refuse a mix of both."""
    matmul = torch.backends.cuda.matmul
    if matmul.fp32_precision != "tf32":
        yield
        return
    try:
        previous = torch.get_float32_matmul_precision()
    except RuntimeError:  # `fp32_precision` was set
        matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = "tf32"
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


def _layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules in the outermost lists of modules."""
    for child in module.children():
        if isinstance(module, torch.nn.ModuleList) and not isinstance(child, torch.nn.ModuleList):
            yield child
        else:
            yield from _layers(child)


@contextmanager
def _replaced_while_it_runs(layer: torch.nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    running: list[Any] = []

    def enter(*_: Any) -> None:
        running.append(replaced_tensors(layer.modules(), replace))
        running[-1].__enter__()

    def leave(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    hooks = layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def widened(value: torch.Tensor) -> torch.Tensor:
    """Return a float32 copy of a 16-bit tensor, and other tensors as they are."""
    return value.detach().float() if value.dtype in (torch.float16, torch.bfloat16) else value
