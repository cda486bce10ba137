"""Time of the sum over ranks in a captured graph, alone and with residual addition and RMSNorm, one GPU per rank.

    python -m scripts.bench_all_reduce                       # 2 GPUs
    python -m scripts.bench_all_reduce --ranks 4 --tokens 1,64 --only graphrt

Compares graphrt's kernel with torch's symmetric memory operators and NCCL, each followed by graphrt's norm. Every
result is checked first. A sample is the mean of the calls of one replay, in which all ranks start together. Times are
those of the slowest rank. NVLink multicast is off. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch
from torch import distributed as dist

from graphrt.bench.environment import provenance
from graphrt.kernels.ops.all_reduce import SymmetricBuffer
from graphrt.kernels.ops.collectives import all_reduce
from graphrt.kernels.ops.norm import add_rms_norm, rms_norm
from scripts.rigs.measure import TOLERANCE, reason_of
from scripts.rigs.ranks import make_ranks_parser, run_ranks, samples_of

EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds of one call: median, 20th and 80th percentile of the slowest rank. `reason`: why there are none."""

    name: str
    ranks: int
    tokens: int
    width: int
    norm: bool
    us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    reason: str | None = None


@dataclass(slots=True)
class Cell:
    """Inputs for one number of tokens: the partial sums of all ranks. `x` is the partial sum of this rank."""

    group: dist.ProcessGroup
    device: torch.device
    x: torch.Tensor  # in memory that all ranks access; some implementations overwrite it
    residual: torch.Tensor
    gain: torch.Tensor
    partials: list[torch.Tensor]
    buffer: SymmetricBuffer | None

    def sums(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Return the implementations of the sum, by name."""
        if self.buffer is None:
            return {"gloo": lambda: all_reduce(self.x, self.group)}
        operators, name = torch.ops.symm_mem, self.group.group_name

        def nccl() -> torch.Tensor:
            dist.all_reduce(self.x, group=self.group)
            return self.x

        own = {"graphrt": partial(self.buffer.sum, self.x)} if self.buffer.fits(self.x) else {}
        return own | {
            "graphrt over nccl": lambda: all_reduce(self.x, self.group),  # the group has no registered buffer
            "torch one_shot": lambda: operators.one_shot_all_reduce(self.x, "sum", name),
            "torch two_shot": lambda: operators.two_shot_all_reduce_(self.x, "sum", name),
            "nccl": nccl,
        }

    def call(self, name: str, norm: bool) -> Callable[[], torch.Tensor]:
        """Return an implementation, with residual and norm if `norm`."""
        run = self.sums()[name]
        if not norm:
            return run
        if self.buffer is not None and name == "graphrt":
            return partial(self.buffer.add_norm, self.x, self.residual, self.gain, EPS)
        return lambda: add_rms_norm(self.residual, run(), self.gain, EPS)

    def check(self, name: str, call: Callable[[], torch.Tensor], norm: bool) -> None:
        """Compare the result of a call with float32. Raises: AssertionError: if it differs."""
        self.x.copy_(self.partials[self.group.rank()])
        self.residual.fill_(1)
        expected = torch.stack(self.partials).float().sum(0)
        if norm:
            expected = rms_norm(expected.to(self.x.dtype) + 1, self.gain, EPS).float()
        error = float((call().float() - expected).norm() / expected.norm())
        if not error <= TOLERANCE:  # also False for NaN
            raise AssertionError(f"{name}: expected a relative error of at most {TOLERANCE}, got {error:.3g}")
        self.x.zero_()  # sums in place stay finite


def make_cell(
    group: dist.ProcessGroup, device: torch.device, tokens: int, width: int, buffer: SymmetricBuffer | None
) -> Cell:
    """Draw the partial sums of all ranks, which are the same on every rank."""
    rng = torch.Generator("cpu").manual_seed(tokens)
    normal = partial(torch.randn, generator=rng, device="cpu")
    partials = [normal(tokens, width).to(device, torch.bfloat16) for _ in range(group.size())]
    gain = normal(width).to(device, torch.bfloat16)
    x = torch.empty_like(gain.expand(tokens, width))
    if device.type == "cuda":
        from torch.distributed import _symmetric_memory as symmetric_memory

        x = symmetric_memory.empty(tokens, width, dtype=torch.bfloat16, device=device)
        symmetric_memory.rendezvous(x, group)
    return Cell(group, device, x, torch.empty_like(x), gain, partials, buffer)


def measure(cell: Cell, options: Namespace, name: str, norm: bool) -> Row:
    """Check and time one implementation. A collective call."""
    ranks, (tokens, width) = cell.group.size(), cell.x.shape
    found: Row | None = None
    try:
        call = cell.call(name, norm)
        cell.check(name, call, norm)

        def repeated() -> None:
            for _ in range(options.calls):
                call()

        times = sorted(samples_of(repeated, cell.group, cell.device, options.samples, options.calls))
        at = [times[len(times) * percent // 100] for percent in (20, 80)]
        found = Row(name, ranks, tokens, width, norm, median(times), *at)
    except (AssertionError, RuntimeError) as error:
        found = Row(name, ranks, tokens, width, norm, reason=reason_of(error))
    every: list[Row] = [found] * ranks
    dist.all_gather_object(every, found, group=cell.group)
    return next((row for row in every if row.us is None), max(every, key=lambda row: row.us or 0.0))


def work(options: Namespace, group: dist.ProcessGroup, device: torch.device) -> None:
    """Run one rank."""
    buffer = SymmetricBuffer.allocate(group, device) if device.type == "cuda" else None
    if device.type == "cuda" and buffer is None:
        raise RuntimeError("these GPUs cannot run the kernel, or access each other's memory")
    rows = []
    for tokens in map(int, options.tokens.split(",")):
        cell = make_cell(group, device, tokens, options.width, buffer)
        for name in cell.sums():
            if options.only and options.only not in name:
                continue
            for norm in (False, True):
                rows.append(row := measure(cell, options, name, norm))
                if group.rank() == 0:
                    found = row.reason if row.us is None else f"{row.us:.2f} us ({row.p20_us:.2f} to {row.p80_us:.2f})"
                    print(f"{tokens:5} tokens, {name}{' + norm' if norm else ''}: {found}", flush=True)
    if group.rank() == 0:
        results = [{key: value for key, value in asdict(row).items() if value is not None} for row in rows]
        print(json.dumps({"name": "all_reduce", **provenance(), "rows": results}), flush=True)


def main() -> None:
    parser = make_ranks_parser(__doc__)
    parser.add_argument("--tokens", default="1,8,32,64,256")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--calls", type=int, default=64, help="per graph")
    parser.add_argument("--only", metavar="TEXT", help="implementations whose name contains TEXT")
    run_ranks(parser, work)


if __name__ == "__main__":
    main()
