"""graphrt works from the checkout, from a wheel and from an editable install, though two packages are links.

`graphrt/kernels` and `graphrt/capture` are symlinks, and namespace packages: a change of the packaging can break one
way of installing and not the others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
BUILD_INPUTS = ("pyproject.toml", "README.md", "LICENSE", "graphrt", "kernels", "capture")
SOURCES = ("*.py", "py.typed", "*.json", "*.cu", "*.cuh", "*.html", "*.css", "*.js")
# Imports one module of each layer, and tells where they came from.
PROBE = """
import site, sys
for folder in sys.argv[1:]:
    site.addsitedir(folder)
import graphrt.capture.descriptor, graphrt.kernels.types, graphrt.spec
from graphrt import KVCacheSpec
assert KVCacheSpec is graphrt.spec.KVCacheSpec, "the lazy name is another object than its home's"
wrong = {"kernels", "capture"} & sys.modules.keys()
assert not wrong, f"imported under top-level names: {wrong}"
print(*(sys.modules[name].__file__ for name in
        ("graphrt", "graphrt.spec", "graphrt.kernels.types", "graphrt.capture.descriptor")), sep="\\n")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a build needs, links as links, so that nothing is written to the checkout."""
    target = tmp_path_factory.mktemp("layout") / "checkout"
    target.mkdir()
    for name in BUILD_INPUTS:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    return target


def build(checkout: Path, hook: str) -> Path:
    """Build a wheel with this environment's setuptools, and unpack it into a folder."""
    wheels, folder = checkout.parent / f"{hook}-wheels", checkout.parent / hook
    wheels.mkdir()
    code = f"import setuptools.build_meta as b; b.{hook}({str(wheels)!r})"
    result = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def check_import(elsewhere: Path, under: Path, *folders: str, python_path: Path | None = None) -> None:
    """Import graphrt in a new process outside of the checkout: its modules must come from `under`.

    folders   site folders that replace those of this environment
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {} if python_path is None else {"PYTHONPATH": str(python_path)}
    command = [sys.executable, *(("-S",) if folders else ()), "-c", PROBE, *folders]
    result = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for line in result.stdout.splitlines():
        assert Path(line).resolve().is_relative_to(under.resolve())


def test_import_from_the_checkout_and_from_a_wheel_with_every_file(copy: Path, tmp_path: Path) -> None:
    wheel = build(copy, "build_wheel")
    check_import(tmp_path, CHECKOUT, python_path=CHECKOUT)
    check_import(tmp_path, wheel, python_path=wheel)
    assert [p.name for p in wheel.iterdir() if not p.name.endswith(".dist-info")] == ["graphrt"]
    assert not any(path.is_symlink() for path in wheel.rglob("*"))
    written = {f"graphrt/{path.relative_to(copy / 'graphrt').as_posix()}" for path in files(copy / "graphrt")}
    for layer in ("kernels", "capture"):  # rglob follows no links before Python 3.13
        written |= {f"graphrt/{path.relative_to(copy).as_posix()}" for path in files(copy / layer)}
    assert {path.relative_to(wheel).as_posix() for path in files(wheel / "graphrt")} == written


def files(folder: Path) -> list[Path]:
    return [path for pattern in SOURCES for path in folder.rglob(pattern)]


def test_import_from_an_editable_install(copy: Path, tmp_path: Path) -> None:
    """graphrt may be installed here already: this environment's folders are left out at start, and added last."""
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    check_import(tmp_path, copy, str(build(copy, "build_editable")), *installed)
