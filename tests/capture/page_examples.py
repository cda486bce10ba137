"""Graphs to look at, made by hand: a decode step as CUDA has it, one of any size, and one whose names are hostile.

python -m tests.capture.page_examples docs/images/graph_page.png      draw the picture of the documentation anew
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.page import write_page
from graphrt.capture.inspect.view import Argument, Edge, GraphView, Node, NodeKind, Operand, Place
from graphrt.capture.tape import OpTape

MIB = 1 << 20


@dataclass(frozen=True)
class Finding:
    """As the audit has them."""

    place: Place
    node: str
    where: str
    address: int
    owner: Owner | None
    region: str
    text: str


@dataclass
class Example:
    view: GraphView
    memory: MemoryMap
    findings: list[Finding]
    timings: dict[Place, float]
    title: str = ""

    def write(self, path: Path) -> None:
        write_page(self.view, path, title=self.title, memory=self.memory, findings=self.findings, timings=self.timings)


def pointer(address: int, name: str = "") -> tuple[str, bytes, tuple[int, ...] | None]:
    return name, struct.pack("<Q", address), (0,)


def word(value: float, name: str = "") -> tuple[str, bytes, tuple[int, ...] | None]:
    return name, struct.pack("<f" if isinstance(value, float) else "<i", value), ()


def kernel(name: str, grid: tuple, block: int, *values: tuple, symbol: str = "", shared: int = 0, **attributes) -> Node:
    """A launch. Each value stands where its size allows it, as in the parameters of a kernel."""
    arguments, at = [], 0
    for label, data, pointers in values:
        align = min(len(data), 8)
        at = -(-at // align) * align
        arguments.append(Argument(at, data, label, pointers))
        at += len(data)
    extents = (*grid, 1, 1, 1)[:3]
    return Node(NodeKind.KERNEL, name, symbol or name, extents, (block, 1, 1), shared, attributes, tuple(arguments))


class DecodeStep:
    """A step of a Llama of 8 billion parameters for 32 rows, with names, sizes and times such as a GPU shows."""

    def __init__(self, layers: int = 32, rows: int = 32) -> None:
        self.rows, self.nodes, self.edges, self.times = rows, [], [], []
        self.regions: dict[str, Region] = {}
        self.tail: tuple[int, ...] = ()
        self.noise = np.random.default_rng(0)
        self.places = {Owner.HOST: 0x7F3A_1E00_0000, Owner.STATIC: 0x7F32_8000_0000, Owner.WEIGHT: 0x7F2C_0000_0000}
        self.places |= {Owner.CACHE: 0x7F20_0000_0000, Owner.POOL: 0x7F32_9000_0000, Owner.LIBRARY: 0x7F33_4000_0000}
        self.places[Owner.ALLOCATOR] = 0x7F32_A400_0000
        self._head()
        for layer in range(layers):
            self._layer(layer)
        self._tail()

    def at(self, name: str, owner: Owner, nbytes: int, *, live: bool = True) -> int:
        """Address of a region, which is made when it is new."""
        if name not in self.regions:
            self.regions[name] = Region(name, owner, self.places[owner], nbytes, live)
            self.places[owner] += -(-nbytes // 512) * 512
        return self.regions[name].address

    def buffer(self, name: str, words: int = 32) -> tuple:
        return pointer(self.at(name, Owner.STATIC, 4 * words), f"{name}_ptr")

    def add(self, node: Node, microseconds: float, *after: int, programmatic: bool = False) -> int:
        index = len(self.nodes)
        self.nodes.append(node)
        self.times.append(float(microseconds * self.noise.uniform(0.97, 1.06)))
        self.edges += [Edge(source, index, programmatic) for source in (after or self.tail)]
        self.tail = (index,)
        return index

    def gemm(self, name: str, weight: str, nbytes: int, source: int, target: int, microseconds: float) -> None:
        """cuBLAS: no names, and pointers within one block of parameters."""
        values = [source, self.at(weight, Owner.WEIGHT, nbytes), target, 0]
        values += [self.at("cublas workspace", Owner.LIBRARY, 32 * MIB), 4096 << 32 | self.rows, 0x3F800000]
        block = ("", struct.pack("<7Q", *values) + bytes(72), None)
        symbol = f"{name}__5828BxXIXX000Params"
        grid = (max(nbytes >> 20, 1), 1, 1)
        attributes = {"cluster": "2 x 1 x 1", "programmatic stream serialization": "1"}
        self.add(kernel(name, grid, 384, block, symbol=symbol, shared=213_000, **attributes), microseconds)

    def _head(self) -> None:
        inbox = self.at("inbox", Owner.HOST, 4 * 41_216)
        record = self.buffer("record", 10_304)
        apply = kernel(
            "_apply_kernel", (8,), 128, self.buffer("page_groups", 8), pointer(inbox, "inbox_ptr"), record,
            self.buffer("cursor", 16), self.buffer("row_lens", 256), self.buffer("step_counter", 2),
            word(4, "slots"), word(10_304, "stride_inbox"), word(self.rows, "max_reqs"),
        )  # fmt: skip
        first = self.add(apply, 3.1)
        checked = self.add(
            kernel("_check_rows_kernel", (self.rows,), 32, record, self.buffer("last_token", 256),
                   self.buffer("check_code"), word(131_072, "max_seq_len"), word(128_256, "vocab_size")), 2.2,
        )  # fmt: skip
        names = ("input_ids", "positions", "slot_mapping", "seq_lens", "query_start_loc")
        buffers = [self.buffer(name, self.rows + 1) for name in names] + [self.buffer("block_table", 32 * 8192)]
        self.add(kernel("_write_buffers_kernel", (self.rows, 4), 128, record, *buffers), 2.9)
        written = self.tail[0]
        # Beside the embedding, on two streams: the schedule of attention, and a copy for penalties.
        self.add(kernel("_schedule_kernel", (1,), 1024, self.buffer("seq_lens"), self.buffer("work_list", 4096)), 3.4)
        scheduled = self.tail[0]
        copies = (Operand("src", self.at("token_mask", Owner.HOST, 512_000), 512_000, host=True),
                  Operand("dst", self.at("mask on device", Owner.STATIC, 512_000), 512_000, written=True))  # fmt: skip
        self.add(Node(NodeKind.MEMCPY, "memcpy host to device", operands=copies), 11.0, first)
        copied = self.tail[0]
        zeroed = Operand("dst", self.at("split counters", Owner.STATIC, 65_536), 65_536, written=True)
        self.add(Node(NodeKind.MEMSET, "memset", operands=(zeroed,), scalars=(("value", "0"),)), 1.3, checked)
        cleared = self.tail[0]
        name = (
            "void at::native::(anonymous namespace)::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)"
        )
        self.x = self.at("pool block 0", Owner.POOL, self.rows * 4096 * 2)
        embed = self.at("model.embed_tokens.weight", Owner.WEIGHT, 128_256 * 4096 * 2)
        gather = kernel(name, (self.rows, 4), 128, pointer(self.x), pointer(embed), self.buffer("input_ids", 33),
                        word(128_256), word(8192), symbol="_ZN2at6native12_GLOBAL__N_124vectorized_gather_kernelILi16ElEE")  # fmt: skip
        self.add(gather, 2.6, written)
        self.tail = (self.tail[0], scheduled, cleared)
        self.copied = copied

    def _layer(self, layer: int) -> None:
        prefix, rows = f"model.layers.{layer}", self.rows
        blocks = [
            self.at(f"pool block {1 + i}", Owner.POOL, size * rows * 2)
            for i, size in enumerate((4096, 6144, 4096, 28672, 14336))
        ]
        normed, qkv, mixed, gate_up, hidden = blocks
        for which in (0, 1):
            self.at(f"pool block {6 + which}", Owner.POOL, 3 * MIB, live=False)
        norm = self.at(f"{prefix}.input_layernorm.weight", Owner.WEIGHT, 8192)
        self.add(kernel("_rms_norm_kernel", (rows,), 256, pointer(self.x, "x_ptr"), pointer(norm, "weight_ptr"),
                        pointer(normed, "out_ptr"), word(4096, "width"), word(1e-5, "eps")), 2.1, programmatic=layer > 0)  # fmt: skip
        self.gemm("nvjet_tst_64x32_64x12_2x1_v_bz_TNT", f"{prefix}.qkv_proj.weight", 6144 * 4096 * 2, normed, qkv, 14.5)
        k = self.at(f"k cache {layer}", Owner.CACHE, 256 * MIB)
        v = self.at(f"v cache {layer}", Owner.CACHE, 256 * MIB)
        self.add(kernel("_write_kernel", (rows, 10), 64, pointer(qkv, "qkv_ptr"), pointer(k, "k_cache_ptr"), pointer(v, "v_cache_ptr"),
                        self.buffer("slot_mapping", 33), self.buffer("positions", 33), word(500_000.0, "theta"), word(16, "page_size")), 2.7)  # fmt: skip
        parameters = struct.pack("<6Q2f6i", qkv, k, v, self.at("block_table", Owner.STATIC, 0), self.at("work_list", Owner.STATIC, 0),
                                 mixed, 0.08838834764, 0.0, rows, 8192, 16, 32, 8, 128)  # fmt: skip
        self.add(
            kernel("decode_attention", (264,), 128, ("p", parameters, (0, 8, 16, 24, 32, 40)), shared=104_448), 19.0
        )
        self.gemm(
            "nvjet_tst_64x32_64x12_1x2_h_bz_splitK_TNT", f"{prefix}.o_proj.weight", 4096 * 4096 * 2, mixed, self.x, 10.6
        )
        norm = self.at(f"{prefix}.post_attention_layernorm.weight", Owner.WEIGHT, 8192)
        self.add(kernel("_rms_norm_kernel", (rows,), 256, pointer(self.x, "x_ptr"), pointer(norm, "weight_ptr"),
                        pointer(normed, "out_ptr"), word(4096, "width"), word(1e-5, "eps")), 2.1)  # fmt: skip
        self.gemm(
            "nvjet_tst_128x32_64x8_2x1_v_bz_TNT",
            f"{prefix}.gate_up_proj.weight",
            28672 * 4096 * 2,
            normed,
            gate_up,
            57.5,
        )
        self.add(kernel("_silu_and_mul_kernel", (rows, 14), 256, pointer(gate_up, "x_ptr"), pointer(hidden, "out_ptr"), word(14336, "width")), 3.0)  # fmt: skip
        self.gemm(
            "nvjet_tst_64x32_64x12_1x2_h_bz_splitK_TNT",
            f"{prefix}.down_proj.weight",
            14336 * 4096 * 2,
            hidden,
            self.x,
            30.8,
        )
        add = ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >"
               "(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)")  # fmt: skip
        packed = ("", struct.pack("<3Q", self.x, self.x, mixed), None)
        self.add(
            kernel(
                add, (rows,), 128, word(rows * 4096), packed, symbol="_ZN2at6native29vectorized_elementwise_kernelILi8E"
            ),
            1.9,
        )

    def _tail(self) -> None:
        logits = self.at("logits", Owner.STATIC, self.rows * 128_256 * 4)
        self.gemm("nvjet_tst_128x32_64x8_2x1_v_bz_TNT", "lm_head.weight", 128_256 * 4096 * 2, self.x, logits, 246.0)
        ended = self.tail[0]
        freed = self.regions["pool block 7"].address + 0x4000
        old = self.at("block of 2 MiB", Owner.ALLOCATOR, 2 * MIB)
        body = GraphView(
            (kernel("_bias_kernel", (self.rows,), 128, pointer(logits, "logits_ptr"), pointer(old, "bias_ptr")),
             kernel("_mask_kernel", (self.rows, 32), 128, pointer(logits, "logits_ptr"), self.buffer("mask on device"))),
            (Edge(0, 1, True),),
        )  # fmt: skip
        self.add(Node(NodeKind.CONDITIONAL, "if", attributes={"type": "if"}, bodies=(body,)), 2.0, ended, self.copied)
        conditional = self.tail[0]
        sample = kernel("sample_chunks_kernel", (self.rows, 16), 256, pointer(logits, "logits_ptr"), self.buffer("temperatures"),
                        self.buffer("top_ks"), self.buffer("seeds", 64), word(128_256, "vocab_size"), pointer(freed, "scratch_ptr"))  # fmt: skip
        self.add(sample, 12.4)
        sampled = self.tail[0]
        self.add(kernel("sample_rows_kernel", (self.rows,), 256, self.buffer("tokens")), 4.1)
        rows = self.tail[0]
        self.add(kernel("_token_logprobs_kernel", (self.rows,), 512, pointer(logits, "logits_ptr")), 9.8, sampled)
        probs = self.tail[0]
        ring = pointer(self.at("host rings", Owner.HOST, 262_144), "host_ring_ptr")
        self.add(
            kernel("_publish_kernel", (1,), 128, self.buffer("tokens"), self.buffer("row_lens", 256), ring),
            3.0,
            rows,
            probs,
        )
        self.findings = [
            Finding((sampled,), "sample_chunks_kernel", "argument 5 'scratch_ptr', byte 28", freed, Owner.POOL, "pool block 7",
                    "It points into a block of the pool that was freed: the next capture may give it away. Keep the tensor "
                    "alive as long as the graph."),
            Finding((conditional, 0, 0), "_bias_kernel", "argument 1 'bias_ptr', byte 8", old, Owner.ALLOCATOR, "block of 2 MiB",
                    "It points into memory that torch's allocator may give to others: the graph does not hold the tensor. Make "
                    "it a static buffer, or allocate it inside of the capture."),
        ]  # fmt: skip

    def example(self) -> Example:
        view = GraphView(tuple(self.nodes), tuple(sorted(self.edges, key=lambda e: (e.source, e.target))))
        timings: dict[Place, float] = {(index,): time for index, time in enumerate(self.times)}
        title = f"decode step, llama-3.1-8b, {self.rows} rows"
        return Example(view, MemoryMap(self.regions.values()), self.findings, timings, title)


def large(nodes: int) -> Example:
    """A chain of so many kernels, with a fork now and then; 8 arguments each, none like another's."""
    names = [f"layer_kernel_{i}<float, {i}>" for i in range(40)]
    base, made, edges = 0x7F00_0000_0000, [], []
    for i in range(nodes):
        values = [pointer(base + 4096 * ((i + j) % 5000) + j) for j in range(6)] + [word(i), word(0.5 + i)]
        made.append(kernel(names[i * i % 40], (1 + i % 300, 4), 128, *values, shared=1024 * (i % 7)))
        edges += [Edge(i - 1, i)] if i else []
        edges += [Edge(i - 20, i)] if i % 50 == 49 else []
    regions = [Region(f"block {i}", Owner.POOL, base + 4096 * i, 4096, i % 9 != 0) for i in range(5000)]
    timings: dict[Place, float] = {(i,): 1.0 + i % 13 for i in range(nodes)}
    view = GraphView(tuple(made), tuple(sorted(edges, key=lambda e: (e.source, e.target))))
    return Example(view, MemoryMap(regions), [], timings, f"{nodes} nodes")


