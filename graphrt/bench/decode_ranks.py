"""The decode benchmark on several ranks of one host, compared with one rank. Each rank is a new process."""

from __future__ import annotations

import multiprocessing
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed as dist

from graphrt import env
from graphrt.bench.decode import DecodeReport, DecodeWork, bench_decode, decode_runtime
from graphrt.engine.ranks import CUDA_BACKENDS
from graphrt.kernels.errors import ConfigError, GraphRTError, RankError
from graphrt.kernels.types import KVLayout
from graphrt.models.config import ModelConfig
from graphrt.models.loading import load_model

_EXIT_SECONDS = 15


@dataclass(frozen=True, slots=True)
class RankResult:
    """Times of one batch size on several ranks, and their ratios to one rank in the same run.

    share_of_floor  of rank 0; see DecodeResult
    """

    batch: int
    ranks: int
    replay_ms: float
    replay_ratio: float
    share_of_floor: float
    host_us: float
    host_ratio: float


def bench_ranks(
    one: DecodeReport,
    source: str | ModelConfig,
    ranks: int,
    work: DecodeWork,
    *,
    device: torch.device,
    page_size: int,
    max_positions: int,
) -> list[RankResult]:
    """Run the benchmark of `one` on several ranks. Rank r runs on GPU r, or all ranks on the CPU.

    source, max_positions   of `load_model`
    work                    of `one`

    Raises: ConfigError: if there are fewer GPUs than ranks. RankError: if a rank ends. Errors of rank 0 are raised too.
    """
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        raise ConfigError(
            f"--tp: expected at most {torch.cuda.device_count()}, the number of GPUs, got {ranks}; lower it"
        )
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            of_rank = (None if rank else sender, f"file://{folder}/rendezvous", rank, ranks, device.type)
            processes.append(context.Process(target=_run, args=(*of_rank, source, page_size, max_positions, work)))
            processes[-1].start()
        sender.close()
        try:
            several = receiver.recv()
        except EOFError:
            raise RankError(0, "the process of rank 0 has ended; see its output above") from None
        finally:
            for process in processes:
                process.join(_EXIT_SECONDS)
                process.kill()
    if isinstance(several, GraphRTError):
        raise several
    return [
        RankResult(
            s.batch, ranks, s.replay_ms, s.replay_ms / o.replay_ms, s.share_of_floor, s.host_us, s.host_us / o.host_us
        )
        for o, s in zip(one.results, several.results, strict=True)
    ]


def join_group(rendezvous: str, rank: int, ranks: int, kind: str) -> tuple[dist.ProcessGroup, torch.device]:
    """Return the group of all ranks, and the device of this one: the GPU of its number, or the CPU.

    rendezvous  URL of a file in a folder that exists
    kind        "cuda" or "cpu"
    """
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        env.set_nccl_defaults()
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    dist.init_process_group(
        CUDA_BACKENDS if kind == "cuda" else "gloo", init_method=rendezvous, rank=rank, world_size=ranks
    )
    assert dist.group.WORLD is not None, "the group was just initialized"
    return dist.group.WORLD, device


def _run(sender: Connection | None, rendezvous: str, rank: int, ranks: int, kind: str, *arguments: Any) -> None:
    group, device = join_group(rendezvous, rank, ranks, kind)
    outcome: object
    try:
        outcome = rank_report(group, device, *arguments)
    except GraphRTError as error:
        outcome = error
    if sender is not None:
        sender.send(outcome)


def rank_report(
    group: dist.ProcessGroup,
    device: torch.device,
    source: str | ModelConfig,
    page_size: int,
    max_positions: int,
    work: DecodeWork,
) -> DecodeReport | None:
    """Run the benchmark as one rank of a group. Rank 0 returns the report."""
    model = load_model(source, device=device, max_positions=max_positions, group=group).model
    groups = model.config.kv_groups(page_size, KVLayout.NHD, model.dtype)
    if group.rank():
        with decode_runtime(model, groups, work) as runtime:
            runtime.capture()
            runtime.follow()
        return None
    return bench_decode(str(source), model, groups, work)
