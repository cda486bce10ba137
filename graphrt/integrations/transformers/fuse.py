"""Replaces norms, gated MLPs and linear layers with graphrt's operators, where these compute the same result on random
input."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist

from graphrt.integrations.transformers.float32 import local_tensor, replaced_tensors, without_tf32
from graphrt.integrations.transformers.host import HostedModel
from graphrt.integrations.transformers.probe import OwnTokens, agree, sample_logits, sample_tokens
from graphrt.integrations.transformers.sharding import has_plan, is_known, sharded_dim
from graphrt.integrations.transformers.trials import trials
from graphrt.kernels.errors import GraphRTError
from graphrt.kernels.ops.collectives import all_reduce
from graphrt.kernels.ops.linear import linear, linear_silu_mul
from graphrt.kernels.ops.norm import rms_norm

Forward = Callable[[torch.Tensor], torch.Tensor]
_OF_ALL_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}


def find_fused(hosted: HostedModel, max_seq_len: int, vocab_size: int) -> dict[str, str]:
    """Set `hosted.fused`, and return the operator of each module that is replaced, by name.

    Modules are recognized by their weights: one vector, or the two or three linear layers of a gated MLP. A module is
    replaced if its operator gives the same result in all trials; see trials.py. Modules of equal classes, shapes and
    attributes are tried once. Linear layers are always replaced. Linear layers of one module with the same input become
    one product, and their weights become adjacent in memory. Modules with hooks, or with code that is neither
    transformers' nor torch's, are not replaced, because they may differ on other input. At the end, seven tokens must
    get the same float32 logits as before. Otherwise, nothing is replaced or moved.
    """
    names = {module: name for name, module in hosted.model.named_modules()}
    weights = hosted.model.named_parameters(remove_duplicate=False)
    uses = Counter(local_tensor(weight).data_ptr() for _, weight in weights)

    def is_shared(module: torch.nn.Module) -> bool:
        return any(uses[local_tensor(weight).data_ptr()] > 1 for weight in module.parameters())

    tried: dict[Any, int | None] = {}  # index of the candidate that computes the same result
    found, joins = {}, list[Products]()
    sample = sample_tokens(hosted.model, max_seq_len, vocab_size)
    expected = sample_logits(hosted, OwnTokens, sample)
    linears, others = _called(hosted, sample)
    for module, dtype in others.items():
        candidates = list(_candidates(module))
        shapes = tuple((key, tuple(weight.shape), weight.dtype) for key, weight in module.named_parameters())
        key = (dtype, shapes, tuple((type(part), *_attributes(part)) for part in module.modules()))
        if key not in tried:
            same = (_same(module, forward, width, dtype) for _, forward, width in candidates)
            with hosted.collectives:
                tried[key] = next((index for index, equal in enumerate(same) if equal), None)
        if (index := tried[key]) is not None:
            name, forward, _ = candidates[index]
            if isinstance(forward, GatedMLP):
                if is_shared(module):
                    continue
                joins.append(forward.first)
            hosted.fused[module], found[names[module]] = forward, name
    joined = {layer for products in joins for layer in products.layers}
    groups: dict[Any, list[torch.nn.Linear]] = {}
    for module, (x, version) in linears.items():
        if module not in joined:
            sums = sharded_dim(module.weight) == 1
            kind = (names[module].rpartition(".")[0], id(x), version, module.bias is None, module.weight.dtype, sums)
            groups.setdefault(module if is_shared(module) else kind, []).append(module)
    for group in groups.values():
        products = Products(group, hosted.group if sharded_dim(group[0].weight) == 1 else None)
        if len(group) > 1:
            joins.append(products)
        for module, forward in zip(group, products.forwards(), strict=True):
            hosted.fused[module], found[names[module]] = forward, "linear"
    try:
        unchanged = agree(sample_logits(hosted, OwnTokens, sample), expected)
    except (GraphRTError, RuntimeError):
        unchanged = False
    if not unchanged:
        hosted.fused.clear()
        return {}
    for products in joins:
        products.join()
    return found


def _called(
    hosted: HostedModel, sample: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[dict[torch.nn.Linear, tuple[torch.Tensor, int]], dict[torch.nn.Module, torch.dtype]]:
    """Run a few tokens. Return the inputs of linear layers and their versions, and the dtypes of other modules' inputs.

    Modules whose inputs differ in dtype are left out, and so are layers whose plan splits inputs or gathers outputs.
    """
    linears = dict[torch.nn.Linear, tuple[torch.Tensor, int]]()
    others = dict[torch.nn.Module, set[torch.dtype]]()

    def note(module: Any, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], torch.Tensor):
            return
        if type(module) is not torch.nn.Linear:
            others.setdefault(module, set()).add(args[0].dtype)
        elif takes_part(module) and args[0].shape[-1] == local_tensor(module.weight).shape[1]:
            linears[module] = args[0], args[0]._version

    def drop(module: Any, _: Any, output: Any) -> None:
        if module in linears and output.shape[-1] != len(local_tensor(module.weight)):  # gathered
            del linears[module]

    changed = {module for module in hosted.model.modules() if module in hosted.tables or not is_plain(module)}
    plain = [module for module in hosted.model.modules() if changed.isdisjoint(module.modules())]
    hooks = [module.register_forward_pre_hook(note) for module in plain]
    hooks += [module.register_forward_hook(drop) for module in plain]
    try:
        with torch.no_grad():
            hosted.run(OwnTokens(sample[1]), *sample)
    finally:
        for hook in hooks:
            hook.remove()
    return linears, {module: next(iter(dtypes)) for module, dtypes in others.items() if len(dtypes) == 1}


def is_plain(module: torch.nn.Module) -> bool:
    """Return whether a module runs the code of a class of transformers or torch, and nothing else."""
    every = torch.nn.modules.module
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        every._global_forward_hooks,
        every._global_forward_pre_hooks,
    )
    return not any(hooks) and runs_library_code(module)


def runs_library_code(module: torch.nn.Module) -> bool:
    """Return whether `forward` is that of a class of transformers or torch, or of the plan that shards a module, and so
    are the functions that are attributes. Hooks may change input and output."""
    functions = [value for value in vars(module).values() if callable(value)]
    known = all(map(is_library_code, (type(module), type(module).forward, *functions)))
    return known and ("forward" not in vars(module) or has_plan(module))


def takes_part(layer: torch.nn.Linear) -> bool:
    """Return whether a linear layer multiplies by its whole weight, or by the part of this rank."""
    whole = type(layer.weight) is torch.nn.Parameter and not has_plan(layer)
    return whole or sharded_dim(layer.weight) is not None


def is_library_code(function: Any) -> bool:
    """Return whether transformers or torch define a function, a class, or the class of a callable object."""
    owner = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None)
    return (owner or type(function).__module__).partition(".")[0] in ("transformers", "torch", "builtins")


def _attributes(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the attributes that a module has in addition to those of all modules: numbers and texts, and identities."""
    for name, value in vars(module).items():
        if name not in _OF_ALL_MODULES:
            yield name, value if isinstance(value, bool | int | float | str) else id(value)


