"""`graphrt replay`: run a replay bundle, and compare graphs with eager steps."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch

from graphrt.bench.environment import provenance
from graphrt.bundle.bundle import Bundle
from graphrt.cli.console import make_console
from graphrt.cli.options import ReplayOptions
from graphrt.kernels.errors import CapacityError, ConfigError
from graphrt.models.loading import LoadedModel, load_model
from graphrt.models.shapes import shape_config
from graphrt.runtime import resolve_device


def run(options: ReplayOptions) -> None:
    """Run a bundle; the last line of standard output is one JSON object. Exit with 1 if a graph differs."""
    bundle, device = Bundle.load(options.bundle), resolve_device(options.device)
    log = make_console(stderr=True)
    if not options.json_only:
        made = ", ".join(f"{name} {value}" for name, value in {**bundle.versions, **bundle.model}.items())
        made = "".join(c if c.isprintable() else "?" for c in made)  # strings from a file may contain escape sequences
        log.print(f"{len(bundle.launches)} launches, recorded with {made}", highlight=False, markup=False)
    model = _load(options, bundle, str(device)).model
    launches: list[dict[str, Any]] = []
    with bundle.open(model, device=device, backend=options.backend) as replays:
        for index in range(len(bundle.launches)):
            found = replays.run(index)
            launches.append(
                {
                    "launch": index,
                    "size": str(found.descriptor),
                    "steps": bundle.launches[index].words.steps,
                    "rows": bundle.launches[index].words.num_reqs,
                    "graph_is_eager": found.difference is None,
                    "difference": None if found.difference is None else str(found.difference),
                    "tokens_as_recorded": found.tokens_equal,
                    "logits_distance": found.logits_distance if math.isfinite(found.logits_distance) else None,
                }
            )
            if not options.json_only:
                print(found, flush=True)
    print(json.dumps({"name": "replay", **provenance(), "recorded": bundle.versions, "launches": launches}), flush=True)
    if not all(launch["graph_is_eager"] for launch in launches):
        sys.exit(1)


def _load(options: ReplayOptions, bundle: Bundle, device: str) -> LoadedModel:
    """Load the model that the command specifies, or else the recorded model."""
    if options.shape is not None and options.model is not None:
        raise ConfigError("replay: expected one of --shape and --model, got both; pass one of them")
    named = {"shape": options.shape, "model": options.model}
    if options.shape is None and options.model is None:
        named = dict(bundle.model)
    shape, model, seed = named.get("shape"), named.get("model"), named.get("seed", 0)
    if not isinstance(shape if model is None else model, str):
        raise ConfigError(
            f"replay: the bundle does not name its model, but describes it as {dict(bundle.model)}; pass --shape or "
            f"--model, or "
            "open the bundle from Python with your own model: Bundle.load(path).open(model)"
        )
    source = shape_config(str(shape)) if model is None else str(model)
    longest = bundle.config.max_seq_len
    dtype = (
        bundle.attention[0].dtype if bundle.attention else torch.float32
    )  # the recorded dtype instead of the device default
    loaded = load_model(source, device=device, dtype=dtype, max_positions=min(longest, 1 << 20), seed=seed)  # type: ignore[arg-type]  # checked there
    if loaded.config.attention_specs(dtype) != bundle.attention or loaded.config.vocab_size != bundle.vocab_size:
        raise ConfigError(
            "replay: the attention layers or the vocabulary of this model differ from the recorded model; pass the "
            "recorded model with --shape or --model"
        )
    if longest > loaded.config.max_position_embeddings:
        most = loaded.config.max_position_embeddings
        raise CapacityError(
            f"replay: the bundle has max_seq_len={longest}, but the model has {most} positions; pass the recorded "
            "model with --shape or --model"
        )
    return loaded
