"""Selection among attention backends, and the two backends that need no package, called as a runtime calls them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from graphrt.backends import registry
from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import BackendContext, Capabilities, GraphSupport, listing
from graphrt.backends.registry import backend_names, register_backend, select_backend, standings
from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.backends.triton import TritonBackend
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.attention import operators, work_list
from graphrt.kernels.attention.native import NATIVE_PAGE_MULTIPLE
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.errors import CaptureError, ConfigError, UnsupportedError
from graphrt.kernels.library import INTERPRETER_AVAILABLE
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec

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


def test_cpu_selects_torch_reference() -> None:
    cls, explanation = select_backend(context())
    assert cls is TorchReferenceBackend
    assert explanation.startswith(
        "torch_reference: first in order of preference that supports device cpu; not triton ("
    )


def test_cuda_selects_triton_else_torch_reference() -> None:
    """Selection does not touch a device."""
    assert select_backend(context(device=CUDA))[0] is TritonBackend
    odd = AttentionSpec(4, 2, 520, torch.float32)
    cls, explanation = select_backend(context(odd, device=CUDA))
    assert cls is TorchReferenceBackend
    assert "not triton (head_dim 520: supports 1 to 512)" in explanation


@pytest.mark.skipif(not INTERPRETER_AVAILABLE, reason="needs TRITON_INTERPRET=1")
def test_triton_on_cpu_needs_its_name() -> None:
    assert TritonBackend.unsupported_reasons(context()) == []
    assert select_backend(context(), "triton") == (TritonBackend, "triton: chosen by name")


def test_triton_on_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphrt.backends.triton.INTERPRETER_AVAILABLE", False)
    with pytest.raises(UnsupportedError, match="device cpu: needs the Triton interpreter; set TRITON_INTERPRET=1"):
        select_backend(context(), "triton")


def test_unknown_backend_name_raises() -> None:
    with pytest.raises(ConfigError, match=r"backend: expected one of triton, .*torch_reference, got 'tritn'"):
        select_backend(context(), "tritn")


def test_named_backend_raises_with_every_reason(third_party: type[AttentionBackend]) -> None:
    refused = context(SPEC, WINDOWED, device=CUDA, max_query_len=5)
    with pytest.raises(UnsupportedError) as caught:
        select_backend(refused, "third_party")
    for reason in (
        "device cuda: runs on cpu only",
        "page_size 4: supports 16",
        "layout NHD: supports HND",
        "KV dtype torch.float32: supports torch.float16",
        "dtype torch.float32: supports torch.float16",
        "head_dim 16: supports 64, 128",
        "sliding_window 3: not supported",
        "logits_softcap 5.0: not supported",
        "query_len 5: decodes at most 2 tokens per request",
        "mixed batches: not supported, so prompts cannot run",
    ):
        assert reason in str(caught.value)


def test_unsupported_reasons_of_triton() -> None:
    odd = AttentionSpec(4, 2, 520, torch.float16)
    assert TritonBackend.unsupported_reasons(context(odd, device=CUDA, kv_dtype=torch.bfloat16, max_query_len=17)) == [
        "head_dim 520: supports 1 to 512",
        "dtype torch.float16 with KV dtype torch.bfloat16: must be equal, or the cache fp8",
        "query_len 17: decodes at most 16 tokens per request",
    ]


def test_head_dims_of_triton() -> None:
    served = TritonBackend.capabilities.head_dims
    for head_dim in range(-8, 1025):
        refusal = contextlib.nullcontext() if head_dim in served else pytest.raises(UnsupportedError)
        with refusal:
            AttentionPlan.decode(1, num_q_heads=1, num_kv_heads=1, head_dim=head_dim, dtype=torch.float16, num_sms=1)
    assert listing(served) == "1 to 512"
    assert listing(tuple(range(16, 257, 8))) == "multiples of 8 from 16 to 256"
    for few in ((64, 128, 256), (8, 16, 24, 32), (64, 80, 96, 128, 256), (4, 12, 20, 28, 36), (), ("NHD", "HND") * 3):
        assert listing(few) == ", ".join(map(str, few))


def test_device_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"BackendContext\.device: expected device, got 'cpu'; make"):
        context(device="cpu")  # type: ignore[arg-type]  # what is tested


def test_no_supported_backend_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = context(device=torch.device("meta"))
    with pytest.raises(
        UnsupportedError,
        match=r"no backend supports this model on meta: triton \(device meta: .*torch_reference \(device meta: ",
    ):
        select_backend(meta)


def test_standings_list_every_backend(third_party: type[AttentionBackend]) -> None:
    explained = {standing.name: standing.unsupported_reasons for standing in standings(context(device=CUDA))}
    assert list(explained) == backend_names()
    assert explained["triton"] == []
    assert explained["torch_reference"] == []
    assert "device cuda: runs on cpu only" in explained["third_party"]


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


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    good = EntryPoint("third_party", "third_party_module:Backend", registry.ENTRY_POINT_GROUP)
    missing = EntryPoint("missing", "no_such_module:Backend", registry.ENTRY_POINT_GROUP)
    misnamed = EntryPoint("misnamed", "third_party_module:Backend", registry.ENTRY_POINT_GROUP)
    installed = [good, missing, misnamed]
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "entry_points", lambda group: installed if group == "graphrt.backends" else [])
    module = type(registry)("third_party_module")
    module.Backend = ThirdParty  # type: ignore[attr-defined]  # a module made up for the test
    monkeypatch.setitem(__import__("sys").modules, "third_party_module", module)
    assert backend_names() == [*OURS, "third_party", "missing", "misnamed", "torch_reference"]
    half = AttentionSpec(4, 2, 64, torch.float16)
    kv = KVCacheSpec(1, 2, 64, page_size=16, dtype=torch.float16, layout=KVLayout.HND)
    assert select_backend(BackendContext((half,), (kv,), CPU, 8, 64, 32, mixed_batches=False))[0] is ThirdParty
    with pytest.raises(ConfigError, match="backend missing: no_such_module:Backend cannot be imported"):
        select_backend(context(), "missing")
    with pytest.raises(ConfigError, match="backend misnamed: expected third_party_module:Backend to be an Attention"):
        select_backend(context(), "misnamed")


DECODE, SPECULATIVE, MIXED = BatchDescriptor.decode(4), BatchDescriptor.decode(4, 3), BatchDescriptor.mixed(12, 4)


def test_graph_support() -> None:
    for descriptor in (DECODE, SPECULATIVE, MIXED):
        assert TorchReferenceBackend(context()).graph_unsupported_reason(descriptor) is None
        assert TritonBackend(context()).graph_unsupported_reason(descriptor) is None
        on_cuda = TorchReferenceBackend(context(device=CUDA)).graph_unsupported_reason(descriptor)
        assert "reads sequence lengths on the host" in str(on_cuda)
    uniform = ThirdParty(context())
    assert uniform.graph_unsupported_reason(DECODE) is None
    assert "has graph support UNIFORM" in str(uniform.graph_unsupported_reason(MIXED))
    assert uniform.graph_unsupported_reason(SPECULATIVE) is None


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


def expected(q: torch.Tensor, layer: AttentionLayer, metadata: StepMetadata) -> torch.Tensor:
    """Attention in float64, token by token, with the options of WINDOWED."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    starts = metadata.query_start_loc.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        pages = metadata.block_tables[0][row].long()
        keys, values = (c[pages].flatten(0, 1).double().cpu() for c in (layer.k_cache, layer.v_cache))
        for token in range(starts[row], starts[row + 1]):
            end = seq_len - (starts[row + 1] - token) + 1
            for head in range(4 if end > 0 else 0):
                seen = slice(max(0, end - 3), end)
                logits = 5.0 * torch.tanh(keys[seen, head // 2] @ q[token, head].double().cpu() * 0.5 / 5.0)
                out[token, head] = torch.softmax(logits, 0) @ values[seen, head // 2]
    return out


BACKENDS = [
    pytest.param("torch_reference", CPU, id="torch_reference"),
    pytest.param("torch_reference", CUDA, id="torch_reference-cuda", marks=pytest.mark.gpu),
    pytest.param("triton", CUDA, id="triton-cuda", marks=pytest.mark.gpu),
]
if INTERPRETER_AVAILABLE:
    BACKENDS.append(pytest.param("triton", CPU, id="triton-interpreter"))


@pytest.mark.parametrize("descriptor", [DECODE, SPECULATIVE, MIXED], ids=str)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_run_of_each_backend(name: str, device: torch.device, descriptor: BatchDescriptor) -> None:
    """Calls every method in order, with garbage in `tensors()`, except counters, before each step."""
    cls, _ = select_backend(context(WINDOWED, device=device, max_query_len=3), name)
    backend = cls(context(WINDOWED, device=device, max_query_len=3))
    q, layer, metadata = make_step(descriptor, device)
    backend.allocate()
    backend.plan_capture(descriptor)
    for _ in range(2):
        for tensor_name, tensor in backend.tensors().items():
            if tensor_name != "counters":
                tensor.fill_(float("nan") if tensor.is_floating_point() else -(1 << 30))
        out = torch.full_like(q, 777.0)
        backend.schedule(metadata)
        backend.run(layer, q, metadata, out)
        torch.testing.assert_close(out.cpu().double(), expected(q, layer, metadata), rtol=0, atol=1e-5)
    if "counters" in backend.tensors():
        assert not backend.tensors()["counters"].any(), "counters are 0 between runs"
    backend.close()
    assert backend.tensors() == {}


@pytest.mark.parametrize(("name", "device"), [b for b in BACKENDS if "triton" in str(b.id)])
def test_triton_runs_its_kernels(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU through the interpreter, never by the torch reference of the ops."""
    backend = TritonBackend(context(WINDOWED, device=device))

    launched: list[str] = []

    class Recorded:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __call__(self, *args: Any, **named: Any) -> Any:
            launched.append(self.name)
            return self.kernel(*args, **named)

    for module, launcher, name in (
        (work_list, "_launch", "schedule_kernel"),
        (operators, "_launch_kernel", "attend_kernel"),
    ):
        monkeypatch.setattr(module, launcher, Recorded(name, getattr(module, launcher)))
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
    """With a work list per kind of layer; a step before `allocate()` raises before any launch."""
    backend = TritonBackend(context(SPEC, WINDOWED, SPEC, max_query_len=2))
    q, layer, metadata = make_step(DECODE, CPU)
    for call in (lambda: backend.schedule(metadata), lambda: backend.run(layer, q, metadata, torch.empty_like(q))):
        with pytest.raises(CaptureError, match=r"backend triton: its workspace is not allocated; call allocate\(\)"):
            call()
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
