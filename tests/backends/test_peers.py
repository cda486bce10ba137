"""Host logic of the backends that wrap other packages, with fake packages that record their calls."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphrt.backends import peer, registry
from graphrt.backends.base import AttentionBackend
from graphrt.backends.capabilities import BackendContext
from graphrt.backends.flash_attn2 import FlashAttention2Backend
from graphrt.backends.flash_attn3 import MAX_SPLITS, WORKSPACE_BYTES, FlashAttention3Backend
from graphrt.backends.flashinfer import FlashInferBackend
from graphrt.backends.registry import select_backend, standings
from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.errors import CaptureError, ConfigError, UnsupportedError
from graphrt.spec import AttentionSpec
from tests.support.fake_packages import install
from tests.support.peer_kit import (
    BF16,
    CUDA,
    FULL,
    PEERS,
    WINDOWED,
    Calls,
    allocated,
    context,
    layer_of,
    metadata_of,
    step,
)


@pytest.mark.parametrize("cls", PEERS, ids=lambda c: c.name)
def test_missing_package_gives_its_pip_command(
    cls: type[peer.PeerBackend], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An empty folder of its name is not a package, and neither is a module without a required name."""
    module, command = (
        cls.package.module,
        {
            "flash_attn2": "pip install flash-attn --no-build-isolation",
            "flash_attn3": "pip install tokenspeed-fa3",
            "flashinfer": "pip install flashinfer-python",
        }[cls.name],
    )
    (tmp_path / module).mkdir()
    monkeypatch.delitem(sys.modules, module, raising=False)
    for path in ([str(tmp_path)], []):
        monkeypatch.setattr(sys, "path", path)
        importlib.invalidate_caches()
        assert cls.unavailable() == f"package {module}: not installed; run {command}"
        assert cls.unsupported_reasons(context(device=CUDA))[0] == cls.unavailable()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedError, match=f"cannot be imported .*; run {command}"):
        cls(context()).allocate()
    first, second = cls.package.names
    install(monkeypatch, module, **{first: None})
    with pytest.raises(UnsupportedError, match=f"has no {second}; run pip"):
        cls(context()).allocate()


def test_broken_package_is_a_reason_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only a context with sinks imports the package; triton serves the model then."""
    error = "raise ImportError('libcudart.so.99: cannot open shared object file')\n"
    (tmp_path / "flash_attn_interface.py").write_text(error)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    asked = context(AttentionSpec(8, 2, 64, BF16, sinks=True), device=CUDA)
    (reason,) = FlashAttention3Backend.unsupported_reasons(asked)
    assert reason == (
        "flash_attn_interface: cannot be imported (ImportError: libcudart.so.99: cannot open shared object "
        "file); run pip install tokenspeed-fa3"
    )
    assert select_backend(asked)[0].name == "triton"
    with pytest.raises(UnsupportedError, match=r"libcudart\.so\.99"):
        select_backend(asked, "flash_attn3")


def test_class_method_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a third-party class it is a reason; in a built-in class it is a bug, and propagates."""

    def raises(context: BackendContext) -> list[str]:
        raise ZeroDivisionError("a bug")

    asked = context()
    acme = type("Acme", (TorchReferenceBackend,), {"name": "acme", "extra_unsupported_reasons": staticmethod(raises)})
    monkeypatch.setattr(registry, "_registered", {"acme": acme})
    (standing,) = (s for s in standings(asked) if s.name == "acme")
    assert standing.unsupported_reasons == ["unsupported_reasons raised ZeroDivisionError: a bug"]
    assert standing.rank is None
    assert select_backend(asked)[0].name != "acme"
    with pytest.raises(
        UnsupportedError, match=r"backend acme: .* unsupported_reasons raised ZeroDivisionError: a bug; choose"
    ):
        select_backend(asked, "acme")
    monkeypatch.setattr(TorchReferenceBackend, "extra_unsupported_reasons", raises)
    with pytest.raises(ZeroDivisionError):
        select_backend(asked)
    with pytest.raises(ZeroDivisionError):
        standings(asked)


def classmethod_of(result: object) -> classmethod:
    return classmethod(lambda cls, context: result)


