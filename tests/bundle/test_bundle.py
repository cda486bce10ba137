"""Replay bundles: launches of every kind run again with the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.batch import Batch
from graphrt.bundle.bundle import Bundle
from graphrt.config import RequestTensor
from graphrt.engine.handle import Launch
from graphrt.kernels.errors import CapacityError, ConfigError, ReplayError
from graphrt.kernels.types import KVLayout
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.spec import AttentionSpec, KVCacheSpec
from tests.support.layered import LayeredModel, build
from tests.support.steps import decode, prompt
from tests.support.toy import (
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    VOCAB,
    LivelyModel,
    ToyModel,
    finish,
    make_rig,
    make_runtime,
)

CPU = torch.device("cpu")


def saved(bundle: Bundle, tmp_path: Path) -> Bundle:
    path = tmp_path / "steps.bundle"
    bundle.save(path)
    return Bundle.load(path)


def check_all(bundle: Bundle, model: Any, device: torch.device = CPU) -> None:
    """Every launch has the recorded results bit by bit, in any order, and when it runs twice."""
    indices = [*range(len(bundle.launches)), 0]
    with bundle.open(model, device=device) as replays:
        for index in reversed(indices):
            found = replays.run(index)
            assert found.difference is None, str(found)
            assert found.tokens_equal, str(found)
            assert found.logits_distance == 0, str(found)
            assert torch.equal(found.logits.cpu(), bundle.launches[index].logits)
            assert "equal bit by bit" in str(found)


@pytest.mark.parametrize(
    ("layout", "kv_dtype", "backend"),
    [
        (KVLayout.NHD, torch.float32, "torch_reference"),
        (KVLayout.HND, torch.float8_e4m3fn, "torch_reference"),
        (KVLayout.NHD, torch.float32, "triton"),
    ],
    ids=["NHD", "HND fp8", "triton"],
)
def test_steps_run_again(
    device: torch.device, tmp_path: Path, layout: KVLayout, kv_dtype: torch.dtype, backend: str
) -> None:
    backend = backend if device.type == "cpu" else "triton"  # the reference has no graph on CUDA
    rig = make_rig(device, layout=layout, kv_dtype=kv_dtype, backend=backend)
    for name, scale in rig.manager.kv_cache.named_tensors():
        if "scale" in name:
            scale.fill_(0.5)
    rig.manager.replay(prompt(1, 2, 3)).tokens()
    recording = rig.manager.record(4)
    tokens = [int(rig.manager.replay(b).tokens()[0]) for b in (decode(4), decode(5), prompt(7, 8, pages=(70, 3)))]
    assert not recording.done
    tokens += rig.manager.replay(decode(3, pages=(70, 3), temperatures=[0.7], seeds=[5])).tokens().tolist()
    assert recording.done
    rig.manager.replay(decode(4, pages=(70, 3))).tokens()
    bundle = Bundle.of(recording, model={"made by": "a test"})
    assert [launch.tokens.tolist() for launch in bundle.launches] == [[[token]] for token in tokens]
    rig.manager.close()
    loaded = saved(bundle, tmp_path)
    assert (loaded.model, loaded.vocab_size, loaded.groups, loaded.config) == (
        {"made by": "a test"}, VOCAB, bundle.groups, bundle.config,
    )  # fmt: skip
    check_all(loaded, rig.model, device)


@pytest.mark.parametrize("planned", [False, True], ids=["", "planned"])
def test_sessions_are_recorded(planned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of many steps with deltas, penalties, biases, min_tokens and request tensors."""
    if planned:
        monkeypatch.setattr(TorchReferenceBackend, "plan_replay", lambda self, descriptor, batch: batch.seq_lens.sum())
    model = LivelyModel(CPU)
    config = {
        "penalties": True, "max_logit_bias": 4, "request_tensors": (RequestTensor("adapter", (3,)),),
        "loop_sizes": (4,), "decode_sizes": (2, 4), "backend": "torch_reference", "max_logprobs": 2,
    }  # fmt: skip
    runtime = make_runtime(CPU, model=model, config=config, num_pages=60)
    runtime.capture()
    params = SamplingParams(
        max_new_tokens=20, temperature=0.8, seed=3, repetition_penalty=1.3, logit_bias={4: 2.0}, logprobs=1,
        stop_ids={7}, min_tokens=9,
    )  # fmt: skip
    with DecodeSession(runtime) as session:
        session.add([1, 2, 3, 4, 5], params, state={"adapter": [1.0, 2.0, 3.0]})
        session.add([9, 8], params)
        recording = runtime.manager.record(8)
        finish(session)
    bundle = Bundle.of(recording)
    runtime.close()
    kinds = {(launch.words.is_delta, launch.words.steps) for launch in bundle.launches}
    assert kinds >= ({(False, 1)} if planned else {(False, 1), (True, 3)})
    check_all(saved(bundle, tmp_path), model)


