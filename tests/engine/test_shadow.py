"""Shadow steps: they change no state, and report tensors that a wrong graph computes differently."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.batch import Batch
from graphrt.config import RequestTensor
from graphrt.engine.undo import Copies
from graphrt.kernels.metadata.buffers import BufferKind
from graphrt.kernels.types import KVLayout
from graphrt.replay import ReplayManager
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.step import Step
from tests.support.layered import generate, prompts_of
from tests.support.steps import decode, prompt
from tests.support.toy import LivelyModel, Rig, ToyModel, captured, finish, greedy, make_rig


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def everything(manager: ReplayManager) -> list[torch.Tensor]:
    """Bits of the request state and of the cache."""
    cache = manager.kv_cache
    state = [tensor for _, tensor in manager.buffers.named(BufferKind.PERSISTENT, BufferKind.CARRIED)]
    return [t.contiguous().view(torch.uint8).clone() for t in (*state, *cache.k, *cache.v) if t.dim()]


def drive(rig: Rig) -> list[int]:
    """A prompt, decode steps, an empty step, and a second sequence with the same request index."""
    batches = [prompt(1, 2, 3), decode(4), decode(5), Batch.empty(), decode(6), prompt(9, 8, 7, 6, 5), decode(6)]
    return [int(token) for batch in batches for token in rig.manager.replay(batch).tokens()]


@pytest.mark.parametrize(
    ("layout", "kv_dtype", "backend"),
    [
        (KVLayout.NHD, torch.float32, "torch_reference"),
        (KVLayout.HND, torch.float8_e4m3fn, "torch_reference"),
        (KVLayout.NHD, torch.float8_e4m3fn, "triton"),
    ],
    ids=["NHD", "HND fp8", "triton fp8"],
)
def test_shadow_steps_change_no_results(
    device: torch.device, layout: KVLayout, kv_dtype: torch.dtype, backend: str
) -> None:
    """Tokens, request state and cache, in every bit, including a step with a fault."""
    backend = backend if device.type == "cpu" else "triton"  # the reference has no graph on CUDA
    found = []
    for every in (0, 1) if device.type == "cpu" and backend == "triton" else (0, 1, 2):  # interpreted: seconds each
        rig = make_rig(device, layout=layout, kv_dtype=kv_dtype, fill=0.0, backend=backend, shadow_every=every)
        tokens = drive(rig)
        handle = rig.manager.replay(prompt(1, 1 << 20))
        tokens += [len(handle.faults), *handle.tokens(raise_on_fault=False).tolist()]
        assert rig.manager.stats().shadow_steps == (8 // every if every else 0)
        assert not rig.manager.stats().shadow_differences
        found.append((tokens, everything(rig.manager)))
        rig.manager.close()
    for tokens, state in found[1:]:
        assert tokens == found[0][0]
        assert all(torch.equal(a, b) for a, b in zip(state, found[0][1], strict=True))


def test_sessions_and_generators_are_shadowed(device: torch.device) -> None:
    """A shadowed launch of many steps runs them one by one."""
    model = LivelyModel(device)
    runtime = captured(model, device, decode_sizes=(2, 4), loop_sizes=(4,), shadow_every=3, penalties=True)
    prompts = prompts_of((5, 9, 1))
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    with DecodeSession(runtime) as session:
        rows = [session.add(prompt, SamplingParams(max_new_tokens=12)) for prompt in prompts]
        finish(session, 4)
        assert [row.tokens for row in rows] == expected
    assert generate(runtime, prompts, [12] * 3) == expected
    stats = runtime.stats()
    assert stats.shadow_steps >= 2
    assert not stats.shadow_differences
    runtime.close()


def test_backends_that_plan_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both runs are planned."""
    device = torch.device("cpu")  # the reference has graphs on a CPU only
    planned: list[Batch] = []
    monkeypatch.setattr(TorchReferenceBackend, "plan_replay", lambda self, descriptor, batch: planned.append(batch))
    rig = make_rig(device, backend="torch_reference", shadow_every=1)
    tokens = drive(rig)
    assert len(planned) == 2 * 7
    planned.clear()
    assert tokens == drive(make_rig(device, backend="torch_reference"))
    assert len(planned) == 7


class CountingModel(ToyModel):
    """Counts the steps of each request in a request tensor."""

    def forward(self, step: Step) -> torch.Tensor:
        step.request_tensors["count"].index_add_(0, step.req_indices.clamp_min(0), (step.req_indices >= 0).float())
        return super().forward(step)


def test_request_tensors_are_updated_once(device: torch.device) -> None:
    for every in (0, 1):
        model = CountingModel(device, torch.float32)
        rig = make_rig(device, model=model, request_tensors=(RequestTensor("count"),), shadow_every=every)
        drive(rig)
        assert rig.manager.request_tables.tensors["count"][0].item() == 6
        rig.manager.close()


