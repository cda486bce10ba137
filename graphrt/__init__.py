"""The decode step of a large language model as a library: static buffers, paged attention, one CUDA graph per step.

Public names are imported on first use, because `import graphrt.kernels` runs this file and must not load the runtime.
Other names are imported from their modules.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrt.backends.registry import register_backend as register_backend
    from graphrt.batch import Batch as Batch
    from graphrt.batch import Request as Request
    from graphrt.cache.groups import kv_groups as kv_groups
    from graphrt.cache.kv_cache import KVCache as KVCache
    from graphrt.cache.page_allocator import PageAllocator as PageAllocator
    from graphrt.cache.swap import SwapSpace as SwapSpace
    from graphrt.config import RequestTensor as RequestTensor
    from graphrt.config import RuntimeConfig as RuntimeConfig
    from graphrt.draft_model import DraftModel as DraftModel
    from graphrt.engine.handle import StepFaultError as StepFaultError
    from graphrt.engine.handle import StepHandle as StepHandle
    from graphrt.engine.step_model import as_step_model as as_step_model
    from graphrt.generate.generator import TextGenerator as TextGenerator
    from graphrt.integrations.transformers.runtime import from_transformers as from_transformers
    from graphrt.kernels.errors import CapacityError as CapacityError
    from graphrt.kernels.errors import CaptureError as CaptureError
    from graphrt.kernels.errors import ConfigError as ConfigError
    from graphrt.kernels.errors import GraphRTError as GraphRTError
    from graphrt.kernels.errors import RankError as RankError
    from graphrt.kernels.errors import ReplayError as ReplayError
    from graphrt.kernels.errors import ShapeError as ShapeError
    from graphrt.kernels.errors import UnsupportedError as UnsupportedError
    from graphrt.kernels.types import TOKEN_FROM_DEVICE as TOKEN_FROM_DEVICE
    from graphrt.kernels.types import FinishReason as FinishReason
    from graphrt.kernels.types import KVLayout as KVLayout
    from graphrt.layer import Attention as Attention
    from graphrt.models.loading import load_draft_model as load_draft_model
    from graphrt.models.loading import load_model as load_model
    from graphrt.models.tokenizer import load_tokenizer as load_tokenizer
    from graphrt.proposer import ngram_drafts as ngram_drafts
    from graphrt.replay import ReplayManager as ReplayManager
    from graphrt.runtime import Runtime as Runtime
    from graphrt.sampling_params import SamplingParams as SamplingParams
    from graphrt.session.session import DecodeSession as DecodeSession
    from graphrt.spec import AttentionKind as AttentionKind
    from graphrt.spec import AttentionSpec as AttentionSpec
    from graphrt.spec import KVCacheSpec as KVCacheSpec
    from graphrt.step import Step as Step

__version__ = "0.1.0"

_NAMES = {
    "backends.registry": ("register_backend",),
    "batch": ("Batch", "Request"),
    "cache.groups": ("kv_groups",),
    "cache.kv_cache": ("KVCache",),
    "cache.page_allocator": ("PageAllocator",),
    "cache.swap": ("SwapSpace",),
    "config": ("RequestTensor", "RuntimeConfig"),
    "draft_model": ("DraftModel",),
    "engine.handle": ("StepFaultError", "StepHandle"),
    "engine.step_model": ("as_step_model",),
    "generate.generator": ("TextGenerator",),
    "integrations.transformers.runtime": ("from_transformers",),
    "kernels.errors": (
        "CapacityError", "CaptureError", "ConfigError", "GraphRTError", "RankError", "ReplayError", "ShapeError",
        "UnsupportedError",
    ),
    "kernels.types": ("TOKEN_FROM_DEVICE", "FinishReason", "KVLayout"),
    "layer": ("Attention",),
    "models.loading": ("load_draft_model", "load_model"),
    "models.tokenizer": ("load_tokenizer",),
    "proposer": ("ngram_drafts",),
    "replay": ("ReplayManager",),
    "runtime": ("Runtime",),
    "sampling_params": ("SamplingParams",),
    "session.session": ("DecodeSession",),
    "spec": ("AttentionKind", "AttentionSpec", "KVCacheSpec"),
    "step": ("Step",),
}  # fmt: skip
_HOME = {name: f"graphrt.{module}" for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'graphrt' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
