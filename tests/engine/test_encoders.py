"""Encoder-decoders and encoders of `transformers` in steps, and errors of their layers."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import graphrt
from graphrt.backends.choice import get_attn_backend
from graphrt.batch import Batch, Request
from graphrt.cache.groups import kv_groups
from graphrt.cache.kv_cache import KVCache
from graphrt.config import RuntimeConfig
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.layer import attention_specs
from graphrt.runtime import Runtime
from graphrt.spec import AttentionKind, AttentionSpec, KVCacheSpec
from graphrt.testing.poison import poison_derived
from tests.support.encoder_adapter import (
    CROSS,
    ENCODER,
    OWN,
    VOCAB,
    HostedBart,
    HostedModernBert,
    cross_layer,
    make_bart,
    make_modernbert,
)

CPU, F32, BF16, FP8 = torch.device("cpu"), torch.float32, torch.bfloat16, torch.float8_e4m3fn
PAGE, MAX_LEN, MAX_ENCODER_LEN = 4, 24, 21
SOURCES = [[5, 17, 3, 88, 41, 9, 60], list(range(40, 61)), [7], [11, 64, 29, 30, 31, 12, 13, 14, 90]]
"""What the encoder reads: 7, 21, 1 and 9 tokens."""
REQUESTS = [(0, [2]), (1, [2, 9, 33, 50]), (1, [2, 7]), (2, [2, 5, 6]), (3, [2, 80, 81, 82, 83])]
"""By source, what the decoder begins with. Two share one source."""
NEW_TOKENS = 10


@functools.cache
def oracle() -> list[list[int]]:
    model, answers = make_bart(CPU), []
    for source, prompt in REQUESTS:
        found = model.generate(
            torch.tensor([SOURCES[source]]), decoder_input_ids=torch.tensor([prompt]), do_sample=False, num_beams=1,
            max_new_tokens=NEW_TOKENS,
        )  # fmt: skip
        answers.append(found[0, len(prompt) :].tolist())
    assert sum(len(set(answer)) > 2 for answer in answers) >= 4, "tokens must vary to tell anything"
    assert answers[1] != answers[2]
    return answers


def nan_cache(*args: Any) -> KVCache:
    """A cache full of NaN, so that reads of unwritten memory are visible."""
    cache = KVCache.allocate(*args)
    for tensor in (*cache.k, *cache.v):
        tensor[:] = float("nan")
    for number, group in enumerate(cache.groups):
        if group.sliding_window is not None:  # the null page stands before a window, and must be finite
            for tensor in (t for tensors in cache.of_group(number) for t in tensors):
                tensor[group.null_page] = 0.0
    return cache


def bart_runtime(device: torch.device, dtype: torch.dtype = F32, **options: Any) -> tuple[HostedBart, Runtime]:
    hosted = HostedBart(make_bart(device).to(dtype))
    specs = hosted.specs
    defaults = {"decode_sizes": (2, 4), "mixed_sizes": (8, 16), "max_encoder_len": MAX_ENCODER_LEN}
    runtime = Runtime(
        hosted, specs, kv_groups(specs, page_size=PAGE), vocab_size=VOCAB, device=device, num_pages=60,
        config=RuntimeConfig(4, 16, MAX_LEN, **(defaults | options)), allocate_kv=nan_cache,
    )  # fmt: skip
    runtime.capture()
    return hosted, runtime


class Server:
    """Serves REQUESTS: encodes each source once. Requests list their pages once, or in every step."""

    def __init__(self, hosted: HostedBart, runtime: Runtime, *, page_lists: str = "once") -> None:
        self.hosted, self.runtime, self.page_lists = hosted, runtime, page_lists
        self.sources: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}  # by request, prompt and answer
        self.pages: dict[int, list[int]] = {}
        self.rows: dict[int, int] = {}

    def encode(self, source: int) -> list[int]:
        if source not in self.sources:
            cache, tokens = self.runtime.kv_cache, SOURCES[source]
            pages = self.sources[source] = self.runtime.allocator.allocate(-(-len(tokens) // PAGE))
            slots = cache.slots(pages, len(tokens), layer=1)
            for layer, (k, v) in self.hosted.encode(tokens).items():
                cache.write(layer, k, v, slots)
        return self.sources[source]

    def step(self, admitted: list[int]) -> Batch:
        rows = []
        for request in [*self.tokens, *admitted]:
            source, prompt = REQUESTS[request]
            begins = request not in self.tokens
            tokens = self.tokens.setdefault(request, list(prompt))
            own, crossing = self.pages.setdefault(request, []), self.encode(source)
            known = 0 if begins or self.page_lists == "always" else len(own)
            own += self.runtime.allocator.allocate(-(-len(tokens) // PAGE) - len(own))
            lists = (own[known:], [] if known else crossing)
            req_index = self.rows.setdefault(request, begins and self.runtime.free_req_indices.pop())
            new = tokens if begins else tokens[-1:]
            length = len(SOURCES[source])
            rows.append(Request(req_index, new, len(tokens), lists, first_page=(known, 0), encoder_len=length))
        return Batch.from_requests(rows)

    def append(self, sampled: list[int]) -> None:
        """Append the tokens of a step to its requests."""
        for request, token in zip(list(self.tokens), sampled, strict=True):
            self.tokens[request].append(token)

    def run(self, admissions: dict[int, list[int]]) -> list[list[int]]:
        """Run steps until all requests have NEW_TOKENS; `admissions` says which requests start in which step."""
        answers: dict[int, list[int]] = {}
        for step in range(100):
            batch = self.step(admissions.get(step, []))
            if not batch.num_reqs:
                break
            self.append(self.runtime.replay(batch).tokens().tolist())
            for request in list(self.tokens):
                prompt = REQUESTS[request][1]
                if len(self.tokens[request]) == len(prompt) + NEW_TOKENS:
                    answers[request] = self.tokens.pop(request)[len(prompt) :]
                    self.runtime.allocator.free(self.pages.pop(request))
                    self.runtime.free_req_indices.append(self.rows.pop(request))
        return [answers[request] for request in sorted(answers)]


@pytest.mark.parametrize("page_lists", ["once", "always"])
def test_tokens_of_bart_equal_transformers(page_lists: str, device: torch.device) -> None:
    """Encoders of four lengths, mixed steps, two requests with one source, a reused request index."""
    server = Server(*bart_runtime(device), page_lists=page_lists)
    assert [group.cross for group in server.runtime.kv_cache.groups] == [False, True]
    assert server.run({0: [0], 2: [1, 2], 3: [3], 10: [4]}) == oracle()
    assert not server.runtime.stats().eager_steps
    server.runtime.close()


def test_replay_of_bart_equals_eager_bitwise(device: torch.device) -> None:
    """In bfloat16, with requests that start and finish, in decode and mixed steps."""
    hosted, runtime = bart_runtime(device, dtype=BF16)
    server = Server(hosted, runtime)
    for admitted in ([0], [1, 2], [], [3], []):
        batch = server.step(admitted)
        poison_derived(runtime.manager.buffers)
        comparison = runtime.compare(batch)
        assert comparison.equal, str(comparison)
        handle = runtime.replay(batch)
        assert handle.why_eager == ""
        assert not handle.logits().isnan().any()
        server.append(handle.tokens().tolist())
    runtime.close()


def test_tokens_of_bart_through_interpreted_kernels() -> None:
    hosted, runtime = bart_runtime(CPU, backend="triton", decode_sizes=(2,), mixed_sizes=(8,))
    server = Server(hosted, runtime)
    for step, admitted in enumerate(([1], [3], [])):  # prompts of 4 and 3 tokens over 21 keys and one
        server.append(runtime.replay(server.step(admitted)).tokens().tolist())
        for request in server.tokens:
            count = len(server.tokens[request]) - len(REQUESTS[request][1])
            assert server.tokens[request][-count:] == oracle()[request][:count], step
    runtime.close()


PAIRS: dict[str, tuple[tuple[AttentionSpec, ...], torch.dtype | None]] = {
    "window_beside_cross": ((replace(OWN, sliding_window=3), CROSS), None),
    "cross_first": ((CROSS, OWN, replace(CROSS, kv_shared_with=0)), None),
    "fp8": ((replace(OWN, dtype=BF16), replace(CROSS, dtype=BF16)), FP8),
    "softcap_beside_none": ((OWN, replace(CROSS, logits_softcap=2.0), OWN, CROSS), None),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("mixed", [False, True], ids=["decode", "mixed"])
def test_replay_equals_eager_bitwise_and_float64(name: str, mixed: bool, device: torch.device) -> None:
    """Several groups, ragged requests, shared pages, NaN in unwritten memory, poisoned buffers between replays."""
    specs, dtype = PAIRS[name]
    model, table = cross_layer(specs, device)
    groups = kv_groups(specs, page_size=16, dtype=dtype)
    config = RuntimeConfig(4, 16, 32, decode_sizes=(4,), mixed_sizes=(16,), max_encoder_len=70)
    runtime = Runtime(
        model, specs, groups, vocab_size=len(specs) * 64, device=device, num_pages=40, config=config,
        allocate_kv=nan_cache, sampler=None,
    )  # fmt: skip
    runtime.capture()
    cache, crossing = runtime.kv_cache, next(g for g, group in enumerate(groups) if group.cross)
    generator = torch.Generator().manual_seed(2)
    cache_layers = [i for i, group in enumerate(cache.group_of) if group == crossing]
    lengths = {(1, 2, 3, 4, 5): 70, (6,): 3}
    written: dict[tuple[tuple[int, ...], int], tuple[torch.Tensor, torch.Tensor]] = {}
    for pages, count in lengths.items():
        slots = cache.slots(list(pages), count, layer=cache_layers[0])
        for layer in cache_layers:
            k, v = (torch.randn(count, 2, 16, generator=generator).to(specs[0].dtype) for _ in range(2))
            cache.write(layer, k.to(device), v.to(device), slots)
            if dtype is not None:
                k, v = k.to(dtype), v.to(dtype)
            written[pages, layer] = k.double(), v.double()
    sources = [(1, 2, 3, 4, 5), (6,), (1, 2, 3, 4, 5), ()]
    tokens: list[list[int]] = [[], [], [], []]
    for step in range(4):
        rows = []
        for row, source in enumerate(sources):
            new = [(7 * step + 3 * row + i) % VOCAB for i in range(1 + row if mixed or step == 0 else 1)]
            tokens[row] += new
            lists: list[Any] = [[]] * len(groups)
            if step == 0:
                lists = [[10 + 2 * (4 * g + row), 11 + 2 * (4 * g + row)] for g in range(len(groups))]
                lists[crossing] = list(source)
            encoder_len = lengths.get(source, 0)
            rows.append(Request(row, new, len(tokens[row]), lists, encoder_len=encoder_len))
        batch = Batch.from_requests(rows)
        poison_derived(runtime.manager.buffers)
        comparison = runtime.compare(batch)
        assert comparison.equal, str(comparison)
        poison_derived(runtime.manager.buffers)
        logits = runtime.replay(batch).logits(copy=True).cpu().view(4, len(specs), 4, 16).double()
        assert not logits.isnan().any()
        numbers = {i: at for at, i in enumerate(i for i, s in enumerate(specs) if s.kv_shared_with is None)}
        for row, source in enumerate(sources):
            q = table[tokens[row][-1], :4].to(specs[0].dtype).double().view(2, 2, 16)
            for i, spec in enumerate(specs):
                if not spec.is_cross:
                    continue
                if not source:
                    assert not logits[row, i].any()
                    continue
                number = numbers[i if spec.kv_shared_with is None else spec.kv_shared_with]
                k, v = written[source, number]
                scores = torch.einsum("hgd,nhd->hgn", q, k) / 4
                if spec.logits_softcap:
                    scores = spec.logits_softcap * torch.tanh(scores / spec.logits_softcap)
                want = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v).flatten(0, 1)
                bound = 1e-5 if dtype is None else 0.02
                assert (logits[row, i] - want).abs().max() < bound * want.abs().max()
    runtime.close()


@functools.cache
def embeddings() -> list[torch.Tensor]:
    model = make_modernbert(CPU)
    with torch.no_grad():
        return [model(torch.tensor([source])).last_hidden_state[0].mean(0) for source in SOURCES]


def bert_runtime(device: torch.device, **options: Any) -> Runtime:
    hosted = HostedModernBert(make_modernbert(device))
    config = RuntimeConfig(**({"max_num_reqs": 4, "max_num_tokens": 40, "max_seq_len": 24, "decode_sizes": (2,)}
                              | {"mixed_sizes": (16, 40)} | options))  # fmt: skip
    runtime = Runtime(hosted, hosted.specs, vocab_size=VOCAB, device=device, config=config, sampler=None)
    runtime.capture()
    return runtime


def whole_rows(*sources: int) -> Batch:
    return Batch.from_requests([Request(row, SOURCES[s], len(SOURCES[s])) for row, s in enumerate(sources)])


@pytest.mark.parametrize("backend", ["torch_reference", "triton"])
def test_embeddings_of_modernbert_equal_transformers(backend: str, device: torch.device) -> None:
    """Packed sequences of any lengths and order, without a KV cache."""
    runtime = bert_runtime(device, backend=backend)
    assert runtime.kv_cache.groups == ()
    assert runtime.allocators == ()
    for sources in ((0, 1, 2, 3), (3, 2), (1,), (2, 2), (0, 2, 3)) if backend != "triton" else ((0, 3, 2),):
        poison_derived(runtime.manager.buffers)
        got = runtime.replay(whole_rows(*sources)).logits(copy=True).cpu()
        torch.testing.assert_close(got, torch.stack([embeddings()[s] for s in sources]), atol=2e-4, rtol=2e-4)
    assert len(runtime.replay(Batch.empty()).logits()) == 0
    runtime.close()


def test_replay_of_an_encoder_equals_eager_bitwise(device: torch.device) -> None:
    runtime = bert_runtime(device)
    for sources in ((0, 2), (0, 1, 2, 3), (2, 2), (3,)):
        poison_derived(runtime.manager.buffers)
        comparison = runtime.compare(whole_rows(*sources))
        assert comparison.equal, str(comparison)
    batch = Batch(req_indices=[3, 1], seq_lens=[1, 2], query_lens=[1, 2], tokens=[5, 6, 7])
    first = runtime.replay(batch).logits(copy=True)
    assert torch.equal(first, runtime.replay(batch, eager=True).logits(copy=True))
    runtime.close()


@pytest.mark.gpu
def test_captured_encoder_writes_other_pages_in_each_replay() -> None:
    device = torch.device("cuda", 0)
    cache = KVCache.allocate(KVCacheSpec(1, 2, 64, 16, dtype=BF16, cross=True), 20, device)
    k, v = torch.randn(2, 30, 2, 64, dtype=BF16, device=device)
    slots = cache.slots([1, 2], 30)
    cache.write(0, k, v, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.write(0, k, v, slots)
    for pages in ([9, 3], [4, 19]):
        slots.copy_(cache.slots(pages, 30))
        graph.replay()
        assert torch.equal(cache.k[0][pages].flatten(0, 1)[:30], k)
        assert torch.equal(cache.v[0][pages].flatten(0, 1)[:30], v)


def test_unsupported_backends_and_generators_raise() -> None:
    encoder, cross = (graphrt.Attention(4, 16, name="x", kind=k) for k in (AttentionKind.ENCODER, AttentionKind.CROSS))
    assert "kind=encoder" in repr(encoder)
    assert attention_specs(torch.nn.ModuleList([cross]))[0].kind is AttentionKind.CROSS
    groups = kv_groups([CROSS])
    with pytest.raises(UnsupportedError, match="cross attention: not supported"):
        get_attn_backend([CROSS], groups, "cpu", config=RuntimeConfig(max_encoder_len=8, backend="flash_attn3"))
    with pytest.raises(UnsupportedError, match="encoder attention: not supported"):
        get_attn_backend([ENCODER], (), "cpu", config=RuntimeConfig(backend="flash_attn2"))
    odd = AttentionSpec(4, 4, 20, F32, kind=AttentionKind.ENCODER)
    with pytest.raises(UnsupportedError, match="head_dim 20 in encoder attention: supports multiples of 8"):
        get_attn_backend([odd], (), "cpu", config=RuntimeConfig(backend="triton"))
    runtime = bart_runtime(CPU, use_graphs=False)[1]
    with pytest.raises(ConfigError, match="the model has cross layers or no KV cache"):
        TextGenerator(runtime)
    runtime.close()
