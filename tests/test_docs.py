"""Blocks, commands and names of the pages are right, links lead to headings, and the index of docs/dev/log.md is
complete."""

from __future__ import annotations

import itertools
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.main import get_command

from graphrt.capture.descriptor import GraphKind
from graphrt.cli.main import app
from graphrt.engine.handle import RequestFault
from graphrt.engine.traffic import read_trace
from graphrt.kernels.types import FaultCode
from scripts import gpu_check

ROOT = Path(__file__).resolve().parent.parent
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
LOG = (ROOT / "docs" / "dev" / "log.md").read_text()
VERDICTS = ("kept", "lost", "mixed", "fact", "missed")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def tables(page: str) -> list[list[str]]:
    """The lines of each table."""
    return [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def run_python(source: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, without a GPU, as the page asks for: Triton reads its variable when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment.pop("GRAPHRT_BACKEND", None)
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=environment, timeout=300, check=False
    )


def test_the_blocks_of_troubleshooting_run_one_after_another() -> None:
    result = run_python("\n".join(blocks(TROUBLESHOOTING, "python")))
    assert result.returncode == 0, result.stderr
    assert "1 PAGE_OUT_OF_RANGE 999" in result.stdout
    assert "qkv: expected at address" in result.stdout
    section = TROUBLESHOOTING.split("\n## The code on this page")[1].split("\n## ")[0]
    assert "TRITON_INTERPRET=1 python" in section, "the page says what its blocks need"


def test_the_pages_about_graphs_run_with_its_manager(tmp_path: Path) -> None:
    page, bugs = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("graph_page", "graph_bugs"))
    (of_manager,) = (block for block in blocks(bugs, "python") if "verify_runtime(manager" in block)
    of_page = [block for block in blocks(page, "python") if "reduce-overhead" not in block]  # which needs a GPU
    head = f"import os; os.chdir({str(tmp_path)!r})"
    result = run_python("\n".join([head, blocks(TROUBLESHOOTING, "python")[0], *of_page, of_manager]))
    assert result.returncode == 0, result.stderr
    (shown,) = re.findall(r"these are the first lines:\n\n```\n(.*?)```", page, re.DOTALL)
    assert shown in result.stdout
    assert "verify RuntimeSubject: ok" in result.stdout
    assert "<title>decode[2]" in (tmp_path / "decode.html").read_text()


def test_every_fault_code_is_listed_and_codes_of_the_sample_have_their_kv_written() -> None:
    """Codes of the sample are named; with every other one nothing was written, as the error of each says."""
    named = re.findall(r"^\| ([A-Z_]+) \|", TROUBLESHOOTING, re.MULTILINE)
    assert named == [code.name for code in FaultCode if code]
    of_sample = [code.name for code in FaultCode if code and "wrote nothing" not in str(RequestFault(0, code, 0))]
    assert of_sample == ["NO_TOKEN_OFFERED", "SAMPLE_OUT_OF_RANGE"]
    assert f"A request with {' or '.join(of_sample)} has its KV written" in TROUBLESHOOTING


def test_the_tree_and_the_table_lead_to_sections_that_are_there() -> None:
    sections = set(re.findall(r"^## (\d+)\. ", TROUBLESHOOTING, re.MULTILINE))
    tree = TROUBLESHOOTING.split("```")[1]
    assert set(re.findall(r"\.\. (\d+)\b", tree)) <= sections
    listed = [cells(line)[0] for line in tables(TROUBLESHOOTING)[0][2:]]
    assert listed == [str(n) for n in range(1, len(listed) + 1)]
    assert set(listed) <= sections


COMMAND = re.compile(r"\bgraphrt ((?:bench )?(?:env|generate|decode|serve|capture|replay|plan))\b([^`|#\n]*)")
SCRIPT = re.compile(r"\bpython (?:-m scripts\.|scripts/)(\w+)(?:\.py)?([^`|#\n]*)")


