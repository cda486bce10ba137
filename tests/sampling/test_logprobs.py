"""Log-probabilities of sampled tokens and prompts, from the user to the rings and back, against torch.log_softmax."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.batch import Batch
from graphrt.engine.handle import TokenLogprob
from graphrt.generate.generator import Event, TextGenerator
from graphrt.kernels.errors import ConfigError, ReplayError, UnsupportedError
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession, SessionRequest
from graphrt.testing.poison import poison_derived
from tests.support.sampling_cases import finish, model_of
from tests.support.toy import VOCAB, LivelyModel, greedy, make_rig, make_runtime

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [6]]


def runtime_of(device: torch.device, **config: object) -> Runtime:
    settings = {"max_logprobs": 5, "penalties": True, "max_logit_bias": 4} | config
    runtime = make_runtime(device, num_pages=60, config=settings)
    runtime.capture()
    return runtime


def check(found: TokenLogprob | None, logits: torch.Tensor, token: int, count: int) -> None:
    """Against the dense float64 oracle's logits [vocab]."""
    assert found is not None
    want = logits.log_softmax(-1)
    order = want.argsort(descending=True, stable=True).tolist()
    assert (found.token, found.rank) == (token, 1 + order.index(token))
    assert found.logprob == pytest.approx(float(want[token]), abs=2e-4, rel=1e-4)
    assert [t for t, _ in found.top] == order[:count]
    assert [p for _, p in found.top] == pytest.approx([float(want[t]) for t in order[:count]], abs=2e-4, rel=1e-4)


def check_row(runtime: Runtime, row: SessionRequest) -> None:
    """All that a row has to have."""
    asked, of_prompt, prompt = row.params.logprobs, row.params.prompt_logprobs, row.prompt.tolist()
    assert len(row.logprobs) == (0 if asked is None else len(row.tokens))
    assert len(row.prompt_logprobs) == (0 if of_prompt is None else len(prompt) - 1)
    oracle = model_of(runtime).oracle
    for at, found in enumerate(row.logprobs):
        check(found, oracle(prompt + row.tokens[:at]), row.tokens[at], asked or 0)
    for at, found in enumerate(row.prompt_logprobs):
        check(found, oracle(prompt[: at + 1]), prompt[at + 1], of_prompt or 0)


PARAMS = [
    SamplingParams(9, temperature=40.0, seed=3, logprobs=5, repetition_penalty=1.5, logit_bias={4: 9.0}),
    SamplingParams(9, prompt_logprobs=2),
    SamplingParams(9, logprobs=0, prompt_logprobs=5),
    SamplingParams(9),
]


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("loop_sizes", [(), (1, 2, 4)], ids=["launch_by_launch", "loop"])
def test_requests_of_sessions_get_their_own_log_probabilities(
    device: torch.device, steps: int, loop_sizes: tuple[int, ...]
) -> None:
    """Before bias, penalties and temperature; for any split of steps into launches; row ids used twice."""
    runtime = runtime_of(device, loop_sizes=loop_sizes)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[1][:7], PROMPTS[2]]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        with DecodeSession(runtime) as session:
            rows = [session.add(prompts[i], PARAMS[i]) for i in order]
            while session.running:
                session.run(steps)
                if steps > 1:
                    session.run(steps)  # two launches in flight
                session.collect(wait=True)
            for row in rows:
                assert len(row.tokens) == 9
                check_row(runtime, row)
            free = rows[order.index(3)]
            assert free.logprobs == free.prompt_logprobs == []


def test_forks_and_stop_tokens(device: torch.device) -> None:
    runtime = runtime_of(device)
    with DecodeSession(runtime) as session:
        row = session.add(PROMPTS[0], SamplingParams(20, logprobs=2, prompt_logprobs=1))
        session.run(5)
        fork = session.fork(row)  # launches in flight are of both
        session.run(4)
        session.collect(wait=True)
        later = session.fork(fork)
        session.release(row)
        finish(session, 4)
        assert fork.logprobs == later.logprobs
        assert fork.logprobs is not later.logprobs
        check_row(runtime, fork)
        check_row(runtime, later)
        # More stop tokens than the device has room for: the host cuts tokens and log-probabilities alike.
        stop = fork.tokens[7]
        at = fork.tokens.index(stop)
        others = set(range(VOCAB)) - set(fork.tokens)
        session.release(later)
        stopped = session.add(PROMPTS[0], SamplingParams(20, logprobs=1, stop_ids=frozenset({stop, *others})))
        finish(session, 8)
        assert stopped.tokens == fork.tokens[: at + 1]
        check_row(runtime, stopped)
        source = session.add(PROMPTS[0], stopped.params)
        session.run(1)
        twin = session.fork(source)
        session.release(source)
        session.release(stopped)
        finish(session, 8)
        assert twin.tokens == stopped.tokens


