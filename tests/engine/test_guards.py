"""Checks after capture: of the first step, later steps and debug mode, late kernels, memory growth."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.batch import Batch
from graphrt.capture import guard
from graphrt.capture.op_trace import OpTrace, OpTraceRecorder
from graphrt.config import RequestTensor
from graphrt.engine import undo
from graphrt.kernels.errors import CaptureError, ReplayError
from graphrt.step import Step
from tests.engine.test_shadow import everything
from tests.support.steps import assert_works
from tests.support.toy import VOCAB, Rig, ToyModel, make_rig

CPU = torch.device("cpu")
BATCH = {"req_indices": [0, 1], "seq_lens": [1, 1], "tokens": [3, 4], "page_indptr": [0, 1, 2], "page_ids": [5, 6]}


def step(rig: Rig, **options: object) -> None:
    rig.manager.replay(Batch(**BATCH), **options).tokens()


def replace_buffer(rig: Rig, name: str) -> None:
    buffers = rig.manager.buffers
    object.__setattr__(buffers, name, getattr(buffers, name).clone())


# A change to a captured manager, and the name in the error.
CHANGES: dict[str, tuple[Callable[[Rig], object], str]] = {
    "weight-moved": (lambda rig: setattr(rig.model.embed, "data", rig.model.embed.data.clone()), "embed"),
    "weight-shrunk": (lambda rig: rig.model.embed.resize_(60, 64), "embed"),
    "weight-strides": (lambda rig: rig.model.where.t_(), "where"),
    "weight-set": (lambda rig: rig.model.out[1].set_(torch.zeros(64, 64)), r"out\.1"),
    "weight-replaced": (
        lambda rig: setattr(rig.model, "where", torch.nn.Parameter(rig.model.where.detach().clone())),
        "where",
    ),
    "weight-gone": (lambda rig: delattr(rig.model, "where"), "where"),
    "cache-moved": (lambda rig: setattr(rig.manager.kv_cache.k[1], "data", torch.zeros(80, 4, 2, 16)), r"kv_cache.*"),
    "buffer-replaced": (lambda rig: replace_buffer(rig, "seq_lens"), "static buffer seq_lens"),
    "buffer-moved": (
        lambda rig: setattr(rig.manager.buffers.page_table, "data", rig.manager.buffers.page_table.data.clone()),
        "static buffer page_table",
    ),
    "buffer-resized": (lambda rig: rig.manager.buffers.positions.resize_(8), "static buffer positions"),
    "request-tensor-replaced": (
        lambda rig: rig.manager.request_tables.tensors.update(adapter=torch.zeros(9, dtype=torch.int32)),
        "request tensor adapter",
    ),
    "input_ring-replaced": (lambda rig: replace_buffer(rig, "input_ring"), "static buffer input_ring"),
}
ADAPTER = (RequestTensor("adapter", (), torch.int32),)
SEEN_BY_LATER_STEPS = ("weight-moved", "weight-set", "weight-replaced", "weight-gone", "cache-moved")


def find(change: Callable[[Rig], object], text: str, rig: Rig) -> None:
    change(rig)
    for _ in range(2):
        with pytest.raises(
            ReplayError, match=f"^{text}: (expected .* as captured, got|the tensor captured at .* is gone)"
        ):
            rig.manager.replay(Batch(**BATCH))


@pytest.mark.parametrize("when", ["first step", "first step without check_weights", "debug mode"])
@pytest.mark.parametrize("case", CHANGES)
def test_everything_is_checked(monkeypatch: pytest.MonkeyPatch, case: str, when: str) -> None:
    """In the first step, and in every step in debug mode."""
    monkeypatch.setenv("GRAPHRT_DEBUG", str(int(when == "debug mode")))
    rig = make_rig(CPU, check_weights=when == "first step", request_tensors=ADAPTER)
    monkeypatch.delenv("GRAPHRT_DEBUG")
    for _ in range(3 if when == "debug mode" else 0):
        step(rig)
    find(*CHANGES[case], rig)


@pytest.mark.parametrize("case", CHANGES)
def test_later_steps_check_weights_and_cache(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(guard, "_NAMES_A_TURN", 64)
    rig = make_rig(CPU, request_tensors=ADAPTER)
    step(rig)
    change, text = CHANGES[case]
    change(rig)
    turns = range(rig.manager._guards.num_turns)
    if case in SEEN_BY_LATER_STEPS:
        with pytest.raises(ReplayError, match=f"^{text}: "):
            _ = [step(rig) for _ in turns]
    else:
        _ = [step(rig) for _ in turns]  # the op trace keeps using the captured memory


class Headed(torch.nn.Module):
    """A model with many modules, and a norm and a shift of the logits."""

    def __init__(self, model: ToyModel) -> None:
        super().__init__()
        self.of, self.many = model, torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(40))
        self.head = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(VOCAB)})
        self.register_buffer("shift", torch.zeros(VOCAB))

    def forward(self, step: Step) -> torch.Tensor:
        return self.head["norm"](self.of(step)) + self.shift


REPLACED: dict[str, tuple[Callable[[Headed], object], str]] = {
    "weight": (
        lambda model: setattr(model.head["norm"], "weight", torch.nn.Parameter(-model.head["norm"].weight.detach())),
        "head.norm.weight: expected at address",
    ),
    "module": (
        lambda model: model.head.update({"norm": torch.nn.LayerNorm(VOCAB)}),
        "head.norm.weight: expected at",
    ),
    "buffer": (lambda model: setattr(model, "shift", model.shift + 1), "shift: expected at address"),
    "state": (
        lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True),
        ": expected at address",
    ),
    "deleted": (
        lambda model: delattr(model.head["norm"], "weight"),
        "head.norm.weight: the tensor .* is gone",
    ),
}


@pytest.mark.parametrize("case", REPLACED)
def test_replaced_parameters_and_buffers_are_found_while_steps_run(case: str) -> None:
    """The old tensor has not moved, and the graph would keep reading it."""
    change, name = REPLACED[case]
    model = Headed(ToyModel(CPU, torch.float32))
    manager = make_rig(CPU, model=model).manager
    first = manager.replay(Batch(**BATCH)).tokens().tolist()
    norm = model.head["norm"]
    norm.weight = torch.nn.Parameter(norm.weight.detach())  # a new object with the same memory
    for _ in range(60):
        assert manager.replay(Batch(**BATCH)).tokens().tolist() == first
    assert not manager._guards._names.changed(), "the new object is known: later steps check no more than before"
    change(model)
    with pytest.raises(ReplayError, match=name):
        _ = [manager.replay(Batch(**BATCH)).tokens() for _ in range(60)]
    with pytest.raises(ReplayError, match=name):
        manager.replay(Batch(**BATCH))


def test_a_moved_weight_raises_and_in_place_loading_does_not(device: torch.device) -> None:
    rig = make_rig(device)
    rig.model.embed.data.copy_(rig.model.embed.data * 0.5)
    assert_works(rig)
    rig.model.embed.data = rig.model.embed.data.clone()
    before = everything(rig.manager)
    with pytest.raises(ReplayError, match="embed: expected at address 0x"):
        step(rig)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(rig.manager), strict=True))


def test_a_moved_weight_is_found_within_one_round_of_checks(device: torch.device) -> None:
    weights = {f"w{index}": torch.ones(1, device=device) for index in range(100)}
    manager = make_rig(device, options={"weights": weights.items()}).manager
    manager.replay(Batch(**BATCH)).tokens()
    turns = manager._guards.num_turns
    assert turns == 104, "100 weights and 4 tensors of the cache"
    for name in ("w0", "w50", "w99"):
        kept, weights[name].data = weights[name].data, torch.zeros(1, device=device)
        with pytest.raises(ReplayError, match=f"{name}: expected at address 0x"):
            _ = [manager.replay(Batch(**BATCH)) for _ in range(turns)]
        weights[name].data = kept
        manager.replay(Batch(**BATCH)).tokens()


class WritingModel(ToyModel):
    """Writes a parameter and a buffer in steps of one request."""

    def __init__(self) -> None:
        super().__init__(CPU, torch.float32)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, step: Step) -> torch.Tensor:
        self.steps.add_(1)
        if len(step.logits_indices) == 1:
            self.out[1][0].mul_(2)
        return super().forward(step)


def test_a_step_that_writes_a_parameter_is_not_captured() -> None:
    """Kernels may load parameters before the write has finished. Eager steps run in order."""
    sizes = {"decode_sizes": (1, 2), "mixed_sizes": ()}
    error = r"out\.1: the step writes this parameter, .*keep what a step writes in a buffer"
    with pytest.raises(CaptureError, match=f"^{error}"):
        make_rig(CPU, model=WritingModel(), **sizes)
    rig = make_rig(CPU, model=WritingModel(), lazy_capture=True, **sizes)
    single = {"req_indices": [0], "seq_lens": [1], "tokens": [3], "page_indptr": [0, 1], "page_ids": [5]}
    handle = rig.manager.replay(Batch(**single))
    assert re.search(error, handle.why_eager)
    assert handle.tokens().tolist() == [int(rig.model.oracle([3]).argmax())]
    step(rig)


def test_names_are_not_watched_without_check_weights() -> None:
    """check_weights() finds a replaced parameter."""
    rig = make_rig(CPU, check_weights=False)
    step(rig)
    rig.manager.check_weights(rig.model)
    rig.model.embed = torch.nn.Parameter(rig.model.embed.detach().clone())
    with pytest.raises(ReplayError, match="embed: expected at address"):
        rig.manager.check_weights(rig.model)
    for _ in range(4):
        rig.manager.replay(Batch(**BATCH)).tokens()


def test_only_weights_that_the_caller_named_are_checked() -> None:
    """The model may replace other parameters."""
    model = ToyModel(CPU, torch.float32)
    rig = make_rig(CPU, model=model, options={"weights": [("mine", model.embed)]})
    model.where = torch.nn.Parameter(model.where.detach().clone())
    step(rig)
    model.embed.data = model.embed.data.clone()
    with pytest.raises(ReplayError, match=r"^mine: expected at address"):
        rig.manager.replay(Batch(**BATCH))


def test_a_workspace_that_the_backend_replaced_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend might allocate a larger one for an eager step, while the graphs keep using the old one."""
    workspace = {"partial_out": torch.zeros(8)}
    monkeypatch.setattr(TorchReferenceBackend, "tensors", lambda self: workspace)
    monkeypatch.setenv("GRAPHRT_DEBUG", "1")
    rig = make_rig(CPU, backend="torch_reference")
    step(rig)
    workspace["partial_out"] = torch.zeros(16)
    with pytest.raises(ReplayError, match=r"^backend torch_reference: partial_out: expected .* \[8\] .* got .* \[16\]"):
        step(rig)


