"""The CUDA kernel for prefills (native/prompt.cu): supported calls, variants and launch."""

from __future__ import annotations

import ctypes
import math

import torch
from cuda.bindings import driver

from graphrt.kernels.attention.arguments import logit_constants
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.prompt_call import PromptCall
from graphrt.kernels.attention.prompt_plan import NATIVE_BLOCK_M, PromptPlan
from graphrt.kernels.errors import GraphRTError
from graphrt.kernels.native.nvrtc import MIN_SHARED_BYTES, NativeVariant, launch

_CAPABILITY = (9, 0)  # wgmma exists only on this compute capability
_PANEL = 64  # 16-bit elements in a swizzled 128-byte line of shared memory
_NUM_THREADS = 384
_MOST_STAGES = 8
_VARIABLE_BYTES = 384  # for barriers and other variables in shared memory
_QUERY_STAGES_UP_TO = 192
"""Largest head_dim for which two stages of queries fit in shared memory. With one stage, the next query tile waits."""

_ALIGNMENT = 16  # bytes


class _Params(ctypes.Structure):
    """`Params` of native/prompt.cu, which is aligned to 64 bytes."""

    _fields_ = (
        *((name, ctypes.c_byte * 128) for name in ("k_map", "v_map")),
        *((name, ctypes.c_void_p) for name in ("q", "out", "lse", "block_table", "schedule", "slopes", "sinks")),
        *((name, ctypes.c_longlong) for name in ("q_token", "q_head", "out_token", "out_head", "lse_token")),
        ("table_row", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("left", "right", "num_kv_heads", "unused")),
        *((name, ctypes.c_float) for name in ("logit_factor", "logit_cap")),
    )


