"""The backend test suite itself: it finds every broken backend, and reports what it ran and skipped."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
import unittest
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphrt.backends.base import AttentionBackend
from graphrt.backends.capabilities import Capabilities, GraphSupport
from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.reference import attention_reference
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.testing import backend_contract
from graphrt.testing.backend_contract import check_backend, contract_cases
from graphrt.testing.backend_features import FEATURES, FLAGS, declared_features
from graphrt.testing.backend_rig import make_rig
from tests.support import mocks
from tests.support.mocks_by_feature import BROKEN_BY_FEATURE, CrossSplitsByRows

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.mark.parametrize("broken", mocks.BROKEN, ids=lambda cls: cls.name)
def test_stale_metadata_is_found(broken: type[AttentionBackend]) -> None:
    assert f"FAILED   {broken.name}-cpu-plain: " in str(check_backend(broken, features=["plain"]))


BY_FEATURE = [(broken, feature) for broken, found in BROKEN_BY_FEATURE.items() for feature in found]


@pytest.mark.parametrize(
    ("broken", "feature"), BY_FEATURE, ids=[f"{cls.name}-{feature}" for cls, feature in BY_FEATURE]
)
def test_mistake_in_one_feature_is_found(broken: type[AttentionBackend], feature: str) -> None:
    report = check_backend(broken, features=[feature], brief=True)
    assert not report.passed, f"{report}"
    ((_, reason),) = report.failed
    said = "expected an error of at most|expected NaN and infinities in the same places|wrote to the .* decode part"
    assert re.search(said, reason), reason


@pytest.mark.parametrize("broken", BROKEN_BY_FEATURE, ids=lambda cls: cls.name)
def test_mistake_in_one_feature_passes_other_features(broken: type[AttentionBackend]) -> None:
    """Otherwise the mock would prove nothing about its feature."""
    report = check_backend(broken, features=["window", "query_len", "mixed"], brief=True)
    assert report.ok, f"{report}"


def test_rig_writes_finite_values_only_to_owned_pages() -> None:
    """A group with a window of 5 has null pages before it."""
    rig = make_rig(Liar, FEATURES["mixed-kv_groups-window"], CPU)
    rig.write([rig.sequence(16, 1), rig.sequence(13, 4)])
    (full, windowed), groups = rig.metadata.block_tables, rig.context.kv_groups
    assert [kv.page_size for kv in groups] == [4, 2]
    # Of rows of 16 and 13 tokens: the first new token sees positions 11 to 15, and 5 to 9.
    assert (full[:2] > 0).int().tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert (windowed[:2] > 0).int().tolist() == [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 0]]
    assert rig.batch.first_pages.tolist() == [0, 0, 5, 2]
    assert np.diff(rig.batch.page_indptr).tolist() == [4, 4, 3, 5]
    for layer, table in zip(rig.layers, (full, windowed), strict=True):
        finite = layer.v_cache.isfinite().flatten(1).any(1)
        assert sorted(finite.nonzero().flatten().tolist()) == [0, *sorted(table[table > 0].tolist())]
        assert len(layer.k_cache) > int(max(full.max(), windowed.max())), "another group's pages are within bounds"
    slots = [
        [table[0, 15 // kv.page_size] * kv.page_size + 15 % kv.page_size]
        for table, kv in zip((full, windowed), groups, strict=True)
    ]
    assert [mapping[:1].tolist() for mapping in rig.metadata.slot_mappings] == slots
    rig.close()


def test_rig_writes_cross_groups() -> None:
    """Pages are finite up to the last encoder token; there are no slots, and no pages without an encoder."""
    rig = make_rig(Liar, FEATURES["cross_attention-kv_groups"], CPU)
    rig.write([rig.sequence(3, 1, 19), rig.sequence(16, 1, 0), rig.sequence(9, 1, 3)])
    (_, table), (_, slots), kv = rig.metadata.block_tables, rig.metadata.slot_mappings, rig.context.kv_groups[1]
    assert (kv.cross, kv.page_size, table.shape[1]) == (True, 2, 10)
    assert rig.metadata.encoder_lens.tolist() == [*rig.batch.encoder_lens.tolist(), 0] == [19, 0, 3, 0]
    assert (table > 0).sum(1).tolist() == [10, 0, 2, 0]
    assert slots.tolist() == [-1] * 4
    assert rig.layers[1].k_cache.isfinite().all(3).all(2).sum() == 19 + 3
    assert not rig.layers[1].writes
    rig.close()


def test_rig_writes_encoder_layers_and_shares_the_cache_of_a_layer() -> None:
    """Keys and values of whole sequences, packed as queries, NaN in padding tokens, without a cache."""
    rig = make_rig(Liar, FEATURES["kv_groups"], CPU)
    row = rig.sequence(3, 1)
    first, other, reader = rig.layers
    assert [layer.group for layer in rig.layers] == [0, 1, 0]
    assert reader.k_cache is first.k_cache
    assert reader.k_cache is not other.k_cache
    assert not reader.writes
    assert row.k[2] is row.k[0]
    assert not torch.equal(row.q[2], row.q[0])
    rig.close()
    rig = make_rig(Liar, FEATURES["mixed-encoder_attention"], CPU)
    rows = [rig.sequence(7, 7), rig.sequence(2, 2)]
    rig.write(rows)
    assert rig.context.kv_groups == rig.metadata.block_tables == ()
    k, v = rig.new_kv[0]
    for packed, name in ((rig.q[0], "q"), (k, "k"), (v, "v")):
        assert torch.equal(packed[:9], torch.cat([getattr(row, name)[0] for row in rows]))
        assert packed[9:].isnan().all()
    rig.close()


def test_buffers_of_a_failed_capture_are_found() -> None:
    report = check_backend(mocks.BuffersOfTheFirstAttempt, features=["plain"])
    assert [str(case) for case in report.passed] == ["broken_buffers_of_the_first_attempt-cpu-plain"]
    ((case, reason),) = report.failed
    assert str(case) == "broken_buffers_of_the_first_attempt-cpu-plain-capture_twice"
    assert "attempt 1" in reason


BY_ROWS = {mocks.SplitsByRows: "batch_invariant", CrossSplitsByRows: "batch_invariant-cross_attention"}


@pytest.mark.parametrize("mock", BY_ROWS, ids=lambda cls: cls.name)
def test_dependence_on_the_graph_size_is_found(mock: type[AttentionBackend]) -> None:
    """Such as splits that depend on the number of requests."""
    claims = type("Claims", (mock,), {"capabilities": replace(mock.capabilities, batch_invariant=True)})
    assert check_backend(claims, features=["plain", "query_len", "mixed", "cross_attention"], brief=True).ok
    assert "a row of 16 with others" in check_backend(claims, features=[BY_ROWS[mock]]).failed[0][1]


@dataclass
class Call:
    """The arguments of one call of the reference, which a lie changes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    out: torch.Tensor
    options: AttentionOptions
    lse: torch.Tensor | None