def test_a_frozen_number_is_reported_and_the_graph_s_token_is_returned(device: torch.device) -> None:
    scale = [1.0]
    model = ToyModel(device, torch.float32)
    forward = model.forward
    model.forward = lambda step: forward(step) * scale[0]  # type: ignore[method-assign]
    rig = make_rig(device, model=model, shadow_every=2)
    rig.manager.replay(prompt(1, 2)).tokens()
    scale[0] = -2.0
    token = int(rig.manager.replay(prompt(1, 2)).tokens()[0])
    exact = model.oracle([1, 2])
    assert token == int(exact.argmax()), "the token of the graph"
    with pytest.warns(RuntimeWarning, match=r"step 1, .* the graph differs from the eager step: logits\[0, 0\] is"):
        stats = rig.manager.stats()
    (difference,) = stats.shadow_differences
    first, *others = difference.tensors
    assert (first.name, first.index, first.numel) == ("logits", (0, 0), len(exact))
    assert first.graph == pytest.approx(float(exact[0]), abs=1e-5)
    assert first.eager == pytest.approx(-2 * float(exact[0]), abs=1e-5)
    assert "last_token" in [tensor.name for tensor in others]
    assert rig.manager.stats().shadow_differences == (difference,), "reported once"


@pytest.mark.parametrize("bug", ["nothing written", "stale positions", "another slot"])
def test_the_first_wrong_tensor_is_reported_first(device: torch.device, bug: str) -> None:
    """The model changes step metadata only while it is captured."""
    model = ToyModel(device, torch.float32)
    capturing = [True]

    class Wrong(ToyModel):
        def forward(self, step: Step) -> torch.Tensor:
            if capturing[0] and bug == "stale positions":
                step.positions.fill_(2)
            if capturing[0] and bug == "another slot":
                step.metadata.slot_mappings[0].add_(1)
            if capturing[0] and bug == "nothing written":
                step.metadata.slot_mappings[0].fill_(-1)
            return super().forward(step)

    wrong = Wrong(device, torch.float32)
    wrong.load_state_dict(model.state_dict())
    rig = make_rig(device, model=wrong, fill=0.0, shadow_every=2, mixed_sizes=(16,))
    capturing[0] = False
    rig.manager.replay(prompt(4, 5, 6)).tokens()
    rig.manager.replay(prompt(4, 5, 6)).tokens()
    with pytest.warns(RuntimeWarning, match="differs from the eager step"):
        rig.manager.close()
    (difference,) = rig.manager.stats().shadow_differences
    names = [tensor.name for tensor in difference.tensors]
    assert names[0] == ("positions" if bug == "stale positions" else "slot_mapping")
    assert "kv of group 0" in names or bug == "stale positions"


def test_an_error_of_the_eager_step_changes_no_state(device: torch.device) -> None:
    model = ToyModel(device, torch.float32)
    rig = make_rig(device, model=model, fill=0.0, shadow_every=2)
    token = int(rig.manager.replay(prompt(1, 2, 3)).tokens()[0])
    before = everything(rig.manager)
    forward = model.forward

    def failing(step: Step) -> torch.Tensor:
        forward(step)
        raise ZeroDivisionError

    model.forward = failing  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        rig.manager.replay(decode(4))
    assert all(torch.equal(a, b) for a, b in zip(before, everything(rig.manager), strict=True))
    model.forward = forward  # type: ignore[method-assign]
    assert rig.manager.replay(decode(4)).tokens().tolist() == [int(model.oracle([1, 2, 3, token]).argmax())]
    assert rig.manager.stats().shadow_steps == 1


def test_eager_steps_are_not_shadowed(device: torch.device) -> None:
    rig = make_rig(device, shadow_every=1, mixed_sizes=())
    rig.manager.replay(prompt(1, 2, 3)).tokens()
    rig.manager.replay(decode(4), eager=True).tokens()
    assert rig.manager.stats().shadow_steps == 0
    assert rig.manager.compare(decode(5)).equal


def test_copies_of_any_layout_and_dtype() -> None:
    whole = torch.arange(48).view(1, 6, 8)
    tensors = {
        "cut": whole[:, :, :5],
        "of_one": whole[:, :2].int().expand(1, 2, 8)[:1],
        "flags": torch.tensor([True, False]),
        "halves": torch.arange(3.0).half(),
        "empty": torch.zeros(3, 0),
        "floats": torch.arange(5.0),
    }
    before, copies = {name: t.clone() for name, t in tensors.items()}, Copies()
    for kept in (tensors, {"floats": tensors["floats"]}, tensors):  # another layout in between
        copies.take(kept)
        for tensor in kept.values():
            tensor.zero_()
        copies.restore(kept)
        assert all(torch.equal(tensor, before[name]) for name, tensor in kept.items())
        assert list(copies.views) == list(kept)


@pytest.mark.parametrize(("every", "slots"), [(0, 3), (256, 6)])
def test_shadow_steps_double_the_launches_in_flight(device: torch.device, every: int, slots: int) -> None:
    """So that eager steps do not stall the host."""
    rig = make_rig(device, capture=False, ring_depth=3, shadow_every=every)
    assert len(rig.manager.buffers.input_ring) == rig.manager.config.most_in_flight == slots
