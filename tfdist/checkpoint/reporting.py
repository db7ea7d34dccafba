"""An error of a checkpoint that nobody catches: one line, and the exit code of a wrong setting."""

from __future__ import annotations

import sys

from tfdist.checkpoint.errors import CheckpointError
from tfdist.runtime import exit_codes, uncaught

__all__ = ["report_in_one_line"]

_installed = False


def report_in_one_line() -> None:
    """From now on an uncaught `CheckpointError` ends this process with one line and code 2.

    A full disk, a folder in use or another model is what the user is to mend: a traceback does not
    help, and neither does another start. Other exceptions are reported as before.
    """
    global _installed
    if _installed:
        return
    _installed = True
    # All ranks raise it and say it themselves: a verdict about one would only change exit codes.
    uncaught.leave_out(CheckpointError)
    before = sys.excepthook

    def report(kind, error, trace) -> None:
        if not issubclass(kind, CheckpointError):
            before(kind, error, trace)
            return
        print(f"{kind.__name__}: {error}", file=sys.stderr, flush=True)
        # Python takes the exit code from a SystemExit that its hook raises.
        raise SystemExit(exit_codes.USAGE)

    sys.excepthook = report