def test_launches_as_large_as_the_config_allows(tmp_path: Path) -> None:
    """Eight prompts that fill max_num_tokens: their inputs and stop conditions fill the slot of the input ring."""
    model = LivelyModel(CPU)
    config = {"max_num_reqs": 8, "max_num_tokens": 64, "decode_sizes": (8,), "mixed_sizes": (64,)}
    spec = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 16, dtype=torch.float32)
    runtime = make_runtime(CPU, model=model, config=config, num_pages=40, kv_spec=spec)
    runtime.capture()
    recording = runtime.manager.record(2)
    with DecodeSession(runtime) as session:
        rows = [session.add(list(range(at, at + 8)), SamplingParams(4, stop_ids={1, 2})) for at in range(8)]
        session.run(2)
        session.collect(wait=True)
        first = [row.tokens[0] for row in rows]
    assert [launch.words.num_tokens for launch in recording.launches] == [64, 0]
    bundle = saved(Bundle.of(recording), tmp_path)
    runtime.close()
    assert bundle.launches[0].tokens.tolist() == [first]
    check_all(bundle, model)


@pytest.mark.parametrize("how", ["lengths", "stop tokens"])
def test_loops_that_end_early(tmp_path: Path, how: str) -> None:
    """A replay runs as many steps as the recorded loop did, and compares the logits of the same last step."""
    model = LivelyModel(CPU)
    runtime = make_runtime(CPU, model=model, config={"loop_sizes": (2,), "decode_sizes": (2,)}, num_pages=60)
    runtime.capture()
    prompts = [[3, 1, 4], [9, 8]]
    with DecodeSession(runtime) as session:
        want = [session.add(prompt, SamplingParams(20)) for prompt in prompts]
        session.run(21)
        session.collect(wait=True)
    with DecodeSession(runtime) as session:
        for prompt, row in zip(prompts, want, strict=True):
            length = 4 if how == "lengths" else 20
            session.add(prompt, SamplingParams(length, stop_ids={row.tokens[5]} if how == "stop tokens" else ()))
        session.run(1)
        recording = runtime.manager.record(1)
        session.run(16)
        session.collect(wait=True)
    launch = recording.launches[0]
    assert len(launch.tokens) < 16
    assert launch.words.steps == len(launch.tokens)
    bundle = saved(Bundle.of(recording), tmp_path)
    runtime.close()
    check_all(bundle, model)


def test_groups_and_windows(tmp_path: Path) -> None:
    """Pages of a pool of several groups are renumbered; those outside of a window are not kept."""
    specs = [AttentionSpec(4, 2, 16, torch.float32, sliding_window=window) for window in (8, None)]
    groups = [
        KVCacheSpec(1, 2, 16, 4, dtype=torch.float32, layers=(0,), sliding_window=8),
        KVCacheSpec(1, 2, 16, 4, dtype=torch.float32, layers=(1,)),
    ]
    model, runtime = build(specs, groups, 60, CPU)
    with DecodeSession(runtime) as session:
        session.add(list(range(1, 12)), SamplingParams(max_new_tokens=20))
        session.add([5, 6, 7], SamplingParams(max_new_tokens=20))
        for _ in range(10):
            session.run(1)
            session.collect(wait=True)
        recording = runtime.manager.record(2)
        session.run(2)
        session.run(1)
        session.collect(wait=True)
    bundle = Bundle.of(recording)
    windowed, full = bundle.launches[1].page_ids
    assert len(windowed) < len(full)
    assert not set(windowed) & set(full)
    check_all(saved(bundle, tmp_path), LayeredModel(specs, CPU))
    runtime.close()
    assert isinstance(model, LayeredModel)


def test_page_tables_of_the_caller(tmp_path: Path) -> None:
    tables = torch.zeros(4, 16, dtype=torch.int32)
    tables[0, :3], tables[2, :2] = torch.tensor([30, 4, 17]), torch.tensor([8, 9])
    rig = make_rig(CPU, max_num_reqs=4, decode_sizes=(2, 4), mixed_sizes=(16,), options={"page_tables": tables})
    model, manager = rig.model, rig.manager
    manager.replay(Batch(req_indices=[0, 2], seq_lens=[4, 2], query_lens=[4, 2], tokens=[1, 2, 3, 4, 5, 6])).tokens()
    recording = manager.record()
    token = manager.replay(Batch(req_indices=[2, 0], seq_lens=[3, 5])).tokens()
    exact = model.oracle([1, 2, 3, 4, int(model.oracle([1, 2, 3, 4]).argmax())])
    assert int(token[1]) == int(exact.argmax())
    bundle = saved(Bundle.of(recording), tmp_path)
    manager.close()
    check_all(bundle, model)


