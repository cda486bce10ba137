"""The measured table, and selection of a backend by it, with invented times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt.backends import registry
from graphrt.backends.capabilities import BackendContext, Capabilities
from graphrt.backends.ranking import Ranking, RankingCell, load_ranking, parse_ranking, ranking_record
from graphrt.backends.registry import register_backend, select_backend, standings
from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.cli import env as cli_env
from graphrt.cli.options import EnvOptions
from graphrt.kernels.errors import UnsupportedError
from graphrt.kernels.types import KVLayout
from graphrt.spec import AttentionSpec, KVCacheSpec
from scripts import make_docs

GPU = "a made-up device"
SMALL, LARGE = (1, 512), (64, 8192)


def table(**times: tuple[float | None, float | None]) -> Ranking:
    """Times of each backend in the small and the large cell; None: not measured."""
    cells = []
    for at, (batch, context) in enumerate((SMALL, LARGE)):
        cells.append(RankingCell(batch, context, {n: us for n, both in times.items() if (us := both[at]) is not None}))
    return Ranking(GPU, tuple(cells))


def relative(ranking: Ranking, *names: str, reqs: int = 256, length: int = 1 << 17) -> dict[str, float]:
    return ranking.relative_times(names, max_num_reqs=reqs, max_seq_len=length)


def test_geometric_mean_over_the_sizes_of_a_runtime() -> None:
    ranking = table(a=(1.0, 16.0), b=(2.0, 2.0))
    assert relative(ranking, "a", "b") == pytest.approx({"b": 1.0, "a": 2.0})
    assert list(relative(ranking, "a", "b")) == ["b", "a"], "the fastest first"
    for small in ({"reqs": 1}, {"length": 512}, {"reqs": 63}, {"length": 8191}):
        assert relative(ranking, "a", "b", **small) == pytest.approx({"a": 1.0, "b": 2.0})
    assert relative(ranking, "a", "b", reqs=64, length=8192) == pytest.approx({"b": 1.0, "a": 2.0})
    ranking = Ranking(GPU, (RankingCell(16, 512, {"a": 1.0, "b": 3.0}), RankingCell(64, 512, {"a": 9.0, "b": 1.0})))
    assert relative(ranking, "a", "b", reqs=2, length=16) == pytest.approx({"a": 1.0, "b": 3.0}), "the smallest size"


def test_backend_without_all_times_is_not_ranked() -> None:
    ranking = table(a=(5.0, 50.0), b=(1.0, None), c=(6.0, 60.0))
    assert list(relative(ranking, "a", "b", "c", "d")) == ["a", "c"]
    assert relative(ranking, "b") == {"b": 1.0}, "nobody has a figure in the other cell"
    assert list(relative(ranking, "a", "b", "c", reqs=1)) == ["b", "a", "c"]
    assert relative(ranking) == relative(ranking, "d") == relative(Ranking(), "a") == {}


def test_ranking_record_of_a_result() -> None:
    result = {
        "gpu": GPU,
        "tree": "abc",
        "data": {
            "layers": 32,
            "cells": [
                {"batch": 1, "context": 512, "backends": {"a": {"us": 1.23456}, "b": {"reason": "no memory"}}},
                {"batch": 2, "context": 512, "backends": {"a": {"us": None}, "b": {"us": 7.0}}},
            ],
        },
    }
    record = ranking_record(result, None)
    assert record["tree"] == "abc"
    ranking = parse_ranking(json.loads(json.dumps(record)))
    assert ranking == Ranking(GPU, (RankingCell(1, 512, {"a": 1.235}), RankingCell(2, 512, {"b": 7.0})))
    assert ranking.names == {"a", "b"}
    assert parse_ranking(ranking_record(None, None)) == Ranking()
    ranking = load_ranking()
    assert all(cell.us_per_layer for cell in ranking.cells)
    assert "torch_reference" not in ranking.names, "the last resort is never ranked"
    assert (ranking.gpu is None) == (not ranking.cells)


def capable(backend: str, **changes: Any) -> type[TorchReferenceBackend]:
    """A registered backend that supports `context()` except for `changes`."""
    base = Capabilities(
        devices=("cuda", "cpu"), dtypes=(torch.bfloat16,), kv_dtypes=(torch.bfloat16,), head_dims=None, page_sizes=None,
        layouts=(KVLayout.NHD,), max_query_len=4, sliding_window=True, logits_softcap=True, mixed=True,
    )  # fmt: skip
    attributes = {"name": backend, "capabilities": replace(base, **changes)}
    return register_backend(type(backend, (TorchReferenceBackend,), attributes))  # type: ignore[return-value]


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[TorchReferenceBackend]]:
    """Besides triton and torch_reference: one that needs pages of 256, two that are supported, one not measured."""
    builtin = {name: registry._BUILTIN[name] for name in ("triton", "torch_reference")}
    monkeypatch.setattr(registry, "_BUILTIN", builtin)
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    large_pages = capable("large_pages", page_sizes=(256, 512))
    return {"large_pages": large_pages} | {name: capable(name) for name in ("swift", "steady", "unknown")}


def context(device: str = "cuda", page_size: int = 16, reqs: int = 256, **options: Any) -> BackendContext:
    spec = AttentionSpec(32, 8, 128, torch.bfloat16, **options)
    kv = KVCacheSpec(1, 8, 128, page_size, KVLayout.NHD, torch.bfloat16)
    return BackendContext((spec,), (kv,), torch.device(device), reqs, 2048, 8192)


TIMES = {"triton": (10.0, 100.0), "swift": (5.0, 400.0), "steady": (13.4, 134.0), "large_pages": (1.0, 1.0)}


def use(monkeypatch: pytest.MonkeyPatch, ranking: Ranking) -> None:
    monkeypatch.setattr(registry, "load_ranking", lambda: ranking)


def test_fastest_supported_backend_is_selected(monkeypatch: pytest.MonkeyPatch, backends: dict[str, Any]) -> None:
    """Backends for selection by name are not ranked."""
    use(monkeypatch, table(**TIMES))
    assert select_backend(context())[1] == (
        "triton: fastest of 3 supported backends (1.00; steady 1.34, swift 1.41 on a made-up device); "
        "not large_pages (page_size 16: supports 256, 512)"
    )
    cls, explanation = select_backend(context(reqs=1))
    assert cls.name == "swift"
    assert explanation.startswith("swift: fastest of 3 supported backends (1.00; triton 2.00, steady 2.68 on")
    assert select_backend(context(page_size=256))[0].name == "large_pages"
    on_cpu = "swift: first in order of preference that supports device cpu"
    assert select_backend(context("cpu"))[1].startswith(on_cpu), "the table applies to GPUs only"
    assert select_backend(context(reqs=1), "swift")[1] == "swift: chosen by name"


@pytest.mark.usefixtures("backends")
def test_static_order_of_backends_that_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They rank after measured backends. torch_reference is always last."""
    use(monkeypatch, table(steady=(1.0, 1.0), torch_reference=(0.1, 0.1)))
    only = "steady: the only supported backend of those measured on a made-up device"
    assert select_backend(context())[1] == only
    use(monkeypatch, table(large_pages=(1.0, 1.0)))
    cls, explanation = select_backend(context())
    assert cls.name == "triton"
    assert explanation == (
        "triton: first in order of preference that supports device cuda; "
        "not large_pages (page_size 16: supports 256, 512)"
    )
    use(monkeypatch, Ranking())
    assert select_backend(context())[1] == "triton: first in order of preference that supports device cuda"


