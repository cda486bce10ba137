"""A backend of another package: a distribution with an entry point, found by a process that imports only graphrt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MODULE = '''
"""Attention in plain torch under another name, which counts its own launches."""

import sys

from graphrt.backends.torch_reference import TorchReferenceBackend


class AcmeBackend(TorchReferenceBackend):
    name = "acme"
    planned = []

    def plan_replay(self, descriptor, batch):
        self.planned.append((str(descriptor), batch.seq_lens.tolist()))
'''

BROKEN = "import a_package_that_nobody_has\n"

PROBE = """
import json, sys
import torch
from graphrt.backends.registry import backend_names, select_backend, standings
from graphrt.kernels.errors import ConfigError
from graphrt.backends.capabilities import BackendContext
from graphrt.spec import AttentionSpec, KVCacheSpec

assert "graphrt_acme" not in sys.modules, "a package is imported when it is asked for, not before"
names = backend_names()
spec = AttentionSpec(4, 2, 16, torch.float32)
context = BackendContext((spec,), (KVCacheSpec(1, 2, 16, 4, dtype=torch.float32),), torch.device("cpu"), 8, 64, 32)
cls, reason = select_backend(context, "acme")
report = {"names": names, "class": f"{cls.__module__}:{cls.__name__}", "reason": reason}
report["chosen"] = select_backend(context)[1]
report["explained"] = {s.name: s.unsupported_reasons for s in standings(context) if s.name.startswith("acme")}
report["errors"] = {}
for name in (name for name in names if name.startswith("acme_")):
    try:
        select_backend(context, name)
    except ConfigError as error:
        report["errors"][name] = str(error)
print(json.dumps(report))
"""

STEP = """
import json
import torch
import graphrt_acme
from graphrt.batch import Batch
from tests.support.toy import make_rig

rig = make_rig(torch.device("cpu"))
handle = rig.manager.replay(Batch(req_indices=[0], seq_lens=[1], tokens=[3], page_indptr=[0, 1], page_ids=[5]))
print(json.dumps({
    "token": int(handle.tokens()[0]),
    "expected": int(rig.model.oracle([3]).argmax()),
    "why_eager": handle.why_eager,
    "recorder": rig.manager.stats().recorder,
    "backend": rig.manager.stats().backend,
    "planned": graphrt_acme.AcmeBackend.planned,
}))
"""


def install(folder: Path, entry_points: dict[str, str]) -> None:
    """Write what pip installs of a distribution: its modules, and a .dist-info with METADATA and entry_points.txt."""
    (folder / "graphrt_acme.py").write_text(MODULE)
    (folder / "graphrt_acme_broken.py").write_text(BROKEN)
    info = folder / "graphrt_acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: graphrt-acme\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[graphrt.backends]", *lines, ""]))


def run_python(code: str, folder: Path, **variables: str) -> dict:
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"} | variables
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    entries = {
        "acme": "graphrt_acme:AcmeBackend",
        "acme_broken": "graphrt_acme_broken:AcmeBackend",
        "acme_gone": "graphrt_acme:GoneBackend",
        "acme_renamed": "graphrt_acme:AcmeBackend",
        "acme_function": "graphrt_acme:sys",
    }
    install(tmp_path, entries)
    return tmp_path


def test_installed_package_registers_a_backend(site: Path) -> None:
    """A broken entry point raises by name, without effect on other entry points."""
    report = run_python(PROBE, site)
    names = report["names"]
    assert {"acme", "acme_broken", "acme_gone", "acme_renamed", "acme_function"} < set(names)
    assert (names[0], names[-1]) == ("triton", "torch_reference"), "the last resort, after what is installed"
    assert report["class"] == "graphrt_acme:AcmeBackend"
    assert report["reason"] == "acme: chosen by name"
    assert report["chosen"].startswith("acme: first in order of preference that supports device cpu")
    expected = {
        "acme_broken": "graphrt_acme_broken:AcmeBackend cannot be imported (ModuleNotFoundError: "
        "No module named 'a_package_that_nobody_has'); repair or uninstall the package that declares it",
        "acme_gone": "graphrt_acme:GoneBackend cannot be imported (AttributeError: ",
        "acme_renamed": "expected graphrt_acme:AcmeBackend to be an AttentionBackend subclass of that name, got ",
        "acme_function": "expected graphrt_acme:sys to be an AttentionBackend subclass of that name, got <module 'sys'",
    }
    assert report["errors"].keys() == expected.keys()
    for name, text in expected.items():
        assert report["errors"][name].startswith(f"backend {name}: {text}")
        assert report["explained"][name] == [report["errors"][name]], "env says the same"
    assert report["explained"]["acme"] == []


@pytest.mark.parametrize("variables", [{}, {"GRAPHRT_BACKEND": "acme"}], ids=["chosen", "variable"])
def test_runtime_uses_the_installed_backend(tmp_path: Path, variables: dict[str, str]) -> None:
    """A decode step through the op trace, selected by GRAPHRT_BACKEND or automatically."""
    install(tmp_path, {"acme": "graphrt_acme:AcmeBackend"})
    report = run_python(STEP, tmp_path, CUDA_VISIBLE_DEVICES="", **variables)
    assert report["backend"] == "acme"
    assert report["recorder"].startswith("op trace")
    assert report["why_eager"] == ""
    assert report["token"] == report["expected"]
    assert report["planned"] == [["decode[1]", [1]]]


def test_env_shows_installed_backends_and_their_errors(tmp_path: Path) -> None:
    """A broken package is skipped with a reason."""
    install(tmp_path, {"acme_broken": "graphrt_acme_broken:AcmeBackend"})
    code = "import sys; sys.argv = ['graphrt', 'env', '--json']; from graphrt.cli.main import main; main()"
    report = run_python(code, tmp_path, CUDA_VISIBLE_DEVICES="")["backends"]
    assert report["chosen"] == "torch_reference"
    assert "not acme_broken (backend acme_broken: graphrt_acme_broken:AcmeBackend cannot be" in report["reason"]
    (broken,) = (entry for entry in report["known"] if entry["name"] == "acme_broken")
    assert "a_package_that_nobody_has" in broken["unsupported_reasons"][0]
    assert (broken["rank"], broken["graph_support"]) == (None, "unknown")
