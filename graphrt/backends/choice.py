"""Selection of the attention backend for a model on a device, with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphrt.backends import registry
from graphrt.backends.base import AttentionBackend
from graphrt.backends.capabilities import BackendContext
from graphrt.backends.two_parts import TwoPartBackend, decode_context
from graphrt.cache.groups import check_encoder_len, kv_locations
from graphrt.cache.kv_cache import check_groups
from graphrt.config import RuntimeConfig
from graphrt.kernels.checks import check_device, check_instance, check_sequence
from graphrt.kernels.errors import ConfigError
from graphrt.spec import AttentionSpec, KVCacheSpec


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A selected backend.

    backend   the class
    reason    one line: why it was selected, and why each backend ranked before it was not
    context   the context that it was selected for
    prefill   the class that serves the prefill part of mixed steps; None: `backend` serves whole steps
    """

    backend: type[AttentionBackend]
    reason: str
    context: BackendContext
    prefill: type[AttentionBackend] | None = None

    @property
    def name(self) -> str:
        """Name of the backend, or "decode+prefill" if mixed steps have two parts."""
        return self.backend.name + ("" if self.prefill is None else f"+{self.prefill.name}")

    def make(self) -> AttentionBackend:
        """Return a new instance, for one runtime."""
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
    """Return the backend that a runtime with these layers uses. Runtimes call this function.

    attention   the spec of every layer, as `attention_specs` returns them
    kv_groups   spec of the cache, or of each of its KV groups, as `kv_groups()` returns them
    device      device of the cache
    config      capacities and options, including the name of the backend; None: RuntimeConfig()

    Raises:
        ConfigError: if an argument has the wrong type, if layers and groups do not match, or if a name is unknown.
        UnsupportedError: if no backend supports the layers; the message lists the reasons of each.
    """
    config = RuntimeConfig() if config is None else config
    config = check_instance("config", config, RuntimeConfig, advice="pass a RuntimeConfig").resolve()
    specs = tuple(check_sequence("attention", attention, of="AttentionSpec per layer", error=ConfigError))
    for index, spec in enumerate(specs):
        check_instance(f"attention[{index}]", spec, AttentionSpec, advice="pass one spec per layer")
    groups = check_groups(kv_groups)
    locations = kv_locations(specs, groups)
    context = BackendContext(
        attention=specs,
        kv_groups=groups,
        group_of=tuple(None if location is None else location.group for location in locations),
        device=check_device(device),
        max_num_reqs=config.max_num_reqs,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=config.max_seq_len + config.num_speculative_tokens,
        max_encoder_len=check_encoder_len(groups, config.max_encoder_len),
        max_query_len=config.query_lens[-1],
        batch_invariant=config.batch_invariant,
        mixed_batches=config.mixed_batches,
        tree_drafts=config.tree_depth > 0,
        context_parallel=any(kv.context_parallel_size > 1 for kv in groups),
    )
    named = config.prefill_backend not in (None, registry.ONE_PART)
    backend, reason = registry.select_backend(decode_context(context) if named else context, config.backend)
    prefill, why = registry.select_prefill(context, backend, config.prefill_backend)
    return BackendChoice(backend, f"{reason}; prefill: {why}" if why else reason, context, prefill)
