"""Detect operations that synchronize with the device. A CUDA capture and the op trace on a CPU reject them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_INDEX_PUT = frozenset({"aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"})
_MASKS = (torch.bool, torch.uint8)
# These check a solver's info on the host or select rows by value. Variants that return the info ("_ex") do not.
_WAITS = frozenset(
    f"aten::{name}"
    for name in (
        "_linalg_check_errors", "_linalg_eigh", "_linalg_eigvals", "_linalg_svd", "cholesky", "combinations", "inverse",
        "linalg_cholesky", "linalg_cond", "linalg_eig", "linalg_eigh", "linalg_eigvals", "linalg_eigvalsh",
        "linalg_inv", "linalg_ldl_factor", "linalg_lstsq", "linalg_lu_factor", "linalg_matrix_exp",
        "linalg_matrix_rank", "linalg_pinv", "linalg_solve", "linalg_svd", "linalg_svdvals", "linalg_tensorinv",
        "linalg_tensorsolve", "matrix_exp", "nuclear_norm", "pinverse", "svd",
    )
)  # fmt: skip


def reads_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, sets_number: bool = False) -> bool:
    """Return whether an aten operation reads values on the host, or its result shape depends on values.

    sets_number   for an index_put: whether it is `x[mask] = number`, which runs as a masked fill
    """
    name = func._schema.name
    if name in _WAITS or torch.Tag.data_dependent_output in func.tags:
        return True
    if name == "aten::repeat_interleave":
        by_tensor = func._overloadname in ("Tensor", "self_Tensor")
        return by_tensor and _argument(func, args, kwargs, "output_size") is None
    if name == "aten::where" and func._overloadname == "default":
        return True  # nonzero()
    if name == "aten::one_hot":
        return bool(_argument(func, args, kwargs, "num_classes") < 0)  # -1: the number is the largest value plus one
    if name == "aten::histc":
        return bool(_argument(func, args, kwargs, "min") == _argument(func, args, kwargs, "max"))  # range of the data
    if name in ("aten::linspace", "aten::logspace"):
        return any(isinstance(_argument(func, args, kwargs, bound), torch.Tensor) for bound in ("start", "end"))
    if name == "aten::normal":
        return isinstance(_argument(func, args, kwargs, "std"), torch.Tensor)  # checked to be >= 0
    if name in _INDEX_PUT:
        masks = [t for t in tensors_in(args[1]) if t.dtype in _MASKS]
        filled = sets_number and len(masks) == len(tensors_in(args[1])) == 1
        return bool(masks) and not filled
    if name == "aten::linalg_matrix_power":
        return bool(_argument(func, args, kwargs, "n") < 0)  # inverts the matrix
    if name in ("aten::linalg_norm", "aten::linalg_matrix_norm"):
        dims = _argument(func, args, kwargs, "dim")
        of_matrix = args[0].dim() == 2 if dims is None else not isinstance(dims, int) and len(dims) == 2
        return of_matrix and _argument(func, args, kwargs, "ord") in (2, -2, "nuc")  # computed from singular values
    if _argument(func, args, kwargs, "check_errors"):
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    # Indexing has this tag because of masks. With integer indices, the shape is known, so CUDA can capture it.
    return name != "aten::index" or any(t.dtype in _MASKS for t in tensors_in((args[1:], kwargs)))


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Return an argument by name, or its default; None if the operation has no such argument."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return None


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
