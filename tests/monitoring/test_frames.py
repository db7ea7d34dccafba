"""Looking where a thread is stops nothing."""

from __future__ import annotations

import subprocess
import sys
import threading

from tfdist.monitoring.frames import frame_of

#: Has the garbage collector want to run just as frames are listed, and find a `threading.local`.
LOOK = """
import gc, sys, threading
from tfdist.monitoring.frames import frame_of

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
look = {look}
print(look(threading.main_thread().ident) is not None, gc.isenabled())
"""


def test_it_does_not_wait_for_itself():
    command = [sys.executable, "-c", LOOK.format(look="frame_of")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert found.stdout.split() == ["True", "True"], found.stderr


def test_a_collector_that_was_off_stays_off():
    program = LOOK.replace("gc.enable()", "").format(look="frame_of")
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert found.stdout.split() == ["True", "False"], found.stderr


def test_a_thread_that_has_ended_is_nowhere():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert frame_of(thread.ident) is None
    assert (
        frame_of(threading.get_ident()).f_code.co_name == "test_a_thread_that_has_ended_is_nowhere"
    )
