"""The attention backend CUSTOM of vLLM: capabilities, metadata builder and layer implementation.

vLLM allocates the KV cache, writes K and V into it, orders the batch (decodes first) and captures the graphs. The
builder computes graphrt's schedules once per step, into buffers that all layers of a KV cache group read.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from vllm._custom_ops import reshape_and_cache_flash
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from graphrt.integrations.vllm.schedules import GroupSchedules, LayerInputs, LayerKind, StepShape
from graphrt.kernels.attention.arguments import MAX_HEAD_DIM
from graphrt.kernels.attention.native import NATIVE_PAGE_MULTIPLE
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.plan_shape import MAX_QUERY_LEN
from graphrt.kernels.compile_ahead import compiling_ahead
from graphrt.kernels.errors import UnsupportedError
from graphrt.kernels.native.nvrtc import nvrtc_fault

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.kv_cache_interface import AttentionSpec

_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_SAME = {"float16": torch.float16, "bfloat16": torch.bfloat16}

_STRIDE_ORDERS = {
    # layout, whether layers are a dimension: the order in memory of ([layers,] blocks, heads, tokens, K and V)
    ("NHD", False): (0, 2, 1, 3),
    ("HND", False): (0, 1, 2, 3),
    ("NHD", True): (1, 0, 3, 2, 4),
    ("HND", True): (1, 2, 0, 3, 4),
}


class GraphrtBackend(AttentionBackend):  # type: ignore[misc]
    """The configurations that graphrt supports. vLLM refuses every other configuration with the reason."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *_SAME, *_FP8]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[GraphrtImpl]:
        return GraphrtImpl

    @staticmethod
    def get_builder_cls() -> type[GraphrtMetadataBuilder]:
        return GraphrtMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[Any]:
        return [MultipleOf(NATIVE_PAGE_MULTIPLE)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape that vLLM's own backends use: K and V of a token and head are adjacent."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout  # newer versions have their own order

        return _STRIDE_ORDERS[get_kv_cache_layout(), include_num_layers_dimension]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False: decode graphs have a fixed number of new tokens per request."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return bool(capability.major >= 9)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        if _SAME.get(kv_cache_dtype or "auto", dtype) != dtype:
            return f"kv_cache_dtype {kv_cache_dtype} differs from the model's {dtype}"
        return nvrtc_fault()


@dataclass
class GraphrtMetadata(AttentionMetadata):  # type: ignore[misc]
    """The inputs of all layers of a group in one step. Neither frozen nor slotted, because vLLM adds attributes.

    num_actual_tokens  tokens, including the padding of a full graph
    shape              which requests each kernel serves
    schedules          the buffers that `build` wrote
    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    shape: StepShape
    schedules: GroupSchedules


class GraphrtMetadataBuilder(AttentionMetadataBuilder[GraphrtMetadata]):  # type: ignore[misc]
    """Computes the schedules of a step on the device, without a sync.

    Full graphs hold decodes with an equal number of new tokens. A graph for any mix of requests would run decodes with
    the varlen kernel, which is slower, so with `cudagraph_mode=FULL` vLLM runs mixed steps in piecewise graphs.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._late_query_lens = vllm_config.cache_config.kv_sharing_fast_prefill
        self._is_compiled = device.type != "cuda"

    @cached_property
    def _schedules(self) -> GroupSchedules:
        """The schedules of the group, allocated by the first `build`.

        Drafters append layers to `layer_names` after the construction. Tensors of the construction would be in the
        memory pool of the KV cache, which loses its contents when vLLM sleeps.
        """
        config, scheduler = self.vllm_config, self.vllm_config.scheduler_config
        # Drafters append tokens to a full batch.
        tokens = scheduler.max_num_batched_tokens + scheduler.max_num_seqs * self.reorder_batch_threshold
        return GroupSchedules(
            [layer.impl.kind for layer in self._layers()],
            config.model_config.dtype,
            self.kv_cache_spec.block_size,
            self.device,
            max_num_tokens=max(tokens, config.compilation_config.max_cudagraph_capture_size or 0),
            max_query_len=self.reorder_batch_threshold,
        )

    def _layers(self) -> list[Any]:
        return list(get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, self.layer_names).values())

    def _compile_ahead(self, table_stride: int) -> None:
        """Compile the kernels of later steps. vLLM runs mixed steps outside of graphs, with any number of decodes."""
        dtype, page_size = self.vllm_config.model_config.dtype, self.kv_cache_spec.block_size
        scheduler = self.vllm_config.scheduler_config
        with compiling_ahead(self.device):
            self._schedules.compile_ahead(
                {layer.impl.kind: layer.impl.empty_inputs(layer, page_size, dtype) for layer in self._layers()},
                max_num_reqs=scheduler.max_num_seqs,
                max_num_tokens=scheduler.max_num_batched_tokens,
                table_stride=table_stride,
            )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> GraphrtMetadata:
        common, num_reqs = common_attn_metadata, common_attn_metadata.num_reqs
        _check_mask(common)
        if not self._is_compiled:
            self._compile_ahead(common.block_table_tensor.stride(0))
            self._is_compiled = True
        return self._written(
            GraphrtMetadata(
                common.num_actual_tokens,
                common.query_start_loc[: num_reqs + 1],
                common.seq_lens[:num_reqs],
                common.block_table_tensor[:num_reqs],
                common.slot_mapping,
                self._shape(common),
                self._schedules,
            )
        )

    def update_block_table(
        self, metadata: GraphrtMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> GraphrtMetadata:
        """Return the metadata of another group of the same step. Writes this group's buffers, which graphs read."""
        changed = copy.copy(metadata)  # if prompts skip layers, vLLM's subclass has a different __init__
        changed.block_table, changed.slot_mapping = blk_table[: metadata.shape.num_reqs], slot_mapping
        changed.schedules = self._schedules
        return self._written(changed)

    def _written(self, metadata: GraphrtMetadata) -> GraphrtMetadata:
        self._schedules.write(metadata.shape, metadata.seq_lens, metadata.query_start_loc)
        return metadata

    def _shape(self, common: CommonAttentionMetadata) -> StepShape:
        """Return which requests each kernel serves. A full graph and its replays have the same shape."""
        num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
        query_len = int(common.max_query_len)  # a NumPy integer in layers with chunks
        uniform = query_len <= self.reorder_batch_threshold and num_reqs * query_len == num_tokens
        query_lens = None
        if not self._late_query_lens:  # vLLM may still be copying query_start_loc_cpu
            query_lens = np.diff(common.query_start_loc_cpu[: num_reqs + 1].numpy())
            # With padding, the product also holds for some mixed steps of breakable graphs.
            uniform = uniform and bool(((query_lens == query_len) | (query_lens == 0)).all())
        if uniform and query_len <= MAX_QUERY_LEN:
            return StepShape(num_reqs, num_tokens, num_reqs, query_len)
        if uniform or not self._schedules.serves_prompts:
            return StepShape(num_reqs, num_tokens, num_reqs, 0)
        if query_lens is None:
            return StepShape(num_reqs, num_tokens, 0, 0)
        first = int(query_lens[0])
        if not 1 <= first <= min(self.reorder_batch_threshold, MAX_QUERY_LEN):
            return StepShape(num_reqs, num_tokens, 0, 0)
        others = np.flatnonzero(query_lens != first)
        return StepShape(num_reqs, num_tokens, int(others[0]) if others.size else num_reqs, first)


def _check_mask(common: CommonAttentionMetadata) -> None:
    """Raise UnsupportedError for masks that `validate_configuration` of some versions does not know."""
    found = {
        "non-causal attention": common.causal is not True,
        "a reference sliding window (R-SWA)": common.rswa_prefix_lens is not None,
        "decode context parallelism": common.dcp_local_seq_lens is not None,
    }
    if any(found.values()):
        names = " and ".join(name for name, present in found.items() if present)
        raise UnsupportedError(
            f"attention backend CUSTOM: expected causal attention over the whole KV cache, got {names}; "
            "start vLLM without --attention-backend CUSTOM"
        )


class GraphrtImpl(AttentionImpl[GraphrtMetadata]):  # type: ignore[misc]
    """One layer. It stores its options. The builder owns the schedules, and vLLM owns the KV cache."""

    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self.kind = LayerKind(num_heads, self.num_kv_heads, head_size, _FP8.get(kv_cache_dtype), sliding_window or 0)
        device = torch.get_default_device()  # vLLM constructs the model under `with torch.device(...)`
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
        self._options = AttentionOptions(
            scale,
            sliding_window=self.kind.sliding_window,
            logits_softcap=logits_soft_cap or 0.0,
            alibi_slopes=slopes,
            alibi_sqrt=use_alibi_sqrt,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Convert the sinks, which the checkpoint has in the model's dtype, to float32.

        vLLM calls this again when it reloads weights. Graphs read the tensor of the first call.
        """
        if self.sinks is None:
            return
        sinks = self.sinks.detach().float().contiguous()
        if self._options.sinks is None:
            self._options = replace(self._options, sinks=sinks)
        else:
            self._options.sinks.copy_(sinks)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: GraphrtMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from the first `num_actual_tokens` tokens to the pages of their requests. Capture-safe.

        query, output  [num_tokens, num_heads, head_size]
        key, value     not read; `do_kv_cache_update` has stored them
        kv_cache       [num_blocks, num_kv_heads, block_size, 2 * head_size], in any order in memory
        attn_metadata  None: vLLM measures memory; the output is zeros
        """
        if attn_metadata is None:
            return output.fill_(0)
        num_tokens = attn_metadata.num_actual_tokens
        k_cache, v_cache, options = self._inputs(layer, kv_cache)
        attn_metadata.schedules.attend(
            self.kind,
            attn_metadata.shape,
            query[:num_tokens],
            k_cache,
            v_cache,
            output[:num_tokens],
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            options,
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store K and V of the new tokens with vLLM's operator, which quantizes them and skips negative slots."""
        k_cache, v_cache = self._keys_and_values(kv_cache)
        reshape_and_cache_flash(
            key, value, k_cache, v_cache, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
        )

    def empty_inputs(self, layer: Any, page_size: int, dtype: torch.dtype) -> LayerInputs:
        """Return the inputs of the layer with a KV cache of one page."""
        shape = GraphrtBackend.get_kv_cache_shape(1, page_size, self.num_kv_heads, self.head_size)
        stored = dtype if self.kind.kv_dtype is None else torch.uint8
        return self._inputs(layer, torch.empty(shape, dtype=stored, device=layer._k_scale.device))

    def _inputs(self, layer: Any, kv_cache: torch.Tensor) -> LayerInputs:
        k_cache, v_cache = self._keys_and_values(kv_cache)
        fp8 = self.kind.kv_dtype
        if fp8 is None:
            return LayerInputs(k_cache, v_cache, self._options)
        options = replace(self._options, k_scale=layer._k_scale.view(1), v_scale=layer._v_scale.view(1))
        return LayerInputs(k_cache.view(fp8), v_cache.view(fp8), options)

    def _keys_and_values(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V as [num_blocks, block_size, num_kv_heads, head_size]."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values
