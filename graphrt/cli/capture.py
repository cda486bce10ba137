"""`graphrt capture`: capture the graphs of a model, print their costs, and show or record them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from rich.text import Text

from graphrt.bench.environment import provenance
from graphrt.bundle.bundle import Bundle
from graphrt.bundle.format import checked_target
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.diff import diff
from graphrt.capture.inspect.page import write_page
from graphrt.capture.inspect.view import GraphView
from graphrt.cli.console import capture_with_bar, make_console
from graphrt.cli.options import CaptureOptions
from graphrt.cli.values import check_step_tokens, named_source
from graphrt.config import RuntimeConfig
from graphrt.engine.stats import Stats
from graphrt.kernels.errors import ConfigError
from graphrt.models.loading import DUMMY_PREFIX, free_memory, load_model, make_runtime
from graphrt.runtime import Runtime, resolve_device
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession


def run(options: CaptureOptions) -> None:
    """Capture; the last line of standard output is one JSON object."""
    source = named_source("capture", options.shape, options.model)
    check_step_tokens(options.rows, options.step_tokens)
    _check_files(options)
    for name in ("prompt", "after", "launches") if options.record is None else ():
        if getattr(options, name) != getattr(CaptureOptions(), name):
            raise ConfigError(f"--{name}: requires --record; add --record FILE, or leave it out")
    longest = options.prompt + options.after + options.launches
    if options.record is not None and longest > options.context:
        raise ConfigError(
            f"--context: expected at least {longest}, the sum of --prompt, --after and --launches, got "
            f"{options.context}; raise it"
        )
    device, log = resolve_device(options.device), make_console(stderr=True)
    loaded = load_model(source, device=device, max_positions=options.context)
    config = RuntimeConfig(options.rows, options.step_tokens, options.context, backend=options.backend)
    with make_runtime(loaded.model, config, page_size=options.page_size) as runtime:
        shown = _shown_size(options, runtime)
        against = None if options.against is None else _decode_size("--against", options.against, runtime)
        capture_with_bar(runtime, log)
        stats = runtime.stats()
        if not options.json_only:
            make_console().print(_table(stats, options.shape or str(options.model), str(device)))
        result: dict[str, Any] = {
            "name": "capture", **provenance(), "model": options.shape or options.model, "backend": stats.backend,
            "recorder": stats.recorder, "capture_seconds": stats.capture_seconds,
            "compiled_kernels": stats.compiled_kernels.total(),
            "graphs": [
                {
                    "size": str(report.descriptor), "seconds": report.seconds, "pool_bytes": report.pool_bytes,
                    "driver_bytes": report.driver_bytes, "nodes": report.nodes,
                }
                for report in stats.graphs
            ],
        }  # fmt: skip
        audits = [runtime.manager.audit(size) for size in runtime.manager.descriptors] if options.audit else []
        for size, audit in zip(runtime.manager.descriptors, audits, strict=False):
            log.print(f"{size}: {audit}", highlight=False, markup=False, soft_wrap=True)
        result["findings"] = [str(finding) for audit in audits for finding in audit.findings] if audits else None
        if shown is not None:
            _show_graph(options, runtime, shown)
        if shown is not None and against is not None and not options.json_only:
            (a, memory_a), (b, memory_b) = (
                (inspect_graph(runtime.manager.graph(size)), runtime.manager.memory_map(size))
                for size in (shown, against)
            )
            text = f"{shown} against {against}: {diff(a, b, memory_a, memory_b)}"
            make_console().print(text, highlight=False, markup=False, soft_wrap=True)
        if options.record is not None:
            _record(options, runtime).save(options.record)
            log.print(f"recorded {options.launches} launches in {options.record}", highlight=False, markup=False)
            result["bundle"] = options.record
    print(json.dumps(result), flush=True)
    if result["findings"]:
        sys.exit(1)


def _table(stats: Stats, model: str, device: str) -> Table:
    table = Table(title=f"{model} on {device}, backend {stats.backend}, {stats.recorder}", title_justify="left")
    for heading in ("size", "nodes", "ms to capture", "pool MiB", "driver MiB"):
        table.add_column(heading, justify="left" if heading == "size" else "right")

    def add(size: str, nodes: int, seconds: float, *num_bytes: int) -> None:
        table.add_row(size, str(nodes), f"{seconds * 1e3:.1f}", *(f"{n / (1 << 20):.1f}" for n in num_bytes))

    for g in stats.graphs:
        add(str(g.descriptor), g.nodes, g.seconds, g.pool_bytes, g.driver_bytes)
    table.add_section()
    nodes, pool, driver = (sum(getattr(g, n) for g in stats.graphs) for n in ("nodes", "pool_bytes", "driver_bytes"))
    add(f"{len(stats.graphs)} graphs", nodes, stats.capture_seconds, pool, driver)
    return table


def _check_files(options: CaptureOptions) -> None:
    """Raise ConfigError if an output file cannot be written, before the model is loaded, which takes long."""
    for name, path in (("html", options.html), ("json", options.json)):
        if path is None:
            continue
        try:
            if Path(path).is_dir():
                raise ConfigError(f"--{name}: {path!r} is a folder; specify a file in it")
            if not Path(path).parent.is_dir():
                folder = str(Path(path).parent)
                raise ConfigError(
                    f"--{name}: the folder {folder!r} does not exist; create it, or specify another folder"
                )
        except (OSError, ValueError) as error:  # a name that the system rejects
            raise ConfigError(f"--{name}: {path!r:.200} cannot be written ({error}); specify another file") from error
    if options.record is not None:
        checked_target(options.record)


def _shown_size(options: CaptureOptions, runtime: Runtime) -> BatchDescriptor | None:
    """Return the decode graph of `--size` requests, by default the largest; None if no option shows a graph."""
    if not (options.html or options.json or options.nodes or options.against):
        if options.size is not None:
            raise ConfigError("--size: requires --html, --json, --nodes or --against; add one, or leave it out")
        return None
    return _decode_size("--size", options.size, runtime)


def _decode_size(option: str, rows: int | None, runtime: Runtime) -> BatchDescriptor:
    """Return the decode graph of `rows` requests, by default the largest."""
    decodes = [size for size in runtime.manager.descriptors if size.kind is GraphKind.DECODE]
    for size in decodes:
        if rows in (None, size.padded_reqs):
            return size
    sizes = ", ".join(str(size.padded_reqs) for size in decodes)
    raise ConfigError(f"{option}: expected one of the sizes {sizes}, got {rows}; choose one of these")


def _show_graph(options: CaptureOptions, runtime: Runtime, chosen: BatchDescriptor) -> None:
    """Write and print one graph as an HTML page, JSON and a table."""
    manager = runtime.manager
    view, title = inspect_graph(manager.graph(chosen)), f"{options.shape or options.model}, {chosen}"
    try:
        if options.html is not None:
            findings = manager.audit(chosen).findings
            write_page(view, options.html, title=title, memory=manager.memory_map(chosen), findings=findings)
        if options.json is not None:
            Path(options.json).write_text(json.dumps(view.to_json()), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"graph: the file cannot be written ({error}); specify another file") from error
    if options.nodes and not options.json_only:
        make_console().print(_node_table(view, title))


def _node_table(view: GraphView, title: str) -> Table:
    """Return a table of the kernels or ops of a graph, with count and launch size."""
    table = Table(title=f"{title}: {view.num_nodes} nodes, {len(view.edges)} edges", title_justify="left")
    for heading in ("name", "kind", "nodes", "blocks", "threads"):
        table.add_column(heading, justify="left" if heading in ("name", "kind") else "right", overflow="fold")
    nodes = {node.name: node for _, node in view.walk()}
    for name, count in view.counts().most_common():
        node = nodes[name]
        shape = ("x".join(map(str, extents)) if extents else "" for extents in (node.grid, node.block))
        table.add_row(Text(name), node.kind.value, str(count), *shape)
    return table


def _record(options: CaptureOptions, runtime: Runtime) -> Bundle:
    """Record launches while the runtime decodes one random prompt per request."""
    rng = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=options.after + options.launches + 1)
    with DecodeSession(runtime) as session:
        for _ in range(options.rows):
            session.add(rng.integers(0, runtime.vocab_size, options.prompt).tolist(), params)
        while any(not row.tokens for row in session.requests):
            session.run(1)
            session.collect(wait=True)
        for _ in range(options.after):
            session.run(1)
        recording = runtime.manager.record(options.launches, max_bytes=free_memory(torch.device("cpu")) or 1 << 40)
        while not recording.done:
            session.run(1)
        session.collect(wait=True)
    return Bundle.of(recording, model=_named_model(options))


def _named_model(options: CaptureOptions) -> dict[str, Any]:
    """Return a description of the model, from which `graphrt replay` can load it in any folder."""
    if options.shape is not None:
        return {"shape": options.shape, "seed": 0}
    model = str(options.model)
    if model.startswith(DUMMY_PREFIX) or not (path := Path(model).expanduser()).exists():
        return {"model": model}  # a hub id
    return {"model": os.path.abspath(path)}