def test_commands_of_all_pages_and_jobs_name_options_that_exist() -> None:
    """In blocks and in the text, where a command may be continued on the next line."""
    checked = set()
    pages = {path.name: path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    jobs = itertools.chain.from_iterable(gpu_check.ALL_JOBS.values())
    pages["gpu_check.py"] = "\n".join(" ".join(job).replace(gpu_check.PYTHON, "python") for job in jobs)
    of_ranks = (ROOT / "scripts" / "rigs" / "ranks.py").read_text()
    for file, text in pages.items():
        page = re.sub(r"`[^`\n]+\n[^`\n]+`", lambda code: code[0].replace("\n", " "), text)
        for name, rest in COMMAND.findall(page):
            command: Any = get_command(app)
            for word in name.split():
                command = command.commands[word]
            known = {option for parameter in command.params for option in parameter.opts}
            assert set(re.findall(r"--[\w-]+", rest)) <= known, (file, name, rest)
            checked.add(name)
        for name, rest in SCRIPT.findall(page):
            source = (ROOT / "scripts" / f"{name}.py").read_text()
            source += of_ranks if "make_ranks_parser" in source else ""
            assert [o for o in re.findall(r"--[\w-]+", rest) if f'"{o}"' not in source] == [], (file, name, rest)
            checked.add(name)
    assert checked >= {"env", "generate", "bench decode", "bench serve", "capture", "replay", "plan", "gpu_check"}
    assert checked >= {"bench_all_reduce", "bench_context_parallel", "bench_transformers"}


SGLANG = """
[10:00:00 TP0] Prefill batch. #new-seq: 1, #new-token: 512, #cached-token: 3, #running-req: 7, #queue-req: 0
[10:00:01 TP0] Decode batch. #running-req: 12, #token: 1000, gen throughput (token/s): 100.00, #queue-req: 0
"""
VLLM = """
| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode            | Count |
|-----------------|---------------|--------------|-------------------------|-------|
| 12              | 16            | 4            | CUDAGraphMode.FULL      | 40    |
| 512             | 512           | 0            | CUDAGraphMode.PIECEWISE | 1     |
"""


def test_commands_convert_logs_of_other_engines_to_a_trace(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "embedding.md").read_text()
    commands = {name: line for name in ("sglang.log", "vllm.log") for line in page.splitlines() if line.endswith(name)}
    for (name, command), log in zip(commands.items(), (SGLANG, VLLM), strict=True):
        (tmp_path / name).write_text(log)
        trace = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        (tmp_path / "server.trace").write_text(trace)
        assert read_trace(tmp_path / "server.trace", 256, 2048) == {
            GraphKind.DECODE: {12: 40},
            GraphKind.MIXED: {512: 1},
        }


def test_names_of_all_pages_are_where_they_are_said_to_be() -> None:
    """`name` in `path.py`, and dotted names from graphrt on, except operators such as graphrt.refresh.default."""
    said, dotted = [], set()
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        page = " ".join(path.read_text().split())
        said += re.findall(
            r"((?:`[\w.]+`(?:, | and )?)+) in `((?:graphrt|capture|kernels|scripts|tests)/[\w/]+\.py)`", page
        )
        dotted |= set(re.findall(r"\bgraphrt(?:\.\w+)+", page))
    assert len(said) > 10
    for names, file in said:
        for name in re.findall(r"`(?:\w+\.)*(\w+)`", names):
            assert re.search(rf"\b{name}\b", (ROOT / file).read_text()), (name, file)
    for name in (name for name in dotted if not name.endswith(".default")):
        assert pkgutil.resolve_name(name) is not None


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_links_between_pages_lead_to_headings() -> None:
    pages = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
    text = {path: re.sub(r"^ *```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE) for path, page in pages.items()}
    anchors = {path: set(map(anchor, re.findall(r"^#+ (.*)$", t, re.MULTILINE))) for path, t in text.items()}
    links = [(path, *link) for path, t in text.items() for link in re.findall(r"\]\(([\w./-]*\.md)?#([^)\s]+)\)", t)]
    assert links
    leads = [(path, (path.parent / to).resolve() if to else path, at) for path, to, at in links]
    broken = [(path.name, to.name, at) for path, to, at in leads if at not in anchors.get(to, ())]
    assert not broken


def entries() -> list[tuple[str, str, str]]:
    """Date, name and verdict of each entry."""
    found = re.findall(r"^### (.*)$", LOG, re.MULTILINE)
    parts = [re.fullmatch(r"(\d{4}-\d\d-\d\d) (.+): (\w+)", heading) for heading in found]
    assert all(parts), [h for h, part in zip(found, parts, strict=True) if part is None]
    return [part.groups() for part in parts if part]


def test_the_index_of_the_log_is_its_entries() -> None:
    index = LOG.split("## Index\n")[1].split("\n## ")[0]
    rows = [cells(line) for line in tables(index)[0][2:]]
    listed = []
    for date, question, verdict, figure, link in rows:
        name, target = re.fullmatch(r"\[(.*)\]\(#(.*)\)", link).groups()
        assert target == anchor(f"{date} {name}: {verdict}")
        assert question.endswith("?")
        assert figure
        listed.append((date, name, verdict))
    assert listed == entries()
    assert {verdict for _, _, verdict in listed} <= set(VERDICTS)


def test_entries_of_the_log_are_newest_first_and_named_once_and_references_lead_to_one() -> None:
    dates, listed, _ = zip(*entries(), strict=True)
    assert list(dates) == sorted(dates, reverse=True)
    campaigns = re.findall(r"^## \d{4}-\d\d-\d\d (.+?): ", LOG, re.MULTILINE)
    names = {*listed, *campaigns}
    assert len(names) == len(listed) + len(campaigns)
    text = re.sub(r"\s+", " ", LOG.split("## Index\n")[1])
    quoted = set(re.findall(r'"([A-Z][^"]+)"', text)) - {"Reading"}
    assert quoted <= names
