"""Time of decode attention whose KV is interleaved over ranks, against one GPU, in captured graphs of one run.

    python -m scripts.bench_context_parallel                          # 2 GPUs: one KV head x 16 query heads of 128
    python -m scripts.bench_context_parallel --ranks 4 --reqs 16 --tokens 1024,65536

A layer gathers queries over heads, attends to the keys of its rank, and merges the partial outputs of all ranks. A
graph has the schedule of a step and `--layers` such layers, each with its own KV. Times are microseconds per layer, of
the slowest rank, with exchanges by NCCL and over shared memory. One rank alone first runs the same layers over all
keys. Outputs are compared. NVLink multicast is off. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from statistics import median

import torch
from torch import distributed as dist

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import BackendContext
from graphrt.backends.registry import backend_class
from graphrt.bench.environment import provenance
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.context_parallel import ContextParallel, backend_specs
from graphrt.kernels.ops.all_reduce import SymmetricBuffer, symmetric_buffers
from graphrt.kernels.sizes import ceil_div
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec
from scripts.rigs.measure import TOLERANCE
from scripts.rigs.ranks import make_ranks_parser, run_ranks, samples_of

PAGE_SIZE = 64


@dataclass(slots=True)
class Side:
    """The layers of one rank: all keys of each request, or those of a rank of `context`."""

    backend: AttentionBackend
    metadata: StepMetadata
    layers: list[AttentionLayer]
    q: torch.Tensor  # queries of this rank's heads
    context: ContextParallel | None

    @classmethod
    def make(cls, options: Namespace, tokens: int, device: torch.device, context: ContextParallel | None) -> Side:
        """Draw the inputs. Keys and queries of a position and head are equal on all sides."""
        ranks = 1 if context is None else context.group.size()
        rank = 0 if context is None else context.group.rank()
        heads, dim, reqs = options.heads // ranks, options.head_dim, options.reqs
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        spec = AttentionSpec(heads, 1, dim, dtype)
        kv = KVCacheSpec(options.layers, 1, dim, PAGE_SIZE, dtype=dtype, context_parallel_size=ranks)
        unit = PAGE_SIZE * options.ranks
        drawn = ceil_div(tokens, unit) * unit  # the same number on all sides
        pages = drawn // kv.page_tokens
        (attended,) = backend_specs([spec], [kv])
        seen = BackendContext(
            (attended,) * options.layers, (kv,), device, reqs, reqs, tokens, context_parallel=ranks > 1
        )
        rng = torch.Generator(device).manual_seed(tokens)
        layers = []
        for index in range(options.layers):
            cache = [torch.zeros(1 + reqs * pages, PAGE_SIZE, 1, dim, dtype=dtype, device=device) for _ in range(2)]
            for tensor in cache:
                values = torch.randn(drawn, dim, generator=rng, dtype=dtype, device=device)
                own = values[rank::ranks].view(1, pages, PAGE_SIZE, 1, dim)  # the same in all requests
                tensor[1:] = own.expand(reqs, -1, -1, -1, -1).flatten(0, 1)
            layers.append(AttentionLayer(index, spec, *cache))
        q = torch.randn(reqs, options.heads, dim, generator=rng, dtype=dtype, device=device)

        def words(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        table = 1 + torch.arange(reqs * pages, dtype=torch.int32, device=device).view(reqs, pages)
        metadata = StepMetadata(
            BatchDescriptor.decode(reqs), tokens, words(*[len(range(rank, tokens, ranks))] * reqs),
            words(*range(reqs + 1)), torch.full((reqs,), tokens - 1, device=device), (table,),
            (torch.full((reqs,), -1, device=device),), words(*[0] * reqs),
        )  # fmt: skip
        backend = backend_class("triton" if device.type == "cuda" else "torch_reference")(seen)
        backend.allocate()
        return cls(backend, metadata, layers, q[:, rank * heads : (rank + 1) * heads].contiguous(), context)

    def step(self) -> torch.Tensor:
        """Run the schedule and all layers. Returns the output of the last layer."""
        self.backend.schedule(self.metadata)
        out = torch.empty_like(self.q)
        for layer in self.layers:
            if self.context is None:
                self.backend.run(layer, self.q, self.metadata, out)
            else:
                self.context.attend(self.backend, layer, self.q, self.metadata, out, sinks=None, lse=None)
        return out


def compare(
    options: Namespace, tokens: int, device: torch.device, group: dist.ProcessGroup, buffer: SymmetricBuffer | None
) -> list[dict[str, object]]:
    """Time all sides at one length, and compare their outputs. A collective call."""
    timing = device, options.samples, options.layers
    context = ContextParallel(group, 1)
    alone: list[object] = [None, None]
    if group.rank() == 0:
        side = Side.make(options, tokens, device, None)
        alone = [side.step().cpu(), median(samples_of(side.step, None, *timing))]
        del side
    dist.broadcast_object_list(alone, 0, group=group)
    side = Side.make(options, tokens, device, context)
    expected, one_us = alone
    assert isinstance(expected, torch.Tensor), "sent by rank 0"
    assert isinstance(one_us, float), "sent by rank 0"
    heads = side.q.shape[1]
    own = expected[:, group.rank() * heads : (group.rank() + 1) * heads].float()
    rows: list[dict[str, object]] = []
    names = ["gloo"] if device.type == "cpu" else ["nccl"] if buffer is None else ["nccl", "shared memory"]
    for name in names:
        if buffer is not None and name == "shared memory":
            symmetric_buffers[group.group_name] = buffer
        error = float((side.step().cpu().float() - own).norm() / own.norm())
        if not error <= TOLERANCE:  # also False for NaN
            raise AssertionError(f"{name}: expected a relative error of at most {TOLERANCE}, got {error:.3g}")
        times = samples_of(side.step, group, *timing)
        symmetric_buffers.pop(group.group_name, None)
        every = [0.0] * group.size()
        dist.all_gather_object(every, median(times), group=group)
        row = {"exchange": name, "tokens": tokens, "reqs": options.reqs, "ranks": group.size(), "one_us": one_us}
        rows.append(row | {"us": max(every), "ratio": max(every) / one_us, "error": error})
    return rows


def work(options: Namespace, group: dist.ProcessGroup, device: torch.device) -> None:
    """Run one rank."""
    buffer = SymmetricBuffer.allocate(group, device) if device.type == "cuda" else None
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        for tokens in map(int, options.tokens.split(",")):
            rows += (new := compare(options, tokens, device, group, buffer))
            for row in new if group.rank() == 0 else ():
                text = "{reqs} x {tokens}, {exchange}: {us:.1f} us, one rank alone {one_us:.1f} us, ratio {ratio:.3f}"
                print(text.format(**row), flush=True)
    if group.rank() == 0:
        print(json.dumps({"name": "context_parallel", **provenance(), "rows": rows}), flush=True)


def main() -> None:
    parser = make_ranks_parser(__doc__)
    parser.add_argument("--reqs", type=int, default=16)
    parser.add_argument("--tokens", default="1024,65536", help="KV tokens of each request")
    parser.add_argument("--heads", type=int, default=16, help="query heads of the KV head")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8, help="per graph")
    run_ranks(parser, work)


if __name__ == "__main__":
    main()
