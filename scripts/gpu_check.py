"""Runs the GPU tests and the benchmarks on this machine's GPU and writes docs/results/<gpu>/<name>.json.

    python scripts/gpu_check.py                              # everything that the number of GPUs allows
    python scripts/gpu_check.py --only tests,sanitize --out /tmp/results
    python scripts/gpu_check.py --require triton             # fail if a test that names it was skipped

Each job is a separate command, so that jobs do not share compiled kernels or memory: tests, compute-sanitizer (of the
CUDA toolkit) and benchmarks. The tests spend most of their time on compiling kernels, so they run in several processes,
followed by one process for those marked `alone`. `python -m pytest -m gpu` runs all of them in one process. A result
holds the commands, the versions, the commit and tree (`--commit`, `--tree` for a copy of the files), and the JSON of
the job. Exits with 1 if a job fails. An unfinished or failed job writes no result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphrt.backends.registry import backend_names
from graphrt.bench.environment import OPTIONAL_PACKAGES, provenance

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
BENCH = [PYTHON, "-m", "graphrt", "bench", "decode", "--json-only"]
DECODE = [*BENCH, "--baseline", "transformers"]
SPECULATE = [*BENCH, "--shape", "llama-3.1-8b", "--speculate"]
PYTEST = [PYTHON, "-m", "pytest", "-q", "-rfEs", "--durations=10"]
TESTS = "tests"
SANITIZE = "sanitize"
SANITIZED = ["--error-exitcode", "9", PYTHON, "-m", "scripts.sanitize_kernels"]
RACECHECKED = "many,one,two_clusters,pairs,products_1,products_32_4_bits"
JOBS: dict[str, list[list[str]]] = {
    TESTS: [
        [*PYTEST, "-n", str(os.cpu_count()), "-m", "gpu and not alone"],
        [*PYTEST, "-m", "gpu and alone"],
    ],
    SANITIZE: [
        ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", *SANITIZED],
        [
            "compute-sanitizer",
            "--tool",
            "racecheck",
            *SANITIZED,
            "--only",
            "many,one,two_clusters,pairs,products_1,products_32_4_bits",
        ],
    ],
    "attention": [[PYTHON, "-m", "scripts.bench_attention"]],
    "linear": [[PYTHON, "-m", "scripts.bench_linear", "--tokens", "1,8,32"]],
    "backends": [[PYTHON, "-m", "scripts.bench_backends"]],
    "mixed": [[PYTHON, "-m", "scripts.bench_mixed"]],
    "groups": [[PYTHON, "-m", "scripts.bench_groups"]],
    "swap": [[PYTHON, "-m", "scripts.bench_swap"]],
    "capture": [[PYTHON, "-m", "scripts.bench_capture"]],
    "start": [[PYTHON, "-m", "scripts.bench_start"]],
    "host": [[PYTHON, "-m", "scripts.bench_host"]],
    "loop": [[PYTHON, "-m", "scripts.bench_loop"]],
    "graph_checks": [[PYTHON, "-m", "scripts.bench_graph_checks"]],
    "sampling": [[PYTHON, "-m", "scripts.bench_sampling", "--rows", "256", "--vocab", "128256"]],
    "graph_bugs": [[PYTHON, "-m", "scripts.bug_catalogue"]],
    "serve": [[PYTHON, "-m", "graphrt", "bench", "serve", "--json-only"]],
    "speculation": [
        [*SPECULATE, "ngram", "--batch", "1", "--drafts", "4"],
        [*SPECULATE, "ngram", "--batch", "32", "--drafts", "3"],
        [*SPECULATE, "dummy:llama-3.2-1b", "--batch", "1", "--drafts", "4"],
    ],
    "quantized": [
        [*BENCH, "--shape", f"llama-3.1-8b{suffix}", "--batch", "1,32", "--context", "1024"]
        for suffix in ("", "-fp8", "-int4")
    ],
    "transformers": [[PYTHON, "-m", "scripts.bench_transformers"]],
    "decode": [
        [*DECODE, "--shape", "llama-3.1-8b", "--batch", "1,8,16,32,64,128,256", "--context", "1024"],
        [*DECODE, "--shape", "llama-3.2-1b", "--batch", "1,8,16,32,64,128,256", "--context", "1024"],
    ],
}
RANK_TESTS = [
    "tests/kernels/test_all_reduce.py",
    "tests/kernels/test_cache_copy.py",
    "tests/engine/test_ranks_on_gpus.py",
    "tests/integrations/test_ray.py",
    "tests/integrations/test_transformers_ranks.py",
]
SUMMED = "1,8,32,64,256,1024,4096"
RANK_JOBS: dict[int, dict[str, list[list[str]]]] = {
    gpus: {
        f"{TESTS}_{gpus}_gpus": [
            [*PYTEST, "-n", "4", "-m", "gpu and not alone", *RANK_TESTS],
            [*PYTEST, "-m", "gpu and alone", *RANK_TESTS],
        ],
        f"all_reduce_{gpus}_gpus": [
            [PYTHON, "-m", "scripts.bench_all_reduce", "--ranks", f"{gpus}", "--tokens", SUMMED]
        ],
        f"context_parallel_{gpus}_gpus": [
            [PYTHON, "-m", "scripts.bench_context_parallel", "--ranks", f"{gpus}", "--tokens", "128,1024,65536"]
        ],
        f"decode_{gpus}_gpus": [
            [*BENCH, "--shape", "llama-3.1-8b", "--batch", "1,64,256", "--context", "1024", "--tp", f"{gpus}"]
        ],
        f"decode_70b_{gpus}_gpus": [
            [*BENCH, "--shape", "llama-3.1-70b", "--batch", "1", "--context", "1024", "--tp", f"{gpus}"]
        ],
    }
    for gpus in (2, 4)
}
"""Jobs by the number of GPUs that they use."""
ALL_JOBS = JOBS | RANK_JOBS[2] | RANK_JOBS[4]

ORIGIN = ("gpu", "driver", "cuda", "torch", "triton", "packages", "python", "commit", "tree", "uncommitted_changes")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the commands of a job. `summary` is printed again at the end of the job."""

    codes: list[int]
    data: dict[str, Any]
    summary: tuple[str, ...] = ()