# -- late kernels and memory growth


def load(name: str) -> None:
    """Call the hook as Triton does for the first launch of a kernel."""
    triton.knobs.runtime.kernel_load_end_hook(None, None, name, {}, "digest")


class LoadingModel(ToyModel):
    """Loads `kernel` in each forward pass."""

    kernel = ""

    def forward(self, step: Step) -> torch.Tensor:
        if self.kernel:
            load(self.kernel)
        return super().forward(step)


def loading_graphs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make launches of graphs load a kernel, as a backend might that plans with a kernel of its own."""
    launch = OpTrace.launch
    monkeypatch.setattr(OpTrace, "launch", lambda self: (load(name), launch(self))[1])


@pytest.mark.parametrize("debug", ["0", "1"])
def test_late_kernels_are_counted_by_what_the_thread_was_doing(monkeypatch: pytest.MonkeyPatch, debug: str) -> None:
    monkeypatch.setenv("GRAPHRT_DEBUG", debug)
    model = LoadingModel(CPU, torch.float32)
    model.kernel = "early"
    rig = make_rig(CPU, model=model, shadow_every=3)
    stats = rig.manager.stats()
    assert stats.late_kernels == {}, "kernels loaded by capture() are not late"
    model.kernel = "late"
    step(rig)
    assert stats.late_kernels == {}, "a graph does not run the model's Python code"
    step(rig, eager=True)
    assert stats.late_kernels == {"late (outside the graphs)": 1}
    step(rig)  # the third launch is a shadow step, which also runs eagerly
    assert stats.shadow_steps == 1
    assert stats.late_kernels == {"late (outside the graphs)": 2}
    rig.manager.compare(Batch(**BATCH))
    rig.manager.between_steps(lambda buffers: load("table"))
    load("mine")
    thread = threading.Thread(target=load, args=["elsewhere"])
    thread.start()
    thread.join()
    expected = {"late (outside the graphs)": 3, "table (outside the graphs)": 1, "mine (between calls)": 1}
    assert rig.manager.stats().late_kernels == expected
    rig.manager.close()
    load("mine")
    assert rig.manager.stats().late_kernels == expected


def test_kernels_of_the_thread_of_the_last_call_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps may be submitted from any thread; a kernel on another thread does not delay the next step."""
    rig = make_rig(CPU)
    thread = threading.Thread(target=step, args=[rig])
    thread.start()
    thread.join()
    load("mine")
    assert rig.manager.stats().late_kernels == {}
    step(rig)
    load("mine")
    assert rig.manager.stats().late_kernels == {"mine (between calls)": 1}


