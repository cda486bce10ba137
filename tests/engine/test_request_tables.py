"""Logit biases, token masks and request tensors, from the caller to sampled tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import SequenceBiasLogitsProcessor

from graphrt.batch import Batch
from graphrt.config import RequestTensor, RuntimeConfig
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError, UnsupportedError
from graphrt.kernels.numbers import REQUEST_DTYPES
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.step import Step
from tests.support.toy import VOCAB, LivelyModel, ToyModel, captured, finish, make_runtime

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [6]]
EVERYTHING = {"max_logit_bias": 8, "token_masks": True, "penalties": True}


def runtime_of(device: torch.device, model: object = None, num_pages: int = 60, **config: object) -> Runtime:
    return captured(model, device, num_pages, **(EVERYTHING | config))


def expected(model: ToyModel, prompt: list[int], count: int, process) -> list[int]:
    """Greedy tokens of the dense float64 oracle; `process` maps logits [vocab] and the output so far to logits."""
    output: list[int] = []
    for _ in range(count):
        output.append(int(process(model.oracle(prompt + output), output).argmax()))
    return output


def generated(runtime: Runtime, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in prompts]
    for event in TextGenerator(runtime).generate(prompts, params):
        outputs[event.prompt].append(event.token)
    return outputs


def biased(bias: dict[int, float]):
    processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]) if bias else None
    return lambda logits, _: processor(torch.tensor([[0]]), logits[None].clone())[0] if processor else logits


def words_of(allowed: set[int]) -> list[int]:
    return [sum(1 << t % 32 for t in allowed if t // 32 == word) for word in range(-(-VOCAB // 32))]


def masked(allowed: set[int]):
    forbidden = [token for token in range(VOCAB) if token not in allowed]
    return lambda logits, _: logits.index_fill(0, torch.tensor(forbidden, dtype=torch.long), -math.inf)


BIASES = [{5: 30.0, 60: -math.inf, 1: 25.0}, {}, {token: 40.0 + token for token in range(1, 9)}]


# -- logit bias


@pytest.mark.parametrize("loop_sizes", [(), (1, 2, 4)], ids=["launch_by_launch", "loop"])
def test_each_request_has_its_own_bias(device: torch.device, loop_sizes: tuple[int, ...]) -> None:
    """Compared with transformers; then indices are reused in another order, where requests without a bias have none."""
    runtime = runtime_of(device, loop_sizes=loop_sizes)
    model = runtime.manager._program.model
    want = [expected(model, prompt, 9, biased(bias)) for prompt, bias in zip(PROMPTS, BIASES, strict=True)]
    assert want[0] != expected(model, PROMPTS[0], 9, biased({})), "the bias shows"
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        with DecodeSession(runtime) as session:
            requests = [session.add(PROMPTS[i], SamplingParams(9, logit_bias=BIASES[i])) for i in order]
            finish(session)
            assert [request.tokens for request in requests] == [want[i] for i in order]
        params = [SamplingParams(9, logit_bias=BIASES[i]) for i in order]
        assert generated(runtime, [PROMPTS[i] for i in order], params) == [want[i] for i in order]


def test_biases_by_request_index_without_a_session(device: torch.device) -> None:
    runtime = runtime_of(device)
    tables = runtime.manager.request_tables
    logits = runtime.manager._program.model.oracle([3])
    ranked = logits.argsort(descending=True).tolist()

    def first_tokens() -> list[int]:
        batch = Batch(req_indices=[0, 3], seq_lens=[1, 1], tokens=[3, 3], page_indptr=[0, 1, 2], page_ids=[1, 2])
        return runtime.replay(batch).tokens().tolist()

    assert first_tokens() == [ranked[0]] * 2
    tables.set_logit_bias({3: {ranked[0]: -math.inf, ranked[2]: 1e6}})
    assert first_tokens() == [ranked[0], ranked[2]]
    tables.set_logit_bias({0: {ranked[0]: -1e6}, 3: None})
    assert first_tokens() == [ranked[1], ranked[0]]
    tables.set_logit_bias({0: {}})
    assert first_tokens() == [ranked[0]] * 2


def test_fork_copies_bias_and_mask(device: torch.device) -> None:
    runtime = runtime_of(device)
    allowed = set(range(0, VOCAB, 3))
    bias = {3: 20.0, 9: 19.0}
    both = lambda logits, output: masked(allowed)(biased(bias)(logits, output), output)  # noqa: E731
    want = expected(runtime.manager._program.model, PROMPTS[1], 12, both)
    with DecodeSession(runtime) as session:
        request = session.add(PROMPTS[1], SamplingParams(12, logit_bias=bias))
        session.set_token_mask(request, words_of(allowed))
        session.run(7)
        fork = session.fork(request)
        session.set_token_mask(request, None)  # the fork keeps what it got
        finish(session)
        assert fork.tokens == want
        assert request.tokens[:5] == want[:5]
        free = session.add([2], SamplingParams(3))
        finish(session)
        assert free.tokens == expected(runtime.manager._program.model, [2], 3, biased({}))


# -- token masks


def test_mask_applies_from_the_next_launch(device: torch.device) -> None:
    """The mask changes with every token; other requests have no mask, or a constant one."""
    runtime = runtime_of(device)
    model = runtime.manager._program.model
    stays = set(range(30, 50))
    per_token = [{t for t in range(VOCAB) if t % 5 == step % 5} for step in range(8)]
    with DecodeSession(runtime) as session:
        requests = [session.add(prompt, SamplingParams(8)) for prompt in PROMPTS]
        session.set_token_mask(requests[1], np.array(words_of(stays), np.uint32))
        while session.running:
            if not requests[0].finish_reason:
                mask = torch.tensor(words_of(per_token[len(requests[0].tokens)]), dtype=torch.int64)
                session.set_token_mask(requests[0], torch.where(mask >= 1 << 31, mask - (1 << 32), mask).int())
            session.run(1)
            session.collect(wait=True)
        assert requests[0].tokens == expected(model, PROMPTS[0], 8, lambda x, out: masked(per_token[len(out)])(x, out))
        assert requests[1].tokens == expected(model, PROMPTS[1], 8, masked(stays))
        assert requests[2].tokens == expected(model, PROMPTS[2], 8, biased({}))
        again = session.add(PROMPTS[0], SamplingParams(8))  # the fourth request index
        for request in requests[:2]:
            session.release(request)
        after = session.add(PROMPTS[1], SamplingParams(8))  # a request index that had a mask
        finish(session)
        for request, prompt in ((again, PROMPTS[0]), (after, PROMPTS[1])):
            assert request.tokens == expected(model, prompt, 8, biased({}))


# -- a request's own tensors


class Adapted(LivelyModel):
    """Adds a vector per adapter, and the bias vector of the request, to the logits."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.adapters = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)).to(device) * 40

    def forward(self, step: Step) -> torch.Tensor:
        own = step.request_state("adapter")
        assert own.shape == (step.descriptor.padded_reqs,)
        assert own.dtype == torch.int32
        return super().forward(step) + self.adapters[own.long()] + step.request_state("shift")


