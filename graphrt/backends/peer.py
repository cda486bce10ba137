"""Base of backends that wrap the kernels of another package: import, version checks, zeros in padding tokens."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch

from graphrt.backends.base import AttentionBackend
from graphrt.backends.capabilities import BackendContext
from graphrt.kernels.errors import UnsupportedError
from graphrt.kernels.ops.live import copy_live
from graphrt.metadata import StepMetadata


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package. It is located without an import, and imported when its backend is used.

    module         name of the module to import
    install        pip command that installs it
    distributions  names of its distributions; the first distribution found gives the version
    minimum        oldest version (major, minor) that works; a build without version metadata is accepted
    names          functions and classes that the module must have
    """

    module: str
    install: str
    distributions: tuple[str, ...]
    minimum: tuple[int, int]
    names: tuple[str, ...]

    def missing(self) -> str | None:
        """Return why the package cannot be used, with the command that installs it, or None. Imports nothing."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None:  # an empty folder of that name has a spec without an origin
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
        """Import and return the package.

        Raises:
            UnsupportedError: if the package is missing, cannot be imported (for example, if it was built for another
                torch), or lacks a required name.
        """
        try:
            module = importlib.import_module(self.module)
        except Exception as error:  # an import of a foreign package may raise anything
            raise UnsupportedError(
                f"{self.module}: cannot be imported ({type(error).__name__}: {error}); run {self.install}"
            ) from error
        lacking = [name for name in self.names if not hasattr(module, name)]
        if lacking:
            raise UnsupportedError(f"{self.module}: has no {', '.join(lacking)}; run {self.install}")
        return module


class PeerBackend(AttentionBackend):
    """A backend whose kernels come from another package.

    Such kernels do not write padding tokens, or write values from the null page. `schedule` therefore marks the real
    tokens once per step, and `write` copies only these. In the prefill part of a mixed step, `write` does not write the
    tokens of the decode part.
    """

    package: ClassVar[Package]
    compute_capability: ClassVar[tuple[int, int]]
    """Lowest compute capability that the kernels run on."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._live: torch.Tensor | None = None
        self._first_token: torch.Tensor | None = None

    @classmethod
    def unavailable(cls) -> str | None:
        return cls.package.missing()

    @classmethod
    def extra_unsupported_reasons(cls, context: BackendContext) -> list[str]:
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
        return {} if self._live is None else {"live": self._live}

    def close(self) -> None:
        self._live = self._first_token = None

    def schedule(self, metadata: StepMetadata) -> None:
        """Mark the real tokens, which have a KV slot. Capture-safe: a comparison on the device."""
        torch.ge(metadata.slot_mappings[0], 0, out=self.live(metadata.descriptor.padded_tokens))
        self._first_token = metadata.query_start_loc[:1] if self.context.prefill else None

    def write(self, result: torch.Tensor, sums: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Copy the kernel's results into `out` and `lse`, with zeros and -inf in padding tokens.

        result   as `out`, with any strides; any value in padding tokens
        sums     [padded_tokens, num_q_heads]  natural log-sum-exp, likewise
        """
        live, first = self.live(out.shape[0]), self._first_token
        copy_live(result, live, out, first=first)
        if lse is not None:
            copy_live(sums[:, None], live, lse[:, None], fill=float("-inf"), first=first)

    def live(self, tokens: int) -> torch.Tensor:
        """Return which tokens of the step are not padding, [tokens] bool."""
        assert self._live is not None, "allocate() makes it"
        return self._live[:tokens]
