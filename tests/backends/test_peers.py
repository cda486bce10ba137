"""Host logic of the backends around other packages, with fake packages that record their calls."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from graphrt.backends import peer
from graphrt.backends.base import AttentionBackend, BackendContext
from graphrt.backends.flash_attn2 import FlashAttention2Backend
from graphrt.backends.flash_attn3 import MAX_SPLITS, WORKSPACE_BYTES, FlashAttention3Backend
from graphrt.backends.flashinfer import FlashInferBackend
from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.staging import StagingSlot
from graphrt.kernels.errors import CaptureError, ReplayError, UnsupportedError
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec
from tests.backends.contract import FEATURES, Feature, make_rig

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
PEERS = (FlashAttention2Backend, FlashAttention3Backend, FlashInferBackend)
FULL, WINDOWED = AttentionSpec(8, 2, 64, BF16), AttentionSpec(8, 2, 64, BF16, sliding_window=7)
Calls = list[tuple[str, dict[str, Any]]]


def context(*specs: AttentionSpec, device: torch.device = CPU, page_size: int = 256, **options: Any) -> BackendContext:
    layers = specs or (FULL,)
    kv_dtype, layout = options.pop("kv_dtype", layers[0].dtype), options.pop("layout", KVLayout.NHD)
    kv = KVCacheSpec(len(layers), layers[0].num_kv_heads, layers[0].head_dim, page_size, layout, kv_dtype)
    sizes = {"max_num_reqs": 4, "max_num_tokens": 32, "max_seq_len": 4 * page_size} | options
    return BackendContext(layers, kv, device, **sizes)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for key, value in functions.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("cls", PEERS, ids=lambda c: c.name)
def test_a_missing_package_is_named_with_its_command(
    cls: type[peer.PeerBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = {
        "flash_attn2": "pip install flash-attn",
        "flash_attn3": "pip install tokenspeed-fa3",
        "flashinfer": "pip install flashinfer-python",
    }[cls.name]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = f"package {cls.package.module}: not installed; run {command}"
    assert cls.unavailable() == reason
    assert cls.why_not(context(device=CUDA))[0] == reason
    monkeypatch.setitem(sys.modules, cls.package.module, None)
    with pytest.raises(UnsupportedError, match=f"expected the package, got none .*; run {command}"):
        cls(context()).allocate()


def test_an_old_package_is_named_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flashinfer")
    monkeypatch.setattr(peer, "version", lambda name: "0.5.3")
    assert FlashInferBackend.unavailable() == (
        "package flashinfer: needs version 0.6, got 0.5.3; run pip install flashinfer-python --upgrade"
    )
    monkeypatch.setattr(peer, "version", lambda name: "0.6.4rc1")
    assert FlashInferBackend.unavailable() is None


def test_importing_the_backends_imports_no_package() -> None:
    code = (
        "import sys; from graphrt.backends.registry import backend_class, backend_names, explain\n"
        "for name in backend_names(): backend_class(name).unavailable()\n"
        "print(sorted({'flash_attn', 'flash_attn_interface', 'flashinfer'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


REFUSALS = {
    "flash_attn2": (
        FlashAttention2Backend,
        context(
            AttentionSpec(8, 2, 96, BF16, alibi_slopes=(0.1,) * 8, alibi_sqrt=True, sinks=True),
            device=CUDA, page_size=16, kv_dtype=torch.float8_e4m3fn,
        ),
        ["page_size 16: supports 256", "KV dtype torch.float8_e4m3fn: supports", "head_dim 96: supports 64, 128, 256",
         "sinks: not supported", "alibi_sqrt: not supported, the distance itself only"],
    ),
    "flash_attn3": (
        FlashAttention3Backend,
        context(
            AttentionSpec(8, 2, 96, torch.float16, logits_softcap=3.0, alibi_slopes=(0.1,) * 8),
            device=CUDA, kv_dtype=torch.float8_e4m3fn,
        ),
        ["head_dim 96: supports 64, 128, 192, 256", "logits_softcap 3.0: not supported", "alibi_slopes: not supported",
         "KV dtype float8_e4m3fn: its output is bfloat16, so the layers must be"],
    ),
    "flashinfer": (
        FlashInferBackend,
        context(FULL, WINDOWED, device=CUDA, max_query_len=2, batch_invariant=True, kv_dtype=torch.float16),
        ["query_len 2: decodes at most 1 tokens per row", "batch_invariant: not supported",
         "dtype torch.bfloat16 with KV dtype torch.float16: must be equal, or the cache fp8",
         "sliding_window None, 7: one plan serves all layers, they must agree"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_every_reason_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, asked, wanted = REFUSALS[name]
    install(monkeypatch, cls.package.module)
    reasons = cls.why_not(asked)
    for text in wanted:
        assert any(text in reason for reason in reasons), (text, reasons)
    assert len(reasons) == len(wanted), reasons


def test_flash_attn3_asks_for_a_build_with_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = context(AttentionSpec(8, 2, 64, BF16, sinks=True), device=CUDA)
    install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=lambda q, k_cache, v_cache: None)
    assert FlashAttention3Backend.why_not(asked) == ["sinks: not in this build; run pip install tokenspeed-fa3"]
    install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=lambda q, k_cache, v_cache, sinks=None: None)
    assert FlashAttention3Backend.why_not(asked) == []


def metadata_of(asked: BackendContext, descriptor: BatchDescriptor, live: int) -> StepMetadata:
    """`live` real tokens, the rest padding; one token in each row of a mixed step but the last real one."""
    rows, tokens = descriptor.padded_reqs, descriptor.padded_tokens
    starts = [min(row * (descriptor.query_len or 1), live) for row in range(rows)] + [live]
    slots = torch.arange(1, tokens + 1)
    slots[live:] = -1
    return StepMetadata(
        descriptor,
        seq_lens=torch.full((rows,), 5, dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        block_table=torch.arange(rows * asked.max_pages, dtype=torch.int32).view(rows, -1),
        slot_mapping=slots,
        positions=torch.zeros(tokens, dtype=torch.int64),
        max_seq_len=asked.max_seq_len,
    )


def layer_of(asked: BackendContext, index: int = 0, **scales: torch.Tensor) -> Any:
    from graphrt.backends.base import AttentionLayer

    kv = asked.kv
    k, v = (torch.zeros(3, kv.page_size, kv.num_kv_heads, kv.head_dim).to(kv.dtype) for _ in range(2))
    return AttentionLayer(index, asked.attention[index], k, v, **scales)


def step(backend: AttentionBackend, metadata: StepMetadata, q: torch.Tensor, layers: list[Any]) -> list[torch.Tensor]:
    backend.schedule(metadata)
    results = []
    for layer in layers:
        out, lse = torch.full_like(q, 777.0), torch.full(q.shape[:2], 777.0)
        backend.run(layer, q, metadata, out, lse=lse)
        results += [out, lse]
    return results


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls: Calls = []

    def get_scheduler_metadata(**kwargs):
        calls.append(("schedule", kwargs))
        return torch.full((4 * kwargs["batch_size"] + 1,), len(calls), dtype=torch.int32)

    def flash_attn_with_kvcache(q, k, v, sinks=None, **kwargs):
        calls.append(("run", {"q": q, "sinks": sinks} | kwargs))
        result = torch.full(q.shape, math.nan).to(BF16)
        result.view(-1, *q.shape[-2:])[:3] = 2.0
        sums = torch.ones(q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else torch.ones(q.shape[1], q.shape[0])
        return result, sums, None, None

    install(
        monkeypatch,
        "flash_attn_interface",
        get_scheduler_metadata=get_scheduler_metadata,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )
    return calls


@pytest.mark.parametrize(
    "descriptor", [BatchDescriptor.decode(4), BatchDescriptor.decode(2, 3), BatchDescriptor.mixed(16, 4)], ids=str
)
def test_flash_attn3_tells_both_calls_the_same(fa3: Calls, descriptor: BatchDescriptor) -> None:
    asked = context(FULL, WINDOWED, FULL, max_query_len=3)
    backend = FlashAttention3Backend(asked)
    backend.allocate()
    metadata = metadata_of(asked, descriptor, live=3)
    q = torch.randn(descriptor.padded_tokens, 8, 64).to(BF16)
    results = step(backend, metadata, q, [layer_of(asked, i) for i in range(3)])
    schedules = [kwargs for kind, kwargs in fa3 if kind == "schedule"]
    runs = [kwargs for kind, kwargs in fa3 if kind == "run"]
    assert [kind for kind, _ in fa3] == ["schedule", "schedule", "run", "run", "run"], (
        "once per window, then the layers"
    )
    assert [s["window_size"] for s in schedules] == [(-1, -1), (6, 0)]
    assert [r["window_size"] for r in runs] == [(-1, -1), (6, 0), (-1, -1)]
    assert [int(r["scheduler_metadata"][0]) for r in runs] == [1, 2, 1], "each window has its own"
    mixed = descriptor.query_len == 0
    for schedule in schedules:
        assert schedule["max_seqlen_k"] == metadata.block_table.shape[1] * 256 == 1024
        assert schedule["max_seqlen_q"] == (16 if mixed else descriptor.query_len)
        assert schedule["cache_seqlens"] is metadata.seq_lens
        assert (schedule["cu_seqlens_q"] is not None) == mixed
    for run in runs:
        assert run["num_splits"] == schedules[0]["num_splits"] > 0
        assert run["causal"]
        assert run["page_table"] is metadata.block_table
        assert (run["cache_leftpad"] is None) == (schedules[0]["cache_leftpad"] is None)
    for out, lse in zip(results[::2], results[1::2], strict=True):
        assert (out[:3] == 2).all()
        assert not out[3:].any(), "what the kernel leaves in pad tokens does not get out"
        assert (lse[:3] == 1).all()
        assert (lse[3:] == -math.inf).all()


def test_flash_attn3_makes_a_schedule_in_every_step(fa3: Calls) -> None:
    asked = context()
    backend = FlashAttention3Backend(asked)
    descriptor = BatchDescriptor.decode(4)
    with pytest.raises(CaptureError, match=r"call allocate\(\) first"):
        backend.schedule(metadata_of(asked, descriptor, 4))
    backend.allocate()
    q = torch.zeros(4, 8, 64, dtype=BF16)
    with pytest.raises(CaptureError, match="expected a schedule for"):
        backend.run(layer_of(asked), q, metadata_of(asked, descriptor, 4), torch.empty_like(q))
    for _ in range(2):
        step(backend, metadata_of(asked, descriptor, 4), q, [layer_of(asked)])
    assert [kind for kind, _ in fa3] == ["schedule", "run"] * 2
    backend.schedule(metadata_of(asked, BatchDescriptor.decode(2), 2))
    with pytest.raises(CaptureError, match=r"expected a schedule for decode\[4\], got one for decode\[2\]"):
        backend.run(layer_of(asked), q, metadata_of(asked, descriptor, 4), torch.empty_like(q))


def test_flash_attn3_splits_fit_their_budget() -> None:
    spec = AttentionSpec(32, 8, 128, BF16)
    backend = FlashAttention3Backend(context(spec, page_size=16, max_seq_len=131072))
    assert backend.num_splits(BatchDescriptor.decode(1), spec) == MAX_SPLITS
    assert backend.num_splits(BatchDescriptor.decode(256), spec) == MAX_SPLITS
    mixed = BatchDescriptor.mixed(2048, 256)
    splits = backend.num_splits(mixed, spec)
    assert 1 < splits < MAX_SPLITS
    assert splits * 2048 * 32 * 129 * 4 <= WORKSPACE_BYTES < (splits + 1) * 2048 * 32 * 129 * 4
    assert backend.num_splits(BatchDescriptor.mixed(1 << 18, 256), spec) == 1
    short = FlashAttention3Backend(context(spec, page_size=16, max_seq_len=256))
    assert short.num_splits(BatchDescriptor.decode(1), spec) == 4
    invariant = FlashAttention3Backend(context(spec, page_size=16, max_seq_len=4096, batch_invariant=True))
    assert invariant.num_splits(BatchDescriptor.decode(1), spec) == 1


@pytest.mark.parametrize(("page_size", "tokens", "padded"), [(16, 32, False), (64, 8, False), (64, 32, True)])
def test_flash_attn3_keeps_tma_away_from_page_tails(fa3: Calls, page_size: int, tokens: int, padded: bool) -> None:
    asked = context(page_size=page_size)
    backend = FlashAttention3Backend(asked)
    backend.allocate()
    metadata = metadata_of(asked, BatchDescriptor.mixed(tokens, 4), live=3)
    step(backend, metadata, torch.zeros(tokens, 8, 64, dtype=BF16), [layer_of(asked)])
    assert [call["cache_leftpad"] is not None for _, call in fa3] == [padded, padded]
    if padded:
        assert not fa3[1][1]["cache_leftpad"].any()


@pytest.mark.parametrize(
    "descriptor", [BatchDescriptor.decode(4), BatchDescriptor.decode(2, 3), BatchDescriptor.mixed(16, 4)], ids=str
)
def test_flash_attn3_quantises_queries(fa3: Calls, descriptor: BatchDescriptor, rng: torch.Generator) -> None:
    asked = context(kv_dtype=torch.float8_e4m3fn, max_query_len=3)
    backend = FlashAttention3Backend(asked)
    backend.allocate()
    live = 3
    q = (torch.randn(descriptor.padded_tokens, 8, 64, generator=rng) * 100).to(BF16)
    q[0, 4:] = 0.0
    q[live:] = math.nan
    k_scale = torch.tensor([0.5, 2.0])
    step(backend, metadata_of(asked, descriptor, live), q, [layer_of(asked, k_scale=k_scale, v_scale=torch.ones(1))])
    run = fa3[-1][1]
    assert run["q"].dtype == torch.float8_e4m3fn
    assert run["k_descale"].tolist() == [[0.5, 2.0]] * descriptor.padded_reqs
    assert run["v_descale"].shape == run["q_descale"].shape == (descriptor.padded_reqs, 2)
    scales = run["q_descale"]
    assert torch.equal(scales.log2(), scales.log2().round()), "powers of two"
    starts = metadata_of(asked, descriptor, live).query_start_loc.tolist()
    stored = run["q"].float().view(-1, 2, 4, 64)
    assert not stored.isnan().any()
    for row in range(descriptor.padded_reqs):
        here = slice(starts[row], starts[row + 1])
        back, want = stored[here] * scales[row][:, None, None], q[here].float().view(-1, 2, 4, 64)
        tolerance = want.abs() * 2**-4 + scales[row][:, None, None] * 2**-9
        assert ((back - want).abs() <= tolerance).all()


def test_flash_attn2_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []

    def flash_attn_with_kvcache(q, k, v, **kwargs):
        calls.append(("decode", {"q": q} | kwargs))
        return torch.full(q.shape, math.nan, dtype=q.dtype), torch.ones(q.shape[0], q.shape[2], q.shape[1])

    def flash_attn_varlen_func(q, k, v, starts, kv_starts, max_q, max_k, **kwargs):
        calls.append(("mixed", {"kv_starts": kv_starts, "max_q": max_q, "max_k": max_k} | kwargs))
        return torch.ones_like(q), torch.ones(q.shape[1], q.shape[0]), None

    install(
        monkeypatch,
        "flash_attn",
        flash_attn_with_kvcache=flash_attn_with_kvcache,
        flash_attn_varlen_func=flash_attn_varlen_func,
    )
    asked = context(WINDOWED)
    backend = FlashAttention2Backend(asked)
    backend.allocate()
    q = torch.zeros(4, 8, 64, dtype=BF16)
    out, _ = step(backend, metadata_of(asked, BatchDescriptor.decode(4), 0), q, [layer_of(asked)])
    assert not out.any()
    kind, call = calls[-1]
    assert (kind, call["num_splits"], call["window_size"], call["q"].shape) == ("decode", 0, (6, 0), (4, 1, 8, 64))
    out, _ = step(backend, metadata_of(asked, BatchDescriptor.mixed(4, 2), 3), q, [layer_of(asked)])
    assert out[:3].all()
    assert not out[3:].any()
    kind, call = calls[-1]
    assert (kind, call["max_q"], call["max_k"], call["kv_starts"].tolist()) == ("mixed", 4, 1024, [0, 5, 10])
    invariant = FlashAttention2Backend(context(WINDOWED, batch_invariant=True))
    invariant.allocate()
    step(invariant, metadata_of(asked, BatchDescriptor.decode(4), 0), q, [layer_of(asked)])
    assert calls[-1][1]["num_splits"] == 1
    assert "has graph support UNIFORM" in str(backend.why_not_graph(BatchDescriptor.mixed(4, 2)))


class FakeWrapper:
    """A wrapper of FlashInfer, as far as its host side goes."""

    log: list[tuple[str, Any]]
    layout = (1, 2, 3)

    def __init__(self, workspace, kv_layout, **options):
        self.workspace, self.kv_layout, self.options = workspace, kv_layout, options
        self._int_workspace_buffer, self._pin_memory_int_workspace_buffer = torch.zeros(1), torch.zeros(1)
        self.log.append(("make", self))

    def plan(self, *args, **kwargs):
        self._plan_info = self.layout
        self.log.append(("plan", ([a.clone() if isinstance(a, torch.Tensor) else a for a in args], kwargs, args)))
        if "paged_kv_indptr_buffer" in self.options:
            self.options["paged_kv_indptr_buffer"].copy_(args[0])

    def run(self, q, cache, return_lse):
        self.log.append(("run", (q, cache)))
        return q * 2, torch.ones(q.shape[:2])


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    log: list[tuple[str, Any]] = []
    decode = type("Decode", (FakeWrapper,), {"log": log})
    prefill = type("Prefill", (FakeWrapper,), {"log": log})
    install(
        monkeypatch,
        "flashinfer",
        BatchDecodeWithPagedKVCacheWrapper=decode,
        BatchPrefillWithPagedKVCacheWrapper=prefill,
    )
    for name in ("wait", "__exit__"):
        real = getattr(StagingSlot, name)
        monkeypatch.setattr(
            StagingSlot, name, lambda self, *a, _name=name, _real=real: (log.append((_name, None)), _real(self, *a))[1]
        )
    monkeypatch.setattr("graphrt.backends.flashinfer._SMALLEST_WORKSPACE", 1 << 10)
    return log


def batch_of(seq_lens: list[int], page_size: int, query_lens: list[int] | None = None) -> Batch:
    counts = [-(-n // page_size) for n in seq_lens]
    indptr = torch.tensor([0, *counts]).cumsum(0).tolist()
    return Batch.of(
        row_ids=range(len(seq_lens)), seq_lens=seq_lens, query_lens=query_lens, page_indptr=indptr,
        page_ids=range(1, indptr[-1] + 1),
    )  # fmt: skip


def test_flashinfer_plans_on_the_host_and_lists_pages_on_the_device(flashinfer: list[tuple[str, Any]]) -> None:
    asked = context(page_size=4)
    backend = FlashInferBackend(asked)
    backend.allocate()
    four, two = BatchDescriptor.decode(4), BatchDescriptor.decode(2)
    for descriptor in (four, two, four):
        backend.plan_capture(descriptor)
    wrappers = [x for kind, x in flashinfer if kind == "make"]
    assert len(wrappers) == 2, "one per size, made once"
    for name in ("workspace", "_int_workspace_buffer", "_pin_memory_int_workspace_buffer"):
        assert getattr(wrappers[0], name) is getattr(wrappers[1], name), "shared"
    assert all(w.options["use_cuda_graph"] and w.options["use_tensor_cores"] for w in wrappers)
    flashinfer.clear()
    backend.plan_replay(four, batch_of([9, 4, 1], 4))
    assert [kind for kind, _ in flashinfer] == ["wait", "plan", "__exit__"], "guarded before and behind the upload"
    arguments, options, originals = flashinfer[1][1]
    indptr, indices, last_page_len = arguments[:3]
    assert all(x.device.type == "cpu" for x in originals[:3])
    assert indptr.tolist() == [0, 3, 4, 5, 6], "the pad row has one page"
    assert last_page_len.tolist() == [1, 4, 1, 1]
    assert indices.numel() == 0, "page ids are the refresh's"
    assert arguments[3:] == [8, 2, 64, 4]
    assert options["window_left"] == -1
    metadata = metadata_of(asked, four, 3)
    q = torch.ones(4, 8, 64, dtype=BF16)
    out, lse = step(backend, metadata, q, [layer_of(asked)])
    assert backend.tensors()["indices"][:6].tolist() == [0, 1, 2, 4, 8, 12], "rows of the table, four columns each"
    assert (out[:3] == 2).all()
    assert not out[3:].any()
    assert lse[:3].unique().tolist() == pytest.approx([math.log(2.0)])
    assert (lse[3:] == -math.inf).all()
    backend.close()
    assert backend.tensors() == {}


def test_flashinfer_refuses_a_plan_that_lies_elsewhere(
    flashinfer: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FlashInferBackend(context(page_size=4))
    descriptor = BatchDescriptor.decode(2)
    with pytest.raises(CaptureError, match=r"call allocate\(\) first"):
        backend.plan_capture(descriptor)
    backend.allocate()
    backend.plan_capture(descriptor)
    backend.plan_replay(descriptor, batch_of([3, 3], 4))
    monkeypatch.setattr(FakeWrapper, "layout", (1, 2, 4))
    with pytest.raises(ReplayError, match=r"expected the layout \(1, 2, 3\) of the captured plan, got \(1, 2, 4\)"):
        backend.plan_replay(descriptor, batch_of([3, 3], 4))


def test_flashinfer_runs_mixed_batches_eagerly(flashinfer: list[tuple[str, Any]]) -> None:
    asked = context(page_size=4, layout=KVLayout.HND)
    backend = FlashInferBackend(asked)
    backend.allocate()
    descriptor = BatchDescriptor.mixed(16, 4)
    assert "has graph support SINGLE_TOKEN" in str(backend.why_not_graph(descriptor))
    backend.plan_capture(descriptor)
    backend.plan_replay(descriptor, batch_of([9, 2], 4, [1, 2]))
    wrapper, (arguments, options, _) = next(x for k, x in flashinfer if k == "make"), flashinfer[-2][1]
    assert wrapper.kv_layout == "HND"
    assert [x.tolist() for x in arguments[:2]] == [[0, 1, 3], [0, 3, 4]]
    assert arguments[2].shape == backend.tensors()["indices"].shape
    assert options["causal"]
    q = torch.ones(16, 8, 64, dtype=BF16)
    out, lse = step(backend, metadata_of(asked, descriptor, 3), q, [layer_of(asked)])
    ran, (k, _) = flashinfer[-1][1]
    assert ran.shape == (3, 8, 64), "the real tokens"
    assert k.shape == (3, 2, 4, 64), "heads before tokens"
    assert (out[:3] == 2).all()
    assert not out[3:].any()
    assert (lse[3:] == -math.inf).all()


def test_flashinfer_folds_scales_into_queries_and_output(flashinfer: list[tuple[str, Any]]) -> None:
    asked = context(page_size=4, kv_dtype=torch.float8_e5m2)
    backend = FlashInferBackend(asked)
    backend.allocate()
    descriptor = BatchDescriptor.decode(2)
    backend.plan_capture(descriptor)
    layer = layer_of(asked, k_scale=torch.tensor([0.5, 4.0]), v_scale=torch.tensor([3.0]))
    q = torch.ones(2, 12, 64, dtype=BF16)[:, :8]
    out, _ = step(backend, metadata_of(asked, descriptor, 2), q, [layer])
    given, options = flashinfer[-1][1][0], flashinfer[-3][1][1]
    assert (options["q_data_type"], options["o_data_type"]) == (BF16, torch.float16)
    assert given[:, :4].unique().tolist() == [0.5]
    assert given[:, 4:].unique().tolist() == [4.0]
    assert q.unique().tolist() == [1.0], "the model's queries are left alone"
    assert out[:, :4].unique().tolist() == [3.0]
    assert out[:, 4:].unique().tolist() == [24.0]


@pytest.mark.gpu
@pytest.mark.parametrize("feature", ["plain", "mixed", "mixed-large-pages"])
@pytest.mark.parametrize("cls", PEERS, ids=lambda c: c.name)
def test_probes_decide_what_the_class_states(cls: type[AttentionBackend], feature: str) -> None:
    """NaN behind the last token of an owned page, and the fill of pad rows, against the class's statements."""
    asked: Feature = FEATURES[feature]
    rig = make_rig(cls, asked, torch.device("cuda", 0))
    rows = [(rig.context.kv.page_size + 1, 1), (2, 1)]
    rig.write([rig.sequence(*row) for row in rows])
    out = rig.eager()[0]
    assert not out[2:].any(), f"{cls.name}: seq_len_fill={cls.seq_len_fill} must give zeros in pad rows"
    assert bool(out[:2].isfinite().all()) == cls.nan_safe_tail, f"{cls.name}: nan_safe_tail={cls.nan_safe_tail}"
    rig.close()
