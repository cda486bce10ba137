"""Learns the attention layers of a decoder by one run on the meta device, and finds what a graph cannot contain."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphrt.capture.host_reads import reads_host, tensors_in
from graphrt.integrations.transformers.float32 import replaced_tensors
from graphrt.integrations.transformers.host import RECORDING, HostedModel, LayerCall, package
from graphrt.integrations.transformers.masks import Reach, reach_of
from graphrt.integrations.transformers.rotary import RotaryTable, is_rotary, long_boundary, rope_types
from graphrt.kernels.errors import ConfigError, GraphRTError, UnsupportedError
from graphrt.spec import AttentionSpec

_TOKENS = (1031, 251, 61, 47, 31, 23, 19, 13, 7, 1)
"""Numbers of tokens of the run on the meta device: primes, so that a result with this size twice is attention."""
_OURS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "<")
_HANDLED = frozenset({"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal"})
_UNUSED = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "layer_type"}
)
"""Options of attention calls: those that the specs contain, and those that no attention function reads."""
_KEEP = "keep the tensor in a buffer of the module (register_buffer)"
_STAY = "compute with tensors on the device, such as torch.where"


class _BlockedError(Exception):
    """Something that a graph cannot contain, in the forward of `module`."""

    def __init__(self, text: str, module: torch.nn.Module | None) -> None:
        super().__init__(text)
        self.module = module


def discover(hosted: HostedModel, max_seq_len: int) -> int:
    """Set the specs and the tables of a hosted model, and return its vocabulary size.

    Runs the model on the meta device, without its weights. The model is unchanged afterwards, even after an error.

    Raises: UnsupportedError: if a graph cannot contain the model, with the file and line.
    """
    model, device = hosted.model, device_of(hosted.model)
    for module in model.modules():
        if is_rotary(module):
            if "dynamic" in rope_types(module):
                raise refuse(
                    model, f"rope_type 'dynamic' at {place(type(module).forward)}: keys that are cached already depend "
                    "on the length of the sequence; use another rope_type"
                )  # fmt: skip
            if (boundary := long_boundary(module)) is not None:
                hosted.tables[module] = RotaryTable(module, max_seq_len, boundary, device)
    while (found := _try_run(hosted, max_seq_len, device)) is None:
        pass
    recorder, watch, vocab_size = found
    if not recorder.layers:
        where = f"attention is computed at {watch.mixing}" if watch.mixing else f"see {place(type(model).forward)}"
        raise refuse(
            model, f"no layer calls the attention function of AttentionInterface; {where}. Change the attention module "
            "to call it, as docs/hosts.md shows"
        )  # fmt: skip
    hosted.specs, hosted.attention_modules = recorder.specs(model), recorder.modules
    return vocab_size


def _try_run(hosted: HostedModel, max_seq_len: int, device: torch.device) -> tuple[_Recorder, _Watch, int] | None:
    """Run the model on the meta device once. Return what was found, or None after a change that may help."""
    model = hosted.model
    tokens = next(count for count in _TOKENS if count <= max_seq_len)
    recorder, watch = _Recorder(tokens, max_seq_len), _Watch(tokens)
    try:
        modules = [module for module in model.modules() if module not in hosted.tables]
        empty = partial(_without_memory, device=device)
        with replaced_tensors(modules, empty), torch.no_grad(), _Constants(), watch:
            ids = torch.zeros(tokens, dtype=torch.int64, device="meta")
            logits = hosted.run(recorder, ids, ids.clone(), ids[:1].clone(), name=RECORDING)
        return recorder, watch, logits.shape[-1]
    except GraphRTError:
        raise
    except _BlockedError as error:
        module = error.module
        if module is not None and is_rotary(module) and module not in hosted.tables:
            hosted.tables[module] = RotaryTable(module, max_seq_len, long_boundary(module), device)
            return None
        if not hosted.places:
            raise refuse(model, str(error)) from None
    except Exception as error:
        if not hosted.places:
            what = f"values are read on the host ({error}); {_STAY}" if "meta tensor" in str(error) else f"{error}"
            if "fake impl" in what:
                what = f"{what.partition(': ')[0]} has no meta implementation; load the model without quantization"
            elif hosted.group is not None:
                what += (
                    f"; if the plan of transformers does not divide the heads by {hosted.group.size()} ranks, use a "
                    "divisor of the number of KV heads, or graphrt.load_model(group=)"
                )
            raise refuse(model, f"the run on the meta device failed at {_place_of_error(error)}: {what}") from error
    hosted.places = False  # the model may need a number as the length of the cache, not a tensor
    return None


def refuse(model: Any, text: str) -> UnsupportedError:
    return UnsupportedError(f"{type(model).__name__}: {text}")


def place(function: Any) -> str:
    """Return the file and line of a function."""
    code = inspect.unwrap(function).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


class _Recorder:
    """Records the attention layers of one run."""

    def __init__(self, tokens: int, max_seq_len: int) -> None:
        self.tokens, self._max_seq_len = tokens, max_seq_len
        self._masks: list[tuple[torch.Tensor, Callable[..., Any]]] = []
        self.layers: list[tuple[AttentionSpec, Callable[..., Any], int | None, str]] = []
        self._keys: list[tuple[Any, ...]] = []  # memory of K and V of each layer
        self._alive: list[torch.Tensor] = []
        self.modules: list[torch.nn.Module] = []

    def mask(self, predicate: Callable[..., Any]) -> torch.Tensor:
        with _disable_current_modes():
            marker = torch.empty(1, 1, self.tokens, self.tokens, dtype=torch.bool, device="meta")
        self._masks.append((marker, predicate))
        return marker

    def exceeds(self, length: int) -> torch.Tensor:
        return torch.zeros(self.tokens, dtype=torch.bool, device="meta")

    def attend(self, call: LayerCall) -> torch.Tensor:
        module, q, k, v, mask, options = call
        where = _place_of_frame()
        if getattr(module, "is_causal", True) is False or options.get("is_causal", True) is False:
            encoder = getattr(getattr(module, "config", None), "is_decoder", True) is False
            advice = "; set is_decoder=True in the config of the model" if encoder else ""
            raise _BlockedError(f"the layer at {where} is not causal{advice}", module)
        if not len(q) == len(k) == len(v) == self.tokens:
            raise _BlockedError(f"the layer at {where} attends to tokens that are not in its input", module)
        if options.get("dropout"):
            raise _BlockedError(f"the layer at {where} drops values at random; call model.eval()", module)
        given = {name for name, value in options.items() if value is not None and value is not False}
        if unknown := sorted(given - _HANDLED - _UNUSED):
            raise _BlockedError(
                f"the layer at {where} passes {', '.join(unknown)}, which graphrt does not support", module
            )
        predicate = next((p for marker, p in self._masks if mask is marker or _view_of(mask, marker)), None)
        if predicate is None:
            kind = "no mask" if mask is None else "a mask of its own"
            raise _BlockedError(f"the layer at {where} has {kind}, so graphrt cannot know which tokens it sees", module)
        source = next((i for i, key in enumerate(self._keys) if key == (_memory(k), _memory(v))), None)
        self._keys.append((_memory(k), _memory(v)))
        self._alive += (k, v)
        self.modules.append(module)
        spec = AttentionSpec(
            num_q_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[2],
            v_head_dim=v.shape[2],
            dtype=v.dtype,
            softmax_scale=options.get("scaling"),
            logits_softcap=options.get("softcap"),
            sinks=options.get("s_aux") is not None,
            kv_shared_with=source,
        )
        self.layers.append((spec, predicate, options.get("sliding_window"), where))
        return v.new_zeros(self.tokens, q.shape[1], v.shape[2])

    def specs(self, model: Any) -> list[AttentionSpec]:
        """Return the specs of the layers. Raises: UnsupportedError: if a layer sees anything other than a window or a
        chunk."""
        specs = []
        own = package().DynamicCache(config=model.config).layers
        for module, (spec, predicate, window, where) in zip(self.modules, self.layers, strict=True):
            reach = reach_of(predicate, self._max_seq_len)
            if reach is None:
                raise refuse(model, f"the layer at {where} is not causal, or sees neither a window nor a chunk")
            limited = None if window is None or window >= self._max_seq_len else window
            if limited not in (None, reach.sliding_window):
                raise refuse(
                    model,
                    f"the layer at {where} passes sliding_window={window}, but the window of its mask is "
                    f"{reach.sliding_window}",
                )
            kept = getattr(own[index], "sliding_window", None) if (index := _index(module)) < len(own) else None
            if reach == Reach() and kept is not None and kept < self._max_seq_len:
                raise refuse(
                    model, f"the layer at {where} sees all tokens, but the cache of transformers keeps only {kept}; "
                    f"correct the model's config, or pass RuntimeConfig(max_seq_len={kept})"
                )  # fmt: skip
            specs.append(
                replace(spec, sliding_window=reach.sliding_window, attention_chunk_size=reach.attention_chunk_size)
            )
        return specs


class _Watch(TorchDispatchMode):
    """Finds reads of values on the host, copies from the host, and tensors on another device.

    mixing  file and line of the first operation whose result has a row and a column per token; None: there is none
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._tokens = tokens
        self.mixing: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        meta = [t for t in tensors if t.is_meta]
        if not tensors and "device" in kwargs and _builds_mask():
            return func(*args, **(kwargs | {"device": torch.device("cpu")}))  # a mask function is evaluated later
        if meta and reads_host(func, args, kwargs):
            raise _blocked(f"{func} reads values on the host", _STAY)
        if meta and any(not t.is_meta and t.dim() for t in tensors):
            raise _blocked(f"{func} uses a tensor that is on the host, or on a different device than the model", _KEEP)
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        if meta and any(not t.is_meta for t in outputs):
            raise _blocked(f"{func} copies values to the host", _STAY)
        if func._schema.name in ("aten::_to_copy", "aten::copy_") and outputs[0].is_meta and not tensors[-1].is_meta:
            raise _blocked(f"{func} copies values from the host", _KEEP)
        if self.mixing is None and any(list(t.shape).count(self._tokens) > 1 < self._tokens for t in outputs):
            self.mixing = _place_of_frame()
        return result