class Liar(TorchReferenceBackend):
    """Declares every capability, and computes something else."""

    name = "liar"
    lie: Callable[[Any, Call], None] = lambda self, call: None
    after: Callable[[Any, Call], None] = lambda self, call: None

    def run(self, layer, q, metadata, out, *, sinks=None, lse=None):
        starts, options = metadata.query_start_loc, layer.options(sinks, metadata.tree_masks, metadata.kv_limits)
        table = metadata.block_tables[layer.group]
        lens = metadata.kv_lens(layer.spec.kind)
        call = Call(q, layer.k_cache, layer.v_cache, table, lens, starts, out, options, lse)
        self.lie(call)
        attention_reference(
            call.q, call.k, call.v, call.table, call.seq_lens, call.starts, call.out, call.options, call.lse
        )
        self.after(call)


def before(change: Callable[[Call], object]) -> dict[str, Any]:
    return {"lie": lambda self, call: change(call)}


def given(**make: Callable[[Call], Any]) -> dict[str, Any]:
    """Replace arguments of the call, each by a function of it."""
    return before(lambda call: vars(call).update({name: of(call) for name, of in make.items()}))


def without(**changes: Any) -> dict[str, Any]:
    return given(options=lambda call: replace(call.options, **changes))


def afterwards(change: Callable[[Call], object]) -> dict[str, Any]:
    return {"after": lambda self, call: change(call)}


