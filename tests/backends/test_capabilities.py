"""Every capability that a backend may lack is refused by the runtime before a step could go wrong.

One entry per field of Capabilities: a declaration that says no, and a context that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch

from graphrt.backends import registry
from graphrt.backends.capabilities import BackendContext, Capabilities, GraphSupport
from graphrt.backends.registry import register_backend
from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.batch import Batch, Request
from graphrt.cache.kv_cache import KVCache
from graphrt.config import RuntimeConfig
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.types import KVLayout
from graphrt.replay import ReplayManager
from graphrt.spec import AttentionKind, AttentionSpec, KVCacheSpec
from graphrt.step import Step

CPU, F32, F16, E4M3 = torch.device("cpu"), torch.float32, torch.float16, torch.float8_e4m3fn
PLAIN = AttentionSpec(4, 2, 16, F32)
SLOPES = (0.5, 0.25, 1.0, 0.0625)
VOCABULARY = 11


@dataclass(frozen=True)
class Needs:
    """A runtime that needs one capability, and the text of the reason against it."""

    lacking: Any
    refusal: str
    spec: dict[str, Any] = field(default_factory=dict)
    kv: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] = ()


WITH_SLOPES = {"alibi_slopes": SLOPES}
NEEDS: dict[str, Needs] = {
    "devices": Needs(("cuda",), "device cpu: runs on cuda only"),
    "dtypes": Needs((F16,), "dtype torch.float32: supports torch.float16"),
    "kv_dtypes": Needs((F32,), "KV dtype torch.float8_e4m3fn: supports torch.float32", kv={"dtype": E4M3}),
    "head_dims": Needs((8, 24), "head_dim 16: supports 8, 24"),
    "page_sizes": Needs((3, 5), "page_size 4: supports 3, 5"),
    "layouts": Needs((KVLayout.NHD,), "layout HND: supports NHD", kv={"layout": KVLayout.HND}),
    "max_query_len": Needs(
        2, "query_len 3: decodes at most 2 tokens per request", config={"num_speculative_tokens": 2}
    ),
    "sliding_window": Needs(False, "sliding_window 3: not supported", spec={"sliding_window": 3}),
    "logits_softcap": Needs(False, "logits_softcap 5.0: not supported", spec={"logits_softcap": 5.0}),
    "mixed": Needs(
        False, r"mixed batches: not supported, .* another backend, or set RuntimeConfig\(mixed_batches=False\)"
    ),
    "alibi": Needs(False, "alibi_slopes: not supported", spec=WITH_SLOPES),
    "alibi_sqrt": Needs(False, "alibi_sqrt: not supported", spec=WITH_SLOPES | {"alibi_sqrt": True}),
    "sinks": Needs(False, "sinks: not supported", spec={"sinks": True}),
    "lse": Needs(False, "lse: backend lacking cannot write the log-sum-exp"),
    "batch_invariant": Needs(False, "batch_invariant: not supported", config={"batch_invariant": True}),
    "kv_groups": Needs(False, "2 KV groups: supports one", groups=((0, 2), (1,))),
    "v_head_dim": Needs(False, "v_head_dim 8: supports only the head size of the keys, 16", spec={"v_head_dim": 8}),
    "attention_chunk_size": Needs(False, "attention_chunk_size 3: not supported", spec={"attention_chunk_size": 3}),
    "cross_attention": Needs(
        False,
        "cross attention: not supported",
        spec={"kind": AttentionKind.CROSS},
        groups=((0, 1), (2,)),
        config={"max_encoder_len": 8},
    ),
    "tree_drafts": Needs(
        False,
        "tree_depth: drafts that form a tree are not supported",
        config={"num_speculative_tokens": 2, "tree_depth": 1},
    ),
    "encoder_attention": Needs(
        False, "encoder attention: not supported", spec={"kind": AttentionKind.ENCODER}, groups=((0,), (1,))
    ),
}


def attending(*, lse: bool = False) -> Callable[[Step], torch.Tensor]:
    """A model in which every layer attends, some with the log-sum-exp."""

    def model(step: Step) -> torch.Tensor:
        tokens = step.descriptor.padded_tokens
        total = torch.zeros(tokens, VOCABULARY)
        for layer, target in enumerate(step.layers):
            dims = ((4, 16), (2, 16), (2, target.spec.value_dim))
            q, k, v = (torch.ones(tokens, heads, dim) for heads, dim in dims)
            asked = {"lse": torch.zeros(tokens, 4)} if lse else {}
            sinks = {"sinks": torch.zeros(4)} if target.spec.sinks else {}
            if target.spec.is_cross:
                k = v = None
            total += step.attend(layer, q, k, v, **asked, **sinks).mean()
        return total[step.logits_indices]

    return model


def build(needs: Needs, *, lse: bool = False, **config: Any) -> ReplayManager:
    """A runtime of three layers that needs the capability, with the backend named `lacking`."""
    everywhere = {name: value for name, value in needs.spec.items() if name == "v_head_dim"}
    specs = (replace(PLAIN, **everywhere), replace(PLAIN, **everywhere), replace(PLAIN, **needs.spec))
    kv = KVCacheSpec(3, 2, 16, **({"page_size": 4, "dtype": F32} | needs.kv | everywhere))
    if needs.groups:
        crosses = needs.spec.get("kind") is AttentionKind.CROSS
        kv = [
            replace(kv, num_layers=len(layers), layers=layers, cross=crosses and 2 in layers) for layers in needs.groups
        ]
    sizes = {"max_num_reqs": 4, "max_num_tokens": 12, "max_seq_len": 8, "decode_sizes": (4,), "backend": "lacking"}
    options = RuntimeConfig(**(sizes | needs.config | config))
    cache = KVCache.allocate(kv, 8, CPU)
    return ReplayManager(attending(lse=lse), cache, specs, vocab_size=VOCABULARY, config=options)


def declare(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> type[TorchReferenceBackend]:
    """Register a correct backend as `lacking` with other capabilities."""
    monkeypatch.setattr(registry, "_registered", {})
    capabilities = replace(TorchReferenceBackend.capabilities, **changes)
    attributes = {"name": "lacking", "capabilities": capabilities}
    return register_backend(type("Lacking", (TorchReferenceBackend,), attributes))


ELSEWHERE = ("prefill", "context_parallel")
"""test_two_parts.py covers `prefill`, and test_ranks.py covers context parallel with several processes."""


@pytest.mark.parametrize("name", [each.name for each in fields(Capabilities) if each.name not in ELSEWHERE])
def test_missing_capability_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name, another backend is selected."""
    needs = NEEDS[name]
    declare(monkeypatch)
    build(needs, lse=name == "lse").capture()  # with everything declared it serves
    assert build(needs, backend=None).stats().backend == "lacking", "it comes before the reference"
    declare(monkeypatch, **{name: needs.lacking})
    if name == "lse":  # a model says nothing of it before its step
        manager = build(needs, lse=True)
        with pytest.raises(UnsupportedError, match=needs.refusal):
            manager.capture()
        return
    with pytest.raises(UnsupportedError, match=needs.refusal):
        build(needs)
    assert build(needs, backend=None).stats().backend == "torch_reference"