@pytest.mark.parametrize("parts", [False, True], ids=["one_part", "two_parts"])
def test_handles_have_log_probabilities_of_each_request(device: torch.device, parts: bool) -> None:
    """Prompts between rows that decode: the batch's order is kept. A later step changes nothing of an earlier one's."""
    backends = {"backend": "torch_reference", "prefill_backend": "torch_reference"} if parts else {}
    rig = make_rig(device, model=LivelyModel(device), max_logprobs=3, **backends)
    old = [rig.start(i, [5 + i, 9]) for i in (4, 1)]
    rig.prefill(*old)
    new = [rig.start(2, [7, 8, 9, 10]), rig.start(6, [11, 12, 13])]
    sequences = [old[0], new[0], old[1], new[1]]
    asked = [{"logprobs": 3}, {"logprobs": 1, "logprob_token": 33}, {"logprobs": -1}, {"logprobs": 2}]
    rows = [rig.row(s, **o) for s, o in zip(sequences, asked, strict=True)]
    handle = rig.manager.replay(Batch.from_requests(rows))
    tokens = handle.tokens().tolist()
    poison_derived(rig.manager.buffers)
    rest = rig.manager.replay(Batch.from_requests([rig.row(rig.start(7, [1, 2, 3]), 2, logprobs=1)]))
    assert rest.logprobs() == [None], "a prompt that goes on samples nothing"
    found = handle.logprobs()
    assert found[2] is None
    for at, token in ((0, tokens[0]), (1, 33), (3, tokens[3])):
        check(found[at], rig.model.oracle(sequences[at].tokens), token, asked[at]["logprobs"])
    plain = rig.manager.replay(Batch.from_requests([rig.row(rig.start(5, [1]))]))
    assert plain.logprobs() == [None]


def test_handles_have_log_probabilities_of_accepted_drafts(device: torch.device) -> None:
    """Of two right drafts, of a wrong one, and of a request without drafts, which did not ask for any."""
    rig = make_rig(device, model=LivelyModel(device), max_logprobs=2, num_speculative_tokens=2)
    sequences, right = [rig.start(i, [5 + i, 9]) for i in range(3)], (2, 0, 0)
    rig.prefill(*sequences)
    rows, after = [], []
    for sequence, drafts, count in zip(sequences, (2, 1, 0), right, strict=True):
        want = greedy(rig.model, sequence.tokens, 3)
        after.append([sequence.tokens + want[:at] for at in range(1 + count)])
        sequence.tokens += want[:count] if count else [(want[0] + 1) % VOCAB] * drafts
        row = rig.row(sequence, logprobs=-1 if drafts == 0 else 2)
        rows.append(replace(row, sample=1 + drafts))
    handle = rig.manager.replay(Batch.from_requests(rows))
    tokens = handle.tokens()
    assert (tokens >= 0).sum(1).tolist() == [3, 1, 1]
    for position in range(3):
        for at, found in enumerate(handle.logprobs(position)):
            if at == 2 or position > right[at]:
                assert found is None
            else:
                check(found, rig.model.oracle(after[at][position]), int(tokens[at, position]), 2)
    with pytest.raises(ConfigError, match="position: expected an int from 0 to 2, got 3"):
        handle.logprobs(3)


def test_a_request_without_a_token_has_none(device: torch.device) -> None:
    rig = make_rig(device, max_logprobs=1)
    wrong = rig.row(rig.start(0, [VOCAB]), logprobs=1)
    fine = rig.row(rig.start(1, [3]), logprobs=1)
    handle = rig.manager.replay(Batch.from_requests([wrong, fine]))
    assert len(handle.faults) == 1
    first, second = handle.logprobs()
    assert first is None
    check(second, rig.model.oracle([3]), int(handle.tokens(raise_on_fault=False)[1]), 1)
    rig.manager.buffers.step_ring.fill_(-1)
    lost = rig.manager.replay(Batch.from_requests([fine]))
    if device.type == "cuda":
        torch.cuda.synchronize()
    rig.manager.buffers.step_ring.fill_(-1)
    with pytest.raises(ReplayError, match="the device did not report this step"):
        lost.logprobs()


