"""Runs the GPU tier and the benchmarks on this machine's GPU and writes docs/results/<gpu>/<name>.json.

    python scripts/gpu_check.py                              # everything
    python scripts/gpu_check.py --only tests,capture --out /tmp/results
    python scripts/gpu_check.py --require triton             # fail when a test that names it was skipped

Each job is a command of its own, so that none sees what another compiled or allocated. A result holds the command, the
versions, the commit and tree (`--commit`, `--tree` where there is no git), and the job's own JSON. Exits 1 when a job
fails. An unfinished or failed job writes no result.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

from graphrt.testing.bench import provenance

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
DECODE = [PYTHON, "-m", "graphrt", "bench", "decode", "--json-only"]
JOBS: dict[str, list[list[str]]] = {
    "tests": [[PYTHON, "-m", "pytest", "-m", "gpu", "-q", "-rs", "--durations=10"]],
    "attention": [[PYTHON, "scripts/bench_attention.py"]],
    "capture": [[PYTHON, "scripts/bench_capture.py"]],
    "decode": [
        [*DECODE, "--shape", "llama-3.1-8b", "--batch", "1,8,32,64,128,256", "--context", "1024"],
        [*DECODE, "--shape", "llama-3.2-1b", "--batch", "1,8,32,64,128,256", "--context", "1024"],
    ],
}


def run(command: list[str]) -> tuple[int, str]:
    print(f"$ {' '.join(command)}", flush=True)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None, "stdout is piped"
    lines = []
    for line in process.stdout:
        lines.append(line)
        print(line, end="", flush=True)
    return process.wait(), "".join(lines)


def tests_result(output: str) -> dict[str, object]:
    """Counts from pytest's closing line, and the reasons of skips."""
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error|errors|deselected)", output)}
    skips = re.findall(r"^SKIPPED \[\d+\] (.*)$", output, re.MULTILINE)
    return {"counts": counts, "skips": skips}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(JOBS), help="comma-separated jobs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--commit", help="parent commit, where the checkout has no git")
    parser.add_argument("--tree", help="tree hash, where the checkout has no git")
    parser.add_argument("--require", default="", help="comma-separated names that no skip may mention")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := [n for n in names if n not in JOBS]:
        parser.error(f"unknown jobs {unknown}; choose from {list(JOBS)}")
    origin = provenance()
    gpu = (origin["gpu"] or "").replace(" ", "-").lower()
    if not gpu:
        sys.exit("gpu_check: expected a CUDA device, got none")
    # Where the results went, and how a checkout without git was named, are no part of how to repeat the run.
    requirement = f" --require {arguments.require}" if arguments.require else ""
    origin["command"] = f"python scripts/gpu_check.py --only {arguments.only}{requirement}"
    origin |= {"commit": arguments.commit or origin["commit"], "tree": arguments.tree or origin["tree"]}
    folder = arguments.out / gpu
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        start, reports, outputs, codes = time.time(), [], [], []
        for command in JOBS[name]:
            code, output = run(command)
            codes.append(code)
            outputs.append(output)
            if code == 0 and name != "tests":
                reports.append(json.loads(output.strip().splitlines()[-1]))
        data = (
            tests_result(outputs[0]) if name == "tests" else {"reports": reports} if len(reports) != 1 else reports[0]
        )
        required = [r for r in arguments.require.split(",") if r]
        missed = [r for r in required if name == "tests" and any(r in skip for skip in data["skips"])]
        if any(codes) or missed:
            failed.append(name)
            print(f"{name}: FAILED (exit codes {codes}, required but skipped: {missed})", flush=True)
            continue
        commands = [" ".join(["python", *c[1:]]) for c in JOBS[name]]
        record = {**origin, "name": name, "commands": commands, "seconds": round(time.time() - start, 1), "data": data}
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        print(f"{name}: written to {gpu}/{name}.json", flush=True)
    print(f"gpu_check: {len(names) - len(failed)} jobs passed, {len(failed)} failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
