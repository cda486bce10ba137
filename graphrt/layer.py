"""The attention layer for modules that know nothing of steps: query, key and value in, output out.

A layer is found by a number that no other layer of the process has. While a step runs, and no longer, its manager binds
the step to the layers of its model. There is no current step beside that.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from graphrt.kernels.cache.write import Rotary
from graphrt.kernels.checks import check_instance, check_sequence, check_tensor, shown
from graphrt.kernels.errors import CaptureError, ConfigError, ReplayError, ShapeError, UnsupportedError
from graphrt.kernels.library import define_composite
from graphrt.spec import AttentionKind, AttentionSpec
from graphrt.step import Step


@dataclass(slots=True)
class _Binding:
    """A step that runs, as one layer sees it. `source` is that of the layer whose keys and values it reads."""

    step: Step
    index: int
    source: _Binding | None
    called: bool = False


class _Slot:
    """Where a layer's operator looks for the step."""

    __slots__ = ("__weakref__", "binding", "name", "taken")

    def __init__(self, name: str) -> None:
        self.name = name
        self.binding: _Binding | None = None
        self.taken = threading.Lock()


_numbers = itertools.count()
_slots: WeakValueDictionary[int, _Slot] = WeakValueDictionary()


def _run(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    layer: int,
    rotary: Rotary | None = None,
) -> None:
    slot = _slots.get(layer)
    if slot is None:
        raise CaptureError(f"Attention: expected a layer that lives, got number {layer}, which is gone; keep the model")
    binding = slot.binding
    if binding is None:
        raise CaptureError(
            f"Attention {slot.name!r}: expected a call inside a step, got one outside; it needs the KV cache of a "
            "Runtime or ReplayManager: hand it the model, then capture() and replay(batch)"
        )
    _check_called(slot, binding)
    binding.step.attend(binding.index, query, key, value, rotary=rotary, sinks=sinks, out=output)
    binding.called = True


def _check_called(slot: _Slot, binding: _Binding) -> None:
    """What `Step.attend` would refuse too, with the layer's name."""
    if binding.called and binding.step.layers[binding.index].writes:
        raise UnsupportedError(
            f"Attention {slot.name!r}: expected one call per step, got a second; its cache holds the keys and values "
            "of one, make a layer for each"
        )
    if binding.source is not None and not binding.source.called:
        raise UnsupportedError(
            f"Attention {slot.name!r}: expected a call after the layer whose keys and values it reads, got one before; "
            "call that one first"
        )


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


