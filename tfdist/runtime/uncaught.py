"""The exception that ends this process, detected without a hook, which belongs to the program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

_Error = TypeVar("_Error", bound=Exception)

_caught: BaseException | None = None
#: Ctrl-C needs no report: the exit code shows it.
_left_out: set[type[BaseException]] = {KeyboardInterrupt}
_in_one_line: set[type[BaseException]] = set()
_MARK = "_tfdist_is_anothers"


def ends_by(error: BaseException) -> None:
    """Records the exception that ends this process, when the program catches it to print it.

    Args:
        error: The exception.
    """
    global _caught
    _caught = error


def mark_as_anothers(error: BaseException) -> None:
    """Marks an exception that another rank has raised, and this one raises again."""
    error.__dict__[_MARK] = True


def is_anothers(error: BaseException) -> bool:
    """Whether another rank raised an exception first."""
    return _MARK in error.__dict__


def leave_out(kind: type[BaseException]) -> None:
    """Excludes a type of exception from `uncaught`.

    Args:
        kind: A type that every rank reports separately, with its own exit code.
    """
    _left_out.add(kind)


def tell_in_one_line(kind: type[_Error], code_of: Callable[[_Error], int]) -> None:
    """Has uncaught errors of a type end this process with one line and a specific exit code.

    For errors that need no traceback. Other exceptions are reported as before.

    Args:
        kind: A type that every rank raises and reports: a verdict about one of them would only change
            exit codes.
        code_of: Returns the exit code for an error.
    """
    if kind in _in_one_line:
        return
    _in_one_line.add(kind)
    leave_out(kind)
    before = sys.excepthook

    def report(found, error, trace) -> None:
        if not isinstance(error, kind):
            before(found, error, trace)
            return
        print(f"{found.__name__}: {error}", file=sys.stderr, flush=True)
        # Python takes the exit code from a SystemExit that its hook raises.
        raise SystemExit(code_of(error))

    sys.excepthook = report


def uncaught() -> BaseException | None:
    """Returns the uncaught exception, or None while the process runs or if it ends without one.

    Python sets `sys.last_value` before it calls `sys.excepthook`, waits for threads, and calls the
    functions of `atexit`. It does not set it for a `SystemExit`.
    """
    error = _caught if _caught is not None else getattr(sys, "last_value", None)
    if error is None or isinstance(error, tuple(_left_out)):
        return None
    # Shells and test runners set `sys.last_value` as well, but continue. They catch exceptions, so
    # the traceback begins in one of their frames. Under `python -m` the program begins in runpy.
    trace = error.__traceback__
    begins_in = None if trace is None else trace.tb_frame.f_globals.get("__name__")
    return error if error is _caught or begins_in in ("__main__", "runpy") else None
