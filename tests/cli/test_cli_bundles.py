"""`graphrt capture` and `graphrt replay`, as commands and as scripts: tables, bundles, exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.batch import Batch
from graphrt.bundle.bundle import Bundle
from graphrt.capture.inspect.view import GraphView
from graphrt.cli.capture import _named_model
from graphrt.cli.options import CaptureOptions
from graphrt.config import RuntimeConfig
from graphrt.models import shapes
from graphrt.models.loading import load_model, make_runtime
from tests.support.cli import TINY
from tests.support.model_fixtures import save_oracle

CAPTURE = ("capture", "--shape", "tiny", "--device", "cpu", "--rows", "3", "--step-tokens", "16", "--context", "64")


@pytest.fixture
def bundle(graphrt, tmp_path: Path) -> Path:
    path = tmp_path / "steps.bundle"
    code, out, log = graphrt(*CAPTURE, "--record", path, "--prompt", 20, "--after", 3, "--launches", 2)
    assert code == 0, log
    assert json.loads(out.splitlines()[-1])["bundle"] == str(path)
    return path


def test_capture_prints_the_cost_of_each_graph(graphrt) -> None:
    code, out, log = graphrt(*CAPTURE)
    assert code == 0
    assert "captured" in log
    result = json.loads(out.splitlines()[-1])
    assert [graph["size"] for graph in result["graphs"]] == [
        "mixed[16 tokens, 3]", "decode[3]", "decode[2]", "decode[1]",
    ]  # fmt: skip
    assert all(graph["nodes"] > 10 for graph in result["graphs"])
    for graph in result["graphs"]:
        assert any(graph["size"] in line and str(graph["nodes"]) in line for line in out.splitlines()[:-1])
    code, out, _ = graphrt(*CAPTURE, "--json-only", "--nodes", "--against", "2")
    assert len(out.splitlines()) == 1


@pytest.mark.parametrize(("size", "text"), [("2", "scalar padded_reqs: 3 -> 2"), ("3", "decode[3]: equal: ")])
def test_capture_compares_two_batch_sizes(graphrt, size: str, text: str) -> None:
    code, out, _ = graphrt(*CAPTURE, "--against", size)
    assert code == 0
    assert f"decode[3] against decode[{size}]: " in out
    assert text in out


def test_a_bundle_runs_again(graphrt, bundle: Path) -> None:
    assert [launch.words.num_reqs for launch in Bundle.load(bundle).launches] == [3, 3]
    code, out, log = graphrt("replay", bundle, "--device", "cpu")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("launch 0, decode[3], 3 requests: graph and eager step are equal bit by bit; tokens as")
    result = json.loads(lines[-1])
    assert [launch["tokens_as_recorded"] for launch in result["launches"]] == [True, True]
    assert "2 launches, recorded with graphrt" in log
    assert "shape tiny, seed 0" in " ".join(log.split())
    code, out, log = graphrt("replay", bundle, "--device", "cpu", "--backend", "torch_reference", "--json-only")
    assert (code, len(out.splitlines()), log) == (0, 1, "")


def test_a_model_folder_is_found_from_any_other(graphrt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the folder was moved, or is elsewhere on another machine, `--model` names it."""
    path, folder = tmp_path / "m.bundle", tmp_path / "m"
    save_oracle(folder, "Llama")
    monkeypatch.chdir(tmp_path)
    arguments = [*CAPTURE, "--record", path, "--prompt", 4, "--after", 1]
    arguments[1:3] = "--model", "m"
    code, _, log = graphrt(*arguments)
    assert code == 0, log
    assert Bundle.load(path).model == {"model": str(folder)}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, out, log = graphrt("replay", path, "--device", "cpu")
    assert code == 0, log
    assert "tokens as recorded, logits as recorded" in out
    folder.rename(tmp_path / "moved")
    code, _, log = graphrt("replay", path, "--device", "cpu")
    assert code == 1
    assert f"got '{folder}', which does not exist" in " ".join(log.split())
    code, out, log = graphrt("replay", path, "--device", "cpu", "--model", "../moved")
    assert code == 0, log
    assert "tokens as recorded, logits as recorded" in out


def test_a_bundle_keeps_the_name_of_a_shape() -> None:
    assert _named_model(CaptureOptions(model="dummy:tiny")) == {"model": "dummy:tiny"}
    assert _named_model(CaptureOptions(shape="tiny")) == {"shape": "tiny", "seed": 0}


