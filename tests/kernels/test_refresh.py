"""The refresh, kernel and reference, against expected buffers computed in plain Python from the requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.refresh import refresh
from graphrt.kernels.types import FaultCode
from tests.support.refresh_rig import (
    ALSO,
    CHUNK,
    GOOD,
    LAST,
    MIXED,
    SPEC,
    THIRD,
    Case,
    Request,
    Rig,
    Sizes,
    expect,
    pack,
)

VALID = [
    Case("decode", (GOOD, ALSO, THIRD)),
    Case("decode_full", (GOOD, ALSO, THIRD, Request(1, [99], 40, range(20, 30)))),
    Case("decode_one_request", (ALSO,), Sizes(reqs=1, tokens=1)),
    Case("decode_no_requests", ()),
    Case("decode_fill_one", (GOOD, ALSO), Sizes(seq_len_fill=1)),
    Case("decode_null_page_31", (GOOD, Request(0, [1], 4, [0])), Sizes(null_page=31)),
    Case("decode_page_size_1", (Request(0, [1], 3, [4, 9, 2]),), Sizes(page_size=1, num_pages=33, max_seq_len=10)),
    Case("decode_page_boundaries", (Request(0, [1], 4, [4]), Request(1, [1], 5, [5, 6]), Request(2, [1], 8, [7, 8]))),
    Case("decode_pages_to_spare", (Request(0, [1], 3, [4, 5, 6]), Request(4, [1], 12, [7, 8, 9]))),
    Case("decode_shared_prefix", (Request(0, [1], 6, [4, 5]), Request(1, [1], 6, [4, 6]), Request(2, [1], 7, [4, 7]))),
    Case("speculative", (Request(2, [LAST, 1, 2], 9, [1, 2, 3]), Request(0, [7, 8, 9], 3, [4])), SPEC),
    Case("speculative_no_requests", (), SPEC),
    Case(
        "speculative_fewer_tokens",
        (Request(2, [LAST, 1], 9, [1, 2, 3], sample=2), ALSO, Request(6, [7, 8, 9], 40, range(20, 30), sample=3)),
        SPEC,
    ),
    Case("speculative_prompts", (Request(1, [7, 8], 2, [4], sample=0), Request(4, [5, 6, 7], 3, [9], sample=2)), SPEC),
    Case("mixed", (GOOD, CHUNK, ALSO), MIXED),
    Case("mixed_full", (CHUNK, Request(4, range(9), 40, range(20, 30))), replace(MIXED, reqs=2)),
    Case("mixed_one_request", (Request(4, range(10, 23), 13, [8, 4, 2, 6]),), replace(MIXED, tokens=16)),
    Case("mixed_no_requests", (), MIXED),
    Case("mixed_decodes_only", (GOOD, ALSO, THIRD), MIXED),
]

F = FaultCode
FAULTY = [
    Case("req_index_negative", (replace(GOOD, req_index=-1), ALSO), faults={0: (F.REQ_INDEX_OUT_OF_RANGE, -1)}),
    Case("req_index_too_large", (GOOD, replace(ALSO, req_index=8)), faults={1: (F.REQ_INDEX_OUT_OF_RANGE, 8)}),
    Case("no_tokens", (GOOD, replace(ALSO, tokens=[]), THIRD), MIXED, {1: (F.BAD_LENGTH, 1)}),
    Case("query_longer_than_sequence", (replace(CHUNK, seq_len=4), GOOD), MIXED, {0: (F.BAD_LENGTH, 4)}),
    Case("negative_length", (replace(GOOD, seq_len=-3),), faults={0: (F.BAD_LENGTH, -3)}),
    Case("too_long", (Request(0, [1], 41, range(1, 11)),), replace(Sizes(), max_pages=11), {0: (F.BAD_LENGTH, 41)}),
    Case(
        "other_query_len", (Request(0, [1, 2, 3], 5, [4, 5]), replace(GOOD, query_len=2)), SPEC, {1: (F.BAD_LENGTH, 7)}
    ),
    Case("too_many_tokens", (Request(0, [1, 2, 3, 4], 5, [4, 5]), GOOD), SPEC, {0: (F.BAD_LENGTH, 5)}),
    Case("tokens_out_of_inputs", (CHUNK, replace(GOOD, query_len=2)), MIXED, {1: (F.BAD_LENGTH, 7)}),
    Case("misplaced_tokens", (CHUNK, replace(GOOD, query_len=2**31 - 1)), MIXED, {1: (F.BAD_LENGTH, 7)}),
    Case("too_few_pages", (Request(0, [1], 9, [4, 5]), GOOD), faults={0: (F.LENGTH_EXCEEDS_PAGES, 9)}),
    Case("no_pages", (Request(0, [1], 1, []),), faults={0: (F.LENGTH_EXCEEDS_PAGES, 1)}),
    Case("pages_out_of_inputs", (Request(0, [1], 9, [4], page_count=99),), faults={0: (F.LENGTH_EXCEEDS_PAGES, 9)}),
    Case("negative_page_count", (Request(0, [1], 3, [4], page_count=-2),), faults={0: (F.LENGTH_EXCEEDS_PAGES, 3)}),
    Case("null_page", (GOOD, Request(1, [1], 7, [0, 4])), faults={1: (F.PAGE_OUT_OF_RANGE, 0)}),
    Case("page_negative", (Request(1, [1], 7, [4, -1]),), faults={0: (F.PAGE_OUT_OF_RANGE, -1)}),
    Case("page_too_large", (Request(1, [1], 7, [4, 32]),), faults={0: (F.PAGE_OUT_OF_RANGE, 32)}),
    Case("page_to_spare_is_bad", (Request(1, [1], 4, [4, 5, 1000]),), faults={0: (F.PAGE_OUT_OF_RANGE, 1000)}),
    Case("first_bad_page", (Request(1, [1], 12, [4, 33, -7]),), faults={0: (F.PAGE_OUT_OF_RANGE, 33)}),
    Case("token_negative", (Request(1, [-2], 4, [4]),), faults={0: (F.TOKEN_OUT_OF_RANGE, -2)}),
    Case("token_too_large", (GOOD, Request(1, [100], 4, [4])), faults={1: (F.TOKEN_OUT_OF_RANGE, 100)}),
    Case("no_last_token", (Request(3, [LAST], 4, [4]), GOOD), faults={0: (F.NO_LAST_TOKEN, 3)}),
    Case(
        "begins_with_a_fault",
        (Request(0, [100], 1, [4]), Request(9, [1], 1, [5])),
        faults={0: (F.TOKEN_OUT_OF_RANGE, 100), 1: (F.REQ_INDEX_OUT_OF_RANGE, 9)},
    ),
    Case("last_token_of_another_sequence", (GOOD, Request(0, [LAST], 1, [4])), faults={1: (F.NO_LAST_TOKEN, 0)}),
    Case("chunk_from_another_sequence", (GOOD, Request(0, [LAST, 1], 2, [4])), MIXED, {1: (F.NO_LAST_TOKEN, 0)}),
    Case("minus_one_is_a_token_like_others", (Request(1, [-1], 4, [4]),), faults={0: (F.TOKEN_OUT_OF_RANGE, -1)}),
    Case("last_token_too_large", (Request(7, [LAST], 4, [4]),), faults={0: (F.TOKEN_OUT_OF_RANGE, 777)}),
    Case(
        "last_token_in_second_place",
        (Request(1, [LAST, LAST, 200], 5, [4, 5]),),
        SPEC,
        {0: (F.TOKEN_OUT_OF_RANGE, LAST)},
    ),
    Case("first_bad_token", (Request(4, [5, 101, -9], 5, [4, 5]), CHUNK), MIXED, {0: (F.TOKEN_OUT_OF_RANGE, 101)}),
    Case(
        "several_requests",
        (GOOD, Request(1, [100], 4, [4]), Request(9, [1], 1, [8]), Request(4, [1], 9, [9])),
        faults={
            1: (F.TOKEN_OUT_OF_RANGE, 100),
            2: (F.REQ_INDEX_OUT_OF_RANGE, 9),
            3: (F.LENGTH_EXCEEDS_PAGES, 9),
        },
    ),
    *(
        Case(f"precedence_{code.name.lower()}", (GOOD, request), MIXED, {1: (code, value)})
        for code, value, request in (
            (F.REQ_INDEX_OUT_OF_RANGE, 20, Request(20, [200, 1], 41, [0])),
            (F.BAD_LENGTH, 41, Request(6, [200, 1], 41, [0])),
            (F.LENGTH_EXCEEDS_PAGES, 40, Request(6, [200, 1], 40, [0])),
            (F.PAGE_OUT_OF_RANGE, 0, Request(6, [200, 1], 3, [0])),
            (F.NO_LAST_TOKEN, 3, Request(3, [LAST, 200], 3, [3])),
            (F.TOKEN_OUT_OF_RANGE, 200, Request(6, [200, 1], 3, [3])),
        )
    ),
]


def conflicts() -> list[Case]:
    """Return cases of requests in conflict: all of them are faulty, in any batch order."""
    a, b, c = Request(0, [1], 6, [4, 5]), Request(1, [2], 6, [7, 5]), Request(2, [3], 2, [5])
    same_id = replace(b, req_index=0, pages=[7, 8])
    free = Request(4, [9], 6, [20, 21])
    page = (F.DUPLICATE_PAGE, 5)
    cases = [
        Case("request_twice", (a, free, same_id), faults={0: (F.DUPLICATE_REQUEST, 0), 2: (F.DUPLICATE_REQUEST, 0)}),
        Case("page_twice", (free, a, b), faults={1: page, 2: page}),
        Case("page_three_times", (a, b, free, c), faults={0: page, 1: page, 3: page}),
        Case(
            "request_before_page",
            (a, replace(b, req_index=0), free, c),
            faults={0: (F.DUPLICATE_REQUEST, 0), 1: (F.DUPLICATE_REQUEST, 0), 3: page},
        ),
        Case("invalid_requests_write_no_pages", (a, replace(b, tokens=[100])), faults={1: (F.TOKEN_OUT_OF_RANGE, 100)}),
        Case(  # requests may share pages that they only read
            "read_and_written",
            (GOOD, ALSO, replace(THIRD, seq_len=9, pages=[5, 6, 9])),
            faults={1: (F.DUPLICATE_PAGE, 9), 2: (F.DUPLICATE_PAGE, 9)},
        ),
        *(
            Case(
                f"invalid_requests_use_their_index_{at}", (a, free, bad), faults={0: (F.DUPLICATE_REQUEST, 0), 2: fault}
            )
            for at, (bad, fault) in enumerate(
                (
                    (Request(0, [100], 1, [9]), (F.TOKEN_OUT_OF_RANGE, 100)),
                    (Request(0, [1], 1, []), (F.LENGTH_EXCEEDS_PAGES, 1)),
                    (Request(0, [1], 41, [9]), (F.BAD_LENGTH, 41)),
                )
            )
        ),
        Case(
            "negative_index_is_no_conflict", (a, replace(a, req_index=-1)), faults={1: (F.REQ_INDEX_OUT_OF_RANGE, -1)}
        ),
        Case("same_page_in_one_request", (Request(4, range(8), 8, [5, 5]), CHUNK), MIXED, {0: (F.DUPLICATE_PAGE, 5)}),
        Case(
            "first_of_several_pages",
            (Request(0, range(6), 6, [4, 5]), Request(4, range(6), 6, [9, 5])),
            replace(MIXED, reqs=3),
            {0: (F.DUPLICATE_PAGE, 5), 1: (F.DUPLICATE_PAGE, 5)},
        ),
        Case(
            "one_request_against_two",
            (Request(0, range(4), 8, [4, 5]), Request(1, [1, 2], 2, [6]), Request(2, range(8), 8, [5, 6])),
            replace(MIXED, reqs=3),
            {0: (F.DUPLICATE_PAGE, 5), 1: (F.DUPLICATE_PAGE, 6), 2: (F.DUPLICATE_PAGE, 5)},
        ),
    ]
    for case in tuple(cases):
        n = len(case.requests)
        faults = {n - 1 - request: fault for request, fault in case.faults.items()}
        cases.append(replace(case, id=f"{case.id}_reversed", requests=case.requests[::-1], faults=faults))
    return cases


LONG = Sizes(
    reqs=3, tokens=2304, query_len=0, page_size=1, num_pages=6000, max_seq_len=2500, max_pages=2500, vocab_size=9000
)
LONG_CASES = [
    Case("long_prompt", (Request(0, range(2050), 2200, range(3000, 5200)), Request(1, [LAST], 3, [9, 8, 7])), LONG),
    Case(
        "long_bad_page",
        (Request(0, [1], 2200, (*range(1, 2150), 0, *range(2150, 2200))), Request(1, [LAST], 3, [5009, 5008, 5007])),
        LONG,
        {0: (F.PAGE_OUT_OF_RANGE, 0)},
    ),
    Case(
        "long_bad_token",
        (Request(0, (*range(2000), 9000), 2200, range(3000, 5200)), Request(1, [LAST], 3, [9, 8, 7])),
        LONG,
        {0: (F.TOKEN_OUT_OF_RANGE, 9000)},
    ),
    Case(
        "long_duplicate",
        (Request(0, range(1500), 1500, range(3000, 4500)), Request(1, [5], 1, [4400])),
        LONG,
        {0: (F.DUPLICATE_PAGE, 4400), 1: (F.DUPLICATE_PAGE, 4400)},
    ),
]

PARTS = replace(MIXED, decode_len=1)
PARTS_OF_TWO = replace(MIXED, decode_len=2)


def reordered() -> list[Case]:
    """Return cases with decode requests first: every mixed case, and alternating decode and prefill requests."""
    mixed = (*VALID, *FAULTY, *conflicts(), *LONG_CASES)
    cases = [
        replace(case, id=f"parts_{case.id}", sizes=replace(case.sizes, decode_len=1))
        for case in mixed
        if case.sizes.query_len == 0 and case.id not in ("tokens_out_of_inputs", "misplaced_tokens")
    ]
    pair = Request(6, [8, 9], 4, [21])
    in_turn = (CHUNK, GOOD, pair, ALSO)
    return [
        *cases,
        Case("parts_in_turn", in_turn, PARTS),
        Case("parts_in_turn_back", in_turn[::-1], PARTS),
        Case("parts_of_two_tokens", in_turn, PARTS_OF_TWO),
        Case("parts_prompts_only", (CHUNK, pair), PARTS),
        Case("parts_pad_requests", (pair, GOOD), PARTS),
        Case(
            "parts_with_faults",
            (CHUNK, replace(GOOD, tokens=[100]), replace(pair, pages=[0]), ALSO),
            PARTS,
            {1: (F.TOKEN_OUT_OF_RANGE, 100), 2: (F.PAGE_OUT_OF_RANGE, 0)},
        ),
        Case(
            "parts_many_requests",
            tuple(Request(r % 8, [1] * (1 + (r % 3 == 0)), 2, [1 + r]) for r in range(8)),
            replace(PARTS, reqs=12, tokens=16),
        ),
        Case(
            "parts_more_requests_than_one_iteration",
            tuple(Request(100 + r, [1] * (1 + (r % 3 == 0)), 2, [1]) for r in range(150)),
            replace(PARTS, reqs=152, tokens=202),
            {r: (F.REQ_INDEX_OUT_OF_RANGE, 100 + r) for r in range(150)},
        ),
        Case(
            "parts_without_absent_requests",
            tuple(Request(r, [1] * (1 + r % 2), 2, [1 + r]) for r in range(3)),
            replace(PARTS, reqs=3, tokens=5),
        ),
    ]


CASES = [*VALID, *FAULTY, *conflicts(), *LONG_CASES, *reordered()]
by_id = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@by_id
def test_every_buffer_of_a_step(op_device: torch.device, case: Case) -> None:
    Rig(case.sizes, op_device).step(case.requests, case.faults, 11)


ABOUT_LISTS = {  # cases of page lists only: a table has as many columns as a request can need
    "too_few_pages", "no_pages", "pages_out_of_inputs", "negative_page_count", "page_to_spare_is_bad",
    "several_requests", "precedence_length_exceeds_pages",
}  # fmt: skip
by_table = pytest.mark.parametrize(
    "case",
    [c for c in (*VALID, *FAULTY, *reordered()) if not any(name in c.id for name in ABOUT_LISTS)],
    ids=lambda case: case.id,
)


@by_table
def test_tables_that_the_caller_owns(op_device: torch.device, case: Case) -> None:
    Rig(case.sizes, op_device, keeps_tables=True).step_with_tables(case.requests, case.faults, 11)


def test_tables_that_the_caller_owns_may_change(op_device: torch.device) -> None:
    """The next step sees new pages of a table, also in the middle of a sequence; a shared written page is a fault."""
    rig = Rig(Sizes(), op_device, keeps_tables=True)
    rig.step_with_tables((Request(0, [1], 6, [4, 5]), Request(1, [2], 7, [8, 9])), step=3)
    rig.step_with_tables((Request(0, [1], 9, [4, 6, 7]), Request(1, [2], 8, [8, 10])), step=4)
    fault = (F.DUPLICATE_PAGE, 6)
    rig.step_with_tables((Request(0, [1], 8, [4, 6]), Request(1, [2], 8, [8, 6])), {0: fault, 1: fault}, step=5)
    rig.step_with_tables((Request(1, [LAST], 8, [8, 6]),), step=6)


def test_shrinking_batches(op_device: torch.device) -> None:
    """Requests and writer ids of earlier steps do not affect later steps."""
    rig = Rig(Sizes(), op_device)
    requests = (GOOD, ALSO, THIRD, Request(1, [4], 40, range(20, 30)))
    for step, count in enumerate((4, 3, 1, 0, 4, 4)):
        rig.step(requests[:count], step=step)
    rig.step(requests[::-1], step=6)
    rig = Rig(PARTS, op_device)  # requests change their positions from step to step
    for step, in_turn in enumerate(((CHUNK, GOOD), (GOOD, CHUNK, ALSO), (ALSO,), (CHUNK, ALSO, GOOD), ())):
        rig.step(in_turn, step=step)


def test_conflicts_end_with_their_step(op_device: torch.device) -> None:
    rig = Rig(Sizes(), op_device)
    a, b = Request(0, [1], 6, [4, 5]), Request(1, [2], 6, [7, 5])
    fault = (F.DUPLICATE_PAGE, 5)
    rig.step((a, b), {0: fault, 1: fault}, step=3)
    rig.step((a, replace(b, pages=[7, 8])), step=4)
    rig.step((b,), step=5)
    rig.step((b, a), {0: fault, 1: fault}, step=6)


def test_same_inputs_twice(op_device: torch.device) -> None:
    """A graph that runs again with the same inputs finds only its own writer ids, which are no conflicts."""
    rig = Rig(MIXED, op_device)
    for _ in range(2):
        rig.step((GOOD, CHUNK, ALSO), step=5)
    fault = (F.DUPLICATE_PAGE, 6)
    for _ in range(2):
        rig.step((GOOD, replace(GOOD, req_index=6)), {0: fault, 1: fault}, step=6)


def test_large_step_numbers(op_device: torch.device) -> None:
    rig = Rig(Sizes(), op_device)
    for step in (0, 1, 2**32 - 1, 2**32, 2**40 + 5):
        rig.step((GOOD, Request(9, [1], 1, [8])), {1: (F.REQ_INDEX_OUT_OF_RANGE, 9)}, step=step)
    Rig(Sizes(), op_device).step((GOOD, ALSO), step=2**32 - 1)  # its tag differs from the initial value


def test_sizes_share_the_writers(op_device: torch.device) -> None:
    """Graphs of several sizes share writer ids and marks: their buffers are views of the same tensors."""
    large, small = Rig(Sizes(), op_device), Rig(Sizes(reqs=2, tokens=2), op_device)
    shared = {name: getattr(large.tensors, name) for name in ("last_writers", "write_conflicts")}
    small.tensors = replace(small.tensors, **shared)
    a, b = Request(6, [1], 6, [4, 5]), Request(1, [2], 6, [7, 5])
    fault = (F.DUPLICATE_PAGE, 5)
    large.step((GOOD, ALSO, a, b), {2: fault, 3: fault}, step=0)
    small.step((a, GOOD), step=1)
    small.step((a, b), {0: fault, 1: fault}, step=2)
    large.step((a, GOOD, ALSO), step=3)


def test_corrupt_headers(op_device: torch.device) -> None:
    """No header causes an access out of bounds; requests that fit are served."""
    rig = Rig(Sizes(reqs=2, tokens=2), op_device)
    words = pack((GOOD, ALSO, THIRD), 1)
    rig.run(words)  # one request too many
    rig.check(expect((GOOD, ALSO), rig.sizes, {}, 1))
    for word, value in (
        (layout.HEADER_NUM_REQS, 16),
        (layout.HEADER_NUM_REQS, 10**6),
        (layout.HEADER_NUM_REQS, 2**31 - 1),
        (layout.HEADER_NUM_REQS, -1),
        (layout.HEADER_NUM_TOKENS, 2**31 - 1),
        (layout.HEADER_NUM_TOKENS, -5),
        (layout.HEADER_NUM_PAGES, 2**31 - 1),
        (layout.HEADER_NUM_PAGES, -1),
    ):
        broken = list(words)
        broken[word] = value
        rig.run(broken)  # longer than its buffer, or negative: empty
        rig.check(expect((), rig.sizes, {}, 1))


def test_more_tokens_or_requests_than_captured(op_device: torch.device) -> None:
    rig = Rig(replace(MIXED, tokens=6), op_device)
    rig.run(pack((GOOD, CHUNK, ALSO), 1))  # 7 tokens: that of the last request exceeds the graph
    faults = {2: (F.BAD_LENGTH, ALSO.seq_len)}
    expected = expect((GOOD, CHUNK, replace(ALSO, tokens=[], query_len=1)), rig.sizes, faults, 1)
    rig.check(expected)
    rig = Rig(replace(MIXED, reqs=2), op_device)
    rig.run(pack((GOOD, CHUNK, ALSO), 1))
    rig.check(expect((GOOD, CHUNK), rig.sizes, {}, 1))


BAD_TENSORS = {
    "groups": ("write_conflicts", lambda t: t[:1], r"write_conflicts: expected shape \[2, \*\]"),
    "table_width": ("block_table", lambda t: t[:, :, :9], "page_table: expected shape"),
    "table_rows": ("block_table", lambda t: t.repeat(1, 1, 2)[:, :, :10], "block_table: expected rows of 10 columns"),
    "scratch": ("check_value", lambda t: t.repeat(1, 2)[:, :4], "check_code, .*: expected equal strides"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensor_of_wrong_shape_raises(case: str) -> None:
    name, change, message = BAD_TENSORS[case]
    rig = Rig(Sizes(), torch.device("cpu"))
    rig.tensors = replace(rig.tensors, **{name: change(getattr(rig.tensors, name))})
    before = {name: tensor.clone() for name, tensor in rig.tensors.named()}
    with pytest.raises(ShapeError, match=message):
        refresh(rig.tensors, max_seq_len=40, vocab_size=100, query_len=1, seq_len_fill=0)
    for name, old in before.items():
        assert torch.equal(getattr(rig.tensors, name).nan_to_num(), old.nan_to_num()), f"{name} was written"