@pytest.mark.parametrize("result", [None, "no", ("no",), [1], ["no", 1]], ids=str)
def test_wrong_type_of_unsupported_reasons_raises(result: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """None would count as no reason, and a str as a reason per character."""
    acme = type("Acme", (TorchReferenceBackend,), {"name": "acme", "extra_unsupported_reasons": classmethod_of(result)})
    monkeypatch.setattr(registry, "_registered", {"acme": acme})
    (reason,) = registry.unsupported_reasons("acme", context())
    assert (
        reason
        == f"Acme.extra_unsupported_reasons: expected a list of str, got {result!r}; return [] if there is no reason"
    )


DECLARATIONS = {
    "name": ({"name": "a-b"}, r"Acme\.name: expected an identifier, got 'a-b'"),
    "no-name": ({"name": None}, r"Acme\.name: expected an identifier, got None"),
    "capabilities": ({"capabilities": None}, r"Acme\.capabilities: expected Capabilities, got None"),
    "graph_support": ({"graph_support": 3}, r"Acme\.graph_support: expected GraphSupport, got 3"),
    "fill-high": ({"seq_len_fill": 2}, r"Acme\.seq_len_fill: expected an int from 0 to 1, got 2"),
    "fill-low": ({"seq_len_fill": -1}, r"Acme\.seq_len_fill: expected an int from 0 to 1, got -1"),
    "quantizes": ({"quantizes_queries": None}, r"Acme\.quantizes_queries: expected True or False, got None"),
    "unsupported_reasons": (
        {"unsupported_reasons": classmethod_of([])},
        r"Acme\.unsupported_reasons: must not be overridden.*; define extra_unsupported",
    ),
    "graph_unsupported_reason": (
        {"graph_unsupported_reason": lambda self, descriptor: None},
        r"Acme\.graph_unsupported_reason: must not be overridden.*; define extra_graph_unsupported",
    ),
}


@pytest.mark.parametrize("case", DECLARATIONS)
def test_missing_class_attribute_raises(case: str) -> None:
    declared, complaint = DECLARATIONS[case]
    with pytest.raises(ConfigError, match=complaint):
        registry.register_backend(type("Acme", (TorchReferenceBackend,), {"name": "acme", **declared}))
    have = TorchReferenceBackend
    attributes = {"name": "acme", "capabilities": have.capabilities, "graph_support": have.graph_support}
    with pytest.raises(ConfigError, match=r"Acme\.run: not defined"):
        registry.register_backend(type("Acme", (AttentionBackend,), attributes))
    assert "acme" not in registry.backend_names()


@pytest.mark.parametrize("name", registry.backend_names())
def test_declarations_of_built_in_backends(name: str) -> None:
    """Built-in backends are not registered, so registration does not check them."""
    registry.check_declaration(registry.backend_class(name))


CAPABILITIES = {
    "text": ("devices", "cuda"),
    "list": ("devices", ["cuda"]),
    "none": ("devices", None),
    "dtypes": ("dtypes", (torch.float16, "bfloat16")),
    "kv_dtypes": ("kv_dtypes", ()),
    "head_dims": ("head_dims", ()),
    "head_dims-float": ("head_dims", (64, 1.5)),
    "page_sizes": ("page_sizes", ()),
    "page_sizes-range": ("page_sizes", range(4)),
    "layouts": ("layouts", ("NHD",)),
    "max_query_len": ("max_query_len", 0),
    "mixed": ("mixed", "no"),
    "sinks": ("sinks", None),
}


@pytest.mark.parametrize("case", CAPABILITIES)
def test_wrong_capabilities_raise(case: str) -> None:
    field, value = CAPABILITIES[case]
    with pytest.raises(ConfigError, match=rf"Capabilities\.{field}: expected .*, got "):
        replace(TorchReferenceBackend.capabilities, **{field: value})


@pytest.mark.parametrize("cls", PEERS, ids=lambda c: c.name)
def test_extras_require_the_minimum_version(cls: type[peer.PeerBackend]) -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'= ["{cls.package.distributions[0]}>={".".join(map(str, cls.package.minimum))}"]' in text


def test_backend_modules_import_no_package() -> None:
    code = (
        "import sys; from graphrt.backends.registry import backend_class, backend_names\n"
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
         "sinks: not supported", "alibi_sqrt: not supported"],
    ),
    "flash_attn3": (
        FlashAttention3Backend,
        context(
            AttentionSpec(8, 2, 96, torch.float16, logits_softcap=3.0, alibi_slopes=(0.1,) * 8),
            device=CUDA, kv_dtype=torch.float8_e4m3fn,
        ),
        ["head_dim 96: supports 64, 128, 192, 256", "logits_softcap 3.0: not supported", "alibi_slopes: not supported",
         "KV dtype float8_e4m3fn: outputs are bfloat16, so the layers must be bfloat16"],
    ),
    "flashinfer": (
        FlashInferBackend,
        context(FULL, WINDOWED, device=CUDA, max_query_len=2, batch_invariant=True, kv_dtype=torch.float16),
        ["query_len 2: decodes at most 1 tokens per request", "batch_invariant: not supported",
         "dtype torch.bfloat16 with KV dtype torch.float16: must be equal, unless the cache is fp8",
         "sliding_window None, 7: must be equal, one plan serves all layers"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_all_unsupported_reasons_are_listed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, asked, wanted = REFUSALS[name]
    install(monkeypatch, cls.package.module)
    reasons = cls.unsupported_reasons(asked)
    for text in wanted:
        assert any(text in reason for reason in reasons), (text, reasons)
    assert len(reasons) == len(wanted), reasons


@pytest.mark.parametrize("at", [0, 1, 2])
def test_flash_attn3_needs_a_build_with_sinks(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [FULL] * 3
    layers[at] = AttentionSpec(8, 2, 64, BF16, sinks=True)
    asked, reason = context(*layers, device=CUDA), "sinks: not in this build; run pip install tokenspeed-fa3"
    for takes, reasons in (
        (lambda q, k_cache, v_cache: None, [reason]),
        (lambda q, k_cache, v_cache, sinks=None: None, []),
    ):
        install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=takes, get_scheduler_metadata=lambda: None)
        assert FlashAttention3Backend.unsupported_reasons(asked) == reasons
        assert FlashAttention3Backend.unsupported_reasons(context(FULL, device=CUDA)) == []


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
def test_flash_attn3_passes_equal_arguments_to_scheduler_and_kernel(fa3: Calls, descriptor: BatchDescriptor) -> None:
    backend, asked = allocated(FlashAttention3Backend, FULL, WINDOWED, FULL, max_query_len=3)
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
        assert schedule["max_seqlen_k"] == metadata.block_tables[0].shape[1] * 256 == 1024
        assert schedule["max_seqlen_q"] == (16 if mixed else descriptor.query_len)
        assert schedule["cache_seqlens"] is metadata.seq_lens
        assert (schedule["cu_seqlens_q"] is not None) == mixed
    for run in runs:
        assert run["num_splits"] == schedules[0]["num_splits"] > 0
        assert run["causal"]
        assert run["page_table"] is metadata.block_tables[0]
        assert (run["cache_leftpad"] is None) == (schedules[0]["cache_leftpad"] is None)
    for out, lse in zip(results[::2], results[1::2], strict=True):
        assert (out[:3] == 2).all()
        assert not out[3:].any(), "what the kernel leaves in pad tokens does not get out"
        assert (lse[:3] == 1).all()
        assert (lse[3:] == -math.inf).all()


def test_flash_attn3_schedules_in_every_step(fa3: Calls) -> None:
    backend, asked = allocated(FlashAttention3Backend)
    descriptor = BatchDescriptor.decode(4)
    q = torch.zeros(4, 8, 64, dtype=BF16)
    with pytest.raises(CaptureError, match="expected a schedule for"):
        backend.run(layer_of(asked), q, metadata_of(asked, descriptor, 4), torch.empty_like(q))
    for _ in range(2):
        step(backend, metadata_of(asked, descriptor, 4), q, [layer_of(asked)])
    assert [kind for kind, _ in fa3] == ["schedule", "run"] * 2
    backend.schedule(metadata_of(asked, BatchDescriptor.decode(2), 2))
    with pytest.raises(CaptureError, match=r"expected a schedule for decode\[4\], got decode\[2\]"):
        backend.run(layer_of(asked), q, metadata_of(asked, descriptor, 4), torch.empty_like(q))


def test_flash_attn3_partial_results_fit_the_workspace() -> None:
    spec = AttentionSpec(32, 8, 128, BF16)
    backend = FlashAttention3Backend(context(spec, page_size=16, max_seq_len=131072))
    assert backend.num_splits(BatchDescriptor.decode(1), spec) == MAX_SPLITS
    assert backend.num_splits(BatchDescriptor.decode(256), spec) == MAX_SPLITS
    mixed = BatchDescriptor.mixed(2048, 256)
    splits = backend.num_splits(mixed, spec)
    assert 1 < splits < MAX_SPLITS
    assert splits * 2048 * 32 * 129 * 4 <= WORKSPACE_BYTES < (splits + 1) * 2048 * 32 * 129 * 4
    assert backend.num_splits(BatchDescriptor.mixed(1 << 18, 256), spec) == 1
    for longest, covered in ((64, 1), (65, 2), (128, 2), (129, 3), (2048, 32), (2049, 32)):
        short = FlashAttention3Backend(context(spec, page_size=1, max_seq_len=longest))
        assert short.num_splits(BatchDescriptor.decode(1), spec) == covered, "64 keys each"
    invariant = FlashAttention3Backend(context(spec, page_size=16, max_seq_len=4096, batch_invariant=True))
    assert invariant.num_splits(BatchDescriptor.decode(1), spec) == 1


def test_flash_attn3_converts_sinks_in_every_step(fa3: Calls) -> None:
    """So that a write to the weights is seen; bfloat16 sinks are passed unchanged."""
    backend, asked = allocated(FlashAttention3Backend, AttentionSpec(8, 2, 64, BF16, sinks=True))
    metadata, q = metadata_of(asked, BatchDescriptor.decode(4), 4), torch.zeros(4, 8, 64, dtype=BF16)
    backend.schedule(metadata)
    sinks, narrow = torch.full((8,), 12.03), torch.ones(8, dtype=BF16)
    for given, value, wanted in ((sinks, 12.03, 12.0), (sinks, 3.0, 3.0), (narrow, 1.0, 1.0)):
        backend.run(layer_of(asked), q, metadata, torch.empty_like(q), sinks=given.fill_(value))
        taken = fa3[-1][1]["sinks"]
        assert taken.dtype == BF16
        assert taken.tolist() == [wanted] * 8
    assert taken is narrow


@pytest.mark.parametrize(
    ("page_size", "tokens", "padded"),
    [(16, 32, False), (63, 17, False), (64, 16, False), (64, 17, True), (65, 17, True)],
)
def test_flash_attn3_passes_left_padding_to_avoid_tma(fa3: Calls, page_size: int, tokens: int, padded: bool) -> None:
    """With pages of at least 64 tokens and more than 64 queries per KV head: 16 or 17 tokens of 4 heads."""
    backend, asked = allocated(FlashAttention3Backend, page_size=page_size)
    metadata = metadata_of(asked, BatchDescriptor.mixed(tokens, 4), live=3)
    step(backend, metadata, torch.zeros(tokens, 8, 64, dtype=BF16), [layer_of(asked)])
    padding = [call["cache_leftpad"] for _, call in fa3]
    assert [None if x is None else x.tolist() for x in padding] == [[0] * 4 if padded else None] * 2


@pytest.mark.parametrize(
    "descriptor", [BatchDescriptor.decode(4), BatchDescriptor.decode(2, 3), BatchDescriptor.mixed(16, 4)], ids=str
)
def test_flash_attn3_quantizes_queries(fa3: Calls, descriptor: BatchDescriptor, rng: torch.Generator) -> None:
    backend, asked = allocated(FlashAttention3Backend, kv_dtype=torch.float8_e4m3fn, max_query_len=3)
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


def test_arguments_of_flash_attn2(monkeypatch: pytest.MonkeyPatch) -> None:
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
    backend, asked = allocated(FlashAttention2Backend, WINDOWED)
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
    invariant, _ = allocated(FlashAttention2Backend, WINDOWED, batch_invariant=True)
    step(invariant, metadata_of(asked, BatchDescriptor.decode(4), 0), q, [layer_of(asked)])
    assert calls[-1][1]["num_splits"] == 1
    assert "has graph support UNIFORM" in str(backend.graph_unsupported_reason(BatchDescriptor.mixed(4, 2)))
