"""The CUDA kernels of sampling on a CPU, by their own source, and the Triton kernels on the devices that have both.

Each test of a `kernel_device` runs again. On a CPU the first pass is interpreted, and the kernels of kernels/native are
compiled as C++. On CUDA the Triton kernels run, which serve older devices: elsewhere these tests take the others there.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from graphrt.kernels.ops import sampling, sampling_native
from graphrt.kernels.ops.sampling import sample
from graphrt.kernels.ops.sampling_native import native_variants
from graphrt.kernels.ops.sampling_state import Penalties
from tests.kernels import (
    test_edges_sampling,
    test_sampling,
    test_sampling_distribution,
    test_sampling_penalties,
    test_sampling_truncation,
)  # fmt: skip
from tests.support import native_emulation
from tests.support.native_usage import assert_fits, compiled_within
from tests.support.sampling_cases import (
    F32,
    I32,
    arguments,
    biases,
    penalties_with,
    reference_ops,
    token_mask,
    truncation,
)  # fmt: skip

for module in (
    test_edges_sampling, test_sampling, test_sampling_distribution, test_sampling_penalties, test_sampling_truncation
):  # fmt: skip
    for name, test in vars(module).items():
        if name.startswith("test_") and "kernel_device" in inspect.signature(test).parameters:
            globals()[name] = test  # takes the fixture of this module

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(native_emulation.COMPILER is None, reason="needs the C++ compiler g++")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A CPU on which `sample` takes the CUDA kernels, in every run of a test in the same orders."""
    from graphrt.kernels.library import interpreted
    from tests.support.interpreter import shuffled_programs

    monkeypatch.setattr(sampling, "serves", lambda device: True)
    monkeypatch.setattr(sampling_native, "launch", native_emulation.emulated_launch)
    monkeypatch.setattr(native_emulation, "launches", itertools.count())
    with interpreted(), shuffled_programs():
        yield CPU


@pytest.fixture(
    params=[
        pytest.param("cpu", id="cpu-emulation", marks=needs_compiler),
        pytest.param("cuda", id="cuda-triton", marks=pytest.mark.gpu),
    ]
)
def kernel_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cpu":
        return request.getfixturevalue("emulated")
    monkeypatch.setattr(sampling, "serves", lambda device: False)
    return torch.device("cuda")


@pytest.fixture(params=[pytest.param("cpu", marks=needs_compiler), pytest.param("cuda", marks=pytest.mark.gpu)])
def native_device(request: pytest.FixtureRequest) -> torch.device:
    """A device on which the CUDA kernels run."""
    return request.getfixturevalue("emulated") if request.param == "cpu" else torch.device("cuda")


