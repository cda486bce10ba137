"""The attention backend for vLLM over vLLM's tensors, in the Triton interpreter, with a stub of vLLM's classes."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphrt
from graphrt.backends.triton import kernels_on
from graphrt.integrations import vllm as plugin
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.compile_ahead import compiled, counting_compilations
from graphrt.kernels.native import nvrtc
from tests.support.ahead_runs import run_ahead
from tests.support.attention_cases import (
    BF16,
    E4M3,
    E5M2,
    F16,
    NAN,
    Case,
    Problem,
    assert_accurate,
    by_id,
    make_problem,
)
from tests.test_readme import block

STANDIN = Path(__file__).resolve().parent.parent / "support" / "vllm_standin"
CPU = torch.device("cpu")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
NAMES = {None: "auto", E4M3: "fp8", E5M2: "fp8_e5m2"}

RAGGED = ((70, 1), (1, 1), (33, 1), (16, 1), (17, 1))
MIXED = (*RAGGED, (40, 9), (20, 20), (65, 2))
SPECULATIVE = ((70, 3), (3, 3), (33, 3))
PADDED = (*RAGGED, *((0, 1),) * 3)
CASES = [
    Case("decode", RAGGED, BF16),
    Case("decode-padded-to-a-capture-size", PADDED, F16, num_kv_heads=2),
    Case("decode-window", PADDED, BF16, window=20, layout="HND", gqa=7),
    Case("decode-fp8", PADDED, BF16, E4M3, num_kv_heads=2, page_size=32),
    Case("decode-options", PADDED, F16, softcap=3.0, alibi="sqrt", sinks=True),
    Case("speculative", SPECULATIVE, BF16),
    Case("speculative-padded", (*SPECULATIVE, (0, 3), (0, 3)), BF16, window=9, sinks=True),
    Case("mixed", MIXED, BF16),
    Case("mixed-options", MIXED, F16, window=12, softcap=3.0, alibi="linear", sinks=True, gqa=1, num_kv_heads=2),
    Case("mixed-fp8-e5m2", MIXED, BF16, E5M2, layout="HND", page_size=48),
    Case("mixed-heads-of-264", ((70, 1), (20, 3)), BF16, head_dim=264, gqa=1, sinks=True),
    Case("mixed-drafts", (*SPECULATIVE, (20, 2), (40, 9)), BF16),
    Case("prompts", ((20, 20), (1, 1), (50, 30)), BF16, sinks=True),
    Case("one-token", ((1, 1),), BF16),
]


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[Any]:
    sys.path.insert(0, str(STANDIN))
    yield importlib.import_module("graphrt.integrations.vllm.backend")
    sys.path.remove(str(STANDIN))
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm" or name == f"{plugin.__name__}.backend"]:
        del sys.modules[name]


@dataclass
class Group:
    """A builder and a layer of the case's kind, as vLLM makes them."""

    layer: Any
    builder: Any

    @classmethod
    def of(cls, backend: Any, case: Case, *, drafts: int = 0, device: torch.device = CPU) -> Group:
        from vllm.config import VllmConfig
        from vllm.config.compilation import CompilationConfig
        from vllm.config.model import ModelConfig
        from vllm.config.scheduler import SchedulerConfig
        from vllm.config.speculative import SpeculativeConfig
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.v1.kv_cache_interface import AttentionSpec

        options = layer_options(case, device)
        layer = AttentionLayerBase()
        layer._k_scale, layer._v_scale = (
            torch.ones((), device=device) if s is None else s[0] for s in (options.k_scale, options.v_scale)
        )
        with torch.device(device):
            layer.impl = backend.GraphrtBackend.get_impl_cls()(
                case.num_kv_heads * case.gqa, case.head_dim, case.head_dim**-0.5, case.num_kv_heads,
                None if options.alibi_slopes is None else options.alibi_slopes.tolist(), case.window or None,
                NAMES[case.kv_dtype], case.softcap or None, sinks=options.sinks, use_alibi_sqrt=options.alibi_sqrt,
            )  # fmt: skip
        layer.impl.process_weights_after_loading(case.dtype)
        config = VllmConfig(
            ModelConfig(case.dtype),
            SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8),
            CompilationConfig(8, {"layer": layer}),
            SpeculativeConfig(drafts) if drafts else None,
        )
        spec = AttentionSpec(case.page_size, case.num_kv_heads, case.head_dim)
        return cls(layer, backend.GraphrtBackend.get_builder_cls()(spec, ["layer"], config, device))

    def run(self, problem: Problem, kv_cache: torch.Tensor, metadata: Any) -> None:
        with kernels_on(problem.q.device):
            returned = self.layer.impl.forward(self.layer, problem.q, None, None, kv_cache, metadata, problem.out)
        assert returned is problem.out

    def capture(self, problem: Problem, kv_cache: torch.Tensor, metadata: Any) -> Callable[[], None]:
        """Return the replay of a CUDA graph; on a CPU, of a call that keeps the metadata, as a graph does."""
        if problem.q.device.type == "cpu":
            return partial(self.run, problem, kv_cache, metadata)
        self.run(problem, kv_cache, metadata)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(problem, kv_cache, metadata)
        return graph.replay


