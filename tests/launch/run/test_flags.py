"""`tfdist-run`: how it is called, and what is refused in one line."""

from __future__ import annotations

import pytest

from tests.launch.jobs import SCRIPTS, TWO, assert_said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--", "true"], ["-np N"]),
        (["-np", "0", "true"], ["--np=0"]),
        (["-np", "two", "true"], ["--np=two"]),
        (["-np", "2"], ["no command"]),
        (["-np", "2", "--"], ["no command"]),
        (["-np", "2", "--", "no-such-command"], ["'no-such-command'", "PATH"]),
        (["-np", "2", "--", "/etc"], ["'/etc'"]),
        (["-np", "2", "--ngine=tensorflow", "true"], ["'ngine'", "engine"]),
        (["-np", "2", "--engine=mpi", "true"], ["--engine=mpi", "horovod|tensorflow"]),
        (["-np", "2", "--watchdog_seconds=-1", "true"], ["--watchdog_seconds=-1"]),
        (["-np"], ["np"]),
        (["--flagfile=/no/such/file", "true"], ["/no/such/file"]),
        (["-np", "2", "-H", "a:b", "true"], ["host:slots", "'a:b'"]),
        (["-np", "2", "-H", "a:0", "true"], ["host:slots", "'a:0'"]),
        (["-np", "2", "-H", "a:-1", "true"], ["host:slots", "'a:-1'"]),
        (["-np", "2", "-H", "a:²", "true"], ["host:slots", "'a:²'"]),
        (["-np", "2", "-H", ":2", "true"], ["host:slots", "':2'"]),
        (["-np", "2", "-H", ",", "true"], ["host:slots", "','"]),
        (["-np", "4", "-H", "localhost:2,127.0.0.1", "true"], ["-np 4", "slots", "has: 3"]),
        (["-np", "2", "-H", "far.invalid:2", "true"], ["far.invalid cannot be reached"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "true" in value else None,
)
def test_what_cannot_be_done_is_said_in_one_line(jobs, arguments, words):
    finished = jobs.run(*arguments)
    assert finished.returncode == 2, finished.stderr
    assert finished.stdout == ""
    assert finished.stderr.startswith("tfdist-run: ")
    assert finished.stderr.count("\n") == 1, finished.stderr
    for word in words:
        assert word in finished.stderr


def test_a_file_that_is_no_program_is_said_in_one_line(jobs, tmp_path):
    (tmp_path / "program").write_text("neither a script nor a binary")
    (tmp_path / "program").chmod(0o755)
    finished = jobs.run(*TWO, str(tmp_path / "program"))
    assert_said(finished, 2, f"'{tmp_path}/program' cannot be run: Exec format error.")


def test_this_machine_may_be_named(jobs):
    finished = jobs.run("-H", "localhost:1,127.0.0.1:1", *TWO, "echo", "up")
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.splitlines()) == ["[0] up", "[1] up"]


def test_flags_may_come_from_a_file(jobs, tmp_path):
    (tmp_path / "flags").write_text("# two ranks\n--np=2\n--engine=tensorflow\n")
    finished = jobs.run(f"--flagfile={tmp_path}/flags", "--", "echo", "up")
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.splitlines()) == ["[0] up", "[1] up"]


@pytest.mark.parametrize("program", ["tfdist-run", "tfdist-train"])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_fits_a_screen(jobs, program, flag):
    finished = jobs.run(
        flag, program=[str(SCRIPTS / program)], environment={"COLUMNS": "80", "LINES": "24"}
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    lines = finished.stdout.splitlines()
    assert f"Usage: {program} " in finished.stdout
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
