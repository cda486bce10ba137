"""The mutation job: which changes it makes, and what it says of a toy package with good and missing tests."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.mutants import choose, find_mutants
from scripts.mutation import TestFile as FileNotes  # pytest takes a name that begins with Test for tests

ROOT = Path(__file__).resolve().parents[2]


def changed(source: str) -> dict[str, list[str]]:
    """The sources that the mutants of `source` make, by operator."""
    found: dict[str, list[str]] = {}
    for mutant in find_mutants("a.py", source.encode()):
        found.setdefault(mutant.operator, []).append(mutant.apply(source.encode()).decode())
    return found


CHANGES = {
    "x = a < b <= c": {"comparison": ["x = a <= b <= c", "x = a < b < c"]},
    "x = a is not b": {"comparison": ["x = a is b"]},
    "x = a not  in b": {"comparison": ["x = a in b"]},
    "x = isin in inner": {"comparison": ["x = isin not in inner"]},
    "x = (a) + (b)": {"arithmetic": ["x = (a) - (b)"]},
    "x = a // b % c": {"arithmetic": ["x = a // b // c", "x = a % b % c"]},
    "x = 'a' + b": {},
    "x += y": {"arithmetic": ["x -= y"], "statement deleted": ["pass"]},
    "x = a and b or c": {"and, or": ["x = a and b and c", "x = a or b or c"]},
    "x = not a": {"not": ["x = (a)"]},
    "x = -a": {"sign": ["x = a"]},
    "x = 7": {"constant": ["x = 8"]},
    "x = True": {"True, False": ["x = False"]},
    "x = min(a)": {"min, max, any, all": ["x = max(a)"]},
    "x = a.any()": {"min, max, any, all": ["x = a.all()"]},
    "f(a, b)": {"arguments swapped": ["f(b, a)"], "statement deleted": ["pass"]},
    "x = f(a, k=b, v=c)": {
        "arguments swapped": ["x = f(a, k=c, v=b)"],
        "keyword dropped": ["x = f(a, v=c)", "x = f(a, k=b)"],
    },
    "x = f(k=a, num_warps=4)": {"keyword dropped": ["x = f(num_warps=4)"]},
    "a.b = c": {"statement deleted": ["pass"]},
    "a[1] = c": {"constant": ["a[2] = c"], "statement deleted": ["pass"]},
    "def f(a=1): ...": {"constant": ["def f(a=2): ..."]},
    "def f(a):\n    return a": {"returned value": ["def f(a):\n    return None"]},
    "def f(a):\n    return False": {"True, False": ["def f(a):\n    return True"]},
    "x = load(a, other=-1)": {"keyword dropped": ["x = load(a)"], "sign": ["x = load(a, other=1)"],
                              "constant": ["x = load(a, other=-2)"]},
    "x = load(a, other=0)": {"constant": ["x = load(a, other=1)"]},
    "if a == b:\n    raise E(f'{a + 1}')": {
        "comparison": ["if a != b:\n    raise E(f'{a + 1}')"],
        "statement deleted": ["if a == b:\n    pass"],
    },
    "é = a < b": {"comparison": ["é = a <= b"]},
}  # fmt: skip


@pytest.mark.parametrize("source", CHANGES)
def test_changes_of_a_statement(source: str) -> None:
    assert {name: sorted(texts) for name, texts in changed(source).items()} == {
        name: sorted(texts) for name, texts in CHANGES[source].items()
    }


UNTOUCHED = [
    '"""A text of 3 < 4."""',
    "import a, b",
    "x: tuple[int, 3]",
    "assert a < b, f(1)",
    "if TYPE_CHECKING:\n    x = 1",
    "@jit(3)\nclass A:\n    pass",
    "def compile_variants():\n    return 1 + 2",
    "x = f'{a + 1}'",
    "_ROW_BLOCK = 256",
    "_NUM_WARPS = 4",
    "_INTERPRETER_SMS = 4",
    "x = np.array_equal(a, b)",
    "def f(a: int | None) -> int | None: ...",
]


@pytest.mark.parametrize("source", UNTOUCHED)
def test_what_no_test_is_asked_to_notice(source: str) -> None:
    assert changed(source) == {}


@pytest.mark.parametrize(
    "source",
    [
        "if device.type == 'cuda':\n    f(a)\nelse:\n    x = 5",
        "if device.type != 'cuda':\n    x = 5\nelse:\n    f(a)",
        "if self._stream is None:\n    x = 5\nelse:\n    f(a)",
        "if self._stream is not None:\n    f(a)\nelse:\n    x = 5",
    ],
)
def test_branches_for_cuda_devices_are_left_out(source: str) -> None:
    assert set(changed(source)) == {"comparison", "constant"}


def test_a_quick_test_may_have_to_build_a_slow_fixture() -> None:
    """Which the slow test of its file built, as the code was measured: it does not hang then."""
    assert FileNotes({"slow": 60.0, "quick": 0.1, "other": 20.0}, {}).limits() == {
        "slow": 60.0, "quick": 15.0, "other": 20.0
    }  # fmt: skip
    assert FileNotes({}, {}).limits() == {}


def test_mutants_are_chosen_by_the_seed_without_repetition() -> None:
    sources = {f"{name}.py": b"x = a < b\ny = f(1, 2)\nz = f(k=1)\n" for name in "ab"}
    chosen = choose(sources, 100, seed=3)
    assert chosen == choose(sources, 100, seed=3)
    assert len(set(chosen)) == len(chosen) == 2 * (1 + 3 + 2)
    assert choose(sources, 5, seed=3) == chosen[:5]
    assert choose(sources, 100, seed=4) != chosen
    assert {m.line for m in choose(sources, 6, seed=1)} == {1, 2, 3}, "every line once before any line twice"
    for mutant in chosen:
        ast.parse(mutant.apply(sources[mutant.path]))


def test_a_mutant_knows_the_lines_and_the_scope_that_run_it() -> None:
    source = "A = 1\n\n\ndef f(x):\n    if (\n        x < 2\n    ):\n        return g(\n            3,\n        )\n"
    found = {m.operator + m.text: (m.line, m.lines, m.in_function) for m in find_mutants("a.py", source.encode())}
    assert found["constant2"] == (1, (1, 1), False)
    assert found["comparison<="] == (6, (5, 7), True)
    assert found["constant4"] == (9, (8, 10), True)


PACKAGE = {
    "toy/__init__.py": "",
    "toy/sums.py": """\