@pytest.fixture
def resize(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Gives the kernels another size, by its name in `sampling_native`, until the test has ended."""

    def change(name: str, size: int) -> None:
        monkeypatch.setattr(sampling_native, name, size)
        sampling_native._variant.cache_clear()

    yield change
    sampling_native._variant.cache_clear()


BOUNDS = {
    "top_k": [40, 0, 3, 700, 0, 12],
    "top_p": [0.9, 0.7, 1.0, 1.0, 0.3, 0.8],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.01, 0],
}


def check_against_reference(
    device: torch.device, logits: torch.Tensor, bounds: dict[str, list[float]] = BOUNDS, **processed: object
) -> None:
    """What the kernels draw is what the reference draws; `processed`: a function of the device per argument."""
    rows = len(logits)
    bounds = {name: values[:rows] for name, values in bounds.items()}

    def draw(where: torch.device, values: torch.Tensor) -> list[int]:
        given = {name: make(where) for name, make in processed.items()}
        ids = torch.arange(rows, dtype=I32, device=where)
        return sample(
            *arguments(values, 1.1), req_indices=ids, truncation=truncation(rows, where, **bounds), **given
        ).tolist()  # fmt: skip

    result = draw(device, logits.to(device) if device.type == "cuda" else logits)
    with reference_ops():
        assert result == draw(CPU, logits)


def everything_changes(rows: int, vocab: int, rng: torch.Generator) -> dict[str, object]:
    """Penalties of most of the vocabulary, biases of seen and of unseen tokens, a mask for every second row."""
    prompts = [torch.randperm(vocab, generator=rng)[: vocab * 3 // 4].tolist() for _ in range(rows)]
    allowed = torch.rand(rows, vocab, generator=rng) < 0.7
    entries = [{t: float(t % 7) - 3 for t in range(r, vocab, 41)} for r in range(rows)]

    sequences = [(p[:-50], p[-50:]) for p in prompts]
    return {
        "penalties": lambda device: at_row_ids(sequences, vocab, device, 1.3, 0.4, 0.2),
        "bias": lambda device: biases(entries, list(range(rows)), rows, device),
        "token_mask": lambda device: token_mask(allowed, [r if r % 2 else -1 for r in range(rows)], device),
    }


@pytest.mark.parametrize("most", [4096, 100], ids=["listed", "too_many"])
@pytest.mark.parametrize("vocab", [3000, 2999], ids=["aligned", "odd"])
def test_changed_tokens(
    native_device: torch.device, rng: torch.Generator, resize: Callable[[str, int], None], vocab: int, most: int
) -> None:
    """More changed tokens than are listed are processed each time anew, by each step of each kernel."""
    resize("_CHANGED", most)
    logits = torch.randn(6, vocab, generator=rng)
    check_against_reference(native_device, logits, **everything_changes(6, vocab, rng))


PENALIZED = {
    "top_k": [40, 900, 3, 700, 300, 50],
    "top_p": [0.9, 1.0, 1.0, 0.6, 0.3, 0.99],
    "min_p": [0.0, 0.3, 0.2, 0.0, 0.01, 0.8],
}
SIGNS = {
    "lower": (1.3, 0.4, 0.2),
    "hardly lower": (1.0, 0.01, 0.0),
    "raise by repetition": (0.3, 0.4, 0.2),
    "raise by presence": (1.3, -3.0, 0.2),
    "raise by frequency": (1.3, 0.4, -2.0),
    "forbid": (3e38, 3e38, 3e38),
}


def penalties_of_best(logits: torch.Tensor, amounts: tuple[float, ...], device: torch.device) -> Penalties:
    """Penalties of the best tokens of each row, up to a thousand, and of others."""
    rows, vocab = logits.shape
    best = logits.float().argsort(1, descending=True)
    seen = [best[r, : 200 * r].tolist() + list(range(r, vocab, 7)) for r in range(rows)]
    sequences = [(tokens[::2], 3 * tokens[1::2] + [vocab - 1] * (r % 2)) for r, tokens in enumerate(seen)]
    return at_row_ids(sequences, vocab, device, *amounts)


def at_row_ids(
    sequences: list[tuple[list[int], list[int]]], vocab: int, device: torch.device, *amounts: float
) -> Penalties:
    """Penalties of sequences that are found at the row ids 0, 1, 2 and so on."""
    with reference_ops():  # other tests check the kernel that records tokens, which takes the interpreter long
        penalties, req_indices = penalties_with(sequences, vocab, device, *amounts)
    for tensor in (penalties.state.seen, penalties.state.counts):
        tensor[: len(sequences)] = tensor[req_indices.long()].clone()
    return penalties


@pytest.mark.parametrize(
    ("most", "dtype"),
    [(2048, torch.bfloat16), (512, F32), (64, torch.bfloat16)],
    ids=["lists", "some_passes", "passes"],
)
@pytest.mark.parametrize("signs", SIGNS)
def test_rows_with_penalties_only(
    native_device: torch.device, rng: torch.Generator, resize: Callable[[str, int], None], signs: str, most: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Penalties that lower tokens only, of which the best ones, and others: they are processed when they are listed."""
    resize("_LIST", most)
    rows, vocab = 6, sampling.SAMPLE_CHUNK + 333
    logits = torch.randn(rows, vocab, generator=rng).to(dtype)
    logits[:, -1] = 4.0
    penalties = partial(penalties_of_best, logits, SIGNS[signs])
    for bounds in (PENALIZED, {name: values[1:] + values[:1] for name, values in PENALIZED.items()}):
        check_against_reference(native_device, logits, bounds=bounds, penalties=penalties)


def test_infinity_among_the_lowest_logits(native_device: torch.device) -> None:
    """Their keys are almost all keys that there are: bins over them end where 32 bits do."""
    logits = -1e38 * torch.arange(1.0, 3.0, 1 / 32).repeat(3, 1)
    logits[:, 25] = torch.inf
    check_against_reference(native_device, logits, {"top_k": [5, 5, 0], "top_p": [0.5, 1.0, 0.9], "min_p": [0.0] * 3})


@pytest.mark.parametrize("vocab", [40, 700])
def test_penalties_leave_no_token(native_device: torch.device, vocab: int) -> None:
    """Rows of few tokens: what penalties make infinitely low is no token; where they leave none, a row gets none."""
    logits = torch.full((3, vocab), -1.0)
    logits[1, ::2] = -torch.inf

    def penalties(device: torch.device) -> Penalties:
        made = at_row_ids([([], list(range(vocab - (r == 0)))) for r in range(3)], vocab, device, 1.0, 3e38, 3e38)
        made.frequency[0] = 1.0
        return made

    bounds = {"top_k": [5, 5, 30], "top_p": [1.0, 0.9, 1.0], "min_p": [0.0, 0.0, 0.1]}
    check_against_reference(native_device, logits, bounds=bounds, penalties=penalties)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F32], ids=str)