def test_backend_without_context_parallel_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    interleaved = Needs(None, "", kv={"context_parallel_size": 2})
    declare(monkeypatch, context_parallel=False)
    with pytest.raises(UnsupportedError, match="context_parallel_size: not supported"):
        build(interleaved)
    declare(monkeypatch)
    with pytest.raises(UnsupportedError, match="tree_depth with context_parallel_size: not supported"):
        build(interleaved, num_speculative_tokens=2, tree_depth=1)
    for spec, reason in (
        ({"sliding_window": 3}, "sliding_window"),
        ({"attention_chunk_size": 3, "alibi_slopes": SLOPES}, "attention_chunk_size, alibi_slopes"),
        ({"kind": AttentionKind.ENCODER}, "cross and encoder layers"),
    ):
        needs = replace(interleaved, spec=spec, groups=((0, 1),) if "kind" in spec else ())
        with pytest.raises(UnsupportedError, match=f"context_parallel_size: not supported with {reason}; omit it"):
            build(needs)
    with pytest.raises(ConfigError, match="divisor of the number of ranks, got 2 with no group; pass group="):
        build(interleaved)


def test_bounds_of_query_len_and_sizes_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, max_query_len=3)
    build(NEEDS["max_query_len"])
    declare(monkeypatch, page_sizes=(3, 4), head_dims=(8, 16))
    build(Needs(None, ""))
    with pytest.raises(UnsupportedError, match="v_head_dim 24: supports 8, 16"):
        build(Needs(None, "", spec={"v_head_dim": 24}))


