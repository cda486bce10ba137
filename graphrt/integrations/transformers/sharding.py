"""Decoders that `transformers` has sharded over ranks: their group, and the collectives of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt.engine.ranks import Ranks
from graphrt.kernels.errors import UnsupportedError
from graphrt.kernels.ops import collectives
from graphrt.kernels.sizes import ceil_div

_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
_LOCAL = frozenset({"wait_tensor", "_wrap_tensor_autograd"})  # of results that have arrived
_ADVICE = "shard the model by tensor parallelism only, as from_pretrained(tp_plan='auto') does"


def group_of(model: Any) -> dist.ProcessGroup | None:
    """Return the ranks over which a model is sharded; None if it is whole.

    Raises: UnsupportedError: if it is sharded by anything other than tensor parallelism.
    """
    shards = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None and shards:
        mesh = shards[0].device_mesh
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or ("tp",) * mesh.ndim
    split = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    if [names[dim] for dim in split] not in ([], ["tp"]):
        sizes = ", ".join(f"{names[dim]} {mesh.size(dim)}" for dim in split)
        raise UnsupportedError(f"{type(model).__name__}: is sharded over a mesh of {sizes}; {_ADVICE}")
    return mesh.get_group(split[0]) if split else None


@contextmanager
def together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Return a context in which all ranks run a model. Ranks may be late, and a rank that ends is noticed."""
    if group is None:
        yield
        return
    ranks = Ranks.of(group)
    end_watch = ranks.watch()
    try:
        with ranks.patient():
            yield
    finally:
        end_watch()


class GroupCollectives(TorchDispatchMode):
    """Replaces the collectives of a forward pass by graphrt's, which detect failed ranks and sum in a fixed order.

    Raises: UnsupportedError: for a collective other than a sum or a gather, or of other ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._group, self._ranks = group, dist.get_process_group_ranks(group)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            if func is torch.ops.aten.embedding.default and args[0].placements == (Shard(0),):
                return self._embedding(args[0], args[1])
            return NotImplemented  # the operations on local tensors arrive here
        if func.namespace not in _NAMESPACES:
            return func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in _LOCAL:
            return args[0]
        if name == "all_reduce":
            x, op, group = args
            self._check(name, group, op == "sum")
            return self._sum(x)
        if name == "all_gather_into_tensor":
            x, _, group = args
            self._check(name, group)
            return collectives.all_gather(x, self._group).flatten(0, 1)
        if name == "allreduce_":
            (x,), group, op, *_ = args
            self._check(name, dist.ProcessGroup.unbox(group), op.op() == dist.ReduceOp.SUM)
            return [x.copy_(self._sum(x))], _done()
        raise UnsupportedError(f"{func}: a sharded model may sum and gather tensors only; {_ADVICE}")

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(x.reshape(-1, x.shape[-1]), self._group).view(x.shape)

    def _embedding(self, weight: DTensor, ids: Any) -> DTensor:
        """Return the rows of a weight whose rows are split over ranks. torch reads the mask of foreign rows on the
        host."""
        local, ids = weight._local_tensor, ids._local_tensor if isinstance(ids, DTensor) else ids
        first = ceil_div(len(weight), len(self._ranks)) * self._group.rank()
        own = (ids >= first) & (ids < first + len(local))
        rows = functional.embedding(torch.where(own, ids - first, 0), local) * own[..., None]
        return DTensor.from_local(self._sum(rows), weight.device_mesh, [Replicate()], run_check=False)

    def _check(self, name: str, group: Any, sums: bool = True) -> None:
        ranks = dist.get_process_group_ranks(
            group if isinstance(group, dist.ProcessGroup) else _resolve_process_group(group)
        )
        if ranks != self._ranks or not sums:
            what = f"of ranks {ranks}" if sums else "other than a sum"
            raise UnsupportedError(
                f"{name}: expected a sum or a gather of ranks {self._ranks}, got one {what}; {_ADVICE}"
            )


def has_plan(module: torch.nn.Module) -> bool:
    """Return whether the plan of transformers has replaced `forward`, and nothing else has."""
    return getattr(vars(module).get("forward"), "__module__", "").startswith("transformers.distributed.")


def is_known(weight: torch.Tensor) -> bool:
    """Return whether a weight is a normal parameter, or one that ranks have whole or equal parts of."""
    if not isinstance(weight, DTensor):
        return type(weight) is torch.nn.Parameter
    (placement, *others), size = weight.placements, weight.device_mesh.size()
    if type(placement) is Shard:
        return not others and weight.shape[placement.dim] % size == 0
    return not others and placement.is_replicate()


def sharded_dim(weight: torch.Tensor) -> int | None:
    """Return the dimension of a known weight that ranks have parts of; None if there is none."""
    placement = weight.placements[0] if isinstance(weight, DTensor) and is_known(weight) else None
    return placement.dim % weight.dim() if isinstance(placement, Shard) else None


def _done() -> Any:
    return dist.Work.boxed(torch._C._distributed_c10d.FakeWork())