@pytest.mark.parametrize("short", [False, True], ids=["lists", "passes"])
def test_rows_at_any_address(
    native_device: torch.device,
    rng: torch.Generator,
    resize: Callable[[str, int], None],
    dtype: torch.dtype,
    short: bool,
) -> None:
    """Rows of an odd vocabulary begin anywhere, and end within a piece: the same draws as with rows that do not."""
    if short:
        resize("_LIST", 64)
    vocab = 2 * sampling.SAMPLE_CHUNK + 333
    logits = torch.randn(6, vocab, generator=rng).to(dtype)
    logits[:, -1] = 3.0
    padded = torch.zeros(6, vocab + 11, dtype=dtype)[:, :vocab]
    padded.copy_(logits)
    for values in (logits, padded):
        check_against_reference(native_device, values)


DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "wide": lambda x: 30 * x,
    "narrow around 5": lambda x: 5 + 0.01 * x,
    "narrow": lambda x: 1e-30 * x,
    "subnormal": lambda x: 1e-41 * x,
    "huge": lambda x: (1e37 * x).clamp(-6e4, 6e4) if x.dtype == torch.float16 else 1e37 * x,
    "both zeros": lambda x: torch.where(x > 0, 0.0, -0.0),
    "zeros among others": lambda x: torch.where(x.abs() < 1.5, x * 0.0, x),
    "equal": lambda x: torch.full_like(x, -2.0),
    "two values": lambda x: (x > 0).to(x.dtype),
    "steps": lambda x: (3 * x).round() / 3,
    "one far above": lambda x: torch.where(torch.arange(x.shape[1]) == 5, 15.0, x),
    "infinite": lambda x: torch.where(torch.arange(x.shape[1]) < 3, torch.inf, x),
    "mostly forbidden": lambda x: torch.where(x.abs() < 1.6, -torch.inf, x),
}
"""Logits from normal ones."""


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_passes_over_rows_of_any_distribution(
    emulated: torch.device, rng: torch.Generator, resize: Callable[[str, int], None], name: str, dtype: torch.dtype
) -> None:
    resize("_LIST", 64)
    logits = DISTRIBUTIONS[name](torch.randn(6, sampling.SAMPLE_CHUNK + 333, generator=rng)).to(dtype)
    check_against_reference(emulated, logits)


