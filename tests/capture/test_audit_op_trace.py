"""The audit of op traces of real steps, including graphrt's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from graphrt.capture.inspect.audit import Audit, FindingKind, audit, audit_twice, memory_of
from graphrt.capture.inspect.memory import Owner
from graphrt.capture.op_trace import OpTrace, OpTraceRecorder
from tests.support.capture_rig import KEY, op_trace_of


def run(step: Callable[[], torch.Tensor], **named) -> Audit:
    op_trace = op_trace_of(step)
    return audit(op_trace, memory_of(pool=op_trace, **named))


class Model(torch.nn.Module):
    """A step with a lookup, tied weights, a fused projection with views, and an in-place cache write."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.qkv = torch.nn.Linear(8, 24)
        self.norm = torch.nn.LayerNorm(8)
        self.register_buffer("scale", torch.tensor(0.5))
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(self.embed(ids))).chunk(3, dim=-1)
        cache[0].index_copy_(0, slots, k)
        cache[1].index_copy_(0, slots, v)
        scores = (q @ cache[0].t() * self.scale).masked_fill(torch.arange(6) > slots[:, None], float("-inf"))
        return (scores.softmax(-1) @ cache[1]) @ self.embed.weight.t()


class Rig(SimpleNamespace):
    """A model with static buffers and a cache."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            model=Model(), cache=torch.zeros(2, 6, 8), ids=torch.tensor([3, 4]), slots=torch.tensor([0, 1])
        )  # fmt: skip

    def step(self) -> torch.Tensor:
        return self.model(self.ids, self.slots, self.cache)

    def named(self) -> dict[str, object]:
        return {
            "static": {"ids": self.ids, "slots": self.slots}, "weights": self.model, "cache": {"kv": list(self.cache)}
        }  # fmt: skip


def test_a_correct_step_has_no_findings_captured_once_or_twice() -> None:
    rig = Rig()
    report = run(rig.step, **rig.named())
    assert report.ok, str(report)
    for owner in (Owner.STATIC, Owner.WEIGHT, Owner.CACHE, Owner.POOL):
        assert report.counts[owner] > 0, owner
    assert report.counts[Owner.ALLOCATOR] == 0
    report = audit_twice(lambda: op_trace_of(rig.step), lambda op_trace: memory_of(pool=op_trace, **rig.named()))
    assert report.ok, str(report)


@pytest.mark.parametrize("missing", ["static", "weights", "cache"])
def test_unregistered_tensors_are_foreign(missing: str) -> None:
    rig = Rig()
    named = rig.named()
    expected = {
        "static": {rig.ids.data_ptr(), rig.slots.data_ptr()},
        "weights": {t.data_ptr() for t in (*rig.model.parameters(), *rig.model.buffers())},
        "cache": {rig.cache[0].data_ptr(), rig.cache[1].data_ptr()},
    }[missing]
    del named[missing]
    report = run(rig.step, **named)
    assert {finding.address for finding in report.findings} == expected
    assert {finding.kind for finding in report.findings} == {FindingKind.FOREIGN}
    assert all(finding.certain for finding in report.findings)


def test_a_cached_tensor_that_is_freed_after_the_capture() -> None:
    holder = SimpleNamespace(cos=torch.randn(4), x=torch.ones(4))
    op_trace = op_trace_of(lambda: holder.x * holder.cos)

    def report() -> Audit:
        return audit(op_trace, memory_of(static={"x": holder.x}, pool=op_trace))

    assert [f.kind for f in report().findings] == [FindingKind.FOREIGN], "the holder still refers to it"
    address = holder.cos.data_ptr()
    holder.cos = None
    (finding,) = report().findings
    assert (finding.kind, finding.address) == (FindingKind.FREED, address)
    assert (finding.where, finding.node) == ("operand other", "aten.mul.Tensor")
    left, stray, recorder = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), OpTraceRecorder()
    loop = recorder.loop(recorder.capture(lambda: left.sub_(stray) * 2, KEY, lambda: None), left)
    (finding,) = audit(loop, memory_of(static={"left": left}, pool=loop)).findings
    assert (finding.place, finding.address) == ((0, 0, 0), stray.data_ptr()), "in the body of a loop"


def test_hidden_state_is_found_by_two_captures_only() -> None:
    x, kept = torch.ones(4), []

    def step() -> torch.Tensor:
        if not kept:
            kept.append(x * 2)
        return x + kept[0]

    def memory(op_trace: OpTrace):
        return memory_of(static={"x": x}, pool=op_trace)

    first = op_trace_of(step)
    assert audit(first, memory(first)).ok, "in the first capture it is memory of the pool"
    kept.clear()
    report = audit_twice(lambda: op_trace_of(step), memory)
    assert [f.kind for f in report.findings] == [FindingKind.CHANGED, FindingKind.HIDDEN_STATE]
    assert report.findings[1].address == kept[0].data_ptr()


def test_a_row_chosen_on_the_host_is_reported_as_changed() -> None:
    x, state = torch.ones(4, 2), [0]

    def step() -> torch.Tensor:
        state[0] += 1
        return x[state[0]] * 2 + state[0]

    report = audit_twice(lambda: op_trace_of(step), lambda op_trace: memory_of(static={"x": x}, pool=op_trace))
    texts = [finding.text for finding in report.findings]
    assert len(texts) == 2
    assert "byte 8 of 'x' and then byte 16 of 'x'" in texts[0]
    assert "captures, 1 and then 2" in texts[1]


# -- graphrt's own step


def test_graphrt_steps_have_no_findings_and_need_every_buffer_registered() -> None:
    from tests.support.toy import make_rig

    rig = make_rig(torch.device("cpu"))
    manager = rig.manager
    graphs, cache = manager._graphs._graphs, {"k": list(manager.kv_cache.k), "v": list(manager.kv_cache.v)}
    static = {f.name: getattr(manager._buffers, f.name) for f in fields(manager._buffers)}
    assert len(graphs) == 6
    for op_trace in graphs.values():
        report = audit(op_trace, memory_of(static=static, weights=rig.model, cache=cache, pool=op_trace))
        assert report.ok, str(report)
        assert min(report.counts[owner] for owner in (Owner.STATIC, Owner.WEIGHT, Owner.CACHE, Owner.POOL)) > 0
    for name in ("page_table", "input_ids", "seq_lens"):
        some = {other: tensor for other, tensor in static.items() if other != name}
        report = audit(op_trace, memory_of(static=some, weights=rig.model, cache=cache, pool=op_trace))
        tensor = static[name]
        within = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        assert report.findings
        assert all(finding.address in within for finding in report.findings), name
