"""Small changes of Python source that a test should notice: one token, one statement or one argument at a time.

A mutant replaces a span of the text, so that everything else keeps its line and the diff shows one change. Spans come
from the syntax tree. Left out is what no test is asked to notice: docstrings, annotations, imports, error texts and
other strings, assertions, blocks for type checkers, decorators, what only CUDA devices run, functions that list what to
compile, and arguments and constants that say how fast something is done (`UNJUDGED_KEYWORDS`, `SPEED_NAMES`). So is
what means the same, on a CPU at least: None for a returned bool, no 0 for masked lanes, other orders (`COMMUTATIVE`).
"""

from __future__ import annotations

import ast
import difflib
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SWAPS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "%"), ast.Mod: ("%", "//"),
    ast.Div: ("/", "*"), ast.Pow: ("**", "*"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum",
         "argmin": "argmax", "argmax": "argmin", "bisect_left": "bisect_right"}  # fmt: skip
# How fast, what an error says, and the assertion of zip.
UNJUDGED_KEYWORDS = frozenset(
    {"num_warps", "num_stages", "non_blocking", "pin_memory", "eviction_policy", "slots", "advice", "strict"}
)
# Arguments in either order mean the same.
COMMUTATIVE = frozenset({"min", "max", "minimum", "maximum", "suppress", "array_equal", "transpose"})
SPEED_NAMES = re.compile(r"_(\w+_)?(NUM_WARPS|BLOCK|TILE_ELEMENTS|INTERPRETER_SMS)")
# They list what to compile, run on CUDA devices only, or say how much a program takes at a time.
UNJUDGED_NAMES = frozenset(
    {"compile_variants", "unavailable", "_measure_graphs", "OnStream", "_token_block", "_page_block"}
)
CUDA = re.compile(r"cuda|\bdevice\.type\b|\b_?(stream|event)\b")  # in the test of a branch


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: bytes `start` to `end` of the file `path` become `text`.

    lines      lines of the statement that holds it, or of its head where it is a block: a test that runs the mutant
               runs one of these
    in_function   whether it runs when a function is called; else it runs at import
    """

    path: str
    operator: str
    line: int
    start: int
    end: int
    text: str
    lines: tuple[int, int]
    in_function: bool

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        """The changed lines, before and after, without context."""
        old, new = (text.decode().splitlines() for text in (source, self.apply(source)))
        hunks = list(difflib.unified_diff(old, new, lineterm="", n=0))[3:]
        return "\n".join([f"{self.path}:{self.line} ({self.operator})", *(f"  {line}" for line in hunks)])


def python_files(root: Path, names: Iterable[str]) -> list[str]:
    """The Python files that are named, or lie in folders that are."""
    found = []
    for name in names:
        if not (root / name).exists():
            raise SystemExit(f"--files: expected a file or folder of the checkout, got {name!r}; name one")
        paths = sorted((root / name).rglob("*.py")) if (root / name).is_dir() else [root / name]
        found += [path.relative_to(root).as_posix() for path in paths]
    return list(dict.fromkeys(found))


def find_mutants(path: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file. Some may be no valid Python, or no other program: `choose` takes none of those."""
    found = {(m.start, m.end, m.text): m for m in _Finder(path, source).of_block(ast.parse(source).body, False)}
    return list(found.values())


