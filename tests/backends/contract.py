"""The contract of an attention backend as a check: its five verbs over static tensors, captured and replayed.

`check(backend_class, feature, device)` raises AssertionError where a replay differs bitwise from the eager step, is
further from float64 than plain torch in the kernel's dtype, or lets padding, stale metadata or NaN into an output.
"""

from __future__ import annotations

import torch

from graphrt.backends.base import AttentionBackend
from graphrt.backends.triton import TritonBackend
from graphrt.kernels.types import KVLayout
from graphrt.testing.numerics import assert_bitwise_equal
from tests.backends.rig import E4M3, NAN, ROWS, Feature, Rig, Rows, Sequence, make_rig

WINDOW = {"sliding_window": 5}
FEATURES = {
    f.id: f
    for f in (
        Feature("plain"),
        Feature("window", layers=(WINDOW, {}), same=(WINDOW, WINDOW)),
        Feature("softcap", layers=({"logits_softcap": 2.0},) * 2),
        Feature("alibi", layers=({"alibi": True},) * 2, lse=True),
        Feature("sinks", layers=({"sinks": True},) * 2, lse=True),
        Feature("sinks-many-splits", layers=({"sinks": True},) * 2, lse=True, longest=8192),
        Feature("lse", lse=True),
        Feature("fp8", kv_dtype=E4M3, lse=True),
        Feature("hnd", layout=KVLayout.HND),
        Feature("query_len", query_len=3, lse=True),
        Feature("mixed", mixed=True, lse=True),
        Feature("mixed-window", layers=(WINDOW, {}), same=(WINDOW, WINDOW), mixed=True),
        Feature("mixed-fp8", kv_dtype=E4M3, mixed=True),
        Feature("mixed-large-pages", mixed=True, page_size=128),
        Feature("batch_invariant", batch_invariant=True),
        Feature("batch_invariant-query_len", query_len=3, batch_invariant=True),
        Feature("batch_invariant-mixed", mixed=True, batch_invariant=True),
    )
}


def declares(backend_class: type[AttentionBackend], feature: Feature, device: torch.device) -> bool:
    """Whether the class says that it has the feature. It is then run, or skipped by the backend's own predicate."""
    have, options = backend_class.capabilities, {name for layer in feature.layers for name in layer}
    dtype = feature.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    flags = {"sliding_window", "logits_softcap", "alibi", "sinks"}
    return (
        device.type in have.devices
        and all(getattr(have, flag) for flag in flags & options)
        and (feature.kv_dtype or dtype) in have.kv_dtypes
        and dtype in have.dtypes
        and (have.head_dims is None or not feature.head_dim or feature.head_dim in have.head_dims)
        and not (feature.longest and device.type == "cpu")
        and feature.layout in have.layouts
        and feature.query_len <= have.max_query_len
        and (have.page_sizes is None or not feature.page_size or feature.page_size in have.page_sizes)
        and (have.lse or not feature.lse)
        and (have.mixed or not feature.mixed)
        and (have.batch_invariant or not feature.batch_invariant)
    )


def steps_of(rig: Rig) -> dict[str, Rows]:
    """Rows of every step: captured short and replayed long, ragged, on page boundaries, shrinking."""
    p, longest, ql = rig.context.kv.page_size, rig.metadata.max_seq_len, rig.feature.query_len
    if rig.feature.mixed:
        chunk = rig.descriptor.padded_tokens - 5
        steps = {
            "prompt": ((min(chunk, longest), min(chunk, longest)), (longest, 1), (p, 1), (3, 2)),
            "chunks": ((longest, 4), (p + 1 if p < longest else p, 3)),
            "one": ((p, min(p, 5)),),
        }
        return {name: tuple((n, min(q, n)) for n, q in rows) for name, rows in steps.items()}
    lengths = {
        "longest": (longest,) * ROWS,
        "ragged": (longest, ql, min(p + 1, longest), max(ql, p - 1)),
        "boundary": (p, min(p + 1, longest), min(2 * p, longest), min(2 * p - 1, longest)),
        "shrunk": (min(2 * p + 1, longest), max(ql, 2)),
    }
    return {name: tuple((max(n, ql), ql) for n in rows) for name, rows in lengths.items()}


def check(
    backend_class: type[AttentionBackend], feature: Feature, device: torch.device, *, brief: bool = False
) -> None:
    """Capture with the shortest rows, and again with the longest, and replay all steps each time.

    `brief` is the first capture and two steps. An interpreted kernel takes half a second a launch: it must do there.
    """
    brief = brief or is_interpreted(backend_class, device)
    for captured_with in ("shortest",) if brief else ("shortest", "longest"):
        rig = make_rig(backend_class, feature, device)
        try:
            _check(rig, captured_with, brief=brief)
        finally:
            rig.close()


