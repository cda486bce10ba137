"""Ranks of a gloo group: tokens as of one process, slow captures, and what a rank may not do."""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist

from graphrt.bench.decode import DecodeWork
from graphrt.bench.decode_ranks import rank_report
from graphrt.config import RequestTensor, RuntimeConfig
from graphrt.engine.ranks import Ranks
from graphrt.engine.shared_ring import SharedRing
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.errors import ConfigError, ReplayError, UnsupportedError
from graphrt.kernels.library import interpreted
from graphrt.kernels.ops import collectives
from graphrt.kernels.ops.collectives import VocabShards, vocab_part
from graphrt.kernels.ops.sampling import LogitBias, TokenMask, Truncation, sample
from graphrt.kernels.ops.sampling_reference import unpacked_bits
from graphrt.kernels.ops.sampling_shards import sample_shards
from graphrt.kernels.ops.sampling_state import Penalties, PenaltyState
from graphrt.models.config import ModelConfig
from graphrt.models.loading import load_draft_model, load_model, make_runtime
from graphrt.models.quantization import Quantization
from graphrt.models.sharding import Sharding
from graphrt.proposer import Proposer, ngram_drafts
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from tests.support.rank_processes import Outcome, run_ranks

PROMPTS = [[5, 17, 3, 88, 41, 9, 60, 17, 3, 2, 70], [33], [96, 90, 12, 54, 7, 5, 17, 3], [5, 17, 3, 88, 41, 9, 60]]
GREEDY = SamplingParams(max_new_tokens=20)
SAMPLED = [
    SamplingParams(max_new_tokens=20, temperature=1.2, seed=3),
    SamplingParams(max_new_tokens=20, temperature=0.8, seed=4, top_k=9, presence_penalty=0.7),
    SamplingParams(max_new_tokens=20, temperature=1.0, seed=5, top_p=0.8, logit_bias={7: 3.0, 80: 2.0}),
    SamplingParams(max_new_tokens=20, temperature=1.5, seed=6, min_p=0.1, repetition_penalty=1.3, logprobs=1),
]
CONFIG = RuntimeConfig(
    max_num_reqs=4, max_num_tokens=32, max_seq_len=48, decode_sizes=(2, 4), mixed_sizes=(32,), loop_sizes=(4,),
    penalties=True, max_logit_bias=4, token_masks=True, request_tensors=(RequestTensor("shift"),),
)  # fmt: skip
TINY = ModelConfig("llama", 97, 48, 64, 2, 6, 3, 8, 64)


def tokens_of(runtime: Runtime) -> dict[str, Any]:
    """Tokens of rank 0 from a generator that preempts, and from a session with forks, masks, chunks and a reset."""
    found: dict[str, Any] = {}
    for name, params in (("greedy", [GREEDY] * 4), ("sampled", [*SAMPLED[:3], GREEDY])):
        answers: list[list[int | None]] = [[] for _ in PROMPTS]
        generator = TextGenerator(runtime)
        for event in generator.generate(PROMPTS, params):
            answers[event.prompt].append(event.token)
        found[name] = answers
    assert generator.stats.shared_tokens
    assert generator.stats.preemptions
    with DecodeSession(runtime) as session:
        first = session.add(PROMPTS[0], SAMPLED[0], state={"shift": 1.0})
        words = [0x5A5A5A5A] * 3 + [1]
        session.set_token_mask(first, words)
        session.run(3)
        session.collect(wait=True)
        other = session.fork(first, seed=8)
        session.set_token_mask(first, None)
        session.run(6)
        session.collect(wait=True)
        found["forked"] = first.tokens, other.tokens
        assert all(words[token // 32] >> token % 32 & 1 for token in other.tokens)
    runtime.manager.reset()
    with DecodeSession(runtime) as session:
        again = session.add(PROMPTS[0], SAMPLED[0])
        session.run(2)
        session.collect(wait=True)
        assert again.tokens == found["sampled"][0][:2]
        if runtime.manager.has_ranks:
            launch = session.run(1)[0]
            with pytest.raises(UnsupportedError, match="stop: not supported with several ranks"):
                launch.stop()
            if runtime.device.type == "cpu":
                with pytest.raises(UnsupportedError, match="logits of its own tokens"):
                    runtime.manager.latest_logits(launch, False)
            with pytest.raises(UnsupportedError, match="record: not supported with several ranks"):
                runtime.manager.record()
            session.collect(wait=True)
        chunked = session.add([at % 97 for at in range(3, 43)], SamplingParams(max_new_tokens=6))  # in two chunks
        while session.running:
            session.run(1)
            session.collect(wait=True)
        found["chunked"] = chunked.tokens
    return found


def state_of(runtime: Runtime) -> str:
    """Digest of the request state, which is equal on all ranks."""
    b = runtime.manager.buffers
    tensors = (
        b.last_token,
        b.req_seq_lens,
        b.req_values,
        b.penalty_counts,
        b.token_history,
        b.mask_words,
        b.page_table,
    )
    return hashlib.sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)).hexdigest()


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """A GPU in a group of GPUs, else the CPU."""
    on_cuda = group is not None and "nccl" in dist.get_backend_config(group)
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def build(folder: Path, group: dist.ProcessGroup | None, config: RuntimeConfig, **options: Any) -> Runtime:
    loaded = load_model(folder, device=device_of(group), dtype=torch.float32, group=group)
    return make_runtime(loaded.model, config, **({"page_size": 4} | options))


