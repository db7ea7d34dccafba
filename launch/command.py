"""What the programs share: flags of their own, help that fits a screen, errors of one line."""

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

from tfdist.launch.flag_values import UsageError, check_values
from tfdist.runtime import exit_codes, uncaught
from tfdist.runtime.versions import VersionError
from tfdist.utils.errors import TfdistError

_HELP = {"help", "h", "helpshort", "helpfull"}


def say(program: str, text: str) -> None:
    """Tells the user something, on stderr: stdout is for what the program is there to print."""
    print(f"{program}: {text}", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of the command line.

    Attributes:
        main: Does the work. It gets what `check` returned, and returns the exit code or None for 0.
        values: Its flags. They are its own, so that a library or a user's script that defines the
            same names can be imported beside it.
        usage: How it is called, for the help.
        summary: What it does, for the help.
        check: Checks the flags, as far as that takes no time and changes nothing: TensorFlow is not
            imported for it. It gets the words behind the flags, and returns what `main` wants.
        rest: Whether a command with flags of its own may follow: what comes from its first word
            on is not looked at.
        words: Whether words that are no flags may stand beside them, which `check` looks at.
        folded: Groups of flags that the help only names, each under a title, so that it fits a
            screen; `--helpfull` explains them all.
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
        """The program, as messages name it."""
        return self.usage.split()[0]

    def parse(self, arguments: Sequence[str]) -> Any:
        """Reads and checks a command line, program name first; returns what `check` returned.

        Raises:
            UsageError: A flag is unknown, has a bad value, or does not go with another.
            SystemExit: Help was asked for, and is printed.
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
        except (flags.Error, ValueError) as error:  # The latter: a value where none is taken.
            raise UsageError(str(error)) from error
        _check_flagfiles(arguments[1 : len(arguments) - len(left)])
        check_values(self.values)
        if left and not self.rest and not self.words:
            raise UsageError(
                f"This program takes only flags, see --help. Received: {' '.join(left)}"
            )
        return self.check(left)

    def run(self, arguments: Sequence[str] | None = None) -> NoReturn:
        """Parses the command line, program name first, does the work, and exits.

        A bad flag or value, or a version of a library that tfdist does not work with, ends with one
        line and exit code 2, what can be expected to fail (a disk that is full, a file that cannot be
        written) with one line and code 1, and Ctrl-C with code 130. Other exceptions are mistakes of
        the program's, and keep their tracebacks.
        """
        arguments = list(sys.argv if arguments is None else arguments)
        if not flags.FLAGS.is_parsed():
            flags.FLAGS(arguments[:1])  # absl's logging reads its flags from there.
        logging.use_absl_handler()
        sys.excepthook = self._tell
        try:
            sys.exit(self.main(self.parse(arguments)))
        except BrokenPipeError:
            # Whoever read stdout has gone, as `| head` does. Python is not to write there once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        except (Exception, KeyboardInterrupt) as error:
            uncaught.ends_by(error)  # A strategy's watchdog tells the other ranks.
            sys.excepthook(type(error), error, error.__traceback__)
            sys.exit(_code_of(error))

    def _tell(self, kind, error, trace) -> None:
        """Says why the program ends: what can be expected in one line."""
        if isinstance(error, UsageError | Failure | VersionError) or _is_of_the_machine(error):
            say(self.name, " ".join(str(error).split()))
        elif not isinstance(error, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)


class Failure(TfdistError):
    """Something failed that is no mistake of the user's or of the program's: one line says what."""


def _code_of(error: BaseException) -> int:
    if isinstance(error, UsageError | VersionError):
        return exit_codes.USAGE
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return exit_codes.FAILED


def _is_of_the_machine(error: BaseException) -> bool:
    """Whether a file, or what the machine has of something, made an operation fail."""
    return isinstance(error, OSError) and (
        error.filename is not None or error.errno in _OF_THE_MACHINE
    )


#: Failures of the machine that are no mistake of the program, also where they name no file.
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.EAGAIN)


def _check_flagfiles(arguments: Sequence[str]) -> None:
    """Refuses `--flagfile=` without a name, which absl ignores."""
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
    """Ends a program that was not told which of its parts to run: by help, or by an error.

    The error says that `what` comes first, and lists the `names` that there are.
    """
    program, *words = arguments
    received = words[0] if words else "nothing"

    def refuse(_) -> NoReturn:
        raise UsageError(f"{what} comes first: {names}. Received: {received}.")

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
        # As a positional argument, of which argparse shows the name and the help alone.
        action = argparse.Action([], "", metavar=left, help=text.replace("%", "%%"))
        formatter.add_argument(action)
    # A screen of 24 lines has none to spare.
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


#: Where explanations begin.
_COLUMN = 22


def _row(flag: flags.Flag, room: int) -> tuple[str, str]:
    """A flag and its explanation; values that are too long beside the name go there, where it has room."""
    if not isinstance(flag, flags.EnumFlag):
        return _shown(flag), _explained(flag)
    # absl puts an enumeration's values before the help.
    text, values = flag.help.split(">: ", 1)[1].rstrip("."), flag.parser.enum_values
    beside = f"--{flag.name}={'|'.join(values)}"
    explained = f"{text}: {', '.join(values)}{_default(flag)}"
    if len(beside) > _COLUMN - 2 and len(explained) <= room:
        return f"--{flag.name}", explained
    return beside, f"{text}{_default(flag)}"


def _shown(flag: flags.Flag) -> str:
    # Only what is on by default is ever switched off.
    return f"--[no]{flag.name}" if flag.boolean and flag.default else f"--{flag.name}"


def _explained(flag: flags.Flag) -> str:
    return f"{flag.help.rstrip('.')}{_default(flag)}"


def _default(flag: flags.Flag) -> str:
    return "" if flag.default in (None, "", False) else f" [{flag.default}]"
