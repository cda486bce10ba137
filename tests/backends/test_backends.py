"""Selection among attention backends, and the two backends that need no package, called as a runtime calls them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphrt.backends import registry
from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import BackendContext, Capabilities, GraphSupport, listing
from graphrt.backends.registry import backend_names, register_backend, select_backend
from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.backends.triton import TritonBackend
from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import GraphReport
from graphrt.capture.op_trace import OpTrace
from graphrt.engine.stats import Stats
from graphrt.engine.traffic import FORCED
from graphrt.kernels.attention import operators, work_list
from graphrt.kernels.attention.arguments import HEAD_DIMS
from graphrt.kernels.attention.native import NATIVE_PAGE_MULTIPLE
from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.library import INTERPRETER_AVAILABLE
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec
from graphrt.testing.backend_features import FLAGS
from tests.support.toy import make_rig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OURS = ["triton", "flash_attn3", "flash_attn2", "flashinfer"]
SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
WINDOWED = AttentionSpec(4, 2, 16, torch.float32, sliding_window=3, logits_softcap=5.0, softmax_scale=0.5)


def context(
    *attention: AttentionSpec, device: torch.device = CPU, kv_dtype: torch.dtype | None = None, max_query_len: int = 1
) -> BackendContext:
    layers = attention or (SPEC,)
    first = layers[0]
    kv = KVCacheSpec(len(layers), first.num_kv_heads, first.head_dim, page_size=4, dtype=kv_dtype or first.dtype)
    return BackendContext(layers, (kv,), device, 8, 64, 32, max_query_len)


class ThirdParty(TorchReferenceBackend):
    name = "third_party"
    capabilities = Capabilities(
        devices=("cpu",),
        dtypes=(torch.float16,),
        kv_dtypes=(torch.float16,),
        head_dims=(64, 128),
        page_sizes=(16,),
        layouts=(KVLayout.HND,),
        max_query_len=2,
        sliding_window=False,
        logits_softcap=False,
        mixed=False,
    )
    graph_support = GraphSupport.UNIFORM


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> type[AttentionBackend]:
    monkeypatch.setattr(registry, "_registered", {})
    return register_backend(ThirdParty)


def test_cuda_selects_triton_and_cpu_torch_reference() -> None:
    """Selection does not touch a device."""
    cls, explanation = select_backend(context())
    assert cls is TorchReferenceBackend
    assert explanation.startswith("torch_reference: first in order of preference that supports device cpu")
    assert "not triton" not in explanation
    assert select_backend(context(device=CUDA))[0] is TritonBackend
    odd = AttentionSpec(4, 2, 520, torch.float32)
    cls, explanation = select_backend(context(odd, device=CUDA))
    assert cls is TorchReferenceBackend
    assert "not triton (head_dim 520: supports 1 to 512)" in explanation


def test_triton_on_cpu_needs_its_name_and_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"backend: expected one of triton, .*torch_reference, got 'tritn'"):
        select_backend(context(), "tritn")
    monkeypatch.setattr("graphrt.backends.triton.INTERPRETER_AVAILABLE", True)
    assert TritonBackend.unsupported_reasons(context()) == []
    assert select_backend(context(), "triton") == (TritonBackend, "triton: chosen by name")
    monkeypatch.setattr("graphrt.backends.triton.INTERPRETER_AVAILABLE", False)
    with pytest.raises(UnsupportedError, match="device cpu: needs the Triton interpreter; set TRITON_INTERPRET=1"):
        select_backend(context(), "triton")


def test_named_backend_raises_with_every_reason(third_party: type[AttentionBackend]) -> None:
    refused = context(SPEC, WINDOWED, device=CUDA, max_query_len=5)
    reasons = third_party.unsupported_reasons(refused)
    assert len(reasons) == 10
    with pytest.raises(UnsupportedError) as caught:
        select_backend(refused, "third_party")
    assert f"backend third_party: does not support this model and device: {'; '.join(reasons)}; choose" in str(
        caught.value
    )


def test_head_dims_of_triton() -> None:
    served = TritonBackend.capabilities.head_dims
    for head_dim in range(-8, 1025):
        refusal = contextlib.nullcontext() if head_dim in served else pytest.raises(UnsupportedError)
        with refusal:
            AttentionPlan.decode(1, num_q_heads=1, num_kv_heads=1, head_dim=head_dim, dtype=torch.float16, num_sms=1)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (tuple(range(1, 513)), "1 to 512"), ((16, 32, 48, 64, 80), "multiples of 16 from 16 to 80"),
        ((32, 48, 64, 80, 96), "multiples of 16 from 32 to 96"), ((16, 32, 48, 64), "16, 32, 48, 64"),
        ((8, 24, 40, 56, 72), "8, 24, 40, 56, 72"), ((16, 32, 64, 128, 256), "16, 32, 64, 128, 256"),
        (("a", "b", "c", "d", "e"), "a, b, c, d, e"), ((), ""), ((5, 5, 5, 5, 5), "5, 5, 5, 5, 5"),
        ((5, 4, 3, 2, 1), "5, 4, 3, 2, 1"), ((1, 2, 3, 4, 5, 7), "1, 2, 3, 4, 5, 7"),
    ],
    ids=str,
)  # fmt: skip
def test_listing(values: tuple, text: str) -> None:
    assert listing(values) == text


def test_registered_backends_rank_before_torch_reference(third_party: type[AttentionBackend]) -> None:
    assert backend_names() == [*OURS, "third_party", "torch_reference"]
    assert register_backend(third_party) is third_party, "registering the same class again changes nothing"
    impostor = type("Impostor", (TorchReferenceBackend,), {"name": "third_party"})
    with pytest.raises(ConfigError, match="the name 'third_party' is taken"):
        register_backend(impostor)
    with pytest.raises(ConfigError, match="the name 'torch_reference' is taken"):
        register_backend(TorchReferenceBackend)
    with pytest.raises(ConfigError, match="expected a subclass of AttentionBackend"):
        register_backend(int)  # type: ignore[arg-type]  # what is tested


DECODE, SPECULATIVE, MIXED = BatchDescriptor.decode(4), BatchDescriptor.decode(4, 3), BatchDescriptor.mixed(12, 4)
SUPPORT = {  # what each of these three needs
    GraphSupport.NEVER: ("SINGLE_TOKEN", "UNIFORM", "ALWAYS"),
    GraphSupport.SINGLE_TOKEN: (None, "UNIFORM", "ALWAYS"),
    GraphSupport.UNIFORM: (None, None, "ALWAYS"),
    GraphSupport.ALWAYS: (None, None, None),
}


@pytest.mark.parametrize("support", list(GraphSupport), ids=lambda x: x.name)
def test_graph_support(support: GraphSupport) -> None:
    backend = type("Supporting", (ThirdParty,), {"graph_support": support})(context())
    for descriptor, need in zip((DECODE, SPECULATIVE, MIXED), SUPPORT[support], strict=True):
        reason = f"backend third_party has graph support {support.name}, {descriptor} needs {need}"
        assert backend.graph_unsupported_reason(descriptor) == (None if need is None else reason)
        assert TorchReferenceBackend(context()).graph_unsupported_reason(descriptor) is None
        assert TritonBackend(context()).graph_unsupported_reason(descriptor) is None
        on_cuda = TorchReferenceBackend(context(device=CUDA)).graph_unsupported_reason(descriptor)
        assert "reads sequence lengths on the host" in str(on_cuda)


@pytest.mark.parametrize("name", ["triton", "torch_reference"])
def test_capabilities_of_our_backends(name: str) -> None:
    cls = registry.backend_class(name)
    have, dtypes = cls.capabilities, {torch.float16, torch.bfloat16, torch.float32}
    assert all(value is True for value in (getattr(have, flag) for flag in FLAGS))
    of_name = {"triton": (HEAD_DIMS, 16), "torch_reference": (None, 1024)}
    assert (have.head_dims, have.max_query_len) == of_name[name]
    assert (set(have.devices), set(have.layouts), have.page_sizes) == ({"cpu", "cuda"}, set(KVLayout), None)
    assert (set(have.dtypes), set(have.kv_dtypes)) == (dtypes, {*dtypes, *FP8_DTYPES})
    assert (cls.graph_support, cls.seq_len_fill) == (GraphSupport.ALWAYS, 0)


def test_defaults_of_a_backend_and_its_context() -> None:
    poor = ThirdParty.capabilities
    assert not any(getattr(poor, flag) for flag in FLAGS)
    smallest = BackendContext((SPEC,), context().kv_groups, CPU, 1, 1, 1)
    assert (smallest.group_of, smallest.max_query_len, smallest.batch_invariant) == ((0,), 1, False)
    assert (smallest.mixed_batches, smallest.prefill, smallest.max_encoder_len) == (True, False, 0)
    assert [replace(smallest, max_seq_len=n).max_pages(0) for n in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert (AttentionBackend.seq_len_fill, AttentionBackend.quantizes_queries, AttentionBackend.decode_len) == (0, 0, 0)
    made = ThirdParty(smallest)
    assert (made.tensors(), made.held(), made.plans_on_host()) == ({}, {}, False)
    assert (made.unavailable(), made.prefill_class()) == (None, None)


@pytest.mark.parametrize("fill", [0, 1, 3])
def test_padding_requests_have_seq_len_fill(monkeypatch: pytest.MonkeyPatch, fill: int) -> None:
    monkeypatch.setattr(TorchReferenceBackend, "seq_len_fill", fill)
    rig = make_rig(CPU, decode_sizes=(4,), fill=0.0)
    batch = Batch(req_indices=[0], seq_lens=[1], tokens=[3], page_indptr=[0, 1], page_ids=[5])
    assert rig.manager.replay(batch).tokens().tolist() == [int(rig.model.oracle([3]).argmax())]
    assert rig.manager.buffers.seq_lens[:4].tolist() == [1, fill, fill, fill]


def make_step(descriptor: BatchDescriptor, device: torch.device) -> tuple[torch.Tensor, AttentionLayer, StepMetadata]:
    """A step with three real requests and a padding request: random q and cache, pages 1 to 6."""
    torch.manual_seed(1)
    query_len = descriptor.query_len
    query_lens = [query_len] * 4 if query_len else [1, 6, 3, 0]
    seq_lens = [5, 8, 3, 0]
    k_cache, v_cache = torch.randn(2, 7, 4, 2, 16)
    block_table = torch.tensor([[4, 2, 0], [1, 6, 0], [5, 0, 0], [0, 0, 0]])
    metadata = StepMetadata(
        descriptor=descriptor,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
        block_tables=(block_table.to(device, torch.int32),),
        slot_mappings=(torch.empty(0, device=device),),
        encoder_lens=torch.zeros(len(seq_lens), dtype=torch.int32, device=device),
        positions=torch.empty(0, device=device),
        max_seq_len=12,
    )
    q = torch.randn(descriptor.padded_tokens, 4, 16)
    layer = AttentionLayer(0, WINDOWED, k_cache.to(device), v_cache.to(device))
    return q.to(device), layer, metadata


TRITON_ON = [pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)]
if INTERPRETER_AVAILABLE:
    TRITON_ON.append(pytest.param(CPU, id="interpreter"))


@pytest.mark.parametrize("device", TRITON_ON)
def test_triton_runs_its_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU through the interpreter, never by the torch reference of the ops."""
    backend = TritonBackend(context(WINDOWED, device=device))
    launched: list[str] = []

    def recorded(name: str, kernel: Any) -> Any:
        return lambda *args, **named: (launched.append(name), kernel(*args, **named))[1]

    for module, launcher, name in (
        (work_list, "_launch", "schedule_kernel"),
        (operators, "_launch_kernel", "attend_kernel"),
    ):
        monkeypatch.setattr(module, launcher, recorded(name, getattr(module, launcher)))
    backend.allocate()
    for descriptor in (DECODE, MIXED):
        launched.clear()
        q, layer, metadata = make_step(descriptor, device)
        out = torch.full_like(q, 777.0)
        backend.schedule(metadata)
        backend.run(layer, q, metadata, out)
        backend.run(layer, q, metadata, out)
        assert launched == ["schedule_kernel", "attend_kernel", "attend_kernel"], "layers share the schedule"


