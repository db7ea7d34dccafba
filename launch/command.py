"""What the programs share: flags of their own, help that fits a screen, errors of one line."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence

from absl import flags, logging

from tfdist import exit_codes

__all__ = ["UsageError", "run", "say"]

_HELP = {"help", "h", "helpshort", "helpfull"}


class UsageError(Exception):
    """What the user asked for cannot be done: one line says what, and how to mend it."""


def say(program: str, text: str) -> None:
    """Tells the user something, on stderr: stdout is for what the program is there to print."""
    print(f"{program}: {text}", file=sys.stderr, flush=True)


def run(
    main: Callable[[list[str]], int | None],
    values: flags.FlagValues,
    *,
    usage: str,
    summary: str,
    rest: bool = False,
    folded: Mapping[str, Sequence[str]] | None = None,
    arguments: Sequence[str] | None = None,
) -> None:
    """Parses the command line, calls `main` with what is left of it, and exits with its result.

    A bad flag or value, and a `UsageError` of `main`, end with one line and exit code 2.

    Args:
        main: The program.
        values: The program's flags. They are its own, so that a library or a user's script that
            defines the same names can be imported beside it.
        usage: How the program is called, for the help.
        summary: What it does, for the help.
        rest: Whether a command with flags of its own may follow: what comes from its first word
            on is not looked at.
        folded: Groups of flags that the help only names, each under a title, so that it fits a
            screen; `--helpfull` explains them all.
        arguments: The command line, program name first; that of the process by default.
    """
    arguments = list(sys.argv if arguments is None else arguments)
    program = usage.split()[0]
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(arguments[:1])  # absl's logging reads its flags from there.
    logging.use_absl_handler()
    values.set_gnu_getopt(not rest)
    try:
        try:
            left = values(arguments)[1:]
        except flags.UnrecognizedFlagError as error:
            if error.flagname not in _HELP:
                raise
            full = error.flagname == "helpfull"
            print(_help(values, usage, summary, folded or {}, full=full))
            sys.exit(0)
        except ValueError as error:  # A value for a flag that takes none.
            raise UsageError(str(error)) from error
        if left and not rest:
            raise UsageError(f"There are only flags, see --help. Received: {' '.join(left)}")
        sys.exit(main(left))
    except (flags.Error, UsageError) as error:
        say(program, " ".join(str(error).split()))
        sys.exit(exit_codes.USAGE)


def run_without_choice(
    arguments: Sequence[str], what: str, names: str, *, usage: str, summary: str
) -> None:
    """Ends a program that was not told which of its parts to run: by help, or by an error.

    Args:
        arguments: The program's, its name first.
        what: What was to come first, as a sentence begins with it.
        names: What there is, for the message.
        usage: As in `run`.
        summary: As in `run`.
    """
    program, *words = arguments
    received = words[0] if words else "nothing"

    def refuse(_) -> int:
        raise UsageError(f"{what} comes first: {names}. Received: {received}.")

    asks_for_help = received.lstrip("-") in ("help", "helpshort", "helpfull", "h")
    run(
        refuse,
        flags.FlagValues(),
        usage=usage,
        summary=summary,
        arguments=[program, *(["--help"] if asks_for_help else [])],
    )


def _help(
    values: flags.FlagValues,
    usage: str,
    summary: str,
    folded: Mapping[str, Sequence[str]],
    *,
    full: bool,
) -> str:
    width = min(shutil.get_terminal_size((80, 24)).columns, 100)
    last = {name for names in folded.values() for name in names}
    found = {flag.name: flag for flag in _flags(values)}
    shown = [name for name in found if name not in last]
    rows = [(_shown(found[name]), _explained(found[name])) for name in shown]
    if full:
        rows += [(_shown(found[name]), _explained(found[name])) for name in found if name in last]
    rows.append(("--flagfile=FILE", "Flags from a file, one a line"))
    if folded and not full:
        rows += [(title, " ".join(f"--{n}" for n in names)) for title, names in folded.items()]
        rows.append(("--helpfull", "Explains these too"))
    # Names that are longer than a column put their explanation on a line of its own.
    column = min(max(len(left) for left, _ in rows), 24) + 2
    lines = [*textwrap.wrap(summary, width), "", f"Usage: {usage}", ""]
    for left, explained in rows:
        if len(left) > column - 2:
            lines.append(left)
            left = ""
        indent = " " * column
        lines += textwrap.wrap(
            explained, width, initial_indent=f"{left:<{column}}", subsequent_indent=indent
        )
    return "\n".join(lines)


def _flags(values: flags.FlagValues) -> list[flags.Flag]:
    return [values[name] for name in values]


def _shown(flag: flags.Flag) -> str:
    if isinstance(flag, flags.EnumFlag):
        return f"--{flag.name}={'|'.join(flag.parser.enum_values)}"
    # Only what is on by default is ever switched off.
    return f"--[no]{flag.name}" if flag.boolean and flag.default else f"--{flag.name}"


def _explained(flag: flags.Flag) -> str:
    # absl puts an enumeration's values before the help; they stand with the name here.
    text = flag.help.split(">: ", 1)[1] if isinstance(flag, flags.EnumFlag) else flag.help
    default = "" if flag.default in (None, "", False) else f" [{flag.default}]"
    return f"{text.rstrip('.')}{default}"