def layer_options(case: Case, device: torch.device) -> AttentionOptions:
    """The options of a case's layer, which its steps share."""
    return make_problem(replace(case, reqs=((1, 1),)), torch.Generator().manual_seed(1), device).options


def problem_of(case: Case, seed: int = 0, device: torch.device = CPU) -> Problem:
    """A step of random tensors with the options of the case's layer."""
    problem = make_problem(replace(case, lse=False), torch.Generator().manual_seed(seed), device)
    old, problem.options = problem.options, layer_options(case, device)
    if case.kv_dtype is not None:
        ratios = [new / own for new, own in zip(scales(problem.options), scales(old), strict=True)]
        problem.dense = [(k * ratios[0].cpu(), v * ratios[1].cpu()) for k, v in problem.dense]
    return problem


def scales(options: AttentionOptions) -> list[torch.Tensor]:
    return [scale.double() for scale in (options.k_scale, options.v_scale) if scale is not None]


def in_vllms_layout(backend: Any, problem: Problem) -> torch.Tensor:
    """The K and V of a problem in a tensor that is shaped and permuted as vLLM does."""
    from vllm.v1.attention.backends import utils

    case = problem.case
    utils.layout = case.layout
    shape = backend.GraphrtBackend.get_kv_cache_shape(
        problem.k_cache.shape[0], case.page_size, case.num_kv_heads, case.head_dim
    )
    order = backend.GraphrtBackend.get_kv_cache_stride_order()
    cache = torch.empty([shape[dim] for dim in order], dtype=case.stored, device=problem.q.device).permute(
        [order.index(dim) for dim in range(4)]
    )
    assert cache.shape == shape
    assert cache.is_contiguous() is (case.layout == "HND" or case.num_kv_heads == 1)
    cache.copy_(torch.cat([problem.k_cache.float(), problem.v_cache.float()], -1).transpose(1, 2).to(case.stored))
    return cache if case.kv_dtype is None else cache.view(torch.uint8)


