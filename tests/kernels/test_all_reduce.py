"""The all-reduce over memory that ranks share: in emulation with ranks that stall, compiled, and on GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from graphrt.kernels.ops import all_reduce, collectives
from graphrt.kernels.ops import linear as operators
from graphrt.kernels.ops.all_reduce import MAX_WIDTH, SymmetricBuffer, buffer_words, native_variants
from graphrt.kernels.ops.linear import linear, linear_add
from graphrt.kernels.ops.norm import add_rms_norm
from tests.support import native_emulation
from tests.support.native_usage import accesses_before_the_wait, assert_fits, compiled_within

BF16, EPS = torch.bfloat16, 1e-5
needs_compiler = pytest.mark.skipif(native_emulation.COMPILER is None, reason="needs the C++ compiler g++")


def sum_of(x: list[torch.Tensor]) -> torch.Tensor:
    """The sum in float32 in the order of the ranks."""
    total = x[0].float()
    for other in x[1:]:
        total = total + other.float()
    return total.to(x[0].dtype)


def norm_of(residual: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    wide = residual.double()
    return wide / (wide.square().mean(1, keepdim=True) + EPS).sqrt() * gain.double()


def empty_words(ranks: int, capacity: int) -> torch.Tensor:
    """Memory of a buffer for `capacity` units of 16 bytes."""
    return torch.empty(buffer_words(ranks, 16 * capacity), dtype=torch.int32, device="cpu")


@dataclass
class Emulated:
    """Symmetric buffers of several ranks on the CPU. Operators are queued until `run`."""

    ranks: int
    capacity: int
    monkeypatch: pytest.MonkeyPatch
    inputs: list[torch.Tensor] = field(default_factory=list)  # kept alive until they are read

    def __post_init__(self) -> None:
        self.queues = native_emulation.Ranks(self.ranks)
        self.monkeypatch.setattr(all_reduce, "launch", self.queues.launch)
        words = [empty_words(self.ranks, self.capacity) for _ in range(self.ranks)]
        addresses = [one.data_ptr() for one in words]
        self.buffers = [SymmetricBuffer.of_words(one, addresses, rank) for rank, one in enumerate(words)]
        for buffer in self.buffers:
            buffer.wait_at_most(8)

    def call(self, name: str, *each: list[torch.Tensor], **kwargs: Any) -> list[torch.Tensor]:
        """Queue an operator on all ranks; every argument has a tensor per rank."""
        outs = []
        for rank, buffer in enumerate(self.buffers):
            self.queues.rank = rank
            own = [tensors[rank] for tensors in each]
            self.inputs += own
            outs.append(getattr(buffer, name)(*own, **kwargs))
        return outs

    def run(self, seed: int) -> None:
        self.queues.run(seed)
        for buffer in self.buffers:
            assert buffer.missing_rank() is None
            assert (buffer.memory == -1).all(), "words are left for the next call"


def check_calls(calls: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Run operators of changing kinds and sizes one after another, each on results of earlier ones."""
    ranks, most, widths = 3, 2, (64, 200, 256)
    emulated = Emulated(ranks, most * max(widths) // 8, monkeypatch)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device="cpu").to(BF16)

    first = {width: normal(most, width) for width in widths}
    residuals = {width: [x.clone() for _ in range(ranks)] for width, x in first.items()}
    gain, bias = normal(max(widths)), normal(max(widths))
    expected = []
    for _ in range(calls):
        kind, which, tokens = (int(torch.randint(end, (), generator=rng, device="cpu")) for end in (3, 3, most))
        tokens, width = 1 + tokens, widths[which]
        x = [normal(tokens, width) for _ in range(ranks)]
        if kind == 0:
            records = [one.view(torch.int32).flatten()[: 2 * tokens].view(tokens, 2) for one in x]
            expected.append((emulated.call("gather", records), torch.stack(records), None))
        elif kind == 1:
            expected.append((emulated.call("sum", x), sum_of(x), None))
        else:
            residual = [one[:tokens] for one in residuals[width]]
            outs = emulated.call("add_norm", x, residual, gain=gain[:width], eps=EPS, bias=bias[:width])
            first[width][:tokens] += sum_of(x) + bias[:width]
            expected.append((outs, norm_of(first[width][:tokens], gain[:width]), outs[0]))
    emulated.run(seed)
    for outs, want, normed in expected:
        for out in outs:
            if normed is not None:
                torch.testing.assert_close(out.double(), want, rtol=2**-6, atol=2**-8)
            assert torch.equal(out, want if normed is None else normed)
    for width, residual in residuals.items():
        assert all(torch.equal(one, first[width]) for one in residual)
    assert all(int(buffer.state[0]) == calls for buffer in emulated.buffers)


@needs_compiler
def test_a_thousand_calls_of_ranks_that_stall(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls(1000, rng, monkeypatch, seed=0)


BUGS = {
    "no_wait": ("  wait_for_earlier_kernels();\n", ""),
    "one_half": ("(i64)(calls % 2) * RANKS * p.capacity", "0"),
    "words_not_reset": ("if (r != p.rank) store_not_arrived(", "if (false) store_not_arrived("),
    "first_word_suffices": ("x.words[1] != NOT_ARRIVED && x.words[2]", "x.words[2]"),
}


@needs_compiler
@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_detected(bug: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_emulation, "injected", BUGS[bug])
    with pytest.raises(AssertionError):
        check_calls(100, rng, monkeypatch, seed=0)


@needs_compiler
@pytest.mark.parametrize("in_launch", [4, 3])
def test_bits_do_not_depend_on_the_number_of_tokens_or_lost_words(
    in_launch: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN, signed zeros and the word that means "not arrived" are summed like other values."""
    ranks, tokens, width = 2, 4, 512
    emulated = Emulated(ranks, in_launch * width // 8, monkeypatch)
    x = [torch.randn(tokens, width, generator=rng, device="cpu").to(BF16) for _ in range(ranks)]
    x[0].view(torch.int32)[0, :8] = torch.tensor([-1, 0x7FFFFFFF, -0x80000000, -0x7FFF8000, 0, -1, -1, -1])
    x[1].view(torch.int32)[0, 2:6] = torch.tensor([-0x80000000, -0x7FFF8000, 0, -1])
    residual = torch.randn(tokens, width, generator=rng, device="cpu").to(BF16)
    gain = torch.randn(width, generator=rng, device="cpu").to(BF16)
    residuals = [residual.clone() for _ in range(ranks)]
    sums = emulated.call("sum", x)
    normed = emulated.call("add_norm", x, residuals, gain=gain, eps=EPS)
    alone = [
        emulated.call("add_norm", [one[i : i + 1] for one in x], [residual[i : i + 1].clone()] * 2, gain=gain, eps=EPS)
        for i in range(tokens)
    ]
    emulated.run(1)
    torch.testing.assert_close(sums[0], sum_of(x), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(sums[0].isnan(), sum_of(x).isnan())
    assert normed[0][0].isnan().all(), "of a token with a NaN"
    assert not normed[0][1:].isnan().any()
    for out in (normed[1], *(torch.cat([outs[rank] for outs in alone]) for rank in range(ranks))):
        assert torch.equal(out.view(torch.int16), normed[0].view(torch.int16))


@needs_compiler
def test_a_rank_that_makes_no_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks do not wait again until all ranks have cleared their buffers."""
    emulated = Emulated(3, 32, monkeypatch)
    x = [torch.ones(1, 256, dtype=BF16, device="cpu") for _ in range(3)]
    outs = []
    for emulated.queues.rank in (0, 2):
        outs += [emulated.buffers[emulated.queues.rank].sum(x[0]) for _ in range(3)]
    emulated.queues.run(0)
    assert [buffer.missing_rank() for buffer in emulated.buffers] == [1, None, 1]
    assert all(out.isnan().all() for out in outs)
    for buffer in emulated.buffers:
        buffer.clear()
    outs = emulated.call("sum", x)
    emulated.run(0)
    assert all((out == 3).all() for out in outs)


@needs_compiler
def test_abort_ends_a_call_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = Emulated(2, 32, monkeypatch)
    emulated.queues.rank, first = 0, emulated.buffers[0]
    first.wait_at_most(600)
    outs = [first.sum(torch.ones(1, 256, dtype=BF16, device="cpu")) for _ in range(2)]
    first.abort(1)
    assert int(first.state[2]) == 0, "the host does not write the memory of the GPU"
    emulated.queues.run(0)
    assert int(first.state[2]) == 2
    assert first.missing_rank() == 1
    assert all(out.isnan().all() for out in outs)
    first.clear()
    assert first.missing_rank() is None


@needs_compiler
def test_operators_of_a_group_use_its_symmetric_buffer(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, tokens, width, depth = 3, 3, 256, 64
    emulated = Emulated(ranks, tokens * width // 8, monkeypatch)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device="cpu").to(BF16)

    def kept_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        partials.append(linear(x, weight))
        return partials[-1]

    partials: list[torch.Tensor] = []
    monkeypatch.setattr(operators, "linear", kept_linear)
    gain, bias, residual = normal(width), normal(width), normal(tokens, width)
    residuals, outs, sums = [residual.clone() for _ in range(ranks)], [], []
    for rank, buffer in enumerate(emulated.buffers):
        emulated.queues.rank = rank
        monkeypatch.setitem(all_reduce.symmetric_buffers, "emulated", buffer)
        group, x, weight = SimpleNamespace(group_name="emulated"), normal(tokens, depth), normal(width, depth)
        outs.append(linear_add(x, weight, residuals[rank], gain, EPS, bias=bias, group=group))
        sums.append(collectives.all_reduce(partials[rank], group))
    emulated.run(0)
    want = add_rms_norm(residual, sum_of(partials) + bias, gain, EPS)
    for rank in range(ranks):
        assert torch.equal(residuals[rank], residual)
        assert torch.equal(sums[rank], sum_of(partials))
        torch.testing.assert_close(outs[rank].x, want, rtol=2**-7, atol=2**-8)


def test_tensors_that_do_not_fit() -> None:
    buffer = SymmetricBuffer.of_words(empty_words(2, 64), [0, 0], 0)
    fitting = torch.zeros(2, 256, dtype=BF16, device="cpu")
    assert buffer.fits(fitting, fitting.half())
    wide = torch.zeros(1, MAX_WIDTH + 8, dtype=BF16, device="cpu")
    assert not SymmetricBuffer.of_words(empty_words(2, 2048), [0, 0], 0).fits(wide)
    assert buffer.fits(fitting.repeat(2, 1))
    for other in (fitting.float(), fitting[:0], fitting.repeat(1, 3), fitting[:, :252], fitting[:, ::2]):
        assert not buffer.fits(fitting, other)


@pytest.mark.parametrize(
    ("used", "access", "native", "able"),
    [
        ("abc", "abc", True, True),
        ("abc", "abc", False, False),
        ("abc", "ab", True, False),
        ("abx", "abcx", True, False),
        ("abb", "abc", True, False),
    ],
    ids=["able", "old_gpu", "no_access", "not_visible", "shared_gpu"],
)
def test_which_ranks_can_share(
    used: str, access: str, native: bool, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks use the GPUs `used`. This rank uses GPU b, and sees a, b and c."""
    answers: list[object] = []

    def all_gather_object(every: list[object], value: object, group: object) -> None:
        every[:] = list(used) if isinstance(value, str) else [value] * len(used)
        answers.append(value)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="abc"[index]))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: "abc"[other] in access)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(all_reduce, "runs_native", lambda device: native)
    group = SimpleNamespace(size=lambda: len(used))
    assert all_reduce.can_share(group, torch.device("cuda", 1)) is able
    assert answers == ["b", able]


@pytest.mark.parametrize("name", native_variants())
def test_variants_compile_within_their_bounds(name: str) -> None:
    """A block fits a multiprocessor, and accesses no memory before it waits for earlier kernels."""
    variant = native_variants()[name]
    registers, _ = compiled_within(variant, 72 if name == "8_ranks_8192_wide" else 0)
    assert_fits(variant, 1, registers)
    assert not accesses_before_the_wait(variant)


REPLAYS, CALLS, TOKENS, WIDTH = 10_000, 16, 64, 4096


def check_on_gpu(rank: int, ranks: int, folder: str) -> None:
    """Compare eager calls, and replays of captured calls while one rank is delayed, with sums of the same numbers."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    buffer = SymmetricBuffer.allocate(group, device)
    assert buffer is not None, "the GPUs cannot run the kernel or access each other's memory"
    rng = torch.Generator(device).manual_seed(0)  # all ranks draw the numbers of all ranks

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device=device).to(BF16)

    gain, bias = normal(WIDTH), normal(WIDTH)
    for tokens in (1, 3, TOKENS, 600):  # 600 take three launches
        x, residual = normal(ranks, tokens, WIDTH), normal(tokens, WIDTH)
        want_residual = residual.clone()
        want = add_rms_norm(want_residual, sum_of(list(x)) + bias, gain, EPS)
        out = buffer.add_norm(x[rank], residual, gain, EPS, bias)
        assert torch.equal(residual, want_residual)
        torch.testing.assert_close(out, want, rtol=2**-6, atol=2**-8)
        assert torch.equal(buffer.sum(x[rank]), sum_of(list(x)))
        records = x.view(torch.int32).flatten(1)[:, : 2 * tokens].reshape(ranks, tokens, 2)
        assert torch.equal(buffer.gather(records[rank].contiguous()), records)
    x = normal(2, CALLS, ranks, TOKENS, WIDTH)  # of two mixes
    own = x[0, :, rank].clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outs = [buffer.sum(own[call, : 1 + call * 4]) for call in range(CALLS)]
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        wanted = [torch.cat([sum_of(list(x[mix, call, :, : 1 + call * 4])) for call in range(CALLS)]) for mix in (0, 1)]
        delays = torch.Generator().manual_seed(rank)
        for turn in range(REPLAYS):
            own.copy_(x[turn % 2, :, rank])
            torch.cuda._sleep(int(torch.randint(200_000, (), generator=delays)) if turn % ranks == rank else 0)
            graph.replay()
            wrong += (torch.cat(outs) != wanted[turn % 2]).any()
        assert int(wrong) == 0
    assert buffer.missing_rank() is None
    buffer.reset(group)
    assert torch.equal(buffer.sum(x[0, 0, rank]), sum_of(list(x[0, 0])))
    for seconds in (0.5, 600.0):
        if rank == 0:  # the other ranks make no call
            buffer.wait_at_most(seconds)
            out = buffer.sum(x[0, 0, 0])
            if seconds == 600:
                buffer.abort(ranks - 1)
            assert buffer.missing_rank() == ranks - 1
            assert out.isnan().all()
        buffer.reset(group)
        assert torch.equal(buffer.sum(x[0, 0, rank]), sum_of(list(x[0, 0])))
    torch.cuda.synchronize()
    dist.barrier(group)
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_gpus(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    torch.multiprocessing.spawn(check_on_gpu, (ranks, str(tmp_path)), nprocs=ranks)