def dense(cache: torch.Tensor) -> torch.Tensor:
    """The cache as read by a kernel that assumes the strides of a contiguous tensor."""
    return cache.as_strided(cache.shape, torch.empty(cache.shape, device="meta").stride())


def first_scale_for_all(call: Call) -> AttentionOptions:
    scale = call.options.k_scale
    return call.options if scale is None else replace(call.options, k_scale=scale[:1])


def heads_in_another_order(call: Call) -> torch.Tensor:
    """Query head h uses KV head h modulo the number of KV heads."""
    heads, kv_heads = call.q.shape[1], call.k.shape[2]
    return call.q[:, torch.arange(heads).view(-1, kv_heads).t().flatten()]


def scale_queries(call: Call) -> None:
    call.q.mul_(2.0)
    call.options = replace(call.options, softmax_scale=call.options.softmax_scale / 2)


def lse_to_base_2(call: Call) -> None:
    if call.lse is not None:
        call.lse.div_(math.log(2.0))


def pads_hold_something(call: Call) -> None:
    tokens = torch.arange(len(call.out))[:, None, None]
    call.out.copy_(torch.where(tokens >= call.starts[-1], 1e-30, call.out))


def lse_of_pads_is_zero(call: Call) -> None:
    if call.lse is not None:
        call.lse.copy_(torch.where(call.lse == -math.inf, 0.0, call.lse))


