"""The source files of the package, and what is counted in them."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "PACKAGE",
    "ROOT",
    "documents",
    "imported_from",
    "lines_of_code",
    "pages",
    "python_files",
    "rooms",
    "source_files",
]

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tfdist"
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_COMMENTS_OF_CPP = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def rooms() -> list[str]:
    """The folders of the package, links included, and its modules."""
    found = [
        path.name.removesuffix(".py")
        for path in PACKAGE.iterdir()
        if (path.is_dir() and path.name != "__pycache__") or path.suffix == ".py"
    ]
    return sorted(name for name in found if name not in ("__init__", "_version"))


def source_files(room: str) -> list[Path]:
    """The Python and C++ files of a room, by path within the package, links followed."""
    module = PACKAGE / f"{room}.py"
    if module.exists():
        return [module]
    found = (PACKAGE / room).resolve().rglob("*")
    return sorted(path for path in found if path.suffix in (".py", ".cc", ".h"))


def python_files(room: str) -> list[Path]:
    """The Python files of a room."""
    return [path for path in source_files(room) if path.suffix == ".py"]


def pages() -> list[Path]:
    """README and the pages of `docs/`."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def documents() -> list[Path]:
    """The pages, and those of the add-ons."""
    return [*pages(), *sorted(ROOT.glob("tfdist/addons/*/README.md"))]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(), str(path))


@functools.cache
def lines_of_code(path: Path) -> int:
    """The lines of a file without blank ones, comments and docstrings."""
    text = path.read_text()
    if path.suffix != ".py":
        return sum(bool(line.strip()) for line in _COMMENTS_OF_CPP.sub("", text).splitlines())
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines.difference(_docstring_lines(tree_of(path))))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if first is not None and ast.get_docstring(node, clean=False) is not None:
                yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def imported_from(path: Path, package: str = "tfdist") -> dict[str, str]:
    """The names that a file imports from a package, each with its module."""
    return {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom)
        and node.module is not None
        and node.module.split(".")[0] == package
        for alias in node.names
    }
