"""`unpack`, kernel and reference, against a model of the request state in plain Python."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata import unpack as unpack_module
from graphrt.kernels.metadata.buffers import COPIED, STOP_TOKENS
from graphrt.kernels.metadata.unpack import unpack
from graphrt.kernels.types import NO_TOKEN, FinishReason
from tests.support.unpack_rig import (
    CPU,
    INT_MAX,
    NO_LIST,
    ONE,
    OWN,
    SENTINEL,
    SEVERAL,
    WINDOW,
    BatchDelta,
    Full,
    List,
    Model,
    Request,
    Rig,
    State,
    copied,
    header,
    req_indices_of,
)

DELTA_KINDS = (0, layout.NEW_ORDER, layout.LISTS, layout.NEW_ORDER | layout.LISTS)


@pytest.fixture
def device(op_device, monkeypatch):
    if op_device.type == "cpu":
        monkeypatch.setattr(unpack_module, "_PROGRAMS", 2)  # the interpreter runs programs one after another
    return op_device


def test_full_entry_is_copied_word_for_word(device):
    rig, chance = Rig(device, SEVERAL, requests=20, req_indices=24), random.Random(1)
    n, tokens, pages = 19, 23, 31
    words = [chance.randint(SENTINEL, INT_MAX) for _ in range(layout.req_fields(4) * n + tokens + pages)]
    words[: 2 * n] = [SENTINEL if i % 3 == 0 else i % 30 for i in range(2 * n)]  # no sentinels without KEEP
    words = [*header(0, n, tokens, pages, layout.FULL, 1), *words]
    rig.model.step = 0
    rig.run(words, words)


def test_full_entry_is_stored_with_keep(device):
    rig = Rig(device, SEVERAL)
    lists = ((0, (3, 4)), (1, (5,)), (0, (6, 7, 8)), NO_LIST)
    stop_tokens = tuple(range(60, 60 + STOP_TOKENS))
    requests = (
        Request(5, 3, (11, 12, 13), 0, copied(-1, SENTINEL, 4), lists, 9, stop_tokens),
        Request(2, SENTINEL, length_limit=INT_MAX),
        Request(0, 2, (14, 15), length_limit=0, stop_tokens=(9, *(NO_TOKEN,) * (STOP_TOKENS - 1))),
        Request(7, SENTINEL, (16, 17), values=copied(1, 2, 3)),
    )
    rig.model.states[2].length = 0
    (inputs,) = rig.run_entry(Full(requests))
    assert req_indices_of(inputs, 4) == [5, 2, 0, 7]
    assert inputs[layout.HEADER_SIZE + 4 :][:4] == [3, 1, 2, 109]
    rig.run_entry(Full(requests[1:2], keep=True))  # the other positions keep their order
    assert rig.model.order[:4] == [2, 2, 0, 7]


def test_finished_request_is_left_out(device):
    """Without KEEP, sentinels mean nothing."""
    rig = Rig(device)
    for req_index, end in enumerate(FinishReason):
        rig.model.states[req_index].finish_reason = end
    (inputs,) = rig.run_entry(Full((*(Request(i, SENTINEL) for i in range(4)), Request(2, 5, (1, 2)))))
    assert req_indices_of(inputs, 5) == [0, SENTINEL, SENTINEL, SENTINEL, 2]
    assert rig.model.order == [0, 1, 2, 3, 2, -1]
    requests = (Request(1, SENTINEL), Request(SENTINEL, SENTINEL), Request(3, SENTINEL, (SENTINEL, SENTINEL)))
    (inputs,) = rig.run_entry(Full(requests, keep=False))
    assert inputs[layout.HEADER_SIZE :][:6] == [1, SENTINEL, 3, SENTINEL, SENTINEL, SENTINEL]


def test_request_indices_out_of_range_store_nothing(device):
    rig = Rig(device, SEVERAL)
    requests = tuple(
        Request(i, SENTINEL, values=copied(5, 5, 5), length_limit=5)
        for i in (-1, 8, INT_MAX, SENTINEL, SENTINEL + 1, 3)
    )
    (inputs,) = rig.run_entry(Full(requests))
    assert req_indices_of(inputs, 6) == [-1, 8, INT_MAX, SENTINEL, SENTINEL + 1, 3]  # the refresh finds the fault
    (inputs,) = rig.run_entry(BatchDelta(6))
    assert req_indices_of(inputs, 6) == [SENTINEL] * 5 + [3]


def test_requests_continue_by_one_token_per_step(device):
    rig = Rig(device, SEVERAL)
    rig.run_entry(BatchDelta(3, (4, 0, 6), steps=3))
    (inputs,) = rig.run_entry(BatchDelta(2))  # the first two of the old order
    assert inputs[layout.HEADER_SIZE :][:4] == [4, 0, 104 + 4, 100 + 4]
    (inputs,) = rig.run_entry(BatchDelta(3))
    assert inputs[layout.HEADER_SIZE + 3 :][:3] == [109, 105, 110]
    (inputs,) = rig.run_entry(BatchDelta(1, (6,)))
    assert inputs[layout.HEADER_SIZE :][:2] == [6, 111]
    assert rig.model.order == [6, 0, 6, -1, -1, -1]


def test_requests_that_finish_between_steps_are_left_out(device):
    rig = Rig(device, SEVERAL)
    finished = ({5: FinishReason.STOP_TOKEN}, {1: FinishReason.LENGTH}, {2: FinishReason.FAULT})
    step_inputs = rig.run_entry(BatchDelta(4, (5, 1, 2, 3), steps=4, loops=True), *finished)
    empty = [[i for i in range(4) if req_indices_of(inputs, 4)[i] == SENTINEL] for inputs in step_inputs]
    assert empty == [[], [0], [0, 1], [0, 1, 2]]


def test_order_with_request_indices_out_of_range(device):
    rig = Rig(device, SEVERAL)
    for order in ((-1, 8, INT_MAX), (SENTINEL, 7, -2), (0, 9, SENTINEL + 1)):
        rig.run_entry(BatchDelta(3, order, steps=2))
    (inputs,) = rig.run_entry(BatchDelta(6))  # positions without an order so far
    assert req_indices_of(inputs, 6) == [0, *[SENTINEL] * 5]


@pytest.mark.parametrize("waits_for", [0, 1, 3], ids=["own", "window", "chunk"])
def test_request_waits_for_a_page_of_any_group(device, waits_for):
    """Tokens 0 to 7 are cached: four pages of the window group, two of the first group, one of the last."""
    rig = Rig(device, SEVERAL)
    enough = [3, 5, 0, 2]  # for a ninth token; the encoder's pages do not matter
    for req_index in range(4):
        rig.model.states[req_index] = State(8, pages_to=[2, 4, 0, 1] if req_index != 3 else enough.copy())
    missing: tuple[List, ...] = ((2, (50,)), (4, (51,)), (0, (52, 53)), (1, (54,)))
    partly = tuple(NO_LIST if g == waits_for else listed for g, listed in enumerate(missing))
    (inputs,) = rig.run_entry(BatchDelta(4, (0, 1, 2, 3), {1: missing, 0: partly}))
    assert req_indices_of(inputs, 4) == [SENTINEL, 1, SENTINEL, 3]
    # Request 0 did not run, so its list was not stored.
    (inputs,) = rig.run_entry(BatchDelta(4, None, {2: missing, 0: partly}))
    assert req_indices_of(inputs, 4) == [SENTINEL, 1, 2, 3]
    # The window pages of the requests that ran twice are now full.
    (inputs,) = rig.run_entry(BatchDelta(4, None, {0: missing}))
    assert req_indices_of(inputs, 4) == [0, SENTINEL, 2, SENTINEL]


def test_request_runs_until_its_last_page_is_full(device):
    rig = Rig(device)
    for req_index, (length, pages) in enumerate([(0, 0), (0, 1), (3, 1), (4, 1), (7, 2), (8, 2)]):
        rig.model.states[req_index] = State(length, pages_to=[pages])
    (inputs,) = rig.run_entry(BatchDelta(6, tuple(range(6))))
    assert req_indices_of(inputs, 6) == [SENTINEL, 1, 2, SENTINEL, 4, SENTINEL]
    step_inputs = rig.run_entry(BatchDelta(6, None, {0: ((0, (9,)),), 3: ((1, (8, 7)),)}, steps=6))
    assert [req_indices_of(inputs, 6)[0] for inputs in step_inputs] == [0, 0, 0, 0, SENTINEL, SENTINEL]
    assert [req_indices_of(inputs, 6)[3] for inputs in step_inputs] == [3] * 6


def test_cursor_selects_the_entry(device):
    rig = Rig(device, ring=3)
    for entry in (0, 1, 2, 3, 7, 2**31 + 1, 2**32, 2**40 + 2):
        rig.model.entry = entry
        rig.run_entry(BatchDelta(2, (entry % 8, 7 - entry % 8)))
        assert rig.model.entry == entry + 1


@pytest.mark.parametrize("step", [2**31 - 2, 2**31, 2**32 - 2, 2**32, 2**33 + 2**31, 2**50 - 1])
def test_step_numbers(device, step):
    rig = Rig(device, SEVERAL)
    rig.model.step = step
    first, second, _ = rig.run_entry(BatchDelta(1, (0,), steps=3))
    assert [w % 2**32 for w in first[:1] + second[:1]] == [(step + 1) % 2**32, (step + 2) % 2**32]
    rig.run_entry(Full((Request(0, 5),)))


@pytest.mark.parametrize("kind", [layout.FULL, layout.KEEP, *(layout.DELTA | k for k in DELTA_KINDS)])
def test_entry_with_counts_out_of_range_is_empty(device, kind):
    rig = Rig(device, ONE)
    words, input_ring = rig.buffers.inputs.shape[0], rig.buffers.input_ring.shape[1] - layout.INPUTS_AT
    counts_out_of_range = [
        {"reqs": 7}, {"reqs": -1}, {"reqs": INT_MAX}, {"reqs": SENTINEL}, {"reqs": 2**28},
        {"pages": -1}, {"pages": words}, {"pages": INT_MAX}, {"reqs": 0, "pages": INT_MAX - 10},
    ]  # fmt: skip
    if kind & layout.DELTA:
        counts_out_of_range += [{"pages": words - 8}]
    else:
        counts_out_of_range += [{"tokens": n} for n in (-1, words, INT_MAX, SENTINEL)]
        counts_out_of_range += [{"tokens": INT_MAX, "pages": INT_MAX}]
        counts_out_of_range += [{"tokens": 2 * words, "pages": -words}]
    for step, wrong in enumerate(counts_out_of_range):
        counts = {"reqs": 2, "tokens": 2, "pages": 3} | wrong
        rig.model.step = step - 1
        head = header(step, counts["reqs"], counts["tokens"], counts["pages"], kind, 4)
        rig.run([*head, *([1] * (input_ring - 8))], header(step, 0, 0, 0, kind, 4))


def test_longest_entry_and_one_word_more(device):
    n, pages = 2, 5
    words = layout.inputs_size(n, n, pages, 1)
    requests = (Request(3, 6, pages=((0, (1, 2, 3)),)), Request(4, 3, pages=((0, (9, 8)),)))
    for input_ring, keep in ((words, False), (words + 9 * n, True)):
        Rig(device, requests=n, words=words, input_ring=input_ring).run_entry(Full(requests, keep))
    rig = Rig(device, requests=n, words=words, input_ring=words + 9 * n - 1)  # one stop word is missing
    rig.run(rig.model.pack(Full(requests), 0)[:-1], header(0, 0, 0, 0, layout.KEEP, 1))
    rig = Rig(device, requests=n, words=words - 1, input_ring=words)
    rig.run(rig.model.pack(Full(requests, keep=False), 0), header(0, 0, 0, 0, layout.FULL, 1))
    delta = BatchDelta(n, (3, 4), {0: ((26, (1, 2, 3)),), 1: ((27, (9, 8)),)})
    size = 8 + n + 3 * n + pages
    Rig(device, requests=n, words=words, input_ring=size).run_entry(delta)
    for inputs, input_ring in ((words - 1, words), (words, size - 1)):  # the last word, or a page, does not fit
        rig = Rig(device, requests=n, words=inputs, input_ring=input_ring)
        rig.run(rig.model.pack(delta, 0)[:input_ring], header(0, 0, 0, 0, delta.kind, 1))


INVALID_LISTS = {
    "bad_words": ([(INT_MAX, INT_MAX, SENTINEL), (-5, -1, 8), (3, SENTINEL, -1), (0, 77, 66)], 99),
    "sums_overflow": ([(INT_MAX, 0, 1), (-5, -1, INT_MAX), (2**29 - 1, 0, 2), (2**30, 0, 2**30)], 99),
    "ends_beyond_32_bits": ([(INT_MAX, 0, 1)] * 4, 0),
}


@pytest.mark.parametrize("case", INVALID_LISTS)
def test_invalid_lists_are_passed_to_the_refresh(device, case):
    """Those of the request at position 0 are copied to the inputs unchanged."""
    fields, pages_to = INVALID_LISTS[case]
    rig = Rig(device, SEVERAL)
    rig.model.states[6].pages_to = [pages_to] * len(SEVERAL)
    listed = [word for of_group in fields for word in of_group]
    kind = layout.DELTA | layout.NEW_ORDER | layout.LISTS
    words = [*header(0, 2, 0, 1, kind, 1), 6, 7, *(word for field in listed for word in (field, 0)), 55]
    rig._load("page_spans")
    rig.model.states[6].pages_to = [99] * len(SEVERAL)  # request 6 runs
    expected = rig.model.unpack(BatchDelta(2, (6, 7)))
    rig.model.states[6].pages_to = [pages_to] * len(SEVERAL)
    expected[4], expected[5] = 1, kind
    expected[layout.HEADER_SIZE + 2 * layout.REQ_PAGES : -2 : 2] = listed
    rig.model.step = -1
    rig._load("step_counter")
    rig.run(words, [*expected, 55])


def test_later_steps_of_an_entry_check_the_cursor(device):
    """A full entry serves one step. A delta with counts out of range is empty."""
    rig = Rig(device)
    rig.model.step_of_entry = 1
    for kind in (layout.FULL, layout.KEEP):
        rig.run(None, [None] * layout.HEADER_SIZE, cursor=(2, 4, kind))
    for reqs in (-1, 7, INT_MAX, SENTINEL):
        rig.run(None, header(0, 0, 0, 0, layout.DELTA, 4), cursor=(reqs, 4, layout.DELTA))


def test_more_requests_than_captured_are_an_empty_step(device):
    rig = Rig(device, requests=300, req_indices=300, padded=8)
    rig.run_entry(Full(tuple(Request(i, SENTINEL) for i in range(8))))
    entry = Full(tuple(Request(i, SENTINEL) for i in range(9)))
    rig.run(rig.model.pack(entry, 3), header(3, 0, 0, 0, layout.KEEP, 1))


def test_entries_without_requests(device):
    rig = Rig(device, SEVERAL)
    for entry in (Full((), keep=False), Full(()), BatchDelta(0), BatchDelta(0, ()), BatchDelta(0, steps=3)):
        for inputs in rig.run_entry(entry):
            assert len(inputs) == layout.HEADER_SIZE


@pytest.mark.parametrize("requests", [75, 259])
def test_requests_and_lists_of_several_programs(device, requests):
    """More than one program handles, and more than all programs handle with the smallest block."""
    req_indices = requests + 5
    rig, chance = Rig(device, (OWN, WINDOW), requests=requests, req_indices=req_indices), random.Random(2)
    order = tuple(chance.sample(range(req_indices), requests))
    for req_index, state in rig.model.states.items():
        state.length, state.pages_to = 12, [3 + req_index % 2, 6 + req_index % 3 // 2]
        state.finish_reason = FinishReason.LENGTH if req_index % 11 == 5 else FinishReason.RUNNING
    positions = chance.sample(range(requests), 70)  # unordered
    lists = {at: ((3, (1 + at % 60,)), (6, (2, 3)[: 1 + at % 2])) for at in positions}
    rig.run_entry(BatchDelta(requests, order, lists))
    rig.run_entry(BatchDelta(requests))
    rig.run_entry(Full(tuple(Request(i, SENTINEL, values=copied(i, 2 * i), length_limit=i) for i in order[::-1])))
    rig.run_entry(BatchDelta(requests))


def test_words_of_several_iterations(device):
    pages = tuple(range(1, 3000))
    rig = Rig(device, requests=20, req_indices=24, words=5000)
    rig.run_entry(Full((Request(1, 5, tuple(range(700)), pages=((0, pages),)), Request(2, 5, pages=((0, pages[:9]),)))))
    rig.run_entry(BatchDelta(2, (2, 1), {0: ((3, (4,)),), 1: ((0, pages[::-1]),)}))


@pytest.mark.parametrize("seed", range(2))
def test_random_sequences_of_entries(device, seed):
    chance = random.Random(seed)
    groups = SEVERAL if seed else (WINDOW,)
    rig = Rig(device, groups, requests=11, req_indices=13)
    rig.model.step = 2**32 - 20
    for _ in range(30):
        entry = _draw_entry(chance, rig.model, 11, 13)
        finished = [
            {i: chance.choice(list(FinishReason)[1:]) for i in range(13) if chance.random() < 0.1}
            for _ in range(entry.steps)
        ]
        rig.run_entry(entry, *finished)


def _draw_lists(chance: random.Random, model: Model, req_index: int) -> tuple[List, ...]:
    """Draw pages that follow those of a request; they may be too few."""
    state = model.states.get(req_index)
    lists = []
    for g in range(len(model.groups)):
        count = chance.choice((0, 1, 1, 2))
        first = state.pages_to[g] if state is not None else chance.randint(0, 4)
        lists.append((first, tuple(chance.randint(1, 63) for _ in range(count))) if count else NO_LIST)
    return tuple(lists)


def _draw_entry(chance: random.Random, model: Model, requests: int, req_indices: int) -> Full | BatchDelta:
    n = chance.randint(0, requests)
    order = chance.sample([*range(req_indices), -1, req_indices], n)
    if chance.random() < 0.35:
        drawn = []
        for req_index in order:
            tokens = tuple(chance.randint(0, 9) for _ in range(chance.randint(1, 3)))
            seq_len = SENTINEL if chance.random() < 0.5 else chance.randint(len(tokens), 20)
            pages = tuple((0, tuple(chance.choices(range(1, 64), k=-(-24 // g.page_size)))) for g in model.groups)
            values = tuple(chance.randint(SENTINEL, INT_MAX) for _ in COPIED)
            stop_tokens = tuple(chance.randint(-1, 9) for _ in range(STOP_TOKENS))
            drawn.append(
                Request(
                    req_index, seq_len, tokens, chance.randint(0, 1), values, pages, chance.randint(0, 30), stop_tokens
                )
            )
        keep = chance.random() < 0.8 or any(request.seq_len == SENTINEL for request in drawn)
        return Full(tuple(drawn), keep)
    new_order = chance.random() < 0.5
    positions = [at for at in range(n) if chance.random() < 0.5]
    chance.shuffle(positions)
    lists = {at: _draw_lists(chance, model, order[at] if new_order else model.order[at]) for at in positions}
    return BatchDelta(
        n, tuple(order) if new_order else None, lists, chance.choice((1, 1, 1, 2, 3)), chance.random() < 0.5
    )


@pytest.mark.gpu
def test_graph_replays_run_consecutive_entries():
    rig = Rig(torch.device("cuda"), SEVERAL, ring=3)
    unpack(rig.buffers)  # compiles
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        unpack(rig.buffers)
    rig.launch = graph.replay
    rig.run_entry(Full((Request(3, 4, (5, 6)), Request(2, SENTINEL))))
    rig.run_entry(BatchDelta(2, (2, 3), {1: ((26, (3,)), NO_LIST, NO_LIST, NO_LIST)}, steps=2))
    rig.run_entry(BatchDelta(2))
    rig.run_entry(BatchDelta(1, (7,)))


BAD = {
    "cursor": (lambda b: b.cursor[:4], "cursor: expected shape"),
    "finish_reasons": (lambda b: b.finish_reasons[:3], "finish_reasons: expected shape"),
    "req_values": (lambda b: b.req_values[:1], "req_values: expected shape"),
    "length_limits": (lambda b: b.length_limits[1:], "length_limits: expected shape"),
    "stop_tokens": (lambda b: torch.cat((b.stop_tokens, b.stop_tokens), 1)[:, ::2], "stop_tokens: expected"),
    "page_spans": (lambda b: b.page_spans[:, :2], "page_spans: expected shape"),
    "order": (lambda b: b.order[:1], "order: expected at least 6 columns"),
    "input_ring": (lambda b: b.input_ring[:, :255], "input_ring: expected at least 256 columns"),
    "inputs": (lambda b: b.inputs[:7], "inputs: expected at least 29 columns"),
}


@pytest.mark.parametrize("name", BAD)
def test_buffer_of_wrong_shape_raises(name):
    spoil, message = BAD[name]
    buffers = Rig(CPU).buffers
    with pytest.raises(ShapeError, match=message):
        unpack(replace(buffers, **{name: spoil(buffers)}))