@pytest.mark.usefixtures("backends")
def test_error_lists_every_reason_of_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, table(**TIMES))
    with pytest.raises(UnsupportedError) as caught:
        select_backend(context("meta", sinks=True))
    text = str(caught.value)
    for name in registry.backend_names():
        assert f"{name} (device meta: runs on " in text
    assert "large_pages (device meta: runs on cuda, cpu only, page_size 16: supports 256, 512, sinks: not" in text


@pytest.mark.usefixtures("backends")
def test_standings(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, table(**TIMES))
    found = {standing.name: standing for standing in standings(context())}
    assert list(found) == registry.backend_names()
    assert {name: standing.rank for name, standing in found.items()} == {
        "triton": 1, "steady": 2, "swift": 3, "unknown": 4, "torch_reference": 5, "large_pages": None
    }  # fmt: skip
    assert found["swift"].relative == pytest.approx(2**0.5)
    assert found["unknown"].relative is None
    assert found["large_pages"].unsupported_reasons == ["page_size 16: supports 256, 512"]
    best = min((s for s in found.values() if s.rank is not None), key=lambda s: s.rank)
    assert select_backend(context())[0].name == best.name


@pytest.fixture
def env_on_cuda(monkeypatch: pytest.MonkeyPatch, backends: dict[str, Any]) -> None:
    """`graphrt env` as on a GPU, with TIMES."""
    use(monkeypatch, table(**TIMES))
    monkeypatch.setattr(cli_env, "_device", lambda: torch.device("cuda"))
    # Building triton's backend asks the device, which need not be there.
    monkeypatch.setattr(cli_env, "_graph_support", lambda standing, context: "ALWAYS")
    monkeypatch.setenv("COLUMNS", "300")


