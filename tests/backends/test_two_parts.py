"""Mixed steps in two parts: requests in any order, each part by its own backend, results in the order of the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.backends.choice import get_attn_backend
from graphrt.batch import Batch, Request
from graphrt.cache.groups import kv_groups
from graphrt.capture.descriptor import GraphKind
from graphrt.config import RuntimeConfig
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.types import TOKEN_FROM_DEVICE, FaultCode
from graphrt.runtime import Runtime
from graphrt.spec import AttentionSpec
from graphrt.step import Step
from graphrt.testing.poison import poison_derived
from tests.support.layered import MAX_LEN, LayeredModel, build, generate, prompts_of

F32 = torch.float32
FULL = AttentionSpec(4, 2, 32, F32)
SPECS = (replace(FULL, sliding_window=20), FULL, replace(FULL, sliding_window=20, kv_shared_with=0))
REFERENCE, TRITON = ("torch_reference", "torch_reference"), ("triton", "triton")
CROSSED = ("torch_reference", "triton")
ORDERS = [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)]


def two_parts(pair: tuple[str, str], device: torch.device, **config: object) -> tuple[LayeredModel, Runtime]:
    groups = kv_groups(SPECS, page_size=8)
    options = {"backend": pair[0], "prefill_backend": pair[1], "decode_sizes": (4,)} | config
    return build(SPECS, groups, 120, device, **options)  # type: ignore[arg-type]


class Sequences:
    """Four sequences that are fed to a runtime, with all their pages allocated."""

    def __init__(self, model: LayeredModel, runtime: Runtime, lengths: list[int]) -> None:
        self.model, self.runtime = model, runtime
        self.tokens = prompts_of(lengths)
        self.done = [0] * len(lengths)
        pages = iter(range(1, 120))
        groups = runtime.kv_cache.groups
        self.pages = [[[next(pages) for _ in range(g.pages_for(MAX_LEN))] for g in groups] for _ in lengths]

    def step(self, order: tuple[int, ...], delta: list[int], *, expect: bool = True) -> None:
        """Feed `delta[i]` tokens of each sequence in this order; sampled tokens must equal the oracle."""
        rows = []
        for i in order:
            start, end = self.done[i], self.done[i] + delta[i]
            self.done[i] = end
            tokens = self.tokens[i][start:end]
            if len(tokens) < delta[i]:
                tokens = [TOKEN_FROM_DEVICE]
            rows.append(Request(i, tokens, end, self.pages[i], sample=end >= len(self.tokens[i])))
        poison_derived(self.runtime.manager.buffers)
        handle = self.runtime.replay(Batch.from_requests(rows))
        assert handle.why_eager == ""
        logits, tokens = handle.logits(copy=True).double().cpu(), handle.tokens().tolist()
        for at, i in enumerate(order):
            known = self.tokens[i][: self.done[i]]
            want = self.model.oracle(known)
            assert (logits[at] - want).abs().max() < 1e-3 * want.abs().max(), f"sequence {i}"
            assert tokens[at] == (int(want.argmax()) if self.done[i] >= len(self.tokens[i]) else -1)
            if tokens[at] >= 0:
                self.tokens[i].append(tokens[at])


@pytest.mark.parametrize("pair", [REFERENCE, TRITON, CROSSED], ids="+".join)
def test_requests_in_any_order(pair: tuple[str, str], device: torch.device) -> None:
    """Chunked prompts become decode requests from one step to the next, in changing orders."""
    if device.type == "cuda" and "torch_reference" in pair:
        pytest.skip("the reference has no graph on CUDA")
    model, runtime = two_parts(pair, device)
    sequences = Sequences(model, runtime, [1, 9, 3, 14])
    sequences.step(ORDERS[0], [1, 7, 1, 2])
    sequences.step(ORDERS[1], [1, 2, 2, 11])
    sequences.step(ORDERS[2], [1, 1, 1, 1])  # all decode: a decode step
    if pair != TRITON:  # interpreted
        sequences.step(ORDERS[1], [1, 1, 1, 1])
        assert runtime.stats().backend == "+".join(pair)
    runtime.close()


def test_tokens_of_a_generator(device: torch.device) -> None:
    pair = TRITON if device.type == "cuda" else REFERENCE
    model, runtime = two_parts(pair, device)
    prompts, counts = prompts_of([1, 9, 30, 17, 5]), [9, 4, 6, 12, 5]
    want = [model.greedy(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    assert generate(runtime, prompts, counts) == want
    runtime.close()


def test_replay_equals_eager(device: torch.device) -> None:
    """Bitwise; `compare` returns results in the order of the batch."""
    pair = TRITON if device.type == "cuda" else REFERENCE
    _, runtime = two_parts(pair, device)
    pages = [[list(range(1 + 20 * g, 3 + 20 * g)) for g in range(len(runtime.kv_cache.groups))]]
    pages.append([[p + 5 for p in listed] for listed in pages[0]])
    chunk, decode = Request(0, [3, 1, 4, 1, 5], 5, pages[0]), Request(1, [9], 12, pages[1])
    for tensor in (*runtime.kv_cache.k, *runtime.kv_cache.v):
        tensor[1:].normal_(generator=torch.Generator(device).manual_seed(1))
    found = []
    for rows in ((chunk, decode), (decode, chunk)):
        poison_derived(runtime.manager.buffers)
        comparison = runtime.compare(Batch.from_requests(rows))
        assert comparison.equal, str(comparison)
        found.append(comparison.graph.logits)
    assert torch.equal(found[0], found[1].flip(0))
    runtime.close()


def test_faults_name_the_request_of_the_batch(device: torch.device) -> None:
    pair = TRITON if device.type == "cuda" else REFERENCE
    _, runtime = two_parts(pair, device)
    groups = range(len(runtime.kv_cache.groups))
    rows = [Request(r, [1] * (1 + r % 2 * 3), 1 + r % 2 * 3, [[1 + 4 * g + r] for g in groups]) for r in range(4)]
    rows[1] = replace(rows[1], tokens=[1, 2, 999, 3])
    rows[2] = replace(rows[2], pages=[[0] for _ in groups])
    handle = runtime.replay(Batch.from_requests(rows))
    found = [(fault.index, fault.code, fault.value) for fault in handle.faults]
    assert found == [(1, FaultCode.TOKEN_OUT_OF_RANGE, 999), (2, FaultCode.PAGE_OUT_OF_RANGE, 0)]
    tokens = handle.tokens(raise_on_fault=False).tolist()
    assert [token >= 0 for token in tokens] == [True, False, False, True]
    runtime.close()


def test_model_sees_decode_requests_first(device: torch.device) -> None:
    """State by request index still belongs to the request."""
    seen: list[tuple[list[int], list[int]]] = []

    class Looks(LayeredModel):
        def forward(self, step: Step) -> torch.Tensor:
            if step.descriptor.kind is GraphKind.MIXED:
                seen.append((step.req_indices.tolist(), step.input_ids.tolist()))
            return super().forward(step)

    groups = kv_groups(SPECS, page_size=8)
    model = Looks(SPECS, device)
    config = RuntimeConfig(
        max_num_reqs=4, max_num_tokens=16, max_seq_len=MAX_LEN, use_graphs=False,
        backend="torch_reference", prefill_backend="torch_reference", decode_sizes=(4,), mixed_sizes=(16,),
    )  # fmt: skip
    runtime = Runtime(model, SPECS, groups, vocab_size=53, device=device, num_pages=80, config=config)
    runtime.capture()
    seen.clear()
    pages = [[[1 + 4 * g + r] for g in range(len(groups))] for r in range(4)]
    rows = [
        Request(0, [1, 2], 2, pages[0]),
        Request(3, [7], 1, pages[3]),
        Request(2, [3, 4, 5], 3, pages[2]),
        Request(1, [6], 1, pages[1]),
    ]
    runtime.replay(Batch.from_requests(rows)).tokens()
    assert seen == [([3, 1, 0, 2], [7, 6, 1, 2, 3, 4, 5, *[0] * 9])]
    runtime.close()


def test_reason_names_both_parts_and_unsupported_combinations_raise() -> None:
    groups = kv_groups(SPECS, page_size=8)
    config = RuntimeConfig(backend="torch_reference", prefill_backend="torch_reference")
    named = get_attn_backend(SPECS, groups, "cpu", config=config)
    assert named.name == "torch_reference+torch_reference"
    assert named.reason == "torch_reference: chosen by name; prefill: torch_reference, chosen by name"
    for other, why in (("none", "; prefill: torch_reference, as requested"), (None, "")):
        whole = get_attn_backend(SPECS, groups, "cpu", config=replace(config, prefill_backend=other))
        assert (whole.name, whole.reason) == ("torch_reference", f"torch_reference: chosen by name{why}")
        assert whole.prefill is None
    for options, error, text in (
        ({"prefill_backend": "nobody"}, ConfigError, "expected one of"),
        ({"prefill_backend": 3}, ConfigError, r"RuntimeConfig\.prefill_backend"),
        ({"prefill_backend": "triton", "mixed_batches": False}, ConfigError, "there is no prefill"),
        ({"prefill_backend": "flashinfer"}, UnsupportedError, "prefill part of mixed steps: not supported"),
        ({"prefill_backend": "flash_attn2"}, UnsupportedError, "prefill part of mixed steps: not supported"),
    ):
        with pytest.raises(error, match=text):
            get_attn_backend(
                SPECS,
                groups,
                "cpu",
                config=RuntimeConfig(backend="torch_reference", **options),  # type: ignore[arg-type]
            )
    chunked = (replace(FULL, attention_chunk_size=16),)
    config = RuntimeConfig(backend="triton", prefill_backend="triton")
    with pytest.raises(UnsupportedError, match="attention_chunk_size 16: not supported"):
        get_attn_backend(chunked, kv_groups(chunked), "cpu", config=config)
