"""Where a thread is, as another one sees it."""

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
_KINDS = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
_PLACE_OF_FRAME = operator.attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")


#: Where code lies that is not the user's: this package's, the installed packages', and Python's own.
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in {
        str(Path(__file__).parent.parent),
        *(path for name, path in sysconfig.get_paths().items() if name in _KINDS),
    }
)
#: Also in other environments, and what TensorFlow makes of a program's functions, in a file of its own.
_INSTALLED = ("site-packages", "dist-packages", "__autograph_generated")


class Place(NamedTuple):
    """A line that a thread is at, or has made a call from."""

    file: str
    line: int
    function: str


def stack_of(thread: int) -> list[Place]:
    """The stack of a thread, by its identifier, innermost first; empty where it runs no more.

    For the thread that asks it begins with the caller.

    Python 3.11 may crash where one thread reads another's frames while that one goes on
    (python/cpython#111363): a frame that it has left in between points nowhere. So the whole stack is
    read by functions in C that one call in C combines, within which no other thread runs.
    """
    frames = map(operator.itemgetter(thread), iter(sys._current_frames, None))
    stack = itertools.accumulate(
        itertools.chain(itertools.islice(frames, 1), itertools.repeat("f_back")),
        cast(Any, getattr),
    )
    found: list[Any] = []
    # The outermost frame has none behind it. A thread that has ended has no frames.
    with _without_collector(), contextlib.suppress(AttributeError, KeyError):
        found.extend(map(_PLACE_OF_FRAME, stack))
    return [Place(*place) for place in found if place[0] != __file__]


def users_place(stack: Sequence[Place]) -> Place | None:
    """The innermost line of a stack that is the user's; else of this package; None of an empty stack."""
    own = [place for place in stack if not place.file.startswith("<")]
    own = [place for place in own if not any(name in place.file for name in _INSTALLED)]
    for place in own:
        if not place.file.startswith(_LIBRARIES):
            return place
    if own:
        return own[0]
    # A program on the command line has no file.
    return stack[-1] if stack else None


def is_idle() -> bool:
    """Whether no other thread of this process works, or waits for a core to work on.

    Where the system does not tell (it has no /proc) it counts as working.
    """
    busy = 0
    for _ in range(_SAMPLES):
        busy += _others_run()
        time.sleep(_SAMPLE_SECONDS)
    # Those that look for work from time to time are met at it now and then.
    return busy <= _SAMPLES // 2


def _others_run() -> bool:
    own = threading.get_native_id()
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except FileNotFoundError:
        return True
    for thread in threads:
        # One that has ended in between.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
            if thread != own and state in "RD":
                return True
    return False


def runs_code_in(folder: str) -> bool:
    """Whether a thread other than the one that asks is in a call of what is in a folder."""
    with _without_collector():
        threads = list(sys._current_frames())
    return any(
        place.file.startswith(folder)
        for thread in threads
        if thread != threading.get_ident()
        for place in stack_of(thread)
    )


@contextlib.contextmanager
def _without_collector():
    """No garbage collections, in any thread.

    Python 3.11 before 3.11.9 holds a lock while it lists frames, in which the garbage collector may
    run, and free what waits for the same lock (python/cpython#106883): the process would stand still
    for ever. It may also run a finalizer in Python, and other threads with it.
    """
    with _lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