class _Constants(TorchFunctionMode):
    """Finds constants that each step would copy from the host. The dispatcher does not see them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        index = args[1] if name == "__getitem__" else ()
        lists = any(isinstance(at, list) for at in (index if isinstance(index, tuple) else (index,)))
        made = name in ("tensor", "as_tensor", "new_tensor") and not isinstance(args[-1], torch.Tensor)
        if (lists or made) and result.is_meta:
            raise _blocked(f"{name} copies values from the host", _KEEP)
        return result


def _blocked(text: str, advice: str) -> _BlockedError:
    frame = _caller(_frame()) if _builds_mask() else _frame()
    return _BlockedError(f"{text} at {_text(frame)}; {advice}", _module(frame))


def _without_memory(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if value.device != device:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def device_of(model: Any) -> torch.device:
    """Return the device of the weights. Raises: ConfigError: if they are on several devices, or on the meta device."""
    devices: set[torch.device] = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1 or torch.device("meta") in devices:
        raise ConfigError(
            f"model: expected all weights in the memory of one device, got {sorted(map(str, devices))}; load it by "
            "from_pretrained, without offloading"
        )
    return devices.pop()


def _memory(x: torch.Tensor) -> tuple[Any, ...]:
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()


def _index(module: torch.nn.Module) -> int:
    """Return the index of a layer in the caches of transformers; one that is too large if the module has none."""
    index: Any = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else 1 << 30


def _view_of(mask: torch.Tensor | None, marker: torch.Tensor) -> bool:
    return mask is not None and mask._base is marker


def _frame() -> FrameType | None:
    """Return the innermost frame that is neither torch's nor graphrt's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of a method of a module."""
    while frame is not None and not isinstance(frame.f_locals.get("self"), torch.nn.Module):
        frame = frame.f_back
    return frame


def _module(frame: FrameType | None) -> torch.nn.Module | None:
    """Return the innermost module whose method a frame is in."""
    caller = _caller(frame)
    return None if caller is None else caller.f_locals["self"]


def _text(frame: FrameType | None) -> str:
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _place_of_frame() -> str:
    return _text(_frame())


def _place_of_error(error: BaseException) -> str:
    """Return the file and line of an error's innermost frame that is neither torch's nor graphrt's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"


def _builds_mask() -> bool:
    frame = _frame()
    return frame is not None and frame.f_globals.get("__name__") == "transformers.masking_utils"