def common_of(problem: Problem) -> Any:
    """The metadata that vLLM passes. Padding requests of a full graph have no tokens in query_start_loc."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    reqs = problem.case.reqs
    starts = [0, *itertools.accumulate(length if seq_len else 0 for seq_len, length in reqs)]
    starts_cpu = torch.tensor(starts, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts_cpu.to(problem.q.device),
        query_start_loc_cpu=starts_cpu,
        seq_lens=problem.seq_lens,
        num_reqs=len(reqs),
        num_actual_tokens=problem.q.shape[0],
        max_query_len=max(length for _, length in reqs),
        max_seq_len=1 << 20,
        block_table_tensor=problem.block_table,
        slot_mapping=torch.zeros(problem.q.shape[0], dtype=torch.int64, device=problem.q.device),
    )


@DEVICES
@pytest.mark.parametrize("case", by_id(CASES))
def test_steps_equal_dense_attention(case: Case, device: str, backend: Any) -> None:
    at = torch.device(device)
    group = Group.of(backend, case, drafts=2 if case.reqs[0][1] == 3 else 0, device=at)
    problem = problem_of(case, device=at)
    with kernels_on(at):
        metadata = group.builder.build(0, common_of(problem))
    problem.out.fill_(NAN)
    group.run(problem, in_vllms_layout(backend, problem), metadata)
    assert_accurate(problem, problem.out.cpu())


def test_query_lens_choose_the_kernels(backend: Any) -> None:
    """Decodes come first; a request with another number of new tokens ends them."""
    of = backend.StepShape
    for drafts, head_dim, reqs, shape in (
        (0, 64, RAGGED, of(5, 5, 5, 1)),
        (0, 64, PADDED, of(8, 8, 8, 1)),
        (0, 64, MIXED, of(8, 36, 5, 1)),
        (0, 264, MIXED, of(8, 36, 8, 0)),
        (0, 64, ((20, 20), (9, 1)), of(2, 21, 0, 0)),
        (2, 64, SPECULATIVE, of(3, 9, 3, 3)),
        (2, 64, RAGGED, of(5, 5, 5, 1)),
        (2, 64, ((9, 3), (9, 3), (9, 1), (9, 3)), of(4, 10, 2, 3)),
        (2, 64, ((9, 9), (9, 1)), of(2, 10, 0, 0)),
        (1, 64, ((9, 1), (9, 2), (9, 1), (9, 2)), of(4, 8, 1, 1)),  # 6 tokens, padded to as many as 4 drafts have
        (16, 64, ((40, 17), (50, 17)), of(2, 34, 2, 0)),  # more new tokens than a decode plan serves
    ):
        case = Case("", reqs, BF16, head_dim=head_dim)
        builder = Group.of(backend, case, drafts=drafts).builder
        common = replace(common_of(problem_of(case)), num_actual_tokens=shape.num_tokens)
        assert builder._shape(common) == shape
    assert builder.get_cudagraph_support(None, None).name == "UNIFORM_BATCH"


@DEVICES
@pytest.mark.parametrize("padding", [0, 3])
def test_a_replay_reads_the_buffers_of_its_own_step(padding: int, device: str, backend: Any) -> None:
    """A graph keeps the metadata of its capture. Each step rewrites inputs and schedules in place, for both groups."""
    at = torch.device(device)
    reqs = ((200, 1), (1, 1), (90, 1), (33, 1), (7, 1))
    case = Case("", (*reqs[: 5 - padding], *((0, 1),) * padding), BF16, window=40, num_kv_heads=2)
    groups = [Group.of(backend, case, device=at) for _ in range(2)]
    steps = [problem_of(case, seed, at) for seed in (1, 2)]
    static = replace(
        steps[0], q=steps[0].q.clone(), out=steps[0].out.clone(), seq_lens=torch.ones_like(steps[0].seq_lens),
        block_table=torch.zeros_like(steps[0].block_table),
    )  # fmt: skip
    tables, cache = [static.block_table, static.block_table.clone()], in_vllms_layout(backend, steps[0])
    replays = []
    for group, table in zip(groups, tables, strict=True):
        with kernels_on(at):
            metadata = group.builder.build_for_cudagraph_capture(replace(common_of(static), block_table_tensor=table))
        replays.append(group.capture(static, cache, metadata))
    for step in (*steps, steps[0]):
        static.seq_lens.copy_(step.seq_lens)
        static.q.copy_(step.q)
        cache.copy_(in_vllms_layout(backend, step))
        for table in tables:
            table.copy_(step.block_table)
        with kernels_on(at):
            first = groups[0].builder.build(0, common_of(static))
            groups[1].builder.update_block_table(first, tables[1], first.slot_mapping)
        for replay in replays:
            static.out.fill_(NAN)
            replay()
            assert_accurate(step, static.out.cpu())


def test_layers_that_follow_the_construction_have_schedules(backend: Any) -> None:
    """Drafters append layers to the builder's list. When vLLM sleeps, it discards tensors of the construction."""
    case = Case("", MIXED, BF16)
    group, other = Group.of(backend, case), Group.of(backend, replace(case, window=12))
    assert "_schedules" not in vars(group.builder), "nothing is allocated before the first step"
    group.builder.vllm_config.compilation_config.static_forward_context["draft"] = other.layer
    group.builder.layer_names.append("draft")
    metadata = None
    for layer, window in ((group.layer, 0), (other.layer, 12)):
        problem = problem_of(replace(case, window=window))
        with kernels_on(CPU):
            metadata = metadata or group.builder.build(0, common_of(problem))
        Group(layer, group.builder).run(problem, in_vllms_layout(backend, problem), metadata)
        assert_accurate(problem, problem.out)


