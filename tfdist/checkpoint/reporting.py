"""An error of a checkpoint that nobody catches: one line, and the exit code of a wrong setting."""

from __future__ import annotations

from tfdist.checkpoint.errors import CheckpointError
from tfdist.runtime import exit_codes, uncaught


def report_in_one_line() -> None:
    """From now on an uncaught `CheckpointError` ends this process with one line and code 2.

    A full disk, a folder in use or another model is what the user is to mend: a traceback does not
    help, and neither does another start.
    """
    uncaught.tell_in_one_line(CheckpointError, lambda error: exit_codes.USAGE)
