"""Rules that a syntax tree shows: import order and cycles, file lengths, annotations of kernels."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphrt

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("kernels", "capture", "graphrt")
OUTSIDE = frozenset(sys.stdlib_module_names) | {"torch", "triton", "numpy", "cuda"}
MAX_LINES, MAX_KERNEL_LINES = 500, 600


def sources(*folders: str) -> dict[str, str]:
    """Text of every Python file by its path; `graphrt/kernels` and `graphrt/capture`, being links, are left out."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(parent.is_symlink() for parent in path.parents)
    }


def imports(source: str) -> Iterator[str]:
    """Full name of everything imported anywhere in a file. ruff refuses relative imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_faults(path: str, source: str) -> list[str]:
    """Imports that the file's layer may not have."""
    layer = path.split("/")[0]
    faults = []
    for name in imports(source):
        top, *below = name.split(".")
        if top in ("kernels", "capture"):
            faults.append(f"{name}: top-level name of a layer")
        elif layer == "kernels" and not (top in OUTSIDE or (top == "graphrt" and below[:1] == ["kernels"])):
            faults.append(f"{name}: above or outside of kernels")
        elif layer == "capture" and not (
            top in OUTSIDE or (top == "graphrt" and below[:1] in (["kernels"], ["capture"]))
        ):
            faults.append(f"{name}: above or outside of capture")
    return faults


ROOMS = (
    "kernels", "capture", "env", "config", "spec", "sampling_params", "batch_values", "batch", "cache", "metadata",
    "backends", "context_parallel", "step", "layer", "sampling", "proposer", "draft_model", "engine", "replay",
    "runtime", "session", "models", "generate", "integrations", "bundle", "testing", "graph_checks", "bench", "cli",
    "__main__",
)  # fmt: skip
"""Sub-packages and modules of graphrt, lowest first. A file imports from its own room and from those before it."""


def module_of(path: str) -> str:
    """Full name of the module in a file: "kernels/types.py" is graphrt.kernels.types."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.split(".")[0] == "graphrt" else f"graphrt.{name}"


def room_faults(path: str, source: str) -> list[str]:
    """Imports of rooms above the file's own, and public names that are not imported from their modules."""
    _, *rest = module_of(path).split(".")
    if not rest:  # graphrt/__init__.py, which imports the public names from every room
        return []
    if rest[0] not in ROOMS:
        return [f"{rest[0]}: missing in ROOMS"]
    allowed = ROOMS[: ROOMS.index(rest[0]) + 1]
    names = [name.split(".") for name in imports(source) if name != "graphrt.__version__"]
    return [".".join(name) for name in names if name[0] == "graphrt" and (name[1:2] or [""])[0] not in allowed]


def import_cycles(files: dict[str, str]) -> list[str]:
    """Groups of files that import each other, directly or not; imports in functions and for type checkers count."""
    paths = {module_of(path): path for path in files}
    edges: dict[str, set[str]] = {}
    for module, path in paths.items():
        found = set()
        for name in imports(files[path]):
            while name and name not in paths:  # the last part may be a name in a module
                name = name.rpartition(".")[0]
            found.add(name)
        edges[module] = found - {"", "graphrt"}
    remaining = dict(edges)
    while free := [module for module, below in remaining.items() if not below & remaining.keys()]:
        for module in free:
            del remaining[module]
    while free := set(remaining) - {name for below in remaining.values() for name in below}:
        for module in free:
            del remaining[module]
    return sorted(paths[module] for module in remaining)


def assert_faults(path: str, source: str) -> list[str]:
    """Assertions without a message."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert))
    return [f"line {node.lineno}: assert without message" for node in nodes if node.msg is None]


def annotation_faults(path: str, source: str) -> list[str]:
    """Functions without full annotations, except the bodies of Triton kernels, which mypy skips too."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or any(is_jit(decorator) for decorator in node.decorator_list):
            continue
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        bare = [a.arg for a in every if a is not None and a.annotation is None and a.arg not in ("self", "cls")]
        if bare or node.returns is None:
            faults.append(f"line {node.lineno}: {node.name} lacks annotations of {bare or 'its result'}")
    return faults


def is_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(target) in ("triton.jit", "jit")


FACTORIES = "arange|empty|empty_strided|eye|full|linspace|ones|rand|randint|randn|randperm|tensor|zeros"


