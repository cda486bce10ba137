"""Advice on capture sizes from the batch sizes that a runtime served, and trace files for `graphrt plan`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path

from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.capture.dispatcher import NO_GRAPHS, TOO_LARGE
from graphrt.kernels.checks import shown
from graphrt.kernels.errors import ConfigError

Served = tuple[BatchDescriptor, int, str]
"""The size that a step ran at, the tokens of its batch, and why the step ran eagerly; "" if a graph ran."""
Trace = dict[GraphKind, Counter[int]]
"""Steps by the size of their batches: requests of decode batches, new tokens of mixed batches."""

FORCED = "requested by the caller"
"""Reason of the eager steps that a caller asked for."""
UNITS = {GraphKind.DECODE: "requests", GraphKind.MIXED: "tokens"}
_CHOSEN = FORCED, NO_GRAPHS
_MANY_STEPS = 100  # fewer steps of a kind give no advice
_MUCH_PADDING, _MANY_EAGER = 0.3, 0.1
_LINE = re.compile(r"(decode|mixed)\s+([1-9][0-9]{0,8})(?:\s+([1-9][0-9]{0,14}))?")
_HEAD = "# kind, size (requests of a decode batch, new tokens of a mixed batch), steps\n"


def advise(steps: Mapping[Served, int], captured: Iterable[BatchDescriptor]) -> tuple[str, ...]:
    """Return sentences for each kind of batch that was often padded or often ran eagerly, with a size to capture.

    Gives no advice on a kind with fewer than 100 steps, and none on eager steps that the caller or `use_graphs` chose.
    """
    found: list[str] = []
    sizes: dict[GraphKind, set[int]] = {kind: set() for kind in GraphKind}
    for descriptor in captured:
        sizes[descriptor.kind].add(descriptor.size)
    for kind, graphs in sizes.items():
        of_kind = {key: count for key, count in steps.items() if key[0].kind is kind and key[2] not in _CHOSEN}
        if sum(of_kind.values()) >= _MANY_STEPS:
            found += _eager_advice(kind, of_kind, max(graphs, default=0))
            found += _padding_advice(kind, of_kind, graphs)
    return tuple(found)


def _eager_advice(kind: GraphKind, steps: Mapping[Served, int], largest: int) -> list[str]:
    sizes: Counter[int] = Counter()  # of batches that are larger than all graphs
    counts: Counter[str] = Counter()  # steps by the reason to run eagerly
    for (descriptor, tokens, why_eager), count in steps.items():
        if why_eager.startswith(TOO_LARGE.format(kind.value)):
            sizes[_batch_size(descriptor, tokens)] += count
        elif why_eager:
            counts[why_eager] += count
    if sizes:
        are = "is" if len(sizes) == 1 else "are"
        place = f"above the largest captured size, {largest}" if largest else "not captured"
        counts[f"{_range(sizes)} {are} {place}; capture {max(sizes)}"] = sizes.total()
    total = sum(steps.values())
    return [
        f"{count / total:.0%} of {kind.value} steps ran without a graph: {why}"
        for why, count in counts.items()
        if count >= _MANY_EAGER * total
    ]


def _padding_advice(kind: GraphKind, steps: Mapping[Served, int], captured: set[int]) -> list[str]:
    sizes: dict[int, Counter[int]] = {}  # steps by graph, and by size of the batch
    for (descriptor, tokens, why_eager), count in steps.items():
        if not why_eager:
            sizes.setdefault(descriptor.size, Counter())[_batch_size(descriptor, tokens)] += count
    padded = sum(graph * of.total() for graph, of in sizes.items())
    padding = sum((graph - size) * count for graph, of in sizes.items() for size, count in of.items())
    if not padding or padding < _MUCH_PADDING * padded:
        return []
    savings = []  # a new size saves padding in all steps up to it that ran with the same graph
    for graph, of in sizes.items():
        order = sorted(of)
        up_to = accumulate(of[size] for size in order)
        savings += [((graph - size) * count, graph, size) for size, count in zip(order, up_to, strict=True)]
    saved, graph, best = max(savings)
    if best in captured:
        return []
    served = Counter({size: count for size, count in sizes[graph].items() if size <= best})
    return [
        f"{padding / padded:.0%} of the tokens of {kind.value} graphs were padding: {served.total()} steps of "
        f"{_range(served)} ran with the graph of {graph}; capture {best}, to save {saved / padding:.0%} of the padding"
    ]


def _batch_size(descriptor: BatchDescriptor, tokens: int) -> int:
    """Return the size that a batch needs. An empty batch needs 1, since it runs with the smallest graph."""
    return max(1, tokens // descriptor.query_len if descriptor.kind is GraphKind.DECODE else tokens)


def _range(sizes: Iterable[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"size {low}" if low == high else f"sizes {low} to {high}"


def write_trace(path: str | Path, steps: Mapping[Served, int]) -> None:
    """Write the sizes of all steps as a text file, with one line per kind and size, and the number of steps."""
    trace: Trace = {kind: Counter() for kind in GraphKind}
    for (descriptor, tokens, _), count in steps.items():
        trace[descriptor.kind][_batch_size(descriptor, tokens)] += count
    lines = [f"{kind.value} {size} {of[size]}\n" for kind, of in trace.items() for size in sorted(of)]
    Path(path).write_text(_HEAD + "".join(lines), encoding="utf-8")


def read_lines(name: str, path: str | Path) -> list[str]:
    """Return the lines of a text file. Raises: ConfigError: if the file cannot be read. Errors start with `name`."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {str(path)!r:.200} cannot be read ({error}); check the path") from error


def read_trace(path: str | Path, max_num_reqs: int, max_num_tokens: int) -> Trace:
    """Read a trace. Each line has a kind, a size and a number of steps, by default 1. Text after # is skipped.

    Raises: ConfigError: if the file cannot be read, has no steps, or has a line in the wrong format or with a size
    above the maximum of its kind.
    """
    limits = {
        GraphKind.DECODE: (max_num_reqs, "max_num_reqs (--rows)"),
        GraphKind.MIXED: (max_num_tokens, "max_num_tokens (--step-tokens)"),
    }
    trace: Trace = {kind: Counter() for kind in GraphKind}
    for number, line in enumerate(read_lines("trace", path), 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        if (fields := _LINE.fullmatch(text)) is None:
            raise ConfigError(
                f"trace: line {number}: expected KIND SIZE [STEPS], got {shown(text)}; write `decode 12` for a "
                "step of 12 requests, or `mixed 512 40` for 40 steps of 512 tokens"
            )
        kind, size = GraphKind(fields[1]), int(fields[2])
        limit, name = limits[kind]
        if size > limit:
            raise ConfigError(f"trace: line {number}: expected at most {limit} {UNITS[kind]}, got {size}; raise {name}")
        trace[kind][size] += int(fields[3] or 1)
    if not any(trace.values()):
        raise ConfigError(f"trace: {str(path)!r:.200} has no steps; write a line per step, such as decode 12")
    return trace
