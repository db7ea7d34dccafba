"""Where a thread is, as another one sees it."""

from __future__ import annotations

import gc
import sys
import threading
import types

__all__ = ["frame_of"]

_lock = threading.Lock()


def frame_of(thread: int) -> types.FrameType | None:
    """The innermost frame of a thread, by its identifier; None where it runs no more.

    For the thread that asks it is that of the caller.

    Python 3.11 before 3.11.9 holds a lock while it lists frames, in which the garbage collector may
    run, and free what waits for the same lock (python/cpython#106883): the process would stand still
    for ever. So the collector rests meanwhile.
    """
    if thread == threading.get_ident():
        return sys._getframe(1)
    with _lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if was_enabled:
                gc.enable()
