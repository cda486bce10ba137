"""Arguments of ReplayManager, its samplers and models, attend() and descriptors: errors name the wrong one."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
import torch

from graphrt.batch import Batch
from graphrt.cache.kv_cache import KVCache
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.config import RuntimeConfig
from graphrt.engine.handle import StepFaultError
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError, UnsupportedError
from graphrt.replay import ReplayManager
from graphrt.spec import AttentionSpec, KVCacheSpec
from graphrt.step import Step
from tests.support.steps import CPU, assert_works, good
from tests.support.toy import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, Rig, ToyModel, make_rig


@pytest.fixture(scope="module")
def rig() -> Rig:
    return make_rig(CPU)


def test_check_weights_takes_modules_only(rig: Rig) -> None:
    for wrong in (None, lambda step: None):
        with pytest.raises(ConfigError, match="model: expected Module, got"):
            rig.manager.check_weights(wrong)


def built(device: torch.device = CPU, **changes: object) -> ReplayManager:
    spec = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, dtype=torch.float32)
    arguments = {
        "model": ToyModel(CPU, torch.float32),
        "kv_cache": KVCache.allocate(spec, 8, device),
        "attention": AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, torch.float32),
        "vocab_size": VOCAB,
        "config": RuntimeConfig(max_num_reqs=2, max_num_tokens=4, max_seq_len=8),
    }
    return ReplayManager(**{**arguments, **changes})


BAD_MANAGER = {
    "kv_cache": ({"kv_cache": None}, "kv_cache: expected KVCache, got None"),
    "attention-item": ({"attention": [None] * LAYERS}, r"attention\[0\]: expected AttentionSpec, got None"),
    "weights": ({"weights": "abc"}, "weights: expected pairs of a name and a tensor, got 'abc'"),
    "weights-items": ({"weights": [("a", 1)]}, r"weights\[0\]: expected a name and a tensor"),
    "config": ({"config": {}}, "config: expected RuntimeConfig, got {}"),
    "stream": ({"stream": 0}, "stream: expected None with a cache on cpu, got 0"),
}


@pytest.mark.parametrize("case", BAD_MANAGER)
def test_bad_manager_arguments_are_named(case: str) -> None:
    changes, text = BAD_MANAGER[case]
    with pytest.raises(ConfigError, match=text):
        built(**changes)
    built().close()


def test_mixed_sizes_need_mixed_batches(rig: Rig) -> None:
    alone = built(config=RuntimeConfig(max_num_reqs=2, max_num_tokens=4, max_seq_len=8, mixed_batches=False))
    alone.capture()
    batch = Batch(req_indices=[0], seq_lens=[1], tokens=[3], page_indptr=[0, 1], page_ids=[5])
    with pytest.raises(UnsupportedError, match="a decode size with mixed_batches=False, got mixed"):
        alone.replay(batch, descriptor=BatchDescriptor.mixed(4, 2))
    assert alone.replay(batch, descriptor=BatchDescriptor.decode(2)).descriptor == BatchDescriptor.decode(2)
    alone.close()


def test_descriptors_are_equal_in_every_process() -> None:
    """Ranks send descriptors to each other: hashes of strings would differ."""
    code = "import pickle, sys; d = pickle.load(sys.stdin.buffer); print(hash(d))"
    sent = pickle.dumps(BatchDescriptor.mixed(64, 8))
    result = subprocess.run(
        [sys.executable, "-c", code], input=sent, capture_output=True, check=True,
        env=os.environ | {"PYTHONHASHSEED": str(1 + hash("another") % 1000)},
    )  # fmt: skip
    assert int(result.stdout) == hash(BatchDescriptor.mixed(64, 8))
    for kind, reqs in (("decode", 1), (GraphKind.DECODE, "1"), (GraphKind.DECODE, 1.0), (GraphKind.MIXED, 0)):
        with pytest.raises(ConfigError, match=r"BatchDescriptor\.(kind|padded_reqs): expected"):
            BatchDescriptor(kind, reqs, 1)


DESCRIPTORS = {
    "type": ("decode", ConfigError, "descriptor: expected BatchDescriptor, got 'decode'"),
    "unknown": (BatchDescriptor.decode(3), ConfigError, "is not a size that this runtime pads to"),
    "query_len": (BatchDescriptor.decode(2, 2), ConfigError, "is not a size that this runtime pads to"),
    "beyond": (BatchDescriptor.decode(64), ConfigError, "is not a size that this runtime pads to"),
    "small": (BatchDescriptor.decode(1), CapacityError, "does not fit 2 requests and 2 tokens; choose"),
}


@pytest.mark.parametrize("case", DESCRIPTORS)
def test_descriptors_that_do_not_fit_a_batch_are_refused(rig: Rig, case: str) -> None:
    descriptor, error, text = DESCRIPTORS[case]
    with pytest.raises(error, match=text):
        rig.manager.replay(Batch(**good()), descriptor=descriptor)
    uneven = Batch(**good(seq_lens=[2, 1], query_lens=[2, 1], tokens=[3, 4, 5]))
    with pytest.raises(CapacityError, match="of unequal query lengths; choose"):
        rig.manager.replay(uneven, descriptor=BatchDescriptor.decode(8))
    assert_works(rig)


def captured(model: object = None, device: torch.device = CPU, **changes: object) -> ReplayManager:
    """A manager with one graph, for 4 requests."""
    config = RuntimeConfig(max_num_reqs=4, max_num_tokens=16, max_seq_len=16, decode_sizes=(4,), mixed_sizes=())
    manager = built(device, model=model or ToyModel(device, torch.float32), config=config, **changes)
    manager.capture()
    return manager


OUTPUTS = {
    # a change of the tokens or of the logits
    "one-more": (lambda x: x.repeat(2), r"tokens: expected shape \[4\], got \[8\]"),
    "keepdim": (lambda x: x[:, None], r"tokens: expected shape \[4\], got \[4, 1\]"),
    "one-less": (lambda x: x[1:], r"tokens: expected shape \[4\], got \[3\]"),
    "scalar": (lambda x: x[0], r"tokens: expected shape \[4\], got \[\]"),
    "float": (lambda x: x.float(), "tokens: expected dtype int32 or int64, got float32"),
    "int16": (lambda x: x.short(), "tokens: expected dtype int32 or int64, got int16"),
    "list": (lambda x: [0] * 4, "tokens: expected a torch.Tensor, got list"),
    "none": (lambda x: None, "tokens: expected a torch.Tensor, got NoneType"),
    "elsewhere": (lambda x: x.to("meta"), "tokens: expected device cpu, got meta"),
    "one-more-row": (lambda x: torch.cat([x, x[:1]]), r"logits: expected shape \[4, 61\], got \[5, 61\]"),
    "one-column-less": (lambda x: x[:, 1:], "logits: expected vocab_size=61 per request, got 60; pass"),
    "flat": (lambda x: x.flatten(), "logits: expected shape"),
    "text": (lambda x: "text", "logits: expected a torch.Tensor, got str"),
    "double": (lambda x: x.double(), "logits: expected dtype float16 or bfloat16 or float32, got float64"),
    "logits-elsewhere": (lambda x: x.to("meta"), "logits: expected device cpu, got meta"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_wrong_sampler_output_and_logits_raise(case: str) -> None:
    change, text = OUTPUTS[case]
    model = ToyModel(CPU, torch.float32)
    of_model, of_sampler = change, lambda tokens: tokens
    if text.startswith("tokens"):
        of_model, of_sampler = of_sampler, of_model
    with pytest.raises(ShapeError, match=text):
        captured(lambda step: of_model(model(step)), sampler=lambda logits, step: of_sampler(logits.argmax(-1)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_sampler_may_return_int32_or_int64(device: torch.device, dtype: torch.dtype) -> None:
    manager = captured(device=device, sampler=lambda logits, step: logits.argmax(-1).to(dtype))
    assert manager.replay(Batch(**good())).tokens()[0] == ToyModel(device, torch.float32).oracle([3]).argmax()


def test_vocabulary_of_one(device: torch.device) -> None:
    manager = captured(lambda step: torch.ones_like(step.logits_indices).float()[:, None], device, vocab_size=1)
    assert manager.replay(Batch(**good(tokens=[0, 0]))).tokens().tolist() == [0, 0]
    with pytest.raises(StepFaultError, match="TOKEN_OUT_OF_RANGE: token 1"):
        manager.replay(Batch(**good(tokens=[1, 0]))).tokens()


def attend(**changes):
    """A model that calls `attend` of layer `at` with one changed argument."""

    def model(step: Step) -> torch.Tensor:
        tokens = step.descriptor.padded_tokens
        q, k = torch.zeros(tokens, HEADS, HEAD_DIM), torch.zeros(tokens, KV_HEADS, HEAD_DIM)
        given = {"layer": 0, "q": q, "k": k, "v": k.clone()}
        step.attend(**given | {name: change(given.get(name, q)) for name, change in changes.items()})
        return torch.zeros(step.descriptor.padded_reqs, VOCAB)

    return model


ATTEND = {
    "layer-below": ({"layer": lambda x: -1}, "layer: expected an int from 0 to 1, got -1"),
    "layer-above": ({"layer": lambda x: 2}, "layer: expected an int from 0 to 1, got 2"),
    "q-tokens": ({"q": lambda x: x[1:]}, r"q: expected shape \[4, 4, 16\], got \[3, 4, 16\]"),
    "q-heads": ({"q": lambda x: x[:, 1:]}, r"q: expected shape \[4, 4, 16\], got \[4, 3, 16\]"),
    "q-size": ({"q": lambda x: x[..., 1:]}, "q: expected shape"),
    "q-dtype": ({"q": lambda x: x.half()}, "q: expected dtype float32, got float16"),
    "q-device": ({"q": lambda x: x.to("meta")}, "q: expected device cpu, got meta"),
    "k-heads": ({"k": lambda x: x[:, :1]}, "k: expected shape"),
    "k-tokens": ({"k": lambda x: x[1:]}, "k: expected shape"),
    "k-size": ({"k": lambda x: x[..., 1:]}, "k: expected shape"),
    "v-tokens": ({"v": lambda x: x[1:]}, "v: expected shape"),
    "v-heads": ({"v": lambda x: x[:, :1]}, "v: expected shape"),
    "v-size": ({"v": lambda x: x[..., 1:]}, "v: expected shape"),
    "k-dtype": ({"k": lambda x: x.half()}, "k: expected dtype float32, got float16"),
    "v-dtype": ({"v": lambda x: x.half()}, "v: expected dtype float32, got float16"),
    "k-device": ({"k": lambda x: x.to("meta")}, "k: expected device cpu, got meta"),
    "v-device": ({"v": lambda x: x.to("meta")}, "v: expected device cpu, got meta"),
    "sinks": ({"sinks": lambda x: torch.zeros(HEADS)}, "sinks: expected None for layer 0"),
}


@pytest.mark.parametrize("case", ATTEND)
def test_wrong_attend_argument_is_named(case: str) -> None:
    changes, text = ATTEND[case]
    captured(attend())
    with pytest.raises(ShapeError, match=text):
        captured(attend(**changes))


def test_the_tokens_of_a_product_are_checked() -> None:
    rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM

    def model(step: Step) -> torch.Tensor:
        hidden = torch.zeros(step.descriptor.padded_tokens, 8)
        step.linear_rope_write(0, hidden[1:], torch.zeros(rows, 8))
        return torch.zeros(step.descriptor.padded_reqs, VOCAB)

    with pytest.raises(ShapeError, match=r"x: expected shape \[4, 8\], got \[3, 8\]"):
        captured(model)


def test_a_backend_that_cannot_serve_gives_all_reasons() -> None:
    spec = KVCacheSpec(LAYERS, KV_HEADS, 520, 4, dtype=torch.float32)
    attention = AttentionSpec(HEADS, KV_HEADS, 520, torch.bfloat16)
    config = RuntimeConfig(max_num_reqs=2, max_num_tokens=4, max_seq_len=8, backend="triton")
    with pytest.raises(UnsupportedError, match=r"triton: does not support this model.*head_dim.*; .*bfloat16.*float32"):
        built(attention=attention, kv_cache=KVCache.allocate(spec, 10, CPU), config=config)