def test_model_reads_request_state(device: torch.device) -> None:
    tensors = (RequestTensor("adapter", dtype=torch.int32, initial=2), RequestTensor("shift", (VOCAB,)))
    model = Adapted(device)
    runtime = runtime_of(device, model=model, request_tensors=tensors)
    shift = torch.zeros(VOCAB)
    shift[11] = 500.0
    states = [{"adapter": 0}, None, {"adapter": 1, "shift": shift}]
    at = [0, 2, 1]

    def process(index: int):
        own = model.adapters[at[index]].double().cpu() + (shift if index == 2 else 0)
        return lambda logits, _: logits + own

    want = [expected(model, prompt, 7, process(i)) for i, prompt in enumerate(PROMPTS)]
    assert want[2] == [11] * 7
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        with DecodeSession(runtime) as session:
            requests = [session.add(PROMPTS[i], SamplingParams(7), state=states[i]) for i in order]
            session.run(4)
            fork = session.fork(requests[0])
            finish(session)
            assert [request.tokens for request in (*requests, fork)] == [want[i] for i in (*order, order[0])]
    runtime.manager.request_tables.set_state({2: {"adapter": 0}, 3: {}})
    batch = Batch(req_indices=[2, 3], seq_lens=[1, 1], tokens=[6, 6], page_indptr=[0, 1, 2], page_ids=[1, 2])
    tokens = runtime.replay(batch).tokens().tolist()
    assert tokens == [expected(model, [6], 1, process(i))[0] for i in (0, 1)]
    assert generated(runtime, [PROMPTS[1]] * 3, [SamplingParams(7)] * 3) == [want[1]] * 3, "no earlier state is left"
    runtime.manager.request_tables.set_state({3: {"adapter": 0}})
    runtime.manager.reset()
    assert runtime.manager.request_tables.tensors["adapter"].tolist() == [2] * 5