def test_kv_dtype_of_another_width_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every backend. An fp8 cache works with layers of any dtype."""
    cls = declare(monkeypatch)
    for layers, stored, reasons in (
        (F32, F16, ["dtype torch.float32 with KV dtype torch.float16: must be equal, unless the cache is fp8"]),
        (F16, F32, ["dtype torch.float16 with KV dtype torch.float32: must be equal, unless the cache is fp8"]),
        (F16, F16, []),
        (F16, E4M3, []),
        (F32, torch.float8_e5m2, []),
    ):
        kv = KVCacheSpec(1, 2, 16, 4, dtype=stored)
        assert cls.unsupported_reasons(BackendContext((replace(PLAIN, dtype=layers),), (kv,), CPU, 4, 12, 8)) == reasons


GRAPHS = [
    (GraphSupport.NEVER, 1, (True, True)),
    (GraphSupport.SINGLE_TOKEN, 1, (False, True)),
    (GraphSupport.SINGLE_TOKEN, 2, (True, True)),
    (GraphSupport.UNIFORM, 2, (False, True)),
    (GraphSupport.ALWAYS, 2, (False, False)),
]


@pytest.mark.parametrize(("support", "query_len", "eager"), GRAPHS, ids=str)
def test_unsupported_graphs_run_eagerly(
    support: GraphSupport, query_len: int, eager: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode, then mixed; `stats()` says why."""
    monkeypatch.setattr(declare(monkeypatch), "graph_support", support)
    manager = build(Needs(None, ""), num_speculative_tokens=query_len - 1)
    manager.capture()
    reasons = [manager.replay(batch(*lens)).why_eager for lens in ((query_len,) * 2, (3, 1))]
    assert tuple(bool(reason) for reason in reasons) == eager
    for reason in filter(None, reasons):
        assert f"backend lacking has graph support {support.name}" in reason


def batch(*query_lens: int) -> Batch:
    """Requests with these tokens, one page each."""
    return Batch.from_requests([Request(row, [1] * count, count, [1 + row]) for row, count in enumerate(query_lens)])


def test_runtime_without_mixed_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend without mixed batches gets only decode batches, captured and eager."""
    assert RuntimeConfig(mixed_batches=False, mixed_sizes=()).resolve().mixed_sizes == ()
    assert RuntimeConfig(mixed_batches=False).resolve().mixed_sizes == ()
    cls, sent = declare(monkeypatch, mixed=False), []
    monkeypatch.setattr(cls, "plan_capture", lambda self, descriptor: sent.append(descriptor))
    monkeypatch.setattr(cls, "plan_replay", lambda self, descriptor, batch: sent.append(descriptor))
    manager = build(NEEDS["mixed"], mixed_batches=False, decode_sizes=(2,))
    manager.capture()
    assert [str(descriptor) for descriptor in manager.descriptors] == ["decode[2]"]
    for rows, why in ((1, ""), (2, ""), (3, "no decode graph for 3 requests; the largest captured size is 2")):
        assert manager.replay(batch(*(1,) * rows)).why_eager == why
    manager.replay(batch(1, 1), eager=True).tokens()
    assert sent
    assert {descriptor.query_len for descriptor in sent} == {1}


@pytest.mark.parametrize("query_lens", [(3,), (2, 3), (1, 3), (3, 2, 1)], ids=str)
def test_mixed_batch_raises_before_writing(query_lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written: the next batch is served as if nothing had been. (1, 3) has as many tokens as two
    rows of 2."""
    declare(monkeypatch, mixed=False)
    manager = build(NEEDS["mixed"], mixed_batches=False, num_speculative_tokens=1)
    manager.capture()
    text = rf"batch: expected at most 2 new tokens in every request, got \[{', '.join(map(str, query_lens))}\]; compute"
    for eager in (False, True):
        with pytest.raises(UnsupportedError, match=text):
            manager.replay(batch(*query_lens), eager=eager)
    assert manager.stats().real_tokens == 0
    assert len(manager.replay(batch(2, 2)).tokens()) == 2
    allowed = build(Needs(None, ""), backend="torch_reference", num_speculative_tokens=1)
    allowed.capture()
    allowed.replay(batch(*query_lens)).tokens()