# SymInt, not int: with a dynamic number, blocks that are compiled one by one share their compilation.
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
    """Attention in the steps of the Runtime or ReplayManager that runs the model: causal, over its paged KV cache; or
    what `kind` says.

    num_q_heads, head_dim   of the queries; `num_kv_heads` None means as many
    name            unique in the model, by which errors and `kv_shared_with` name the layer
    scale           of the softmax; None means head_dim ** -0.5
    sinks           [num_q_heads], a logit per query head. A Parameter becomes the layer's own, `<layer>.sinks` in a
                    state_dict; a plain tensor moves with the module, and is in no state_dict
    kind            AttentionKind.CROSS reads what an encoder wrote to the cache, and takes no key and value.
                    AttentionKind.ENCODER has no cache: tokens of a row see each other, before and behind
    kv_shared_with  name of an earlier layer whose keys and values this one reads; it takes no key and value then
    dtype           of queries, keys, values and output; None is torch's default dtype. `module.to(dtype)` changes it,
                    as it does that of a weight
    Others as in AttentionSpec; `alibi_slopes` may be a list or a tensor, too.

    A layer has no weights but sinks, and no cache: one model may serve several managers. It is called once per step;
    one that writes no keys and values, as an encoder layer, as often as the model likes.
    Capture-safe, and one operator to torch.compile, `graphrt::attention_layer`.

    Raises: ConfigError for values that no layer has, ShapeError for sinks of another shape.
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
                f"Attention.kv_shared_with: expected None in {kind.value} attention, got {kv_shared_with!r}; leave it "
                "out"
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
        """The layer's spec in its dtype of now. `kv_shared_with` is a number there, which only `attention_specs` knows.

        Raises: ConfigError for a dtype that no layer computes in.
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
        """Write keys and values of this step's tokens to the cache and attend to all that is cached so far, causally.
        Layers of another kind do as `kind` says.

        query   [tokens, num_q_heads, head_dim]     or [tokens, num_q_heads * head_dim]; rotated in place if `rotary` is
                                                    given
        key     [tokens, num_kv_heads, head_dim]    or flat, as the query may be; None with kv_shared_with, and in a
                                                    cross layer
        value   [tokens, num_kv_heads, v_head_dim]  or flat; None where key is
        returns [tokens, num_q_heads, v_head_dim]   flat where the query is; zeros in pad tokens

        All in the layer's dtype on the device of the cache; their last dimension has stride 1. Capture-safe.

        Raises: ShapeError for tensors that do not fit the layer or the step, CaptureError outside of a step,
        UnsupportedError for a second call in one step of a layer that writes keys and values.
        """
        q = self._heads("query", query, self.num_q_heads, self.head_dim)
        takes_kv = self.kv_shared_with is None and not self._spec.is_cross
        if (key is not None) != takes_kv or (value is not None) != takes_kv:
            owner = "the encoder" if self.kv_shared_with is None else repr(self.kv_shared_with)
            want = "both key and value" if takes_kv else f"those of {owner} alone"
            got = " and ".join("None" if x is None else "a tensor" for x in (key, value))
            raise ShapeError(
                f"Attention {self.name!r}: expected {want}, got {got}; cross layers and those with kv_shared_with take "
                "None for both"
            )
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
        """The layer's line where torch prints the model."""
        shared = "" if self.kv_shared_with is None else f", kv_shared_with={self.kv_shared_with!r}"
        kind = "" if self._spec.kind is AttentionKind.DECODER else f", kind={self._spec.kind.value}"
        return f"{self.num_q_heads}, {self.head_dim}, {self.num_kv_heads}, name={self.name!r}{shared}{kind}"

    def _heads(self, name: str, tensor: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
        """The tensor as [tokens, heads, dim]."""
        if not isinstance(tensor, torch.Tensor):
            raise ShapeError(f"Attention {self.name!r}: expected {name} as a tensor, got {shown(tensor)}; pass one")
        if tensor.dim() == 2 and tensor.shape[1] == heads * dim:
            return tensor.view(-1, heads, dim)
        if tensor.dim() == 3 and tensor.shape[1] == heads and tensor.shape[2] == dim:
            return tensor
        raise ShapeError(
            f"Attention {self.name!r}: expected {name} of shape [tokens, {heads}, {dim}] or [tokens, {heads * dim}], "
            f"got {list(tensor.shape)}; a step has no batch dimension, its tokens are packed"
        )

    def _register(self) -> None:
        self._slot = _Slot(self.name)
        self._number = next(_numbers)
        _slots[self._number] = self._slot

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Attention:
        """What `to()`, `half()` and alike call, on all tensors: the layer's dtype follows."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device="cpu")).dtype
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_slot", "_number")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or a layer that was loaded, is another layer."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._register()


def attention_specs(model: torch.nn.Module) -> tuple[AttentionSpec, ...]:
    """The spec of every `Attention` layer of a model, in the order of `model.modules()`.

    Raises: ConfigError for what is no module or has no such layer, for two layers of one name, and for a name in
    kv_shared_with that no earlier layer has.
    """
    check_instance("model", model, torch.nn.Module, advice="other models say attention=")
    specs = ModelLayers(model).specs
    if not specs:
        raise ConfigError(
            f"model: expected graphrt.Attention layers, got none in {type(model).__name__}; make its layers of them, "
            "or pass attention="
        )
    return specs


class ModelLayers:
    """The `Attention` layers of a model, numbered in the order of `model.modules()`; none where it is no module.

    specs   theirs, with the layers that they share KV with by number

    Raises: ConfigError, as `attention_specs`.
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
                        f"Attention.name: expected names that differ in a model, got {module.name!r} at {other} and at "
                        f"{path}; name each layer after its place"
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
        """Binds a step to the layers while it runs.

        Raises: ReplayError where another step runs in one of them, in another thread or around this one.
        """
        bindings: list[_Binding] = []
        with ExitStack() as stack:
            for layer, spec in zip(self._layers, self.specs, strict=True):
                slot = layer._slot
                if not slot.taken.acquire(blocking=False):
                    raise ReplayError(
                        f"Attention {slot.name!r}: expected no step that runs in it, got one of another manager; a "
                        "model serves several managers one after the other"
                    )
                stack.callback(_release, slot)
                source = None if spec.kv_shared_with is None else bindings[spec.kv_shared_with]
                slot.binding = _Binding(step, len(bindings), source)
                bindings.append(slot.binding)
            yield

    def resolve(self, attention: object, cache_layers: int | None) -> tuple[AttentionSpec, ...]:
        """The spec of every layer: those given, or those of the model's layers with None.

        cache_layers    of the cache, for one spec that stands for all of them; None where there is no cache yet

        Raises: ConfigError for what is no spec, where there are none, and where given ones are not those of the layers.
        """
        if attention is None:
            if not self.specs:
                raise ConfigError(
                    "attention: expected specs, or a model with graphrt.Attention layers, got neither; pass one spec "
                    "per layer, and wrap a module that takes no Step by as_step_model()"
                )
            return self.specs
        specs: tuple[AttentionSpec, ...]
        if isinstance(attention, AttentionSpec):
            if cache_layers is None:
                raise ConfigError("kv_spec: expected that of the cache with one spec for all layers, got None; pass it")
            if not (attention.is_cached and cache_layers):
                raise ConfigError(
                    "attention: expected one spec per layer, got one for all, and a cache that counts no such layer; "
                    "pass a list"
                )
            specs = (attention,) * cache_layers
        else:
            specs = tuple(check_sequence("attention", attention, of="AttentionSpec per layer", error=ConfigError))
            for index, spec in enumerate(specs):
                advice = "pass one spec per layer, or one for all"
                check_instance(f"attention[{index}]", spec, AttentionSpec, advice=advice)
        if self.specs and self.specs != specs:
            pairs = enumerate(zip(self.specs, specs, strict=False))
            at = next((index for index, (own, given) in pairs if own != given), min(len(self.specs), len(specs)))
            raise ConfigError(
                f"attention: expected the specs of the model's {len(self.specs)} graphrt.Attention layers, got "
                f"{len(specs)} that differ from layer {at} on; leave attention out"
            )
        return specs


def _release(slot: _Slot) -> None:
    slot.binding = None
    slot.taken.release()


def _checked_name(where: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: expected a text, got {shown(name)}; pass a layer's name, as 'blocks.0.attention'")
    return name