# -- what is refused


DISABLED = [
    (
        "tables.set_logit_bias({0: {3: 1.0}})",
        r"logit_bias\[0\]: needs a runtime with max_logit_bias=1, but this runtime has max_lo",
    ),
    (
        "tables.set_token_masks({0: [0, 0]})",
        r"token_masks\[0\]: needs a runtime with token_masks=True, but this runtime has",
    ),
    (
        "runtime.replay(Batch(req_indices=[0], seq_lens=[1], token_masks=[0]))",
        "batch: needs a runtime with token_masks=True",
    ),
    (
        "runtime.replay(Batch(req_indices=[0], seq_lens=[1], top_ps=[0.5]))",
        "batch: needs a runtime with truncation=True",
    ),
    ("session.add([1], SamplingParams(min_p=0.5))", "needs a runtime with truncation=True"),
    ("tables.record_prefix(0, [1, 2])", "record_prefix: needs a runtime with penalties=True"),
    ("session.add([1], SamplingParams(logit_bias={1: 1.0, 2: 1.0}))", "max_logit_bias=2"),
    ("session.add([1], state={'x': 1})", r"state: expected names of RuntimeConfig.request_tensors \(none\), got 'x'"),
    ("session.set_token_mask(request, [0, 0])", "words: needs a runtime with token_masks=True"),
]


def test_options_that_the_config_does_not_enable_raise() -> None:
    runtime = make_runtime(torch.device("cpu"), num_pages=20, config={"truncation": False})
    runtime.capture()
    with DecodeSession(runtime) as session:
        names = {"session": session, "request": session.add([1]), "tables": runtime.manager.request_tables}
        for call, text in DISABLED:
            with pytest.raises(UnsupportedError if "needs" in text or "max_" in text else ConfigError, match=text):
                eval(call, {**globals(), **names, "runtime": runtime})


