"""Check that graphrt can be imported from the checkout, from a wheel and from an editable install.

    python scripts/check_layout.py

`graphrt/kernels` and `graphrt/capture` are symlinks, and namespace packages: a change of the packaging breaks one way
of installing and not the others. Builds in a temporary copy; needs setuptools in this environment. Exits with 1 on
any problem.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
BUILD_INPUTS = ("pyproject.toml", "README.md", "LICENSE", "graphrt", "kernels", "capture")
REQUIRED_FILES = (
    "graphrt/__init__.py",
    "graphrt/py.typed",
    "graphrt/backends/ranking.json",
    "graphrt/spec.py",
    "graphrt/kernels/types.py",
    "graphrt/kernels/attention/__init__.py",
    "graphrt/kernels/metadata/step_inputs.py",
    "graphrt/kernels/native/decode.cu",
    "graphrt/kernels/native/attend.cuh",
    "graphrt/kernels/native/merge.cuh",
    "graphrt/capture/descriptor.py",
    "graphrt/capture/inspect/page_parts/page.html",
    "graphrt/capture/inspect/page_parts/page.css",
    "graphrt/capture/inspect/page_parts/main.js",
    "graphrt/bench/timer.py",
)
# Imports one module of each layer, and tells where they came from and under which names.
PROBE = """
import sys
for folder in sys.argv[1:]:
    import site
    site.addsitedir(folder)
import graphrt.capture.descriptor, graphrt.kernels.types, graphrt.spec
from graphrt import KVCacheSpec
assert KVCacheSpec is graphrt.spec.KVCacheSpec, "the lazy name is another object than its home's"
wrong = {"kernels", "capture"} & sys.modules.keys()
assert not wrong, f"imported under top-level names: {wrong}"
print(*(sys.modules[name].__file__ for name in
        ("graphrt", "graphrt.spec", "graphrt.kernels.types", "graphrt.capture.descriptor")), sep="\\n")
"""


def copy_checkout(target: Path) -> Path:
    """Copy what a build needs, links as links, so that nothing is written to the checkout."""
    target.mkdir()
    for name in BUILD_INPUTS:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    return target


def build(checkout: Path, folder: Path, *, editable: bool = False) -> Path:
    """Build a wheel of `checkout` with this environment's setuptools, and unpack it into `folder`."""
    hook = "build_editable" if editable else "build_wheel"
    wheels = folder.with_name(folder.name + "-wheels")
    wheels.mkdir()
    code = f"import setuptools.build_meta as b; b.{hook}({str(wheels)!r})"
    result = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{hook} failed:\n{result.stdout}{result.stderr}")
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def missing_files(unpacked: Path) -> list[str]:
    """Required files that an unpacked wheel lacks, or holds as something else than a file of its own."""
    return [name for name in REQUIRED_FILES if (unpacked / name).is_symlink() or not (unpacked / name).is_file()]


def stray_files(unpacked: Path) -> list[str]:
    """What an unpacked wheel would install outside of graphrt and its metadata."""
    return sorted(p.name for p in unpacked.iterdir() if p.name != "graphrt" and not p.name.endswith(".dist-info"))


def import_problems(under: Path, *, python_path: Path | None = None, site_folder: Path | None = None) -> list[str]:
    """Import graphrt in a new process outside of the checkout, and say what failed or did not come from `under`."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    command = [sys.executable, "-c", PROBE]
    if site_folder is not None:
        # graphrt may be installed here already: leave this environment's folders out at start, and add them last.
        installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        command = [sys.executable, "-S", "-c", PROBE, str(site_folder), *installed]
    with tempfile.TemporaryDirectory() as elsewhere:
        result = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    if result.returncode:
        return [result.stderr.strip()]
    origins = [Path(line).resolve() for line in result.stdout.splitlines()]
    return [f"{origin} is not under {under}" for origin in origins if not origin.is_relative_to(under.resolve())]


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkout = copy_checkout(folder / "checkout")
        wheel = build(checkout, folder / "wheel")
        editable = build(checkout, folder / "editable", editable=True)
        problems = {
            "files in the wheel": [f"missing: {f}" for f in missing_files(wheel)]
            + [f"stray: {f}" for f in stray_files(wheel)],
            "import from the wheel": import_problems(wheel, python_path=wheel),
            "import from the checkout": import_problems(CHECKOUT, python_path=CHECKOUT),
            "import from an editable install": import_problems(checkout, site_folder=editable),
        }
    for name, found in problems.items():
        print(f"{name}: {'; '.join(found) or 'ok'}")
    return 1 if any(problems.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
