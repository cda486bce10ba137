"""Ten thousand steps of whatever a server may do, with the host as far ahead of the device as it can get."""

from __future__ import annotations

import random
import time

import pytest
import torch

from graphrt.batch import Batch
from graphrt.kernels.errors import CapacityError
from graphrt.kernels.types import KVLayout
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session import DecodeSession, SessionRow
from graphrt.spec import KVCacheSpec
from tests.runtime.test_session import PROMPTS, alone, draw, finish, oracle
from tests.runtime.toy import HEAD_DIM, KV_HEADS, LAYERS, MAX_LEN, make_runtime

STEPS = 10_000
LATE = 3_000_000  # cycles: almost two milliseconds
VERY_LATE = 60_000_000  # and 35, while the host submits all that a test submits


def small_runtime(generator: random.Random, device: torch.device) -> Runtime:
    loops = generator.choice([(), (1, 2, 4)])
    config = {
        "max_seq_len": MAX_LEN, "loop_sizes": loops, "max_num_tokens": 32, "mixed_sizes": (8, 32),
        "ring_depth": generator.choice([2, 3, 8]),
    }  # fmt: skip
    spec = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, KVLayout.NHD, torch.float32)
    runtime = make_runtime(device, kv_spec=spec, num_pages=generator.choice([24, 70]), config=config)
    for _, tensor in runtime.kv_cache.named_tensors():
        tensor[1:] = float("nan")
    runtime.capture()
    return runtime


def delay(runtime: Runtime, cycles: int = VERY_LATE) -> None:
    """Keep the device busy, so that whatever the host submits next waits while the host goes on."""
    with torch.cuda.stream(runtime.stream):
        torch.cuda._sleep(cycles)


def serve(generator: random.Random, runtime: Runtime, calls: int) -> list[SessionRow]:
    """Random calls of a session, on a device that is late now and then; all rows that there were."""
    rows: list[SessionRow] = []
    open_rows: list[SessionRow] = []
    with DecodeSession(runtime) as session:
        for _ in range(calls):
            if generator.random() < 0.05:
                delay(runtime, LATE)
            try:
                draw(generator, session, rows, open_rows)
            except CapacityError:
                session.collect(wait=True)
                for row in [row for row in open_rows if row.end] or open_rows[:1]:
                    session.release(row)
                    open_rows.remove(row)
        session.collect(wait=True)
    return rows


@pytest.mark.gpu
def test_ten_thousand_steps_of_whatever_a_server_does() -> None:
    generator, device, steps, tokens = random.Random(15), torch.device("cuda"), 0, 0
    while steps < STEPS:
        runtime = small_runtime(generator, device)
        rows = serve(generator, runtime, 1500)
        steps += runtime.manager._step
        assert runtime.allocator.num_free == runtime.allocator.num_pages - 1
        assert len(runtime.free_rows) == 4
        for row in rows:
            want = alone(runtime, row)
            assert row.tokens == want[: len(row.tokens)]
            assert row.tokens == want or not row.end
            tokens += len(row.tokens)
        runtime.close()
    assert tokens > STEPS, "most steps sampled tokens"


@pytest.mark.gpu
@pytest.mark.parametrize("loop_sizes", [(), (4,)], ids=["launch_by_launch", "loop"])
def test_a_late_device_reads_what_was_meant_for_it(loop_sizes: tuple[int, ...]) -> None:
    """All slots are written, with rows that come, go and get pages, before the device has begun the first one."""
    device = torch.device("cuda")
    runtime = make_runtime(device, num_pages=60, config={"ring_depth": 16, "loop_sizes": loop_sizes})
    runtime.capture()
    with DecodeSession(runtime) as session:
        first = session.add(PROMPTS[0], SamplingParams(max_new_tokens=40))
        session.run(2)
        session.collect(wait=True)
        delay(runtime)
        began = time.perf_counter()
        session.run(6)
        second = session.add(PROMPTS[1], SamplingParams(max_new_tokens=30))
        session.run(5)
        third = session.fork(first)
        session.run(9)
        session.release(second)
        fourth = session.add(PROMPTS[2], SamplingParams(max_new_tokens=12))
        session.run(1)
        in_flight = sum(not flight.launch.done() for flight in session._flights)
        assert in_flight >= 5, f"the host was not ahead: {in_flight} launches after {time.perf_counter() - began:.4f} s"
        finish(session, 4)
        assert first.tokens == third.tokens == oracle(runtime, PROMPTS[0], 40)
        assert fourth.tokens == oracle(runtime, PROMPTS[2], 12)
        assert second.tokens == oracle(runtime, PROMPTS[1], 30)[: len(second.tokens)]


@pytest.mark.gpu
@pytest.mark.parametrize("loop_sizes", [(), (1, 2, 4)], ids=["launch_by_launch", "loop"])
def test_a_launch_that_is_stopped_ends_after_its_step(loop_sizes: tuple[int, ...]) -> None:
    runtime = make_runtime(torch.device("cuda"), num_pages=60, config={"loop_sizes": loop_sizes})
    runtime.capture()
    with DecodeSession(runtime) as session:
        rows = [session.add(prompt, SamplingParams(max_new_tokens=40)) for prompt in PROMPTS]
        session.run(2)
        session.collect(wait=True)
        before = [len(row.tokens) for row in rows]
        delay(runtime)
        launches = [*session.run(20), *session.run(10)]
        for launch in launches:
            launch.stop()
        session.collect(wait=True)
        assert [len(row.tokens) - count for row, count in zip(rows, before, strict=True)] == [len(launches)] * 3
        launches[0].stop()  # has ended: its slot is another's by now
        finish(session, 7)
        assert [row.tokens for row in rows] == [oracle(runtime, prompt, 40) for prompt in PROMPTS]


@pytest.mark.gpu
def test_a_late_device_reads_the_batch_that_was_submitted() -> None:
    """The stateless path: slots are written again at once, and only where the device is done with them."""
    device = torch.device("cuda")
    runtime = make_runtime(device, num_pages=60, config={"ring_depth": 4})
    runtime.capture()
    pages = runtime.allocator.allocate(16)
    prompt, handles = PROMPTS[0], []
    batch = Batch(row_ids=[0], seq_lens=[3], query_lens=[3], tokens=prompt, page_indptr=[0, 16], page_ids=pages)
    handles.append(runtime.replay(batch))
    for length in range(4, 24):
        if length % 5 == 0:
            delay(runtime)
        handles.append(runtime.replay(Batch(row_ids=[0], seq_lens=[length])))
    assert [int(handle.tokens()[0]) for handle in handles] == oracle(runtime, prompt, 21)