WRONG = [
    ("tables.set_logit_bias({4: {1: 1.0}})", ConfigError, "req_index: expected"),
    ("tables.set_logit_bias({0: {61: 1.0}})", ConfigError, r"logit_bias\[0\]: expected"),
    ("tables.set_logit_bias({0: {1: math.nan}})", ConfigError, r"logit_bias\[0\]: expected a finite number"),
    (
        "tables.set_logit_bias({0: dict.fromkeys(range(9), 1.0)})",
        UnsupportedError,
        "max_logit_bias=9, but this runtime has",
    ),
    ("tables.set_token_masks({0: [0, 0, 0]})", ShapeError, r"token_masks\[0\]: expected .*2\]? words of 32 bits"),
    ("session.set_token_mask(request, [1])", ShapeError, r"words: expected \[2\] words of 32 bits on the host"),
    ("session.set_token_mask(gone, None)", ConfigError, "set_token_mask: the request was released"),
    ("session.add([1], SamplingParams(logit_bias={61: 1.0}))", ConfigError, "params.logit_bias: expected"),
    ("session.add([1], state={'own': [1.0]})", ShapeError, r"own: expected shape \[2\], got \[1\]"),
    ("session.add([1], state={'own': [1e300, 0]})", ShapeError, r"own: expected numbers of torch.float32, got \[1e"),
    ("session.add([1], state={'id': 1.5})", ShapeError, "id: expected numbers of torch.int32, got 1.5; pass numbers"),
    ("session.add([1], state={'id': 2**31})", ShapeError, "id: expected numbers of torch.int32, got 2147483648; pass"),
    ("session.add([1], state=[1])", ConfigError, r"state: expected Mapping, got \[1\]; pass a dict"),
    ("tables.set_state([{'own': [1, 2]}])", ConfigError, "states: expected Mapping"),
    ("tables.set_logit_bias({0: [(1, 2.0)]})", ConfigError, r"logit_bias\[0\]: expected Mapping"),
    ("tables.set_logit_bias({0: {1: 1e39}})", ConfigError, r"logit_bias\[0\]: expected a finite number"),
    ("tables.set_logit_bias(None)", ConfigError, "biases: expected Mapping, got None; pass a dict by request index"),
    ("tables.set_token_masks([[1, 2]])", ConfigError, "masks: expected Mapping"),
    (
        "session.set_token_mask(request, [1 << 32, 1])",
        ShapeError,
        r"words: expected words of 32 bits, got \[429",
    ),
    ("SamplingParams(logit_bias=[1])", ConfigError, "logit_bias: expected values by token"),
    ("SamplingParams(logit_bias={1: math.inf})", ConfigError, "logit_bias: expected a finite number"),
    ("Batch(req_indices=[0], seq_lens=[1], token_masks=[-2])", ShapeError, "batch.token_masks: expected mask numbers"),
    ("RequestTensor('a', shape=(-1,))", ConfigError, r"RequestTensor.shape\[0\]: expected"),
    ("RuntimeConfig(request_tensors=[RequestTensor('a')] * 2)", ConfigError, "two tensors have the same name"),
    ("RequestTensor('a', dtype=torch.int32, initial=1.5)", ConfigError, "initial: expected numbers of torch.int32"),
    ("RequestTensor('a', dtype=torch.int8, initial=300)", ConfigError, "initial: expected numbers of torch.int8"),
    ("RequestTensor('a', dtype=torch.float16, initial=70000)", ConfigError, "expected numbers of torch.float16"),
    ("RequestTensor('a', dtype=torch.uint16)", ConfigError, "dtype: expected a float, signed int, uint8 or bool dtype"),
    ("RequestTensor('a', dtype='int32')", ConfigError, "dtype: expected a float, signed int, .* got 'int32'"),
    ("RuntimeConfig(request_tensors=['a'])", ConfigError, "request_tensors: expected RequestTensor"),
    ("tables.record_prefix(0, [1] * 65)", CapacityError, "tokens: expected at most max_seq_len=64, got 65"),
    ("tables.record_prefix(0, [1], prompt_len=1 << 40)", ConfigError, "prompt_len: expected an int from 0 to 21474836"),
]


@pytest.mark.parametrize(("call", "error", "text"), WRONG, ids=[call for call, _, _ in WRONG])
def test_wrong_calls_raise_and_change_nothing(call: str, error: type[Exception], text: str) -> None:
    runtime = runtime_of(
        torch.device("cpu"), request_tensors=(RequestTensor("own", (2,)), RequestTensor("id", dtype=torch.int32))
    )
    tables = runtime.manager.request_tables
    with DecodeSession(runtime) as session:
        request, gone = session.add([5]), session.add([7])
        session.release(gone)
        before = {name: tensor.clone() for name, tensor in runtime.manager.buffers.named()}
        names = {"session": session, "request": request, "gone": gone, "tables": tables}
        with pytest.raises(error, match=text):
            eval(call, {**globals(), **names, "RuntimeConfig": RuntimeConfig})
        assert session.requests == (request,)
        assert all(torch.equal(before[name], tensor) for name, tensor in runtime.manager.buffers.named())


