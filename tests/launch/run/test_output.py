"""`tfdist-run`: what ranks are given, and what they print."""

from __future__ import annotations

import importlib.util
import json
import subprocess

import pytest

from tests.launch.jobs import HURRIED, PYTHON, TWO, assert_said, by_rank, finish, wait_for


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
