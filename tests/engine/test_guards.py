"""What a manager watches after capture: the first step and debug mode, tensors by name, late kernels, late memory."""

from __future__ import annotations

import gc
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
from graphrt.kernels.errors import ConfigError, ReplayError
from graphrt.replay import ReplayManager
from graphrt.step import Step
from tests.support.toy import VOCAB, Rig, ToyModel, make_rig

CPU = torch.device("cpu")
BATCH = {"req_indices": [0, 1], "seq_lens": [1, 1], "tokens": [3, 4], "page_indptr": [0, 1, 2], "page_ids": [5, 6]}


def step(rig: Rig, **options: object) -> None:
    rig.manager.replay(Batch(**BATCH), **options).tokens()


def replace_buffer(rig: Rig, name: str) -> None:
    buffers = rig.manager.buffers
    object.__setattr__(buffers, name, getattr(buffers, name).clone())


# What is done to a captured manager, and the name in the error.
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
    "input_ring-replaced": (lambda rig: replace_buffer(rig, "input_ring"), "static buffer input_ring"),
}
SEEN_IN_TURNS = ("weight-moved", "weight-set", "weight-replaced", "weight-gone", "cache-moved")


def find(change: Callable[[Rig], object], text: str, rig: Rig) -> None:
    change(rig)
    for _ in range(2):
        with pytest.raises(ReplayError, match=f"^{text}: expected .* as captured, got "):
            rig.manager.replay(Batch(**BATCH))


@pytest.mark.parametrize("check_weights", [True, False], ids=["turns", "no-turns"])
@pytest.mark.parametrize("case", CHANGES)
def test_the_first_step_has_everything_checked(case: str, check_weights: bool) -> None:
    find(*CHANGES[case], make_rig(CPU, check_weights=check_weights))


@pytest.mark.parametrize("case", CHANGES)
def test_in_debug_mode_every_step_has(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setenv("GRAPHRT_DEBUG", "1")
    rig = make_rig(CPU, check_weights=False)
    monkeypatch.delenv("GRAPHRT_DEBUG")
    for _ in range(3):
        step(rig)
    find(*CHANGES[case], rig)


@pytest.mark.parametrize("case", CHANGES)
def test_later_steps_see_addresses_of_weights_and_cache_and_names_of_weights(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    for name in ("_TURN", "_NAMES_A_TURN"):  # all in one turn: a step with such weights would fail
        monkeypatch.setattr(guard, name, 64)
    rig = make_rig(CPU)
    step(rig)
    change, text = CHANGES[case]
    if case in SEEN_IN_TURNS:
        find(change, text, rig)
    else:
        change(rig)
        step(rig)  # what the graph holds is as it was: the op trace goes on with it


class Headed(torch.nn.Module):
    """A model of many modules, whose logits a module of its own shifts."""

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self.of, self.many = rig.model, torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(40))
        self.head = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(VOCAB)})
        self.register_buffer("shift", torch.zeros(VOCAB))

    def forward(self, step: Step) -> torch.Tensor:
        return self.head["norm"](self.of(step)) + self.shift


def replace_weight(model: Headed) -> None:
    model.head["norm"].weight = torch.nn.Parameter(-model.head["norm"].weight.detach())


def replace_module(model: Headed) -> None:
    model.head["norm"] = torch.nn.LayerNorm(VOCAB)


def replace_the_shift(model: Headed) -> None:
    model.shift = model.shift + 1


