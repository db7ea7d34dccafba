"""One job at a time saves into a directory, and a lock does not outlive its holder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import tfdist
from tests.checkpoint.test_jobs import ROOT, command, environment, run
from tfdist.callbacks import Checkpointer
from tfdist.checkpoint import directory_lock, latest
from tfdist.checkpoint.directory_lock import JOB, LOCK, DirectoryLock, Owner, holder_of
from tfdist.checkpoint.errors import DirectoryInUseError, StorageError
from tfdist.runtime import lock_owner
from tfdist.runtime.lock_owner import STALE_SECONDS

HOLD = """
import sys, time
from tfdist.checkpoint import directory_lock
if sys.argv[2] == "renewed":
    directory_lock._is_local = lambda directory: False
    directory_lock._RENEW_SECONDS = 0.2
lock = directory_lock.DirectoryLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
if sys.argv[3] == "forks":
    import os
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
sys.stdin.read()
"""


@pytest.fixture(params=["kernel", "renewed"])
def kind(request, monkeypatch):
    if request.param == "renewed":
        monkeypatch.setattr(directory_lock, "_is_local", lambda directory: False)
        monkeypatch.setattr(directory_lock, "_RENEW_SECONDS", 0.2)
    monkeypatch.setattr(directory_lock, "_PATIENCE_SECONDS", 0.5)
    return request.param


def holder(folder: Path, kind: str, forks: str = "") -> subprocess.Popen:
    """A process that holds the lock until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), kind, forks],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


def refused(folder: Path) -> str:
    begun = time.monotonic()
    with pytest.raises(DirectoryInUseError) as error:
        DirectoryLock(str(folder)).acquire()
    assert time.monotonic() - begun < 5
    return str(error.value)


@pytest.mark.timeout(120)
def test_the_second_is_refused_and_told_by_whom(tmp_path, kind):
    with holder(tmp_path, kind) as other:
        said = refused(tmp_path)
        assert f"process {other.pid} on host {os.uname().nodename}, since 20" in said
        assert str(tmp_path) in said and "\n" not in said
        assert holder_of(str(tmp_path)).pid == other.pid
        other.kill()
        other.wait()
    lock = DirectoryLock(str(tmp_path))
    lock.acquire()  # Its holder was killed.
    directory_lock.check_lock(str(tmp_path))
    lock.release()
    assert not (tmp_path / LOCK).exists()
    assert holder_of(str(tmp_path)) is None


@pytest.mark.timeout(120)
def test_a_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path):
    with holder(tmp_path, "kernel", "forks") as other:
        child = int(other.stdout.readline())
        other.kill()
        other.wait()
        try:
            lock = DirectoryLock(str(tmp_path))
            lock.acquire()
            lock.release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_process_may_take_it_twice(tmp_path, kind):
    first, second = DirectoryLock(str(tmp_path)), DirectoryLock(str(tmp_path / "."))
    first.acquire()
    second.acquire()
    first.release()
    first.release()
    assert (tmp_path / LOCK).exists()
    second.release()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"pid": "x"}', b"[" * 10_000])
def test_nonsense_in_the_file_locks_nobody_out(tmp_path, kind, content):
    (tmp_path / LOCK).write_bytes(content)
    assert holder_of(str(tmp_path)) is None
    lock = DirectoryLock(str(tmp_path))
    lock.acquire()
    assert Owner.parse((tmp_path / LOCK).read_bytes()).pid == os.getpid()
    lock.release()


def test_a_link_is_not_followed(tmp_path):
    goal = tmp_path / "goal"
    goal.write_text("precious")
    (tmp_path / LOCK).symlink_to(goal)
    with pytest.raises(OSError):
        DirectoryLock(str(tmp_path)).acquire()
    assert goal.read_text() == "precious"


