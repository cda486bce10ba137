"""The attention backend of a model on a device: chosen, remembered and explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from graphrt.backends import registry
from graphrt.backends.base import AttentionBackend, BackendContext
from graphrt.backends.two_parts import TwoPartBackend, decode_context
from graphrt.cache.groups import check_encoder_len, layer_places
from graphrt.cache.kv_cache import check_groups
from graphrt.config import RuntimeConfig
from graphrt.kernels.checks import check_device, check_instance, check_sequence
from graphrt.kernels.errors import ConfigError
from graphrt.spec import AttentionSpec, KVCacheSpec


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend, and why it was chosen.

    backend   the class
    reason    a line: why it, and why not those that would have come before it
    context   what it is chosen for
    prefill   the class that serves the prompts of mixed steps; None: `backend` serves whole steps
    """

    backend: type[AttentionBackend]
    reason: str
    context: BackendContext
    prefill: type[AttentionBackend] | None = None

    @property
    def name(self) -> str:
        """What the backend is chosen by in RuntimeConfig; with a "+" between those of two parts."""
        return self.backend.name + ("" if self.prefill is None else f"+{self.prefill.name}")

    def make(self) -> AttentionBackend:
        """An instance, for one runtime."""
        if self.prefill is None:
            return self.backend(self.context)
        return TwoPartBackend(self.context, self.backend, self.prefill)


def get_attn_backend(
    attention: Sequence[AttentionSpec],
    kv_groups: KVCacheSpec | Sequence[KVCacheSpec],
    device: torch.device | str,
    *,
    config: RuntimeConfig | None = None,
) -> BackendChoice:
    """The backend that a runtime of these layers takes: runtimes ask this function.

    attention   the spec of every layer, as `attention_specs` gives them
    kv_groups   spec of the cache, or those of its KV groups, as `kv_groups()` makes them
    config      capacities and choices, the backend's name among them; None is RuntimeConfig()

    Equal questions are answered once: the answer stays until a backend is registered.

    Raises: ConfigError for arguments of wrong types or that do not fit each other, and for an unknown name;
    UnsupportedError, with every reason, where no backend serves.
    """
    config = RuntimeConfig() if config is None else config
    config = check_instance("config", config, RuntimeConfig, advice="pass a RuntimeConfig").resolve()
    specs = tuple(check_sequence("attention", attention, of="AttentionSpec per layer", error=ConfigError))
    for index, spec in enumerate(specs):
        check_instance(f"attention[{index}]", spec, AttentionSpec, advice="pass one spec per layer")
    groups = check_groups(kv_groups)
    places = layer_places(specs, groups)
    context = BackendContext(
        attention=specs,
        kv_groups=groups,
        group_of=tuple(None if place is None else place.group for place in places),
        device=check_device("device", device),
        max_num_reqs=config.max_num_reqs,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=config.max_seq_len,
        max_encoder_len=check_encoder_len(groups, config.max_encoder_len),
        max_query_len=config.query_len,
        batch_invariant=config.batch_invariant,
        mixed_batches=config.mixed_batches,
    )
    return _chosen(context, config.backend, config.prefill_backend, tuple(registry.registered().items()))


@lru_cache(maxsize=64)
def _chosen(
    context: BackendContext,
    name: str | None,
    prefill: str | None,
    registered: tuple[tuple[str, type[AttentionBackend]], ...],
) -> BackendChoice:
    """As the registry selects; `registered` is here for the answer to be another one when it changes."""
    named = prefill not in (None, registry.ONE_PART)
    backend, reason = registry.select_backend(decode_context(context) if named else context, name)
    of_prompts, why = registry.select_prefill(context, backend, prefill)
    return BackendChoice(backend, f"{reason}; prompts: {why}" if why else reason, context, of_prompts)
