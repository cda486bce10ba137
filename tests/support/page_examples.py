"""Example graphs of pages: a decode step on CUDA, graphs of any size, and hostile names.

python -m tests.support.page_examples docs/images/graph_page.png      update the picture of the documentation
"""

from __future__ import annotations

import base64
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from graphrt.capture.inspect.findings import Finding, FindingKind
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.page import write_page
from graphrt.capture.inspect.view import Argument, Edge, GraphView, Node, NodeKind, Operand
from tests.support.browser import Browser

MIB = 1 << 20
GATHER = "void at::native::(anonymous namespace)::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)"
GATHER_SYMBOL = "_ZN2at6native12_GLOBAL__N_124vectorized_gather_kernelILi16ElEEvPcS3_PlilE"
FUNCTOR = "at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>"
ADD = f"void at::native::vectorized_elementwise_kernel<8, {FUNCTOR} >(int, {FUNCTOR})"
FREED = (
    "the memory is free, 'pool block 7', and its next owner changes what the graph reads; keep the tensor alive as "
    "long as the graph"
)
STRAY = (
    "'block of 2 MiB' is neither registered nor in the graph's pool, so it may be freed; pass it to memory_of(), or "
    "allocate it during the capture"
)
HOSTILE = [
    "</script><script>document.title = 'broken out'</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "{{script}}{{data}}",
    '" onclick="alert(1)',
    "'; alert(1); '",
    "\\u003c/script\\u003e",
    "\u2028\u2029\u0000\x7f\t\n",
    "\ud800 alone",
    "\u05e9\u05dc\u05d5\u05dd \u202e 中文 🙂",
    "&lt;b&gt;&amp;",
    "__proto__",
    "constructor",
    "a b  c",
    "#q=1&node=2",
    "%00%zz",
    "",
    "x" * 5000,
]


@dataclass
class Example:
    view: GraphView
    memory: MemoryMap
    findings: list[Finding]
    title: str = ""

    def write(self, path: Path) -> None:
        write_page(self.view, path, title=self.title, memory=self.memory, findings=self.findings)


def pointer(address: int, name: str = "") -> tuple[str, bytes, tuple[int, ...] | None]:
    return name, struct.pack("<Q", address), (0,)


def word(value: float, name: str = "") -> tuple[str, bytes, tuple[int, ...] | None]:
    return name, struct.pack("<f" if isinstance(value, float) else "<i", value), ()