def test_no_kernel_is_compiled_after_the_first_step(tmp_path: Path) -> None:
    found = run_ahead("ahead_vllm", tmp_path)
    assert found["late"] == []
    assert found["launched"] == 0
    assert found["ahead"] > 10
    assert found["ran"] > 4 * 2 * 39


@pytest.mark.gpu
def test_the_first_step_loads_the_kernels_of_all_steps(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, loaded = torch.device("cuda"), list[str]()
    monkeypatch.setattr(nvrtc, "load_hooks", [*nvrtc.load_hooks, loaded.append])
    group = Group.of(backend, CASES[0], device=cuda)
    with counting_compilations():
        group.builder.build(0, common_of(problem_of(CASES[0], device=cuda)))
        before = len(loaded), len(compiled)
        for reqs in (RAGGED[:1], MIXED, MIXED[1:], RAGGED[1:4], ((33, 20),), (*RAGGED, *RAGGED[:2], (40, 12))):
            problem = problem_of(replace(CASES[0], reqs=reqs), device=cuda)
            metadata = group.builder.build(0, common_of(problem))
            group.run(problem, in_vllms_layout(backend, problem), metadata)
            assert_accurate(problem, problem.out.cpu())
        assert (len(loaded), len(compiled)) == before


def test_query_lens_that_are_late_on_the_host_are_not_read(backend: Any) -> None:
    """If prompts skip the layers with shared KV, vLLM copies query_start_loc without waiting. Its metadata class has
    another __init__ then, and its query length may be a NumPy integer."""
    case = Case("", MIXED, BF16)
    group, problem = Group.of(backend, case), problem_of(case)
    group.builder.vllm_config.cache_config.kv_sharing_fast_prefill = True
    builder = type(group.builder)(group.builder.kv_cache_spec, ["layer"], group.builder.vllm_config, CPU)

    class Own(backend.GraphrtMetadata):
        def __init__(self, metadata: Any) -> None:
            vars(self).update(vars(metadata), num_logits_indices=7)

    late = torch.full_like(common_of(problem).query_start_loc_cpu, 1 << 30)
    common = replace(common_of(problem), query_start_loc_cpu=late, max_query_len=np.int32(20))
    with kernels_on(CPU):
        metadata = builder.update_block_table(Own(builder.build(0, common)), problem.block_table, common.slot_mapping)
    assert metadata.num_logits_indices == 7
    group.run(problem, in_vllms_layout(backend, problem), metadata)
    assert_accurate(problem, problem.out)
    decodes = common_of(problem_of(Case("", RAGGED, BF16)))
    with kernels_on(CPU):
        assert builder.build(0, replace(decodes, max_query_len=np.int32(1))).shape == backend.StepShape(5, 5, 5, 1)


def test_new_tokens_are_stored_at_their_slots(backend: Any) -> None:
    for case in (Case("", RAGGED, BF16, num_kv_heads=2), Case("", RAGGED, BF16, E4M3, layout="HND")):
        group, problem = Group.of(backend, case), problem_of(case)
        cache = in_vllms_layout(backend, problem)
        before, group.layer._k_scale, group.layer._v_scale = cache.clone(), torch.tensor(0.5), torch.tensor(2.0)
        new = torch.arange(4 * case.num_kv_heads * 64).view(4, case.num_kv_heads, 64).remainder(8).to(case.dtype)
        slots = torch.tensor([5, 2 * 16 + 3, -1])  # shorter than the padded keys
        group.layer.impl.do_kv_cache_update(group.layer, new, 2 * new, cache, slots)
        quantized = case.kv_dtype is not None
        stored = cache.view(case.stored).float()
        for at, (page, slot) in ((0, (0, 5)), (1, (2, 3))):
            torch.testing.assert_close(stored[page, :, slot, :64], new[at].float() / (0.5 if quantized else 1))
            torch.testing.assert_close(stored[page, :, slot, 64:], 2 * new[at].float() / (2 if quantized else 1))
            before[page, :, slot] = cache[page, :, slot]
        assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))


def test_a_memory_profile_writes_zeros(backend: Any) -> None:
    group = Group.of(backend, CASES[0])
    out = torch.full((3, 4, 64), NAN)
    assert not group.layer.impl.forward(group.layer, out, None, None, torch.empty(0), None, out).any()