@pytest.mark.parametrize("vocab", [151_936, 1 << 20])
def test_a_threshold_among_many_equal_logits(native_device: torch.device, vocab: int) -> None:
    """Top-p takes in the lowest and largest of three levels, for a fifty-thousandth of the mass. Units that are too
    coarse round all of its tokens alike."""
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))
    logits = torch.full((vocab,), -4.15)
    logits[order[: vocab * 3 // 100]], logits[order[-vocab * 15 // 10_000 :]] = -4.05, 0.0
    mass = logits.double().exp()
    top_p = float(mass[logits > -4.1].sum() / mass.sum()) + 2e-5
    drawn = sample(
        *arguments(logits.expand(4, vocab).contiguous().to(native_device), 1.0),
        truncation=truncation(4, native_device, top_k=[0] * 4, top_p=[top_p] * 4, min_p=[0.0] * 4),
    ).cpu()
    assert logits[drawn.long()].tolist() == [logits.min()] * 4


LENGTH = "if (length > LIST) return LIST + 1;\n"
INJECTED = {
    "a bound that is too high": ("? value_of(low) : floor;", "? value_of(low + (1u << 23)) : floor;"),
    "a list that ends early": (f"{LENGTH}  for", f"{LENGTH}  --length;\n  for"),
    "plain tokens that changed": ("late ? bits : bits & known[k];", "bits;"),
    "a changed token left out": ("mine += __popc(changed[i]);", "mine += __popc(changed[i] & ~16u);"),
    "another token's noise": ("philox(r, token / 128, 1)", "philox(r, token / 128 + 1, 1)"),
    "a bound on scores that is too low": ("(noise + 1e-3f)", "(noise - 1.0f)"),
    "sums of one warp": ("for (int w = 0; w < WARPS; ++w) x[n] += sums[n][w];", "x[n] += sums[n][0];"),
    "a tail that is not read": ("const int tail = r.vocab % PIECE, token", "const int tail = 0, token"),
    "no barrier after the bits": ("  __syncthreads();\n  // The tokens after", "  // The tokens after"),
    "a listed token as the model gave it": ("occurred[i] = ALL && listed & OCCURRED;", "occurred[i] = false;"),
    "penalties that raise tokens": ("&& lowers &&", "&&"),
    "the floor of the best plain token": ("if (r.late) low = max(low,", "if (false) low = max(low,"),
    "too few tokens above the floor": ("if (reaching >= kept.top_k ||", "if (true ||"),
}
INJECTED_IN_PASSES = {
    "a bin too high": ("(0xffffffffu, reached) - 1;", "(0xffffffffu, reached);"),
    "half of what is missing": ("missing * bins.units", "missing * bins.units * 0.5f"),
    "keys of the next bin": ("finite(value_of(key))) < bin", "finite(value_of(key))) <= bin"),
    "a mass that is not above": ("if (is_above && counts) sum += w;", "if (is_above && counts && w < 0.5f) sum += w;"),
    "a draw that is not checked": ("if (found.token >= NOWHERE || key_of", "if (true || key_of"),
    "tokens that might have won": ("enough - noise", "enough + noise"),
    "all tokens of a late row as plain ones": ("r.plain[word] = ~r.seen[word];", "r.plain[word] = 0xffffffffu;"),
    "a late row's best changed token": (
        "  for_changed(t, r, [&](int, float x) { largest = max(largest, key_of(x)); });",
        "",
    ),
    "a late row's best plain token": ("is_plain ? logit_at(r, token) : NEG_INF", "NEG_INF"),
}


@needs_compiler
@pytest.mark.parametrize("bug", INJECTED | INJECTED_IN_PASSES)
def test_injected_bugs_are_found(
    emulated: torch.device, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, resize: Callable[[str, int], None],
    bug: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(native_emulation, "injected", (INJECTED | INJECTED_IN_PASSES)[bug])
    if bug in INJECTED_IN_PASSES:
        resize("_LIST", 64)
    vocab = sampling.SAMPLE_CHUNK + 333

    def check() -> None:
        for _ in range(8):
            logits = torch.randn(6, vocab, generator=rng)
            logits[:2, -1] = 9.0
            check_against_reference(emulated, logits, **everything_changes(6, vocab, rng))
            check_against_reference(emulated, logits)
            for signs in SIGNS:
                penalties = partial(penalties_of_best, logits, SIGNS[signs])
                check_against_reference(emulated, logits, bounds=PENALIZED, penalties=penalties)

    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("name", native_variants())
def test_variants_compile_within_their_bounds(name: str) -> None:
    variant = native_variants()[name]
    registers, _ = compiled_within(variant, 600 if variant.entry == "sample_truncated" else 0)
    assert_fits(variant, 1 if variant.shared_bytes > 112 << 10 else dict(variant.macros)["BLOCKS_PER_SM"], registers)
