"""Collectives inside a step, and the embedding whose vocabulary is split over ranks.

Every rank sums in float32, in the order of the ranks. All ranks thus get the same bits, and a sum does not depend on
the number of tokens. CPU tensors are exchanged by gloo, and the host waits for them. CUDA tensors are exchanged by NCCL
on the current stream, which can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.nn import functional

from graphrt.kernels.library import define_op
from graphrt.kernels.ops.all_reduce import symmetric_buffer_for
from graphrt.kernels.sizes import ceil_div

VOCAB_MULTIPLE = 32
"""The number of tokens per rank is a multiple of this: words of token masks and groups of noise have 32 tokens."""

Queue = Callable[[], dist.Work | None]
"""Queues a collective. Returns the work that the host waits for; None if a stream waits."""

runners: dict[str, Callable[[Queue], None]] = {}
"""Functions that queue a collective and wait for it, by the name of the group. In groups without a function, the host
waits without a time limit."""

# torch 2.13 renamed the function.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class VocabShards(NamedTuple):
    """Logits whose columns are split over the ranks of a group; see `vocab_part`."""

    vocab_size: int
    group: dist.ProcessGroup

    @property
    def columns(self) -> int:
        """Number of columns of each rank, with padding."""
        return vocab_part(self.vocab_size, 0, self.group.size())[2]

    @classmethod
    def of(cls, vocab_size: int, group: dist.ProcessGroup | None) -> VocabShards | None:
        """Return the shards of a group; None without one."""
        return None if group is None else cls(vocab_size, group)


def vocab_part(vocab_size: int, rank: int, ranks: int) -> tuple[int, int, int]:
    """Return the first token of a rank, the end of its tokens, and the number of its columns, which is equal on all
    ranks. Columns after the last token are padding."""
    columns = VOCAB_MULTIPLE * ceil_div(ceil_div(vocab_size, ranks), VOCAB_MULTIPLE)
    first = min(rank * columns, vocab_size)
    return first, min(first + columns, vocab_size), columns


def gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensors of all ranks [ranks, *x.shape], which have equal shapes. Not an operator; see `all_gather`."""
    out = x.new_empty((group.size(), *x.shape))
    gathered, own = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (out, x))
    _run(lambda: all_gather_single(gathered, own, group=group, async_op=not x.is_cuda), group)
    return out


def _exchange(x: torch.Tensor, group_name: Any) -> torch.Tensor:
    out, group = torch.empty_like(x), _resolve_process_group(group_name)
    received, sent = (tensor.view(torch.uint8).flatten() for tensor in (out, x))
    _run(lambda: dist.all_to_all_single(received, sent, group=group, async_op=not x.is_cuda), group)
    return out


def _run(queue: Queue, group: dist.ProcessGroup) -> None:
    if (run := runners.get(group.group_name)) is not None:
        run(queue)
    elif (work := queue()) is not None:
        work.wait()


def _gather(x: torch.Tensor, group_name: Any, ranks: int) -> torch.Tensor:
    return gather(x, _resolve_process_group(group_name))


_all_gather_op = define_op(
    "all_gather(Tensor x, str group, int ranks) -> Tensor",
    triton_impl=_gather,
    reference=_gather,
    fake=lambda x, group, ranks: x.new_empty((ranks, *x.shape)),
)


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensors of all ranks [ranks, *x.shape], which have equal shapes. Capture-safe."""
    gathered: torch.Tensor = _all_gather_op(x, group.group_name, group.size())
    return gathered


_all_to_all_op = define_op(
    "all_to_all(Tensor x, str group) -> Tensor",
    triton_impl=_exchange,
    reference=_exchange,
    fake=lambda x, group: torch.empty_like(x),
)


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send x[r] to each rank r, and return what they sent, in the order of the ranks. Capture-safe.

    x        [ranks, ...]  contiguous; of equal shape on all ranks
    returns  [ranks, ...]  dtype of x
    """
    received: torch.Tensor = _all_to_all_op(x, group.group_name)
    return received


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of the tensors of all ranks, summed in float32 in the order of the ranks. Capture-safe."""
    if (buffer := symmetric_buffer_for(group, x)) is not None:
        return buffer.sum(x)
    first, *others = all_gather(x, group).unbind()
    total = first.float()
    for other in others:
        total = total + other
    return total.to(x.dtype)


def gather_logits(logits: torch.Tensor, shards: VocabShards) -> torch.Tensor:
    """Return the logits of the whole vocabulary [rows, vocab_size] from the columns of each rank. Capture-safe."""
    gathered = all_gather(logits, shards.group)
    return gathered.transpose(0, 1).flatten(1)[:, : shards.vocab_size].contiguous()


def embedding(ids: torch.Tensor, weight: torch.Tensor, shards: VocabShards | None) -> torch.Tensor:
    """Return the rows of `weight` at `ids`, whose vocabulary may be split over ranks.

    ids      [tokens]          int64  device; tokens of the whole vocabulary
    weight   [columns, width]  the rows of this rank's tokens; see `vocab_part`
    returns  [tokens, width]   weight's dtype

    Capture-safe.
    """
    if shards is None:
        return functional.embedding(ids, weight)
    first, end, _ = vocab_part(shards.vocab_size, shards.group.rank(), shards.group.size())
    own = (ids >= first) & (ids < end)
    rows = functional.embedding(torch.where(own, ids - first, 0), weight)
    return all_reduce(rows * own[:, None], shards.group)
