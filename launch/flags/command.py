"""The framework of the programs: separate flags, help that fits a screen, one-line errors."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import itertools
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags, logging

from tfdist.launch.flags.values import UsageError, check_values
from tfdist.runtime import exit_codes, uncaught
from tfdist.runtime.versions import VersionError
from tfdist.utils.errors import TfdistError

_HELP = {"help", "h", "helpshort", "helpfull"}


def say(program: str, text: str) -> None:
    """Print a message on stderr; stdout is reserved for the program's results."""
    print(f"{program}: {text}", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Program:
    """A command-line program.

    Attributes:
        main: The main function. It receives the result of `check`, and returns the exit code or None
            for 0.
        values: The flags of the program, separate from absl's global ones, so that libraries and user
            scripts can define the same names.
        usage: The usage line of the help.
        summary: The description in the help.
        check: The check of the flags, which is fast, has no side effects and does not import
            TensorFlow. It receives the positional arguments, and returns the argument of `main`.
        rest: Whether a command with separate flags may follow; parsing stops at its first word.
        words: Whether positional arguments are allowed, which `check` verifies.
        folded: Groups of flags that the help lists only by name, each with a title, so that it fits a
            screen; `--helpfull` explains them.
    """

    main: Callable[[Any], int | None]
    values: flags.FlagValues
    usage: str
    summary: str
    check: Callable[[list[str]], Any] = lambda words: words
    rest: bool = False
    words: bool = False
    folded: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the program."""
        return self.usage.split()[0]

    def parse(self, arguments: Sequence[str]) -> Any:
        """Parse and check a command line, starting with the program's name.

        Returns:
            The result of `check`.

        Raises:
            UsageError: A flag is unknown, has an invalid value, or conflicts with another.
            SystemExit: Help was requested and printed.
        """
        self.values.set_gnu_getopt(not self.rest)
        try:
            left = self.values(list(arguments))[1:]
        except flags.UnrecognizedFlagError as error:
            if error.flagname not in _HELP:
                raise UsageError(str(error)) from error
            full = error.flagname == "helpfull"
            print(_help(self, full=full))
            sys.exit(0)
        except UnicodeDecodeError as error:
            raise UsageError(f"--flagfile must name a UTF-8 text file: {error}.") from error
        except (flags.Error, ValueError) as error:  # ValueError: a value for a flag without one.
            raise UsageError(str(error)) from error
        _check_flagfiles(arguments[1 : len(arguments) - len(left)])
        check_values(self.values)
        if left and not self.rest and not self.words:
            raise UsageError(
                f"Positional arguments are not supported, see --help. Received: {' '.join(left)}"
            )
        return self.check(left)

    def run(self, arguments: Sequence[str] | None = None) -> NoReturn:
        """Parse the command line, starting with the program's name, run the program, and exit.

        An invalid flag, or an unsupported version of a library, ends with one line and exit code 2, an
        expected failure (such as a full disk or an unwritable file) with one line and code 1, and
        Ctrl-C with code 130. Other exceptions are bugs, and keep their tracebacks.
        """
        arguments = list(sys.argv if arguments is None else arguments)
        if not flags.FLAGS.is_parsed():
            flags.FLAGS(arguments[:1])  # absl's logging requires parsed flags.
        logging.use_absl_handler()
        sys.excepthook = self._tell
        try:
            sys.exit(self.main(self.parse(arguments)))
        except BrokenPipeError:
            # The reader of stdout has exited, as `| head` does; Python must not flush stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        except (Exception, KeyboardInterrupt) as error:
            uncaught.ends_by(error)  # A strategy's watchdog reports it to the other ranks.
            sys.excepthook(type(error), error, error.__traceback__)
            sys.exit(_code_of(error))

    def _tell(self, kind, error, trace) -> None:
        """Report why the program ends; expected errors in one line."""
        if isinstance(error, UsageError | Failure | VersionError) or _is_of_the_machine(error):
            say(self.name, " ".join(str(error).split()))
        elif not isinstance(error, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)


class Failure(TfdistError):
    """An expected failure that is neither a usage error nor a bug, with a one-line message."""


def _code_of(error: BaseException) -> int:
    if isinstance(error, UsageError | VersionError):
        return exit_codes.USAGE
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return exit_codes.FAILED


def _is_of_the_machine(error: BaseException) -> bool:
    """Whether an operation failed because of a file or a resource limit of the machine."""
    return isinstance(error, OSError) and (
        error.filename is not None or error.errno in _OF_THE_MACHINE
    )


#: Failures of the machine, which are not bugs even if they name no file.
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.EAGAIN)


def _check_flagfiles(arguments: Sequence[str]) -> None:
    """Reject `--flagfile=` without a name, which absl ignores."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = argument.lstrip("-").partition("=")
        given = value if equals else following
        if argument.startswith("-") and name == "flagfile" and not given.strip():
            raise UsageError(
                f"--flagfile must be the path of a file. Received: --flagfile={given!r}."
            )


def run_without_choice(
    arguments: Sequence[str], what: str, names: str, *, usage: str, summary: str
) -> NoReturn:
    """Exit a program that was called without a subcommand, with the help or an error.

    The error names the missing subcommand by `what`, and lists the valid `names`.
    """
    program, *words = arguments
    received = words[0] if words else "nothing"

    def refuse(_) -> NoReturn:
        raise UsageError(f"{what} must be the first argument: {names}. Received: {received}.")

    asks_for_help = received.lstrip("-") in _HELP
    without = Program(refuse, flags.FlagValues(), usage, summary)
    without.run([program, *(["--help"] if asks_for_help else [])])


def _help(program: Program, *, full: bool) -> str:
    folded = {name for names in program.folded.values() for name in names}
    found = {name: program.values[name] for name in program.values}
    shown = [flag for name, flag in found.items() if name not in folded]
    if full:
        shown += [flag for name, flag in found.items() if name in folded]
    width = min(shutil.get_terminal_size((80, 24)).columns, 100)
    rows = [_row(flag, width - 2 - _COLUMN) for flag in shown]
    if full or not folded:
        rows.append(("--flagfile=FILE", "File of flags, one per line"))
    formatter = argparse.HelpFormatter(program.name, max_help_position=_COLUMN, width=width)
    formatter.add_text(program.summary)
    formatter.add_text(f"Usage: {program.usage}")
    for left, text in rows:
        # argparse shows only the name and the help of a positional argument.
        action = argparse.Action([], "", metavar=left, help=text.replace("%", "%%"))
        formatter.add_argument(action)
    # The help must fit a screen of 24 lines.
    text = formatter.format_help().rstrip().replace("\n\nUsage: ", "\nUsage: ", 1)
    if not folded or full:
        return text
    groups = [
        textwrap.fill(
            f"{title}: {' '.join(f'--{name}' for name in names)}",
            width - 2,
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        for title, names in program.folded.items()
    ]
    return "\n".join([text, *groups, _LAST])


_LAST = "--helpfull explains these flags too; --flagfile=FILE reads flags from a file"


#: The column where explanations start.
_COLUMN = 22


def _row(flag: flags.Flag, room: int) -> tuple[str, str]:
    """A flag and its explanation; long lists of values are part of the explanation if they fit."""
    if not isinstance(flag, flags.EnumFlag):
        return _shown(flag), _explained(flag)
    # absl puts the values of an enumeration before the help text.
    text, values = flag.help.split(">: ", 1)[1].rstrip("."), flag.parser.enum_values
    beside = f"--{flag.name}={'|'.join(values)}"
    explained = f"{text}: {', '.join(values)}{_default(flag)}"
    if len(beside) > _COLUMN - 2 and len(explained) <= room:
        return f"--{flag.name}", explained
    return beside, f"{text}{_default(flag)}"


def _shown(flag: flags.Flag) -> str:
    # --noNAME is useful only for flags that are on by default.
    return f"--[no]{flag.name}" if flag.boolean and flag.default else f"--{flag.name}"


def _explained(flag: flags.Flag) -> str:
    return f"{flag.help.rstrip('.')}{_default(flag)}"


def _default(flag: flags.Flag) -> str:
    return "" if flag.default in (None, "", False) else f" [{flag.default}]"
