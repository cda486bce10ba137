from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import torch


class AttentionType(str, Enum):
    DECODER = "decoder"


class MultipleOf:
    def __init__(self, base):
        self.base = base


class AttentionBackend:
    """`validate_configuration` names the hook that refuses."""

    @classmethod
    def supports_dtype(cls, dtype):
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_block_size(cls, block_size):
        return any(block_size % size.base == 0 for size in cls.get_supported_kernel_block_sizes())

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def is_mla(cls):
        return False


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    dcp_local_seq_lens: torch.Tensor | None = None
    rswa_prefix_lens: torch.Tensor | None = None


M = TypeVar("M")


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2


class AttentionMetadataBuilder(ABC, Generic[M]):
    reorder_batch_threshold = None
    supports_update_block_table = False

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        return cls._cudagraph_support

    def _init_reorder_batch_threshold(self, reorder_batch_threshold=1, supports_spec_as_decode=False):
        speculative = self.vllm_config.speculative_config
        drafts = speculative.num_speculative_tokens if supports_spec_as_decode and speculative else 0
        self.reorder_batch_threshold = reorder_batch_threshold + drafts

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)


class AttentionImpl(ABC, Generic[M]):
    @abstractmethod
    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ): ...