def told(step: Step) -> torch.Tensor:
    """A model that samples the token in the request tensor."""
    tokens = step.request_state("told")
    assert tokens.dtype == step.request_tensors["told"].dtype
    return (tokens.double()[:, None] == torch.arange(VOCAB, device=tokens.device)).float()


@pytest.mark.parametrize("dtype", REQUEST_DTYPES, ids=str)
def test_request_tensors_of_every_dtype(dtype: torch.dtype, device: torch.device) -> None:
    runtime = runtime_of(device, told, request_tensors=(RequestTensor("told", dtype=dtype),))
    with DecodeSession(runtime) as session:
        requests = [session.add([5], SamplingParams(3), state=state) for state in ({"told": 1}, {"told": 0}, None)]
        session.run(1)
        fork = session.fork(requests[0])
        finish(session)
        assert runtime.manager.request_tables.tensors["told"].dtype == dtype
        assert [request.tokens for request in (*requests, fork)] == [[token] * 3 for token in (1, 0, 0, 1)]


def test_updates_of_a_released_request_are_dropped() -> None:
    """Of two sessions, the first one has unwritten updates for an index that the second one uses now."""
    runtime = runtime_of(torch.device("cpu"))
    model = runtime.manager._program.model
    with DecodeSession(runtime) as first, DecodeSession(runtime) as second:
        gone = first.add([5], SamplingParams(4, logit_bias={7: 1000.0}))
        first.set_token_mask(gone, words_of({7}))
        req_index = gone.req_index
        first.release(gone)
        request = second.add([5], SamplingParams(6))
        assert request.req_index == req_index
        second.run(2)
        first.add([6], SamplingParams(1))
        first.run(1)
        finish(second)
        assert request.tokens == expected(model, [5], 6, lambda logits, _: logits)


def test_values_are_copied_when_a_request_is_added() -> None:
    """The caller may change its tensors and its dict later."""
    runtime = runtime_of(torch.device("cpu"), told, request_tensors=(RequestTensor("told", dtype=torch.int64),))
    with DecodeSession(runtime) as session:
        tensor, array, words = torch.tensor(9), np.array(9), torch.tensor(words_of({9}), dtype=torch.int32)
        requests = [session.add([5], SamplingParams(2), state={"told": value}) for value in (tensor, array)]
        params = SamplingParams(2, logit_bias={8: 100.0})
        requests.append(session.add([5], params, state={"told": tensor}))
        session.set_token_mask(requests[0], words)
        tensor.zero_()
        array[...] = 0
        words.zero_()
        params.logit_bias.clear()  # type: ignore[attr-defined]  # a Mapping that is a dict
        params.logit_bias.update({6: 1000.0, 7: np.nan})  # type: ignore[attr-defined]
        finish(session)
        assert [request.tokens for request in requests] == [[9, 9], [9, 9], [8, 8]]


def test_cached_prefix_is_counted_for_penalties(device: torch.device) -> None:
    """The pages of a sequence without penalties serve a sequence with penalties."""
    runtime = runtime_of(device)
    model = runtime.manager._program.model
    prompt = [32, 1, 4, 1, 5, 9, 2, 6]  # the step would sample its first token if that were not counted
    first = {"seq_lens": [8], "query_lens": [8], "tokens": prompt, "page_indptr": [0, 2], "page_ids": [1, 2]}
    runtime.replay(Batch(req_indices=[0], **first)).tokens()
    logits = model.oracle([*prompt, 3])
    logits[[3, *prompt]] = -math.inf
    tables = runtime.manager.request_tables
    tables.record_prefix(0, [1] * 64, prompt_len=2**31 - 1)
    tables.record_prefix(2, [])
    tables.record_prefix(1, prompt)
    batch = Batch(
        req_indices=[1], seq_lens=[9], tokens=[3], page_indptr=[0, 3], page_ids=[1, 2, 3], presence_penalties=[1e9]
    )
    assert runtime.replay(batch).tokens().tolist() == [int(logits.argmax())]
