"""Declared capabilities one at a time, registration, graph support, and lifetime of graphs and counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import BackendContext, Capabilities, GraphSupport, listing
from graphrt.backends.registry import backend_class, register_backend, select_backend
from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import GraphReport
from graphrt.capture.op_trace import OpTrace
from graphrt.engine.stats import Stats
from graphrt.kernels.attention.arguments import HEAD_DIMS
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.types import KVLayout
from graphrt.spec import AttentionSpec, KVCacheSpec
from tests.support.toy import make_rig

CPU = torch.device("cpu")
F16, F32 = torch.float16, torch.float32
ATTENTION = AttentionSpec(4, 2, 16, F16)
CONTEXT = BackendContext((ATTENTION,) * 2, (KVCacheSpec(2, 2, 16, 8, dtype=F16),), CPU, 4, 16, 20, max_query_len=3)
ABLE = Capabilities(
    devices=("cpu",), dtypes=(F16,), kv_dtypes=(F16,), head_dims=(8, 16), page_sizes=(8,), layouts=(KVLayout.NHD,),
    max_query_len=3, sliding_window=True, logits_softcap=True, mixed=True, alibi=True, sinks=True, lse=True,
    batch_invariant=True, kv_groups=True, v_head_dim=True, attention_chunk_size=True,
)  # fmt: skip


def backend(support: GraphSupport = GraphSupport.ALWAYS, **changes) -> type[AttentionBackend]:
    class Backend(AttentionBackend):
        name = "edges_backend"
        capabilities = replace(ABLE, **changes)
        graph_support = support

        def run(self, layer, q, metadata, out, *, sinks=None, lse=None) -> None:
            raise NotImplementedError

    return Backend


def layer(**options) -> BackendContext:
    """The context with a second layer that has other options."""
    return replace(CONTEXT, attention=(ATTENTION, replace(ATTENTION, **options)))


LACKING = {  # what the backend declares, what is asked of it, and the one reason against it
    "device": ({"devices": ("cuda", "xpu")}, CONTEXT, "device cpu: runs on cuda, xpu only"),
    "page_size": ({"page_sizes": (4, 16)}, CONTEXT, "page_size 8: supports 4, 16"),
    "layout": (
        {}, replace(CONTEXT, kv_groups=(replace(CONTEXT.kv_groups[0], layout=KVLayout.HND),)),
        "layout HND: supports NHD",
    ),
    "kv_dtype": ({"kv_dtypes": (F32,)}, CONTEXT, "KV dtype torch.float16: supports torch.float32"),
    "dtype": ({"dtypes": (F32,)}, CONTEXT, "dtype torch.float16: supports torch.float32"),
    "head_dim": ({"head_dims": (8, 32)}, CONTEXT, "head_dim 16: supports 8, 32"),
    "v_head_dim": (
        {"v_head_dim": False}, layer(v_head_dim=8), "v_head_dim 8: supports that of the keys, 16",
    ),
    "v_head_dims": ({}, layer(v_head_dim=24), "v_head_dim 24: supports 8, 16"),
    "groups": (
        {"kv_groups": False}, replace(CONTEXT, kv_groups=CONTEXT.kv_groups * 2, group_of=(0, 1)),
        "2 KV groups: supports one",
    ),
    "chunks": (
        {"attention_chunk_size": False}, layer(attention_chunk_size=3), "attention_chunk_size 3: not supported",
    ),
    "window": ({"sliding_window": False}, layer(sliding_window=1), "sliding_window 1: not supported"),
    "softcap": ({"logits_softcap": False}, layer(logits_softcap=0.5), "logits_softcap 0.5: not supported"),
    "alibi": ({"alibi": False}, layer(alibi_slopes=(0.0,) * 4), "alibi_slopes: not supported"),
    "sinks": ({"sinks": False}, layer(sinks=True), "sinks: not supported"),
    "query_len": ({"max_query_len": 2}, CONTEXT, "query_len 3: decodes at most 2 tokens per request"),
    "invariant": (
        {"batch_invariant": False}, replace(CONTEXT, batch_invariant=True), "batch_invariant: not supported",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_each_missing_capability_gives_one_reason(case: str) -> None:
    """With the capability, or if it is not needed, there is no reason."""
    changes, context, reason = LACKING[case]
    assert backend(**changes).unsupported_reasons(context) == [reason]
    if changes:
        assert backend().unsupported_reasons(context) == []
        if context is not CONTEXT:
            assert backend(**changes).unsupported_reasons(CONTEXT) == []
    wide = backend(head_dims=None, page_sizes=None, devices=("cuda", "cpu"), layouts=tuple(KVLayout))
    assert wide.unsupported_reasons(context) == []


def test_each_reason_is_listed_once() -> None:
    poor = backend(sliding_window=False, alibi=False, sinks=False, dtypes=(F32,))
    options = {"sliding_window": 5, "alibi_slopes": (1.0,) * 4, "alibi_sqrt": True, "sinks": True}
    context = replace(CONTEXT, attention=(replace(ATTENTION, **options), replace(ATTENTION, sinks=True)))
    assert poor.unsupported_reasons(context) == [
        "dtype torch.float16: supports torch.float32", "sliding_window 5: not supported",
        "alibi_slopes: not supported", "alibi_sqrt: not supported", "sinks: not supported",
    ]  # fmt: skip


SUPPORT = {  # which of decode[2], decode[2 x 2], decode[2 x 3], decode[2 x 4] and a mixed graph are captured
    GraphSupport.NEVER: (False, False, False, False, False),
    GraphSupport.SINGLE_TOKEN: (True, False, False, False, False),
    GraphSupport.UNIFORM: (True, True, True, True, False),
    GraphSupport.ALWAYS: (True, True, True, True, True),
}


@pytest.mark.parametrize("support", list(GraphSupport), ids=lambda x: x.name)
def test_graph_support_of_each_level(support: GraphSupport) -> None:
    made = backend(support)(CONTEXT)
    keys = [*(BatchDescriptor.decode(2, n) for n in (1, 2, 3, 4)), BatchDescriptor.mixed(8, 2)]
    reasons = [made.graph_unsupported_reason(key) for key in keys]
    assert tuple(reason is None for reason in reasons) == SUPPORT[support]
    if support is GraphSupport.NEVER:
        needs = ["SINGLE_TOKEN", "UNIFORM", "UNIFORM", "UNIFORM", "ALWAYS"]
        assert reasons == [
            f"backend edges_backend has graph support NEVER, {key} needs {need}"
            for key, need in zip(keys, needs, strict=True)
        ]


def test_torch_reference_captures_nothing_on_cuda() -> None:
    on_cuda = replace(CONTEXT, device=torch.device("cuda", 0))
    key = BatchDescriptor.decode(2)
    assert "reads sequence lengths on the host" in TorchReferenceBackend(on_cuda).graph_unsupported_reason(key)
    assert TorchReferenceBackend(CONTEXT).graph_unsupported_reason(key) is None


@pytest.mark.parametrize("name", ["triton", "torch_reference"])
def test_capabilities_of_built_in_backends(name: str) -> None:
    cls = backend_class(name)
    have = cls.capabilities
    for field in (
        "sliding_window",
        "logits_softcap",
        "mixed",
        "alibi",
        "alibi_sqrt",
        "sinks",
        "lse",
        "batch_invariant",
    ):
        assert getattr(have, field) is True, field
    of_name = {"triton": (HEAD_DIMS, 16), "torch_reference": (None, 1024)}
    assert (have.head_dims, have.max_query_len) == of_name[name]
    assert sorted(have.devices) == ["cpu", "cuda"]
    assert set(have.layouts) == set(KVLayout)
    assert have.page_sizes is None
    assert {F16, torch.bfloat16, F32} <= set(have.dtypes)
    assert {F16, torch.bfloat16, F32, torch.float8_e4m3fn, torch.float8_e5m2} <= set(have.kv_dtypes)
    assert (cls.graph_support, cls.seq_len_fill, AttentionBackend.seq_len_fill) == (GraphSupport.ALWAYS, 0, 0)


@pytest.mark.parametrize("fill", [0, 1, 3])
def test_padding_requests_have_seq_len_fill(monkeypatch: pytest.MonkeyPatch, fill: int) -> None:
    monkeypatch.setattr(TorchReferenceBackend, "seq_len_fill", fill)
    rig = make_rig(CPU, decode_sizes=(4,), fill=0.0)
    batch = Batch(req_indices=[0], seq_lens=[1], tokens=[3], page_indptr=[0, 1], page_ids=[5])
    assert rig.manager.replay(batch).tokens().tolist() == [int(rig.model.oracle([3]).argmax())]
    assert rig.manager.buffers.seq_lens[:4].tolist() == [1, fill, fill, fill]


def test_defaults_of_backend_and_context() -> None:
    able = {
        name: getattr(ABLE, name) for name in ("devices", "dtypes", "kv_dtypes", "head_dims", "page_sizes", "layouts")
    }
    poor = Capabilities(max_query_len=1, sliding_window=False, logits_softcap=False, mixed=False, **able)
    assert not any((poor.alibi, poor.alibi_sqrt, poor.sinks, poor.lse, poor.batch_invariant))
    assert not any((poor.kv_groups, poor.v_head_dim, poor.attention_chunk_size))
    smallest = BackendContext((ATTENTION,), CONTEXT.kv_groups, CPU, 1, 1, 1)
    assert smallest.group_of == (0,)
    assert (smallest.max_query_len, smallest.batch_invariant, smallest.mixed_batches) == (1, False, True)
    assert (AttentionBackend.seq_len_fill, AttentionBackend.quantises_queries) == (0, False)
    assert [int(support) for support in GraphSupport] == [0, 1, 2, 3]
    made = backend()(smallest)
    assert (made.tensors(), made.extra_graph_unsupported_reason(BatchDescriptor.decode(1))) == ({}, None)
    assert (made.extra_unsupported_reasons(smallest), made.why_only_by_name(smallest), made.unavailable()) == (
        [],
        None,
        None,
    )


def test_max_pages_and_device_of_a_context() -> None:
    assert [replace(CONTEXT, max_seq_len=n).max_pages(0) for n in (1, 8, 9, 16, 17)] == [1, 1, 2, 2, 3]
    with pytest.raises(ConfigError, match=r"BackendContext.device: expected device, got 'cpu'; make it a torch.device"):
        replace(CONTEXT, device="cpu")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((16, 32, 48, 64, 80), "multiples of 16 from 16 to 80"), ((16, 32, 48, 64), "16, 32, 48, 64"),
        ((8, 24, 40, 56, 72), "8, 24, 40, 56, 72"), ((32, 48, 64, 80, 96), "multiples of 16 from 32 to 96"),
        ((16, 32, 64, 128, 256), "16, 32, 64, 128, 256"), (("a", "b", "c", "d", "e"), "a, b, c, d, e"), ((), ""),
        ((5, 5, 5, 5, 5), "5, 5, 5, 5, 5"), ((5, 4, 3, 2, 1), "5, 4, 3, 2, 1"),
        ((1, 2, 3, 4, 5, 7), "1, 2, 3, 4, 5, 7"), ((1, 2, 3, 4, 5), "1 to 5"),
    ],
    ids=str,
)  # fmt: skip
def test_listing(values: tuple, text: str) -> None:
    assert listing(values) == text


def test_options_of_an_attention_layer() -> None:
    slopes, scales, sinks = torch.ones(4), torch.ones(2), torch.zeros(4)
    cache = torch.zeros(3, 8, 2, 16)
    given = {"softmax_scale": 0.3, "sliding_window": 7, "logits_softcap": 20.0, "alibi_sqrt": True}
    spec = AttentionSpec(4, 2, 16, F32, alibi_slopes=(1.0,) * 4, **given)
    made = AttentionLayer(0, spec, cache, cache, k_scale=scales, v_scale=scales + 1, alibi_slopes=slopes)
    options = made.options(sinks)
    assert (options.softmax_scale, options.sliding_window, options.logits_softcap) == (0.3, 7, 20.0)
    assert (options.alibi_slopes, options.sinks, options.alibi_sqrt) == (slopes, sinks, True)
    assert (options.k_scale is made.k_scale, options.v_scale is made.v_scale) == (True, True)
    plain = AttentionLayer(0, AttentionSpec(4, 2, 16, F32), cache, cache).options()
    assert (plain.softmax_scale, plain.sliding_window, plain.logits_softcap, plain.sinks) == (0.25, 0, 0.0, None)
    for wrong_spec, wrong_slopes in ((spec, None), (AttentionSpec(4, 2, 16, F32), slopes)):
        with pytest.raises(ConfigError, match=r"AttentionLayer.alibi_slopes: expected .*, as spec.alibi_slopes says"):
            AttentionLayer(0, wrong_spec, cache, cache, alibi_slopes=wrong_slopes)


# -- the registry


def changed(**attributes) -> Callable[[], type]:
    def make() -> type:
        cls = backend()
        for name, value in attributes.items():
            setattr(cls, name, value)
        return cls

    return make


REFUSED = {
    "no-class": (lambda: TorchReferenceBackend(CONTEXT), "expected a subclass of AttentionBackend"),
    "other-class": (lambda: int, "expected a subclass of AttentionBackend"),
    "name-type": (changed(name=3), r"Backend.name: expected an identifier, got 3"),
    "name-text": (changed(name="my backend"), "expected an identifier, got 'my backend'"),
    "name-empty": (changed(name=""), "expected an identifier, got ''"),
    "name-built-in": (changed(name="triton"), "the name 'triton' is taken"),
    "capabilities": (changed(capabilities=None), "Backend.capabilities: expected Capabilities, got None"),
    "support": (changed(graph_support=2), "Backend.graph_support: expected GraphSupport, got 2"),
    "page_sizes": (
        lambda: backend(page_sizes=()),
        r"Capabilities.page_sizes: expected a non-empty tuple of int, or None for any, got \(\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_backend_class_is_not_registered(case: str) -> None:
    make, text = REFUSED[case]
    with pytest.raises(ConfigError, match=text):
        register_backend(make())
    with pytest.raises(ConfigError, match="got 'edges_backend'"):
        backend_class("edges_backend")


def test_registered_backend_is_selected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphrt.backends.registry._registered", {})
    cls = backend()
    assert register_backend(cls) is register_backend(cls) is backend_class("edges_backend") is cls
    with pytest.raises(ConfigError, match="the name 'edges_backend' is taken"):
        register_backend(backend())
    assert select_backend(CONTEXT, "edges_backend") == (cls, "edges_backend: chosen by name")
    chosen, why = select_backend(CONTEXT)
    assert chosen is cls
    assert why.startswith("edges_backend: first in order of preference that supports device cpu; not triton (")
    for dtype, text in ((F16, "page_size 4[^;]*; choose another"), (F32, "page_size 4.*; KV dtype.*; choose another")):
        kv = replace(CONTEXT.kv_groups[0], page_size=4, dtype=dtype)
        with pytest.raises(UnsupportedError, match=f"backend edges_backend: does not support .*: {text}"):
            select_backend(replace(CONTEXT, kv_groups=(kv,)), "edges_backend")


def test_no_supported_backend_raises_with_every_reason() -> None:
    context = replace(CONTEXT, kv_groups=(replace(CONTEXT.kv_groups[0], dtype=F32),))
    with pytest.raises(
        UnsupportedError, match=r"backend: no backend supports this model on cpu: .*triton \(.*torch_reference \(dtype"
    ):
        select_backend(context)


# -- graphs and counters


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
    stats = Stats("a recorder", "a backend", "a reason")
    assert (stats.recorder, stats.backend, stats.backend_reason) == ("a recorder", "a backend", "a reason")
    assert (stats.ring_waits, stats.real_tokens, stats.padded_tokens, stats.capture_seconds) == (0, 0, 0, 0.0)
    assert (stats.replays, stats.eager_steps, stats.graphs, stats.graph_bytes) == ({}, {}, (), 0)
    key = BatchDescriptor.decode(4)
    for reason, forced in (("", False), ("why", False), ("asked", True), ("", True), ("", False)):
        stats.count(key, 3, reason, forced)
    assert (stats.replays, stats.eager_steps) == ({key: 3}, {"why": 1})
    assert (stats.real_tokens, stats.padded_tokens, stats.pad_waste) == (15, 20, 0.25)
    stats.graphs = (GraphReport(key, 1.0, 100, 20, 5), GraphReport(key, 1.0, 3, 4, 5))
    assert stats.graph_bytes == 127
