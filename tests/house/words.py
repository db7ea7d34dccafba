"""Whether the package speaks the field's language: `words.toml` says which words are ours."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.house.sources import ROOT, documents, python_files, rooms, tree_of

__all__ = ["bad_words", "messages_in_form", "texts"]

_LIST = Path(__file__).with_name("words.toml")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
#: What a message says of its subject, in its first sentence.
_FORM = re.compile(
    r"\b(?:must|cannot|can only|requires?|expected|(?:is|are) not supported|(?:is|are) not|did not|"
    r"could not|does not|do not|failed|not found|missing|unknown|mismatch|corrupt|invalid|at most|has no)\b",
    re.IGNORECASE,
)
_LOGGING = {"warning", "error", "info", "exception", "log_first_n", "critical"}


@functools.cache
def _words() -> list[tuple[re.Pattern, list[str]]]:
    found = tomllib.loads(_LIST.read_text())["words"]
    return [(re.compile(word["pattern"], re.IGNORECASE), word.get("right", [])) for word in found]


def bad_words() -> list[str]:
    """Each word of the list that is read somewhere, with its place."""
    found = []
    for place, text in texts():
        for pattern, right in _words():
            for match in pattern.finditer(text):
                around = text[max(match.start() - 12, 0) : match.end() + 12].lower()
                if not any(each in around for each in right):
                    found.append(f"{place}: {match.group()!r}")
    return found


def messages_in_form() -> tuple[list[str], list[str]]:
    """The first sentences of what is raised: those in the field's form, and the others."""
    right: list[str] = []
    wrong: list[str] = []
    for room in rooms():
        for path in python_files(room):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    text = _text(node.exc.args[0]) if node.exc.args else ""
                    if " " in text:
                        first = re.split(r"(?<=[.:;])\s", text)[0]
                        kind = right if _FORM.search(first) else wrong
                        kind.append(f"{path.name}:{node.lineno}: {first}")
    return right, wrong


def texts() -> Iterator[tuple[str, str]]:
    """What users read: a place and a text."""
    for path in documents():
        for number, line in enumerate(_without_code(path.read_text()).splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line
    for room in rooms():
        for path in python_files(room):
            yield from _texts_of(path)


def _without_code(text: str) -> str:
    return _CODE.sub(lambda match: "\n" * match.group().count("\n"), text)


def _texts_of(path: Path) -> Iterator[tuple[str, str]]:
    tree = tree_of(path)
    for node in ast.walk(tree):
        place = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from ((place, _text(argument)) for argument in node.exc.args)
        elif isinstance(node, ast.Call) and _is_said(node.func):
            yield from ((place, _text(argument)) for argument in node.args)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_":
            yield place, _CODE.sub("", ast.get_docstring(node) or "")
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name[0] != "_":
                        text = ast.get_docstring(method) or ""
                        yield f"{path.name}:{method.lineno}", _CODE.sub("", text)


def _is_said(function: ast.expr) -> bool:
    """Whether a call logs its arguments, or defines an option of a program."""
    if isinstance(function, ast.Name):
        return function.id == "option"
    if not isinstance(function, ast.Attribute):
        return False
    owner = ast.unparse(function.value)
    if function.attr in _LOGGING:
        return "log" in owner
    if function.attr == "DEFINE_alias":
        return False  # Its arguments are names.
    return "flags" in owner and function.attr.startswith("DEFINE_")


def _text(node: ast.expr) -> str:
    """The words of a string, of the parts of one, and of what chooses between two."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _text(part) if isinstance(part, ast.Constant) else "X" for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_text(node.body)} {_text(node.orelse)}"
    return ""