_PARAMS_BYTES = -(-ctypes.sizeof(_Params) // 64) * 64


def runs_prompt_kernel(device: torch.device) -> bool:
    """Return whether the CUDA kernel runs on `device`. It requires compute capability 9.0 (Hopper)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _CAPABILITY


def prompt_unsupported_reason(call: PromptCall) -> str | None:
    """Return why the CUDA kernel cannot run a call whose plan was made for it; None if it can."""
    if call.q.element_size() != 2 or call.k.dtype != call.q.dtype:
        return f"q is {call.q.dtype} and k is {call.k.dtype}"
    if call.block_table is not None and call.k.shape[1] % 16:
        return f"the page size of {call.k.shape[1]} is not a multiple of 16"
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v), ("out", call.out)):
        steps = [
            stride * tensor.element_size()
            for stride, extent in zip(tensor.stride(), tensor.shape[:-1], strict=False)
            if extent > 1
        ]
        if any(n % _ALIGNMENT for n in (tensor.data_ptr(), *steps)):
            return f"heads of {name} are not aligned to {_ALIGNMENT} bytes"
    return None


def _block_n(head_dim: int) -> int:
    """Return the tokens per KV tile, so that two tiles fit in shared memory and the weights fit in registers."""
    return 128 if head_dim <= 2 * _PANEL else 64


def prompt_variant(plan: PromptPlan, options: AttentionOptions, dtype: torch.dtype, page_size: int) -> NativeVariant:
    """Return the variant of a call; page_size 0: keys and values are packed."""
    block_n = _block_n(plan.head_dim)
    panels = -(-plan.head_dim // _PANEL)
    query_stages = 2 if plan.head_dim <= _QUERY_STAGES_UP_TO else 1
    tile_bytes, query_bytes = (panels * 2 * _PANEL * reqs for reqs in (block_n, NATIVE_BLOCK_M))
    # Stages of keys and values share the remaining shared memory. The number of barriers limits them.
    stages = min((MIN_SHARED_BYTES - _VARIABLE_BYTES - query_stages * query_bytes) // tile_bytes, _MOST_STAGES)
    macros = {
        "ALIBI": 0 if options.alibi_slopes is None else 1 + options.alibi_sqrt,
        "BLOCK_N": block_n,
        "BOX_ROWS": math.gcd(page_size, block_n),
        "NUM_QUERIES_PER_KV": plan.num_queries_per_kv,
        "HEAD_DIM": plan.head_dim,
        "K_STAGES": (stages + 1) // 2,
        "PAGED": int(page_size > 0),
        "PAGE_SIZE": page_size,
        "PARAMS_BYTES": _PARAMS_BYTES,
        "QUERY_STAGES": query_stages,
        "Q_BF16": int(dtype == torch.bfloat16),
        "SHARED_VARIABLES": _VARIABLE_BYTES,
        "SOFTCAP": int(options.logits_softcap > 0.0),
        "V_STAGES": stages // 2,
    }
    return NativeVariant(
        "prompt.cu",
        "prompt_attention",
        tuple(macros.items()),
        _NUM_THREADS,
        query_stages * query_bytes + stages * tile_bytes + _VARIABLE_BYTES,
        arch_specific=True,
    )


def encode_map(tensor: torch.Tensor, box_rows: int) -> bytes:
    """Encode the TMA descriptor of K or V.

    tensor     [pages, slots, heads, head_dim], or packed [tokens, heads, head_dim]
    box_rows   slots or tokens per box; a box has 64 elements of a head

    Raises: GraphRTError: if the driver rejects the tensor.
    """
    pages = tensor if tensor.dim() == 4 else tensor[None]
    num_pages, num_slots, num_heads, head_dim = pages.shape
    steps = [
        stride * pages.element_size() if extent > 1 else _ALIGNMENT
        for stride, extent in ((pages.stride(i), pages.shape[i]) for i in (1, 2, 0))
    ]
    kinds = driver.CUtensorMapDataType
    result, encoded = driver.cuTensorMapEncodeTiled(
        kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        if tensor.dtype == torch.bfloat16
        else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        4,
        tensor.data_ptr(),
        [driver.cuuint64_t(n) for n in (head_dim, num_slots, num_heads, num_pages)],
        [driver.cuuint64_t(n) for n in steps],
        [driver.cuuint32_t(n) for n in (_PANEL, box_rows, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(result) != 0:
        raise GraphRTError(
            f"k or v: TMA cannot load a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} "
            f"({result!r}); report this as a bug"
        )
    return ctypes.string_at(encoded.getPtr(), 128)


def native_prompt(call: PromptCall) -> None:
    """Launch the kernel for a call that has no `prompt_unsupported_reason`.

    Raises: GraphRTError: if the driver rejects the launch.
    """
    plan, options, table = call.plan, call.options, call.block_table
    logit_factor, logit_cap = logit_constants(options.softmax_scale, options.logits_softcap)
    variant = prompt_variant(plan, options, call.q.dtype, 0 if table is None else call.k.shape[1])
    box_rows = dict(variant.macros)["BOX_ROWS"]
    pointers = (call.q, call.out, call.lse, table, call.schedule, options.alibi_slopes, options.sinks)
    params = _Params(
        *((ctypes.c_byte * 128).from_buffer_copy(encode_map(tensor, box_rows)) for tensor in (call.k, call.v)),
        *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
        *call.q.stride()[:2],
        *call.out.stride()[:2],
        0 if call.lse is None else call.lse.stride(0),
        0 if table is None else table.stride(0),
        call.left,
        call.right,
        plan.num_kv_heads,
        0,
        logit_factor,
        logit_cap,
    )
    aligned = (ctypes.c_byte * _PARAMS_BYTES)()
    ctypes.memmove(aligned, ctypes.byref(params), ctypes.sizeof(params))
    num_blocks = min(plan.num_blocks, plan.max_q_tiles * plan.num_kv_heads)
    launch(variant, (num_blocks, 1), aligned, call.q.device)


def prompt_variants() -> dict[str, NativeVariant]:
    """Return the variants that a test compiles without a GPU: shapes of common models, and corner cases."""
    bf16, fp16 = torch.bfloat16, torch.float16
    cases: dict[str, tuple[torch.dtype, int, int, int, bool]] = {
        # name: dtype, head_dim, num_queries_per_kv, page_size (0: packed), every option
        "llama": (bf16, 128, 4, 16, False),
        "llama_page64": (fp16, 128, 4, 64, True),
        "packed": (bf16, 128, 4, 0, False),
        "encoder": (fp16, 64, 1, 0, False),
        "odd_head_dim": (fp16, 80, 7, 48, True),
        "phi": (bf16, 96, 1, 16, False),
        "small": (bf16, 16, 3, 16, True),
        "keys_of_192": (bf16, 192, 1, 16, True),
        "keys_of_232": (fp16, 232, 1, 0, True),
        "gemma": (bf16, 256, 2, 16, True),
    }
    variants = {}
    for name, (dtype, head_dim, num_queries_per_kv, page_size, every) in cases.items():
        heads = {"num_q_heads": 8 * num_queries_per_kv, "num_kv_heads": 8, "head_dim": head_dim}
        plan = PromptPlan.make(64, 2048, dtype=dtype, num_sms=132, native=True, **heads)  # type: ignore[arg-type]
        slopes = torch.zeros(8 * num_queries_per_kv, device="cpu") if every else None
        options = AttentionOptions(1.0, logits_softcap=float(every), alibi_slopes=slopes, alibi_sqrt=every)
        variants[name] = prompt_variant(plan, options, dtype, page_size)
    return variants
