"""What backends around another package's kernels share: the package, the checks, and zeros in pad tokens."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch

from graphrt.backends.base import AttentionBackend, BackendContext
from graphrt.kernels.errors import CaptureError, UnsupportedError
from graphrt.kernels.ops.live import copy_live
from graphrt.metadata import StepMetadata


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package: found without importing it, imported when its backend is used.

    module         what is imported
    install        the pip command that brings it
    distributions  names under which it is installed; the first that is found gives the version
    minimum        oldest version (major, minor) that has what we call; a build without a version passes
    names          what we call, which the module must have
    """

    module: str
    install: str
    distributions: tuple[str, ...]
    minimum: tuple[int, int]
    names: tuple[str, ...]

    def missing(self) -> str | None:
        """Why the package cannot be used, with the command that helps, or None. Imports nothing."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None:  # without an origin it is an empty folder of that name
            return f"package {self.module}: not installed; run {self.install}"
        for distribution in self.distributions:
            try:
                found = version(distribution)
            except PackageNotFoundError:
                continue
            numbers = [int(x) for x in re.findall(r"\d+", found)[:2]]
            if tuple(numbers) < self.minimum:
                wanted = ".".join(map(str, self.minimum))
                return f"package {self.module}: needs version {wanted}, got {found}; run {self.install} --upgrade"
            break
        return None

    def load(self) -> Any:
        """Import the package.

        Raises: UnsupportedError, with the pip command, where the package is missing, cannot be imported or lacks a name
        that we call. A package that was built for another torch cannot be imported.
        """
        try:
            module = importlib.import_module(self.module)
        except Exception as error:  # whatever a package raises on import
            raise UnsupportedError(
                f"{self.module}: expected the package, got none ({type(error).__name__}: {error}); run {self.install}"
            ) from error
        lacking = [name for name in self.names if not hasattr(module, name)]
        if lacking:
            raise UnsupportedError(
                f"{self.module}: expected {', '.join(self.names)}, got a module without {', '.join(lacking)}; "
                f"run {self.install}"
            )
        return module


class PeerBackend(AttentionBackend):
    """A backend whose kernels come from another package.

    Such kernels leave pad tokens unwritten, or write what the null page holds. So `schedule` notes once per step which
    tokens are real, and `write_out` copies these into `out`. As the prompt part of a mixed step it leaves the tokens of
    the decode part alone.
    """

    package: ClassVar[Package]
    compute_capability: ClassVar[tuple[int, int]]
    """Oldest GPU generation that the kernels run on."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._live: torch.Tensor | None = None
        self._first_token: torch.Tensor | None = None

    @classmethod
    def unavailable(cls) -> str | None:
        """The missing package and the pip command that brings it, or None. Imports nothing."""
        return cls.package.missing()

    @classmethod
    def extra_unsupported_reasons(cls, context: BackendContext) -> list[str]:
        """The GPU's generation, where it is too old."""
        if context.device.type == "cuda" and torch.cuda.is_available():
            have = torch.cuda.get_device_capability(context.device)
            if have < cls.compute_capability:
                need = "".join(map(str, cls.compute_capability))
                return [f"device sm_{have[0]}{have[1]}: needs sm_{need} or newer"]
        return []

    def allocate(self) -> None:
        """Import the package, and allocate the mask of real tokens."""
        context, device = self.context, self.context.device
        self._module = self.package.load()
        tokens = max(context.max_num_tokens, context.max_num_reqs * context.max_query_len)
        self._live = torch.zeros(tokens, dtype=torch.bool, device=device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What `schedule` rewrites at every step."""
        return {} if self._live is None else {"live": self._live}

    def close(self) -> None:
        """Drop every tensor."""
        self._live = self._first_token = None

    def schedule(self, metadata: StepMetadata) -> None:
        """Note which tokens are real: those that have a slot in the cache. Capture-safe: a comparison on the device."""
        torch.ge(metadata.slot_mappings[0], 0, out=self.live(metadata.descriptor.padded_tokens))
        self._first_token = metadata.query_start_loc[:1] if self.context.prefill else None

    def write_out(self, result: torch.Tensor, out: torch.Tensor) -> None:
        """Copy what the kernel gave into `out`, with zeros in pad tokens, whatever it left there.

        result  [padded_tokens, num_q_heads, head_dim]  any strides
        out     same shape                              written in place
        """
        copy_live(result, self.live(out.shape[0]), out, first=self._first_token)

    def write_lse(self, result: torch.Tensor, lse: torch.Tensor) -> None:
        """Copy a natural log-sum-exp into `lse`, with -inf in pad tokens. Both [padded_tokens, num_q_heads]."""
        live = self.live(lse.shape[0])
        copy_live(result[:, None], live, lse[:, None], fill=float("-inf"), first=self._first_token)

    def live(self, tokens: int) -> torch.Tensor:
        """[tokens] bool: which of a step's tokens are real. Raises: CaptureError before `allocate()`."""
        self.check_allocated()
        assert self._live is not None, "checked"
        return self._live[:tokens]

    def check_allocated(self) -> None:
        """Raise CaptureError before `allocate()`."""
        if self._live is None:
            raise CaptureError(f"backend {self.name}: expected buffers, got none; call allocate() first")
