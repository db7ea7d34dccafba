"""Checkpoints in object stores: against a server of S3's interface, and one of Google's."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoint import stores
from tests.checkpoint.test_jobs import check_same_end, command, never_killed, plan
from tests.checkpoint.test_jobs import run as run_job
from tests.conftest import full_cross, skip_without
from tfdist.utils.lazy import find_addon

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def s3():
    with stores.s3() as server:
        yield server


@pytest.fixture(autouse=True)
def plain_answers(request):
    yield
    if "s3" in request.fixturenames:
        proxy = request.getfixturevalue("s3").proxy
        proxy.before = proxy.after = lambda method, path: None


def start(variables, what: str, address: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.store_programs", what, address],
        env={**os.environ, **variables, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(variables, what: str, address: str, timeout: float = 200) -> str:
    with start(variables, what, address) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    assert process.returncode == 0, out + err[-3000:]
    # Without the messages of TensorFlow and the store's libraries.
    assert "AuthCredentials" not in err
    return out.strip()


def failure(variables, what: str, address: str) -> str:
    """The last line of a process that fails."""
    with start(variables, what, address) as process:
        try:
            _, err = process.communicate(timeout=250)
        finally:
            process.kill()
    assert process.returncode == 1
    return err.strip().splitlines()[-1]


SAVED = "step-00000000{}-"


def test_the_newest_is_found_without_a_list_of_all(s3):
    address = "s3://runs/newest"
    said = run(s3.variables, "save", address).splitlines()
    assert said[0].startswith(f"{address}/{SAVED.format(30)}") and said[1] == "30 True"
    s3.proxy.requests.clear()
    assert run(s3.variables, "latest", address) == said[0]
    listed = [path for _, path in s3.proxy.requests if "list-type" in path]
    assert len(s3.proxy.requests) <= 4 and all("manifest.json" in path for path in listed)
    # Not without its manifest.
    newest = said[0].removeprefix("s3://runs/")
    manifest = s3.read(f"{newest}/manifest.json")
    s3.delete(f"{newest}/manifest.json")
    assert f"/{SAVED.format(20)}" in run(s3.variables, "latest", address)
    s3.put(f"{newest}/manifest.json", manifest)
    # Nor where the record is corrupt or lost.
    record = s3.read("newest/newest.json")
    for content in (b"{", b"[1]", b'{"folder": "x"}', None):
        if content is None:
            s3.delete("newest/newest.json")
        else:
            s3.put("newest/newest.json", content)
        assert run(s3.variables, "latest", address) == said[0]
    s3.put("newest/newest.json", record)


def test_one_job_at_a_time(s3):
    address = "s3://runs/locked"
    with start(s3.variables, "hold", address) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            assert "Another job saves into s3://runs/locked" in run(
                s3.variables, "attempt", address
            )
            out, err = holder.communicate(timeout=60)
        finally:
            holder.kill()
    assert out == "released\n", err
    assert run(s3.variables, "attempt", address) == "free"
    assert s3.names("locked/") == []


def test_a_killed_holder_is_told(s3):
    address = "s3://runs/killed"
    with start(s3.variables, "hold", address) as holder:
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    assert run(s3.variables, "attempt", address) == "free"


def test_many_jobs_want_one_prefix(s3):
    """All at once: at most one of them holds it at any time."""
    jobs = [start(s3.variables, "hold", "s3://runs/wanted") for _ in range(6)]
    try:
        time.sleep(15)
        for job in jobs:
            job.stdin.close()
        held = [job.stdout.read() for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert sorted(held) == ["", "", "", "", "", "held\nreleased\n"]


def test_a_lost_answer_loses_no_lock(s3):
    """The server writes the lock, and its answer does not arrive."""
    lost = []

    def lose(method, path):
        if method == "PUT" and not lost:
            lost.append(path)
            return 503
        return None

    s3.proxy.after = lose
    assert run(s3.variables, "attempt", "s3://runs/unheard") == "free"
    assert len(lost) == 1 and lost[0].startswith("/runs/unheard/tfdist.lock")


@pytest.mark.slow
def test_a_store_that_refuses_now_and_then(s3):
    chance = random.Random(5)
    s3.proxy.before = lambda method, path: 503 if chance.random() < 0.05 else None
    assert run(s3.variables, "save", "s3://runs/refusing").splitlines()[1] == "30 True"


@pytest.mark.slow
def test_a_slow_store(s3):
    s3.proxy.before = lambda method, path: time.sleep(0.2)
    assert run(s3.variables, "save", "s3://runs/slow").splitlines()[1] == "30 True"


@pytest.mark.slow
def test_a_store_that_is_down_is_an_error(s3):
    s3.proxy.before = lambda method, path: 503
    said = failure(s3.variables, "latest", "s3://runs/down")
    assert "StorageError: Could not read `newest.json`" in said and "s3://runs/down" in said


@pytest.mark.slow
def test_a_bucket_that_is_not_there(s3):
    assert "s3://nosuch/x" in failure(s3.variables, "save", "s3://nosuch/x")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout", ["data", *(pytest.param(each, marks=full_cross) for each in ("tensor", "zero"))]
)
def test_killed_jobs_go_on_in_s3(s3, tmp_path, monkeypatch, layout):
    """At a step, within one, between the arrays, and between arrays and manifest; the same bits at the end."""
    engine = "tensorflow" if layout == "tensor" else "horovod"
    whole = never_killed(engine, layout, tmp_path)
    for name, value in {**s3.variables, "SAVED": f"s3://runs/{layout}"}.items():
        monkeypatch.setenv(name, value)
    restarts = ["--max_restarts=4", "--restart_seconds=1"]
    job = command(engine, tmp_path / "killed", layout, plan(layout, 4), *restarts)
    killed = run_job(job, 600)
    story = killed.stdout[-6000:] + killed.stderr[-3000:]
    assert killed.returncode == 0, story
    assert killed.stderr.count("SIGKILL") >= 2, story
    s3.download(layout, tmp_path / "killed" / "saved")
    check_same_end(whole, tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_google(tmp_path, monkeypatch):
    """The server ignores conditions: neither locks nor ranks that share a chunk can be tested on it."""
    skip_without("horovod")
    with stores.google(tmp_path) as variables:
        for name, value in {**variables, "SAVED": f"gs://{stores.BUCKET}/x"}.items():
            monkeypatch.setenv(name, value)
        for number in range(2):
            job = command("horovod", tmp_path / "job", "data", [[30, "step", 0]], "-np=1")
            done = run_job(job, 240)
            assert (done.returncode == 0) == bool(number), done.stdout[-3000:] + done.stderr[-3000:]
        assert f"/{SAVED.format(60)}" in run(variables, "latest", f"gs://{stores.BUCKET}/x")


def test_data_by_address(s3, monkeypatch):
    if find_addon("datasets") is None:
        pytest.skip("no add-on datasets")
    from tfdist.addons.datasets import load_text

    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    s3.put("data/notes.txt", b"0123456789" * 10)
    text = load_text("text:s3://runs/data/notes.txt")
    assert bytes(text.train) == b"0123456789" * 9 and len(text.validation) == 10
    with pytest.raises(ValueError, match=r"s3://runs/data/none\.txt' cannot be read: No such file"):
        load_text("text:s3://runs/data/none.txt")


@pytest.mark.slow
def test_training_on_data_by_address(s3, tmp_path):
    s3.put("data/notes.txt", (ROOT / "README.md").read_bytes())
    job = subprocess.run(
        [
            *(os.path.join(os.path.dirname(sys.executable), "tfdist-train"), "--model=gpt"),
            *("--dataset=text:s3://runs/data/notes.txt", "--layers=1", "--width=16", "--heads=2"),
            *("--epochs=1", "--seq_length=32", "--workdir=s3://runs/trained"),
        ],
        env={**os.environ, **s3.variables, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    assert any(name.endswith("manifest.json") for name in s3.names("trained/"))