def factory_faults(path: str, source: str) -> list[str]:
    """Tensors whose device would follow `torch.set_default_device`, which belongs to the caller."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        of_torch = ast.unparse(node.func.value) == "torch" and re.fullmatch(FACTORIES, node.func.attr)
        if of_torch and not any(keyword.arg in ("device", None) for keyword in node.keywords):
            faults.append(f"line {node.lineno}: torch.{node.func.attr} without device=")
    return faults


def length_faults(path: str, source: str) -> list[str]:
    bound = MAX_KERNEL_LINES if path.startswith("kernels/") else MAX_LINES
    lines = len(source.splitlines())
    return [f"{lines} lines, bound {bound}"] if lines > bound else []


RULES = {
    "imports": (import_faults, LIBRARY),
    "imports-of-callers": (import_faults, ("scripts", "tests")),
    "rooms": (room_faults, LIBRARY),
    "asserts": (assert_faults, LIBRARY),
    "factories": (factory_faults, LIBRARY),
    "annotations": (annotation_faults, ("kernels",)),
    "lengths": (length_faults, (*LIBRARY, "scripts", "tests")),
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    rule, folders = RULES[name]
    files = sources(*folders)
    assert all(any(path.startswith(f"{folder}/") for path in files) for folder in folders)
    faults = [f"{path}: {fault}" for path, source in files.items() for fault in rule(path, source)]
    assert not faults, "\n".join(faults)


def test_no_files_import_each_other():
    assert import_cycles(sources(*LIBRARY)) == []


CYCLES = {
    "three-files": ({"a": "import graphrt.b", "b": "import graphrt.c", "c": "from graphrt import a"}, "abc"),
    "for-types": ({"a": "import graphrt.b", "b": "if TYPE_CHECKING:\n    from graphrt.a import X"}, "ab"),
    "others": ({"a": "import graphrt.b", "b": "import graphrt.a, graphrt.c", "c": "", "d": "import graphrt.b"}, "ab"),
    "itself": ({"a": "from graphrt.a import X"}, "a"),
    "none": ({"a": "import graphrt.b, graphrt.c, torch", "b": "from graphrt.c import X", "c": ""}, ""),
}


@pytest.mark.parametrize("case", CYCLES)
def test_import_cycle_is_noticed(case):
    files, expected = CYCLES[case]
    named = {f"graphrt/{name}.py": source for name, source in files.items()}
    assert import_cycles(named) == [f"graphrt/{name}.py" for name in expected]


VIOLATIONS = {
    "kernels-import-capture": (import_faults, "kernels/a.py", "from graphrt.capture.buffers import X"),
    "kernels-import-package": (import_faults, "kernels/a.py", "import graphrt"),
    "kernels-import-for-types": (import_faults, "kernels/a.py", "if TYPE_CHECKING:\n    from graphrt.batch import X"),
    "kernels-import-in-function": (import_faults, "kernels/a.py", "def f():\n    import transformers"),
    "capture-imports-backend": (import_faults, "capture/a.py", "from graphrt.backends.base import X"),
    "top-level-capture": (import_faults, "tests/a.py", "from capture import buffers"),
    "core-imports-the-benchmarks": (room_faults, "graphrt/batch.py", "def f():\n    from graphrt import bench"),
    "engine-imports-replay": (room_faults, "graphrt/engine/a.py", "if TYPE_CHECKING:\n    import graphrt.replay"),
    "capture-imports-spec": (room_faults, "capture/a.py", "import graphrt.spec"),
    "package": (room_faults, "graphrt/engine/a.py", "import graphrt"),
    "new-room": (room_faults, "graphrt/attic/a.py", "import math"),
    "bare-assert": (assert_faults, "graphrt/a.py", "assert x > 0"),
    "factory": (factory_faults, "graphrt/a.py", "torch.zeros(3, dtype=torch.int32)"),
    "argument": (annotation_faults, "kernels/a.py", "def f(x) -> int: ..."),
    "result": (annotation_faults, "kernels/a.py", "def f(x: int): ..."),
    "long-module": (length_faults, "graphrt/a.py", "\n" * 501),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_rule_notices(case):
    rule, path, source = VIOLATIONS[case]
    assert len(rule(path, source)) == 1


def test_import_of_a_kernel_module_loads_nothing_above():
    code = "import json, sys, graphrt.kernels.types; print(json.dumps(list(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name for name in json.loads(result.stdout) if name.split(".")[0] == "graphrt"}
    assert loaded == {"graphrt", "graphrt.kernels", "graphrt.kernels.types"}


IN_A_TEST = {
    "right": ("import graphrt.kernels.types", 0, "1 passed"),
    "hidden": ("import kernels.types", 1, "No module named 'kernels'"),
    "noticed": ("import sys; sys.modules['capture'] = sys", 1, "top-level modules imported: ['capture']"),
}


@pytest.mark.parametrize("case", IN_A_TEST)
def test_run_fails_if_a_layer_is_imported_by_its_folder_name(tmp_path, case):
    line, code, text = IN_A_TEST[case]
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {line}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == code, result.stdout + result.stderr
    assert text in result.stdout + result.stderr


def test_type_checkers_see_the_public_names():
    (block,) = (
        node
        for node in ast.parse((ROOT / "graphrt/__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    declared = {alias.asname: node.module for node in block.body for alias in node.names}
    assert declared == graphrt._HOME


@pytest.mark.parametrize("name", sorted(graphrt._HOME))
def test_public_name_is_that_of_its_module(name):
    value, home = getattr(graphrt, name), graphrt._HOME[name]
    assert value is getattr(importlib.import_module(home), name)
    if name.isupper():  # a constant knows neither its name nor its home: the file does
        assert re.search(rf"^{name} = ", Path(importlib.import_module(home).__file__).read_text(), re.MULTILINE)
    else:
        assert (value.__module__, value.__name__) == (home, name)
    assert name in dir(graphrt)


def test_unknown_public_name_raises():
    with pytest.raises(AttributeError, match="module 'graphrt' has no attribute 'Scheduler'"):
        _ = graphrt.Scheduler