def test_faults_are_recorded(tmp_path: Path) -> None:
    """A page outside of the cache, the null page and a token outside of the vocabulary fault again."""
    rig = make_rig(CPU)
    recording = rig.manager.record(3)
    for batch in (prompt(1, 2, pages=(5, 999)), prompt(1, pages=(0,)), prompt(1, VOCAB)):
        handle = rig.manager.replay(batch)
        assert len(handle.faults) == 1
    bundle = saved(Bundle.of(recording), tmp_path)
    rig.manager.close()
    with bundle.open(rig.model, device=CPU) as replays:
        assert all(replays.run(index).tokens_equal for index in range(3))
        codes = []
        for launch in bundle.launches:
            found: Launch = replays.manager.replay_words(launch.words, launch.descriptor)
            codes.append(found.faults[0].code.name)
        assert codes == ["PAGE_OUT_OF_RANGE", "PAGE_OUT_OF_RANGE", "TOKEN_OUT_OF_RANGE"]


def test_a_wrong_graph_is_reported(tmp_path: Path) -> None:
    """The model reads a Python number, which the graph of the bundle's manager freezes. Each launch is reported."""
    scale = [1.0]
    model = ToyModel(CPU, torch.float32)
    forward = model.forward
    model.forward = lambda step: forward(step) * scale[0]  # type: ignore[method-assign]
    rig = make_rig(CPU, model=model)
    recording = rig.manager.record()
    rig.manager.replay(prompt(1, 2)).tokens()
    bundle = saved(Bundle.of(recording), tmp_path)
    with bundle.open(model, device=CPU) as replays:
        scale[0] = 0.5
        assert all(replays.run().difference is not None for _ in range(17)), "more than stats keep"
        found = replays.run()
        scale[0] = 1.0
        assert replays.run().difference is None
        scale[0] = 0.5
    assert found.difference is not None
    assert found.difference.tensors[0].name == "logits"
    assert found.tokens_equal
    assert found.logits_distance == 0
    with bundle.open(model, device=CPU) as replays:
        found = replays.run()
    assert found.difference is None
    assert found.logits_distance == pytest.approx(0.5 * float(bundle.launches[0].logits.abs().max()))


def test_a_launch_larger_than_max_bytes_is_not_run(device: torch.device) -> None:
    rig = make_rig(device, fill=0.0)
    stopped = rig.manager.record(1, max_bytes=1000)
    with pytest.raises(CapacityError, match="record: expected at most max_bytes=1000 for 1 launches, got"):
        rig.manager.replay(prompt(1, 2, 3))
    assert stopped.done
    recording = rig.manager.record(1)
    assert rig.manager.replay(prompt(1, 2, 3)).tokens().tolist() == [int(rig.model.oracle([1, 2, 3]).argmax())]
    assert recording.done
    with pytest.raises(ConfigError, match="recording: has no launches"):
        Bundle.of(rig.manager.record())
    with pytest.raises(ConfigError, match="launches: expected"):
        rig.manager.record(0)


def test_one_recording_at_a_time() -> None:
    rig = make_rig(CPU)
    first = rig.manager.record(3)
    rig.manager.replay(prompt(1, 2)).tokens()
    with pytest.raises(ReplayError, match="record: a recording is in progress and has 1 of 3 launches"):
        rig.manager.record()
    rig.manager.replay(decode(3)).tokens()
    assert (len(first.launches), first.done) == (2, False)
    first.stop()
    first.stop()
    rig.manager.replay(decode(4)).tokens()
    assert (len(first.launches), first.done) == (2, True)
    second = rig.manager.record()
    rig.manager.replay(decode(5)).tokens()
    rig.manager.replay(decode(6)).tokens()
    assert (len(first.launches), len(second.launches), second.done) == (2, 1, True)
    rig.manager.record().stop()  # the second one is over by itself
    check_all(Bundle.of(first), rig.model)
    third = rig.manager.record(2)
    third.stop()
    fourth = rig.manager.record()  # a stopped recording may be followed at once
    rig.manager.replay(decode(7)).tokens()
    assert (len(third.launches), len(fourth.launches)) == (0, 1)