def hostile() -> Example:
    """Names that would be markup, script, marks of the template or no Unicode, if anything took them for that."""
    names = [
        "</script><script>document.title = 'broken out'</script>", "<!--<script>", "<img src=x onerror=alert(1)>", "{{script}}{{data}}",
        '" onclick="alert(1)', "'; alert(1); '", "\\u003c/script\\u003e", "\u2028\u2029\u0000\x7f\t\n", "\ud800 alone", "\u05e9\u05dc\u05d5\u05dd \u202e 中文 🙂",
        "&lt;b&gt;&amp;", "__proto__", "constructor", "a b  c", "#q=1&node=2", "%00%zz", "", "x" * 5000,
    ]  # fmt: skip
    nodes = tuple(
        Node(NodeKind.KERNEL, name, name, (1, 1, 1), (1, 1, 1), 0, {name or "none": name}, (Argument(0, b"\x01\0\0\0", name),),
             (Operand(name, 0x1000, 16),), ((name, name),), (), name)
        for name in names
    )  # fmt: skip
    findings = [Finding((i,), name, name, 0x1000, Owner.POOL, name, name) for i, name in enumerate(names)]
    memory = MemoryMap([Region(name, Owner.POOL, 0x1000 + 4 * i, 4) for i, name in enumerate(names)])
    edges = tuple(Edge(i, i + 1) for i in range(len(nodes) - 1))
    return Example(GraphView(nodes, edges, names[0]), memory, findings, {}, " ".join(names[:12]))


