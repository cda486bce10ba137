"""Replaces decoder layers by the operators of graphrt's own Llama layer, if the result is the same."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch

from graphrt.integrations.transformers.float32 import replaced_by_layer
from graphrt.integrations.transformers.fuse import (
    GatedMLP,
    Norm,
    Part,
    Products,
    is_plain,
    runs_library_code,
)
from graphrt.integrations.transformers.host import HostedModel, LayerCall
from graphrt.integrations.transformers.probe import OwnTokens, agree, sample_logits, sample_tokens
from graphrt.integrations.transformers.rotation import RotatedTokens
from graphrt.integrations.transformers.sharding import sharded_dim
from graphrt.integrations.transformers.trials import Trial, trials
from graphrt.kernels.cache.write import Rotary
from graphrt.kernels.errors import GraphRTError
from graphrt.kernels.ops.linear import Normed, linear_rope_write
from graphrt.kernels.ops.norm import rms_norm
from graphrt.models.llama import run_layer
from graphrt.spec import AttentionSpec

_Kind = TypeVar("_Kind", Norm, GatedMLP, Part)
_PAGE = 16  # any size, since the check allocates its own pages


class FusedLayer:
    """Compute h = x + attention(norm(x)), then h + mlp(norm(h)).

    A layer also computes the first norm of the next layer, `after`. The next layer uses this norm, and updates its
    input in place, only if its input is the result of this layer.

    norms     before attention and MLP
    heads     norms of queries and keys, or none
    products  qkv, o, gate and up, down
    rotaries  the table of the rotation, or None, by dtype
    spec      of the first call of the attention function
    after     the layer that transformers calls next; the layer itself if the next layer is unknown
    """

    def __init__(
        self,
        norms: list[Norm],
        heads: list[Norm],
        products: list[Products],
        rotaries: dict[torch.dtype, Rotary | None],
        spec: AttentionSpec,
    ) -> None:
        self.norms, self._heads, self._rotaries, self.spec = norms, heads, rotaries, spec
        self.products, self._group = products, products[-1].group
        self.after = self

    def __call__(self, calls: ContextVar[Any], hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self.run(calls.get(), hidden)

    def run(self, calls: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Return the result of the layer for hidden states [1, tokens, width]."""
        first, second = self.norms
        residual, (result, x, gain) = hidden.view(-1, hidden.shape[-1]), calls.carried
        if result is not hidden:
            residual = residual.clone()
        if result is not hidden or gain is not first.weight:
            x = Normed(rms_norm(residual, first.weight, first.eps))
        rotary, gain = self._rotaries[hidden.dtype], self.after.norms[0].weight.to(hidden.dtype)
        if rotary is not None and self._heads:
            q_norm, k_norm = (norm.weight for norm in self._heads)
            rotary = replace(rotary, q_norm=q_norm, k_norm=k_norm, norm_eps=first.eps)
        step, index = calls.next_layer()
        products = [product.weights for product in self.products]
        x = run_layer(step, index, x, residual, products, (second.weight, gain), rotary, first.eps, self._group)
        result = residual.view(hidden.shape)
        calls.carried = (None, None, None) if self.after is self else (result, x, gain)
        return result


def find_layers(hosted: HostedModel, max_seq_len: int, vocab_size: int) -> dict[str, str]:
    """Set `hosted.layers`, and return the operator of each layer that is replaced, by name.

    A layer is replaced if it consists of two norms, attention and a gated MLP whose operators are known, and if the
    result is the same in all trials; see trials.py. Finally, the logits of seven tokens must not change, or no layer is
    replaced. Modules with hooks, or with code that is neither transformers' nor torch's, are not replaced.
    """
    rotating = {module for module, _ in hosted.rotaries}
    names, layers = dict[torch.nn.Module, str](), dict[torch.nn.Module, FusedLayer]()
    for name, module in hosted.model.named_modules():
        attention = next((child for child in module.children() if child in rotating), None)
        if attention is not None and (layer := _layer(hosted, module, attention)) is not None:
            names[module], layers[module] = name, layer
    if not layers:
        return {}
    plain = copy.copy(hosted)
    plain.fused, plain.rotations, plain.namespaces = {}, {}, []
    sample = sample_tokens(hosted.model, max_seq_len, vocab_size)
    with torch.no_grad():
        weight = next(iter(layers.values())).products[0].layers[0].weight
        for trial in trials(weight.shape[1], weight.dtype, weight.device):
            ids, positions, keep = sample_tokens(hosted.model, max_seq_len, vocab_size, trial.x.shape[1])
            layers = _equal(plain, layers, trial, (ids, positions * trial.rotates, keep[:1]))
        for before, after in pairwise(layers):
            follows = _follows(hosted.model, names[before], names[after])
            if follows and layers[after].norms[0].eps == layers[before].norms[0].eps:
                layers[before].after = layers[after]
    expected = sample_logits(plain, OwnTokens, sample)
    plain.layers = layers
    try:
        if not agree(sample_logits(plain, partial(_LayerTokens, specs=hosted.specs), sample), expected):
            return {}
    except (GraphRTError, RuntimeError):
        return {}
    for layer in layers.values():
        for products in layer.products:
            if len(products.layers) > 1:
                products.join()
    hosted.layers = layers
    return {names[module]: "decoder_layer" for module in layers}