def run(command: Sequence[str]) -> tuple[int, str]:
    """Return exit code and output of a command. Its lines are printed as they arrive."""
    print("$", *command, flush=True)
    try:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:  # the program is missing; the other jobs still run
        print(error, flush=True)
        return 127, f"{error}\n"
    assert process.stdout is not None, "stdout is piped"
    lines = []
    for line in process.stdout:
        lines.append(line)
        print(line, end="", flush=True)
    return process.wait(), "".join(lines)


def run_tests(commands: Sequence[Sequence[str]]) -> Outcome:
    """Run each command. Return the counts over all commands, the reasons of skips, and the lines that name failures."""
    results = [run(command) for command in commands]
    counts: Counter[str] = Counter()
    skips: list[set[str]] = []
    failures: list[str] = []
    for _, output in results:
        closing = [
            line for line in output.splitlines() if re.search(r"\d+ (passed|failed|skipped|errors?)\b.* in ", line)
        ]
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", closing[-1] if closing else ""):
            counts[word] += int(number)
        skips.append(set(re.findall(r"^SKIPPED \[\d+\] (.*)$", output, re.MULTILINE)))
        failures += re.findall(r"^(?:FAILED|ERROR) .*$", output, re.MULTILINE)
    # A module that skips itself does so for every command, but counts as one skip.
    counts["skipped"] -= (len(results) - 1) * len(set.intersection(*skips))
    data = {"counts": {word: n for word, n in counts.items() if n}, "skips": sorted(set.union(*skips))}
    return Outcome([code for code, _ in results], data, tuple(failures))


def run_benchmark(commands: Sequence[Sequence[str]]) -> Outcome:
    """Run each command. Its last line of output is its JSON; the origin is stored once for the whole result."""
    results = [run(command) for command in commands]
    reports = [json.loads(output.strip().splitlines()[-1]) for code, output in results if code == 0]
    reports = [{key: value for key, value in report.items() if key not in ORIGIN} for report in reports]
    return Outcome([code for code, _ in results], reports[0] if len(reports) == 1 else {"reports": reports})


