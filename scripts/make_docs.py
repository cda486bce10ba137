"""Generate the marked sections of the documentation, and the table of measured times that ranks the backends.

Run it after a change to buffers, backends, settings or results.

python scripts/make_docs.py          rewrite the marked sections and the table in place
python scripts/make_docs.py --check  exit with 1 and name each file that is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from graphrt.backends.capabilities import listing
from graphrt.backends.ranking import parse_ranking, ranking_record
from graphrt.backends.registry import backend_class, backend_names
from graphrt.kernels.metadata.buffers import StaticBuffers

ROOT = Path(__file__).resolve().parent.parent


def tree_of(result: dict[str, Any]) -> str:
    """Return the source tree that a result was measured with."""
    changes = " with uncommitted changes" if result.get("uncommitted_changes") else ""
    return f"tree `{result['tree'][:12]}`{changes}"


_EXTENTS = {"reqs_plus_one": "reqs + 1", "groups_plus_one": "groups + 1", "last_writers": "pages + req_indices"}


def buffers_table() -> str:
    lines = ["| buffer | shape | dtype | kind | writer | readers | pad value |", "|---|---|---|---|---|---|---|"]
    for name, spec in StaticBuffers.specs().items():
        shape = ", ".join(_EXTENTS.get(str(s), str(s)) for s in spec.shape)
        dtype = str(spec.dtype).removeprefix("torch.")
        readers = ", ".join(spec.readers)
        lines.append(f"| `{name}` | [{shape}] | {dtype} | {spec.kind.value} | {spec.writer} | {readers} | {spec.pad} |")
    return "\n".join(lines)


def backends_table() -> str:
    lines = [
        "| backend | devices | dtypes | KV dtypes | head dims | page sizes | layouts | query_len | window | softcap "
        "| ALiBi | ALiBi sqrt | sinks | chunks | V head dim | KV groups | cross | encoder | trees "
        "| context parallel | lse | batch-invariant | mixed | graphs | pad seq_len |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for backend in map(backend_class, backend_names()):
        c = backend.capabilities
        cells = [
            f"`{backend.name}`",
            ", ".join(c.devices),
            *(", ".join(str(d).removeprefix("torch.") for d in dtypes) for dtypes in (c.dtypes, c.kv_dtypes)),
            "any" if c.head_dims is None else listing(c.head_dims),
            "any" if c.page_sizes is None else listing(c.page_sizes),
            ", ".join(x.value for x in c.layouts),
            f"1 to {c.max_query_len}" if c.max_query_len > 1 else "1",
            *("yes" if x else "no" for x in (c.sliding_window, c.logits_softcap, c.alibi)),
            *("yes" if x else "no" for x in (c.alibi_sqrt, c.sinks, c.attention_chunk_size, c.v_head_dim, c.kv_groups)),
            *("yes" if x else "no" for x in (c.cross_attention, c.encoder_attention, c.tree_drafts)),
            *("yes" if x else "no" for x in (c.context_parallel, c.lse, c.batch_invariant, c.mixed)),
            backend.graph_support.name,
            str(backend.seq_len_fill),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def results_table() -> str:
    """Return the measured results, from the committed files of the H200."""
    path = ROOT / "docs" / "results" / "nvidia-h200"
    if not path.is_dir():
        return "Not measured yet: `scripts/gpu_check.py` writes `docs/results/`, the source of this table."
    decode, capture = [json.loads((path / f"{name}.json").read_text()) for name in ("decode", "capture")]
    lines = [
        "| shape | batch | context | floor ms | graphrt ms | of floor | transformers ms | host us per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    compiled = []
    for report in decode["data"]["reports"]:
        baselines = {(b["way"], b["batch"]): b for b in report.get("baselines", ())}
        for r in report["results"]:
            eager, static = (baselines.get((way, r["batch"])) for way in ("dynamic", "static"))
            lines.append(
                f"| {report['model']} | {r['batch']} | {r['context']} | {r['floor_ms']:.2f} | {r['replay_ms']:.2f} | "
                f"{100 * r['share_of_floor']:.0f} % | {_baseline(eager, r['replay_ms'])} | {r['host_us']:.0f} "
                f"({r['host_us_p20']:.0f} to {r['host_us_p80']:.0f}) |"
            )
            if static is not None:
                compiled.append(f"{report['model']} at batch {r['batch']}: {_baseline(static, r['replay_ms'])}")
    lines += [
        "",
        "transformers: one step of Hugging Face's `generate` with its default cache, for the same shape, device and "
        "context in the same run; in parentheses, the ratio to graphrt's time. Host us: the median of at least 200 "
        "calls of `replay()`; in parentheses, the 20th and 80th percentiles, because other programs share the machine.",
    ]
    if compiled:
        lines[-1] += (
            ' With a static cache and `torch.compile(mode="reduce-overhead")`, in ms: ' + "; ".join(compiled) + "."
        )
    data = capture["data"]
    lines += [
        "",
        f"Capture of the default {data['decode_graphs']} decode graphs of {data['model']}: "
        f"{data['decode_seconds']:.2f} s ({data['decode_first_seconds']:.2f} s in a new process, which also loads all "
        f"kernels and compiles those that are not in Triton's cache), {data['decode_mib_per_graph']:.1f} MiB per graph "
        f"including the memory pool ({data['nodes_per_graph']} nodes each); {data['mixed_graphs']} mixed graphs: "
        f"{data['mixed_seconds']:.2f} s, {data['mixed_mib_per_graph']:.1f} MiB per graph.",
        "",
        f"One {decode['gpu']}, torch {decode['torch']}, triton {decode['triton']}, dummy weights, bf16. The floor is "
        "the bytes that a step must read, divided by the read bandwidth measured in the same run. "
        f"`docs/results/nvidia-h200/`, {tree_of(decode)}.",
    ]
    return "\n".join(lines)


def _baseline(time: dict[str, Any] | None, ours_ms: float) -> str:
    """Return a baseline's time and its ratio to graphrt's time, or the reason why it was not measured."""
    if time is None:
        return "-"
    return time["reason"] if time["ms"] is None else f"{time['ms']:.2f} ({time['ms'] / ours_ms:.1f} x)"


def attention_table() -> str:
    """Return the attention benchmark against other kernels, from the committed results of the H200."""
    path = ROOT / "docs" / "results" / "nvidia-h200" / "attention.json"
    if not path.is_file():
        return "Not measured yet."
    record = json.loads(path.read_text())
    data, sides = record["data"], ("graphrt", "FA3", "FlashInfer")
    lines = ["| part | cell | KV MB | graphrt us | FA3 us | FlashInfer us | ratio to the best | TB/s |"]
    lines.append("|" + "---|" * 8)
    for cell in data["cells"]:
        times = [cell[side].get("us") for side in sides]
        ratio = "" if cell["ratio"] is None else f"{cell['ratio']:.2f}"
        shown = ["" if us is None else f"{us:.1f}" for us in times]
        speed = "" if times[0] is None else f"{cell['kv_bytes'] / times[0] / 1e6:.2f}"
        columns = [cell["part"], cell["cell"], f"{cell['kv_bytes'] / 1e6:.0f}", *shown, ratio, speed]
        lines.append(f"| {' | '.join(columns)} |")
    rows = sorted({schedule["rows"] for schedule in data["schedules"]})
    lines += [
        "",
        f"| schedule alone, us | {' | '.join(f'batch {n}' for n in rows)} |",
        "|" + "---|" * (len(rows) + 1),
    ]
    for mode in dict.fromkeys(schedule["mode"] for schedule in data["schedules"]):
        times = {schedule["rows"]: schedule["us"] for schedule in data["schedules"] if schedule["mode"] == mode}
        lines.append(f"| {mode} | {' | '.join(f'{times[n]:.2f}' for n in rows)} |")
    means = data["geometric_means"]
    lines += ["", f"| geometric mean of the ratios | {' | '.join(means)} |", "|" + "---|" * (len(means) + 1)]
    lines.append(f"| to the best | {' | '.join(f'{mean:.3f}' for mean in means.values())} |")
    lines += [
        "",
        f"One {record['gpu']}, torch {record['torch']}, triton {record['triton']}; read bandwidth in the same run: "
        f"{data['read_tb_per_s']:.2f} TB/s. `docs/results/nvidia-h200/attention.json`, {tree_of(record)}.",
    ]
    return "\n".join(lines)


def ranking_table() -> str:
    """Return the measured cost of each backend in each cell, by which the registry ranks backends."""
    result = _result("backends")
    if result is None:
        return "Not measured yet: backends are ranked in the order of the table above."
    ranking = parse_ranking(ranking_record(result, _result("mixed")))
    names = [name for name in backend_names() if name in ranking.names]
    lines = ["| batch | context | " + " | ".join(f"`{name}`" for name in names) + " |"]
    lines.append("|" + "---|" * (2 + len(names)))
    for cell in ranking.cells:
        times = [f"{cell.us_per_layer[name]:.1f}" if name in cell.us_per_layer else "-" for name in names]
        lines.append(f"| {cell.batch} | {cell.context} | " + " | ".join(times) + " |")
    data = result["data"]
    q_heads, kv_heads, head_dim = data["heads"]
    pages = ", ".join(f"`{name}` {data['page_sizes'][name]}" for name in names)
    lines += [
        "",
        f"us per layer, one {result['gpu']}, {q_heads}/{kv_heads} heads of {head_dim}, {data['dtype']}; page sizes: "
        f"{pages}. `docs/results/nvidia-h200/backends.json`, {tree_of(result)}.",
    ]
    return "\n".join(lines)


def mixed_table() -> str:
    """Return the cost of mixed steps, with one attention kernel and with separate decode and prefill kernels."""
    result = _result("mixed")
    if result is None:
        return "Not measured yet: one kernel serves mixed steps."
    data = result["data"]
    names = list(dict.fromkeys(name for cell in data["cells"] for name in cell["backends"]))
    heads = ["decode requests", "context", "prefill tokens", "prefix", *(f"`{name}`" for name in names), "alone"]
    lines = ["| " + " | ".join(heads) + " |"]
    lines.append("|" + "---|" * len(heads))
    for cell in data["cells"]:
        times = [cell["backends"].get(name, {}).get("us") for name in names]
        shown = [f"{us:.1f}" if us is not None else "-" for us in (*times, cell["alone_us"])]
        sizes = " | ".join(str(cell[size]) for size in ("batch", "context", "chunk", "past"))
        lines.append(f"| {sizes} | " + " | ".join(shown) + " |")
    q_heads, kv_heads, head_dim = data["heads"]
    lines += [
        "",
        f"us per layer, one {result['gpu']}, {q_heads}/{kv_heads} heads of {head_dim}, {data['dtype']}, pages of "
        f"{data['page_size']} tokens. `alone`: graphrt's decode kernel for the decode requests, and {data['alone']} "
        f"for the prefill, each in a separate graph. `docs/results/nvidia-h200/mixed.json`, {tree_of(result)}.",
    ]
    return "\n".join(lines)


def planning_time() -> str:
    """Return the host time of FlashInfer's plan for the smallest and largest batch, at the slowest context."""
    result = _result("backends")
    worst: dict[int, float] = {}
    for cell in result["data"]["cells"] if result else ():
        host_us = cell["backends"].get("flashinfer", {}).get("host_us")
        if host_us is not None:
            worst[cell["batch"]] = max(worst.get(cell["batch"], 0.0), host_us)
    if not worst:
        return "Planning has not been measured yet."
    few, many = min(worst), max(worst)
    return (
        f"Planning takes {worst[few]:.0f} us of host time per step for {few} request{'s' * (few > 1)}, and up to "
        f"{worst[many]:.0f} us for {many} requests."
    )


