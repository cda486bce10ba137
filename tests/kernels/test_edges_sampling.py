"""Limits of `sample` and `write_outputs`: vocabularies, seeds, positions and rings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata.write_outputs import write_outputs
from graphrt.kernels.ops.sampling import sample
from graphrt.kernels.ops.sampling_logits import SAMPLE_CHUNK, exponential
from graphrt.kernels.ops.sampling_reference import exponential_reference
from graphrt.kernels.types import NO_TOKEN, FaultCode, FinishReason, RequestStatus
from tests.support.refresh_rig import make_buffers
from tests.support.sampling_cases import arguments, one_hot_rows

INF = float("inf")
S, F = RequestStatus, FaultCode


@triton.jit
def _gumbel_kernel(words_ptr, out_ptr, N: tl.constexpr):
    lanes = tl.arange(0, N)
    words = tl.load(words_ptr + lanes).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + lanes, -tl.log(exponential(words.to(tl.float32) * 2.0**-32 + 2.0**-33)))


def test_noise_equals_the_reference(kernel_device: torch.device) -> None:
    """For words of all lengths: draws do not show the noise of other tokens, nor its precision."""
    words = torch.cat((2 ** torch.arange(32), 2**32 - 2 ** torch.arange(32), torch.arange(1, 65) << 26))
    words = words.clamp(max=2**32 - 2**20)  # beyond, 1 - u has few bits left, and one of them decides
    signed = torch.where(words < 2**31, words, words - 2**32).int().to(kernel_device)
    out = torch.empty(128, device=kernel_device)
    _gumbel_kernel[(1,)](signed, out, N=128)
    expected = -exponential_reference(words).log()
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=1e-4)  # a device's log is good to 2**-22


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_vocabulary_of_one(op_device: torch.device, temperature: float) -> None:
    logits = torch.tensor([[0.5], [-INF], [INF], [float("nan")], [-1e38]], device=op_device)
    assert sample(*arguments(logits, temperature)).tolist() == [0, NO_TOKEN, 0, NO_TOKEN, 0]


@pytest.mark.parametrize("vocab", [SAMPLE_CHUNK // 4, SAMPLE_CHUNK // 4 + 1, 3 * SAMPLE_CHUNK - 1, 3 * SAMPLE_CHUNK])
@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_every_chunk_is_searched_to_its_last_token(op_device: torch.device, vocab: int, temperature: float) -> None:
    """At a low temperature the peak wins; the memory after a row is the next row, and never sampled."""
    quarter = SAMPLE_CHUNK // 4
    peaks = sorted({0, quarter - 1, min(quarter, vocab - 1), vocab - 1, vocab // 2, max(vocab - quarter, 0)})
    logits = torch.cat([one_hot_rows(vocab, {peak: 9.0}) for peak in peaks]).to(op_device)
    assert sample(*arguments(logits, temperature)).tolist() == peaks
    flat = torch.full((len(peaks) * vocab + 1,), 1e30, device=op_device)[:-1].view(len(peaks), vocab)
    flat.copy_(logits)
    assert sample(*arguments(flat, temperature)).tolist() == peaks


RINGS = ("step_ring", "token_ring", "finish_reason_ring", "fault_code_ring", "fault_value_ring", "draft_count_ring")


def test_rings_of_the_smallest_width(op_device: torch.device) -> None:
    """One entry as wide as the step, and an entry of wider rings: other memory is not written."""
    for depth, width, step in ((1, 3, 7), (1, 3, 0), (3, 5, 5), (2, 3, 2**40 + 1)):
        buffers = make_buffers(op_device, 3, 4)
        pinned = op_device.type == "cuda"
        whole = {
            name: torch.full(
                (depth + 2, *getattr(buffers, name).shape[1:-1], width),
                -77,
                dtype=getattr(buffers, name).dtype,
                pin_memory=pinned,
            )
            for name in RINGS
        }
        whole["step_ring"] = torch.full((depth + 2,), -77, dtype=torch.int64, pin_memory=pinned)
        buffers = replace(buffers, **{name: ring[1:-1] for name, ring in whole.items()})
        buffers.last_token.copy_(torch.tensor([10, 11, 12, 13]))
        buffers.req_indices.copy_(torch.tensor([2, 0, -1]))
        buffers.drafts_left.copy_(torch.tensor([0, -1, -1]))
        buffers.fault_code.copy_(torch.tensor([0, 0, F.BAD_LENGTH]))
        buffers.fault_value.copy_(torch.tensor([0, 0, 2**40]))
        buffers.step_counter.fill_(step)
        write_outputs(buffers, torch.tensor([21, 22, 23], device=op_device), vocab_size=24)
        if pinned:
            torch.cuda.synchronize()
        expected = {name: torch.full_like(ring, -77).tolist() for name, ring in whole.items()}
        entry = 1 + step % depth
        expected["step_ring"][entry] = step
        expected["token_ring"][entry][0][:3] = [21, NO_TOKEN, NO_TOKEN]
        expected["finish_reason_ring"][entry][:3] = [FinishReason.RUNNING, FinishReason.RUNNING, FinishReason.FAULT]
        expected["fault_code_ring"][entry][:3] = [0, 0, int(F.BAD_LENGTH)]
        expected["fault_value_ring"][entry][2] = 2**40
        assert {name: ring.tolist() for name, ring in whole.items()} == expected
        assert buffers.last_token.tolist() == [NO_TOKEN, 11, 21, 13]


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize(("depth", "width"), [(0, 3), (2, 2), (0, 0), (1, 0), (1, 3), (3, 3)])
def test_a_ring_without_room(ring: str, depth: int, width: int) -> None:
    buffers = make_buffers(torch.device("cpu"), 3, 4, ring=2)
    inner = getattr(buffers, ring).shape[1:-1]  # of a ring with positions
    changes = {ring: getattr(buffers, ring).new_zeros(depth, *inner, width)}
    if ring == "step_ring":  # defines the depth of the others
        changes = {name: getattr(buffers, name)[:0] for name in RINGS}
    with pytest.raises(ShapeError, match=rf"^{ring}: expected .* got (shape )?\[(0|{depth},( 1,)? {width})\]"):
        write_outputs(replace(buffers, **changes), torch.zeros(3, dtype=torch.int32), vocab_size=8)
