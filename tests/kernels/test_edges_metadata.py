"""The refresh with invalid inputs, and with one wrong tensor at a time; page lists at their limits."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.arguments import operands
from graphrt.kernels.metadata.buffers import BufferKind, StaticBuffers
from graphrt.kernels.metadata.page_list import list_pages
from graphrt.kernels.metadata.read_inputs import as_declared
from graphrt.kernels.metadata.refresh import refresh
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
    pack,
)

CPU = torch.device("cpu")
F = FaultCode
DECODE_BATCH = (GOOD, ALSO, THIRD)  # pages at 0, 2 and 3 of a list of 5
MIXED_BATCH = (GOOD, CHUNK, ALSO)  # tokens at 0, 1 and 6 of 7; pages at 0, 2 and 5 of 6
LARGEST, SMALLEST = 2**31 - 1, -(2**31)


def with_field(words: list[int], field: int, position: int, value: int) -> list[int]:
    """Return the inputs with one field of one request changed."""
    count = words[layout.HEADER_NUM_REQS]
    at = layout.HEADER_SIZE + field * count + position
    return [*words[:at], value, *words[at + 1 :]]


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


@pytest.mark.parametrize("value", [5, 6, 99, LARGEST, -1, SMALLEST], ids=str)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_page_start_outside_the_list_gives_no_pages(op_device: torch.device, position: int, value: int) -> None:
    words = with_field(pack(DECODE_BATCH, 7), layout.REQ_PAGES + layout.PAGE_START, position, value)
    faults = {position: (F.LENGTH_EXCEEDS_PAGES, DECODE_BATCH[position].seq_len)}
    check_served(Rig(Sizes(), op_device), words, DECODE_BATCH, faults)


def test_a_page_list_starts_at_its_page_start(op_device: torch.device) -> None:
    """Requests may share pages that they only read. Pages beyond the list are missing."""
    words = pack(DECODE_BATCH, 7)
    shared = (GOOD, ALSO, replace(THIRD, pages=[5, 6]))
    page = (F.DUPLICATE_PAGE, 6)
    both_write = with_field(words, layout.REQ_PAGES + layout.PAGE_START, 2, 0)
    check_served(Rig(Sizes(), op_device), both_write, shared, {0: page, 2: page})
    same_slot = with_field(both_write, layout.REQ_SEQ_LEN, 2, GOOD.seq_len)
    check_served(Rig(Sizes(), op_device), same_slot, shared, {0: page, 2: page})
    one_reads = (GOOD, ALSO, replace(THIRD, seq_len=9, pages=[5, 6, 9]))
    check_served(
        Rig(Sizes(), op_device), pack(one_reads, 7), one_reads, {1: (F.DUPLICATE_PAGE, 9), 2: (F.DUPLICATE_PAGE, 9)}
    )
    one_left = with_field(words, layout.REQ_PAGES + layout.PAGE_START, 2, 4)
    check_served(Rig(Sizes(), op_device), one_left, DECODE_BATCH, {2: (F.LENGTH_EXCEEDS_PAGES, 8)})
    enough_left = with_field(one_left, layout.REQ_SEQ_LEN, 2, 4)
    check_served(Rig(Sizes(), op_device), enough_left, (GOOD, ALSO, replace(THIRD, seq_len=4, pages=[12])), {})


@pytest.mark.parametrize("first", [LARGEST, 1 << 30, 10, 9], ids=str)
def test_a_list_far_beyond_the_sequence_gives_no_pages(op_device: torch.device, first: int) -> None:
    """It also allocates no memory for the columns before it."""
    rig, words = (
        Rig(Sizes(), op_device),
        with_field(pack(DECODE_BATCH, 7), layout.REQ_PAGES + layout.PAGE_FIRST, 2, first),
    )
    tracemalloc.start()
    try:
        check_served(rig, words, DECODE_BATCH, {2: (F.LENGTH_EXCEEDS_PAGES, THIRD.seq_len)})
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("count", [3, 6, LARGEST], ids=str)
def test_a_page_count_beyond_the_list_is_truncated(op_device: torch.device, count: int) -> None:
    words = with_field(pack(DECODE_BATCH, 7), layout.REQ_PAGES + layout.PAGE_COUNT, 2, count)
    check_served(Rig(Sizes(), op_device), words, DECODE_BATCH, {})
    longer = with_field(words, layout.REQ_SEQ_LEN, 2, 9)
    check_served(Rig(Sizes(), op_device), longer, DECODE_BATCH, {2: (F.LENGTH_EXCEEDS_PAGES, 9)})


@pytest.mark.parametrize("count", [0, -1, SMALLEST], ids=str)
def test_a_page_count_below_one_gives_no_pages(op_device: torch.device, count: int) -> None:
    words = with_field(pack(DECODE_BATCH, 7), layout.REQ_PAGES + layout.PAGE_COUNT, 1, count)
    check_served(Rig(Sizes(), op_device), words, DECODE_BATCH, {1: (F.LENGTH_EXCEEDS_PAGES, 1)})


def test_a_list_that_covers_other_requests_checks_their_pages(op_device: torch.device) -> None:
    """Pages of the following requests are spare pages of this one; a bad one among them is a fault."""
    words = with_field(pack(DECODE_BATCH, 7), layout.REQ_PAGES + layout.PAGE_COUNT, 0, 5)
    batch = (replace(GOOD, pages=[5, 6, 9, 11, 12]), ALSO, THIRD)
    check_served(Rig(Sizes(), op_device), words, batch, {})
    null = pack((GOOD, ALSO, replace(THIRD, pages=[11, 0])), 7)
    faults = {0: (F.PAGE_OUT_OF_RANGE, 0), 2: (F.PAGE_OUT_OF_RANGE, 0)}
    check_served(Rig(Sizes(), op_device), with_field(null, layout.REQ_PAGES + layout.PAGE_COUNT, 0, 5), batch, faults)


BAD = {position: (F.BAD_LENGTH, MIXED_BATCH[position].seq_len) for position in range(3)}
STARTS = {  # position, its wrong first token, the starts that follow, the faulty positions
    "first-request-late": (0, 3, (0, 1, 6, 7), {0}),
    "first-request-negative": (0, -1, (0, 1, 6, 7), {0}),
    "negative": (1, -1, (0, 0, 6, 7), {0, 1}),
    "most-negative": (1, SMALLEST, (0, 0, 6, 7), {0, 1}),
    "at-the-request-before": (1, 0, (0, 0, 6, 7), {0, 1}),
    "one-late": (1, 2, (0, 2, 6, 7), {0, 1}),
    "in-the-request-before": (2, 5, (0, 1, 5, 7), {1, 2}),
    "back-to-the-request-before": (2, 1, (0, 1, 1, 7), {1, 2}),
    "at-the-end": (2, 7, (0, 1, 7, 7), {1, 2}),
    "beyond-the-end": (2, 8, (0, 1, 7, 7), {1, 2}),
    "largest": (2, LARGEST, (0, 1, 7, 7), {1, 2}),
}


@pytest.mark.parametrize("case", STARTS)
def test_a_wrong_query_start_faults_only_the_requests_next_to_it(op_device: torch.device, case: str) -> None:
    position, value, starts, fallen = STARTS[case]
    words = with_field(pack(MIXED_BATCH, 7), layout.REQ_QUERY_START, position, value)
    check_served(Rig(MIXED, op_device), words, MIXED_BATCH, {r: BAD[r] for r in fallen}, starts)


@pytest.mark.parametrize("value", [-1, 1, 2, 4, LARGEST], ids=str)
def test_a_decode_graph_checks_query_start(op_device: torch.device, value: int) -> None:
    batch = (Request(2, [1, 1, 2], 9, [1, 2, 3]), Request(0, [7, 8, 9], 3, [4]), Request(4, [5, 6, 7], 4, [5]))
    words = with_field(pack(batch, 7), layout.REQ_QUERY_START, 1, value)
    check_served(Rig(SPEC, op_device), words, batch, {1: (F.BAD_LENGTH, 3)})


@pytest.mark.parametrize("tokens", [5, 4], ids=str)
def test_a_decode_request_with_missing_tokens_is_faulty(op_device: torch.device, tokens: int) -> None:
    """The header has fewer tokens than the requests."""
    batch = (Request(2, [1, 1, 2], 9, [1, 2, 3]), Request(0, [7, 8, 9], 3, [4]))
    words = pack(batch, 7)
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
    """Requests with correct fields, which share nothing with the wrong one, get their usual results."""
    sizes = Sizes() if batch is DECODE_BATCH else MIXED
    kernel, reference = Rig(sizes, kernel_device), Rig(sizes, CPU)
    plain = expect(batch, sizes, {}, 0)
    for step, (position, value) in enumerate(itertools.product((1, 2), INTERESTING)):  # step numbers must grow
        if field == layout.REQ_QUERY_START and not (value <= 6 if position == 1 else value >= 1):
            continue  # the tokens of two requests overlap: either may be written
        words = with_field(pack(batch, step), field, position, value)
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


def run(made: StaticBuffers, sizes: Sizes = Sizes(), **changes: int) -> None:  # noqa: B008
    s = sizes
    constants = {
        "max_seq_len": s.max_seq_len, "vocab_size": s.vocab_size, "query_len": s.query_len,
        "seq_len_fill": s.seq_len_fill,
    }  # fmt: skip
    refresh(made, **constants | changes)


@pytest.mark.parametrize("name", operands("refresh"))
def test_every_tensor_is_checked(name: str) -> None:
    """A wrong dtype, rank, device or stride of one tensor raises an error that names it."""
    good = getattr(tensors(), name)
    other = torch.int32 if good.dtype != torch.int32 else torch.int64
    wrong = {
        "dtype": lambda t: t.to(other),
        "rank": lambda t: t.unsqueeze(0),
        "lower-rank": lambda t: t[0],
        "device": lambda t: t.to("meta"),
        "stride": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    }
    if good.shape[-1] == 1:
        del wrong["stride"]  # a single element has no stride
    for what, change in wrong.items():
        with pytest.raises(ShapeError) as caught:
            run(tensors(**{name: change}))
        # req_indices defines the expected device.
        first = operands("refresh")[0] if (name, what) == ("req_indices", "device") else name
        assert str(caught.value).startswith(f"{first}: expected"), what


PER_ROW = ("fault_code", "fault_value", "seq_lens", "logits_indices", "req_status", "temperatures", "seeds")


@pytest.mark.parametrize("name", [*PER_ROW, "query_start_loc", "positions", "slot_mapping", "block_table"])
def test_every_extent_is_exact(name: str) -> None:
    for change in (lambda t: t[1:], lambda t: torch.cat([t, t[:1]])):
        with pytest.raises(ShapeError, match=rf"^{name}: expected shape"):
            run(tensors(**{name: change}))


def test_smallest_extents() -> None:
    """The smallest inputs, conflict buffers and tables work; one element less raises."""
    sizes = Sizes()
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
        run(tensors(), sizes, query_len=2)


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
    check_served(
        Rig(sizes, op_device),
        pack((last, longer), 7),
        (last, longer),
        {1: (F.LENGTH_EXCEEDS_PAGES, 4 * max_pages + 1)},
    )


@pytest.mark.parametrize(("reqs", "tokens"), [(1, 1), (1, 65536), (65536, 1), (65536, 65536)])
def test_the_smallest_and_the_largest_graph(reqs: int, tokens: int) -> None:
    made = tensors(Sizes(reqs=reqs, tokens=tokens, query_len=0, max_pages=1, max_seq_len=4))
    made.inputs.zero_()
    run(made, query_len=0, max_seq_len=4)
    assert made.query_start_loc.tolist() == [0] * (reqs + 1)
    assert set(made.slot_mapping[0].tolist()) == {-1}


@pytest.mark.parametrize(("reqs", "tokens"), [(0, 1), (1, 0), (65537, 1), (1, 65537)])
def test_graphs_beyond_the_limits_of_a_writer_id_raise(reqs: int, tokens: int) -> None:
    made = tensors(Sizes(reqs=reqs, tokens=tokens, query_len=0, max_pages=1, max_seq_len=4))
    with pytest.raises(ShapeError, match=rf"got {reqs} and {tokens}"):
        run(made, query_len=0, max_seq_len=4)


def test_operands_follow_from_the_declarations() -> None:
    inputs = {"page_groups", "inputs", "last_token"}
    kept = {"last_writers", "write_conflicts", "page_table", "page_spans", "last_encoder_len"}
    assert set(operands("refresh")) - set(OUTPUTS) == inputs | kept | SCRATCH
    kinds = (BufferKind.DERIVED, BufferKind.CARRIED)
    derived = {name for name, spec in StaticBuffers.specs().items() if spec.kind in kinds}
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


@pytest.mark.parametrize("name", ["block_table", "indptr", "indices"])
def test_every_argument_of_a_page_list_is_checked(name: str) -> None:
    shapes = {"block_table": (2, 3), "indptr": (3,), "indices": (6,)}
    good = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    list_pages(**good)
    tensor = good[name]
    wrong = [tensor.long(), tensor[None], tensor.repeat_interleave(2, -1)[..., ::2]]
    wrong += [] if name == "block_table" else [tensor.to("meta")]  # the table defines the expected device
    wrong += [tensor[1:]] if name == "indptr" else []
    for bad in wrong:
        with pytest.raises(ShapeError, match=f"^{name}: expected"):
            list_pages(**good | {name: bad})
