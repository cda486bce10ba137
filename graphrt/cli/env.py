"""`graphrt env`: print versions, devices, and the attention backends that can run here."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

from graphrt import env
from graphrt.backends.capabilities import BackendContext
from graphrt.backends.registry import Standing, backend_class, select_backend, standings
from graphrt.bench.environment import environment_report
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.cli.console import make_console
from graphrt.cli.options import EnvOptions
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.types import KVLayout
from graphrt.models.shapes import shape_config

_EXAMPLE = "llama-3.1-8b"


def run(options: EnvOptions) -> None:
    """Print the report as a table, or as one line of JSON."""
    report = environment_report() | {"backends": _backends()}
    if options.as_json:
        print(json.dumps(report))
        return
    console = make_console()
    facts = Table(show_header=False, box=None)
    for name in ("graphrt", "python", "platform", "driver", "cuda"):
        facts.add_row(name, str(report[name] or "none"))
    for gpu in report["gpus"] or [{"name": "none"}]:
        facts.add_row("gpu", ", ".join(f"{v}" if k == "name" else f"{k} {v}" for k, v in gpu.items()))
    for name, version in report["packages"].items():
        facts.add_row(name, version or "not installed")
    for name, value in report["variables"].items():
        facts.add_row(name, str(value) if value is not None else "unset")
    console.print(facts)
    table = Table(title=f"attention backends, for {_EXAMPLE} in bfloat16 on {_device()}", title_justify="left")
    for heading in ("backend", "graphs", "rank", "why not"):
        table.add_column(heading, overflow="fold")
    for entry in report["backends"]["known"]:
        chosen = " (chosen)" if entry["name"] == report["backends"]["chosen"] else ""
        table.add_row(
            entry["name"] + chosen,
            entry["graph_support"],
            _rank(entry),
            "\n".join(entry["unsupported_reasons"]),
        )
    console.print(table)
    console.print(report["backends"]["reason"], highlight=False, soft_wrap=True)


def _rank(entry: dict[str, Any]) -> str:
    """Return a backend's rank with its measured time relative to the fastest; "-" if it cannot run."""
    if entry["unsupported_reasons"]:
        return "-"
    measured = "" if entry["relative"] is None else f" ({entry['relative']:.2f} x the fastest)"
    return f"{entry['rank']}{measured}"


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _graph_support(standing: Standing, context: BackendContext) -> str:
    """Return the backend's graph support, or why it cannot be captured on this device."""
    try:
        backend = backend_class(standing.name)
    except ConfigError:  # reported as a reason
        return "unknown"
    why = None if standing.unsupported_reasons else backend(context).graph_unsupported_reason(BatchDescriptor.decode(1))
    return backend.graph_support.name if why is None else f"none here: {why}"


def _backends() -> dict[str, Any]:
    """Rate every known backend for a common model on this machine's best device."""
    config = shape_config(_EXAMPLE)
    context = BackendContext(
        attention=config.attention_specs(torch.bfloat16),
        kv_groups=config.kv_groups(16, KVLayout.NHD, torch.bfloat16),
        device=_device(),
        max_num_reqs=256,
        max_num_tokens=2048,
        max_seq_len=8192,
    )
    chosen, reason = _choice(context)
    known = [asdict(standing) | {"graph_support": _graph_support(standing, context)} for standing in standings(context)]
    return {"chosen": chosen, "reason": reason, "known": known}


def _choice(context: BackendContext) -> tuple[str | None, str]:
    """Return the backend that a runtime would choose, considering GRAPHRT_BACKEND, and why; None if there is none."""
    try:
        named = env.backend()
        cls, reason = select_backend(context, named)
    except (ConfigError, UnsupportedError) as error:
        return None, str(error)
    return cls.name, reason if named is None else f"{reason}, by GRAPHRT_BACKEND"
