"""What classes state of their kernels, measured: reads of the null page, nodes per layer.

The logic runs on CPU over the fake kernels; what it measures of the real ones counts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.backends.base import AttentionBackend
from graphrt.backends.flash_attn2 import FlashAttention2Backend
from graphrt.backends.flash_attn3 import FlashAttention3Backend
from graphrt.backends.flashinfer import FlashInferBackend
from graphrt.testing.backend_features import FEATURES
from graphrt.testing.backend_rig import NAN, Rig, make_rig
from tests.support import fake_packages

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PEERS = (FlashAttention2Backend, FlashAttention3Backend, FlashInferBackend)
LIVE = 2  # real rows of the probes, of 4


def params(*classes: type[AttentionBackend]) -> list:
    """Each class with its real kernels on CUDA, and with fake ones on CPU."""
    real = [pytest.param(cls, CUDA, id=f"{cls.name}-cuda", marks=pytest.mark.gpu) for cls in classes]
    return real + [pytest.param(fake_packages.on_cpu(cls), CPU, id=f"{cls.name}-cpu") for cls in classes]


@pytest.fixture
def kernels(cls: type[AttentionBackend], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device is CPU:
        fake_packages.install_package(monkeypatch, cls.name, cls.package.module)


def raw_results(rig: Rig, monkeypatch: pytest.MonkeyPatch, fill: int, null_page: float) -> torch.Tensor:
    """What the first layer's kernel gave, before pad tokens are zeroed, with a fill of pad rows and of the null page.

    Memory that no kernel writes holds NaN, so that it compares equal.
    """
    rig.metadata.seq_lens[LIVE:] = fill
    for q in rig.q:
        q[LIVE:] = 1.0  # NaN there would hide what is read
    for layer in rig.layers:
        for cache in (layer.k_cache, layer.v_cache):
            cache[0] = null_page
    raw: list[torch.Tensor] = []
    real = rig.backend.write

    def write(result: torch.Tensor, *others: torch.Tensor | None) -> None:
        raw.append(result.detach().clone())
        real(result, *others)

    monkeypatch.setattr(rig.backend, "write", write)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    try:
        rig.eager()
    finally:
        torch.use_deterministic_algorithms(False)
    return raw[0].cpu()


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize(("cls", "device"), params(*PEERS))
@pytest.mark.usefixtures("kernels")
def test_seq_len_fill_of_padding_requests(
    cls: type[AttentionBackend], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the stated fill, a kernel reads the null page if that is 1, and nothing if it is 0. No fill, and nothing in
    the null page, reaches a real row."""
    rig = make_rig(cls, FEATURES["plain"], device)
    rig.write([rig.sequence(rig.context.kv_groups[0].page_size + 1, 1), rig.sequence(2, 1)])
    raw = {
        (fill, null): raw_results(rig, monkeypatch, fill, null) for fill in (0, 1) for null in (NAN, 1.0)
    }  # fmt: skip
    reads = {
        fill: not torch.equal(raw[fill, NAN][LIVE:].nan_to_num(7.0), raw[fill, 1.0][LIVE:].nan_to_num(7.0))
        for fill in (0, 1)
    }
    print(f"{cls.name}: reads the null page for a pad row with seq_lens of 0: {reads[0]}, of 1: {reads[1]}")
    for key, result in raw.items():
        assert result[:LIVE].isfinite().all(), key
        assert torch.equal(result[:LIVE], raw[0, NAN][:LIVE]), key
    assert reads[1], "a length of 1 is read, and the probe sees it"
    assert reads[cls.seq_len_fill] == (cls.seq_len_fill == 1)
    if cls.name == "flashinfer":  # its fill is in the plan: seq_lens are never read
        for null in (NAN, 1.0):
            assert torch.equal(raw[0, null].nan_to_num(7.0), raw[1, null].nan_to_num(7.0))
    rig.close()


def nodes_per_layer(cls: type[AttentionBackend], device: torch.device, *, one_split: bool) -> int:
    """Number of graph nodes that a second layer adds."""
    nodes = []
    for layers in (1, 2):
        rig = make_rig(cls, replace(FEATURES["plain"], layers=({},) * layers, batch_invariant=one_split), device)
        splits = rig.backend.num_splits(rig.descriptor, rig.layers[0].spec)
        assert (splits == 1) == one_split or device is CPU, splits
        rig.write([rig.sequence(1, 1)])
        rig.capture()
        nodes.append(rig.graph.report.nodes)
        rig.close()
    return nodes[1] - nodes[0]


@pytest.mark.parametrize(("cls", "device"), params(FlashAttention3Backend))
@pytest.mark.usefixtures("kernels")
def test_graph_nodes_of_flash_attn3(cls: type[FlashAttention3Backend], device: torch.device) -> None:
    """With one split a fill zeroes the scheduler's semaphore; with more splits, a merge does."""
    one, many = (nodes_per_layer(cls, device, one_split=one_split) for one_split in (True, False))
    print(f"flash_attn3: {one} nodes per layer at one split, {many} above; difference {one - many}")
    assert min(one, many) > 0
    if device is CPU:
        return  # the op trace's ops are the fake's
    kernel_and_select = 2
    assert one - kernel_and_select == 1, f"correct the text of the class: {one} nodes"
    assert many - kernel_and_select in (1, 2), many
    assert one - many in (-1, 0), "few splits add no node"