def kernel(name: str, grid: tuple, block: int, *values: tuple, symbol: str = "", shared: int = 0, **attributes) -> Node:
    """A kernel launch. Values are aligned to their sizes, as in the parameters of a kernel."""
    arguments, at = [], 0
    for label, data, pointers in values:
        align = min(len(data), 8)
        at = -(-at // align) * align
        arguments.append(Argument(at, data, label, pointers))
        at += len(data)
    extents = (*grid, 1, 1, 1)[:3]
    return Node(NodeKind.KERNEL, name, symbol or name, extents, (block, 1, 1), shared, attributes, tuple(arguments))


class DecodeStep:
    """A decode step of Llama 8B for 32 requests, with names and sizes as on a GPU."""

    def __init__(self, layers: int = 32) -> None:
        self.rows, self.nodes, self.edges = 32, [], []
        self.regions: dict[str, Region] = {}
        self.tail: tuple[int, ...] = ()
        self.places = {Owner.HOST: 0x7F3A_1E00_0000, Owner.STATIC: 0x7F32_8000_0000, Owner.WEIGHT: 0x7F2C_0000_0000}
        self.places |= {Owner.CACHE: 0x7F20_0000_0000, Owner.POOL: 0x7F32_9000_0000, Owner.LIBRARY: 0x7F33_4000_0000}
        self.places[Owner.ALLOCATOR] = 0x7F32_A400_0000
        self._head()
        for layer in range(layers):
            self._layer(layer)
        self._tail()

    def at(self, name: str, owner: Owner, nbytes: int, *, live: bool = True) -> int:
        """Return the address of a region, and create the region if it is new."""
        if name not in self.regions:
            self.regions[name] = Region(name, owner, self.places[owner], nbytes, live)
            self.places[owner] += -(-nbytes // 512) * 512
        return self.regions[name].address

    def buffer(self, name: str, words: int = 32) -> tuple:
        return pointer(self.at(name, Owner.STATIC, 4 * words), f"{name}_ptr")

    def add(self, node: Node, *after: int) -> None:
        """Add a node after some nodes; by default after the last ones, which it replaces."""
        index = len(self.nodes)
        self.nodes.append(node)
        self.edges += [Edge(source, index) for source in (after or self.tail)]
        self.tail = (index,)

    def launch(self, name: str, grid: tuple, block: int, *values: tuple, shared: int = 0) -> None:
        self.add(kernel(name, grid, block, *values, shared=shared))

    def gemm(self, name: str, weight: str, nbytes: int, source: int, target: int) -> None:
        """Add a cuBLAS kernel: no argument names, and pointers in one block of parameters."""
        values = [source, self.at(weight, Owner.WEIGHT, nbytes), target, 0]
        values += [self.at("cublas workspace", Owner.LIBRARY, 32 * MIB), 4096 << 32 | self.rows, 0x3F800000]
        block = ("", struct.pack("<7Q", *values) + bytes(72), None)
        symbol = f"{name}__5828BxXIXX000Params"
        grid = (max(nbytes >> 20, 1), 1, 1)
        attributes = {"cluster": "2 x 1 x 1", "programmatic stream serialization": "1"}
        self.add(kernel(name, grid, 384, block, symbol=symbol, shared=213_000, **attributes))

    def _head(self) -> None:
        """Add the metadata kernels, and on two other streams the attention schedule and a copy for the sampler."""
        input_ring, rows = self.at("input_ring", Owner.HOST, 4 * 41_216), self.rows
        record, groups = self.buffer("inputs", 10_304), self.buffer("page_groups", 8)
        self.launch(
            "_unpack_kernel", (8,), 128, groups, pointer(input_ring, "input_ring_ptr"), record,
            self.buffer("cursor", 16),
            self.buffer("req_seq_lens", 256), self.buffer("step_counter", 2), word(4, "slots"), word(10_304, "stride"),
        )  # fmt: skip
        (applied,) = self.tail
        lengths = (word(131_072, "max_seq_len"), word(128_256, "vocab_size"))
        last, code = self.buffer("last_token", 256), self.buffer("check_code")
        self.launch("_check_rows_kernel", (rows,), 32, record, last, code, *lengths)
        (checked,) = self.tail
        names = ("input_ids", "positions", "slot_mapping", "seq_lens", "query_start_loc")
        buffers = [self.buffer(name, rows + 1) for name in names] + [self.buffer("block_table", 32 * 8192)]
        self.launch("_write_buffers_kernel", (rows, 4), 128, record, *buffers)
        (written,) = self.tail
        self.launch("_schedule_kernel", (1,), 1024, self.buffer("seq_lens"), self.buffer("work_list", 4096))
        (scheduled,) = self.tail
        source = Operand("src", self.at("token_mask", Owner.HOST, 512_000), 512_000, host=True)
        target = Operand("dst", self.at("mask on device", Owner.STATIC, 512_000), 512_000, written=True)
        self.add(Node(NodeKind.MEMCPY, "memcpy host to device", operands=(source, target)), applied)
        (self.copied,) = self.tail
        counters = Operand("dst", self.at("split counters", Owner.STATIC, 65_536), 65_536, written=True)
        self.add(Node(NodeKind.MEMSET, "memset", operands=(counters,), scalars=(("value", "0"),)), checked)
        (cleared,) = self.tail
        self.x = self.at("pool block 0", Owner.POOL, rows * 4096 * 2)
        embedding = pointer(self.at("model.embed_tokens.weight", Owner.WEIGHT, 128_256 * 4096 * 2))
        values = (pointer(self.x), embedding, self.buffer("input_ids", 33), word(128_256), word(8192))
        self.add(kernel(GATHER, (rows, 4), 128, *values, symbol=GATHER_SYMBOL), written)
        self.tail += (scheduled, cleared)

    def _layer(self, layer: int) -> None:
        prefix, rows = f"model.layers.{layer}", self.rows
        widths = (4096, 6144, 4096, 28672, 14336)
        blocks = [self.at(f"pool block {1 + i}", Owner.POOL, width * rows * 2) for i, width in enumerate(widths)]
        normed, qkv, mixed, gate_up, hidden = blocks
        for which in (6, 7):
            self.at(f"pool block {which}", Owner.POOL, 3 * MIB, live=False)

        def norm(name: str) -> None:
            weight = self.at(f"{prefix}.{name}.weight", Owner.WEIGHT, 8192)
            pointers = (pointer(self.x, "x_ptr"), pointer(weight, "weight_ptr"), pointer(normed, "out_ptr"))
            self.launch("_rms_norm_kernel", (rows,), 256, *pointers, word(4096, "width"), word(1e-5, "eps"))

        norm("input_layernorm")
        self.gemm("nvjet_tst_64x32_64x12_2x1_v_bz_TNT", f"{prefix}.qkv_proj.weight", 6144 * 8192, normed, qkv)
        k, v = (self.at(f"{which} cache {layer}", Owner.CACHE, 256 * MIB) for which in "kv")
        self.launch(
            "_write_kernel", (rows, 10), 64, pointer(qkv, "qkv_ptr"), pointer(k, "k_ptr"), pointer(v, "v_ptr"),
            self.buffer("slot_mapping"), self.buffer("positions"), word(500_000.0, "theta"), word(16, "page_size"),
        )  # fmt: skip
        tables = (self.at("block_table", Owner.STATIC, 0), self.at("work_list", Owner.STATIC, 0))
        data = struct.pack("<6Q2f6i", qkv, k, v, *tables, mixed, 128**-0.5, 0.0, rows, 8192, 16, 32, 8, 128)
        self.launch("decode_attention", (264,), 128, ("p", data, (0, 8, 16, 24, 32, 40)), shared=104_448)
        split = "nvjet_tst_64x32_64x12_1x2_h_bz_splitK_TNT"
        self.gemm(split, f"{prefix}.o_proj.weight", 4096 * 8192, mixed, self.x)
        norm("post_attention_layernorm")
        self.gemm("nvjet_tst_128x32_64x8_2x1_v_bz_TNT", f"{prefix}.gate_up_proj.weight", 28672 * 8192, normed, gate_up)
        activation = (pointer(gate_up, "x_ptr"), pointer(hidden, "out_ptr"), word(14336, "width"))
        self.launch("_silu_and_mul_kernel", (rows, 14), 256, *activation)
        self.gemm(split, f"{prefix}.down_proj.weight", 14336 * 8192, hidden, self.x)
        self.launch(ADD, (rows,), 128, word(rows * 4096), ("", struct.pack("<3Q", self.x, self.x, mixed), None))

    def _tail(self) -> None:
        """Add the sampler on two streams, after a conditional mask. Two pointers are invalid."""
        rows, logits = self.rows, pointer(self.at("logits", Owner.STATIC, self.rows * 128_256 * 4), "logits_ptr")
        address = self.regions["logits"].address
        self.gemm("nvjet_tst_128x32_64x8_2x1_v_bz_TNT", "lm_head.weight", 128_256 * 8192, self.x, address)
        freed = self.regions["pool block 7"].address + 0x4000
        stray = self.at("block of 2 MiB", Owner.ALLOCATOR, 2 * MIB)
        bias = kernel("_bias_kernel", (rows,), 128, logits, pointer(stray, "bias_ptr"))
        mask = kernel("_mask_kernel", (rows, 32), 128, logits, self.buffer("mask on device"))
        body = GraphView((bias, mask), (Edge(0, 1, True),))
        condition = Node(NodeKind.CONDITIONAL, "if", attributes={"type": "if"}, bodies=(body,))
        self.add(condition, *self.tail, self.copied)
        (guarded,) = self.tail
        options = [self.buffer(name) for name in ("temperatures", "top_ks", "seeds")]
        more = (word(128_256, "vocab_size"), pointer(freed, "scratch_ptr"))
        self.launch("sample_chunks_kernel", (rows, 16), 256, logits, *options, *more)
        (sampled,) = self.tail
        self.launch("sample_rows_kernel", (rows,), 256, self.buffer("tokens"))
        (chosen,) = self.tail
        self.add(kernel("_token_logprobs_kernel", (rows,), 512, logits), sampled)
        self.tail += (chosen,)
        ring = pointer(self.at("host rings", Owner.HOST, 262_144), "host_ring_ptr")
        self.launch("_write_outputs_kernel", (1,), 128, self.buffer("tokens"), self.buffer("req_seq_lens", 256), ring)
        names = ("argument 5 'scratch_ptr', byte 40", "argument 1 'bias_ptr', byte 8")
        self.findings = [
            Finding(
                (sampled,), "sample_chunks_kernel", names[0], freed, Owner.POOL, "pool block 7", FREED,
                FindingKind.FREED,
            ),
            Finding(
                (guarded, 0, 0), "_bias_kernel", names[1], stray, Owner.ALLOCATOR, "block of 2 MiB", STRAY,
                FindingKind.FOREIGN,
            ),
        ]  # fmt: skip

    def example(self) -> Example:
        view = GraphView(tuple(self.nodes), tuple(sorted(self.edges, key=lambda e: (e.source, e.target))))
        title = f"decode step, llama-3.1-8b, {self.rows} rows"
        return Example(view, MemoryMap(self.regions.values()), self.findings, title)


def large(nodes: int) -> Example:
    """A chain of kernels with some forks, each with 8 distinct arguments."""
    names = [f"layer_kernel_{i}<float, {i}>" for i in range(40)]
    base, made, edges = 0x7F00_0000_0000, [], []
    for i in range(nodes):
        values = [pointer(base + 4096 * ((i + j) % 5000) + j) for j in range(6)] + [word(i), word(0.5 + i)]
        made.append(kernel(names[i * i % 40], (1 + i % 300, 4), 128, *values, shared=1024 * (i % 7)))
        edges += [Edge(i - 1, i)] if i else []
        edges += [Edge(i - 20, i)] if i % 50 == 49 else []
    regions = [Region(f"block {i}", Owner.POOL, base + 4096 * i, 4096, i % 9 != 0) for i in range(5000)]
    view = GraphView(tuple(made), tuple(sorted(edges, key=lambda e: (e.source, e.target))))
    return Example(view, MemoryMap(regions), [], f"{nodes} nodes")


def hostile() -> Example:
    """Names that look like markup, scripts, template placeholders or invalid Unicode."""
    names = HOSTILE
    nodes = tuple(
        Node(
            NodeKind.KERNEL, name, name, (1, 1, 1), (1, 1, 1), 0, {name or "none": name},
            (Argument(0, b"\x01\0\0\0", name),), (Operand(name, 0x1000, 16),), ((name, name),), (), name,
        )
        for name in names
    )  # fmt: skip
    findings = [
        Finding((i,), name, name, 0x1000, Owner.POOL, name, name, FindingKind.FREED) for i, name in enumerate(names)
    ]
    memory = MemoryMap([Region(name, Owner.POOL, 0x1000 + 4 * i, 4) for i, name in enumerate(names)])
    edges = tuple(Edge(i, i + 1) for i in range(len(nodes) - 1))
    return Example(GraphView(nodes, edges, names[0]), memory, findings, " ".join(names[:12]))


def screenshot(example: Example, path: Path, fragment: str) -> None:
    """Take a screenshot of a page with a state after "#"."""
    with tempfile.TemporaryDirectory() as folder:
        example.write(Path(folder) / "graph.html")
        browser = Browser(Path(folder) / "profile")
        with browser.page((Path(folder) / "graph.html").as_uri() + fragment) as page:
            page.frame()
            path.write_bytes(base64.b64decode(page.call("Page.captureScreenshot")["data"]))
        browser.close()


if __name__ == "__main__":
    screenshot(DecodeStep().example(), Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "#node=320")
