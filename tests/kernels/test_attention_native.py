"""The CUDA decode kernel: variants, plans and unsupported calls."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

from graphrt.kernels.attention.call import AttentionCall
from graphrt.kernels.attention.native import native_unsupported_reason, native_variant, native_variants
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.plan_native import STATIC_SHARED_BYTES
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.errors import ConfigError, GraphRTError
from graphrt.kernels.native import nvrtc
from graphrt.kernels.native.nvrtc import compile_variant
from tests.support.attention_cases import BF16, E4M3, E5M2, F16, F32
from tests.support.native_usage import accesses_before_the_wait, assert_fits, compiled_within

LLAMA = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": BF16, "num_sms": 132, "native": True}


@pytest.mark.parametrize("name", native_variants())
def test_variants_compile_within_their_bounds(name: str) -> None:
    variant = native_variants()[name]
    # 16 queries of wide heads, or 20 over fp8, with all options; 32 without.
    spilled = {
        "wide_gqa": 48,
        "wide_gqa_invariant": 96,
        "deepseek_wide": 48,
        "speculative_fp8": 96,
        "speculative_three_stages": 60,
    }.get(name, 0)
    registers, log = compiled_within(variant, spilled)
    static = int(re.search(r"(\d+) bytes smem", log).group(1))
    assert static <= STATIC_SHARED_BYTES
    assert_fits(variant, dict(variant.macros)["BLOCKS_PER_SM"], registers, static)
    assert not accesses_before_the_wait(variant)


def test_compile_error_raises() -> None:
    variant = replace(native_variants()["llama"], macros=(("HEAD_DIM", 128),))
    with pytest.raises(GraphRTError, match=r"decode.cu: does not compile for sm_90: (.|\n)*error"):
        compile_variant(variant)


def test_runs_native_checks_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices with the instructions but less shared memory, such as sm_120, use the Triton kernel."""
    assert not nvrtc.runs_native(torch.device("cpu"))
    success = nvrtc.driver.CUresult.CUDA_SUCCESS
    capability, shared = (9, 0), 227 << 10
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(nvrtc.driver, "cuDeviceGet", lambda index: (success, index))
    monkeypatch.setattr(nvrtc.driver, "cuDeviceGetAttribute", lambda attribute, index: (success, shared))
    device = torch.device("cuda", 0)
    assert nvrtc.runs_native(device)
    capability, shared = (12, 0), 99 << 10
    assert not nvrtc.runs_native(device)
    capability, shared = (8, 0), 227 << 10
    assert not nvrtc.runs_native(device)


def test_missing_compiler_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("libnvrtc.so: cannot open")

    assert nvrtc.nvrtc_fault() is None
    monkeypatch.setattr(nvrtc.nvrtc, "nvrtcVersion", missing)
    reason = nvrtc.nvrtc_fault()
    assert reason is not None
    assert reason.startswith("nvrtc: NVIDIA's run-time compiler is missing (libnvrtc.so: cannot open); run pip ")
    with pytest.raises(ConfigError, match="run-time compiler"):
        compile_variant(native_variants()["llama"])


def test_compiling_does_not_modify_constants() -> None:
    """NVRTC writes into its arguments, and the process shares the bytes object of one space."""
    compile_variant(native_variants()["llama"])
    assert bytes([32]) == b"\x20"


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": F32},
        {"head_dim": 72},
        {"v_head_dim": 72},
        {"head_dim": 512},
        {"head_dim": 64, "v_head_dim": 272},
        {"head_dim": 96, "v_head_dim": 80, "kv_dtype": E4M3},
        {"head_dim": 192, "v_head_dim": 192, "num_q_heads": 8 * 17},
        {"head_dim": 80, "kv_dtype": E4M3},
        {"num_q_heads": 8 * 33},
        {"query_len": 7},
        {"query_len": 9, "head_dim": 64},
        {"head_dim": 256, "num_q_heads": 8 * 16},
    ],
    ids=str,
)
def test_shapes_that_only_triton_supports(change: dict[str, object]) -> None:
    arguments = {**LLAMA, **change}
    assert AttentionPlan.decode(4, **arguments) == AttentionPlan.decode(4, **{**arguments, "native": False})


