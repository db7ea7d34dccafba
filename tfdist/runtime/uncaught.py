"""The exception by which this process ends: seen without a hook, which is the program's own to set."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

_Error = TypeVar("_Error", bound=Exception)

_caught: BaseException | None = None
#: Whoever pressed Ctrl-C knows, and the exit code says so to all others.
_left_out: list[type[BaseException]] = [KeyboardInterrupt]
_in_one_line: set[type[BaseException]] = set()


def ends_by(error: BaseException) -> None:
    """Says that this process ends by an exception that its program has caught, to show it.

    Args:
        error: The exception.
    """
    global _caught
    _caught = error


def leave_out(kind: type[BaseException]) -> None:
    """Makes `uncaught` silent about a kind of exception from now on.

    Args:
        kind: One that every rank tells by itself, with an exit code of its own.
    """
    if kind not in _left_out:
        _left_out.append(kind)


def tell_in_one_line(kind: type[_Error], code_of: Callable[[_Error], int]) -> None:
    """From now on an uncaught error of a kind ends this process with one line and a code of its own.

    For what a traceback does not help with. Other exceptions are reported as before.

    Args:
        kind: One that every rank raises, and tells by itself: a verdict about one of them would only
            change exit codes.
        code_of: The exit code for an error.
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
    """Returns the exception that nobody caught, or None while the process goes on or ends well.

    Python notes it in `sys.last_value` before it calls `sys.excepthook`, waits for threads, and runs
    what `atexit` holds. It does not note a `SystemExit`.
    """
    error = _caught if _caught is not None else getattr(sys, "last_value", None)
    if error is None or isinstance(error, tuple(_left_out)):
        return None
    return error if error is _caught or _began_with_the_program(error) else None


def _began_with_the_program(error: BaseException) -> bool:
    # Shells and test runners note exceptions as well, but go on. They catch them, so that the
    # traceback begins in a frame of theirs. Under `python -m` the program begins in runpy.
    trace = error.__traceback__
    return trace is not None and trace.tb_frame.f_globals.get("__name__") in ("__main__", "runpy")