def _candidates(module: torch.nn.Module) -> Iterator[tuple[str, Forward, int]]:
    """Yield operators that may compute what a module does, with the width of its input."""
    own, children = dict(module.named_parameters(recurse=False)), list(module.children())
    unknown = [*module.buffers(), *(weight for weight in module.parameters() if not is_known(weight))]
    if unknown or len(inspect.signature(type(module).forward).parameters) != 2:
        return
    if len(own) == 1 and not children:
        ((name, weight),) = own.items()
        if weight.dim() == 1 and sharded_dim(weight) is None:
            for eps in {value for value in vars(module).values() if isinstance(value, float)}:
                yield "rms_norm", Norm(module, name, eps), len(weight)
    linears = [child for child in children if type(child) is torch.nn.Linear]
    if not own and 2 <= len(linears) <= 3:
        for *first, down in itertools.permutations(linears):
            if sum(layer.out_features for layer in first) == 2 * down.in_features:
                yield "linear_silu_mul", GatedMLP(first, down), first[0].in_features


class Norm:
    def __init__(self, module: torch.nn.Module, name: str, eps: float) -> None:
        self._weights, self._name, self.eps = module._parameters, name, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)

    @property
    def weight(self) -> torch.Tensor:
        weight = self._weights[self._name]
        assert weight is not None, "the norm had a weight"
        return weight


