"""Find the fastest plan of each product of a decoder layer at few tokens, and the time that these plans save.

    python -m scripts.bench_linear                                        # 1 to 64 tokens, 16 to 4 bits
    python -m scripts.bench_linear --shapes llama-3.1-8b --tokens 1 --bits 16
    python -m scripts.bench_linear --write plans.json                     # add or replace the plans of these products

The products of a layer run one after the other, as in a step without attention. They use the weights of several layers
in rotation, so no weight is in L2. Each product in turn is timed with every plan and without the CUDA kernel, while the
others use their fastest plan. The output head is measured alone. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from graphrt.bench.environment import provenance
from graphrt.bench.timer import measure_read_bandwidth, rotations, time_calls
from graphrt.kernels.cache.write import Rotary
from graphrt.kernels.ops import linear as operators
from graphrt.kernels.ops.linear import Normed, linear, linear_add, linear_rope_write, linear_silu_mul
from graphrt.kernels.ops.linear_call import STEP_BYTES, End, LinearPlan
from graphrt.kernels.ops.linear_native import blocks_per_sm
from graphrt.kernels.ops.linear_plans import linear_plan
from graphrt.kernels.ops.quantized import Fp8Weight, Int4Weight, QuantizedWeight, Weight
from graphrt.models.config import ModelConfig
from graphrt.models.shapes import SHAPES
from scripts.rigs.measure import make_parser, parse

Key = tuple[End, int, int]
"""A product: its epilogue, and rows and depth of its weight."""

GROUP, PAGES, PAGE_SIZE = 128, 64, 16
_local = threading.local()


@dataclass(slots=True)
class Found:
    """Results for one shape, number of tokens and number of bits per weight."""

    shape: str
    tokens: int
    bits: int
    floor_us: float
    separate_us: float = 0.0  # time of a layer, or of the head, without the CUDA kernel
    fused_us: float = 0.0
    plans: dict[Key, LinearPlan | None] = field(default_factory=dict)


def candidates(key: Key, tokens: int, bits: int, heads: tuple[int, int], num_sms: int) -> list[LinearPlan]:
    """Return the plans to try for a product. `heads`: head size, and rotated dims.

    The weights in flight of each plan fit into registers and hide the latency of memory. In plans whose warps share x,
    every warp has work, and most multiprocessors have a block.
    """
    end, rows, depth = key
    steps = depth * bits // 8 // STEP_BYTES
    found = []
    for row_warps, row_tiles, warps, unroll, cluster, persistent in product(
        (1, 4, 8), (1, 2), (8, 16), (2, 4, 8), (1, 2, 4, 8), (False, True)
    ):
        plan = LinearPlan(row_tiles, warps, unroll, persistent, row_warps, cluster)
        per_sm = blocks_per_sm(plan, tokens, bits)
        blocks_at_once = num_sms * per_sm
        blocks = rows // plan.rows * cluster
        in_flight = 2**10 * row_tiles * unroll * warps * per_sm  # bytes per multiprocessor
        if not plan.fits(end, rows, *heads) or not 2**16 <= in_flight <= 2**17:
            continue
        if row_warps == 1:
            useful = tokens <= 16 and cluster == 1 and (not persistent or blocks > blocks_at_once)
        else:
            spread = 0.7 * num_sms <= blocks and (cluster == 1 or blocks <= 2 * blocks_at_once)
            useful = spread and not persistent and steps >= plan.k_parts * unroll
        if useful:
            found.append(plan)
    return found


def plan_of_thread(
    device: torch.device, tokens: int, bits: int, end: End, rows: int, depth: int, head_dim: int, rotary_dim: int
) -> LinearPlan | None:
    """Return the plan under test, in place of `linear_plan`."""
    plan: LinearPlan | None = _local.plans.get((end, rows, depth))
    return plan if plan is not None and plan.fits(end, rows, head_dim, rotary_dim) else None


class Layer:
    """The weights and state of a decoder layer, for one number of tokens."""

    def __init__(self, config: ModelConfig, tokens: int, bits: int, device: torch.device) -> None:
        hidden, dim, kv_heads = config.hidden_size, config.head_dim, config.num_kv_heads
        normal = partial(torch.randn, dtype=torch.bfloat16, device=device)
        q_rows = config.num_q_heads * dim
        self.qkv = make_weight(q_rows + 2 * kv_heads * dim, hidden, bits, device)
        self.o = make_weight(hidden, q_rows, bits, device)
        self.gate_up = make_weight(2 * config.intermediate_size, hidden, bits, device)
        self.down = make_weight(hidden, config.intermediate_size, bits, device)
        self.x, self.residual, self.gain = normal(tokens, hidden), normal(tokens, hidden), normal(hidden)
        self.caches = [normal(PAGES, PAGE_SIZE, kv_heads, dim) for _ in range(2)]
        self.slots = torch.arange(tokens, device=device)
        norms = [normal(dim) if config.qk_norm else None for _ in range(2)]
        self.rotary = Rotary(torch.rand(64, dim, device=device), *norms, norm_eps=1e-5)

    def run(self) -> torch.Tensor:
        """Run the products of the layer."""
        q = linear_rope_write(self.x, self.qkv, *self.caches, self.slots, self.slots, rotary=self.rotary)
        x = linear_add(q.flatten(1), self.o, self.residual, self.gain, 1e-5)
        h = linear_silu_mul(x, self.gate_up)
        return linear_add(h, self.down, self.residual, self.gain, 1e-5).x

    @property
    def products(self) -> list[Key]:
        """The products, the largest weight first."""
        fused = End.PLAIN if self.rotary.q_norm is not None else End.ROPE_WRITE
        ends = ((End.SILU_MUL, self.gate_up), (End.ADD, self.down), (fused, self.qkv), (End.ADD, self.o))
        return [(end, *weight.shape) for end, weight in ends]

    @property
    def nbytes(self) -> int:
        return sum(weight_bytes(weight) for weight in (self.qkv, self.o, self.gate_up, self.down))


def make_weight(rows: int, depth: int, bits: int, device: torch.device) -> Weight:
    """Return a random weight. It is a parameter, because the kernel loads only parameters early."""
    if bits == 16:
        values = torch.randn(rows, depth, dtype=torch.bfloat16, device=device).mul_(depth**-0.5)
        return torch.nn.Parameter(values, requires_grad=False)
    if bits == 8:
        weight: QuantizedWeight = Fp8Weight.empty(rows, depth, torch.bfloat16, device)
    else:
        weight = Int4Weight.empty(rows, depth, GROUP, torch.bfloat16, device)
    weight.fill_with_noise(depth**-0.5, torch.Generator(device).manual_seed(0))
    return weight


def weight_bytes(weight: Weight) -> int:
    tensors = weight.parameters() if isinstance(weight, QuantizedWeight) else [weight]
    return sum(tensor.nbytes for tensor in tensors)


def search(
    calls: Sequence[Callable[[], torch.Tensor]], products: Sequence[Key], found: Found, samples: int,
    heads: tuple[int, int], device: torch.device,
) -> None:  # fmt: skip
    """Find the fastest plan of each product. `heads`: head size, and rotated dims."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    options = {key: candidates(key, found.tokens, found.bits, heads, sms) for key in products}
    most = max(map(len, options.values()))

    def compile_plans(index: int) -> None:
        with torch.cuda.device(device) if device.type == "cuda" else torch.inference_mode():
            _local.plans = {key: plans[index % len(plans)] for key, plans in options.items() if plans}
            calls[0]()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compile_plans, range(most)))

    def us(plans: dict[Key, LinearPlan | None]) -> float:
        _local.plans = plans
        return time_calls(calls, device=device, num_samples=samples).median_us

    found.separate_us = us({})
    best: dict[Key, LinearPlan | None] = {
        key: linear_plan(device, found.tokens, found.bits, *key, *heads) or (options[key] or [None])[0]
        for key in products
    }
    # The second round compares again, now that the other products use their fastest plans.
    for second in (False, True):
        for key in products:
            tried = {None, best[key]} if second else {None, *options[key]}
            times = {plan: us(best | {key: plan}) for plan in tried}
            best[key] = min(times, key=lambda plan: times[plan])
            found.fused_us = times[best[key]]
    if found.separate_us <= found.fused_us:
        best, found.fused_us = dict.fromkeys(products), found.separate_us
    # Without a fused kernel, rope_write looks up a plan for a plain product of the same weight.
    separate = [key for key, plan in best.items() if key[0] is End.ROPE_WRITE and plan is None]
    found.plans = best | {(End.PLAIN, rows, depth): None for _, rows, depth in separate}