def mask_scores_alone(call: Call) -> None:
    """Mask scores but not values: zero times NaN in the tail of a page, which is read whole."""
    page = call.k.shape[1]
    last = call.table.gather(1, ((call.seq_lens - 1).clamp(min=0) // page).long()[:, None])[:, 0]
    seen = call.v[last].float().sum((1, 2, 3)) * 0.0
    rows = torch.searchsorted(call.starts[1:], torch.arange(len(call.out)), right=True).clamp(max=len(last) - 1)
    live = torch.arange(len(call.out)) < call.starts[-1]
    call.out.add_(torch.where(live, seen[rows], 0.0)[:, None, None].to(call.out.dtype))


STRIDES = given(k=lambda call: dense(call.k), v=lambda call: dense(call.v))
ONE_TOKEN_PER_ROW = given(starts=lambda call: torch.arange(len(call.starts), dtype=torch.int32))
UNSCALED_CROSS = given(
    options=lambda call: replace(call.options, v_scale=call.options.v_scale if call.options.causal else None)
)
LIES: dict[str, tuple[str, dict[str, Any]]] = {
    "scale": ("scale", without(softmax_scale=0.25)),
    "window": ("window", without(sliding_window=0)),
    "window-mixed": ("mixed-window", without(sliding_window=0)),
    "softcap": ("softcap", without(logits_softcap=0.0)),
    "alibi": ("alibi", without(alibi_slopes=None)),
    "alibi-sqrt": ("alibi-sqrt", without(alibi_sqrt=False)),
    "sinks": ("sinks", without(sinks=None)),
    "k_scale": ("fp8", without(k_scale=None)),
    "v_scale": ("fp8", without(v_scale=None)),
    "cross-scale": ("cross_attention-fp8", UNSCALED_CROSS),
    "e5m2": ("fp8-e5m2", without(v_scale=None)),
    "scale-per-head": ("fp8", given(options=first_scale_for_all)),
    "not-causal": ("query_len", without(causal=False)),
    "not-causal-mixed": ("mixed", without(causal=False)),
    "nhd-strides": ("hnd", STRIDES),
    "own-strides": ("one-pool", STRIDES),
    # Skips requests whose first page is the null page, assuming that it is page 0.
    "null-page": (
        "null-page-last",
        given(seq_lens=lambda call: torch.where((call.table == 0).any(1), 0, call.seq_lens)),
    ),
    "query_len": ("query_len", ONE_TOKEN_PER_ROW),
    "tree": ("tree_drafts", without(tree_masks=None)),
    "tree-window": ("tree_drafts-window", without(tree_masks=None)),
    "limits": ("context_parallel", without(kv_limits=None)),
    "limits-mixed": ("mixed-context_parallel", without(kv_limits=None, causal=True)),
    "mixed": ("mixed", ONE_TOKEN_PER_ROW),
    "heads": ("plain", given(q=heads_in_another_order)),
    "num_queries_per_kv": ("num_queries_per_kv-3", given(q=heads_in_another_order)),
    "k-and-v": ("plain", given(k=lambda call: call.v, v=lambda call: call.k)),
    "queries-changed": ("plain", before(scale_queries)),
    "precision": ("plain", afterwards(lambda call: call.out.copy_(call.out.half()))),
    "no-lse": ("lse", given(lse=lambda call: None)),
    "lse-base-2": ("lse", afterwards(lse_to_base_2)),
    "lse-of-pads": ("lse", afterwards(lse_of_pads_is_zero)),
    "pads": ("plain", afterwards(pads_hold_something)),
    "pads-mixed": ("mixed", afterwards(pads_hold_something)),
    "nan-tail": ("plain", afterwards(mask_scores_alone)),
    "kept": ("plain", {"after": lambda self, call: setattr(self, "kept", {"last": [call.out]})}),
    "error": ("plain", before(lambda call: 1 / 0)),
}


SAID = {
    "own-strides": "expected NaN and infinities in the same places",
    "nan-tail": "expected NaN and infinities in the same places",
    "queries-changed": "modified q, which is read-only",
    "lse-of-pads": "log-sum-exp: expected -inf in padding tokens, got 0.0",
    "pads": "expected zeros in padding tokens 2 to 3, got 1e-30",
    "pads-mixed": "expected zeros in padding tokens 8 to 11, got 1e-30",
    "kept": "holds tensors after close(): Liar.kept['last'][0]",
    "error": "ZeroDivisionError: division by zero",
}
"""What the suite says of a lie, where it is not an error that is too large."""


def liar(case: str) -> type[AttentionBackend]:
    return type("Liar", (Liar,), {"__module__": __name__, **LIES[case][1]})


def test_correct_backend_passes() -> None:
    """Otherwise the lies below would prove nothing."""
    wanted = sorted({feature for feature, _ in LIES.values()})
    report = check_backend(Liar, devices=["cpu"], features=wanted, brief=True)
    assert report.ok, report
    assert {case.feature.id for case in report.passed} == set(wanted)


@pytest.mark.parametrize("case", LIES)
def test_declared_but_missing_capability_is_found(case: str) -> None:
    feature, _ = LIES[case]
    report = check_backend(liar(case), devices=["cpu"], features=[feature], brief=True)
    assert not report.passed, f"{report}"
    assert report.failed
    for _, reason in report.failed:
        assert SAID.get(case, "expected an error of at most") in reason


def test_every_capability_has_a_case() -> None:
    """What a class may declare is asked for by a feature; without the capability the feature is not."""
    asked_by = {
        "dtypes": {"dtype-float16"},
        "kv_dtypes": {"fp8"},
        "head_dims": {"head_dim-80"},
        "page_sizes": {"page_size-6"},
        "layouts": {"hnd"},
        "max_query_len": {"query_len"},
    }
    asked_by |= {flag: {f.id for f in FEATURES.values() if flag in f.needs and not f.longest} for flag in FLAGS}
    asked_by["lse"] = {"lse"}  # other features are asked for without it
    lacking = {
        "dtypes": (torch.float32,),
        "kv_dtypes": (torch.float32,),
        "head_dims": (16,),
        "page_sizes": (4,),
        "layouts": (KVLayout.NHD,),
        "max_query_len": 1,
    }
    assert {"devices", *asked_by} == {field.name for field in fields(Capabilities)}
    have = TorchReferenceBackend.capabilities
    for name, features in asked_by.items():
        assert features, f"{name}: expected a feature of backend_features.FEATURES that asks for it, got none"
        less = type("Less", (Liar,), {"capabilities": replace(have, **{name: lacking.get(name, False)})})
        assert features <= {f.id for f in declared_features(Liar, CPU)}
        assert features.isdisjoint({f.id for f in declared_features(less, CPU)}), name


def test_features_follow_the_declared_sizes() -> None:
    """A backend with few sizes is tested with these only."""
    narrow = replace(
        TorchReferenceBackend.capabilities,
        dtypes=(torch.float16,),
        kv_dtypes=(torch.float16,),
        head_dims=(24, 64),
        page_sizes=(8, 32),
        layouts=(KVLayout.HND,),
        max_query_len=2,
        lse=False,
        mixed=False,
    )
    cls = type("Narrow", (Liar,), {"capabilities": narrow, "graph_support": GraphSupport.UNIFORM})
    report = check_backend(cls, devices=["cpu"], brief=True)
    assert report.ok, report
    assert not report.skipped
    ids = {case.feature.id for case in report.passed}
    assert {"plain", "query_len", "head_dim-24", "head_dim-64", "page_size-8", "page_size-32"} <= ids
    assert not {"lse", "fp8", "mixed"} & ids
    (two,) = (case.feature.query_len for case in report.passed if case.feature.id == "query_len")
    assert two == 2


def test_unsupported_case_is_skipped_with_its_reasons() -> None:
    class Refusing(Liar):
        @classmethod
        def extra_unsupported_reasons(cls, context):
            return ["sinks: not on Sundays"] if any(spec.sinks for spec in context.attention) else []

    report = check_backend(Refusing, devices=["cpu"], features=["sinks", "plain"], brief=True)
    assert report.ok
    assert [(str(case), reason) for case, reason in report.skipped] == [
        ("liar-cpu-sinks", "backend liar: sinks: not on Sundays")
    ]
    alone = check_backend(Refusing, devices=["cpu"], features=["sinks"])
    assert not alone.ok, "nothing was checked"
    assert str(alone).endswith("0 passed, 0 failed, 1 skipped: nothing was checked")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_cuda_case_is_skipped_without_a_device() -> None:
    cases = contract_cases(TorchReferenceBackend, devices=["cuda"], features=["plain"])
    assert [str(case) for case in cases] == [
        "torch_reference-cuda-plain", "torch_reference-cuda-plain-capture_twice"
    ]  # fmt: skip
    with pytest.raises(unittest.SkipTest, match="needs a CUDA device"):
        cases[0].run()


def test_wrong_devices_and_features_raise() -> None:
    with pytest.raises(ConfigError, match=r"devices: mock_host_plan supports cpu, not 'cuda'; declare the device"):
        contract_cases(mocks.HostPlan, devices=["cuda"])
    with pytest.raises(ConfigError, match="backend: expected a subclass of AttentionBackend, got <class 'int'>"):
        contract_cases(int)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ConfigError, match=r"features: expected some of plain, (?!.* plain,).*, got 'plane'"):
        contract_cases(TorchReferenceBackend, features=["plane"])


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert backend_contract.main(["torch_reference", "--device", "cpu", "--feature", "plain", "--brief"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "passed   torch_reference-cpu-plain",
        "passed   torch_reference-cpu-plain-capture_twice",
        "2 passed, 0 failed, 0 skipped",
    ]
    broken = f"{mocks.__name__}:{mocks.PlannedAtCapture.__name__}"
    assert backend_contract.main([broken, "--feature", "plain", "--brief"]) == 1
    assert "FAILED   broken_planned_at_capture-cpu-plain: " in capsys.readouterr().out
    for name in ("nobody", "no_such_module:Backend", "graphrt.batch:Nothing", "graphrt.batch:Batch"):
        with pytest.raises(SystemExit, match="2"):
            backend_contract.main([name])
        assert "error: " in capsys.readouterr().err


def test_suite_needs_neither_pytest_nor_the_checkout() -> None:
    """Only pytest loads the plugin."""
    for path in {*(ROOT / "graphrt/testing").glob("*.py")} - {ROOT / "graphrt/testing/pytest_plugin.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"pytest", "tests", "hypothesis", "scripts"}, path
    code = "import sys, graphrt.testing.backend_contract; print(sorted({'pytest', 'tests'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == "[]\n"