def choose(sources: Mapping[str, bytes], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of the files: lines are drawn first, all alike, then a kind of change, then one of it.

    No mutant comes twice. Fewer come where the files have no more.
    """
    rng = random.Random(seed)
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for path in sorted(sources):
        for mutant in find_mutants(path, sources[path]):
            lines.setdefault((path, mutant.line), []).append(mutant)
    chosen: list[Mutant] = []
    while len(chosen) < count and lines:
        for key in rng.sample(sorted(lines), len(lines)):
            operator = rng.choice(sorted({mutant.operator for mutant in lines[key]}))
            mutant = rng.choice([mutant for mutant in lines[key] if mutant.operator == operator])
            lines[key].remove(mutant)
            if len(chosen) < count and _is_another_program(mutant, sources[mutant.path]):
                chosen.append(mutant)
        lines = {key: rest for key, rest in lines.items() if rest}
    return chosen


def _is_another_program(mutant: Mutant, source: bytes) -> bool:
    try:
        return ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


class _Finder:
    """Walks one file. Columns of the syntax tree count bytes, and so do spans."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines, self.in_function = (0, 0), False

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def mutant(self, operator: str, start: int, end: int, text: str) -> Mutant:
        line = self.source.count(b"\n", 0, start) + 1
        return Mutant(self.path, operator, line, start, end, text, self.lines, self.in_function)

    def replaced(self, operator: str, node: ast.AST, text: str) -> Mutant:
        return self.mutant(operator, *self.span(node), text)

    # -- statements

    def of_block(self, body: Iterable[ast.stmt], in_function: bool) -> Iterator[Mutant]:
        for node in body:
            yield from self.of_statement(node, in_function)

    def of_statement(self, node: ast.stmt, in_function: bool) -> Iterator[Mutant]:
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        head_end = min((child.lineno for block in blocks for child in block), default=node.end_lineno + 1) - 1
        self.lines, self.in_function = (node.lineno, max(head_end, node.lineno)), in_function
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if node.name not in UNJUDGED_NAMES and not _abstract(node):
                if isinstance(node, ast.FunctionDef):
                    for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                        yield from self.of_expression(default)
                yield from self.of_block(node.body, isinstance(node, ast.FunctionDef))
            return
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert, ast.Pass)):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Assign) and SPEED_NAMES.fullmatch(ast.unparse(node.targets[0])):
            return
        yield from self.of_simple(node)
        if isinstance(node, ast.If) and CUDA.search(test := ast.unparse(node.test)):
            del blocks["!=" in test or test.endswith(" is None")]  # the branch for CUDA devices
        for block in blocks:
            yield from self.of_block(block, in_function)
        for handler in getattr(node, "handlers", []):
            yield from self.of_block(handler.body, in_function)

    def of_simple(self, node: ast.stmt) -> Iterator[Mutant]:
        """Mutants of the statement itself, or of a block's head."""
        call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        stores = isinstance(node, ast.Assign) and not any(isinstance(t, (ast.Name, ast.Tuple)) for t in node.targets)
        if call or stores or isinstance(node, (ast.Raise, ast.AugAssign, ast.Continue, ast.Break)):
            yield self.replaced("statement deleted", node, "pass")
        if isinstance(node, ast.AugAssign) and type(node.op) in SWAPS:
            old, new = SWAPS[type(node.op)]
            yield from self.of_gap("arithmetic", node.target, node.value, old + "=", new + "=")
        # A returned True or False is changed as a constant; for None it would be as good as for False.
        if isinstance(node, ast.Return) and node.value is not None and not _is_singleton(node.value):
            yield self.replaced("returned value", node, "return None")
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return  # error texts and docstrings
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "body", "orelse", "finalbody", "handlers", "targets", "target"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.withitem):
                    yield from self.of_expression(child.context_expr)
                elif isinstance(child, ast.expr):
                    yield from self.of_expression(child)
        for target in [*getattr(node, "targets", []), *filter(None, [getattr(node, "target", None)])]:
            if isinstance(target, (ast.Subscript, ast.Attribute)):  # where something is stored
                yield from self.of_expression(target)

    # -- expressions

    def of_expression(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr):
            return
        yield from self.of_node(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.keyword) and child.arg in UNJUDGED_KEYWORDS:
                continue
            yield from self.of_expression(child)

    def of_node(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
                    yield from self.of_gap("comparison", left, right, *SWAPS[type(op)])
            case ast.BinOp() if type(node.op) in SWAPS and not _is_text(node.left) and not _is_text(node.right):
                yield from self.of_gap("arithmetic", node.left, node.right, *SWAPS[type(node.op)])
            case ast.BoolOp():
                for left, right in pairwise(node.values):
                    yield from self.of_gap("and, or", left, right, *SWAPS[type(node.op)])
            case ast.UnaryOp(op=ast.Not()):
                yield self.replaced("not", node, f"({self.text(node.operand)})")
            case ast.UnaryOp(op=ast.USub()):
                yield self.replaced("sign", node, self.text(node.operand))
            case ast.Constant(value=bool() as value):
                yield self.replaced("True, False", node, str(not value))
            case ast.Constant(value=int() | float() as value):
                yield self.replaced("constant", node, repr(value + 1))
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in NAMES:
                end = self.span(node)[1]
                yield self.mutant("min, max, any, all", end - len(name), end, NAMES[name])
            case ast.Call():
                yield from self.of_call(node)

    def of_gap(self, operator: str, left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[Mutant]:
        """`new` for `old` between two operands: there is nothing else but spaces, brackets and comments."""
        start, end = self.span(left)[1], self.span(right)[0]
        word = rf"(?<!\w){re.escape(old)}(?!\w)" if old[0].isalpha() else re.escape(old)
        found = re.search(word.replace(r"\ ", r"\s+").encode(), self.source[start:end])
        if found:
            yield self.mutant(operator, start + found.start(), start + found.end(), new)

    def of_call(self, node: ast.Call) -> Iterator[Mutant]:
        if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "getattr", "zip", "cast"):
            return
        keywords = [k for k in node.keywords if k.arg is not None and k.arg not in UNJUDGED_KEYWORDS]
        plain = [a for a in node.args if not isinstance(a, ast.Starred)]
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        for group in () if name in COMMUTATIVE else (plain, [k.value for k in keywords]):
            for first, second in pairwise(group):
                a, b = self.span(first), self.span(second)
                if self.text(first) != self.text(second) and not _is_type(first) and not _is_type(second):
                    between = self.source[a[1] : b[0]].decode()
                    text = self.text(second) + between + self.text(first)
                    yield self.mutant("arguments swapped", a[0], b[1], text)
        arguments = sorted((*node.args, *node.keywords), key=lambda argument: self.span(argument)[0])
        for at, argument in enumerate(arguments):
            if isinstance(argument, ast.keyword) and argument in keywords and not _says_nothing(argument):
                start, end = self.span(argument)
                if at:
                    start = self.span(arguments[at - 1])[1]
                elif len(arguments) > 1:
                    end = self.span(arguments[1])[0]
                yield self.mutant("keyword dropped", start, end, "")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_singleton(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _says_nothing(argument: ast.keyword) -> bool:
    """Whether tests on a CPU cannot miss the argument: a text, or the 0 of lanes that a mask leaves out, which is what
    Triton's interpreter puts there anyway."""
    zero = isinstance(argument.value, ast.Constant) and argument.value.value == 0
    return _is_text(argument.value) or (argument.arg == "other" and zero)


def _is_type(node: ast.AST) -> bool:
    """Whether the expression is a text or a dtype, which fails in any other place."""
    return _is_text(node) or re.fullmatch(r"(np|tl|torch)\.\w+", ast.unparse(node)) is not None


def _abstract(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any("abstractmethod" in ast.unparse(decorator) for decorator in node.decorator_list)