def test_triton_allocates_its_workspace_once() -> None:
    """With a work list per kind of layer."""
    backend = TritonBackend(context(SPEC, WINDOWED, SPEC, max_query_len=2))
    assert backend.tensors() == {}
    backend.allocate()
    assert {name: t.dtype for name, t in backend.tensors().items()} == {
        "work_list_0": torch.int32,
        "work_list_1": torch.int32,
        "partial_out": torch.float32,
        "partial_lse": torch.float32,
        "counters": torch.int32,
    }
    backend.tensors()["counters"].fill_(3)
    backend.reset()
    assert not backend.tensors()["counters"].any()
    held = [weakref.ref(tensor) for tensor in backend.tensors().values()]
    backend.close()
    gc.collect()
    assert [reference() for reference in held] == [None] * 5
    assert backend.tensors() == {}
    backend.reset()


@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("invariant", [False, True])
def test_triton_buffers_fit_every_size_of_the_context(rows: int, invariant: bool) -> None:
    for page_size in (4, NATIVE_PAGE_MULTIPLE):
        made = context(SPEC, WINDOWED, max_query_len=3)
        made = replace(
            made,
            kv_groups=(replace(made.kv_groups[0], page_size=page_size),),
            batch_invariant=invariant,
            max_num_reqs=rows,
            max_num_tokens=3 * rows,
        )
        backend = TritonBackend(made)
        backend.allocate()
        sizes = {
            "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32, "kv_dtype": torch.float32,
            "num_sms": backend._num_sms, "batch_invariant": invariant,
        }  # fmt: skip
        native = page_size == NATIVE_PAGE_MULTIPLE
        plans = {BatchDescriptor.mixed(3 * rows, rows): AttentionPlan.varlen(rows, 3 * rows, **sizes)}
        for n, query_len in itertools.product(range(1, rows + 1), (1, 2, 3)):
            key = BatchDescriptor.decode(n, query_len)
            plans[key] = AttentionPlan.decode(n, query_len=query_len, native=native, **sizes)
        for window, key, lists in zip((0, 3), backend._keys, ("work_list_0", "work_list_1"), strict=True):
            assert (key.sliding_window, key.whole_tiles) == (window, native)
            assert {size: backend._plan(key, size) for size in plans} == plans
            assert backend._plan(key, BatchDescriptor.decode(1)) is backend._plan(key, BatchDescriptor.decode(1))
            assert backend.tensors()[lists].numel() == max(plan.work_list_words for plan in plans.values())
        needed = AttentionWorkspace.allocate(list(plans.values()), CPU)
        assert backend.tensors()["partial_out"].shape == needed.partial_out.shape
        assert backend.tensors()["counters"].shape == needed.counters.shape


