"""The origin of a result: versions, devices, environment variables, command and files.

Benchmarks store it with their results. `graphrt env` prints the part that does not depend on files.
"""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from graphrt import __version__, env
from graphrt.kernels.errors import ConfigError

PACKAGES = ("torch", "triton", "numpy", "cuda-bindings", "rich", "typer")
OPTIONAL_PACKAGES = (
    "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub", "flash-attn", "tokenspeed-fa3",
    "flashinfer-python",
)  # fmt: skip


def environment_report() -> dict[str, Any]:
    """Describe the environment of this process. Missing packages, devices and drivers are None or empty, not errors.

    All values are strings, numbers, None, or lists and dicts of these, so the report is valid JSON.
    """
    return {
        "graphrt": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: package_version(name) for name in (*PACKAGES, *OPTIONAL_PACKAGES)},
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "gpus": _gpus(),
        "variables": {
            "GRAPHRT_BACKEND": _variable(env.backend),
            "GRAPHRT_CACHE": _variable(env.cache_dir),
            "GRAPHRT_DEBUG": _variable(lambda: int(env.debug())),
            "GRAPHRT_LINEAR_PLANS": _variable(env.linear_plans),
        },
    }


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):  # without a device, nvidia-smi exits with an error
        return None
    return result.stdout.split("\n", 1)[0].strip() or None


def _gpus() -> list[dict[str, Any]]:
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
                "l2_bytes": properties.L2_cache_size,
            }
        )
    return gpus


def _variable(read: Callable[[], object]) -> str | None:
    """Return the effective value, or the error text if it is malformed, because reports help to find such errors."""
    try:
        value = read()
    except ConfigError as error:
        return f"invalid: {error}"
    return value if value is None else str(value)


def provenance() -> dict[str, Any]:
    """Return device, versions, command, and the state of the git checkout (None outside a checkout).

    tree                 git tree hash of the current files, excluding ignored files
    uncommitted_changes  whether this tree differs from the tree of the commit
    """
    report = environment_report()
    tree = tree_of_files(Path(__file__).resolve().parent)
    return {
        "gpu": report["gpus"][0]["name"] if report["gpus"] else None,
        "driver": report["driver"],
        "cuda": report["cuda"],
        "torch": report["packages"]["torch"],
        "triton": report["packages"]["triton"],
        "packages": report["packages"],
        "python": report["python"],
        "command": _command(),
        "commit": _git("rev-parse", "HEAD"),
        "tree": tree,
        "uncommitted_changes": None if tree is None else tree != _git("rev-parse", "HEAD^{tree}"),
    }


def tree_of_files(folder: Path) -> str | None:
    """Return the git tree hash of the checkout that contains `folder`, or None outside a checkout. Read-only.

    A nested checkout is represented by its commit, not its files."""
    inside = ("-C", str(folder.resolve()), "rev-parse")
    root = _git(*inside, "--show-toplevel")
    objects = _git(*inside, "--path-format=absolute", "--git-path", "objects")
    if root is None or objects is None:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        places = {
            "GIT_INDEX_FILE": f"{scratch}/index",
            "GIT_OBJECT_DIRECTORY": scratch,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects,
        }
        _git("-C", root, "read-tree", "HEAD", **places)  # includes tracked files that match an ignore rule
        if _git("-C", root, "add", "--all", **places) is None:
            return None
        return _git("-C", root, "write-tree", **places)


def _command() -> str:
    """Return the command line. A program path inside the current folder is made relative."""
    program = Path(sys.argv[0]).absolute()
    if program.name == "graphrt":  # installed by pip
        return shlex.join(["graphrt", *sys.argv[1:]])
    here = Path.cwd()
    name = program.relative_to(here) if program.is_relative_to(here) else program.name
    return shlex.join(["python", str(name), *sys.argv[1:]])


def _git(*arguments: str, **environment: str) -> str | None:
    folder = Path(__file__).resolve().parent
    variables = ["env", *(f"{name}={value}" for name, value in environment.items())] if environment else []
    command = [*variables, "git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or an installed package
        return None
    return result.stdout.strip()
