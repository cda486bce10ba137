"""`graphrt plan`: propose capture sizes for a trace of batch sizes, and compare them with the default sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import torch
from rich.table import Table

from graphrt.bench.size_plan import Assessment, CaptureSizes, Costs, assess, plan_sizes
from graphrt.bench.step_costs import MEASURED_STEPS, assumed_costs, measure_costs, read_costs
from graphrt.capture.descriptor import GraphKind, default_decode_sizes, default_mixed_sizes
from graphrt.cli.console import make_console
from graphrt.cli.options import PlanOptions
from graphrt.cli.values import check_step_tokens, named_source
from graphrt.engine.traffic import UNITS, Trace, read_trace
from graphrt.kernels.errors import ConfigError
from graphrt.models.loading import load_model
from graphrt.runtime import resolve_device


def run(options: PlanOptions) -> None:
    """Print the proposed sizes as RuntimeConfig arguments, and a table; with --json, one line of JSON instead."""
    check_step_tokens(options.rows, options.step_tokens)
    trace = read_trace(options.trace, options.rows, options.step_tokens)
    total = sum(batches.total() for batches in trace.values())
    costs, source = _costs(options)
    defaults = {
        GraphKind.DECODE: default_decode_sizes(options.rows),
        GraphKind.MIXED: default_mixed_sizes(options.step_tokens),
    }
    planned = plan_sizes(
        trace,
        costs,
        memory_bytes=options.memory * (1 << 30),
        max_num_reqs=options.rows,
        max_num_tokens=options.step_tokens,
        steps=options.steps or total,
    )
    seen = [kind for kind in GraphKind if trace[kind]]  # the sizes of the other kind keep their default
    before, after = (
        assess({kind: sizes[kind] if kind in seen else () for kind in GraphKind}, trace, costs)
        for sizes in (defaults, planned)
    )
    if options.as_json:
        sizes = {f"{kind.value}_sizes": planned[kind] if kind in seen else None for kind in GraphKind}
        result = {"name": "plan", "steps": total, "costs": source, **sizes}
        print(json.dumps(result | {"default": asdict(before), "proposal": asdict(after)}), flush=True)
        return
    console = make_console()
    title = f"{total:,} steps of {options.trace}, graphs up to {options.memory:g} GiB"
    console.print(_table(title, before, after))
    for note in (source, *_notes(options, trace, planned)):
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    print(", ".join(f"{kind.value}_sizes={planned[kind]}" for kind in seen), flush=True)


def _costs(options: PlanOptions) -> tuple[Costs, str]:
    """Return the costs, and a sentence about their source."""
    if options.shape is None and options.model is None:
        return assumed_costs() if options.measured is None else read_costs(options.measured)
    if options.measured is not None:
        raise ConfigError(
            "--measured: cannot be combined with --shape or --model, which measure on this machine; "
            "pass one of these options"
        )
    source, device = named_source("plan", options.shape, options.model), resolve_device(options.device)
    model = load_model(source, device=device, max_positions=options.context + MEASURED_STEPS).model
    costs = measure_costs(
        model,
        rows=options.rows,
        step_tokens=options.step_tokens,
        context=options.context,
        page_size=options.page_size,
        backend=options.backend,
    )
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return costs, f"measured with {options.shape or options.model} on {where}, context {options.context}"


def _notes(options: PlanOptions, trace: Trace, planned: CaptureSizes) -> Iterator[str]:
    """Yield a sentence for each kind of batch that the proposal does not cover."""
    for kind, limit in ((GraphKind.DECODE, options.rows), (GraphKind.MIXED, options.step_tokens)):
        largest = max(planned[kind], default=0)
        if not trace[kind]:
            yield f"the trace has no {kind.value} steps; {kind.value}_sizes keeps its default, not counted above"
        elif not largest:
            yield (
                f"{kind.value} batches will run eagerly: their graphs exceed --memory, or their capture takes longer "
                "than they save; raise --memory, or --steps if the trace is a sample"
            )
        elif largest < limit:
            yield f"{kind.value} batches of more than {largest} {UNITS[kind]} will run eagerly; add {limit} to avoid it"


def _table(title: str, before: Assessment, after: Assessment) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("", "default sizes", "proposal"):
        table.add_column(heading, justify="right" if heading else "left")
    both = (before, after)
    table.add_row("graphs", *(str(of.graphs) for of in both))
    table.add_row("padding, share of tokens", *(f"{of.padding:.1%}" for of in both))
    table.add_row("eager, share of steps", *(f"{of.eager:.1%}" for of in both))
    table.add_row("ms per step", *(f"{of.ms_per_step:.3f}" for of in both))
    table.add_row("graph memory, MiB", *(f"{of.graph_bytes / (1 << 20):.1f}" for of in both))
    table.add_row("seconds to capture", *(f"{of.capture_seconds:.2f}" for of in both))
    return table
