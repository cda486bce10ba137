"""The package of docs/write_a_backend.md is installed and run, in processes that import nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from graphrt.backends.base import AttentionBackend
from graphrt.backends.capabilities import Capabilities
from graphrt.metadata import StepMetadata
from graphrt.testing.backend_features import FEATURES, Feature

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "write_a_backend.md").read_text()
FILE = re.compile(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of the page's files, and the folder that pip installed the package to."""
    folder, site = tmp_path_factory.mktemp("acme"), tmp_path_factory.mktemp("site")
    for name, text in FILE.findall(PAGE):
        (folder / name).write_text(text)
    assert "pip install --no-build-isolation -e ." in PAGE
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--target", str(site)]
    run(["-m", "pip", "install", *options, str(folder)], folder, site)
    return folder, site


def run(arguments: list[str], folder: Path, site: Path) -> str:
    """Return the output of a process with the installed package and graphrt, without this repository's tests."""
    variables = {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    left_out = ("TRITON_INTERPRET", "GRAPHRT_BACKEND")
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | variables
    result = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_suite_passes_under_pytest(acme: tuple[Path, Path]) -> None:
    printed = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_contract.py"], *acme)
    passed, skipped = (int(re.search(rf"(\d+) {word}", printed)[1]) for word in ("passed", "skipped"))
    assert passed > 15
    assert passed == skipped, "each CPU case passes, and each CUDA case is skipped"
    assert "failed" not in printed


def test_suite_passes_without_pytest_and_acme_is_selected(acme: tuple[Path, Path]) -> None:
    printed = run(["-m", "graphrt.testing.backend_contract", "acme", "--device", "cpu", "--brief"], *acme).splitlines()
    assert re.fullmatch(r"\d+ passed, 0 failed, 0 skipped", printed[-1])
    assert "passed   acme-cpu-mixed" in printed
    code = (
        "from graphrt.testing.backend_contract import check_backend; from graphrt_acme import AcmeBackend; import sys;"
        "report = check_backend(AcmeBackend, devices=['cpu'], features=['plain', 'mixed'], brief=True);"
        "print(report.ok, len(report.passed), sorted({'pytest', 'tests'} & sys.modules.keys()))"
    )
    assert run(["-c", code], *acme) == "True 4 []\n"
    report = json.loads(run(["-m", "graphrt", "env", "--json"], *acme))["backends"]
    assert report["chosen"] == "acme"
    (standing,) = (entry for entry in report["known"] if entry["name"] == "acme")
    assert (standing["rank"], standing["unsupported_reasons"], standing["graph_support"]) == (1, [], "ALWAYS")


MISTAKES = {
    "frozen": (
        "self.seen = (keys <= metadata.positions[:, None]) & real[:, None]",
        "self.seen = torch.tensor((keys.numpy() <= metadata.positions.numpy()[:, None]) & real.numpy()[:, None])",
        "the step reads a tensor on the host during capture",
    ),
    "stale": ("def schedule(self", "schedule = lambda self, metadata: None\n    def other(self", "AttributeError"),
    "nan": ("v = torch.where(self.seen[:, :, None, None], v, 0.0)", "pass", "in padding tokens 2 to 3, got nan"),
    "pads": ("weights = torch.where(seen, weights, 0.0)", "pass", "expected zeros in padding tokens"),
    "scale": ("spec.scale * torch", "spec.head_dim**-0.5 * torch", "acme-cpu-scale: acme, longest, layer 0: output"),
    "close": ("self.requests = self.seen = None", "self.requests = None", "holds tensors after close(): Acme"),
}
CHECK = """
import importlib, json, sys
from graphrt.testing.backend_contract import check_backend
reports = {}
for name in sys.argv[1:]:
    backend = importlib.import_module(f"acme_{name}").AcmeBackend
    reports[name] = str(check_backend(backend, devices=["cpu"], features=["plain", "scale"], brief=True))
print(json.dumps(reports))
"""


def test_mistake_in_the_page_is_found(tmp_path: Path) -> None:
    """Each line that the page explains is needed."""
    files = dict(FILE.findall(PAGE))
    assert list(files) == ["pyproject.toml", "graphrt_acme.py", "test_contract.py"]
    module = files["graphrt_acme.py"]
    assert len(module.splitlines()) <= 55
    (tmp_path / "acme_right.py").write_text(module)
    for name, (right, wrong, _) in MISTAKES.items():
        assert module.count(right) == 1
        (tmp_path / f"acme_{name}.py").write_text(module.replace(right, wrong))
    reports = json.loads(run(["-c", CHECK, "right", *MISTAKES], tmp_path, tmp_path))
    assert "FAILED" not in reports.pop("right")
    for name, (_, _, text) in MISTAKES.items():
        assert "FAILED" in reports[name]
        assert text in reports[name]


def test_page_explains_every_capability_and_method() -> None:
    for field in fields(Capabilities):
        assert f"`{field.name}`" in PAGE, field.name
    for name, value in vars(AttentionBackend).items():
        if not name.startswith("_") and name not in ("name", "capabilities", "context"):
            assert f"`{name}" in PAGE, name
            assert not isinstance(value, property)
    for name in (f.name for f in fields(StepMetadata) if f.name not in ("descriptor", "max_seq_len")):
        assert f"| `{name}` |" in PAGE, name


def test_case_of_the_page_is_a_feature_of_the_suite() -> None:
    (case,) = re.findall(r"^```python\n(Feature\(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert eval(case, {"Feature": Feature}) == FEATURES["mixed-kv_groups-window"]
    table = PAGE.split("\n| cases | setup |")[1].split("\n\n")[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])}
    assert len(named) > 20
    assert named - FEATURES.keys() == set()