class Products:
    """Linear layers with the same input, as one product after `join`.

    group   ranks whose products are summed before the biases are added, because each has a part of the input; or None
    """

    def __init__(self, layers: list[torch.nn.Linear], group: dist.ProcessGroup | None = None) -> None:
        self.layers, self.group = layers, group
        self._joined: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._input: torch.Tensor | None = None
        self._parts: list[torch.Tensor] = []

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of the product, on this rank."""
        if self._joined is not None:
            return self._joined
        weights = [local_tensor(layer.weight) for layer in self.layers]
        biases = [local_tensor(layer.bias) for layer in self.layers if layer.bias is not None]
        if len(self.layers) == 1:
            return weights[0], biases[0] if biases else None
        weight, biases = _as_one([weight.detach() for weight in weights]), [bias.detach() for bias in biases]
        return torch.nn.Parameter(weight, requires_grad=False), _as_one(biases) if biases else None

    def join(self) -> None:
        """Move the weights of the layers next to each other. The layers keep their parameters, with equal values."""
        with torch.inference_mode(self.layers[0].weight.is_inference()):  # the kind that they had
            self._joined = weight, bias = self.weights
            for layer, rows in zip(self.layers, weight.split(self._sizes), strict=True):
                local_tensor(layer.weight).data = rows
            if bias is not None:
                for layer, rows in zip(self.layers, bias.split(self._sizes), strict=True):
                    local_tensor(layer.bias).data = rows

    @property
    def _sizes(self) -> list[int]:
        return [len(local_tensor(layer.weight)) for layer in self.layers]

    def forwards(self) -> list[Forward]:
        """Return the forward of each layer. The first that gets a tensor computes the product for all."""
        return [Part(self, index) for index in range(len(self.layers))]

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self._input:
            weight, bias = self.weights
            out = linear(x.reshape(-1, x.shape[-1]), weight, bias if self.group is None else None)
            if self.group is not None:
                out = all_reduce(out, self.group)
                out = out if bias is None else out + bias
            self._input = x
            self._parts = list(out.view(*x.shape[:-1], -1).split(self._sizes, dim=-1))
        part = self._parts[index]
        if index == len(self.layers) - 1:
            self._input, self._parts = None, []
        return part


class Part:
    """The forward of one of the layers of `products`."""

    def __init__(self, products: Products, index: int) -> None:
        self.products, self._index = products, index

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.products.part(self._index, x)


def _as_one(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all parts as one tensor: a copy, unless another runtime has moved them next to each other."""
    first, sizes = parts[0], [part.nbytes for part in parts]
    places = [first.data_ptr() + before for before in itertools.accumulate(sizes[:-1], initial=0)]
    shared = {part.untyped_storage().data_ptr() for part in parts}
    if len(shared) > 1 or [part.data_ptr() for part in parts] != places or not all(p.is_contiguous() for p in parts):
        return torch.cat(parts)
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


class GatedMLP:
    """down(silu(gate) * up)"""

    def __init__(self, first: list[torch.nn.Linear], down: torch.nn.Linear) -> None:
        self.first, self.down = Products(first), down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.first.weights
        result: torch.Tensor = self.down(linear_silu_mul(x.reshape(-1, x.shape[-1]), weight, bias=bias))
        return result.view(*x.shape[:-1], -1)


def _same(module: torch.nn.Module, forward: Forward, width: int, dtype: torch.dtype) -> bool:
    """Return whether a module and an operator give the same result in all trials."""
    eps = forward.eps if isinstance(forward, Norm) else 0.0
    for trial in trials(width, dtype, next(module.parameters()).device, eps=eps, last_place=1):
        try:
            with torch.no_grad(), without_tf32(), replaced_tensors(module.modules(), trial.replace):
                expected, found = module(trial.x.clone()), forward(trial.x)
        except (GraphRTError, RuntimeError, TypeError):  # a different kind of input
            return False
        if not trial.same(found, expected):
            return False
    return True