@contextlib.contextmanager
def renewed_elsewhere(folder: Path, **changes):
    """A process of another host holds the lock, and renews it."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.2):
            elsewhere(folder, **changes)

    elsewhere(folder, **changes)
    thread = threading.Thread(target=renew)
    thread.start()
    yield
    ended.set()
    thread.join()


def elsewhere(folder: Path, **changes) -> None:
    """A lock that a process of another host holds."""
    owner = dataclasses.replace(Owner.here(), machine="another", host="node7", pid=1)
    made = folder / "made-elsewhere"
    made.write_bytes(dataclasses.replace(owner, **changes).content())
    made.replace(folder / LOCK)  # At once: who reads meanwhile sees one or the other.


def test_another_host_holds_it_while_it_renews(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_lock, "_is_local", lambda directory: False)
    monkeypatch.setattr(directory_lock, "_PATIENCE_SECONDS", 0.2)
    with renewed_elsewhere(tmp_path):
        assert "process 1 on host node7" in refused(tmp_path)
    elsewhere(tmp_path, renewed=time.time() - STALE_SECONDS - 1)
    lock = DirectoryLock(str(tmp_path))
    lock.acquire()
    lock.release()


def test_a_holder_that_died_elsewhere_is_waited_for(tmp_path, monkeypatch, caplog):
    """It had renewed its lock right before; only time shows that it is dead."""
    monkeypatch.setattr(directory_lock, "_is_local", lambda directory: False)
    monkeypatch.setattr(directory_lock, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(lock_owner, "STALE_SECONDS", 2.0)
    elsewhere(tmp_path)
    assert holder_of(str(tmp_path)) is None  # A program is not refused before it has waited.
    begun = time.monotonic()
    lock = DirectoryLock(str(tmp_path))
    lock.acquire()
    assert 1 < time.monotonic() - begun < 20
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path} is locked by process 1 on host node7, since 20")
    lock.release()


def test_a_job_that_starts_again_is_not_locked_out_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_lock, "_is_local", lambda directory: False)
    monkeypatch.setattr(directory_lock, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setenv(JOB, "b")
    with renewed_elsewhere(tmp_path, job="a"):
        assert "node7" in refused(tmp_path)
    monkeypatch.setenv(JOB, "a")
    lock = DirectoryLock(str(tmp_path))
    lock.acquire()
    lock.release()


def test_a_lock_that_was_taken_over_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_lock, "_is_local", lambda directory: False)
    monkeypatch.setattr(directory_lock, "_RENEW_SECONDS", 0.05)
    lock = DirectoryLock(str(tmp_path))
    lock.acquire()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        elsewhere(tmp_path)  # Again: a renewal may have been about to replace it.
        try:
            directory_lock.check_lock(str(tmp_path))
        except DirectoryInUseError as error:
            assert "node7" in str(error)
            break
        time.sleep(0.05)
    else:
        raise AssertionError("It was not noticed.")
    lock.release()
    assert b"node7" in (tmp_path / LOCK).read_bytes()


@pytest.mark.timeout(200)
def test_a_job_without_the_lock_completes_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_lock, "_is_local", lambda directory: False)
    monkeypatch.setattr(directory_lock, "_RENEW_SECONDS", 1e6)  # It has not noticed yet.

    def taken_over(batch, logs):
        if batch == 5:
            elsewhere(tmp_path)

    taken = keras.callbacks.LambdaCallback(on_train_batch_end=taken_over)
    with tfdist.strategies.LocalStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((20, 2), "float32")
    saver = Checkpointer(tmp_path, every_steps=4, keep_last=10, asynchronous=False)
    with pytest.raises(StorageError, match="node7"):
        model.fit(x, x[:, :1], batch_size=1, verbose=0, callbacks=[taken, saver])
    assert "step-0000000004-" in latest(tmp_path)
    assert len(list(tmp_path.glob("step-*"))) == 1


def test_a_process_of_the_same_number_is_another(tmp_path):
    owner = Owner.here()
    assert not owner.is_gone()
    assert dataclasses.replace(owner, started=owner.started - 60).is_gone()
    assert dataclasses.replace(owner, pid=(1 << 22) + 1).is_gone()


# -- whole jobs ----------------------------------------------------------------------------------

TRAIN = ["--model=mlp", "--dataset=digits", "--epochs=40", "--save_every=5", "--verbose=0"]


def launched(folder: Path, *flags: str) -> list[str]:
    programs = Path(sys.executable).parent
    train = [str(programs / "tfdist-train"), *TRAIN, f"--workdir={folder}", "--threads=1"]
    return [str(programs / "tfdist-run"), "-np=2", *flags, "--", *train]


def newest(folder: Path) -> str | None:
    found = sorted(folder.glob("step-*/manifest.json"))
    return found[-1].parent.name.split("-")[1] if found else None


def wait_until(job: subprocess.Popen, condition) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert job.poll() is None, job.communicate()[0][-3000:]
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_jobs_in_one_folder(tmp_path):
    alone = run(launched(tmp_path / "alone"), 240)
    assert alone.returncode == 0, alone.stdout[-2000:] + alone.stderr[-2000:]
    with subprocess.Popen(
        launched(tmp_path / "both"),
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as first:
        try:
            wait_until(first, lambda: newest(tmp_path / "both"))
            begun = time.monotonic()
            second = run(launched(tmp_path / "both", "--max_restarts=3"), 120)
            seconds = time.monotonic() - begun
            assert first.poll() is None, "The first job was to be under way."
            said = first.communicate(timeout=240)[0]
        finally:
            first.kill()
    text = second.stdout + second.stderr
    assert second.returncode == 2, text
    assert "Another job saves into" in text and f"on host {os.uname().nodename}, since" in text
    assert "restart" not in text and "Traceback" not in text
    assert text.count("Another job") == 1
    print(f"refused after {seconds:.1f} s")
    assert seconds < 30  # 5 on a machine that has nothing else to do.
    assert first.returncode == 0, said[-3000:]
    assert newest(tmp_path / "both") == newest(tmp_path / "alone")
    # Its holder is killed, and a third job goes on at once.
    with subprocess.Popen(
        launched(tmp_path / "killed"), env=environment(), cwd=ROOT, start_new_session=True
    ) as job:
        wait_until(job, lambda: (tmp_path / "killed" / LOCK).exists())
        pid = json.loads((tmp_path / "killed" / LOCK).read_text())["pid"]
        os.kill(pid, signal.SIGKILL)
        job.wait(timeout=60)
    assert (tmp_path / "killed" / LOCK).exists()
    third = run(launched(tmp_path / "killed"), 240)
    assert third.returncode == 0, third.stdout[-2000:] + third.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_script_of_the_users_own_is_refused_in_one_line(tmp_path):
    """By Checkpointer alone; no restart, since none would help."""
    (tmp_path / "held" / "saved").mkdir(parents=True)
    with holder(tmp_path / "held" / "saved", "kernel") as other:
        found = run(command("horovod", tmp_path / "held", "data", [], "--max_restarts=3"), 240)
        other.kill()
    assert found.returncode == 2, found.stdout[-3000:] + found.stderr[-3000:]
    lines = [line for line in found.stdout.splitlines() if "DirectoryInUseError" in line]
    assert len(lines) == 2, found.stdout[-3000:]  # One from each rank.
    assert "Traceback" not in found.stdout + found.stderr
    assert "restart" not in found.stderr