def measure_shape(
    shape: str, tokens: int, bits: int, device: torch.device, samples: int, bandwidth: float
) -> list[Found]:
    """Measure the products of a layer of a shape and, in bfloat16, of its head."""
    config = SHAPES[shape]
    first = Layer(config, tokens, bits, device)
    layers = [first, *(Layer(config, tokens, bits, device) for _ in range(rotations(first.nbytes, device) - 1))]
    results = [Found(shape, tokens, bits, first.nbytes / bandwidth * 1e6)]
    heads = config.head_dim, first.rotary.cos_sin.shape[1]
    search([layer.run for layer in layers], first.products, results[0], samples, heads, device)
    if bits == 16:
        del layers
        vocab = make_weight(config.vocab_size, config.hidden_size, bits, device)
        squares = first.residual.float().square().sum(1, keepdim=True)
        call = partial(linear, Normed(first.residual, squares, 1e-5), vocab, rows=first.slots)
        results.append(Found(shape, tokens, bits, weight_bytes(vocab) / bandwidth * 1e6))
        search([call], [(End.PLAIN, *vocab.shape)], results[1], samples, heads, device)
    return results


def table(found: Sequence[Found]) -> list[list[Any]]:
    """Return the plans as `linear_plans.json` lists them."""
    return [
        [f.tokens, f.bits, end.name, rows, depth, None if plan is None else plan.ints]
        for f in found
        for (end, rows, depth), plan in f.plans.items()
    ]


