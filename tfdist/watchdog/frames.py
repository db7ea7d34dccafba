"""The stack of a thread, read by another thread."""

from __future__ import annotations

import contextlib
import gc
import itertools
import operator
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

_lock = threading.Lock()
_SAMPLES, _SAMPLE_SECONDS = 7, 0.005
_TASKS = Path("/proc/self/task")
_KINDS = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
_PLACE_OF_FRAME = operator.attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")
#: The folders of code that is not the user's: this package's, the installed packages', and Python's.
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in {
        str(Path(__file__).parent.parent),
        *(path for name, path in sysconfig.get_paths().items() if name in _KINDS),
    }
)
#: Those in other environments, and the files that TensorFlow generates for a program's functions.
_INSTALLED = ("site-packages", "dist-packages", "__autograph_generated")


class Place(NamedTuple):
    """The current line of a thread, or the line of a call."""

    file: str
    line: int
    function: str


def stack_of(thread: int) -> list[Place]:
    """The stack of a thread, by its identifier, innermost first; empty if the thread has ended.

    For the current thread it begins with the caller.

    Python 3.11 may crash if one thread reads the frames of another that is running
    (python/cpython#111363): a frame that was left in the meantime is an invalid pointer. So the whole
    stack is read by C functions combined in one C call, during which no other thread runs.
    """
    frames = map(operator.itemgetter(thread), iter(sys._current_frames, None))
    stack = itertools.accumulate(
        itertools.chain(itertools.islice(frames, 1), itertools.repeat("f_back")),
        cast(Any, getattr),
    )
    found: list[Any] = []
    # The outermost frame has no caller. A thread that has ended has no frames.
    with _without_collector(), contextlib.suppress(AttributeError, KeyError):
        found.extend(map(_PLACE_OF_FRAME, stack))
    return [Place(*place) for place in found if place[0] != __file__]


def users_place(stack: Sequence[Place]) -> Place | None:
    """The innermost line of the user's code, else of this package; None for an empty stack."""
    own = [
        place
        for place in stack
        if not place.file.startswith("<") and not any(name in place.file for name in _INSTALLED)
    ]
    users = [place for place in own if not place.file.startswith(_LIBRARIES)]
    # A program on the command line has no file.
    return next(iter([*users, *own, *stack[-1:]]), None)


def is_idle() -> bool:
    """Whether no other thread of this process runs, or waits for a core.

    A process on a system without /proc does not count as idle.
    """
    busy = 0
    for _ in range(_SAMPLES):
        busy += _others_run()
        time.sleep(_SAMPLE_SECONDS)
    # Threads that poll for work run in a few of the samples.
    return busy <= _SAMPLES // 2


def _others_run() -> bool:
    if not _TASKS.exists():
        return True
    for task in _TASKS.iterdir():
        # A thread may end in the meantime.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if state in "RD" and task.name != str(threading.get_native_id()):
                return True
    return False


def runs_code_in(folder: str) -> bool:
    """Whether a thread other than the current one runs a function defined in a folder."""
    with _without_collector():
        others = sys._current_frames().keys() - {threading.get_ident()}
    return any(place.file.startswith(folder) for other in others for place in stack_of(other))


@contextlib.contextmanager
def _without_collector():
    """Disables garbage collection in all threads.

    Python 3.11 before 3.11.9 holds a lock while it lists frames, during which the garbage collector may
    run, and free an object that waits for the same lock (python/cpython#106883): a deadlock. It may
    also run a finalizer in Python, and other threads with it.
    """
    with _lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