def decode(group: dist.ProcessGroup | None, folder: Path, **options: Any) -> dict[str, Any]:
    found = {}
    with build(folder, group, CONFIG, num_pages=24, **options) as runtime:
        runtime.capture()
        if runtime.rank:
            with pytest.raises(ReplayError, match="expected this call on rank 0; call follow"):
                next(TextGenerator(runtime).generate(PROMPTS, GREEDY))
            runtime.follow()
        else:
            found = tokens_of(runtime)
        found["state"] = state_of(runtime)
        nbytes = sum(weight.nbytes for weight in runtime.manager._program.model.parameters())
        found["kv_bytes"] = runtime.kv_cache.nbytes
    config = RuntimeConfig(
        2, 24, 48, decode_sizes=(1, 2), mixed_sizes=(24,), num_speculative_tokens=3, max_logprobs=2, penalties=True,
        lazy_capture=True,
    )  # fmt: skip
    proposer: Proposer = ngram_drafts
    if not options:  # ranks that share the KV of a request take no draft model
        model = load_model(folder, device=device_of(group), dtype=torch.float32).model
        proposer = load_draft_model(folder, model)
    with build(folder, group, config, proposer=proposer, **options) as runtime:
        runtime.capture()
        if runtime.rank:
            runtime.follow()
        else:
            with DecodeSession(runtime) as session:
                requests = [session.add(PROMPTS[at], params) for at, params in ((0, GREEDY), (2, SAMPLED[3]))]
                while session.running:
                    if options and requests[0].tokens:
                        session.set_drafts(requests[0], found["greedy"][0][len(requests[0].tokens) :][:3])
                    session.run(2)
                    session.collect(wait=True)
                found["drafts"] = [request.tokens for request in requests]
                found["logprobs"] = [round(p.logprob, 3) for p in requests[1].logprobs if p is not None]
            assert runtime.stats().tokens_per_step[4] > 1
    if group is not None:
        found["bytes"] = nbytes
    return found


