"""`graphrt env`: versions and devices, and which attention backends can run here."""

from __future__ import annotations

import json
from typing import Any

import torch
from rich.table import Table

from graphrt.backends.base import BackendContext
from graphrt.backends.registry import backend_class, explain, select_backend
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.console import make_console
from graphrt.environment import environment_report
from graphrt.kernels.types import KVLayout
from graphrt.models.shapes import shape_config

_EXAMPLE = "llama-3.1-8b"


def run_env(*, as_json: bool) -> None:
    """Print the report as a table, or as one line of JSON."""
    report = environment_report() | {"backends": _backends()}
    if as_json:
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
    for heading in ("backend", "graphs", "can run", "why not"):
        table.add_column(heading, overflow="fold")
    for entry in report["backends"]["known"]:
        chosen = " (chosen)" if entry["name"] == report["backends"]["chosen"] else ""
        can_run = "no" if entry["why_not"] else "yes"
        table.add_row(entry["name"] + chosen, entry["graph_support"], can_run, "\n".join(entry["why_not"]))
    console.print(table)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _graph_support(name: str, context: BackendContext, reasons: list[str]) -> str:
    """The backend's support level, or why nothing can be captured with it on this device."""
    backend = backend_class(name)
    why = None if reasons else backend(context).why_not_graph(BatchDescriptor.decode(1))
    return backend.graph_support.name if why is None else f"none here: {why}"


def _backends() -> dict[str, Any]:
    """Every known backend against an everyday model on this machine's best device."""
    config = shape_config(_EXAMPLE)
    context = BackendContext(
        attention=config.attention_specs(torch.bfloat16),
        kv=config.kv_spec(16, KVLayout.NHD, torch.bfloat16),
        device=_device(),
        max_num_reqs=256,
        max_num_tokens=2048,
        max_seq_len=8192,
    )
    chosen, reason = select_backend(context)
    known = [
        {"name": name, "graph_support": _graph_support(name, context, reasons), "why_not": reasons}
        for name, reasons in explain(context)
    ]
    return {"chosen": chosen.name, "reason": reason, "known": known}