def test_launches_have_log_probabilities_by_step(device: torch.device) -> None:
    runtime = runtime_of(device, loop_sizes=(4,), decode_sizes=(4,))
    with DecodeSession(runtime) as session:
        row = session.add(PROMPTS[0], SamplingParams(6, logprobs=1))
        (first,) = session.run(1)
        (launch,) = session.run(5)
        one, five = first.logprobs(), launch.logprobs()
        assert one is not None
        assert five is not None
        found = [one.at(0, 0), *(five.rows(step)[0] for step in range(5))]
        session.collect(wait=True)
        assert found == row.logprobs
        session.release(row)
        plain = session.add(PROMPTS[0], SamplingParams(2))
        assert [each.logprobs() for each in session.run(2)] == [None, None]
        session.collect(wait=True)
        assert plain.tokens == row.tokens[:2]


@pytest.mark.parametrize("swap_bytes", [1 << 20, 0], ids=["swapped", "computed_again"])
@pytest.mark.parametrize("num_pages", [60, 11], ids=["plenty", "scarce"])
def test_events_have_prompt_log_probabilities(device: torch.device, num_pages: int, swap_bytes: int) -> None:
    """Each once, though a sequence is preempted in the middle of its prompt, and others have computed its prefix."""
    settings = {"max_logprobs": 5, "launch_steps": 4}
    runtime = make_runtime(device, num_pages=num_pages, config=settings)
    runtime.capture()
    prompts = [PROMPTS[1][:13], PROMPTS[1], PROMPTS[1][:9], [3, 1, 4], PROMPTS[1] + [2, 6]]
    params = [
        SamplingParams(12), SamplingParams(12, prompt_logprobs=2), SamplingParams(12, logprobs=1, prompt_logprobs=0),
        SamplingParams(20, logprobs=2), SamplingParams(12, logprobs=0, prompt_logprobs=5),
    ]  # fmt: skip
    generator = TextGenerator(runtime, swap_bytes=swap_bytes)
    events = [list[Event]() for _ in prompts]
    for event in generator.generate(prompts, params):
        events[event.prompt].append(event)
    oracle = model_of(runtime).oracle
    for prompt, asked, found in zip(prompts, params, events, strict=True):
        first, *others = [event.prompt_logprobs for event in found]
        assert others == [None] * (len(found) - 1)
        if asked.prompt_logprobs is None:
            assert first is None
        else:
            assert first is not None
            assert len(first) == len(prompt) - 1
            for at, one in enumerate(first):
                check(one, oracle(prompt[: at + 1]), prompt[at + 1], asked.prompt_logprobs)
        tokens = [event.token for event in found]
        assert len(tokens) == asked.max_new_tokens
        for at, event in enumerate(found if asked.logprobs is not None else ()):
            check(event.logprob, oracle(prompt + tokens[:at]), tokens[at], asked.logprobs or 0)
    assert bool(generator.stats.preemptions) == (num_pages == 11)
    if num_pages == 11:
        assert bool(generator.stats.swapped_out_pages) == bool(swap_bytes)


def test_prompt_log_probabilities_do_not_change_tokens(device: torch.device) -> None:
    """Log-probabilities of a prompt, one token a step, leave no trace in what is sampled after it."""
    runtime = runtime_of(device)
    with DecodeSession(runtime) as session:
        plain = SamplingParams(12, temperature=30.0, seed=5)
        asked = SamplingParams(12, temperature=30.0, seed=5, logprobs=2, prompt_logprobs=1)
        rows = [session.add(PROMPTS[0], params) for params in (plain, asked)]
        finish(session, 4)
        assert rows[0].tokens == rows[1].tokens


def test_refused(device: torch.device) -> None:
    runtime = runtime_of(device, max_logprobs=2)
    with DecodeSession(runtime) as session:
        for params in (SamplingParams(logprobs=3), SamplingParams(prompt_logprobs=3)):
            with pytest.raises(
                UnsupportedError, match="params: needs a runtime with max_logprobs=3, but this runtime has "
            ):
                session.add([1], params)
    with pytest.raises(UnsupportedError, match="batch: needs a runtime with max_logprobs=9, but this runtime has "):
        runtime.replay(Batch(req_indices=[0], seq_lens=[1], tokens=[1], logprobs=[9]))
    with pytest.raises(
        UnsupportedError, match=r"params\[0\]: needs a runtime with max_logprobs=3, but this runtime has "
    ):
        next(TextGenerator(runtime).generate([[1]], SamplingParams(prompt_logprobs=3)))
    none = runtime_of(device, max_logprobs=None)
    with pytest.raises(UnsupportedError, match="batch: needs a runtime with max_logprobs=0, but this runtime has "):
        none.replay(Batch(req_indices=[0], seq_lens=[1], tokens=[1], logprobs=[0]))
    with pytest.raises(ConfigError, match=r"RuntimeConfig.max_logprobs: expected"):
        runtime_of(device, max_logprobs=1025)