def run_sanitizers(commands: Sequence[Sequence[str]]) -> Outcome:
    """Run each command and collect its cases and the tool's summary, which must report no error."""
    codes, runs = [], []
    for command in commands:
        code, output = run(command)
        said = {
            "cases": re.findall(r"^ok (.*)$", output, re.MULTILINE),
            "summary": re.findall(r"^=+ (\w+ SUMMARY: .*)$", output, re.MULTILINE),
        }
        clean = len(said["cases"]) == 1 and len(said["summary"]) == 1 and re.search(r"SUMMARY: 0 ", said["summary"][0])
        codes.append(code or not clean)
        runs.append({"tool": command[2], **{key: value[0] if value else None for key, value in said.items()}})
    return Outcome([int(code) for code in codes], {"runs": runs})


def parse(command: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fitting = [name for gpus, jobs in RANK_JOBS.items() if gpus <= torch.cuda.device_count() for name in jobs]
    parser.add_argument("--only", default=",".join([*JOBS, *fitting]), help="comma-separated jobs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--commit", help="commit of the files, if they are a copy without git; needs --tree")
    parser.add_argument("--tree", help="tree hash of this commit; the files are compared with it")
    parser.add_argument("--require", default="", help="comma-separated backends or packages; fail if a skip names one")
    arguments = parser.parse_args(command)
    if unknown := [n for n in arguments.only.split(",") if n not in ALL_JOBS]:
        parser.error(f"unknown jobs {unknown}; choose from {list(ALL_JOBS)}")
    # A name that no skip reason can contain would require nothing.
    known = [*backend_names(), *OPTIONAL_PACKAGES]
    if unknown := [n for n in arguments.require.split(",") if arguments.require and n not in known]:
        parser.error(f"--require: expected names of {', '.join(known)}, got {unknown}")
    if bool(arguments.commit) != bool(arguments.tree):
        parser.error("--commit and --tree: pass both or neither")
    if arguments.require and TESTS not in arguments.only.split(","):
        parser.error(f"--require: it checks the skips of the job {TESTS}; add {TESTS} to --only")
    return arguments


def main() -> None:
    arguments = parse()
    names = arguments.only.split(",")
    origin = provenance()
    gpu = (origin["gpu"] or "").replace(" ", "-").lower()
    if not gpu:
        sys.exit("gpu_check: expected a CUDA device, got none")
    # The output folder and the given commit are not part of the command that repeats the run.
    requirement = f" --require {arguments.require}" if arguments.require else ""
    origin["command"] = f"python scripts/gpu_check.py --only {arguments.only}{requirement}"
    if arguments.tree:  # the tree hash of the files is kept if it is known
        tree = origin["tree"] or arguments.tree
        origin |= {"commit": arguments.commit, "tree": tree, "uncommitted_changes": tree != arguments.tree}
    folder = arguments.out / gpu
    folder.mkdir(parents=True, exist_ok=True)
    required = [r for r in arguments.require.split(",") if r]
    failed = []
    for name in names:
        start = time.time()
        commands = ALL_JOBS[name]
        run_job = run_tests if name.startswith(TESTS) else run_sanitizers if name == SANITIZE else run_benchmark
        outcome = run_job(commands)
        for line in outcome.summary:
            print(line)
        missed = [r for r in required if name == TESTS and any(r in skip for skip in outcome.data["skips"])]
        if any(outcome.codes) or missed:
            failed.append(name)
            print(f"{name}: FAILED (exit codes {outcome.codes}, required but skipped: {missed})")
            continue
        shown = [shlex.join("python" if word == PYTHON else word for word in c) for c in commands]
        seconds = round(time.time() - start, 1)
        record = {**origin, "name": name, "commands": shown, "seconds": seconds, "data": outcome.data}
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        print(f"{name}: {seconds} s, written to {gpu}/{name}.json")
    print(f"gpu_check: {len(names) - len(failed)} jobs passed, {len(failed)} failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
