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
    from graphrt.batch import Request as Request
    from graphrt.bundle.bundle import Bundle as Bundle
    from graphrt.cache.groups import kv_groups as kv_groups
    from graphrt.cache.kv_cache import KVCache as KVCache
    from graphrt.cache.page_allocator import PageAllocator as PageAllocator
    from graphrt.cache.swap import SwapArrival as SwapArrival
    from graphrt.cache.swap import SwappedPages as SwappedPages
    from graphrt.cache.swap import SwapSpace as SwapSpace
    from graphrt.capture.descriptor import BatchDescriptor as BatchDescriptor
    from graphrt.capture.descriptor import GraphKind as GraphKind
    from graphrt.config import RequestTensor as RequestTensor
    from graphrt.config import RuntimeConfig as RuntimeConfig
    from graphrt.engine.compare import StepComparison as StepComparison
    from graphrt.engine.handle import RequestFault as RequestFault
    from graphrt.engine.handle import StepFaultError as StepFaultError
    from graphrt.engine.handle import StepHandle as StepHandle
    from graphrt.engine.launch import Launch as Launch
    from graphrt.engine.lifecycle import State as State
    from graphrt.engine.logprobs import StepLogprobs as StepLogprobs
    from graphrt.engine.logprobs import TokenLogprob as TokenLogprob
    from graphrt.engine.recording import Recording as Recording
    from graphrt.engine.request_tables import RequestTables as RequestTables
    from graphrt.engine.stats import Stats as Stats
    from graphrt.engine.step_model import as_step_model as as_step_model
    from graphrt.generate.generator import Event as Event
    from graphrt.generate.generator import TextGenerator as TextGenerator
    from graphrt.generate.scheduler import GenerationStats as GenerationStats
    from graphrt.kernels.cache.write import Rotary as Rotary
    from graphrt.kernels.errors import CapacityError as CapacityError
    from graphrt.kernels.errors import CaptureError as CaptureError
    from graphrt.kernels.errors import ConfigError as ConfigError
    from graphrt.kernels.errors import GraphRTError as GraphRTError
    from graphrt.kernels.errors import ReplayError as ReplayError
    from graphrt.kernels.errors import ShapeError as ShapeError
    from graphrt.kernels.errors import UnsupportedError as UnsupportedError
    from graphrt.kernels.types import NO_TOKEN as NO_TOKEN
    from graphrt.kernels.types import TOKEN_FROM_DEVICE as TOKEN_FROM_DEVICE
    from graphrt.kernels.types import FaultCode as FaultCode
    from graphrt.kernels.types import FinishReason as FinishReason
    from graphrt.kernels.types import KVLayout as KVLayout
    from graphrt.kernels.types import RequestStatus as RequestStatus
    from graphrt.layer import Attention as Attention
    from graphrt.layer import attention_specs as attention_specs
    from graphrt.models.loading import load_model as load_model
    from graphrt.models.tokenizer import load_tokenizer as load_tokenizer
    from graphrt.replay import ReplayManager as ReplayManager
    from graphrt.runtime import MemoryPlan as MemoryPlan
    from graphrt.runtime import Runtime as Runtime
    from graphrt.runtime import resolve_device as resolve_device
    from graphrt.sampling_params import SamplingParams as SamplingParams
    from graphrt.session.requests import SessionRequest as SessionRequest
    from graphrt.session.session import DecodeSession as DecodeSession
    from graphrt.spec import AttentionKind as AttentionKind
    from graphrt.spec import AttentionSpec as AttentionSpec
    from graphrt.spec import KVCacheSpec as KVCacheSpec
    from graphrt.step import Step as Step

__version__ = "0.1.0"

_HOME = {
    "Attention": "graphrt.layer",
    "AttentionBackend": "graphrt.backends.base",
    "AttentionKind": "graphrt.spec",
    "AttentionSpec": "graphrt.spec",
    "BackendChoice": "graphrt.backends.choice",
    "Batch": "graphrt.batch",
    "BatchDescriptor": "graphrt.capture.descriptor",
    "Bundle": "graphrt.bundle.bundle",
    "Capabilities": "graphrt.backends.base",
    "CapacityError": "graphrt.kernels.errors",
    "CaptureError": "graphrt.kernels.errors",
    "ConfigError": "graphrt.kernels.errors",
    "DecodeSession": "graphrt.session.session",
    "Event": "graphrt.generate.generator",
    "FaultCode": "graphrt.kernels.types",
    "GenerationStats": "graphrt.generate.scheduler",
    "GraphKind": "graphrt.capture.descriptor",
    "GraphRTError": "graphrt.kernels.errors",
    "KVCache": "graphrt.cache.kv_cache",
    "KVCacheSpec": "graphrt.spec",
    "KVLayout": "graphrt.kernels.types",
    "Launch": "graphrt.engine.launch",
    "MemoryPlan": "graphrt.runtime",
    "NO_TOKEN": "graphrt.kernels.types",
    "PageAllocator": "graphrt.cache.page_allocator",
    "Recording": "graphrt.engine.recording",
    "ReplayError": "graphrt.kernels.errors",
    "ReplayManager": "graphrt.replay",
    "Rotary": "graphrt.kernels.cache.write",
    "Request": "graphrt.batch",
    "FinishReason": "graphrt.kernels.types",
    "RequestFault": "graphrt.engine.handle",
    "RequestStatus": "graphrt.kernels.types",
    "RequestTables": "graphrt.engine.request_tables",
    "RequestTensor": "graphrt.config",
    "Runtime": "graphrt.runtime",
    "RuntimeConfig": "graphrt.config",
    "SamplingParams": "graphrt.sampling_params",
    "SessionRequest": "graphrt.session.requests",
    "ShapeError": "graphrt.kernels.errors",
    "State": "graphrt.engine.lifecycle",
    "Stats": "graphrt.engine.stats",
    "Step": "graphrt.step",
    "StepLogprobs": "graphrt.engine.logprobs",
    "StepComparison": "graphrt.engine.compare",
    "StepFaultError": "graphrt.engine.handle",
    "StepHandle": "graphrt.engine.handle",
    "SwapArrival": "graphrt.cache.swap",
    "SwapSpace": "graphrt.cache.swap",
    "SwappedPages": "graphrt.cache.swap",
    "TOKEN_FROM_DEVICE": "graphrt.kernels.types",
    "TokenLogprob": "graphrt.engine.logprobs",
    "TextGenerator": "graphrt.generate.generator",
    "UnsupportedError": "graphrt.kernels.errors",
    "as_step_model": "graphrt.engine.step_model",
    "attention_specs": "graphrt.layer",
    "get_attn_backend": "graphrt.backends.choice",
    "kv_groups": "graphrt.cache.groups",
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