def check_sampling(group: dist.ProcessGroup) -> None:
    """Every option, on one row each and together, against the sampler of one process."""
    rows, vocab, generator, device = 64, 333, torch.Generator().manual_seed(1), device_of(group)

    def draw(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(rows, generator=generator)

    def some(values: torch.Tensor, off: float) -> torch.Tensor:
        return torch.where(torch.rand(rows, generator=generator) < 0.4, values, off).to(device)

    logits = (3 * torch.randn(rows, vocab, generator=generator)).round(decimals=1)  # with ties
    logits[0] = float("-inf")
    logits[1, 5:] = float("nan")
    logits[2] = 1.0
    logits, index = logits.to(device), torch.arange(rows, dtype=torch.int32, device=device)
    counts = torch.randint(0, 2, (rows, vocab), generator=generator, dtype=torch.int32)
    state, bias = PenaltyState.allocate(rows, vocab, 0, device), LogitBias.allocate(rows, 3, device)
    seen = torch.randint(-(2**31), 2**31 - 1, state.seen.shape, generator=generator, dtype=torch.int32)
    state.seen.copy_(seen)
    state.counts.copy_(counts * torch.stack([unpacked_bits(words, vocab) for words in seen]))
    bias.tokens.copy_(torch.tensor([1, 170, 332]))
    bias.values.copy_(torch.tensor([2.0, float("-inf"), 5.0]))
    bias.lists[::2] = torch.tensor([3, 2, 9])
    words = torch.randint(-(2**31), 2**31 - 1, (4, -(-vocab // 32)), generator=generator, dtype=torch.int32)
    arguments = some(draw(0.5, 1.5), 0), index.long(), index % 16
    options: dict[str, Any] = {
        "req_indices": index,
        "truncation": Truncation(
            some(draw(0, 40), 0).int(), some(draw(0, 1.1), 1).float(), some(draw(0, 0.3), 0).float()
        ),
        "penalties": Penalties(some(draw(0.8, 1.4), 1), some(draw(0, 1), 0), some(draw(0, 1), 0), state),
        "bias": bias,
        "token_mask": TokenMask(words.to(device), some(draw(0, 4), -1).int()),
    }
    first, end, columns = vocab_part(vocab, group.rank(), group.size())
    own = torch.zeros(rows, columns, device=device)  # padding columns are never sampled
    own[:, : end - first] = logits[:, first:end]
    on_cpu = device.type == "cpu"
    if on_cpu:
        found = sample_shards(own, *arguments, shards=VocabShards(vocab, group), **options)
        assert torch.equal(found, sample(logits, *arguments, **options))
    for chosen in ({"truncation": None, "req_indices": index}, options | {"truncation": None}):
        with interpreted() if on_cpu else contextlib.nullcontext():  # the kernels for GPUs
            found = sample_shards(own, *arguments, shards=VocabShards(vocab, group), **chosen)
        assert torch.equal(found, sample(logits, *arguments, **chosen))


def decode_interleaved(group: dist.ProcessGroup, folder: Path, size: int, interleave_size: int) -> dict[str, Any]:
    """Decode with pages of 4 tokens, of which each rank stores 4 / size."""
    options = {"context_parallel_size": size, "interleave_size": interleave_size}
    return decode(group, folder, page_size=4 // size, **options)


FAMILIES = {  # architecture, its sizes, ranks; ranks that share the KV of a request, and interleave_size
    "padded-heads": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 72}, 2),
    "biases": ("Qwen2", {"tie_word_embeddings": True}, 2),
    "interleaved": ("Llama", {"num_key_value_heads": 1}, 2, 2, 1),
    "interleaved-heads": ("Qwen3", {"head_dim": 8, "num_attention_heads": 8, "num_key_value_heads": 2}, 4, 2, 2),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_tokens_are_those_of_one_process(tmp_path: Path, case: str) -> None:
    from tests.support.model_fixtures import save_oracle

    family, sizes, count, *interleaved = FAMILIES[case]
    oracle = save_oracle(tmp_path, family, eos_token_id=None, **sizes)
    expected = decode(None, tmp_path)
    function = decode_interleaved if interleaved else decode
    outcomes = run_ranks(tmp_path, function, tmp_path, *interleaved, ranks=count)
    kv_bytes = expected.pop("kv_bytes")
    check_tokens(oracle, expected, outcomes)
    if interleaved:
        assert count * outcomes[0].value["kv_bytes"] == kv_bytes, "no rank stores what another one has"


def check_tokens(oracle: Any, expected: dict[str, Any], outcomes: list[Outcome]) -> None:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    first, *others = (outcome.value for outcome in outcomes)
    assert {other["state"] for other in others} == {first["state"]}
    full = sum(weight.nbytes for weight in oracle.parameters())
    assert max(outcome.value["bytes"] for outcome in outcomes) < 0.8 * full
    for name, tokens in expected.items():
        assert name in ("state", "kv_bytes") or first[name] == tokens, name
    for prompt, tokens in zip(PROMPTS, first["greedy"], strict=True):
        ids = oracle.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert ids[0, len(prompt) :].tolist() == tokens


def run_page(group: dist.ProcessGroup, source: str) -> list[int]:
    names: dict[str, Any] = {"prompts": [PROMPTS[0]], "params": GREEDY}
    exec(source, names)
    return [event.token for event in names.get("events", ())]


def test_block_of_the_docs_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    from tests.support.model_fixtures import save_oracle

    oracle = save_oracle(tmp_path / "model", "Llama", eos_token_id=None)
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    block = re.findall(r"^```python\n(import.*?)^```", page, re.DOTALL | re.MULTILINE)[0]
    lines = [line for line in block.splitlines() if not line.startswith(("dist.init_process_group", "torch.cuda"))]
    assert len(lines) == len(block.splitlines()) - 2
    source = "\n".join(lines).replace('"org/name", device="cuda"', f'{str(tmp_path / "model")!r}, device="cpu"')
    first, other = run_ranks(tmp_path, run_page, source.replace("RuntimeConfig()", "RuntimeConfig(4, 32, 48)"))
    assert (first.error, other.error, other.value) == (None, None, [])
    want = oracle.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=20, do_sample=False)
    assert PROMPTS[0] + first.value == want[0].tolist()


def test_sampling_of_shards(tmp_path: Path) -> None:
    assert [outcome.error for outcome in run_ranks(tmp_path, check_sampling, ranks=3)] == [None] * 3


def test_ring_carries_messages_larger_than_itself() -> None:
    def wait(done: Callable[[], bool]) -> None:
        while not done():
            time.sleep(0)

    counters, memory = np.zeros(3, np.int64), np.zeros(37, np.uint8)
    writer, *readers = (SharedRing(counters, memory, reader, wait) for reader in (None, 0, 1))
    messages = [bytes(range(256))[:size] for size in (0, 1, 28, 29, 30, 200, 37)]
    with ThreadPoolExecutor(2) as pool:
        received = [pool.submit(lambda r=reader: [r.receive() for _ in messages]) for reader in readers]
        for message in messages:
            writer.send(message)
    assert [found.result() for found in received] == [messages] * 2


def refusals(group: dist.ProcessGroup) -> list[str]:
    model, found = load_model(TINY, device="cpu", group=group).model, []
    for options in ({"shadow_every": 4},):
        with pytest.raises(UnsupportedError) as error:
            make_runtime(model, RuntimeConfig(2, 16, 48, **options))
        found.append(str(error.value))
    text = "expected a divisor of the 1 ranks that hold the same KV head, got 2"
    with pytest.raises(ConfigError, match=text):
        make_runtime(model, RuntimeConfig(2, 16, 48), context_parallel_size=2)
    return found


def test_options_without_ranks_are_refused(tmp_path: Path) -> None:
    outcomes = run_ranks(tmp_path, refusals)
    advice = "omit it, or use one rank"
    expected = [f"group: several ranks do not support shadow_every; {advice}"]
    assert [outcome.value for outcome in outcomes] == [expected] * 2


def bench(group: dist.ProcessGroup) -> list[float]:
    work = DecodeWork([1, 3], 9, 2, sampling=SamplingParams(presence_penalty=0.5))
    report = rank_report(group, torch.device("cpu"), TINY, 4, 16, work)
    return [] if report is None else [result.replay_ms for result in report.results]


def test_bench_of_several_ranks(tmp_path: Path) -> None:
    first, other = run_ranks(tmp_path, bench)
    assert (first.error, other.error, other.value) == (None, None, [])
    assert len(first.value) == 2


def gather_in_subgroups(world: dist.ProcessGroup) -> list[int]:
    """The second of two replicas starts after the first. Its odd ranks are late."""
    replicas, new_group = [dist.new_group(range(start, start + 4)) for start in (0, 4)], dist.new_group
    own = Ranks.of(replicas[world.rank() // 4])
    if world.rank() >= 4:
        time.sleep(1)

    def new_group_late(*arguments: Any, **options: Any) -> Any:
        time.sleep(world.rank() % 2)
        return new_group(*arguments, **options)

    dist.new_group = new_group_late
    subgroup = own.subgroup(2)
    gathered = collectives.gather(torch.tensor([world.rank()]), subgroup)
    return gathered.flatten().tolist()


def test_subgroups_of_replicas(tmp_path: Path) -> None:
    outcomes = run_ranks(tmp_path, gather_in_subgroups, ranks=8)
    pairs = [[rank // 2 * 2, rank // 2 * 2 + 1] for rank in range(8)]
    assert [outcome.value for outcome in outcomes] == pairs, outcomes


class Group:
    """Stands for a process group."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.size = lambda: rank, lambda: ranks


@pytest.mark.parametrize(("changes", "ranks", "text"), [
    ({"num_q_heads": 6, "num_kv_heads": 3}, 4, "6 query and 3 KV heads cannot be divided among 4 ranks"),
    ({"num_q_heads": 6, "num_kv_heads": 2}, 4, "6 query and 2 KV heads cannot be divided among 4 ranks"),
    ({"vocab_size": 31}, 2, "a vocabulary of 31 is too small for 2 ranks"),
    ({"quantization": Quantization(4, 32)}, 3, "the attention output would have 16 inputs per rank"),
])  # fmt: skip
def test_model_that_cannot_be_split_is_refused(changes: dict[str, int], ranks: int, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        Sharding.of(replace(TINY, **changes), Group(0, ranks))