PLANS = {  # changes of LLAMA; warps, cluster, blocks per KV head
    "one": ({"num_reqs": 1}, (8, 8, 8)),
    "few": ({"num_reqs": 2}, (8, 1, 16)),
    "some": ({"num_reqs": 31}, (8, 1, 16)),
    "many": ({"num_reqs": 32}, (8, 1, 16)),
    "fp8": ({"num_reqs": 32, "kv_dtype": E4M3}, (8, 1, 16)),
    "one_of_32_heads": ({"num_reqs": 1, "num_kv_heads": 32}, (8, 2, 2)),
    "one_of_1_head": ({"num_reqs": 1, "num_kv_heads": 1, "num_q_heads": 16}, (8, 8, 64)),
    "one_invariant": ({"num_reqs": 1, "batch_invariant": True}, (8, 1, 16)),
    "many_invariant": ({"num_reqs": 256, "batch_invariant": True}, (8, 1, 16)),
    "head_dim_256": ({"num_reqs": 64, "head_dim": 256}, (4, 1, 16)),
    "192_and_128": ({"num_reqs": 64, "head_dim": 192, "v_head_dim": 128, "num_kv_heads": 16}, (8, 1, 8)),
    "many_64_and_128": ({"num_reqs": 64, "head_dim": 64, "v_head_dim": 128}, (8, 1, 16)),
    "many_head_dim_64": ({"num_reqs": 64, "head_dim": 64}, (8, 1, 32)),
    "many_head_dim_64_wide": ({"num_reqs": 64, "head_dim": 64, "num_q_heads": 128}, (8, 1, 16)),
    "partitions_not_rounded": ({"num_reqs": 16, "num_kv_heads": 3, "num_q_heads": 9, "head_dim": 64}, (8, 1, 44)),
    "pairs_for_few": ({"num_reqs": 15, "num_kv_heads": 1, "num_q_heads": 16}, (8, 2, 128)),
    "no_pairs_between": ({"num_reqs": 32, "num_kv_heads": 1, "num_q_heads": 16}, (8, 1, 128)),
    "pairs_for_unsplit_q_tiles": ({"num_reqs": 64, "num_kv_heads": 1, "num_q_heads": 16}, (8, 2, 128)),
    "no_pairs_for_cheap_merges": ({"num_reqs": 64, "num_kv_heads": 1, "num_q_heads": 4}, (8, 1, 128)),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str) -> None:
    change, expected = PLANS[name]
    plan = AttentionPlan.decode(**{**LLAMA, **change})
    assert plan.native is not None
    assert (plan.native.warps, plan.native.cluster, plan.native_blocks) == expected
    if plan.partition_per_warp:
        assert plan.schedule.num_partitions == plan.native_blocks * plan.native.warps
        assert plan.tile.block_n == (32 if "fp8" in name else 16), "a split begins at any KV tile"


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=str)
def test_tiles_of_a_warp_have_room_for_its_partial_result(kv_dtype: torch.dtype) -> None:
    """The kernel does not compile otherwise."""
    planned = 0
    for head_dim, v_head_dim, queries in itertools.product(range(32, 257, 32), range(32, 257, 32), range(1, 33)):
        sizes = {**LLAMA, "num_q_heads": 8 * queries, "head_dim": head_dim, "v_head_dim": v_head_dim}
        native = AttentionPlan.decode(8, **sizes, kv_dtype=kv_dtype).native
        if native is not None:
            planned += 1
            tiles = native.stages * (16 if kv_dtype == BF16 else 32) * (head_dim + v_head_dim) * kv_dtype.itemsize
            assert 4 * queries * (v_head_dim + 6) <= tiles, (head_dim, v_head_dim, queries)
    assert planned > 400


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values at an address `elements` after the allocator's."""
    room = torch.empty(tensor.numel() + elements, dtype=tensor.dtype)[elements:]
    return room.view(tensor.shape).copy_(tensor)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def heads_of(head_dim: int, dtype: torch.dtype = BF16, kv_dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    q, cache = zeros(4, 32, head_dim, dtype=dtype), zeros(3, 16, 8, head_dim, dtype=kv_dtype)
    return {"q": q, "k": cache, "v": cache, "out": q}


Q, CACHE, WIDE = zeros(4, 32, 128), zeros(3, 16, 8, 128), zeros(3, 16, 8, 132)[..., :128]  # WIDE: 264 bytes per head
LIST = torch.zeros(1 << 16, dtype=torch.int32)
OF_FP8 = "the plan was not made for a cache of torch.float8_e4m3fn"
UNSUPPORTED: dict[str, tuple[dict[str, object], dict[str, torch.Tensor], str | None]] = {
    # changes of LLAMA, tensors of the call, and why the CUDA kernel cannot run: a plan does not hold dtypes
    "none": ({}, {}, None),
    "aligned_otherwise": ({}, {"k": shifted(CACHE, 8), "q": shifted(Q, 2), "work_list": shifted(LIST, 4)}, None),
    "float32": ({}, heads_of(128, F32, F32), "q is torch.float32"),
    "float32_queries": ({}, heads_of(128, F32, E4M3), "q is torch.float32"),
    "fp8": ({}, heads_of(128, BF16, E4M3), OF_FP8),
    "fp8_of_80": ({"head_dim": 80}, heads_of(80, BF16, E4M3), OF_FP8),
    "fp8_of_80_invariant": ({"head_dim": 80, "batch_invariant": True}, heads_of(80, BF16, E4M3), OF_FP8),
    "pages_of_8": ({}, dict.fromkeys("kv", zeros(3, 8, 8, 128)), "the page size of 8 is not a multiple of 16"),
    "k": ({}, {"k": shifted(CACHE, 4)}, "heads of k_cache are not aligned to 16 bytes"),
    "v": ({}, {"v": shifted(CACHE, 4)}, "heads of v_cache are not aligned to 16 bytes"),
    "wide_k": ({}, {"k": WIDE}, "heads of k_cache are not aligned to 16 bytes"),
    "wide_v": ({}, {"v": WIDE}, "heads of v_cache are not aligned to 16 bytes"),
    "q": ({}, {"q": shifted(Q, 1)}, "heads of q are not aligned to 4 bytes"),
    "out": ({}, {"out": shifted(Q, 1)}, "heads of out are not aligned to 4 bytes"),
    "odd_q": ({}, {"q": zeros(4, 32, 129)[..., :128]}, "heads of q are not aligned to 4 bytes"),
    "odd_out": ({}, {"out": zeros(4, 32, 129)[..., :128]}, "heads of out are not aligned to 4 bytes"),
    "work_list": ({}, {"work_list": shifted(LIST, 2)}, "work_list is not aligned to 16 bytes"),
}


@pytest.mark.parametrize(
    ("name", "query_len", "runs"), [("tree_masks", 1, True), ("tree_masks", 2, False), ("kv_limits", 1, False)]
)
def test_masks_of_trees_and_limits_fall_back_to_triton(name: str, query_len: int, runs: bool) -> None:
    """The only token of a request sees all keys in a tree, as in a chain."""
    plan = AttentionPlan.decode(4, **LLAMA, query_len=query_len)
    options = AttentionOptions(1.0, causal=name == "tree_masks", **{name: LIST})
    scratch = AttentionWorkspace(LIST, LIST, LIST)
    call = AttentionCall(Q, CACHE, CACHE, LIST, None, LIST, LIST, Q, None, scratch, options, plan, False)
    assert native_unsupported_reason(call) == (None if runs else "it has no masks for trees and limits")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_calls_fall_back_to_triton(name: str) -> None:
    changes, tensors, reason = UNSUPPORTED[name]
    plan = AttentionPlan.decode(4, **{**LLAMA, **changes})
    assert plan.native is not None
    scratch = AttentionWorkspace(LIST, LIST, LIST)
    call = AttentionCall(Q, CACHE, CACHE, LIST, None, LIST, LIST, Q, None, scratch, AttentionOptions(1.0), plan, False)
    assert native_unsupported_reason(replace(call, **tensors)) == reason


SHARED_BYTES = {  # warps x (stages x tile + partial result) + exchange buffers, in bytes
    "llama_one": 8 * (2 * 8192 + 4 * 4 * 134) + 16 * (32 + 4) * 8 + 16,
    "llama": 8 * (2 * 8192 + 4 * 4 * 134),
    "llama_fp8": 8 * (2 * 8192 + 4 * 4 * 134),
    "small_heads": 8 * (3 * 4096 + 4 * 3 * 70) + 16 * (12 + 3) * 8 + 16,
    "pairs": 8 * (2 * 8192 + 4 * 16 * 134) + 16 * (512 + 16) * 2 + 16,
    "gemma": 4 * (2 * 16384 + 4 * 2 * 262),
    "deepseek": 8 * (2 * 10240 + 4 * 1 * 134),
    "deepseek_one": 8 * (2 * 10240 + 4 * 1 * 134) + 16 * (16 + 1) * 4 + 16,
}


@pytest.mark.parametrize("name", SHARED_BYTES)
def test_shared_memory_of_a_block(name: str) -> None:
    assert native_variants()[name].shared_bytes == SHARED_BYTES[name]


OPTIONS = {
    "none": ({}, {}),
    "window": ({"sliding_window": 1}, {"WINDOW": 1}),
    "chunks": ({"attention_chunk_size": 33}, {"WINDOW": 2}),
    "chunks_of_tiles": ({"attention_chunk_size": 48}, {}),  # the work list begins at their boundaries
    "softcap": ({"logits_softcap": 1.0}, {"SOFTCAP": 1}),
    "full": ({"causal": False}, {"CAUSAL": 0}),
    "alibi": ({"alibi_slopes": torch.ones(32)}, {"ALIBI": 1}),
    "alibi_sqrt": ({"alibi_slopes": torch.ones(32), "alibi_sqrt": True}, {"ALIBI": 2}),
    "sinks": ({"sinks": torch.ones(32), "k_scale": torch.ones(1)}, {}),  # these are pointers, null or not
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_in_macros(name: str) -> None:
    options, changes = OPTIONS[name]
    plan = AttentionPlan.decode(64, **LLAMA)
    plain = dict(native_variant(plan, AttentionOptions(1.0), BF16, BF16, 16).macros)
    assert {key: plain[key] for key in ("WINDOW", "SOFTCAP", "CAUSAL", "ALIBI", "KV_FP8", "Q_BF16")} == {
        "WINDOW": 0, "SOFTCAP": 0, "CAUSAL": 1, "ALIBI": 0, "KV_FP8": 0, "Q_BF16": 1,
    }  # fmt: skip
    variant = native_variant(plan, AttentionOptions(1.0, **options), BF16, BF16, 16)
    assert dict(variant.macros) == plain | changes


def test_chunks_in_macros() -> None:
    """Several new tokens, or chunks that begin within KV tiles, need a mask."""
    for change, size, window in (
        ({}, 8192, 0),
        ({}, 8200, 2),
        ({"query_len": 2}, 8192, 2),
        ({"kv_dtype": E4M3}, 8192, 0),
        ({"kv_dtype": E4M3}, 48, 2),  # KV tiles of 32
        ({"batch_invariant": True}, 8192, 0),
        ({"batch_invariant": True}, 48, 2),  # KV tiles of 64
    ):
        plan = AttentionPlan.decode(64, **{**LLAMA, **change})
        options = AttentionOptions(1.0, attention_chunk_size=size)
        assert plan.masks_chunks(size) == (window == 2)
        assert dict(native_variant(plan, options, BF16, change.get("kv_dtype", BF16), 16).macros)["WINDOW"] == window


def test_dtypes_and_sizes_in_macros() -> None:
    for dtype, kv_dtype, q_bf16, kv_fp8 in ((F16, F16, 0, 0), (BF16, E4M3, 1, 1), (F16, E5M2, 0, 2)):
        sizes = {**LLAMA, "head_dim": 192, "v_head_dim": 128, "dtype": dtype}
        plan = AttentionPlan.decode(64, **sizes, kv_dtype=kv_dtype)
        macros = dict(native_variant(plan, AttentionOptions(1.0), dtype, kv_dtype, 48).macros)
        assert (macros["Q_BF16"], macros["KV_FP8"], macros["PAGE_SIZE"]) == (q_bf16, kv_fp8, 48)
        assert (macros["HEAD_DIM"], macros["V_HEAD_DIM"]) == (192, 128)
