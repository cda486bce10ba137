"""Compare vLLM's interface with what graphrt.integrations.vllm overrides, and with the stub that its tests use.

    python scripts/check_vllm_interface.py                    the installed vLLM
    python scripts/check_vllm_interface.py ~/src/vllm         a folder that contains the package vllm

The script imports neither side; it reads both as syntax trees. It checks:

overrides   the classes of backend.py define every abstract method of vLLM's class, and take all arguments that vLLM
            passes to a method
stub        every function, class, method, enum member and dataclass field of tests/support/vllm_standin exists in the
            same file of vLLM, and arguments that the stub lacks have a default

Prints one line per difference and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BACKEND = ROOT / "graphrt" / "integrations" / "vllm" / "backend.py"
STANDIN = ROOT / "tests" / "support" / "vllm_standin"

OLD = {"get_kv_cache_layout"}
"""Names that only older supported versions have. Newer versions have other names for the layout, and do not call these.
"""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def members(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return functions, classes, assignments and imports by name, including those in `if` and `try` blocks."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, (ast.If, ast.Try)):
            found |= members([*node.body, *node.orelse])
    return found


def read(path: Path) -> dict[str, ast.stmt]:
    """Return the members of a file."""
    return members(ast.parse(path.read_text()).body)


def arguments(function: _Function) -> tuple[list[str], set[str]]:
    """Return the arguments of a function, and those without a default."""
    args = function.args
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    required = set(positional[: len(positional) - len(args.defaults)])
    required |= {arg.arg for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None}
    return [*positional, *(arg.arg for arg in args.kwonlyargs)], required


def decorated(function: _Function, name: str) -> bool:
    return any(ast.unparse(decorator).split(".")[-1] == name for decorator in function.decorator_list)


def in_bases(cls: ast.ClassDef, file: dict[str, ast.stmt]) -> dict[str, ast.stmt]:
    """Return the members of a class and of its bases in the same file."""
    found: dict[str, ast.stmt] = {}
    for base in cls.bases:
        parent = file.get(ast.unparse(base).split("[")[0])
        if isinstance(parent, ast.ClassDef):
            found |= in_bases(parent, file)
    return found | members(cls.body)


def override_faults(vllm: Path) -> Iterator[str]:
    """Yield the differences between the classes of backend.py and vLLM's classes that they extend."""
    theirs = read(vllm / "v1" / "attention" / "backend.py")
    for cls in read(BACKEND).values():
        base = (
            theirs.get(ast.unparse(cls.bases[0]).split("[")[0]) if isinstance(cls, ast.ClassDef) and cls.bases else None
        )
        if not (isinstance(cls, ast.ClassDef) and isinstance(base, ast.ClassDef)):
            continue
        own, inherited = members(cls.body), in_bases(base, theirs)
        for name, method in inherited.items():
            if not isinstance(method, ast.FunctionDef):
                continue
            mine = own.get(name)
            if mine is None and decorated(method, "abstractmethod"):
                yield f"{cls.name}.{name}: abstract in vLLM, and missing"
            elif isinstance(mine, ast.FunctionDef):
                takes, passed = arguments(mine)[0], arguments(method)[0]
                if takes[: len(passed)] != passed:
                    yield f"{cls.name}.{name}: takes {takes}, vLLM passes {passed}"


def standin_faults(mine: ast.stmt, theirs: ast.stmt | None, name: str, file: dict[str, ast.stmt]) -> Iterator[str]:
    """Yield the differences of one member of the stub; `file` is the file of vLLM."""
    if theirs is None:
        if name.split(".")[-1] not in OLD:
            yield f"{name}: missing in vLLM"
    elif isinstance(mine, ast.FunctionDef) and isinstance(theirs, ast.FunctionDef):
        takes, (want_args, required) = arguments(mine)[0], arguments(theirs)
        if takes != [arg for arg in want_args if arg in takes] or not required <= set(takes):
            yield f"{name}: the stub takes {takes}, vLLM takes {want_args}"
    elif isinstance(mine, ast.ClassDef) and isinstance(theirs, ast.ClassDef):
        inherited = in_bases(theirs, file)
        for member, node in members(mine.body).items():
            if member != "__init__" or member in inherited:  # the __init__ of a dataclass follows from its fields
                yield from standin_faults(node, inherited.get(member), f"{name}.{member}", file)
    elif isinstance(mine, ast.Assign) and isinstance(theirs, ast.Assign):
        have, want = ast.unparse(mine.value), ast.unparse(theirs.value)
        if name.rpartition(".")[2].isupper() and have != want:  # an enum member
            yield f"{name}: {have} in the stub, {want} in vLLM"


def interface_faults(vllm: Path) -> list[str]:
    """Return all differences to the package in a folder."""
    faults = list(override_faults(vllm))
    for path in sorted((STANDIN / "vllm").rglob("*.py")):
        where = path.relative_to(STANDIN / "vllm")
        mine = {name: node for name, node in read(path).items() if not isinstance(node, (ast.Import, ast.ImportFrom))}
        if path.name == "__init__.py":
            mine = {name: node for name, node in read(path).items() if name != "__all__"}
        if not (vllm / where).exists():
            faults.append(f"{where}: missing in vLLM")
            continue
        theirs = read(vllm / where)
        for name, node in mine.items():
            if name not in ("layout", "registered", "M"):  # the stub's own state
                faults += [f"{where}: {fault}" for fault in standin_faults(node, theirs.get(name), name, theirs)]
    return faults


def main() -> None:
    if len(sys.argv) > 1:
        package = Path(sys.argv[1]).expanduser() / "vllm"
    else:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise SystemExit("vllm is not installed; pass a folder that contains the package")
        package = Path(spec.origin).parent
    faults = interface_faults(package)
    print("\n".join(faults) or f"{package}: no differences")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
