"""The CUDA kernel of few-token products: compiled variants, loads before the wait, and races on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.config import RuntimeConfig
from graphrt.kernels.ops import linear as operators
from graphrt.kernels.ops.linear_native import native_variants
from graphrt.kernels.ops.linear_plans import linear_plan
from graphrt.kernels.sizes import ceil_div
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import load_model, make_runtime
from graphrt.replay import ReplayManager
from tests.support.native_usage import accesses_before_the_wait, assert_fits, compiled_within

WEIGHT, SCALE, ZERO = "LDG.E.NA.LTC128B.128", "LDG.E.U16", "LDG.E.U8"


@pytest.mark.parametrize("name", native_variants())
def test_variants_compile_within_their_bounds(name: str) -> None:
    """As many blocks as planned fit a multiprocessor. Before the wait, they load weights only."""
    variant = native_variants()[name]
    macros = dict(variant.macros)
    most_spilled = {1: 0, 2: 72, 4: 152, 8: 152}[macros["TOKEN_TILES"]]
    registers, _ = compiled_within(variant, most_spilled)
    assert_fits(variant, macros["BLOCKS"], registers)
    loads = 2 * macros["ROW_TILES"] * macros["UNROLL"]
    kinds = (WEIGHT, SCALE, ZERO) if macros["BITS"] == 4 else (WEIGHT,)
    assert accesses_before_the_wait(variant) == dict.fromkeys(kinds, loads)


# -- races

REPLAYS, MAX_LEN, PAGE_SIZE = 10_000, 256, 16


@contextmanager
def captured_model(
    num_reqs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ReplayManager, LlamaModel]]:
    """A manager and its model of 30 layers with random keys and values. Any device uses the plans of a measured one."""
    monkeypatch.setattr(operators, "linear_plan", lambda _, *product: linear_plan(torch.device("cpu"), *product))
    model = load_model("dummy:smollm2-135m", device=device, dtype=torch.bfloat16, max_positions=MAX_LEN).model
    sizes = {"max_num_reqs": 32, "max_num_tokens": 32, "decode_sizes": (num_reqs,), "mixed_sizes": ()}
    config = RuntimeConfig(max_seq_len=MAX_LEN, **sizes)
    with make_runtime(model, config, page_size=PAGE_SIZE, num_pages=1 + 2 * 32 * MAX_LEN // PAGE_SIZE) as runtime:
        for _, tensor in runtime.kv_cache.named_tensors():
            tensor.normal_()
        runtime.capture()
        yield runtime.manager, model


def make_batch(num_reqs: int, which: int, rng: torch.Generator) -> Batch:
    """One of two mixes, which share no page."""
    lengths = torch.randint(1, MAX_LEN, (num_reqs,), generator=rng).tolist()
    counts = [ceil_div(length, PAGE_SIZE) for length in lengths]
    first = 1 + which * 32 * MAX_LEN // PAGE_SIZE
    return Batch(
        req_indices=range(num_reqs),
        seq_lens=lengths,
        tokens=torch.randint(1000, (num_reqs,), generator=rng).tolist(),
        page_indptr=[sum(counts[:req]) for req in range(num_reqs + 1)],
        page_ids=range(first, first + sum(counts)),
    )


@triton.jit(do_not_specialize=["seed"])
def _occupy_kernel(seed, MOST: tl.constexpr):
    """Keep multiprocessors busy for random times of at most MOST ns, so that blocks of other kernels start late."""
    duration = (tl.randint(seed, tl.program_id(0)).to(tl.uint32, bitcast=True) % MOST).to(tl.int64)
    start = globaltimer()
    now = start
    while now - start < duration:
        now = globaltimer()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("num_reqs", [1, 16, 32])
def test_ten_thousand_replays_with_delayed_blocks(
    num_reqs: int, monkeypatch: pytest.MonkeyPatch, rng: torch.Generator
) -> None:
    """Two mixes alternate, so that a block that reads too early finds values of the other mix."""
    with captured_model(num_reqs, "cuda", monkeypatch) as (manager, _):
        descriptor = BatchDescriptor.decode(num_reqs)
        graph = manager.graph(descriptor)
        view = inspect_graph(graph)
        early = [view.nodes[edge.target].name for edge in view.edges if edge.programmatic]
        assert early.count("linear") >= 4 * 30
        manager.audit(descriptor).raise_if_any()
        batches = [make_batch(num_reqs, which, rng) for which in range(2)]
        expected = []
        for batch in batches:
            assert (found := manager.compare(batch)).equal, found
            manager.replay(batch).tokens()
            expected.append(graph.output.clone().view(torch.int16))
        assert not torch.equal(*expected)
        wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        busy = torch.cuda.Stream()
        for turn in range(2 * REPLAYS):
            with torch.cuda.stream(busy):
                for part in range(4):
                    _occupy_kernel[(1 + (turn + part) % 48,)](4 * turn + part, MOST=50_000)
            manager.replay(batches[turn % 2])
            wrong.add_((graph.output.view(torch.int16) != expected[turn % 2]).any())
        assert wrong.item() == 0


@pytest.mark.gpu
def test_a_weight_copied_before_a_queued_step_is_read(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    """The first product of a graph must not load its weight before the copy, on the same stream, has finished."""
    with captured_model(1, "cuda", monkeypatch) as (manager, model):
        batch, weight = make_batch(1, 0, rng), model.layers[0].qkv
        output = manager.graph(BatchDescriptor.decode(1)).output
        values, expected = (weight.clone(), weight.flip(0)), []
        for value in values:
            weight.copy_(value)
            manager.replay(batch).tokens()
            expected.append(output.clone())
        assert not torch.equal(*expected)
        wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        for turn in range(200):
            torch.cuda._sleep(200_000)
            weight.copy_(values[turn % 2])
            manager.replay(batch)
            wrong.add_((output != expected[turn % 2]).any())
        assert wrong.item() == 0
