"""Options of a layer from spec and model to the backend: unsupported reasons, checks and arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.backends import registry
from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import BackendContext, Capabilities, GraphSupport
from graphrt.cache.groups import kv_locations
from graphrt.cache.kv_cache import KVCache
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.config import RuntimeConfig
from graphrt.engine.program import attention_layers
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.cache.write import Rotary
from graphrt.kernels.errors import ConfigError, ShapeError, UnsupportedError
from graphrt.kernels.metadata.buffers import Capacity, PageGroup, StaticBuffers
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata
from graphrt.replay import ReplayManager
from graphrt.spec import AttentionSpec, KVCacheSpec
from graphrt.step import Step
from tests.engine.test_modes import MODES

CPU, F32, E4M3 = torch.device("cpu"), torch.float32, torch.float8_e4m3fn
SLOPES = (0.5, 0.25, 0.125, 0.0625)
PLAIN = AttentionSpec(4, 2, 16, F32)
ALIBI = replace(PLAIN, alibi_slopes=SLOPES, alibi_sqrt=True)
SINKS = replace(PLAIN, sinks=True, sliding_window=3, logits_softcap=5.0, softmax_scale=0.5)


class Recording(AttentionBackend):
    """Records the arguments of `run`, and writes nothing."""

    name = "recording"
    capabilities = Capabilities(
        ("cpu",), (F32,), (F32, E4M3), None, None, (KVLayout.NHD,), max_query_len=1, sliding_window=True,
        logits_softcap=True, mixed=True, alibi=True, alibi_sqrt=True, sinks=True, lse=True, batch_invariant=True,
    )  # fmt: skip
    graph_support = GraphSupport.ALWAYS

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.runs: list[tuple[AttentionOptions, torch.Tensor | None]] = []

    def run(self, layer, q, metadata, out, *, sinks=None, lse=None) -> None:
        self.runs.append((layer.options(sinks), lse))


class Bare(Recording):
    name = "bare"
    capabilities = replace(
        Recording.capabilities, kv_dtypes=(F32,), alibi=False, alibi_sqrt=False, sinks=False, lse=False,
        batch_invariant=False,
    )  # fmt: skip


def make_context(*specs: AttentionSpec, kv_dtype: torch.dtype = F32, batch_invariant: bool = False) -> BackendContext:
    kv = KVCacheSpec(len(specs), 2, 16, page_size=4, dtype=kv_dtype)
    return BackendContext(specs, (kv,), CPU, 8, 64, 32, batch_invariant=batch_invariant)


def test_all_unsupported_reasons_are_listed() -> None:
    context = make_context(ALIBI, SINKS, kv_dtype=E4M3, batch_invariant=True)
    assert Bare.unsupported_reasons(context) == [
        "KV dtype torch.float8_e4m3fn: supports torch.float32",
        "alibi_slopes: not supported",
        "alibi_sqrt: not supported",
        "sinks: not supported",
        "batch_invariant: not supported",
    ]
    assert Recording.unsupported_reasons(context) == []
    assert Bare.unsupported_reasons(make_context(PLAIN)) == []
    assert Bare.unsupported_reasons(make_context(replace(ALIBI, alibi_sqrt=False))) == ["alibi_slopes: not supported"]


def test_config_requests_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    registry.register_backend(Bare)
    registry.register_backend(Recording)

    def build(backend: str, batch_invariant: bool) -> ReplayManager:
        cache = KVCache.allocate(KVCacheSpec(1, 2, 16, 4, dtype=F32), 4, CPU)
        config = RuntimeConfig(
            max_num_reqs=2, max_num_tokens=4, max_seq_len=8, backend=backend, batch_invariant=batch_invariant
        )
        return ReplayManager(lambda step: torch.zeros(0), cache, PLAIN, vocab_size=3, config=config)

    build("bare", False)
    build("recording", True)
    with pytest.raises(UnsupportedError, match=r"bare.*batch_invariant: not supported"):
        build("bare", True)


def make_layers(*specs: AttentionSpec, kv_dtype: torch.dtype = F32) -> tuple[KVCache, tuple[AttentionLayer, ...]]:
    cache = KVCache.allocate(KVCacheSpec(len(specs), 2, 16, 4, dtype=kv_dtype), 3, CPU)
    return cache, attention_layers(specs, kv_locations(specs, cache.groups), cache)


def test_attention_layers_hold_scales_and_slopes() -> None:
    cache, layers = make_layers(ALIBI, PLAIN, replace(ALIBI, alibi_sqrt=False), kv_dtype=E4M3)
    for index, layer in enumerate(layers):
        assert layer.k_scale is cache.k_scales[index]
        assert layer.v_scale is cache.v_scales[index]
    assert layers[1].alibi_slopes is None
    assert layers[0].alibi_slopes is layers[2].alibi_slopes
    assert torch.equal(layers[0].alibi_slopes, torch.tensor(SLOPES))
    assert [layer.options().alibi_sqrt for layer in layers] == [True, False, False]
    _, (wide,) = make_layers(PLAIN)
    assert wide.k_scale is None
    assert wide.v_scale is None
    assert wide.options() == AttentionOptions(softmax_scale=0.25)


def test_slopes_are_float32_for_any_default_dtype() -> None:
    cache, _ = make_layers(ALIBI)
    with MODES["dtype"](), torch.device("meta"):
        (layer,) = attention_layers([ALIBI], kv_locations([ALIBI], cache.groups), cache)
    assert layer.alibi_slopes.dtype == torch.float32
    assert layer.alibi_slopes.device == CPU


def test_slopes_must_match_the_spec() -> None:
    cache, _ = make_layers(PLAIN)
    for spec, slopes in ((ALIBI, None), (PLAIN, torch.tensor(SLOPES))):
        with pytest.raises(ConfigError, match=r"alibi_slopes: expected .*, as in spec.alibi_slopes, got"):
            AttentionLayer(0, spec, cache.k[0], cache.v[0], alibi_slopes=slopes)


TOKENS = 3


def make_step(spec: AttentionSpec, kv_dtype: torch.dtype = F32, backend: type[Recording] = Recording) -> Step:
    """A decode step of three tokens; the third one is padding."""
    _, layers = make_layers(spec, kv_dtype=kv_dtype)
    capacity = Capacity(TOKENS, TOKENS, TOKENS, inputs=1, ring=2, page_groups=(PageGroup(6, 2, 0, 2),))
    buffers = StaticBuffers.allocate(capacity, CPU)
    buffers.positions.copy_(torch.tensor([0, 5, 0]))
    metadata = StepMetadata(
        descriptor=BatchDescriptor.decode(TOKENS),
        seq_lens=torch.tensor([1, 6, 0], dtype=torch.int32),
        query_start_loc=torch.arange(TOKENS + 1, dtype=torch.int32),
        block_tables=(torch.tensor([[1, 0], [1, 2], [0, 0]], dtype=torch.int32),),
        slot_mappings=(torch.tensor([4, 9, -1]),),
        encoder_lens=torch.zeros(TOKENS, dtype=torch.int32),
        positions=buffers.positions,
        max_seq_len=8,
    )
    return Step(
        descriptor=metadata.descriptor,
        metadata=metadata,
        buffers=buffers,
        backend=backend(make_context(spec, kv_dtype=kv_dtype)),
        layers=layers,
        vocab_size=8,
    )


def attend(step: Step, **options: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(TOKENS, heads, 16, generator=generator) for heads in (4, 2, 2))
    step.attend(0, q, k, v, **options)
    return k, v


def test_attend_passes_its_arguments_to_the_backend() -> None:
    steps, sinks, lse = (make_step(SINKS), make_step(SINKS)), torch.zeros(4), torch.empty(TOKENS, 4)
    attend(steps[0], sinks=sinks, lse=lse)
    attend(steps[1], sinks=sinks)
    (options, given), (_, none) = (*steps[0].backend.runs, *steps[1].backend.runs)
    assert options.sinks is sinks
    assert given is lse
    assert none is None
    assert (options.softmax_scale, options.sliding_window, options.logits_softcap) == (0.5, 3, 5.0)
    assert options.causal


def test_attend_divides_kv_by_the_scales() -> None:
    step = make_step(PLAIN, E4M3)
    (layer,) = step.layers
    layer.k_scale.copy_(torch.tensor([0.5, 0.3]))
    layer.v_scale.copy_(torch.tensor([0.01, 2.0]))
    k, v = attend(step)
    for values, cache, scale in ((k, layer.k_cache, layer.k_scale), (v, layer.v_cache, layer.v_scale)):
        expected = (values[:2] / scale[:, None]).to(E4M3)
        assert torch.equal(cache.flatten(0, 1)[[4, 9]].view(torch.uint8), expected.view(torch.uint8))
    assert step.backend.runs[0][0].k_scale is layer.k_scale
    assert step.backend.runs[0][0].v_scale is layer.v_scale


def test_output_is_contiguous_for_any_query_strides() -> None:
    step = make_step(PLAIN)
    q, k = torch.zeros(4, TOKENS, 16).transpose(0, 1), torch.zeros(TOKENS, 2, 16)
    assert step.attend(0, q, k, k.clone()).is_contiguous()


def test_cos_sin_needs_a_row_per_position() -> None:
    step, q, k = make_step(PLAIN), torch.zeros(TOKENS, 4, 16), torch.zeros(TOKENS, 2, 16)
    step.attend(0, q, k, k.clone(), rotary=Rotary(torch.zeros(8, 16)))
    with pytest.raises(ShapeError, match="cos_sin: expected at least max_seq_len=8 rows, one per position, got 7"):
        step.attend(0, q, k, k.clone(), rotary=Rotary(torch.zeros(7, 16)))
    for table in (None, [1.0], torch.zeros(8), torch.zeros(8, 16, 1)):
        with pytest.raises(ShapeError, match=r"rotary\.cos_sin: expected "):
            step.attend(0, q, k, k.clone(), rotary=Rotary(table))


REFUSED = {
    "sinks-missing": (SINKS, {}, ShapeError, r"sinks: layer 0 has learned sinks, so a tensor \[4\] is required"),
    "sinks-uncalled-for": (PLAIN, {"sinks": torch.zeros(4)}, ShapeError, "sinks: expected None for layer 0, got a"),
    "sinks-shape": (SINKS, {"sinks": torch.zeros(2)}, ShapeError, r"sinks: expected shape \[4\], got \[2\]"),
    "sinks-dtype": (SINKS, {"sinks": torch.zeros(4).half()}, ShapeError, "sinks: expected dtype float32, got float16"),
    "sinks-device": (SINKS, {"sinks": torch.zeros(4).to("meta")}, ShapeError, "sinks: expected device cpu, got meta"),
    "sinks-stride": (SINKS, {"sinks": torch.zeros(8)[::2]}, ShapeError, "sinks: expected stride 1"),
    "lse-shape": (PLAIN, {"lse": torch.zeros(3, 2)}, ShapeError, r"lse: expected shape \[3, 4\], got \[3, 2\]"),
    "lse-dtype": (PLAIN, {"lse": torch.zeros(3, 4).double()}, ShapeError, "lse: expected dtype float32, got float64"),
    "lse-expanded": (PLAIN, {"lse": torch.zeros(1, 4).expand(3, 4)}, ShapeError, "lse: elements may share memory"),
    "lse-stride": (PLAIN, {"lse": torch.zeros(4, 3).t()}, ShapeError, "lse: expected stride 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_attend_argument_raises_before_writing(case: str) -> None:
    spec, options, error, message = REFUSED[case]
    step = make_step(spec)
    with pytest.raises(error, match=message):
        attend(step, **options)
    assert step.backend.runs == []
    assert not step.layers[0].k_cache.any()


def test_second_attend_and_attend_before_the_source_raise() -> None:
    """A model that uses one layer index twice would overwrite keys."""
    step = make_step(PLAIN)
    attend(step)
    kept = step.layers[0].k_cache.clone()
    q, k = torch.zeros(TOKENS, 4, 16), torch.zeros(TOKENS, 2, 16)
    with pytest.raises(UnsupportedError, match=r"second attend\(\) for layer 0 in one step"):
        step.attend(0, q, k, k.clone())
    assert torch.equal(step.layers[0].k_cache, kept)
    assert len(step.backend.runs) == 1

    (first,) = step.layers
    reader = replace(first, index=1, spec=replace(first.spec, kv_shared_with=0), writes=False)
    step = replace(step, layers=(first, reader))
    with pytest.raises(UnsupportedError, match=r"layer 1 reads .* of layer 0, which this step has not written"):
        step.attend(1, q, None, None)
    attend(step)
    step.attend(1, q, None, None)
    step.attend(1, q, None, None)
    assert len(step.backend.runs) == 4, "a layer that writes nothing may attend again"


def test_lse_raises_for_a_backend_without_it() -> None:
    step = make_step(PLAIN, backend=Bare)
    attend(step)
    step.layers[0].k_cache.zero_()
    with pytest.raises(UnsupportedError, match="lse: backend bare cannot write the log-sum-exp"):
        attend(step, lse=torch.zeros(TOKENS, 4))
    assert not step.layers[0].k_cache.any()
