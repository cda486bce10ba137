"""Bundle files: damaged, hostile and other files raise, and bundles are written to regular files only."""

from __future__ import annotations

import json
import os
import random
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graphrt.bundle.bundle import Bundle
from graphrt.bundle.format import FORMAT, from_plain, to_plain, write_file
from graphrt.config import RequestTensor, RuntimeConfig
from graphrt.kernels.errors import ConfigError, GraphRTError
from graphrt.kernels.types import KVLayout
from graphrt.spec import AttentionSpec, KVCacheSpec
from tests.support.steps import decode, prompt
from tests.support.toy import VOCAB, ToyModel, make_rig

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rig = make_rig(CPU, max_num_reqs=2, max_num_tokens=8, decode_sizes=(2,), mixed_sizes=(8,), fill=0.0)
    recording = rig.manager.record(2)
    rig.manager.replay(prompt(1, 2, 3)).tokens()
    rig.manager.replay(decode(4)).tokens()
    path = tmp_path_factory.mktemp("bundle") / "good.bundle"
    Bundle.of(recording).save(path)
    return path


def test_damaged_bytes_raise(good: Path, tmp_path: Path) -> None:
    """Any bit may change: a changed page of keys would give other logits without an error."""
    content, generator = good.read_bytes(), random.Random(1)
    path = tmp_path / "bad.bundle"
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(generator.choice((1, 1, 4, 64))):
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        if generator.random() < 0.2:
            damaged = damaged[: generator.randrange(len(damaged))]
        if damaged == content:
            continue
        path.write_bytes(damaged)
        with pytest.raises(GraphRTError):
            Bundle.load(path)


def test_logits_distance_of_nan_and_infinity(good: Path, tmp_path: Path) -> None:
    def change(meta: Any, tensors: Any) -> None:
        tensors["0/logits"][0, 3] = float("nan")
        tensors["1/logits"][0, 3] = float("-inf")

    model = ToyModel(CPU, torch.float32)
    with Bundle.load(rewritten(good, tmp_path, change)).open(model, device=CPU) as replays:
        assert [replays.run(index).logits_distance for index in (0, 1)] == [float("inf")] * 2
    forward = model.forward
    lost = torch.zeros(VOCAB).index_fill(0, torch.tensor([3]), float("nan"))
    model.forward = lambda step: forward(step) + lost  # type: ignore[method-assign]
    with Bundle.load(rewritten(good, tmp_path, change)).open(model, device=CPU) as replays:
        found = [replays.run(index) for index in (0, 1)]
    assert [launch.logits_distance for launch in found] == [0, float("inf")]
    assert str(found[0]).endswith("logits as recorded")


def rewritten(good: Path, tmp_path: Path, change: Any) -> Path:
    """The file with its JSON and tensors changed by a function."""
    from safetensors import safe_open

    with safe_open(good, framework="pt") as file:
        meta = json.loads(file.metadata()["meta"])
    tensors = load_file(good)
    change(meta, tensors)
    path = tmp_path / "changed.bundle"
    write_file(path, meta, tensors)  # whose digest is right
    return path


def config_of(meta: dict[str, Any]) -> dict[str, Any]:
    return meta["config"]["fields"]


