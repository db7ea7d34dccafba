"""`tfdist-run`: what ranks are given, and what they print."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.launch.jobs import HURRIED, PYTHON, TWO, assert_said, by_rank, finish, wait_for
from tests.launch.processes import BIN

RUN = [os.path.join(BIN, "tfdist-run")]


def test_what_ranks_print_is_passed_on_behind_their_number(jobs):
    finished = jobs.run(*TWO, "sh", "-c", "echo one; echo two >&2; echo")
    assert finished.returncode == 0
    assert finished.stderr == ""
    lines = finished.stdout.splitlines()
    for rank in (0, 1):
        assert [line for line in lines if line.startswith(f"[{rank}]")] == [
            f"[{rank}] one",
            f"[{rank}] two",
        ]
    assert len(lines) == 4


def test_each_rank_finds_its_place_in_its_environment(jobs):
    show = 'import os; print(os.environ["TF_CONFIG"], os.environ["GIVEN"], sep="|")'
    finished = jobs.run(
        "-np", "3", "--engine=tensorflow", "--", *PYTHON, show, environment={"GIVEN": "before"}
    )
    assert finished.returncode == 0, finished.stderr
    found = {}
    for line in finished.stdout.splitlines():
        rank, _, rest = line.partition("] ")
        config, given = rest.split("|")
        found[int(rank[1:])] = json.loads(config)
        assert given == "before"
    assert sorted(found) == [0, 1, 2]
    for rank, config in found.items():
        assert config["task"] == {"type": "worker", "index": rank}
        assert config["cluster"] == found[0]["cluster"]
    assert len(set(found[0]["cluster"]["worker"])) == 3


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="needs Horovod")
def test_ranks_of_horovod_find_their_place_too(jobs):
    finished = jobs.run(
        "-np", "2", "--engine=horovod", "sh", "-c", "echo $HOROVOD_RANK of $HOROVOD_SIZE"
    )
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]


def test_the_flags_of_the_command_are_its_own(jobs):
    for dashes in ([], ["--"]):
        finished = jobs.run("-np", "1", "--engine=tensorflow", *dashes, "echo", "--np=7", "--help")
        assert finished.stdout == "[0] --np=7 --help\n"


def test_a_last_line_without_an_end_and_returned_carriages_are_passed_on(jobs):
    finished = jobs.run(
        *TWO, *by_rank(r"printf '1/2\r2/2\r\n\b\b\bdone\r\n\n  \nno end'", "printf alone")
    )
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert [line for line in lines if line.startswith("[0]")] == [
        "[0] 1/2",
        "[0] 2/2",
        "[0] done",
        "[0] no end",
    ]
    assert [line for line in lines if line.startswith("[1]")] == ["[1] alone"]
    assert finished.stdout.endswith("\n")


def test_a_long_line_and_bytes_that_are_no_text_come_whole(jobs):
    """A rank that ended while its line was written cut the line short."""
    write = "import os; os.write(1, b'x' * 300_000 + b'\\xff\\xc3\\xa9\\n')"
    finished = jobs.run(
        *TWO,
        *PYTHON,
        write,
        text=False,
        environment={"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": "1"},
    )
    line = b"x" * 300_000 + b"\xff\xc3\xa9\n"
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.splitlines(keepends=True)) == [b"[0] " + line, b"[1] " + line]


def test_the_last_words_of_a_rank_do_not_wait_for_the_others(jobs, tmp_path):
    go = tmp_path / "go"
    job = jobs.start(*TWO, *by_rank("printf bye", f"until [ -e {go} ]; do sleep 0.05; done"))
    said = wait_for(job, "[0] bye")
    go.touch()
    assert finish(job, said).returncode == 0


def test_ranks_read_nothing(jobs):
    finished = jobs.run(*TWO, "cat", stdin=subprocess.DEVNULL)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


def test_a_rank_that_never_stops_talking_does_not_drown_the_others(jobs):
    finished = jobs.run(
        *TWO, *by_rank("yes", "sleep 0.3; exit 5"), program=HURRIED, stdout=subprocess.DEVNULL
    )
    assert_said(finished, 5, "rank 1 failed first, with exit code 5; the job was ended.")


def test_a_job_outlives_its_output(tmp_path):
    """The disk of the log is full, and that of the checkpoints is not."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*RUN, *TWO, "sh", "-c", f"echo one; sleep 1; echo two; touch {tmp_path}/$$"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0 and len(list(tmp_path.iterdir())) == 2
    assert done.stderr.splitlines() == [
        "tfdist-run: the output cannot be written (No space left on device); the job continues without it."
    ]


def test_a_rank_elsewhere_outlives_a_signal_to_its_parent(tmp_path):
    """As Slurm sends it to the processes of all nodes: the launcher tells ranks to save."""
    program = [sys.executable, "-m", "tfdist.launch.run.remote_rank"]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(program, text=True, **pipes) as parent:
        assert parent.stdout.readline().startswith("tfdist")
        script = "trap 'echo saved; exit 76' TERM; echo ready; while :; do sleep 0.1; done"
        order = {"environment": {}, "folder": str(tmp_path), "command": ["sh", "-c", script]}
        print(json.dumps(order), file=parent.stdin, flush=True)
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert parent.poll() is None
        print(int(signal.SIGTERM), file=parent.stdin, flush=True)
        assert parent.stdout.readline() == "saved\n"
        assert parent.wait(20) == 76