def test_a_graph_that_differs_ends_with_1(graphrt, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend scales by its number of calls: a Python number, which each graph freezes."""
    calls, run = [0], TorchReferenceBackend.run

    def wrong(self, layer, q, metadata, out, **options):
        calls[0] += 1
        run(self, layer, q, metadata, out, **options)
        out.mul_(1 + calls[0])

    monkeypatch.setattr(TorchReferenceBackend, "run", wrong)
    code, out, _ = graphrt("replay", bundle, "--device", "cpu")
    assert code == 1
    result = json.loads(out.splitlines()[-1])
    assert not any(launch["graph_is_eager"] for launch in result["launches"])
    assert "in the graph" in result["launches"][0]["difference"]


def test_errors_are_one_line(graphrt, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "other", replace(TINY, vocab_size=101))
    nothing = tmp_path / "nothing.bundle"
    nothing.write_bytes(b"no bundle")
    for arguments, text in (
        (("replay", nothing), "nothing.bundle is not a bundle, or is damaged"),
        (("replay", bundle, "--shape", "tiny", "--model", "x"), "replay: expected one of --shape and --model"),
        (("replay", bundle, "--shape", "other", "--device", "cpu"), "replay: the attention layers or the vocabulary"),
        (("capture", "--device", "cpu"), "capture: expected one of --shape and --model, got none"),
        ((*CAPTURE, "--record", nothing, "--prompt", "60", "--after", "9"), "--context: expected at least 70, the sum"),
        ((*CAPTURE, "--size", "2"), "--size: requires --html, --json, --nodes or --against; add"),
        ((*CAPTURE, "--against", "5"), "--against: expected one of the sizes 3, 2, 1, got 5"),
        ((*CAPTURE, "--nodes", "--size", "7"), "--size: expected one of the sizes 3, 2, 1, got 7"),
        ((*CAPTURE, "--html", tmp_path / "none" / "x"), f"the folder '{tmp_path / 'none'}' does not exist; create it"),
        ((*CAPTURE, "--html", tmp_path), f"--html: '{tmp_path}' is a folder; specify a file in it"),
        ((*CAPTURE, "--json", "x" * 999), "File name too long"),
        ((*CAPTURE, "--record", tmp_path), f"bundle: '{tmp_path}' is a folder; specify a file in it"),
        ((*CAPTURE, "--record", "/dev/null"), "bundle: '/dev/null' is a pipe or a device; specify a regular file"),
        ((*CAPTURE, "--step-tokens", "2"), "--step-tokens: expected at least --rows, 3, got 2; raise it"),
        ((*CAPTURE, "--launches", "4"), "--launches: requires --record; add --record FILE"),
    ):
        code, _, log = graphrt(*arguments)
        assert code == 1, arguments
        assert text in log.splitlines()[-1], arguments


def test_a_bundle_of_another_dtype_than_the_devices_runs(graphrt, tmp_path: Path) -> None:
    """A bfloat16 bundle of a GPU runs on a CPU, where models are loaded in float32 by default."""
    model = load_model(TINY, device="cpu", dtype=torch.bfloat16, max_positions=64).model
    with make_runtime(model, RuntimeConfig(2, 8, 64), num_pages=9) as runtime:
        runtime.capture()
        recording = runtime.manager.record()
        prompt = Batch(
            req_indices=[0], seq_lens=[3], query_lens=[3], tokens=[5, 6, 7], page_indptr=[0, 1], page_ids=[3]
        )
        runtime.replay(prompt).tokens()
        Bundle.of(recording, model={"shape": "tiny", "seed": 0}).save(tmp_path / "bf16.bundle")
    code, out, log = graphrt("replay", tmp_path / "bf16.bundle", "--device", "cpu")
    assert code == 0, log
    assert "tokens as recorded, logits as recorded" in out


def test_a_graph_as_a_page_and_its_audit(graphrt, tmp_path: Path) -> None:
    page = tmp_path / "graph.html"
    nodes = tmp_path / "graph.json"
    code, out, log = graphrt(*CAPTURE, "--html", page, "--json", nodes, "--nodes", "--audit", "--size", "2")
    assert code == 0
    view = GraphView.from_json(json.loads(nodes.read_text()))
    assert view.num_nodes > 10
    assert all(name in out for name in view.counts())
    assert f"tiny, decode[2]: {view.num_nodes} nodes, {len(view.edges)} edges" in out
    assert json.loads(out.splitlines()[-1])["findings"] == []
    assert "decode[2]: audit of" in log
    text = page.read_text()
    assert "tiny, decode[2]" in text
    assert "graphrt::apply" in text or "unpack" in text
