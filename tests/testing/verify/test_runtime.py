"""verify_runtime: a correct manager has no findings, also against another backend, and faults of models are found."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from graphrt.batch import Batch
from graphrt.cache.groups import kv_groups
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.draft_model import HIDDEN, DraftModel
from graphrt.kernels.errors import CaptureError, ConfigError
from graphrt.proposer import Proposer, ngram_drafts
from graphrt.replay import ReplayManager
from graphrt.runtime import Runtime
from graphrt.spec import AttentionSpec
from graphrt.step import Step
from graphrt.testing.verify.batches import generated_batches
from graphrt.testing.verify.runtime import verify_runtime
from tests.engine.test_encoders import bart_runtime
from tests.session.test_draft_model import drafter
from tests.support.layered import VOCAB as LAYERED_VOCAB
from tests.support.layered import WIDTH, LayeredModel, build
from tests.support.toy import VOCAB, LivelyModel, Rig, ToyModel, captured, make_rig


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


def rig_of(device: torch.device, model: ToyModel | None = None, **config) -> Rig:
    return make_rig(device, model=model, fill=0.0, **config)


def test_a_captured_manager_has_no_findings(device: torch.device) -> None:
    rig = rig_of(device)
    before = [t.clone() for _, t in rig.manager.kv_cache.named_tensors()]
    report = verify_runtime(rig.manager, count=6)
    assert report.ok, str(report)
    assert "the subject's own capture" in report.checked["graph"]
    assert {"state", "unowned", "history"} <= set(report.checked)
    assert "positions" in report.checked["history"]
    after = [t for _, t in rig.manager.kv_cache.named_tensors()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "the cache is restored"


@pytest.mark.parametrize("tree_depth", [0, 2])
def test_batches_with_drafts_have_no_findings(device: torch.device, tree_depth: int) -> None:
    rig = rig_of(device, num_speculative_tokens=2, tree_depth=tree_depth)
    batches = generated_batches(rig.manager, vocab_size=VOCAB, count=6, seed=0)
    assert any(set(batch.sample) > {1} and max(batch.query_lens) > 3 for batch in batches), "drafts in a mixed step"
    report = verify_runtime(rig.manager, count=6)
    assert report.ok, str(report)


def speculating(name: str, device: torch.device, model: LivelyModel | None = None) -> Runtime:
    proposers = {
        "callers": lambda: None,
        "ngrams": lambda: ngram_drafts,
        "draft model": lambda: drafter(LivelyModel(device)),
    }
    sizes = {"decode_sizes": (1, 2, 4), "mixed_sizes": (8, 16), "max_num_tokens": 16}
    return captured(model, device, proposer=proposers[name](), num_speculative_tokens=3, **sizes)


@pytest.mark.parametrize("name", ["callers", "ngrams", "draft model"])
def test_every_captured_size_runs_and_drafts_are_accepted(device: torch.device, name: str) -> None:
    runtime = speculating(name, device)
    report = verify_runtime(runtime.manager)
    assert report.ok, str(report)
    assert set(runtime.stats().replays) == set(runtime.manager.descriptors)
    assert len(runtime.manager.descriptors) == 2 * 3 + 2
    assert not {"sizes", "drafts"} & set(report.not_checked)
    report = verify_runtime(runtime.manager, count=3)
    left = report.not_checked["sizes"]
    assert all(str(size) in left for size in (BatchDescriptor.decode(1), BatchDescriptor.decode(1, 4)))
    assert not any(f"{size}," in left for size in (BatchDescriptor.decode(4), BatchDescriptor.decode(4, 4)))
    runtime.close()


class FrozenInPlainSteps(LivelyModel):
    """Multiplies by a Python number, except in graphs that verify drafts."""

    factor = 1.0

    def forward(self, step: Step) -> torch.Tensor:
        logits = super().forward(step)
        return logits * self.factor if step.descriptor.query_len == 1 else logits


@pytest.mark.parametrize("name", ["callers", "ngrams", "draft model"])
def test_a_bug_in_plain_decode_graphs_of_a_speculating_runtime_is_found(device: torch.device, name: str) -> None:
    model = FrozenInPlainSteps(device)
    runtime = speculating(name, device, model)
    model.factor = 0.5
    report = verify_runtime(runtime.manager)
    assert {finding.check for finding in report.findings} == {"graph"}, str(report)
    assert {finding.difference.output for finding in report.findings} == {"logits"}
    runtime.close()


class FrozenAfterDrafts:
    """Greedy, except for token 0, plus a Python number once a draft of the step was accepted."""

    shift = 0
    step: Step | None = None

    def __call__(self, logits: torch.Tensor, step: Step) -> torch.Tensor:
        b = step.buffers
        if step is not self.step:  # the first position
            self.step, self.first = step, b.sample_lens.clone()
        accepted = (b.sample_lens > self.first) & (b.drafts_left >= 0)
        return 1 + (logits[:, 1:].argmax(-1) + accepted * self.shift) % (VOCAB - 1)


@pytest.mark.parametrize("proposer", [None, ngram_drafts])
def test_a_bug_after_an_accepted_draft_is_found(device: torch.device, proposer: Proposer | None) -> None:
    sampler = FrozenAfterDrafts()
    rig = rig_of(device, LivelyModel(device), sampler=sampler, num_speculative_tokens=3, options={"proposer": proposer})
    sampler.shift = 1
    drafts_of_0 = generated_batches(rig.manager, vocab_size=1, count=8, seed=0)
    report = verify_runtime(rig.manager, drafts_of_0)
    assert report.ok, str(report)
    assert report.not_checked["drafts"] == "no step accepted a draft"
    report = verify_runtime(rig.manager)
    assert {finding.check for finding in report.findings} == {"graph"}, str(report)
    assert report.findings[0].difference.output == "tokens"


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_layers_that_differ_and_heads_that_draft_have_no_findings(
    device: torch.device, head: bool, kv_dtype: torch.dtype
) -> None:
    specs = [AttentionSpec(4, 2, 16, torch.float32, sliding_window=window) for window in (6, None, 6)]
    groups = kv_groups(specs, page_size=4, dtype=kv_dtype)
    assert len(groups) == 3
    draft = DraftModel(
        LayeredModel(specs, device), specs, vocab_size=LAYERED_VOCAB, hidden_size=WIDTH if head else None
    )
    _, runtime = build(specs, groups, 60, device, draft, num_speculative_tokens=2)
    report = verify_runtime(runtime.manager)
    assert report.ok, str(report)
    assert not {"sizes", "drafts"} & set(report.not_checked)
    assert (f"request tensor {HIDDEN}" in report.checked["state"]) is head
    runtime.close()


def test_cross_layers_have_no_findings() -> None:
    _, runtime = bart_runtime(torch.device("cpu"))
    report = verify_runtime(runtime.manager)
    assert report.ok, str(report)
    assert not {"sizes", "rejected requests"} & set(report.not_checked)
    runtime.close()


@pytest.mark.parametrize("head", [False, True])
def test_rejection_sampling_has_no_findings(device: torch.device, head: bool) -> None:
    specs = [AttentionSpec(4, 2, 16, torch.float32)]
    width = WIDTH if head else None
    draft = DraftModel(LayeredModel(specs, device), specs, vocab_size=LAYERED_VOCAB, hidden_size=width)
    options = {"num_speculative_tokens": 2, "rejection_sampling": True, "loop_sizes": (2,)}
    _, runtime = build(specs, kv_groups(specs, page_size=4), 60, device, draft, **options)
    before = runtime.manager.buffers.draft_logprobs.clone()
    report = verify_runtime(runtime.manager)
    assert report.ok, str(report)
    assert "draft_logprobs" in report.checked["state"]
    assert torch.equal(runtime.manager.buffers.draft_logprobs, before)
    assert not {"sizes", "drafts"} & set(report.not_checked)
    assert report.not_checked["loops"]
    runtime.close()


def oracle_of(rig: Rig, model: ToyModel | None = None) -> ReplayManager:
    """Return a manager of a model, or of the rig's, with the reference backend, over the rig's cache."""
    cache, config = rig.manager.kv_cache, replace(rig.manager.config, backend="torch_reference", use_graphs=False)
    attention = rig.manager._program.layers[0].spec
    return ReplayManager(model or rig.model, cache, attention, vocab_size=VOCAB, config=config)


def test_logits_are_compared_with_those_of_an_oracle(device: torch.device) -> None:
    rig = rig_of(device)
    oracle = oracle_of(rig)
    with pytest.raises(CaptureError, match="oracle: expected state 'captured', got 'new'"):
        verify_runtime(rig.manager, oracle=oracle)
    with pytest.raises(CaptureError, match="manager: expected state 'captured', got 'new'"):
        verify_runtime(oracle)
    oracle.capture()
    report = verify_runtime(rig.manager, vocab_size=VOCAB, oracle=oracle, count=6)
    assert report.ok, str(report)
    assert report.checked["padding"] == "padded against exact results of 6 cases"

    other = oracle_of(rig, ToyModel(device, torch.float32))
    other._program.model.embed.data.mul_(1.1)
    other.capture()
    report = verify_runtime(rig.manager, vocab_size=VOCAB, oracle=other, count=3)
    assert {finding.check for finding in report.findings} == {"padding"}
    assert "logits" in str(report.findings[0].difference)


class Frozen(ToyModel):
    """Multiplies by a Python number."""

    factor = 1.0

    def forward(self, step: Step) -> torch.Tensor:
        return super().forward(step) * self.factor


def test_a_number_that_changed_after_the_capture_is_found(device: torch.device) -> None:
    model = Frozen(device, torch.float32)
    rig = rig_of(device, model)
    model.factor = 0.5
    report = verify_runtime(rig.manager, model=model, vocab_size=VOCAB, count=3)
    assert not report.ok
    assert {finding.check for finding in report.findings} == {"graph"}
    assert report.findings[0].difference.output == "logits"


class Remembers(ToyModel):
    """Adds a running mean over all rows, including pad rows, that is never reset."""

    def forward(self, step: Step) -> torch.Tensor:
        logits = super().forward(step)
        self.seen.copy_(logits.mean() * 0.5 + self.seen * 0.5)
        return logits + self.seen


def test_unnamed_state_of_a_model_is_blamed(device: torch.device) -> None:
    model = Remembers(device, torch.float32)
    model.seen = torch.zeros((), device=device)
    report = verify_runtime(rig_of(device, model).manager, model=model, vocab_size=VOCAB, count=4)
    assert not report.ok
    assert "model.seen" in report.blamed, str(report)


def test_generated_batches_shrink_and_grow_and_reach_page_boundaries() -> None:
    manager = rig_of(torch.device("cpu")).manager
    batches = generated_batches(manager, vocab_size=VOCAB, count=24, seed=1)
    sizes = [batch.num_reqs for batch in batches]
    assert any(a > b for a, b in itertools.pairwise(sizes))
    assert any(a < b for a, b in itertools.pairwise(sizes))
    lengths = [int(n) for batch in batches for n in batch.seq_lens]
    assert {0, 1, 3} <= {n % 4 for n in lengths}
    assert any(list(batch.req_indices) != sorted(batch.req_indices) for batch in batches), "requests are permuted"
    assert any(max(batch.query_lens) > 1 for batch in batches), "some steps are mixed"
    for batch in batches:
        assert len(set(batch.page_ids.tolist())) == len(batch.page_ids), "no page has two owners"


def test_batches_of_the_caller(device: torch.device) -> None:
    rig = rig_of(device)
    pages = {"page_indptr": [0, 2], "page_ids": [5, 6]}
    batches = [Batch(req_indices=[0], seq_lens=[n], tokens=[n], **pages) for n in (5, 8, 6)]
    assert verify_runtime(rig.manager, batches).ok


class Counting(ToyModel):
    """Uses a Python number that each step increments."""

    number = 0

    def forward(self, step: Step) -> torch.Tensor:
        self.number += 1
        return super().forward(step) * (1 + self.number % 5)


@pytest.mark.parametrize("seed", range(3))
def test_a_result_that_changes_from_run_to_run_is_not_blamed_on_the_cache(seed: int) -> None:
    """With poison in unowned pages the result changes, as it does in any run."""
    model = Counting(torch.device("cpu"), torch.float32)
    rig = rig_of(torch.device("cpu"), model)
    oracle = oracle_of(rig, ToyModel(torch.device("cpu"), torch.float32))
    oracle.capture()
    report = verify_runtime(rig.manager, model=model, oracle=oracle, seed=seed)
    assert "model.number" in report.blamed
    assert not [name for name in report.blamed if "kv_cache" in name]


def test_requests_that_the_device_refuses_are_listed() -> None:
    rig = rig_of(torch.device("cpu"))
    good = Batch(req_indices=[1], seq_lens=[2], query_lens=[1], tokens=[3], page_indptr=[0, 1], page_ids=[1])
    report = verify_runtime(rig.manager, [good, Batch(req_indices=[0], seq_lens=[2], query_lens=[1], tokens=[3])])
    assert report.ok, str(report)
    assert report.not_checked["rejected requests"].startswith("the device rejected 1 requests")


def test_wrong_arguments_raise() -> None:
    rig, other = (rig_of(torch.device("cpu")) for _ in range(2))
    oracle = oracle_of(other)
    oracle.capture()
    row = {"req_indices": [0], "seq_lens": [2], "query_lens": [1], "tokens": [3]}
    bad = {
        r"manager: expected ReplayManager, got 3; of a Runtime, pass runtime\.manager": {"manager": 3},
        "oracle: expected ReplayManager, got 'eager'": {"oracle": "eager"},
        "oracle: uses a different KVCache": {"oracle": oracle},
        "batches: the list is empty": {"batches": []},
        "batches: expected a list": {"batches": 3},
        r"batches\[0\]: expected Batch": {"batches": [1]},
        r"batches\[0\].page_ids: expected 0 <= id": {"batches": [Batch(**row, page_indptr=[0, 1], page_ids=[9999])]},
        "the device rejected every request, first: .* LENGTH_EXCEEDS_PAGES": {"batches": [Batch(**row)]},
        "seed: expected an int": {"seed": "a"},
        "vocab_size: expected an int from 1": {"vocab_size": 10**9},
    }
    for text, arguments in bad.items():
        with pytest.raises(ConfigError, match=text):
            verify_runtime(**{"manager": rig.manager, **arguments})
    small = rig_of(torch.device("cpu"), num_pages=4).manager
    with pytest.raises(ConfigError, match="one page per request and KV group, got 3 pages for 8 requests"):
        generated_batches(small, vocab_size=VOCAB, count=1, seed=0)