def _follows(model: torch.nn.Module, before: str, after: str) -> bool:
    """Return whether two layers are adjacent in a list that only code of transformers calls. Other code could change
    the result of the first layer in place before it calls the second."""
    path, _, index = before.rpartition(".")
    owners = [model, *(model.get_submodule(".".join(path.split(".")[:end])) for end in range(1, path.count(".") + 2))]
    follows = index.isdigit() and after == f"{path}.{int(index) + 1}"
    return follows and all(map(runs_library_code, owners))


def _layer(hosted: HostedModel, module: torch.nn.Module, attention: torch.nn.Module) -> FusedLayer | None:
    """Return the operators for a layer, if all its modules are known."""
    called = {forward: order for order, forward in enumerate(hosted.fused.values())}

    def of(parent: torch.nn.Module, kind: type[_Kind]) -> list[_Kind]:
        found = (hosted.fused.get(child) for child in parent.children())
        return sorted((forward for forward in found if isinstance(forward, kind)), key=called.__getitem__)

    norms, mlps, heads, parts = of(module, Norm), of(module, GatedMLP), of(attention, Norm), of(attention, Part)
    products = list(dict.fromkeys(part.products for part in parts))
    unknown = [child for child in module.children() if not isinstance(child, torch.nn.Dropout)][4:]
    unknown += list(attention.children())[len(parts) + len(heads) :]
    own = [*module.parameters(recurse=False), *attention.parameters(recurse=False), *module.buffers()]
    if unknown or own or (len(norms), len(mlps), len(products)) != (2, 1, 2) or len(heads) not in (0, 2):
        return None
    rotaries = {dtype: rotary for (at, dtype), rotary in hosted.rotaries.items() if at is attention}
    spec = hosted.specs[hosted.attention_modules.index(attention)]
    if spec.sinks or spec.kv_shared_with is not None or len({norm.eps for norm in (*norms, *heads)}) > 1:
        return None
    if (heads and None in rotaries.values()) or not all(map(is_plain, module.modules())):
        return None
    down = Products([mlps[0].down], hosted.group if sharded_dim(mlps[0].down.weight) == 1 else None)
    every = [*products, mlps[0].first, down]
    if [of.group for of in every] != [None, down.group, None, down.group]:
        return None
    return FusedLayer(norms, heads, [Products(of.layers, of.group) for of in every], rotaries, spec)


def _equal(
    plain: HostedModel,
    layers: dict[torch.nn.Module, FusedLayer],
    trial: Trial,
    sample: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> dict[torch.nn.Module, FusedLayer]:
    """Return the layers whose operators give the same result in a trial as the modules."""
    unequal = set[torch.nn.Module]()

    def check(module: torch.nn.Module, _: Any, expected: Any) -> None:
        layer = layers[module]
        try:
            if trial.same(layer.run(_LayerTokens(sample[1], [layer.spec]), trial.x), expected):
                return
        except (GraphRTError, RuntimeError, KeyError):  # KeyError: no table of the rotation in this dtype
            pass
        unequal.add(module)

    hooks = [module.register_forward_pre_hook(lambda _, args: (trial.x.clone(), *args[1:])) for module in layers]
    hooks += [module.register_forward_hook(check) for module in layers]
    try:
        with replaced_by_layer(plain.model, trial.replace):
            plain.run(OwnTokens(sample[1]), *sample)
    except (GraphRTError, RuntimeError, TypeError):  # layers with a different kind of input
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return {module: layer for module, layer in layers.items() if module not in unequal}


class _LayerTokens(RotatedTokens):
    """Attention as in RotatedTokens, for models with replaced layers."""

    def __init__(self, positions: torch.Tensor, specs: Sequence[AttentionSpec]) -> None:
        super().__init__(positions, {})
        self._specs, self._layer = specs, 0

    def attend(self, call: LayerCall) -> torch.Tensor:
        self._layer += 1
        return super().attend(call)

    def next_layer(self) -> tuple[_OwnStep, int]:
        self._layer += 1
        return _OwnStep(self.positions, self._specs[self._layer - 1]), self._layer - 1


class _OwnStep:
    """A step of one layer, with attention as in OwnTokens."""

    def __init__(self, positions: torch.Tensor, spec: AttentionSpec) -> None:
        self._positions, self._spec = positions, spec

    def linear_rope_write(self, index: int, x: Normed, weight: Any, **options: Any) -> torch.Tensor:
        spec, tokens = self._spec, len(self._positions)
        sizes = [(-(-tokens // _PAGE), _PAGE, spec.num_kv_heads, size) for size in (spec.head_dim, spec.value_dim)]
        k_cache, v_cache = (x.x.new_empty(size) for size in sizes)
        slots = torch.arange(tokens, device=x.x.device)
        q = linear_rope_write(x, weight, k_cache, v_cache, slots, self._positions, **options)
        self._k, self._v = (cache.flatten(0, 1)[:tokens] for cache in (k_cache, v_cache))
        return q

    def attend(self, index: int, q: torch.Tensor) -> torch.Tensor:
        call = LayerCall(torch.nn.Identity(), q, self._k, self._v, None, {})
        return OwnTokens(self._positions).attend(call)
