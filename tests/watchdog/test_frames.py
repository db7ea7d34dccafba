"""Looking where a thread is stops nothing, and breaks nothing."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from tfdist.watchdog import frames
from tfdist.watchdog.frames import Place, is_idle, runs_code_in, stack_of, users_place

#: Has the garbage collector want to run just as frames are listed, and find a `threading.local`.
LOOK = """
import gc, runpy, sys, threading
stack_of = runpy.run_path(sys.argv[1])["stack_of"]

wait = threading.Event()
gc.collect()
gc.disable()
for _ in range(8):
    threading.Thread(target=wait.wait, daemon=True).start()
loop = [threading.local()]
loop.append(loop)
del loop
gc.set_threshold(gc.get_count()[0] + 3)
gc.enable()
print(stack_of(threading.main_thread().ident) != [], gc.isenabled())
"""

#: Threads look at one that calls and returns as fast as it can, and that makes garbage.
BUSY = """
import gc, runpy, sys, threading, time
stack_of = runpy.run_path(sys.argv[1])["stack_of"]

main, ended, seen = threading.main_thread().ident, threading.Event(), set()

def look():
    while not ended.is_set():
        stack = stack_of(main)
        seen.add((len(stack), stack[-1].function))
        time.sleep(0.001)

class Garbage:
    def __del__(self):
        [number for number in range(3)]

def leaf(number):
    garbage = Garbage()
    garbage.loop = garbage
    return [garbage, number]

def numbers():
    for number in range(20):
        yield leaf(number)

def deep(left):
    if left == 0:
        return list(numbers())
    try:
        return deep(left - 1)
    finally:
        leaf(left)

gc.set_threshold(50, 5, 5)
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=look) for _ in range(4)]
for thread in threads:
    thread.start()
end = time.monotonic() + 1
while time.monotonic() < end:
    for depth in range(60):
        deep(depth)
ended.set()
for thread in threads:
    thread.join()
print(len(seen) > 10, {outermost for _, outermost in seen} == {"<module>"})
"""


def printed(program: str) -> list[str]:
    # The file alone, since to import TensorFlow takes longer than all that is done here.
    command = [sys.executable, "-X", "faulthandler", "-c", program, frames.__file__]
    found = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


def test_it_does_not_wait_for_itself():
    assert printed(LOOK) == ["True", "True"]


def test_a_collector_that_was_off_stays_off():
    assert printed(LOOK.replace("gc.enable()", "")) == ["True", "False"]


@pytest.mark.parametrize("attempt", range(5))
def test_a_thread_that_goes_on_meanwhile_is_no_danger(attempt):
    # A process crashes at once or hardly ever, by where its memory lies.
    assert printed(BUSY) == ["True", "True"]


def test_a_thread_that_has_ended_is_nowhere():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert stack_of(thread.ident) == []


def test_the_innermost_place_comes_first():
    def inner():
        return stack_of(threading.get_ident())

    found = inner()
    assert [place.function for place in found[:2]] == [
        "inner",
        "test_the_innermost_place_comes_first",
    ]
    assert {place.file for place in found[:2]} == {__file__}
    assert found[1].line == found[0].line + 2


def test_code_that_another_thread_runs():
    here = str(Path(__file__).parent)
    begun, over = threading.Event(), threading.Event()

    def wait():
        begun.set()
        over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    assert runs_code_in(here)
    over.set()
    thread.join()
    assert not runs_code_in(here)  # This thread does not count.


def test_a_process_is_idle_unless_a_thread_computes():
    assert is_idle()
    end = threading.Event()

    def compute():
        content = bytes(1 << 24)
        while not end.is_set():
            hashlib.sha256(content)  # Without the interpreter's lock.

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        assert not is_idle()
    finally:
        end.set()
        thread.join()
    assert is_idle()


def test_the_users_line_is_the_innermost_that_is_no_librarys():

    own = Place("/home/me/train.py", 12, "main")
    deep = [
        Place("<string>", 908, "tfdist_receive"),
        Place(tf.__file__, 1, "execute"),
        Place(frames.__file__, 2, "stack_of"),
        Place(threading.__file__, 3, "run"),
        Place(keras.__file__, 4, "fit"),
        Place("/tmp/__autograph_generated_file1.py", 5, "tf__step"),
    ]
    assert users_place([*deep, own, Place("/home/me/run.py", 1, "run")]) == own
    assert users_place(deep) == deep[2]
    assert users_place([deep[0], Place("<string>", 1, "<module>")]).function == "<module>"
    assert users_place([]) is None