def ranking_file() -> str:
    """Return the text of graphrt/backends/ranking.json, with one cell per line."""
    record = ranking_record(_result("backends"), _result("mixed"))
    lists = {name: record.pop(name) for name in ("cells", "mixed_cells")}
    text = json.dumps(record, indent=1).removesuffix("\n}")
    for name, cells in lists.items():
        lines = ",\n".join("  " + json.dumps(cell) for cell in cells)
        text += f',\n "{name}": [' + (f"\n{lines}\n ]" if lines else "]")
    return text + "\n}\n"


def _result(name: str) -> dict[str, Any] | None:
    path = ROOT / "docs" / "results" / "nvidia-h200" / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


PARTS = {
    ("docs/decode_step.md", "buffers"): buffers_table,
    ("docs/backends.md", "capabilities"): backends_table,
    ("docs/backends.md", "planning"): planning_time,
    ("docs/backends.md", "ranking"): ranking_table,
    ("docs/backends.md", "mixed"): mixed_table,
    ("docs/attention.md", "attention"): attention_table,
    ("README.md", "results"): results_table,
}


def render() -> dict[Path, str]:
    """Return the text of every generated file, documentation with its marked sections rewritten."""
    texts: dict[Path, str] = {ROOT / "graphrt" / "backends" / "ranking.json": ranking_file()}
    for (name, mark), make in PARTS.items():
        path = ROOT / name
        text = texts.get(path) or path.read_text()
        # A section is either complete lines or part of a line.
        pattern = re.compile(rf"(<!-- {mark} -->(\n?)).*?(<!-- /{mark} -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"{name}: the marks <!-- {mark} --> and <!-- /{mark} --> are missing; add them")
        part = make()
        texts[path] = pattern.sub(lambda m, part=part: m.group(1) + part + m.group(2) + m.group(3), text)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [path for path, text in render().items() if path.read_text() != text]
    for path in stale:
        if not check:
            path.write_text(render()[path])
        print(f"{'out of date' if check else 'rewritten'}: {path.relative_to(ROOT)}")
    if check and stale:
        sys.exit(1)


if __name__ == "__main__":
    main()
