"""The attention layer for modules that do not take a Step. It maps query, key and value to the output.

The operator finds its layer by a number that is unique in the process. While a step runs, its manager binds the step to
the layers of the model. There is no other global state.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from graphrt.kernels.cache.write import Rotary
from graphrt.kernels.checks import check_instance, check_sequence, check_tensor, shown
from graphrt.kernels.errors import CaptureError, ConfigError, ReplayError, ShapeError, UnsupportedError
from graphrt.kernels.library import define_composite
from graphrt.spec import AttentionKind, AttentionSpec
from graphrt.step import Step


class _Holder:
    """The running step and the index of one layer, for its operator. `lock` is held while a step is bound."""

    __slots__ = ("__weakref__", "binding", "lock", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.binding: tuple[Step, int] | None = None
        self.lock = threading.Lock()


_numbers = itertools.count()
_holders: WeakValueDictionary[int, _Holder] = WeakValueDictionary()


def _run(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    layer: int,
    rotary: Rotary | None = None,
) -> None:
    holder = _holders.get(layer)
    if holder is None:
        raise CaptureError(f"Attention: layer {layer} was garbage-collected; keep a reference to the model")
    binding = holder.binding
    if binding is None:
        raise CaptureError(
            f"Attention {holder.name!r}: called outside of a step, where it has no KV cache; pass the model to a "
            "Runtime or ReplayManager, then call capture() and replay(batch)"
        )
    step, index = binding
    try:
        step.attend(index, query, key, value, rotary=rotary, sinks=sinks, out=output)
    except (ShapeError, UnsupportedError) as error:
        raise type(error)(f"Attention {holder.name!r}: {error}") from error


def _run_rotary(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_eps: float,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    layer: int,
) -> None:
    _run(query, key, value, sinks, output, layer, Rotary(cos_sin, q_norm, k_norm, norm_eps))


# SymInt, not int, because with a dynamic number, blocks that are compiled separately share one compilation.
_attention_layer = define_composite(
    "attention_layer(Tensor query, Tensor? key, Tensor? value, Tensor? sinks, Tensor(a!) output, SymInt layer) -> ()",
    _run,
)
_rotary_attention_layer = define_composite(
    "rotary_attention_layer(Tensor(a!) query, Tensor? key, Tensor? value, Tensor cos_sin, Tensor? q_norm, "
    "Tensor? k_norm, float norm_eps, Tensor? sinks, Tensor(b!) output, SymInt layer) -> ()",
    _run_rotary,
)


class Attention(torch.nn.Module):
    """Causal attention over the paged KV cache of the Runtime or ReplayManager that runs the model.

    num_q_heads, head_dim, num_kv_heads   numbers of heads, and head size; num_kv_heads None: num_q_heads
    name            name of the layer in errors and for `kv_shared_with`; unique in the model
    scale           softmax scale; None: head_dim ** -0.5
    sinks           [num_q_heads], a logit per query head. A Parameter is registered as `<layer>.sinks`. A plain tensor
                    becomes a buffer that is not in the state_dict
    kind            AttentionKind.CROSS reads encoder outputs in the cache, and takes no key and value.
                    AttentionKind.ENCODER has no cache; tokens of a request attend to each other in both directions
    kv_shared_with  name of an earlier layer whose keys and values this layer reads; it then takes no key and value
    dtype           dtype of queries, keys, values and output; None: torch's default dtype. `module.to(dtype)` changes
                    it
    For the other arguments see AttentionSpec; `alibi_slopes` may also be a list or a tensor.

    A layer has no weights except sinks, and owns no cache, so several managers can use one model. Call a layer that
    writes keys and values once per step; call other layers, such as encoder layers, any number of times.

    Capture-safe. torch.compile treats a call as one operator, `graphrt::attention_layer`.

    Raises:
        ConfigError: if a value is wrong; see AttentionSpec.
        ShapeError: if `sinks` has the wrong shape.
    """

    sinks: torch.Tensor | None

    def __init__(
        self,
        num_q_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        name: str,
        scale: float | None = None,
        sliding_window: int | None = None,
        attention_chunk_size: int | None = None,
        logits_softcap: float | None = None,
        v_head_dim: int | None = None,
        alibi_slopes: Sequence[float] | torch.Tensor | None = None,
        alibi_sqrt: bool = False,
        sinks: torch.Tensor | None = None,
        kv_shared_with: str | None = None,
        kind: AttentionKind = AttentionKind.DECODER,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.name = _checked_name("Attention.name", name)
        if kv_shared_with is not None:
            _checked_name("Attention.kv_shared_with", kv_shared_with)
        if isinstance(alibi_slopes, torch.Tensor):
            alibi_slopes = alibi_slopes.tolist()
        if alibi_slopes is not None:
            alibi_slopes = tuple(check_sequence("Attention.alibi_slopes", alibi_slopes, of="slopes", error=ConfigError))
        self._spec = AttentionSpec(
            num_q_heads=num_q_heads,
            num_kv_heads=num_q_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            dtype=torch.get_default_dtype() if dtype is None else dtype,
            softmax_scale=scale,
            sliding_window=sliding_window,
            logits_softcap=logits_softcap,
            alibi_slopes=alibi_slopes,
            alibi_sqrt=alibi_sqrt,
            sinks=sinks is not None,
            attention_chunk_size=attention_chunk_size,
            v_head_dim=v_head_dim,
            kind=kind,
        )
        if kv_shared_with is not None and not self._spec.is_cached:
            raise ConfigError(
                f"Attention.kv_shared_with: expected None in {kind.value} attention, got {kv_shared_with!r}; omit "
                f"it, because the layer has no cache"
            )
        self.kv_shared_with = kv_shared_with
        self._dtype = self._spec.dtype
        self.num_q_heads, self.num_kv_heads = self._spec.num_q_heads, self._spec.num_kv_heads
        self.head_dim, self.value_dim = self._spec.head_dim, self._spec.value_dim
        if sinks is not None:
            check_tensor("sinks", sinks, shape=(self.num_q_heads,))
        if isinstance(sinks, torch.nn.Parameter):
            self.sinks = sinks
        else:
            self.register_buffer("sinks", sinks, persistent=False)
        self._register()

    @property
    def spec(self) -> AttentionSpec:
        """The layer's spec with its current dtype. `kv_shared_with` is None here; `attention_specs` fills it in.

        Raises: ConfigError: if attention does not support the dtype that the module was converted to.
        """
        return replace(self._spec, dtype=self._dtype)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        *,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        """Write keys and values of this step to the cache, and attend to all cached tokens, causally.

        query   [tokens, num_q_heads, head_dim]     or [tokens, num_q_heads * head_dim]; rotated in place if `rotary` is
                                                    given
        key     [tokens, num_kv_heads, head_dim]    or flat, like query; None with kv_shared_with and in a cross layer
        value   [tokens, num_kv_heads, v_head_dim]  or flat; None if key is None
        rotary  norm and rotary embedding to apply to query and key, or None

        Tensors have the layer's dtype, the cache's device and a last stride of 1. Returns
        [tokens, num_q_heads, v_head_dim], flat if query is flat, with zeros in padding tokens. Capture-safe. For cross
        and encoder layers, see `AttentionKind`.

        Raises:
            ShapeError: if a tensor does not match the layer or the step.
            CaptureError: if called outside of a step.
            UnsupportedError: if a layer that writes keys and values is called twice in one step, or a layer with
                kv_shared_with is called before its source.
        """
        q = self._heads("query", query, self.num_q_heads, self.head_dim)
        k = None if key is None else self._heads("key", key, self.num_kv_heads, self.head_dim)
        v = None if value is None else self._heads("value", value, self.num_kv_heads, self.value_dim)
        sinks = None if self.sinks is None else self.sinks.to(torch.float32)
        output = query.new_empty((q.shape[0], self.num_q_heads, self.value_dim))
        if rotary is None:
            _attention_layer(q, k, v, sinks, output, self._number)
        else:
            check_instance("rotary", rotary, Rotary, advice="pass Rotary(...)", error=ShapeError)
            _rotary_attention_layer(
                q, k, v, rotary.cos_sin, rotary.q_norm, rotary.k_norm, rotary.norm_eps, sinks, output, self._number
            )
        return output.flatten(1) if query.dim() == 2 else output

    def extra_repr(self) -> str:
        """Return the layer's arguments, for the printed model."""
        shared = "" if self.kv_shared_with is None else f", kv_shared_with={self.kv_shared_with!r}"
        kind = "" if self._spec.kind is AttentionKind.DECODER else f", kind={self._spec.kind.value}"
        return f"{self.num_q_heads}, {self.head_dim}, {self.num_kv_heads}, name={self.name!r}{shared}{kind}"

    def _heads(self, name: str, tensor: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
        """Return the tensor as [tokens, heads, dim]."""
        if not isinstance(tensor, torch.Tensor):
            raise ShapeError(
                f"Attention {self.name!r}: expected a tensor as {name}, got {shown(tensor)}; pass a tensor"
            )
        if tensor.dim() == 2 and tensor.shape[1] == heads * dim:
            return tensor.view(-1, heads, dim)
        if tensor.dim() == 3 and tensor.shape[1] == heads and tensor.shape[2] == dim:
            return tensor
        raise ShapeError(
            f"Attention {self.name!r}: expected {name} of shape [tokens, {heads}, {dim}] or [tokens, {heads * dim}], "
            f"got {list(tensor.shape)}; pass packed tokens without a batch dimension"
        )

    def _register(self) -> None:
        self._holder = _Holder(self.name)
        self._number = next(_numbers)
        _holders[self._number] = self._holder

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Attention:
        """Convert all tensors, for `to()`, `half()` and similar calls, and update the layer's dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device="cpu")).dtype
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_holder", "_number")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give a copied or unpickled layer its own number."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._register()


def attention_specs(model: torch.nn.Module) -> tuple[AttentionSpec, ...]:
    """Return the spec of every `Attention` layer of a model, in the order of `model.modules()`.

    Raises: ConfigError: if `model` is not a module or has no such layer, if two layers have the same name, or if
    kv_shared_with does not name an earlier layer.
    """
    check_instance("model", model, torch.nn.Module, advice="pass attention= for other models")
    specs = ModelLayers(model).specs
    if not specs:
        raise ConfigError(
            f"model: {type(model).__name__} has no graphrt.Attention layers; use them in the model, or pass attention="
        )
    return specs


class ModelLayers:
    """The `Attention` layers of a model in the order of `model.modules()`; empty if the model is not a module.

    specs   spec of each layer, with kv_shared_with as an index

    Raises: ConfigError: if two layers have the same name, or kv_shared_with does not name an earlier layer.
    """

    def __init__(self, model: object) -> None:
        found: dict[str, tuple[int, str, Attention]] = {}
        if isinstance(model, torch.nn.Module):
            for path, module in model.named_modules():
                if not isinstance(module, Attention):
                    continue
                _, other, first = found.setdefault(module.name, (len(found), path, module))
                if first is not module:
                    raise ConfigError(
                        f"Attention.name: {module.name!r} is the name of {other} and of {path}; rename one"
                    )
        self._layers = tuple(layer for _, _, layer in found.values())
        specs = []
        for index, layer in enumerate(self._layers):
            spec, name = layer.spec, layer.kv_shared_with
            if name is not None:
                source = found[name][0] if name in found else index
                if source >= index:
                    earlier = ", ".join(repr(x.name) for x in self._layers[:index]) or "none"
                    raise ConfigError(
                        f"Attention {layer.name!r}: expected kv_shared_with to name an earlier layer ({earlier}), got "
                        f"{name!r}; layers are in the order of model.modules()"
                    )
                spec = replace(spec, kv_shared_with=source)
            specs.append(spec)
        self.specs = tuple(specs)

    @contextmanager
    def bound_to(self, step: Step) -> Iterator[None]:
        """Bind a step to the layers while it runs.

        Raises: ReplayError: if another thread or an enclosing call has bound another step to a layer.
        """
        with ExitStack() as stack:
            for index, layer in enumerate(self._layers):
                holder = layer._holder
                if not holder.lock.acquire(blocking=False):
                    raise ReplayError(
                        f"Attention {holder.name!r}: a step of another manager is running in it; run one step at a time"
                    )
                stack.callback(_unbind, holder)
                holder.binding = step, index
            yield

    def resolve(self, attention: object, cache_layers: int | None) -> tuple[AttentionSpec, ...]:
        """Return the spec of every layer.

        attention       a spec per layer, one spec for all layers, or None for the model's own layers
        cache_layers    number of cache layers, if one spec is given; None if there is no cache yet

        Raises: ConfigError: if there are no specs, an item is not a spec, or specs differ from the model's layers.
        """
        if attention is None:
            if not self.specs:
                raise ConfigError(
                    "attention: required, because the model has no graphrt.Attention layers; pass one spec per "
                    "layer, or "
                    "use graphrt.Attention, with as_step_model() for a module that does not take a Step"
                )
            return self.specs
        specs: tuple[AttentionSpec, ...]
        if isinstance(attention, AttentionSpec):
            if cache_layers is None:
                raise ConfigError(
                    "kv_spec: required with one spec for all layers; pass the spec of the cache as kv_spec, or a list "
                    "with one AttentionSpec per layer"
                )
            if not (attention.is_cached and cache_layers):
                raise ConfigError("attention: one spec for all layers needs a cache with layers; pass a spec per layer")
            specs = (attention,) * cache_layers
        else:
            specs = tuple(check_sequence("attention", attention, of="AttentionSpec per layer", error=ConfigError))
            for index, spec in enumerate(specs):
                advice = "pass one spec per layer, or one spec for all layers"
                check_instance(f"attention[{index}]", spec, AttentionSpec, advice=advice)
            if not specs:
                raise ConfigError("attention: expected at least 1 AttentionSpec, got none; pass one spec per layer")
        if self.specs and self.specs != specs:
            raise ConfigError(
                f"attention: differs from the specs of the model's {len(self.specs)} graphrt.Attention layers; "
                "omit attention"
            )
        return specs


def _unbind(holder: _Holder) -> None:
    holder.binding = None
    holder.lock.release()


def _checked_name(where: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: expected a non-empty str, got {shown(name)}; pass a name like 'blocks.0.attn'")
    return name