def _check(rig: Rig, captured_with: str, *, brief: bool) -> None:
    steps, ql = steps_of(rig), rig.feature.query_len
    if brief:
        steps = {name: rows for name, rows in steps.items() if name in ("longest", "shrunk", "chunks")}
    shortest = tuple((ql, ql) for _ in range(ROWS))
    first = next(iter(steps.values())) if captured_with == "longest" else shortest
    rig.write([rig.sequence(*row) for row in first])
    if rig.backend.why_not_graph(rig.descriptor) is None:
        rig.capture()
    for name, rows in steps.items():
        sequences = [rig.sequence(*row) for row in rows]
        _check_step(rig, name, sequences)
        if brief or name == "boundary":
            continue
        # The same rows in another order, in other pages: nothing may stick to a place in the batch.
        _check_step(rig, f"{name}, permuted", sequences[::-1])


def check_batch_invariance(
    backend_class: type[AttentionBackend], feature: Feature, device: torch.device, sizes: tuple[int, ...] = ()
) -> None:
    """One row alone, and as the last of full batches of several decode sizes: bitwise the same. For mixed steps, whose
    other sizes are not promised, in batches of one size."""
    cuda = device.type == "cuda"
    sizes = sizes or ((ROWS,) if feature.mixed else (1, ROWS, 16) if cuda else (1, ROWS))
    rigs = [make_rig(backend_class, feature, device, rows=rows) for rows in sizes]
    try:
        for rig in rigs:
            rig.write([rig.sequence(feature.query_len, feature.query_len)])
            if rig.backend.why_not_graph(rig.descriptor) is None:
                rig.capture()
        page, longest = rigs[0].context.kv.page_size, rigs[0].metadata.max_seq_len
        query_len = 5 if feature.mixed else feature.query_len
        lengths = (longest,) if is_interpreted(backend_class, device) else (longest, page + 1, page, longest - 1)
        for seq_len in (max(n, query_len) for n in lengths):
            row = rigs[0].sequence(seq_len, query_len)
            seen = [_check_step(rigs[0], f"{seq_len}, alone", [row])[0][:query_len]]
            for rig, rows in zip(rigs, sizes, strict=True):
                neighbours = [rig.sequence(longest if at % 2 else query_len, query_len) for at in range(rows - 1)]
                if feature.mixed:
                    neighbours = neighbours[:1]
                here = slice(len(neighbours) * query_len, (len(neighbours) + 1) * query_len)
                seen.append(_check_step(rig, f"{seq_len}, {rows} rows", [*neighbours, row])[0][here])
            for other in seen[1:]:
                assert_bitwise_equal(other, seen[0], name=f"{backend_class.name}: a row of {seq_len} with others")
    finally:
        for rig in rigs:
            rig.close()


def is_interpreted(backend_class: type[AttentionBackend], device: torch.device) -> bool:
    return backend_class is TritonBackend and device.type == "cpu"


def check_retry(backend_class: type[AttentionBackend], feature: Feature, device: torch.device) -> None:
    """Allocate and capture twice, as after a failure: nothing may be read of the first attempt, whose tensors are
    poisoned but alive, as a wrapper would keep them."""
    rig = make_rig(backend_class, feature, device)
    try:
        ql = rig.feature.query_len
        rig.write([rig.sequence(ql, ql) for _ in range(ROWS)])
        for attempt in range(2):
            if attempt:
                rig.drop_graph()
                first = rig.backend.tensors()
                rig.backend.allocate()
                for name, tensor in first.items():
                    assert all(tensor.data_ptr() != new.data_ptr() for new in rig.backend.tensors().values()), name
                    tensor.fill_(NAN if tensor.is_floating_point() else 7)
            if rig.backend.why_not_graph(rig.descriptor) is None:
                rig.capture()
            for name, rows in steps_of(rig).items():
                if name in ("longest", "shrunk", "chunks"):
                    _check_step(rig, f"{name}, attempt {attempt}", [rig.sequence(*row) for row in rows])
    finally:
        rig.close()


def _check_step(rig: Rig, name: str, sequences: list[Sequence]) -> list[torch.Tensor]:
    rig.write(sequences)
    replayed = rig.replayed() if rig.graph is not None else None
    eager = rig.eager()
    if replayed is not None:
        rig.check(replayed)
        for have, want in zip(replayed, eager, strict=True):
            assert_bitwise_equal(have, want, name=f"{rig.backend.name}, {name}: replay against eager")
    else:
        rig.check(eager)
    return eager
