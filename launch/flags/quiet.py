"""Suppression of TensorFlow's startup messages in a program without `tfdist-run`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from tfdist.launch.run.num_ranks import count_gpus
from tfdist.launch.run.output import is_noise
from tfdist.runtime.lock_owner import JOB

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_STDERR = 2


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Remove TensorFlow's startup messages from stderr, as `tfdist-run` does for ranks.

    For the import of TensorFlow and its first use of the devices, whose messages bypass `sys.stderr`. A
    separate process filters them, so that the last output of a crashing program is kept.
    TF_CPP_MIN_LOG_LEVEL=0 keeps all messages of TensorFlow.
    """
    asks_for_all = os.environ.get(_LEVEL) == "0"
    os.environ.setdefault(_LEVEL, "2")
    if asks_for_all or JOB in os.environ or not _has_stderr():
        yield
        return
    has_gpu = count_gpus() > 0
    sys.stderr.flush()
    own = os.dup(_STDERR)
    read, write = os.pipe()
    reader = os.fork()
    if not reader:
        os.close(write)
        _pass_on(read, own, has_gpu)
    os.close(read)
    os.dup2(write, _STDERR)
    os.close(write)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(own, _STDERR)
        os.close(own)
        os.waitpid(reader, 0)  # All output is written before the program continues.


def _has_stderr() -> bool:
    try:
        os.fstat(_STDERR)
    except OSError:
        return False
    return sys.stderr is not None


def _pass_on(source: int, target: int, has_gpu: bool) -> None:
    """Copy lines except startup messages until all writers have closed, and exit the process."""
    # Ctrl-C interrupts only the program, whose last output this process still forwards.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with open(source, "rb") as lines, open(target, "wb", buffering=0) as out:
            for line in lines:
                if not is_noise(line.rstrip(b"\n"), has_gpu=has_gpu):
                    out.write(line)
    finally:
        os._exit(0)