def assign_state(model: Headed) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def delete_weight(model: Headed) -> None:
    del model.head["norm"].weight


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (replace_weight, "head.norm.weight: expected at address"),
        (replace_module, "head.norm.weight: expected at address"),
        (replace_the_shift, "shift: expected at address"),
        (assign_state, ": expected at address"),
        (delete_weight, "head.norm.weight: .* got no tensor of this name"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_what_another_took_the_place_of_is_found_while_steps_run(change: Callable[[Headed], None], name: str) -> None:
    """The old tensor has not moved, and the graph would read it for ever."""
    rig = make_rig(CPU, capture=False)
    model = Headed(rig)
    manager = ReplayManager(
        model, rig.manager.kv_cache, rig.manager._program.layers[0].spec,
        vocab_size=VOCAB, config=rig.manager.config,
    )  # fmt: skip
    manager.capture()
    first = manager.replay(Batch(**BATCH)).tokens().tolist()
    norm = model.head["norm"]
    norm.weight = torch.nn.Parameter(norm.weight.detach())  # another object of the same memory
    for _ in range(60):
        assert manager.replay(Batch(**BATCH)).tokens().tolist() == first
    change(model)
    with pytest.raises(ReplayError, match=name):
        _ = [manager.replay(Batch(**BATCH)).tokens() for _ in range(60)]
    with pytest.raises(ReplayError, match=name):
        manager.replay(Batch(**BATCH))


def test_names_are_not_watched_where_nobody_asks() -> None:
    rig = make_rig(CPU, check_weights=False)
    step(rig)
    rig.model.embed = torch.nn.Parameter(rig.model.embed.detach().clone())
    for _ in range(4):
        rig.manager.replay(Batch(**BATCH)).tokens()


def test_weights_of_the_caller_are_not_looked_up_in_the_model() -> None:
    """A model may replace what the caller did not name."""
    rig = make_rig(CPU, capture=False)
    manager = rig.manager.__class__(
        rig.model, rig.manager.kv_cache, rig.manager._program.layers[0].spec, vocab_size=61, config=rig.manager.config,
        weights=[("mine", rig.model.embed)],
    )  # fmt: skip
    manager.capture()
    rig.model.where = torch.nn.Parameter(rig.model.where.detach().clone())
    manager.replay(Batch(**BATCH)).tokens()
    rig.model.embed.data = rig.model.embed.data.clone()
    with pytest.raises(ReplayError, match=r"^mine: expected at address"):
        manager.replay(Batch(**BATCH))


def test_a_workspace_of_the_backend_that_grew_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a backend does that makes a larger one for an eager step: the graphs go on with the old one."""
    workspace = {"partial_out": torch.zeros(8)}
    monkeypatch.setattr(TorchReferenceBackend, "tensors", lambda self: workspace)
    monkeypatch.setenv("GRAPHRT_DEBUG", "1")
    rig = make_rig(CPU, backend="torch_reference")
    step(rig)
    workspace["partial_out"] = torch.zeros(16)
    with pytest.raises(ReplayError, match=r"^backend torch_reference: partial_out: expected .* \[8\] .* got .* \[16\]"):
        step(rig)


def test_row_tensors_are_named() -> None:
    rig = make_rig(CPU, request_tensors=(RequestTensor("adapter", (), torch.int32),))
    rig.manager.request_tables.tensors["adapter"] = torch.zeros(9, dtype=torch.int32)
    with pytest.raises(ReplayError, match=r"^row tensor adapter: expected at address"):
        step(rig)


@pytest.mark.parametrize("value", ["2", "yes", ""])
def test_a_malformed_variable_is_refused_when_a_manager_is_built(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("GRAPHRT_DEBUG", value)
    with pytest.raises(ConfigError, match=f"GRAPHRT_DEBUG: expected 0 or 1, got '{value}'"):
        make_rig(CPU)


# -- late kernels and late memory


def load(name: str) -> None:
    """As Triton does where a kernel is launched for the first time."""
    triton.knobs.runtime.kernel_load_end_hook(None, None, name, {}, "digest")


class LoadingModel(ToyModel):
    """Loads a kernel in each forward pass, once it is told to."""

    kernel = ""

    def forward(self, step: Step) -> torch.Tensor:
        if self.kernel:
            load(self.kernel)
        return super().forward(step)


def loading_graphs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Launches of graphs load a kernel, as a backend does that plans on the host with a kernel of its own."""
    launch = OpTrace.launch
    monkeypatch.setattr(OpTrace, "launch", lambda self: (load(name), launch(self))[1])


@pytest.mark.parametrize("debug", ["0", "1"])
def test_kernels_are_counted_by_what_the_thread_was_doing(monkeypatch: pytest.MonkeyPatch, debug: str) -> None:
    monkeypatch.setenv("GRAPHRT_DEBUG", debug)
    model = LoadingModel(CPU, torch.float32)
    model.kernel = "early"
    rig = make_rig(CPU, model=model, shadow_every=3)
    stats = rig.manager.stats()
    assert stats.late_kernels == {}, "what capture() loads is not late"
    model.kernel = "late"
    step(rig)
    assert stats.late_kernels == {}, "a graph runs no Python"
    step(rig, eager=True)
    assert stats.late_kernels == {"late (beside the graphs)": 1}
    step(rig)  # the third launch is shadowed: it runs eagerly too
    assert stats.shadow_steps == 1
    assert stats.late_kernels == {"late (beside the graphs)": 2}
    rig.manager.compare(Batch(**BATCH))
    with rig.manager.between_steps():
        load("table")
    load("mine")
    thread = threading.Thread(target=load, args=["elsewhere"])
    thread.start()
    thread.join()
    expected = {"late (beside the graphs)": 3, "table (beside the graphs)": 1, "mine (between calls)": 1}
    assert rig.manager.stats().late_kernels == expected
    rig.manager.close()
    load("mine")
    assert rig.manager.stats().late_kernels == expected


def test_another_thread_s_steps_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps may come from any one thread: kernels of the one that the last call came from count."""
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
    """It copies what the step changes, with kernels that no graph has."""
    gather = undo._SlotPacker.gather
    monkeypatch.setattr(undo._SlotPacker, "gather", lambda self, slots: (load("pack"), gather(self, slots))[1])
    monkeypatch.setenv("GRAPHRT_DEBUG", "1")
    rig = make_rig(CPU, shadow_every=1)
    step(rig)
    assert set(rig.manager.stats().late_kernels) == {"pack (beside the graphs)"}


def test_a_kernel_in_a_graph_step_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an eager step too."""
    rig = make_rig(CPU)
    step(rig, eager=True)
    loading_graphs(monkeypatch, "plan")
    step(rig)
    step(rig)
    assert rig.manager.stats().late_kernels == {"plan (in a graph step)": 2}


def test_in_debug_mode_a_kernel_in_a_graph_step_raises_and_the_next_step_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRAPHRT_DEBUG", "1")
    rig = make_rig(CPU)
    with monkeypatch.context() as patch:
        loading_graphs(patch, "plan")
        with pytest.raises(ReplayError, match=r"^plan: expected no kernel to be compiled or loaded after capture\(\)"):
            rig.manager.replay(Batch(**BATCH))
    tokens = rig.manager.replay(Batch(**BATCH)).tokens().tolist()
    assert tokens == [int(rig.model.oracle([token]).argmax()) for token in BATCH["tokens"]]
    assert rig.manager.stats().late_kernels == {"plan (in a graph step)": 1}


@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_pool_that_grows_is_counted_and_in_debug_mode_raises(monkeypatch: pytest.MonkeyPatch, debug: str) -> None:
    monkeypatch.setenv("GRAPHRT_DEBUG", debug)
    held = [1000]
    monkeypatch.setattr(OpTraceRecorder, "pool_bytes", lambda self: held[0])
    rig = make_rig(CPU)
    step(rig)
    assert rig.manager.stats().late_bytes == {}
    held[0] = 3000
    assert rig.manager.stats().late_bytes == {"graph pool": 2000}
    if debug == "1":
        with pytest.raises(ReplayError, match=r"^graph pool: expected 1000 bytes as after capture\(\), got 2000 more"):
            rig.manager.replay(Batch(**BATCH))
    else:
        step(rig)
    rig.manager.close()
    assert rig.manager.stats().late_bytes == {"graph pool": 2000}


def test_a_dropped_manager_leaves_the_hooks_and_lets_go_of_its_weights() -> None:
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
def test_on_a_device_steps_load_nothing_and_their_pool_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real kernels, the allocator's own figures, in debug mode: graph steps of every size, after other sizes."""
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
def test_on_a_device_a_late_kernel_is_named() -> None:
    rig = make_rig(torch.device("cuda"))
    step(rig)
    late_add[(1,)](torch.zeros(8, device="cuda"), BLOCK=8)
    late_add[(1,)](torch.zeros(8, device="cuda"), BLOCK=8)
    assert rig.manager.stats().late_kernels == {"late_add (between calls)": 1}


@triton.jit
def late_add(x, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets) + 1)