def write_table(path: Path, device_name: str, plans: list[list[Any]]) -> None:
    """Replace the plans of the measured products on this device, and keep all others."""
    tables = json.loads(path.read_text()) if path.exists() else {}
    measured = [plan[:5] for plan in plans]
    kept = [plan for plan in tables.get(device_name, []) if plan[:5] not in measured]
    tables[device_name] = sorted(kept + plans, key=lambda plan: plan[:2])
    parts = [
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(plan)}" for plan in rows) + "\n ]"
        for name, rows in tables.items()
    ]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", default="llama-3.1-8b,llama-3.2-1b,qwen3-0.6b")
    parser.add_argument("--tokens", default="1,8,16,32,64")
    parser.add_argument("--bits", default="16,8,4")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--write", type=Path, help="file of plans to update")
    options = parse(parser)
    device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    operators.linear_plan = plan_of_thread  # type: ignore[assignment]
    bandwidth = measure_read_bandwidth(device)
    found = []
    for shape in options.shapes.split(","):
        for bits in map(int, options.bits.split(",")):
            for tokens in map(int, options.tokens.split(",")):
                for result in measure_shape(shape, tokens, bits, device, options.samples, bandwidth):
                    found.append(result)
                    what = "layer" if len(result.plans) > 1 else "head"
                    chosen = ", ".join(
                        f"{end.name.lower()} {rows}x{depth} {plan.ints if plan else 'separate'}"
                        for (end, rows, depth), plan in result.plans.items()
                    )
                    print(
                        f"{shape} {what} {tokens} tokens {bits} bits: floor {result.floor_us:.1f} us, separate "
                        f"{result.separate_us:.1f}, fused {result.fused_us:.1f} ({chosen})",
                        flush=True,
                    )
    results = [
        {"shape": f.shape, "tokens": f.tokens, "bits": f.bits, "floor_us": f.floor_us, "separate_us": f.separate_us,
         "fused_us": f.fused_us, "plans": [plan[2:] for plan in table([f])]}
        for f in found
    ]  # fmt: skip
    if options.write:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        write_table(options.write, name, table(found))
    print(json.dumps({"name": "linear", **provenance(), "bandwidth": bandwidth, "results": results}), flush=True)


if __name__ == "__main__":
    main()
