"""The first kernel of a graph, and its reference, against a model of row states in plain Python."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata import unpack as apply_module
from graphrt.kernels.metadata.buffers import COPIED, STOP_TOKENS
from graphrt.kernels.metadata.unpack import unpack
from graphrt.kernels.types import NO_TOKEN, FinishReason
from tests.support.unpack_rig import (
    CPU,
    CROSS,
    INT_MAX,
    NO_LIST,
    ONE,
    OWN,
    POISON,
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
    ids_of,
)

NEWS_KINDS = (0, layout.NEW_ORDER, layout.LISTS, layout.NEW_ORDER | layout.LISTS)


class Cases:
    """What either implementation has to do."""

    def test_full_slot_is_copied_word_for_word(self, device):
        rig, chance = Rig(device, SEVERAL, rows=20, req_indices=24), random.Random(1)
        n, tokens, pages = 19, 23, 31
        words = [chance.randint(SENTINEL, INT_MAX) for _ in range(layout.req_fields(4) * n + tokens + pages)]
        words[: 2 * n] = [SENTINEL if i % 3 == 0 else i % 30 for i in range(2 * n)]  # means nothing without KEEP
        words = [*header(0, n, tokens, pages, layout.FULL, 1), *words]
        rig.model.step = 0
        rig.run(words, words)

    def test_full_slot_is_kept(self, device):
        rig = Rig(device, SEVERAL)
        lists = ((0, (3, 4)), (1, (5,)), (0, (6, 7, 8)), NO_LIST)
        stops = tuple(range(60, 60 + STOP_TOKENS))
        rows = (
            Request(5, 3, (11, 12, 13), 0, copied(-1, SENTINEL, 4), lists, 9, stops),
            Request(2, SENTINEL, limit=INT_MAX),
            Request(0, 2, (14, 15), limit=0, stops=(9, *(NO_TOKEN,) * (STOP_TOKENS - 1))),
            Request(7, SENTINEL, (16, 17), values=copied(1, 2, 3)),
        )
        rig.model.states[2].length = 0
        (record,) = rig.slot(Full(rows))
        assert ids_of(record, 4) == [5, 2, 0, 7]
        assert record[layout.HEADER_SIZE + 4 :][:4] == [3, 1, 2, 109]
        rig.slot(Full(rows[1:2], keep=True))  # other places stay in the order
        assert rig.model.order[:4] == [2, 2, 0, 7]

    def test_kept_row_that_ended_is_nobody(self, device):
        rig = Rig(device)
        for req_index, end in enumerate(FinishReason):
            rig.model.states[req_index].end = end
        (record,) = rig.slot(Full((*(Request(i, SENTINEL) for i in range(4)), Request(2, 5, (1, 2)))))
        assert ids_of(record, 5) == [0, SENTINEL, SENTINEL, SENTINEL, 2]  # the last one says its length: it begins anew
        assert rig.model.order == [0, 1, 2, 3, 2, -1]

    def test_sentinels_mean_nothing_without_keep(self, device):
        rig = Rig(device)
        rig.model.states[1].end = FinishReason.LENGTH
        rows = (Request(1, SENTINEL), Request(SENTINEL, SENTINEL), Request(3, SENTINEL, (SENTINEL, SENTINEL)))
        (record,) = rig.slot(Full(rows, keep=False))
        assert record[layout.HEADER_SIZE :][:6] == [1, SENTINEL, 3, SENTINEL, SENTINEL, SENTINEL]

    def test_kept_row_ids_out_of_range_keep_nothing(self, device):
        rig = Rig(device, SEVERAL)
        rows = tuple(
            Request(i, SENTINEL, values=copied(5, 5, 5), limit=5) for i in (-1, 8, INT_MAX, SENTINEL, SENTINEL + 1, 3)
        )
        (record,) = rig.slot(Full(rows))
        assert ids_of(record, 6) == [-1, 8, INT_MAX, SENTINEL, SENTINEL + 1, 3]  # the refresh finds the fault
        (record,) = rig.slot(BatchDelta(6))
        assert ids_of(record, 6) == [SENTINEL] * 5 + [3]

    def test_rows_go_on_by_a_token_a_step(self, device):
        rig = Rig(device, SEVERAL)
        rig.slot(BatchDelta(3, (4, 0, 6), steps=3))
        (record,) = rig.slot(BatchDelta(2))  # the first two of the old order
        assert record[layout.HEADER_SIZE :][:4] == [4, 0, 104 + 4, 100 + 4]
        (record,) = rig.slot(BatchDelta(3))
        assert record[layout.HEADER_SIZE + 3 :][:3] == [109, 105, 110]
        (record,) = rig.slot(BatchDelta(1, (6,)))
        assert record[layout.HEADER_SIZE :][:2] == [6, 111]
        assert rig.model.order == [6, 0, 6, -1, -1, -1]

    def test_rows_that_end_on_the_way_are_nobody(self, device):
        rig = Rig(device, SEVERAL)
        ends = ({5: FinishReason.STOP_TOKEN}, {1: FinishReason.LENGTH}, {2: FinishReason.FAULT})
        records = rig.slot(BatchDelta(4, (5, 1, 2, 3), steps=4, loops=True), *ends)
        nobody = [[i for i in range(4) if ids_of(record, 4)[i] == SENTINEL] for record in records]
        assert nobody == [[], [0], [0, 1], [0, 1, 2]]

    def test_order_with_row_ids_out_of_range(self, device):
        rig = Rig(device, SEVERAL)
        for order in ((-1, 8, INT_MAX), (SENTINEL, 7, -2), (0, 9, SENTINEL + 1)):
            rig.slot(BatchDelta(3, order, steps=2))
        (record,) = rig.slot(BatchDelta(6))  # places that no order has named
        assert ids_of(record, 6) == [0, *[SENTINEL] * 5]

    @pytest.mark.parametrize("waits_for", [0, 1, 3], ids=["own", "window", "chunk"])
    def test_row_waits_for_a_page_of_any_group(self, device, waits_for):
        """Tokens 0 to 7 are there: four pages of a window, two of the first group, one of the last."""
        rig = Rig(device, SEVERAL)
        enough = [3, 5, 0, 2]  # for a ninth one; the encoder's pages do not matter
        for req_index in range(4):
            rig.model.states[req_index] = State(8, pages_to=[2, 4, 0, 1] if req_index != 3 else enough.copy())
        missing: tuple[List, ...] = ((2, (50,)), (4, (51,)), (0, (52, 53)), (1, (54,)))
        partly = tuple(NO_LIST if g == waits_for else of_group for g, of_group in enumerate(missing))
        (record,) = rig.slot(BatchDelta(4, (0, 1, 2, 3), {1: missing, 0: partly}))
        assert ids_of(record, 4) == [SENTINEL, 1, SENTINEL, 3]
        # Row 0 did not run: nothing was kept of its list.
        (record,) = rig.slot(BatchDelta(4, None, {2: missing, 0: partly}))
        assert ids_of(record, 4) == [SENTINEL, 1, 2, 3]
        # Of those that ran twice the window's pages are full now.
        (record,) = rig.slot(BatchDelta(4, None, {0: missing}))
        assert ids_of(record, 4) == [0, SENTINEL, 2, SENTINEL]

    def test_row_runs_until_its_last_page_is_full(self, device):
        rig = Rig(device)
        for req_index, (length, pages) in enumerate([(0, 0), (0, 1), (3, 1), (4, 1), (7, 2), (8, 2)]):
            rig.model.states[req_index] = State(length, pages_to=[pages])
        (record,) = rig.slot(BatchDelta(6, tuple(range(6))))
        assert ids_of(record, 6) == [SENTINEL, 1, 2, SENTINEL, 4, SENTINEL]
        records = rig.slot(BatchDelta(6, None, {0: ((0, (9,)),), 3: ((1, (8, 7)),)}, steps=6))
        assert [ids_of(record, 6)[0] for record in records] == [0, 0, 0, 0, SENTINEL, SENTINEL]
        assert [ids_of(record, 6)[3] for record in records] == [3] * 6

    def test_pages_of_an_encoder_are_all_there(self, device):
        rig = Rig(device, (CROSS, OWN))
        rig.model.states[0] = State(30, pages_to=[0, 8])
        (record,) = rig.slot(BatchDelta(1, (0,), {0: ((0, (3, 4)), NO_LIST)}))
        assert ids_of(record, 1) == [0]

    def test_slot_is_chosen_by_the_cursor(self, device):
        rig = Rig(device, ring=3)
        for slot in (0, 1, 2, 3, 7, 2**31 + 1, 2**32, 2**40 + 2):
            rig.model.slot = slot
            rig.slot(BatchDelta(2, (slot % 8, 7 - slot % 8)))
            assert rig.model.slot == slot + 1

    @pytest.mark.parametrize("step", [2**31 - 2, 2**31, 2**32 - 2, 2**32, 2**33 + 2**31, 2**50 - 1])
    def test_step_numbers(self, device, step):
        rig = Rig(device, SEVERAL)
        rig.model.step = step
        first, second, _ = rig.slot(BatchDelta(1, (0,), steps=3))
        assert [w % 2**32 for w in first[:1] + second[:1]] == [(step + 1) % 2**32, (step + 2) % 2**32]
        rig.slot(Full((Request(0, 5),)))

    @pytest.mark.parametrize("kind", [layout.FULL, layout.KEEP, *(layout.DELTA | k for k in NEWS_KINDS)])
    def test_slots_that_lie_count_as_empty(self, device, kind):
        rig = Rig(device, ONE)
        words, input_ring = rig.buffers.inputs.shape[0], rig.buffers.input_ring.shape[1] - layout.INPUTS_AT
        lies = [
            {"reqs": 7}, {"reqs": -1}, {"reqs": INT_MAX}, {"reqs": SENTINEL}, {"reqs": 2**28},
            {"pages": -1}, {"pages": words}, {"pages": INT_MAX}, {"reqs": 0, "pages": INT_MAX - 10},
        ]  # fmt: skip
        if kind & layout.DELTA:
            lies += [{"pages": words - 8}]
        else:
            lies += [{"tokens": n} for n in (-1, words, INT_MAX, SENTINEL)]
            lies += [{"tokens": INT_MAX, "pages": INT_MAX}]
            lies += [{"tokens": 2 * words, "pages": -words}]
        for step, lie in enumerate(lies):
            counts = {"reqs": 2, "tokens": 2, "pages": 3} | lie
            rig.model.step = step - 1
            head = header(step, counts["reqs"], counts["tokens"], counts["pages"], kind, 4)
            rig.run([*head, *([1] * (input_ring - 8))], header(step, 0, 0, 0, kind, 4))

    def test_cursor_that_lies_counts_as_empty(self, device):
        rig = Rig(device)
        rig.model.step_of_slot = 1
        for reqs in (-1, 7, INT_MAX, SENTINEL):
            rig.run(None, header(0, 0, 0, 0, layout.DELTA, 4), cursor=(reqs, 4, layout.DELTA))

    def test_slot_may_be_as_long_as_the_record(self, device):
        n, pages = 2, 5
        words = layout.inputs_size(n, n, pages, 1)
        rows = (Request(3, 6, pages=((0, (1, 2, 3)),)), Request(4, 3, pages=((0, (9, 8)),)))
        for input_ring, keep in ((words, False), (words + 9 * n, True)):
            Rig(device, rows=n, words=words, input_ring=input_ring).slot(Full(rows, keep))
        rig = Rig(device, rows=n, words=words, input_ring=words + 9 * n - 1)  # its ends are not all there
        rig.run(rig.model.pack(Full(rows), 0)[:-1], header(0, 0, 0, 0, layout.KEEP, 1))
        rig = Rig(device, rows=n, words=words - 1, input_ring=words)
        rig.run(rig.model.pack(Full(rows, keep=False), 0), header(0, 0, 0, 0, layout.FULL, 1))
        delta = BatchDelta(n, (3, 4), {0: ((26, (1, 2, 3)),), 1: ((27, (9, 8)),)})
        size = 8 + n + 3 * n + pages
        Rig(device, rows=n, words=words, input_ring=size).slot(delta)
        for record, input_ring in ((words - 1, words), (words, size - 1)):  # the last word, or a page, would be beyond
            rig = Rig(device, rows=n, words=record, input_ring=input_ring)
            rig.run(rig.model.pack(delta, 0)[:input_ring], header(0, 0, 0, 0, delta.kind, 1))

    def check_lists(self, device, fields, pages_to=99):
        """Lists that lie, of the row at place 0. They go to the record as they are."""
        rig = Rig(device, SEVERAL)
        rig.model.states[6].pages_to = [pages_to] * len(SEVERAL)
        listed = [word for of_group in fields for word in of_group]
        kind = layout.DELTA | layout.NEW_ORDER | layout.LISTS
        words = [*header(0, 2, 0, 1, kind, 1), 6, 7, *(word for field in listed for word in (field, 0)), 55]
        rig._load("page_spans")
        rig.model.states[6].pages_to = [99] * len(SEVERAL)  # row 6 runs
        expected = rig.model.unpack(BatchDelta(2, (6, 7)))
        rig.model.states[6].pages_to = [pages_to] * len(SEVERAL)
        expected[4], expected[5] = 1, kind
        expected[layout.HEADER_SIZE + 2 * layout.REQ_PAGES : -2 : 2] = listed
        rig.model.step = -1
        rig._load("step_counter")
        rig.run(words, [*expected, 55])

    def test_lists_that_lie_are_for_the_refresh_to_judge(self, device):
        self.check_lists(device, [(INT_MAX, INT_MAX, SENTINEL), (-5, -1, 8), (3, SENTINEL, -1), (0, 77, 66)])

    @pytest.mark.parametrize("kind", [layout.FULL, layout.KEEP])
    def test_full_slot_is_read_once(self, device, kind):
        rig = Rig(device)
        rig.model.step_of_slot = 1
        rig.run(None, [None] * layout.HEADER_SIZE, cursor=(2, 4, kind))

    def test_more_rows_than_captured_count_as_none(self, device):
        rig = Rig(device, rows=300, req_indices=300, padded=8)
        rig.slot(Full(tuple(Request(i, SENTINEL) for i in range(8))))
        slot = Full(tuple(Request(i, SENTINEL) for i in range(9)))
        rig.run(rig.model.pack(slot, 3), header(3, 0, 0, 0, layout.KEEP, 1))

    def test_lists_whose_sums_overflow_are_for_the_refresh_to_judge(self, device):
        self.check_lists(device, [(INT_MAX, 0, 1), (-5, -1, INT_MAX), (2**29 - 1, 0, 2), (2**30, 0, 2**30)])

    def test_list_that_ends_beyond_32_bits_is_for_the_refresh_to_judge(self, device):
        self.check_lists(device, [(INT_MAX, 0, 1)] * 4, pages_to=0)

    def test_no_rows(self, device):
        rig = Rig(device, SEVERAL)
        for slot in (Full((), keep=False), Full(()), BatchDelta(0), BatchDelta(0, ()), BatchDelta(0, steps=3)):
            for record in rig.slot(slot):
                assert len(record) == layout.HEADER_SIZE

    @pytest.mark.parametrize("rows", [75, 259])  # more than a program takes, and than all take with the fewest
    def test_more_rows_and_lists_than_a_program_takes(self, device, rows):
        req_indices = rows + 5
        rig, chance = Rig(device, (OWN, WINDOW), rows=rows, req_indices=req_indices), random.Random(2)
        order = tuple(chance.sample(range(req_indices), rows))
        for req_index, state in rig.model.states.items():
            state.length, state.pages_to = 12, [3 + req_index % 2, 6 + req_index % 3 // 2]
            state.end = FinishReason.LENGTH if req_index % 11 == 5 else FinishReason.RUNNING
        places = chance.sample(range(rows), 70)  # in no order
        lists = {at: ((3, (1 + at % 60,)), (6, (2, 3)[: 1 + at % 2])) for at in places}
        rig.slot(BatchDelta(rows, order, lists))
        rig.slot(BatchDelta(rows))
        rig.slot(Full(tuple(Request(i, SENTINEL, values=copied(i, 2 * i), limit=i) for i in order[::-1])))
        rig.slot(BatchDelta(rows))

    def test_more_words_than_a_program_takes(self, device):
        pages = tuple(range(1, 3000))
        rig = Rig(device, rows=20, req_indices=24, words=5000)
        rig.slot(Full((Request(1, 5, tuple(range(700)), pages=((0, pages),)), Request(2, 5, pages=((0, pages[:9]),)))))
        rig.slot(BatchDelta(2, (2, 1), {0: ((3, (4,)),), 1: ((0, pages[::-1]),)}))

    @pytest.mark.parametrize("seed", range(2))
    def test_sequences_of_slots(self, device, seed):
        chance = random.Random(seed)
        groups = SEVERAL if seed else (WINDOW,)
        rig = Rig(device, groups, rows=11, req_indices=13)
        rig.model.step = 2**32 - 20
        for _ in range(30):
            slot = _draw_slot(chance, rig.model, 11, 13)
            ends = [
                {i: chance.choice(list(FinishReason)[1:]) for i in range(13) if chance.random() < 0.1}
                for _ in range(slot.steps)
            ]
            rig.slot(slot, *ends)


def _draw_lists(chance: random.Random, model: Model, req_index: int) -> tuple[List, ...]:
    """Pages behind those that a row has, enough for it or not."""
    state = model.states.get(req_index)
    lists = []
    for g in range(len(model.groups)):
        count = chance.choice((0, 1, 1, 2))
        first = state.pages_to[g] if state is not None else chance.randint(0, 4)
        lists.append((first, tuple(chance.randint(1, 63) for _ in range(count))) if count else NO_LIST)
    return tuple(lists)


def _draw_slot(chance: random.Random, model: Model, rows: int, req_indices: int) -> Full | BatchDelta:
    n = chance.randint(0, rows)
    order = chance.sample([*range(req_indices), -1, req_indices], n)
    if chance.random() < 0.35:
        drawn = []
        for req_index in order:
            tokens = tuple(chance.randint(0, 9) for _ in range(chance.randint(1, 3)))
            seq_len = SENTINEL if chance.random() < 0.5 else chance.randint(len(tokens), 20)
            pages = tuple((0, tuple(chance.choices(range(1, 64), k=-(-24 // g.page_size)))) for g in model.groups)
            values = tuple(chance.randint(SENTINEL, INT_MAX) for _ in COPIED)
            stops = tuple(chance.randint(-1, 9) for _ in range(STOP_TOKENS))
            drawn.append(
                Request(req_index, seq_len, tokens, chance.randint(0, 1), values, pages, chance.randint(0, 30), stops)
            )
        keep = chance.random() < 0.8 or any(row.seq_len == SENTINEL for row in drawn)
        return Full(tuple(drawn), keep)
    new_order = chance.random() < 0.5
    places = [at for at in range(n) if chance.random() < 0.5]
    chance.shuffle(places)
    lists = {at: _draw_lists(chance, model, order[at] if new_order else model.order[at]) for at in places}
    return BatchDelta(
        n, tuple(order) if new_order else None, lists, chance.choice((1, 1, 1, 2, 3)), chance.random() < 0.5
    )


class TestKernel(Cases):
    @pytest.fixture
    def device(self, kernel_device, monkeypatch):
        if kernel_device.type == "cpu":
            monkeypatch.setattr(apply_module, "_PROGRAMS", 2)  # the interpreter runs one after the other
        return kernel_device


class TestReference(Cases):
    @pytest.fixture
    def device(self):
        return CPU


@pytest.mark.gpu
def test_a_graph_takes_one_slot_after_the_other():
    rig = Rig(torch.device("cuda"), SEVERAL, ring=3)
    b, m = rig.buffers, rig.model
    unpack(b)  # compiles
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        unpack(b)
    lists = {1: ((26, (3,)), NO_LIST, NO_LIST, NO_LIST)}
    slots = (
        Full((Request(3, 4, (5, 6)), Request(2, SENTINEL))),
        BatchDelta(2, (2, 3), lists, steps=2),
        BatchDelta(2),
        BatchDelta(1, (7,)),
    )
    for slot in slots:
        for index in range(slot.steps):
            rig._load(*rig._contents())
            words = m.pack(slot, m.step + 1)
            b.input_ring.fill_(POISON)
            if not index:
                rig.put(words)
            n = len(slot.rows) if isinstance(slot, Full) else slot.num_reqs
            b.cursor.copy_(torch.tensor([m.slot, m.step_of_slot, n, slot.steps, slot.kind]))
            b.inputs.fill_(POISON)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            expected = m.unpack(slot)
            got = [w if e is not None else None for w, e in zip(b.inputs.tolist(), expected, strict=False)]
            assert got == expected
            m.advance(slot, expected)


BAD = {
    "cursor": (lambda b: b.cursor[:4], "cursor: expected shape"),
    "finish_reasons": (lambda b: b.finish_reasons[:3], "finish_reasons: expected shape"),
    "req_values": (lambda b: b.req_values[:1], "req_values: expected shape"),
    "end_lengths": (lambda b: b.end_lengths[1:], "end_lengths: expected shape"),
    "end_tokens": (lambda b: torch.cat((b.end_tokens, b.end_tokens), 1)[:, ::2], "end_tokens: expected"),
    "page_spans": (lambda b: b.page_spans[:, :2], "page_spans: expected shape"),
    "order": (lambda b: b.order[:1], "order: expected at least 6 columns"),
    "input_ring": (lambda b: b.input_ring[:, :255], "input_ring: expected at least 256 words"),
    "inputs": (lambda b: b.inputs[:7], "inputs: expected at least 8 words"),
}


@pytest.mark.parametrize("name", BAD)
def test_buffers_that_do_not_fit_are_named(name):
    spoil, message = BAD[name]
    buffers = Rig(CPU).buffers
    with pytest.raises(ShapeError, match=message):
        unpack(replace(buffers, **{name: spoil(buffers)}))