def test_what_the_kernels_lack_is_refused(backend: Any) -> None:
    from vllm.platforms.interface import DeviceCapability

    cls = backend.GraphrtBackend
    assert cls.get_name() == "CUSTOM"
    assert [size for size in (8, 16, 20, 48, 64, 80, 128, 256, 512, 520) if cls.supports_head_size(size)] == [
        8, 16, 48, 64, 80, 128, 256, 512,
    ]  # fmt: skip
    assert [cls.supports_dtype(dtype) for dtype in (F16, BF16, torch.float32)] == [True, True, False]
    dtypes = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "nvfp4", "fp8_ds_mla")
    assert [cls.supports_kv_cache_dtype(dtype) for dtype in dtypes] == [True] * 5 + [False] * 3
    assert [cls.supports_block_size(size) for size in (8, 16, 48, 100)] == [False, True, True, False]
    assert [cls.supports_compute_capability(DeviceCapability(*at)) for at in ((8, 9), (9, 0), (10, 0))] == [
        False, True, True,
    ]  # fmt: skip
    assert [cls.supports_attn_type(kind) for kind in ("decoder", "encoder_only")] == [True, False]
    assert not cls.is_mla()
    assert not cls.supports_device_cpu_query_lens_mismatch()
    combination = (64, BF16, "float16", 16, False, False, False, False, DeviceCapability(9, 0))
    assert "float16 differs" in cls.supports_combination(*combination)
    assert cls.supports_combination(64, BF16, "fp8", *combination[3:]) is None


def test_masks_that_vllm_does_not_validate_raise(backend: Any) -> None:
    """DiffusionGemma and prefix LMs are not causal. vLLM 0.26 validates neither R-SWA nor context parallelism."""
    case = Case("", RAGGED, BF16)
    builder, common = Group.of(backend, case).builder, common_of(problem_of(case))
    for field, value, name in (
        ("causal", False, "non-causal"),
        ("causal", common.seq_lens > 0, "non-causal"),
        ("rswa_prefix_lens", common.seq_lens, "R-SWA"),
        ("dcp_local_seq_lens", common.seq_lens, "context parallelism"),
    ):
        with pytest.raises(graphrt.UnsupportedError, match=name):
            builder.build(0, replace(common, **{field: value}))


def test_reloaded_sinks_keep_their_address(backend: Any) -> None:
    """Captured graphs read the float32 copy."""
    impl = Group.of(backend, Case("", RAGGED, BF16, sinks=True)).layer.impl
    before = impl._options.sinks
    impl.sinks = torch.full_like(impl.sinks, 3.0, dtype=BF16)
    impl.process_weights_after_loading(BF16)
    assert impl._options.sinks is before
    assert before.unique().tolist() == [3.0]


@pytest.mark.parametrize(
    ("version", "registered"),
    [("0.25.1", False), ("0.26.0+cu130", True), ("0.33.0", True), ("0.34.0", False), ("1.0", False)],
)
def test_unsupported_versions_are_named(
    version: str, registered: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.attention.backends import registry

    registry.registered.clear()
    monkeypatch.setattr(plugin, "version", lambda name: version)
    plugin.register()
    path = {registry.AttentionBackendEnum.CUSTOM: "graphrt.integrations.vllm.backend.GraphrtBackend"}
    assert registry.registered == (path if registered else {})
    assert (f"supports vLLM 0.26 to 0.33, got {version}" in caplog.text) is not registered


def test_the_entry_point_is_the_function() -> None:
    text = (Path(plugin.__file__).resolve().parents[3] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\ngraphrt = "graphrt.integrations.vllm:register"' in text


def test_the_lines_of_the_readme_select_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm
    from vllm.v1.attention.backends import registry

    class LLM:
        def __init__(self, *, model: str, attention_backend: str) -> None:
            self.backend = registry.AttentionBackendEnum[attention_backend]

        def generate(self, prompts: list[str]) -> Any:
            return registry.registered[self.backend]

    registry.registered.clear()
    monkeypatch.setattr(plugin, "version", lambda name: "0.33.0")
    monkeypatch.setattr(vllm, "LLM", LLM, raising=False)
    plugin.register()  # vLLM calls the entry point in each process
    exec(block("vllm", "python"), names := dict[str, Any]())
    assert names["results"] == "graphrt.integrations.vllm.backend.GraphrtBackend"