LIMIT = 3


def clipped(value):
    if value > LIMIT:
        return LIMIT
    return value


def forever(count):
    while count > 0:
        count -= 1
    return count


def unwatched(a, b):
    return a - b
""",
    "tests/test_sums.py": """\
import pytest
from toy import sums


@pytest.fixture(scope="module")
def shared():
    return sums.clipped(2)


def test_clipped(shared):
    assert (shared, sums.clipped(3), sums.clipped(4)) == (2, 3, 3)


def test_forever():
    assert sums.forever(2) == 0


def test_unwatched():
    sums.unwatched(1, 2)
""",
    "tests/test_others.py": "def test_nothing():\n    pass\n",
}

RUN = """
import json, sys
import hypothesis, pytest  # once, not in each child
from pathlib import Path
from scripts import mutation
root = Path(sys.argv[1])
mutation.LEAST_SECONDS = 1
tests = ["tests/test_sums.py", "tests/test_others.py"]
result = mutation.run(root, ["toy/sums.py"], tests, seed=1, count=int(sys.argv[2]), minutes=5, seconds=60, workers=2,
                      cache=root / "cache")
print(json.dumps(result))
"""


def test_a_toy_package(tmp_path: Path) -> None:
    """What is watched is noticed, a loop without end too; what is not is shown with its diff."""
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    # The toy has no graphrt of its own: where graphrt is installed, its plugin would bring another one.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTEST_ADDOPTS"] = "-p no:graphrt.testing.pytest_plugin"
    for count, measured in ((0, 2), (99, 0)):
        command = [sys.executable, "-c", RUN, str(tmp_path), str(count)]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.count("measured tests/") == measured, "the second run finds the first one's lines"
    report = json.loads(result.stdout.splitlines()[-1])
    verdicts = {(m["where"], *m["diff"][1:]): m["verdict"] for m in report["mutants"]}
    assert verdicts["toy/sums.py:1", "  +LIMIT = 4"] == "noticed"
    assert verdicts["toy/sums.py:5", "  +    if value >= LIMIT:"] == "unnoticed", "LIMIT is LIMIT either way"
    assert verdicts["toy/sums.py:7", "  +    return None"] == "noticed"
    assert verdicts["toy/sums.py:12", "  +        count += 1"] == "timeout"
    assert verdicts["toy/sums.py:11", "  +    while count >= 0:"] == "noticed"
    assert verdicts["toy/sums.py:17", "  +    return a + b"] == "unnoticed"
    assert report["tried"] == len(verdicts) == report["noticed"] + report["unnoticed"]
    assert report["files"]["toy/sums.py"]["unnoticed"] == report["unnoticed"]
    assert report["timeouts"] >= 1
    assert "  +    return a + b\n  tests: 1 passed, 0 left out" in result.stdout
    assert {name: (tmp_path / name).read_text() for name in PACKAGE} == PACKAGE