@pytest.mark.usefixtures("env_on_cuda")
def test_env_prints_ranks_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    capable("neither", page_sizes=(32, 64), dtypes=(torch.float16,))
    cli_env.run(EnvOptions(as_json=False))
    printed = capsys.readouterr().out
    for text in (
        "1 (1.00 x the fastest)", "2 (1.34 x the fastest)", "page_size 16: supports 256, 512",
        "triton: fastest of 3 supported backends",
    ):  # fmt: skip
        assert text in printed
    cli_env.run(EnvOptions(as_json=True))
    known = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["backends"]["known"]}
    assert known["unknown"]["rank"] == 4


@pytest.mark.usefixtures("env_on_cuda")
@pytest.mark.parametrize(
    ("named", "chosen", "reason"),
    [
        ("steady", "steady", "steady: chosen by name, by GRAPHRT_BACKEND"),
        (
            "large_pages",
            None,
            "backend, by name or GRAPHRT_BACKEND large_pages: does not support this model",
        ),
        ("nobody", None, "backend, by name or GRAPHRT_BACKEND: expected one of triton, "),
        ("a,b", None, "GRAPHRT_BACKEND: expected the name of a backend, got 'a,b'"),
    ],
)
def test_env_selects_as_a_runtime_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: str, chosen: str | None, reason: str
) -> None:
    monkeypatch.setenv("GRAPHRT_BACKEND", named)
    report = cli_env._backends()
    assert report["chosen"] == chosen
    assert report["reason"].startswith(reason)
    cli_env.run(EnvOptions(as_json=False))
    printed = capsys.readouterr().out
    assert reason in printed
    assert printed.count("(chosen)") == (chosen is not None)


def test_documents_and_table_are_generated_from_the_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(make_docs, "ROOT", tmp_path)
    assert parse_ranking(json.loads(make_docs.ranking_file())) == Ranking()
    assert make_docs.ranking_table().startswith("Not measured yet")
    cells = [
        {"batch": b, "context": 512, "backends": {"triton": {"us": 8.25 * b}, "other": {"us": 9.0}}} for b in (1, 4)
    ]
    data = {"layers": 32, "heads": [32, 8, 128], "dtype": "bfloat16", "page_sizes": {"triton": 16}, "cells": cells}
    result = tmp_path / "docs/results/nvidia-h200/backends.json"
    result.parent.mkdir(parents=True)
    result.write_text(json.dumps({"gpu": GPU, "tree": "0123456789abcdef", "data": data}))
    made = parse_ranking(json.loads(make_docs.ranking_file()))
    assert made.gpu == GPU
    assert made.cells[1] == RankingCell(4, 512, {"triton": 33.0, "other": 9.0})
    table = make_docs.ranking_table().splitlines()
    assert table[0] == "| batch | context | `triton` |", "known backends only"
    assert table[2:4] == ["| 1 | 512 | 8.2 |", "| 4 | 512 | 33.0 |"]
    assert "tree `0123456789ab`" in table[-1]
    assert make_docs.planning_time() == "Planning has not been measured yet."
    for cell, low in zip(cells, (100.4, 600.0), strict=True):
        cell["backends"]["flashinfer"] = {"us": 9.0, "host_us": low}
    longer = [cell | {"context": 8192, "backends": {"flashinfer": {"us": 9.0, "host_us": 650.6}}} for cell in cells[1:]]
    data["cells"] = cells + longer
    result.write_text(json.dumps({"gpu": GPU, "tree": "0123456789abcdef", "data": data}))
    assert (
        make_docs.planning_time()
        == "Planning takes 100 us of host time per step for 1 request, and up to 651 us for 4 requests."
    )
