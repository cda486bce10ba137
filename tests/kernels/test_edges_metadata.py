"""The refresh with invalid inputs, operators with one wrong tensor at a time, and page lists at their limits."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.arguments import operands
from graphrt.kernels.metadata.buffers import ON_HOST, BufferKind, StaticBuffers
from graphrt.kernels.metadata.page_list import list_pages
from graphrt.kernels.metadata.read_inputs import as_declared
from graphrt.kernels.metadata.refresh import refresh
from graphrt.kernels.metadata.write_outputs import write_outputs
from graphrt.kernels.ops.sampling import LogitBias, TokenMask, Truncation, sample
from graphrt.kernels.ops.sampling_logprobs import token_logprobs
from graphrt.kernels.ops.sampling_state import Penalties, PenaltyState, record_tokens
from graphrt.kernels.types import FaultCode
from tests.support.refresh_rig import (
    ALSO,
    CHUNK,
    GOOD,
    MIXED,
    OUTPUTS,
    SCRATCH,
    SPEC,
    THIRD,
    Request,
    Rig,
    Sizes,
    expect,
    make_buffers,
    pack,
)
from tests.support.sampling_cases import arguments as sampled
from tests.support.sampling_cases import truncation

CPU = torch.device("cpu")
F = FaultCode
DECODE_BATCH = (GOOD, ALSO, THIRD)  # pages at 0, 2 and 3 of a list of 5
SPEC_BATCH = (Request(2, [1, 1, 2], 9, [1, 2, 3]), Request(0, [7, 8, 9], 3, [4]))
MIXED_BATCH = (GOOD, CHUNK, ALSO)  # tokens at 0, 1 and 6 of 7; pages at 0, 2 and 5 of 6
LARGEST, SMALLEST = 2**31 - 1, -(2**31)


def with_fields(words: list[int], *changes: tuple[int, int, int]) -> list[int]:
    """Return the inputs with some fields changed: the field, the position of the request, and the value."""
    words = list(words)
    for field, position, value in changes:
        words[layout.HEADER_SIZE + field * words[layout.HEADER_NUM_REQS] + position] = value
    return words


def check_served(
    rig: Rig, words: list[int], batch: Sequence[Request], faults: dict, starts: Sequence[int] = ()
) -> None:
    """Check one refresh against `expect`; `starts` are the first tokens of the requests, if the inputs change them."""
    rig.run(words)
    expected = expect(batch, rig.sizes, faults, 7)
    if starts:
        padded = [*starts, *[starts[-1]] * (rig.sizes.reqs + 1 - len(starts))]
        expected["query_start_loc"] = expected["prompt_start_loc"] = padded[: rig.sizes.reqs + 1]
    rig.check(expected)


SEQ_LEN, QUERY_START = layout.REQ_SEQ_LEN, layout.REQ_QUERY_START
START, COUNT = layout.REQ_PAGES + layout.PAGE_START, layout.REQ_PAGES + layout.PAGE_COUNT
SHARED = (GOOD, ALSO, replace(THIRD, pages=[5, 6]))
Changes = tuple[tuple[int, int, int], ...]
LISTS: list[tuple[Changes, Sequence[Request], dict[int, tuple[FaultCode, int]]]] = [
    # A page start outside the list, and a count below one, give no pages.
    *(
        (((START, at, value),), DECODE_BATCH, {at: (F.LENGTH_EXCEEDS_PAGES, DECODE_BATCH[at].seq_len)})
        for at in range(3)
        for value in (5, 6, 99, LARGEST, -1, SMALLEST)
    ),
    *((((COUNT, 1, count),), DECODE_BATCH, {1: (F.LENGTH_EXCEEDS_PAGES, 1)}) for count in (0, -1, SMALLEST)),
    # A count beyond the list is truncated: pages beyond the list are missing.
    *((((COUNT, 2, count),), DECODE_BATCH, {}) for count in (3, 6, LARGEST)),
    *(
        (((COUNT, 2, count), (SEQ_LEN, 2, 9)), DECODE_BATCH, {2: (F.LENGTH_EXCEEDS_PAGES, 9)})
        for count in (3, 6, LARGEST)
    ),
    (((START, 2, 4),), DECODE_BATCH, {2: (F.LENGTH_EXCEEDS_PAGES, 8)}),
    (((START, 2, 4), (SEQ_LEN, 2, 4)), (GOOD, ALSO, replace(THIRD, seq_len=4, pages=[12])), {}),
    # The list of another request: both write page 6, in two slots or in one.
    (((START, 2, 0),), SHARED, dict.fromkeys((0, 2), (F.DUPLICATE_PAGE, 6))),
    (((START, 2, 0), (SEQ_LEN, 2, GOOD.seq_len)), SHARED, dict.fromkeys((0, 2), (F.DUPLICATE_PAGE, 6))),
    (((COUNT, 0, 5),), (replace(GOOD, pages=[5, 6, 9, 11, 12]), ALSO, THIRD), {}),  # to spare
]


@pytest.mark.parametrize("case", LISTS, ids=lambda case: str(case[0]))
def test_page_lists_with_wrong_fields(op_device: torch.device, case: tuple) -> None:
    changes, batch, faults = case
    check_served(Rig(Sizes(), op_device), with_fields(pack(DECODE_BATCH, 7), *changes), batch, faults)


@pytest.mark.parametrize("first", [LARGEST, 1 << 30, 10, 9], ids=str)
def test_a_list_far_beyond_the_sequence_gives_no_pages(op_device: torch.device, first: int) -> None:
    """It also allocates no memory for the columns before it."""
    rig = Rig(Sizes(), op_device)
    words = with_fields(pack(DECODE_BATCH, 7), (layout.REQ_PAGES + layout.PAGE_FIRST, 2, first))
    tracemalloc.start()
    try:
        check_served(rig, words, DECODE_BATCH, {2: (F.LENGTH_EXCEEDS_PAGES, THIRD.seq_len)})
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


STARTS = [  # position, its wrong first token, the starts that follow, the faulty positions
    (0, 3, (0, 1, 6, 7), {0}),
    (0, -1, (0, 1, 6, 7), {0}),
    (1, -1, (0, 0, 6, 7), {0, 1}),
    (1, SMALLEST, (0, 0, 6, 7), {0, 1}),
    (1, 0, (0, 0, 6, 7), {0, 1}),
    (1, 2, (0, 2, 6, 7), {0, 1}),
    (2, 5, (0, 1, 5, 7), {1, 2}),
    (2, 1, (0, 1, 1, 7), {1, 2}),
    (2, 7, (0, 1, 7, 7), {1, 2}),
    (2, 8, (0, 1, 7, 7), {1, 2}),
    (2, LARGEST, (0, 1, 7, 7), {1, 2}),
]


@pytest.mark.parametrize(("position", "value", "starts", "faulty"), STARTS, ids=str)
def test_a_wrong_query_start_faults_only_the_requests_next_to_it(
    op_device: torch.device, position: int, value: int, starts: tuple[int, ...], faulty: set[int]
) -> None:
    words = with_fields(pack(MIXED_BATCH, 7), (QUERY_START, position, value))
    faults = {r: (F.BAD_LENGTH, MIXED_BATCH[r].seq_len) for r in faulty}
    check_served(Rig(MIXED, op_device), words, MIXED_BATCH, faults, starts)


@pytest.mark.parametrize("value", [-1, 7, 8, 9, LARGEST], ids=str)
def test_a_decode_graph_checks_query_start(op_device: torch.device, value: int) -> None:
    batch = (*SPEC_BATCH, Request(4, [5, 6, 7], 4, [5]))
    words = with_fields(pack(batch, 7), (QUERY_START, 1, value))
    check_served(Rig(SPEC, op_device), words, batch, {1: (F.BAD_LENGTH, 3)})


@pytest.mark.parametrize("tokens", [5, 4], ids=str)
def test_a_decode_request_with_missing_tokens_is_faulty(op_device: torch.device, tokens: int) -> None:
    """The header has fewer tokens than the requests."""
    words = pack(SPEC_BATCH, 7)
    words[layout.HEADER_NUM_TOKENS] = tokens
    tokens_at = layout.HEADER_SIZE + 2 * layout.req_fields(1)
    del words[tokens_at + tokens : tokens_at + 6]
    rig = Rig(SPEC, op_device)
    rig.run(words)
    assert rig.tensors.req_status.tolist() == [1, -2, -1, -1]
    assert rig.tensors.fault_code.tolist() == [0, int(F.BAD_LENGTH), 0, 0]
    assert rig.tensors.fault_value.tolist() == [0, 3, 0, 0]
    assert rig.tensors.step_counter.tolist() == [7]
    assert rig.tensors.input_ids.tolist()[:3] == [1, 1, 2]
    assert rig.tensors.slot_mapping[0].tolist()[:3] == [2 * 4 + 2, 2 * 4 + 3, 3 * 4]
    assert set(rig.tensors.slot_mapping[0].tolist()[3:]) == {-1}


INTERESTING = (SMALLEST, -1, 0, 2, 5, 7, LARGEST)


@pytest.mark.parametrize("batch", [DECODE_BATCH, MIXED_BATCH], ids=["decode", "mixed"])
@pytest.mark.parametrize("field", range(layout.req_fields(1)))
def test_kernel_and_reference_agree_on_every_wrong_field(
    kernel_device: torch.device, field: int, batch: Sequence[Request]
) -> None:
    """Requests with correct fields, which share nothing with the wrong one, get their usual results.

    Each value is at two positions, one in each batch.
    """
    sizes = Sizes() if batch is DECODE_BATCH else MIXED
    kernel, reference = Rig(sizes, kernel_device), Rig(sizes, CPU)
    plain = expect(batch, sizes, {}, 0)
    for step, value in enumerate(INTERESTING):  # step numbers must grow
        position = 1 + (step + (batch is MIXED_BATCH)) % 2
        if field == QUERY_START and not (value <= 6 if position == 1 else value >= 1):
            continue  # the tokens of two requests overlap: either may be written
        words = with_fields(pack(batch, step), (field, position, value))
        kernel.run(words)
        _run_reference(reference, words)
        for name in OUTPUTS:
            have, want = getattr(kernel.tensors, name).cpu(), getattr(reference.tensors, name)
            if have.is_floating_point():  # NaN compares by its bits
                have, want = have.view(torch.int32), want.view(torch.int32)
            assert torch.equal(have, want), (name, position, value)
        fallen = [r for r, status in enumerate(reference.tensors.req_status.tolist()) if status == -2]
        for other in set(range(3)) - {position, *fallen}:
            for name in ("req_indices", "seq_lens", "req_status", "temperatures", "seeds"):
                assert getattr(reference.tensors, name)[other].tolist() == plain[name][other]
            assert reference.tensors.block_table[0, other].tolist() == plain["block_table"][0][other]


def _run_reference(rig: Rig, words: list[int]) -> None:
    """Run the reference although `kernel_device` has switched CPU tensors to the interpreter."""
    from graphrt.kernels import library

    active, library._cpu_runs_triton = library._cpu_runs_triton, False
    try:
        rig.run(words)
    finally:
        library._cpu_runs_triton = active


@triton.jit
def _declared_kernel(words_ptr, floats_ptr, longs_ptr, ints_ptr):
    lanes = tl.arange(0, 4)
    words = tl.load(words_ptr + lanes)
    tl.store(floats_ptr + lanes, as_declared(words, floats_ptr))
    tl.store(longs_ptr + lanes, as_declared(words, longs_ptr))
    tl.store(ints_ptr + lanes, as_declared(words, ints_ptr))


def test_input_words_are_converted_to_the_buffer_dtype(kernel_device: torch.device) -> None:
    """float32 by its bits, int64 as unsigned, int32 unchanged."""
    words = torch.tensor([0, -1, 0x3FC00000, SMALLEST], dtype=torch.int32, device=kernel_device)
    floats, longs, ints = (
        torch.empty(4, dtype=d, device=kernel_device) for d in (torch.float32, torch.int64, torch.int32)
    )
    _declared_kernel[(1,)](words, floats, longs, ints)
    assert floats[[0, 2]].tolist() == [0.0, 1.5]
    assert longs.tolist() == [0, 2**32 - 1, 0x3FC00000, 2**31]
    assert ints.tolist() == words.tolist()


# -- one wrong tensor at a time


def tensors(sizes: Sizes = Sizes(), **changes: Callable[[torch.Tensor], torch.Tensor]) -> StaticBuffers:  # noqa: B008
    made = Rig(sizes, CPU).tensors
    return replace(made, **{name: change(getattr(made, name)) for name, change in changes.items()})


def run(made: StaticBuffers, **changes: int) -> None:
    refresh(made, **{"max_seq_len": 40, "vocab_size": 100, "query_len": 1, "seq_len_fill": 0} | changes)


def ints(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def write(tokens: torch.Tensor, **others: torch.Tensor) -> None:
    write_outputs(replace(make_buffers(CPU, 3, 4, ring=2), **others), tokens, vocab_size=8)


def record(**tensors: torch.Tensor) -> None:
    ones = torch.ones(2)
    record_tokens(**tensors, penalties=Penalties(ones, ones, ones, PenaltyState.allocate(2, 8, 9, CPU)))


def sample_options() -> dict[str, torch.Tensor]:
    state, bias, sets = PenaltyState.allocate(4, 40, 9, CPU), LogitBias.allocate(4, 3, CPU), truncation(3, CPU)
    arguments = zip(("logits", "temperatures", "seeds", "seq_lens"), sampled(torch.zeros(3, 40), 0.0), strict=True)
    return {
        **dict(arguments), "req_indices": ints(3), "repetition": torch.ones(3), "presence": torch.ones(3),
        "frequency": torch.ones(3), "state.seen": state.seen, "state.counts": state.counts, "bias.tokens": bias.tokens,
        "bias.values": bias.values, "bias.lists": bias.lists, "mask_words": ints(4).view(2, 2), "mask_index": ints(3),
        "top_k": sets.top_k, "top_p": sets.top_p, "min_p": sets.min_p,
    }  # fmt: skip


def sample_with_options(**t: torch.Tensor) -> None:
    state = replace(PenaltyState.allocate(4, 40, 9, CPU), seen=t["state.seen"], counts=t["state.counts"])
    sample(
        t["logits"], t["temperatures"], t["seeds"], t["seq_lens"], req_indices=t["req_indices"],
        truncation=Truncation(t["top_k"], t["top_p"], t["min_p"]),
        penalties=Penalties(t["repetition"], t["presence"], t["frequency"], state),
        bias=LogitBias(t["bias.tokens"], t["bias.values"], t["bias.lists"]),
        token_mask=TokenMask(t["mask_words"], t["mask_index"]),
    )  # fmt: skip


def buffers_of(operator: str, buffers: StaticBuffers) -> dict[str, torch.Tensor]:
    return {name: getattr(buffers, name) for name in operands(operator)}


OPERATORS: dict[str, tuple[Callable[..., object], Callable[[], dict[str, torch.Tensor]], str, tuple[str, ...]]] = {
    # The operator, its arguments, the one that defines the expected device, and those of one length only.
    "refresh": (
        lambda **changed: run(replace(tensors(), **changed)), lambda: buffers_of("refresh", tensors()), "req_indices",
        ("fault_code", "fault_value", "seq_lens", "logits_indices", "sample_lens", "drafts_left",
         "req_status", "temperatures", "seeds",
         "query_start_loc", "positions", "slot_mapping", "block_table"),
    ),
    "write_outputs": (
        write, lambda: {"tokens": ints(3), **buffers_of("write_outputs", make_buffers(CPU, 3, 4, ring=2))},
        "req_indices",
        ("tokens", "sample_lens", "drafts_left", "fault_code", "fault_value", "step_counter", "token_ring",
         "fault_code_ring", "fault_value_ring", "draft_count_ring"),
    ),
    "sample": (
        sample_with_options, sample_options, "logits",
        ("temperatures", "seeds", "seq_lens", "req_indices", "repetition", "presence", "frequency", "state.seen",
         "bias.tokens", "bias.values", "mask_index", "top_k", "top_p", "min_p"),
    ),
    "token_logprobs": (
        partial(token_logprobs, max_top=1),
        lambda: {"logits": torch.zeros(2, 8), "tokens": ints(2), "wanted": ints(2)}, "logits", ("tokens", "wanted"),
    ),
    "record_tokens": (
        record,
        lambda: {
            "tokens": torch.zeros(4, dtype=torch.int64), "query_start_loc": ints(3),
            "last": torch.zeros(2, dtype=torch.int64), "lens": ints(2), "req_indices": ints(2), "prompt_lens": ints(2),
        },
        "req_indices", ("query_start_loc", "last", "lens", "prompt_lens"),
    ),
    "list_pages": (
        list_pages, lambda: {"block_table": ints(6).view(2, 3), "indptr": ints(3), "indices": ints(6)}, "block_table",
        ("indptr",),
    ),
}  # fmt: skip
WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dtype": lambda t: t.double() if t.is_floating_point() else t.float(),
    "rank": lambda t: t.unsqueeze(0),
    "lower-rank": lambda t: t.new_zeros(t.shape[1:]),
    "device": lambda t: t.to("meta"),
    "stride": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "shorter": lambda t: t[:-1],
    "longer": lambda t: torch.cat([t, t[:1]]),
}


@pytest.mark.parametrize(("operator", "name"), [(op, name) for op, of in OPERATORS.items() for name in of[1]()])
def test_every_tensor_is_checked(operator: str, name: str) -> None:
    """A tensor of a wrong dtype, rank, device, stride or length raises an error that names it."""
    call, make, defines_device, sized = OPERATORS[operator]
    call(**make())
    good, spec = make()[name], StaticBuffers.specs().get(name)
    for what, change in WRONG.items():
        if what in ("shorter", "longer") and name not in sized:
            continue  # its length is free, or what the others are measured by
        if what == "stride" and good.shape[-1] <= 1:
            continue  # a single element has no stride
        if what == "device" and spec is not None and spec.kind in ON_HOST:
            continue
        with pytest.raises(ShapeError) as caught:
            call(**make() | {name: change(good)})
        named = "" if what == "device" and name == defines_device else f"{name}: expected"
        assert str(caught.value).startswith(named), what


def test_smallest_extents() -> None:
    """The smallest inputs, conflict buffers and tables work; one element less raises."""
    least = {
        "inputs": lambda t: t[: layout.inputs_size(1, 0, 0, 1)].zero_(),
        "last_writers": lambda t: t[: 8 + 1],
        "write_conflicts": lambda t: t[:, :4],
    }
    made = tensors(**least)
    run(made)
    assert made.fault_code.tolist() == [0] * 4
    assert made.step_counter.tolist() == [0]
    assert made.req_status.tolist() == [-1] * 4
    less = {
        "inputs": lambda t: t[:-1], "last_writers": lambda t: t[:-1], "write_conflicts": lambda t: t[:, :-1],
        "page_table": lambda t: t[:, :, :-1], "page_spans": lambda t: t[:, :-1],
    }  # fmt: skip
    for name, change in less.items():
        with pytest.raises(ShapeError, match=rf"^{name}: expected"):
            run(replace(made, **{name: change(getattr(made, name))}))
    with pytest.raises(ShapeError, match=r"input_ids: expected 4 requests x query_len 2 tokens, got 4"):
        run(tensors(), query_len=2)


def test_the_last_page_and_request_index_have_a_writer(op_device: torch.device) -> None:
    """Conflicts on the last page and the last request index are found; memory after the buffer is not written."""
    rig = Rig(Sizes(), op_device)
    guarded = torch.zeros(32 + 8 + 5, dtype=torch.int64, device=op_device)
    rig.tensors = replace(rig.tensors, last_writers=guarded[:-5])
    batch = (Request(7, [1], 3, [31]), Request(6, [1], 6, [30, 31]), Request(4, [1], 1, [1]), Request(5, [2], 1, [2]))
    page = (F.DUPLICATE_PAGE, 31)
    check_served(rig, pack(batch, 7), batch, {0: page, 1: page})
    twice = (batch[0], replace(batch[1], req_index=7, pages=[30, 29]), *batch[2:])
    rig.run(pack(twice, 8))
    rig.check(expect(twice, rig.sizes, {0: (F.DUPLICATE_REQUEST, 7), 1: (F.DUPLICATE_REQUEST, 7)}, 8))
    assert guarded[-5:].tolist() == [0] * 5


@pytest.mark.parametrize("max_pages", [3, 10])
def test_a_sequence_longer_than_its_table_is_faulty(op_device: torch.device, max_pages: int) -> None:
    """The columns of the table limit the length, whatever max_seq_len and the inputs allow."""
    sizes = Sizes(max_pages=max_pages, max_seq_len=60)
    last = Request(4, [1], 4 * max_pages, range(20, 20 + max_pages))
    longer = Request(5, [1], 4 * max_pages + 1, range(9, 10 + max_pages))
    check_served(Rig(sizes, op_device), pack((last,), 7), (last,), {})
    faults = {1: (F.LENGTH_EXCEEDS_PAGES, 4 * max_pages + 1)}
    check_served(Rig(sizes, op_device), pack((last, longer), 7), (last, longer), faults)


@pytest.mark.parametrize("reqs", [0, 1, 65536, 65537])
@pytest.mark.parametrize("tokens", [0, 1, 65536, 65537])
def test_the_smallest_and_the_largest_graph(reqs: int, tokens: int) -> None:
    """Beyond the limits of a writer id, a graph is refused."""
    made = tensors(Sizes(reqs=reqs, tokens=tokens, query_len=0, max_pages=1, max_seq_len=4))
    made.inputs.zero_()
    if not {reqs, tokens} <= {1, 65536}:
        with pytest.raises(ShapeError, match=rf"got {reqs} and {tokens}"):
            run(made, query_len=0, max_seq_len=4)
        return
    run(made, query_len=0, max_seq_len=4)
    assert made.query_start_loc.tolist() == [0] * (reqs + 1)
    assert set(made.slot_mapping[0].tolist()) == {-1}


def test_operands_follow_from_the_declarations() -> None:
    inputs = {"page_groups", "inputs", "last_token"}
    kept = {"last_writers", "write_conflicts", "page_table", "page_spans", "last_encoder_len"}
    assert set(operands("refresh")) - set(OUTPUTS) == inputs | kept | SCRATCH
    kinds = (BufferKind.DERIVED, BufferKind.CARRIED)
    derived = {
        name
        for name, spec in StaticBuffers.specs().items()
        if spec.kind in kinds and spec.writer in ("refresh", "unpack")
    }
    assert set(OUTPUTS) | SCRATCH | {"inputs"} == derived | {"step_counter"}


# -- page lists


def test_page_lists_inside_and_outside_their_buffer(op_device: torch.device) -> None:
    """With any indptr, writes outside the buffer are dropped, and all others are made."""
    table = torch.arange(1, 16, dtype=torch.int32, device=op_device).reshape(3, 5)
    for indptr, want in (
        ([0, 5, 6, 8], [1, 2, 3, 4, 5, 6, 11, 12, -7]),
        ([1, 2, 2, 8], [-7, 1, 11, 12, 13, 14, 15, -7, -7]),
        ([4, 8, 9, 12], [-7, -7, -7, -7, 1, 2, 3, 4, -7]),
        ([7, 9, 20, 21], [-7] * 7 + [1, -7]),
        ([8, 9, 10, 11], [-7] * 9),
        ([5, 3, 3, 4], [-7, -7, -7, 11, -7, -7, -7, -7, -7]),
    ):
        indices = torch.full((9,), -7, dtype=torch.int32, device=op_device)
        list_pages(table, torch.tensor(indptr, dtype=torch.int32, device=op_device), indices[:8])
        assert indices.tolist() == want, indptr