HOSTILE = {
    "no launches": lambda m, t: m["launches"].clear(),
    "a class of Python": lambda m, t: m["config"].update({"class": "os.system"}),
    "a class of ours elsewhere": lambda m, t: m.update(config=m["launches"][0]["descriptor"]),
    "no fields": lambda m, t: m["config"].pop("fields"),
    "a field too many": lambda m, t: config_of(m).update(evil=1),
    "endless rows": lambda m, t: config_of(m).update(max_num_reqs=65536, max_num_tokens=65536),
    "a text as a number": lambda m, t: m.update(vocab_size="many"),
    "endless pages": lambda m, t: m["launches"][0].update(pool_pages=[1 << 40]),
    "a page out of range": lambda m, t: t["0/ids/0"].add_(100),
    "a page twice": lambda m, t: t["1/ids/0"].fill_(1),
    "other bytes of a page": lambda m, t: t.update({"0/pages/0": t["0/pages/0"][:, :-1].contiguous()}),
    "no pages": lambda m, t: t.pop("0/pages/0"),
    "no state": lambda m, t: t.pop("0/state/req_seq_lens"),
    "another state": lambda m, t: t.update({"0/state/req_seq_lens": torch.zeros(99, dtype=torch.int32)}),
    "another dtype": lambda m, t: t.update({"0/state/req_seq_lens": t["0/state/req_seq_lens"].long()}),
    "unknown state": lambda m, t: t.update({"0/state/__class__": torch.zeros(1)}),
    "a request index out of range": lambda m, t: t["1/state/order"].fill_(2),
    "a page beyond the pool": lambda m, t: t["1/state/page_table"].fill_(40),
    "a token beyond the vocabulary": lambda m, t: t["1/state/last_token"].fill_(VOCAB),
    "a length beyond all": lambda m, t: t["1/state/req_seq_lens"].fill_(65),
    "spans beyond the table": lambda m, t: t["1/state/page_spans"].fill_(1000),
    "short words": lambda m, t: t.update({"0/words": t["0/words"][:5].clone()}),
    "many rows": lambda m, t: t["0/words"].narrow(0, 2, 1).fill_(1 << 30),
    "a negative number of rows": lambda m, t: t["0/words"].narrow(0, 2, 1).fill_(-5),
    "endless steps": lambda m, t: t["0/words"].narrow(0, 6, 1).fill_(1 << 20),
    "words of another type": lambda m, t: t.update({"0/words": t["0/words"].float()}),
    "a descriptor of nothing": lambda m, t: m["launches"][0].update(descriptor=None),
    "a smaller size": lambda m, t: m["launches"][0]["descriptor"]["fields"].update(padded_tokens=1, padded_reqs=1),
    "launches of another kind": lambda m, t: m.update(launches=3),
    "groups of nothing": lambda m, t: m.update(groups=[]),
    "more pages than are kept": lambda m, t: m["launches"][0].update(pool_pages=[1 << 24]),
    "a text as a choice": lambda m, t: m.update(samples="yes"),
    "scales of nothing": lambda m, t: t.update({"scales/x": torch.ones(2)}),
    "deep": lambda m, t: m.update(model=json.loads("[" * 500 + "]" * 500)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_raise(good: Path, tmp_path: Path, name: str) -> None:
    path = rewritten(good, tmp_path, HOSTILE[name])
    with pytest.raises(GraphRTError):
        Bundle.load(path)


def test_other_files_raise(tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    for nothing in (path, tmp_path):
        with pytest.raises(ConfigError, match=r"bundle: .* is (not a file; check|a folder; specify a file)"):
            Bundle.load(nothing)
    with pytest.raises(ConfigError, match="path: expected str or Path, got None"):
        Bundle.load(None)  # type: ignore[arg-type]
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(ConfigError, match="is not a bundle, or is damaged"):
        Bundle.load(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ConfigError, match=f"expected a {FORMAT}, got another safetensors file"):
        Bundle.load(path)
    save_file({"x": torch.zeros(1)}, path, {"format": "graphrt replay bundle, version 1"})
    with pytest.raises(ConfigError, match="version 2, got 'graphrt replay bundle, version 1'"):
        Bundle.load(path)
    rig = make_rig(CPU)
    recording = rig.manager.record()
    rig.manager.replay(prompt(1)).tokens()
    with pytest.raises(ConfigError, match="model: cannot be written as JSON"):
        Bundle.of(recording, model={"made by": object()}).save(path)
    with pytest.raises(ConfigError, match="model: expected Mapping, got 'tiny'"):
        Bundle.of(recording, model="tiny")  # type: ignore[arg-type]


def test_a_bundle_is_written_to_regular_files_only(good: Path, tmp_path: Path) -> None:
    """Links stay and point to the new bundle; pipes, devices and folders are refused and stay as they are."""
    bundle, target, link = Bundle.load(good), tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    for content in (None, b"old"):  # a link to no file, and to a file
        if content is not None:
            target.write_bytes(content)
        bundle.save(link)
        assert link.readlink() == target
        assert Bundle.load(target).vocab_size == Bundle.load(link).vocab_size == VOCAB
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    tmp_path.joinpath("to_pipe").symlink_to(pipe)
    for name, text in (
        ("pipe", "is a pipe or a device; specify a regular file"),
        ("to_pipe", "is a pipe or a device; specify a regular file"),
        ("", "is a folder; specify a file in it"),
        ("no folder/x.bundle", "no folder' does not exist; create it"),
        ("x" * 999, "cannot be written .*File name too long"),
    ):
        with pytest.raises(ConfigError, match=f"^bundle: .*{text}"):
            bundle.save(tmp_path / name)
    with pytest.raises(ConfigError, match="is a pipe or a device"):
        bundle.save(os.devnull)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_settings_survive_a_round_trip() -> None:
    values = (
        RuntimeConfig(request_tensors=(RequestTensor("a", (2, 3), torch.int64, -1),), backend="triton",
        loop_sizes=(1,)),
        AttentionSpec(4, 2, 64, torch.float16, alibi_slopes=(0.5, 0.25, 0.1, 0.0), sinks=True),
        KVCacheSpec(3, 2, 64, 32, KVLayout.HND, torch.float8_e5m2, "last", layers=(4, 1, 0)),
        np.float64(0.5).item(), None, True, (1, (2, "x")),
    )  # fmt: skip
    assert from_plain(json.loads(json.dumps(to_plain(values)))) == values
    with pytest.raises(ConfigError):
        from_plain({"class": "RuntimeConfig", "fields": {"backend": {"enum": "KVLayout", "name": "XYZ"}}})
