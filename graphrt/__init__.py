"""The decode step of a large language model as a library: static buffers, paged attention, one CUDA graph per step.

Names are imported when they are first used: `import graphrt.kernels` runs this file, and must not load the runtime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrt.backends.base import AttentionBackend as AttentionBackend
    from graphrt.backends.base import Capabilities as Capabilities
    from graphrt.backends.choice import BackendChoice as BackendChoice
    from graphrt.backends.choice import get_attn_backend as get_attn_backend
    from graphrt.backends.registry import register_backend as register_backend
    from graphrt.batch import Batch as Batch
    from graphrt.batch import Row as Row
    from graphrt.bundle import Bundle as Bundle
    from graphrt.capture.descriptor import BatchDescriptor as BatchDescriptor
    from graphrt.capture.descriptor import GraphKind as GraphKind
    from graphrt.compare import StepComparison as StepComparison
    from graphrt.config import RowTensor as RowTensor
    from graphrt.config import RuntimeConfig as RuntimeConfig
    from graphrt.entry import State as State
    from graphrt.generate import Event as Event
    from graphrt.generate import TextGenerator as TextGenerator
    from graphrt.groups import kv_groups as kv_groups
    from graphrt.handle import RowFault as RowFault
    from graphrt.handle import StepFaultError as StepFaultError
    from graphrt.handle import StepHandle as StepHandle
    from graphrt.kernels.cache.write import Rotary as Rotary
    from graphrt.kernels.errors import CapacityError as CapacityError
    from graphrt.kernels.errors import CaptureError as CaptureError
    from graphrt.kernels.errors import ConfigError as ConfigError
    from graphrt.kernels.errors import GraphRTError as GraphRTError
    from graphrt.kernels.errors import ReplayError as ReplayError
    from graphrt.kernels.errors import ShapeError as ShapeError
    from graphrt.kernels.errors import UnsupportedError as UnsupportedError
    from graphrt.kernels.types import NO_TOKEN as NO_TOKEN
    from graphrt.kernels.types import TOKEN_FROM_ROW as TOKEN_FROM_ROW
    from graphrt.kernels.types import FaultCode as FaultCode
    from graphrt.kernels.types import KVLayout as KVLayout
    from graphrt.kernels.types import RowEnd as RowEnd
    from graphrt.kernels.types import RowStatus as RowStatus
    from graphrt.kv_cache import KVCache as KVCache
    from graphrt.kv_cache import PageAllocator as PageAllocator
    from graphrt.launch import Launch as Launch
    from graphrt.layer import Attention as Attention
    from graphrt.layer import attention_specs as attention_specs
    from graphrt.logprobs import StepLogprobs as StepLogprobs
    from graphrt.logprobs import TokenLogprob as TokenLogprob
    from graphrt.models.loading import load_model as load_model
    from graphrt.models.tokenizer import load_tokenizer as load_tokenizer
    from graphrt.recording import Recording as Recording
    from graphrt.replay import ReplayManager as ReplayManager
    from graphrt.row_tables import RowTables as RowTables
    from graphrt.runtime import MemoryPlan as MemoryPlan
    from graphrt.runtime import Runtime as Runtime
    from graphrt.runtime import resolve_device as resolve_device
    from graphrt.sampling_params import SamplingParams as SamplingParams
    from graphrt.scheduler import GenerationStats as GenerationStats
    from graphrt.session import DecodeSession as DecodeSession
    from graphrt.session_rows import SessionRow as SessionRow
    from graphrt.spec import AttentionKind as AttentionKind
    from graphrt.spec import AttentionSpec as AttentionSpec
    from graphrt.spec import KVCacheSpec as KVCacheSpec
    from graphrt.stats import Stats as Stats
    from graphrt.step import Step as Step
    from graphrt.step_model import as_step_model as as_step_model
    from graphrt.swap import SwapArrival as SwapArrival
    from graphrt.swap import SwappedPages as SwappedPages
    from graphrt.swap import SwapSpace as SwapSpace

__version__ = "0.1.0"

_HOME = {
    "Attention": "graphrt.layer",
    "AttentionBackend": "graphrt.backends.base",
    "AttentionKind": "graphrt.spec",
    "AttentionSpec": "graphrt.spec",
    "BackendChoice": "graphrt.backends.choice",
    "Batch": "graphrt.batch",
    "BatchDescriptor": "graphrt.capture.descriptor",
    "Bundle": "graphrt.bundle",
    "Capabilities": "graphrt.backends.base",
    "CapacityError": "graphrt.kernels.errors",
    "CaptureError": "graphrt.kernels.errors",
    "ConfigError": "graphrt.kernels.errors",
    "DecodeSession": "graphrt.session",
    "Event": "graphrt.generate",
    "FaultCode": "graphrt.kernels.types",
    "GenerationStats": "graphrt.scheduler",
    "GraphKind": "graphrt.capture.descriptor",
    "GraphRTError": "graphrt.kernels.errors",
    "KVCache": "graphrt.kv_cache",
    "KVCacheSpec": "graphrt.spec",
    "KVLayout": "graphrt.kernels.types",
    "Launch": "graphrt.launch",
    "MemoryPlan": "graphrt.runtime",
    "NO_TOKEN": "graphrt.kernels.types",
    "PageAllocator": "graphrt.kv_cache",
    "Recording": "graphrt.recording",
    "ReplayError": "graphrt.kernels.errors",
    "ReplayManager": "graphrt.replay",
    "Rotary": "graphrt.kernels.cache.write",
    "Row": "graphrt.batch",
    "RowEnd": "graphrt.kernels.types",
    "RowFault": "graphrt.handle",
    "RowStatus": "graphrt.kernels.types",
    "RowTables": "graphrt.row_tables",
    "RowTensor": "graphrt.config",
    "Runtime": "graphrt.runtime",
    "RuntimeConfig": "graphrt.config",
    "SamplingParams": "graphrt.sampling_params",
    "SessionRow": "graphrt.session_rows",
    "ShapeError": "graphrt.kernels.errors",
    "State": "graphrt.entry",
    "Stats": "graphrt.stats",
    "Step": "graphrt.step",
    "StepLogprobs": "graphrt.logprobs",
    "StepComparison": "graphrt.compare",
    "StepFaultError": "graphrt.handle",
    "StepHandle": "graphrt.handle",
    "SwapArrival": "graphrt.swap",
    "SwapSpace": "graphrt.swap",
    "SwappedPages": "graphrt.swap",
    "TOKEN_FROM_ROW": "graphrt.kernels.types",
    "TokenLogprob": "graphrt.logprobs",
    "TextGenerator": "graphrt.generate",
    "UnsupportedError": "graphrt.kernels.errors",
    "as_step_model": "graphrt.step_model",
    "attention_specs": "graphrt.layer",
    "get_attn_backend": "graphrt.backends.choice",
    "kv_groups": "graphrt.groups",
    "load_model": "graphrt.models.loading",
    "load_tokenizer": "graphrt.models.tokenizer",
    "register_backend": "graphrt.backends.registry",
    "resolve_device": "graphrt.runtime",
}
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
