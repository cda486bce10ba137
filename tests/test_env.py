"""Environment variables: values, defaults, malformed values, docs/env.md, and the environment report."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import graphrt
from graphrt import env
from graphrt.bench import environment
from graphrt.kernels.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in ("GRAPHRT_BACKEND", "GRAPHRT_CACHE", "GRAPHRT_DEBUG", "GRAPHRT_LINEAR_PLANS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_defaults_and_values(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert env.backend() is None
    assert env.debug() is False
    assert env.linear_plans() is None
    assert env.cache_dir() == tmp_path / ".cache/graphrt"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert env.cache_dir() == tmp_path / ".cache/graphrt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert env.cache_dir() == tmp_path / "xdg/graphrt"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("GRAPHRT_BACKEND", "torch_reference")
    assert env.backend() == "torch_reference"
    for value, on in (("1", True), ("0", False)):
        monkeypatch.setenv("GRAPHRT_DEBUG", value)
        assert env.debug() is on
    monkeypatch.chdir(tmp_path)
    for value, folder in ((str(tmp_path / "new"), "new"), ("here", "here"), ("~/there", "there")):
        monkeypatch.setenv("GRAPHRT_CACHE", value)
        assert env.cache_dir() == tmp_path / folder


MALFORMED = {
    "backend-empty": ("GRAPHRT_BACKEND", "", env.backend),
    "backend-list": ("GRAPHRT_BACKEND", "triton,torch_reference", env.backend),
    "cache-empty": ("GRAPHRT_CACHE", "", env.cache_dir),
    "cache-of-unknown-user": ("GRAPHRT_CACHE", "~no-such-user/cache", env.cache_dir),
    "cache-too-long": ("GRAPHRT_CACHE", "x" * 5000, env.cache_dir),
    "debug-word": ("GRAPHRT_DEBUG", "true", env.debug),
    "debug-empty": ("GRAPHRT_DEBUG", "", env.debug),
    "cache-file": ("GRAPHRT_CACHE", __file__, env.cache_dir),
    "plans-missing": ("GRAPHRT_LINEAR_PLANS", "no-such-file.json", env.linear_plans),
    "plans-of-unknown-user": ("GRAPHRT_LINEAR_PLANS", "~no-such-user/plans.json", env.linear_plans),
    "plans-too-long": ("GRAPHRT_LINEAR_PLANS", "x" * 5000, env.linear_plans),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(monkeypatch, case):
    name, value, read = MALFORMED[case]
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{name}: expected .*, got {re.escape(repr(value))}(; | \\()"):
        read()


def test_the_documentation_lists_all_variables():
    documented = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/env.md").read_text(), re.MULTILINE)
    strings = (
        n.value for n in ast.walk(ast.parse((ROOT / "graphrt/env.py").read_text())) if isinstance(n, ast.Constant)
    )
    read = {text for text in strings if isinstance(text, str) and re.fullmatch(r"[A-Z]+(_[A-Z]+)+", text)}
    assert set(documented) == read
    assert len(documented) == len(read)


def test_report_and_provenance(monkeypatch):
    record = environment.provenance()
    assert json.loads(json.dumps(record)) == record
    assert record["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"gpu", "driver", "triton", "command", "commit", "tree", "uncommitted_changes"} <= record.keys()
    report = environment.environment_report()
    assert json.loads(json.dumps(report)) == report
    assert report["graphrt"] == graphrt.__version__
    assert report["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert len(report["gpus"]) == torch.cuda.device_count()
    variables = {"GRAPHRT_BACKEND", "GRAPHRT_CACHE", "GRAPHRT_DEBUG", "GRAPHRT_LINEAR_PLANS"}
    assert report["variables"].keys() == variables
    monkeypatch.setenv("GRAPHRT_BACKEND", "a,b")
    shown = environment.environment_report()["variables"]["GRAPHRT_BACKEND"]
    assert shown.startswith("invalid: GRAPHRT_BACKEND: expected the name of a backend, got 'a,b'")


def test_report_without_packages_or_driver(monkeypatch):
    code = (
        "import importlib.metadata as m\n"
        "def missing(name): raise m.PackageNotFoundError(name)\n"
        "m.version = missing\n"
        "from graphrt.bench.environment import environment_report as r\n"
        "import json; print(json.dumps(r()))"
    )
    monkeypatch.setenv("PATH", "")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    report = json.loads(result.stdout)
    assert set(report["packages"].values()) == {None}
    assert report["driver"] is None


@pytest.mark.parametrize("script", ["#!/bin/sh\necho 580.159.03\necho 580.159.03\n", "#!/bin/sh\necho none\nexit 9\n"])
def test_driver_version(monkeypatch, tmp_path, script):
    program = tmp_path / "nvidia-smi"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert environment.driver_version() == ("580.159.03" if "580" in script else None)


def test_tree_id_of_the_working_files(tmp_path):
    """A new file changes the id, an ignored file does not, and the checkout is not modified."""
    git = lambda *arguments: subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True).stdout  # noqa: E731
    assert environment.tree_of_files(tmp_path) is None
    git("init", "-q")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    committed = git("rev-parse", "HEAD^{tree}").decode().strip()
    assert environment.tree_of_files(tmp_path) == committed
    (tmp_path / "ignored").write_text("x")
    assert environment.tree_of_files(tmp_path) == committed
    assert environment.tree_of_files(Path(os.path.relpath(tmp_path))) == committed
    git("add", "--force", "ignored")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "second")
    committed = git("rev-parse", "HEAD^{tree}").decode().strip()
    assert environment.tree_of_files(tmp_path) == committed, "ignored, but tracked"
    (tmp_path / "more").write_text("x")
    before = sorted(path for path in (tmp_path / ".git").rglob("*"))
    assert environment.tree_of_files(tmp_path) not in (committed, None)
    assert sorted(path for path in (tmp_path / ".git").rglob("*")) == before
    (tmp_path / "more").unlink()
    assert environment.tree_of_files(tmp_path) == committed