def tape_view(tape: OpTape) -> GraphView:
    """The ops of a tape in their order, with all tensors that they take and give."""
    nodes = []
    for entry in tape._entries:
        named = [*zip((a.name for a in entry.func._schema.arguments), entry.args, strict=False), *entry.kwargs.items()]
        tensors = [(name, value, False) for name, value in named if isinstance(value, torch.Tensor)]
        tensors += [("out", out, True) for out in entry.outputs if out is not None]
        operands = tuple(Operand(name, t.data_ptr(), t.nbytes, written=written) for name, t, written in tensors)
        scalars = tuple((name, str(value)) for name, value in named if not isinstance(value, torch.Tensor))
        nodes.append(Node(NodeKind.OP, entry.func._schema.name, operands=operands, scalars=scalars))
    return GraphView(tuple(nodes), origin="op-tape")


def screenshot(example: Example, path: Path, place: str, *, dark: bool = False, size: str = "1400,900") -> None:
    """Draw a page by chromium, with the node of a place open."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "graph.html"
        example.write(page)
        command = [
            shutil.which("chromium") or "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
        ]
        command += [
            f"--window-size={size}",
            "--virtual-time-budget=3000",
            f"--screenshot={path}",
            f"--user-data-dir={folder}/profile",
        ]
        command += ["--blink-settings=preferredColorScheme=0"] if dark else []
        subprocess.run([*command, f"{page.as_uri()}#node={place}"], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    screenshot(DecodeStep().example(), Path(sys.argv[1]).resolve(), sys.argv[2] if len(sys.argv) > 2 else "")
