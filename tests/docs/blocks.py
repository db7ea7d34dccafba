"""The fenced code blocks of the documents, and what of them is run."""

from __future__ import annotations

import dataclasses
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "COMMANDS",
    "DATA",
    "ROOT",
    "RUN",
    "Block",
    "blocks",
    "commands",
    "documents",
    "is_shell",
]

ROOT = Path(__file__).parents[2]
#: Blocks with commands, and blocks that are run at all.
COMMANDS = ("sh", "bash", "shell", "console")
RUN = ("python", "diff", *COMMANDS)
#: Blocks that only show something.
DATA = ("text", "yaml", "json", "toml", "ini", "makefile", "xml")

_FENCE = re.compile(r"^( *)(`{3,}|~{3,}) *(.*?) *$")
_NOT_RUN = re.compile(r"^ *<!-- not run: *(.*?) *-->$")
#: What the first word of a command looks like, to tell a diff of commands from one of a script.
_PROGRAM = re.compile(r"^(python|horovodrun|tfdist-[a-z-]+)\s")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        document: Its document's path, below the root.
        line: The line of its first fence, from 1.
        language: The word behind the fence.
        source: What stands between the fences.
        reason: Why it is not run, by the comment before it; None where there is no such comment.
    """

    document: str
    line: int
    language: str
    source: str
    reason: str | None

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def text(self) -> str:
        """What a reader would run: the source, and of a diff what it leads to."""
        if self.language != "diff":
            return self.source
        kept = [line for line in self.source.splitlines() if not line.startswith("-")]
        return "".join(f"{line[1:]}\n" for line in kept)


def documents() -> list[Path]:
    """The documents whose blocks are run."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for pattern in ("docs/*.md", "examples/*.md", "tfdist/addons/*/README.md"):
        found += sorted(ROOT.glob(pattern))
    return found


def blocks() -> list[Block]:
    """All blocks of all documents."""
    return [
        block
        for path in documents()
        for block in _blocks_of(path.relative_to(ROOT).as_posix(), path.read_text())
    ]


def _blocks_of(document: str, text: str) -> Iterator[Block]:
    """The blocks of one document.

    Raises:
        ValueError: A fence is not closed, or a comment that says what is not run stands alone.
    """
    opened: tuple[int, re.Match[str]] | None = None
    reason: str | None = None
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is not None:
            at, first = opened
            if fence and fence[2].startswith(first[2]) and not fence[3]:
                source = textwrap.dedent("".join(f"{line}\n" for line in body))
                yield Block(document, at, first[3], source, reason)
                opened, reason, body = None, None, []
            else:
                body.append(line)
        elif fence:
            opened = number, fence
        elif reason is not None:
            raise ValueError(f"{document}:{number}: no block follows on the comment `not run`.")
        elif comment := _NOT_RUN.match(line):
            reason = comment[1]
    if opened is not None:
        raise ValueError(f"{document}:{opened[0]}: the block is not closed.")
    if reason is not None:
        raise ValueError(f"{document}: no block follows on the last comment `not run`.")


def is_shell(block: Block) -> bool:
    """Whether a block holds commands, not Python."""
    if block.language == "diff":
        return _PROGRAM.match(block.text) is not None
    return block.language in COMMANDS


def commands(block: Block) -> list[tuple[list[str], list[str]]]:
    """The commands of a block, as words, each with the lines that it is said to print.

    Of a console only lines behind a `$` are commands; what follows is what they print.

    Raises:
        ValueError: A quotation is not closed.
    """
    text = re.sub(r"\\\n\s*", " ", block.text)
    found: list[tuple[list[str], list[str]]] = []
    begun = ""
    for line in text.splitlines():
        if block.language == "console" and not begun:
            if not line.startswith("$ "):
                found[-1][1].append(line)
                continue
            line = line.removeprefix("$ ")
        begun += f"{line}\n"
        try:
            words = shlex.split(begun, comments=True)
        except ValueError:  # A quotation is open, which goes on in the next line.
            continue
        begun = ""
        if words:
            found.append((words, []))
    if begun:
        raise ValueError(f"{block.place}: a quotation is not closed: {begun!r}.")
    return found
