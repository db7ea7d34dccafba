"""Where a thread is, as another one sees it."""

from __future__ import annotations

import gc
import sys
import threading
import types
from pathlib import Path

import tensorflow as tf

__all__ = ["frame_of", "runs_tensorflow"]

_lock = threading.Lock()
_TENSORFLOW = str(Path(tf.__file__).parent)


def frame_of(thread: int) -> types.FrameType | None:
    """The innermost frame of a thread, by its identifier; None where it runs no more.

    For the thread that asks it is that of the caller.
    """
    if thread == threading.get_ident():
        return sys._getframe(1)
    return _frames().get(thread)


def runs_tensorflow() -> bool:
    """Whether a thread other than the one that asks is in a call of TensorFlow."""
    for thread, frame in _frames().items():
        walked: types.FrameType | None = frame
        while walked is not None and thread != threading.get_ident():
            if walked.f_code.co_filename.startswith(_TENSORFLOW):
                return True
            walked = walked.f_back
    return False


def _frames() -> dict[int, types.FrameType]:
    """The innermost frames of all threads.

    Python 3.11 before 3.11.9 holds a lock while it lists frames, in which the garbage collector may
    run, and free what waits for the same lock (python/cpython#106883): the process would stand still
    for ever. So the collector rests meanwhile.
    """
    with _lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if was_enabled:
                gc.enable()
