"""Shell completion of the programs' flags and of their values, for bash and zsh.

`eval "$(tfdist-run --completion=bash)"` enables it. The shell then runs this module at each TAB, without
importing TensorFlow. Flags after `--` are completed too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

if TYPE_CHECKING:
    from tfdist.launch.flags.command import Program

SHELLS = ("bash", "zsh")

#: The distribution whose entry points are the programs.
_DISTRIBUTION = "tfdist"
_BASH = """\
_tfdist() {{
  local IFS=$'\\n'
  COMPREPLY=($({python} -m {module} bash "$COMP_CWORD" "${{COMP_WORDS[@]}}" 2>/dev/null))
}}
complete -o default -o nospace -F _tfdist {programs}
"""
_ZSH = """\
_tfdist() {{
  local -a found
  found=("${{(@f)$({python} -m {module} zsh "$((CURRENT - 1))" "${{(@)words}}" 2>/dev/null)}}")
  if [[ -n "${{found[1]}}" ]]; then compadd -Q -S '' -- "${{found[@]}}"; else _files; fi
}}
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit; }}
compdef _tfdist {programs}
"""


def script(shell: str) -> str:
    """The script that a shell evaluates to enable completion of the programs of tfdist."""
    form = {"bash": _BASH, "zsh": _ZSH}[shell]
    return form.format(
        python=shlex.quote(sys.executable), module=__name__, programs=" ".join(_scripts())
    )


def candidates(shell: str, index: int, words: Sequence[str]) -> list[str]:
    """The completions of the word at `index`; empty for files and for words of other programs.

    Args:
        shell: "bash", which splits words at "=", or "zsh".
        index: Index of the word to complete.
        words: The command line, starting with the program.
    """
    line, word = list(words[:index]), words[index] if index < len(words) else ""
    while "--" in line:  # The words after it are another program's.
        line = line[line.index("--") + 1 :]
    if not line:
        return [name for name in _scripts() if name.startswith(word)] if word else []
    flag, before = _flag_of_value(shell, line, word)
    program, parts = _program(line)
    if program is None:
        return [part for part in parts if part.startswith(word)]
    if flag is not None:
        value = word.partition("=")[2] if before else ("" if word == "=" else word)
        return [before + each for each in _values(program, flag) if each.startswith(value)]
    if not word.startswith("-"):
        return []
    shown = ["--help", "--helpfull", "--flagfile="]
    for name in program.values:
        boolean = program.values[name].boolean
        shown += [f"--{name}", f"--no{name}"] if boolean else [f"--{name}="]
    given = word if word.startswith("--") else f"-{word}"
    return sorted(each for each in shown if each.startswith(given))


def _flag_of_value(shell: str, line: Sequence[str], word: str) -> tuple[str | None, str]:
    """The flag whose value is to be completed, and the prefix of the word before the value."""
    if shell == "bash" and word == "=" and line[-1].startswith("-"):
        return line[-1].lstrip("-"), ""
    if shell == "bash" and line[-1] == "=" and len(line) > 2:
        return line[-2].lstrip("-"), ""
    if word.startswith("-") and "=" in word:
        name, equals, _ = word.partition("=")
        return name.lstrip("-"), name + equals
    if line[-1].startswith("-") and "=" not in line[-1] and not word.startswith("-"):
        return line[-1].lstrip("-"), ""
    return None, ""


def _values(program: Program, flag: str) -> list[str]:
    """The possible values of a flag, if they can be listed."""
    if flag not in program.values:
        return []
    found = program.values[flag]
    if isinstance(found, flags.EnumFlag):
        return [str(value) for value in found.parser.enum_values]
    return ["auto"] if flag == "np" and program.name == "tfdist-run" else []


def _program(line: Sequence[str]) -> tuple[Program | None, list[str]]:
    """The program of a command line; without a subcommand, the names of its subcommands."""
    script = _scripts().get(os.path.basename(line[0]))
    if script is None:
        return None, []
    module = importlib.import_module(script)
    if not hasattr(module, "PROGRAMS"):
        return module.PROGRAM, []
    if len(line) > 1 and line[1] in module.PROGRAMS:
        return module.PROGRAMS[line[1]], []
    return None, list(module.PROGRAMS)


def _scripts() -> dict[str, str]:
    """The module of each program of tfdist, by name."""
    found = importlib.metadata.distribution(_DISTRIBUTION).entry_points
    return {each.name: each.module for each in found.select(group="console_scripts")}


if __name__ == "__main__":
    print("\n".join(candidates(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