def test_layers_with_equal_heads_and_window_share_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch per kind of layer; `query_start_loc` is passed in mixed batches only."""
    launched = []
    monkeypatch.setattr("graphrt.backends.triton.schedule_attention", lambda *a, **options: launched.append(options))
    backend = TritonBackend(context(SPEC, WINDOWED, replace(SPEC, softmax_scale=2.0)))
    backend.allocate()
    for descriptor in (DECODE, MIXED):
        metadata = make_step(descriptor, CPU)[2]
        launched.clear()
        backend.schedule(metadata)
        starts = metadata.query_start_loc if descriptor is MIXED else None
        assert launched == [
            {"query_start_loc": starts, "causal": True, "sliding_window": window, "attention_chunk_size": 0}
            for window in (0, 3)
        ]


def test_each_graph_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[OpTrace] = []
    close = OpTrace.close
    monkeypatch.setattr(OpTrace, "close", lambda tape: (closed.append(tape), close(tape))[1])
    rig = make_rig(CPU, capture=False)
    seen: list[GraphReport] = []

    def progress(report: GraphReport) -> None:
        seen.append(report)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rig.manager.capture(progress)
    assert (len(closed), rig.manager.state.value) == (3, "new")
    rig.manager.capture()
    assert [g.descriptor for g in rig.manager.stats().graphs] == list(rig.manager.descriptors)
    batch = Batch(req_indices=[0], seq_lens=[1], tokens=[3], page_indptr=[0, 1], page_ids=[5])
    assert rig.manager.replay(batch).tokens().tolist() == [int(rig.model.oracle([3]).argmax())]
    rig.manager.close()
    rig.manager.close()
    assert len(closed) == len({id(tape) for tape in closed}) == 3 + len(rig.manager.descriptors)


def test_counters_start_at_zero() -> None:
    stats = Stats("a recorder", "a backend", "a reason", "products")
    assert (stats.recorder, stats.backend) == ("a recorder", "a backend")
    assert (stats.backend_reason, stats.products) == ("a reason", "products")
    assert (stats.ring_waits, stats.real_tokens, stats.padded_tokens, stats.capture_seconds) == (0, 0, 0, 0.0)
    assert (stats.replays, stats.eager_steps, stats.graphs, stats.graph_bytes) == ({}, {}, (), 0)
    key = BatchDescriptor.decode(4)
    for tokens, reason, steps in ((3, "", 1), (3, "why", 1), (3, FORCED, 1), (2, "", 2)):
        stats.count(key, tokens, reason, steps)
    assert (stats.replays, stats.eager_steps) == ({key: 3}, {"why": 1})
    assert (stats.real_tokens, stats.padded_tokens, stats.pad_waste) == (13, 20, 0.35)
    stats.graphs = (GraphReport(key, 1.0, 100, 20, 5), GraphReport(key, 1.0, 3, 4, 5))
    assert stats.graph_bytes == 127