def test_kernels_of_a_shadow_step_do_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shadow step copies state with kernels that no graph contains."""
    gather = undo._SlotPacker.gather
    monkeypatch.setattr(undo._SlotPacker, "gather", lambda self, slots: (load("pack"), gather(self, slots))[1])
    monkeypatch.setenv("GRAPHRT_DEBUG", "1")
    rig = make_rig(CPU, shadow_every=1)
    step(rig)
    assert set(rig.manager.stats().late_kernels) == {"pack (outside the graphs)"}


@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_kernel_in_a_graph_step_is_counted_and_raises_in_debug_mode(
    monkeypatch: pytest.MonkeyPatch, debug: str
) -> None:
    """Also after an eager step. The next step is correct."""
    monkeypatch.setenv("GRAPHRT_DEBUG", debug)
    rig = make_rig(CPU)
    step(rig, eager=True)
    with monkeypatch.context() as patch:
        loading_graphs(patch, "plan")
        for _ in range(2):
            if debug == "1":
                with pytest.raises(ReplayError, match=r"^plan: this kernel .* a graph, after capture\(\)"):
                    step(rig)
            else:
                step(rig)
    tokens = rig.manager.replay(Batch(**BATCH)).tokens().tolist()
    assert tokens == [int(rig.model.oracle([token]).argmax()) for token in BATCH["tokens"]]
    assert rig.manager.stats().late_kernels == {"plan (in a graph step)": 2}


@pytest.mark.parametrize("debug", ["0", "1"])
def test_pool_growth_is_counted_and_raises_in_debug_mode(monkeypatch: pytest.MonkeyPatch, debug: str) -> None:
    monkeypatch.setenv("GRAPHRT_DEBUG", debug)
    held = [1000]
    monkeypatch.setattr(OpTraceRecorder, "pool_bytes", lambda self: held[0])
    rig = make_rig(CPU)
    step(rig)
    assert rig.manager.stats().late_bytes == {}
    held[0] = 3000
    assert rig.manager.stats().late_bytes == {"graph pool": 2000}
    if debug == "1":
        with pytest.raises(ReplayError, match=r"^graph pool: expected 1000 bytes as after capture\(\), got 3000"):
            rig.manager.replay(Batch(**BATCH))
    else:
        step(rig)
    rig.manager.close()
    assert rig.manager.stats().late_bytes == {"graph pool": 2000}


def test_a_dropped_manager_removes_its_hooks_and_frees_its_weights() -> None:
    gc.collect()
    before = [*triton.knobs.runtime.kernel_load_end_hook.calls]
    rig = make_rig(CPU)
    step(rig)
    assert len(triton.knobs.runtime.kernel_load_end_hook.calls) == len(before) + 1
    watched = weakref.ref(rig.model.embed)
    del rig
    gc.collect()
    assert watched() is None
    assert triton.knobs.runtime.kernel_load_end_hook.calls == before


@pytest.mark.gpu
def test_graph_steps_on_a_gpu_load_no_kernel_and_do_not_grow_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """In debug mode, with steps of all sizes."""
    monkeypatch.setenv("GRAPHRT_DEBUG", "1")
    rig = make_rig(torch.device("cuda"))
    assert rig.manager._graphs.pool_bytes() > 0
    for count in (1, 2, 3, 8):
        pages = {"page_indptr": range(count + 1), "page_ids": range(1, count + 1)}
        batch = Batch(req_indices=range(count), seq_lens=[1] * count, tokens=[3] * count, **pages)
        rig.manager.replay(batch).tokens()
    stats = rig.manager.stats()
    assert stats.late_kernels == {}
    assert stats.late_bytes == {}


@pytest.mark.gpu
def test_a_late_kernel_on_a_gpu_is_counted_by_name() -> None:
    rig = make_rig(torch.device("cuda"))
    step(rig)
    late_add[(1,)](torch.zeros(8, device="cuda"), BLOCK=8)
    late_add[(1,)](torch.zeros(8, device="cuda"), BLOCK=8)
    assert rig.manager.stats().late_kernels == {"late_add (between calls)": 1}


@triton.jit
def late_add(x, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets) + 1)
