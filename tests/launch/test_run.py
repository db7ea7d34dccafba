"""`tfdist-run` as its users start it: what it passes on, how it ends, and what it leaves behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from pathlib import Path

import psutil
import pytest

TIMEOUT = 60
SCRIPTS = Path(sysconfig.get_path("scripts"))
PROGRAM = [str(SCRIPTS / "tfdist-run")]
#: The same with less patience for ranks that go on after one has failed.
HURRIED = [
    sys.executable,
    "-c",
    "from tfdist.launch import run, supervisor\n"
    "supervisor._GRACE_SECONDS = supervisor._TERMINATE_SECONDS = 0.7\n"
    "run.run()",
]
TWO = ["-np", "2", "--engine=tensorflow", "--"]
PYTHON = [sys.executable, "-I", "-S", "-c"]


def by_rank(*scripts):
    """A shell command that runs the script of its rank."""
    cases = " ".join(f"{rank}) {script} ;;" for rank, script in enumerate(scripts))
    return [
        "sh",
        "-c",
        f"""rank=${{TF_CONFIG##*'"index": '}}; case ${{rank%%\\}}*}} in {cases} esac""",
    ]


def heed_signals() -> None:
    """Tests may run under nohup, whose programs ignore a SIGHUP, or in a shell's background."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class Jobs:
    """Starts the program, and knows its processes by a variable that all of them inherit."""

    def __init__(self):
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen] = []

    def start(self, *arguments, program=PROGRAM, **options) -> subprocess.Popen:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        job = subprocess.Popen(
            [*program, *arguments],
            env={**os.environ, "TFDIST_TEST_MARK": self._mark, **options.pop("environment", {})},
            start_new_session=True,
            preexec_fn=heed_signals,
            **options,
        )
        self._started.append(job)
        return job

    def run(self, *arguments, **options) -> subprocess.CompletedProcess:
        return finish(self.start(*arguments, **options))

    def left(self) -> list[str]:
        """The command lines of the processes that are alive."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TFDIST_TEST_MARK") == self._mark:
                    found.append(" ".join(process.cmdline()))
        return found

    def close(self):
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TFDIST_TEST_MARK") == self._mark:
                    process.kill()
        for job in self._started:
            job.communicate()


@pytest.fixture
def jobs():
    """A way to start jobs; whatever they do, no process of theirs is left."""
    jobs = Jobs()
    try:
        yield jobs
        deadline = time.monotonic() + 5
        while jobs.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert jobs.left() == []
    finally:
        jobs.close()


def finish(job, said="") -> subprocess.CompletedProcess:
    """Waits for the end; `said` is what was read of the output before."""
    try:
        stdout, stderr = job.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        job.kill()
        stdout, stderr = job.communicate()
        pytest.fail(f"The job did not end.\n{said}{stdout}\n{stderr}")
    return subprocess.CompletedProcess(
        job.args, job.returncode, said + stdout if said else stdout, stderr
    )


def wait_for(job, *lines) -> str:
    """Reads what a job prints until it has printed all of these lines."""
    missing, said = set(lines), ""
    while missing:
        line = job.stdout.readline()
        assert line, f"The job ended and has not said {missing}:\n{said}{job.stderr.read()}"
        said += line
        missing.discard(line.rstrip("\n"))
    return said


def assert_said(finished, code, line):
    assert finished.returncode == code, finished.stderr
    assert finished.stderr == f"tfdist-run: {line}\n"


# What ranks are given, and what they print.


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


# How a job ends.


def test_the_first_failure_decides_and_ends_the_others(jobs):
    begin = time.monotonic()
    finished = jobs.run(
        *TWO,
        *by_rank("trap 'echo told; exit 9' TERM; sleep 1000 & wait", "exit 3"),
        program=HURRIED,
    )
    assert_said(finished, 3, "rank 1 failed first, with exit code 3; the job was ended.")
    assert finished.stdout == "[0] told\n"
    assert time.monotonic() - begin < 20


def test_a_failure_that_tells_of_another_does_not_decide(jobs):
    finished = jobs.run(*TWO, *by_rank("exit 75", "sleep 0.3; exit 4"))
    assert_said(finished, 4, "rank 1 failed first, with exit code 4; the job was ended.")
    finished = jobs.run(*TWO, "sh", "-c", "exit 75")
    assert finished.returncode == 75
    assert "with exit code 75" in finished.stderr


def test_the_others_have_time_for_their_last_words(jobs):
    finished = jobs.run(*TWO, *by_rank("sleep 0.5; echo verdict; exit 75", "exit 3"))
    assert_said(finished, 3, "rank 1 failed first, with exit code 3; the job was ended.")
    assert finished.stdout == "[0] verdict\n"


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (40, "signal 40")])
def test_a_rank_that_a_signal_killed_is_named(jobs, number, name):
    finished = jobs.run(*TWO, *by_rank("sleep 0.2", f"kill -{number} $$"))
    assert_said(finished, 128 + number, f"rank 1 was killed by {name}; the job was ended.")


def test_a_rank_that_is_ended_with_the_job_is_not_blamed(jobs):
    """A rank that hung was killed here, and was then said to be the cause, with code 137."""
    finished = jobs.run(
        *TWO, *by_rank("exit 75", "trap '' TERM; while :; do sleep 0.1; done"), program=HURRIED
    )
    assert finished.returncode == 75
    assert "rank 0" in finished.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
    ids=lambda value: getattr(value, "name", None),
)
def test_signals_reach_all_ranks_and_end_the_job(jobs, number, code):
    name = number.name.removeprefix("SIG")
    job = jobs.start(
        *TWO, "sh", "-c", f"trap 'echo told; exit 9' {name}; echo up; sleep 1000 & wait"
    )
    said = wait_for(job, "[0] up", "[1] up")
    job.send_signal(number)
    finished = finish(job, said)
    assert_said(finished, code, f"ended by SIG{name}.")
    assert sorted(finished.stdout.splitlines()[-2:]) == ["[0] told", "[1] told"]


def test_ranks_that_ignore_signals_are_killed(jobs):
    job = jobs.start(
        *TWO,
        *["sh", "-c", "trap '' INT TERM; echo up; while :; do sleep 0.1; done"],
        program=HURRIED,
    )
    said = wait_for(job, "[0] up", "[1] up")
    job.send_signal(signal.SIGINT)
    assert_said(finish(job, said), 130, "ended by SIGINT.")


def test_a_job_under_nohup_outlives_its_terminal(jobs, tmp_path):
    go = tmp_path / "go"
    wait = ["sh", "-c", f"echo up; until [ -e {go} ]; do sleep 0.05; done"]
    job = jobs.start(*TWO, *wait, program=["nohup", *PROGRAM])
    said = wait_for(job, "[0] up", "[1] up")
    job.send_signal(signal.SIGHUP)
    go.touch()
    assert finish(job, said).returncode == 0


def test_ranks_end_when_nobody_reads_what_they_print(jobs):
    job = jobs.start(*TWO, "yes")
    wait_for(job, "[0] y")
    job.stdout.close()
    errors = job.stderr.read()
    assert job.wait(TIMEOUT) == 128 + signal.SIGPIPE
    assert errors == "tfdist-run: ended by SIGPIPE.\n"


# Ranks that are stopped.


def test_a_rank_that_is_stopped_for_too_long_ends_the_job(jobs):
    finished = jobs.run(
        "--watchdog_seconds=0.5",
        *TWO,
        *by_rank("trap 'echo told; exit 9' TERM; sleep 1000 & wait", "kill -STOP $$"),
        program=HURRIED,
    )
    assert_said(finished, 75, "rank 1 was frozen (SIGSTOP); the job was ended.")
    assert finished.stdout == "[0] told\n"


def test_a_stopped_rank_that_the_others_watchdog_found_is_named(jobs):
    finished = jobs.run(*TWO, *by_rank("sleep 0.5; exit 75", "kill -STOP $$"), program=HURRIED)
    assert_said(finished, 75, "rank 1 was frozen (SIGSTOP); the job was ended.")


@pytest.mark.parametrize("seconds", ["0", "30"])
def test_a_rank_may_be_stopped_for_a_while(jobs, tmp_path, seconds):
    wake = f"until [ -s {tmp_path}/pid ]; do sleep 0.05; done; sleep 1; kill -CONT $(cat {tmp_path}/pid)"
    finished = jobs.run(
        f"--watchdog_seconds={seconds}",
        *TWO,
        *by_rank(wake, f"echo $$ > {tmp_path}/pid; kill -STOP $$; echo back"),
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "[1] back\n", "")


# What is left. The fixture finds every process that is alive after its test.


@pytest.mark.parametrize(
    ("last", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)],
    ids=["success", "failure", "killed"],
)
def test_children_end_with_their_rank(jobs, last, code):
    finished = jobs.run(*TWO, "sh", "-c", f"sleep 1000 & {last}")
    assert finished.returncode == code


def test_children_in_a_process_group_of_their_own_end_too(jobs):
    child = (
        "import os; os.setpgid(0, 0); print('up', flush=True); os.execlp('sleep', 'sleep', '1000')"
    )
    start = f"import subprocess; subprocess.Popen([{sys.executable!r}, '-ISc', {child!r}]); "
    job = jobs.start(*TWO, *PYTHON, start + "import time; time.sleep(1000)")
    said = wait_for(job, "[0] up", "[1] up")
    job.terminate()
    assert finish(job, said).returncode == 143


def test_ranks_end_when_the_launcher_is_killed(jobs):
    job = jobs.start(*TWO, "sh", "-c", "sleep 1000 & echo up; wait")
    wait_for(job, "[0] up", "[1] up")
    job.kill()
    assert job.wait(TIMEOUT) == -signal.SIGKILL


# How it is called.


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


FAILS_TWICE = 'n=$(cat {0} 2>/dev/null || echo 0); echo $((n+1)) > {0}; [ "$n" -ge 2 ] || exit 3'


def test_a_failed_job_is_started_again(jobs, tmp_path):
    script = by_rank(FAILS_TWICE.format(tmp_path / "starts"), "true")
    job = jobs.run("-np", "2", "--engine=tensorflow", "--max_restarts=2", "--", *script)
    assert job.returncode == 0, job.stderr
    assert "restart 1 of 2 in 1 s" in job.stderr
    assert "restart 2 of 2 in 2 s" in job.stderr
    assert (tmp_path / "starts").read_text().strip() == "3"


def test_too_many_failures_end_the_job(jobs, tmp_path):
    script = by_rank(FAILS_TWICE.format(tmp_path / "starts"), "true")
    job = jobs.run("-np", "2", "--engine=tensorflow", "--max_restarts=1", "--", *script)
    assert job.returncode == 3, job.stderr
    assert (tmp_path / "starts").read_text().strip() == "2"


def test_a_host_that_fails_again_is_left_out(jobs):
    """Both names are this machine's; with one rank there is no second one to fail."""
    job = jobs.run(
        *("-H=localhost:1,127.0.0.1:1", "-np=2", "--min_np=1", "--engine=tensorflow"),
        *("--max_restarts=5", "--restart_seconds=0", "--exclude_after=2", "--"),
        *by_rank("true", "exit 3"),
    )
    assert job.returncode == 0, job.stderr
    assert "the host 127.0.0.1 is left out from now on: its ranks failed 2 times." in job.stderr
    assert job.stderr.count("restart") == 2


def test_the_hosts_say_how_many_ranks(jobs, tmp_path):
    (tmp_path / "hosts").write_text("localhost:1\n")
    # The only rank waits for company; then all end. A rank has a port of five digits.
    count = """$(echo "$TF_CONFIG" | grep -o ':[0-9]\\{5\\}' | wc -l)"""
    script = f"[ {count} -gt 1 ] || {{ echo > {tmp_path}/alone; sleep 60; }}"
    job = jobs.start(
        "-np=2",
        "--min_np=1",
        "--engine=tensorflow",
        f"--host_discovery_script=cat {tmp_path / 'hosts'}",
        "--",
        "sh",
        "-c",
        script,
    )
    end = time.monotonic() + 20
    while not (tmp_path / "alone").exists():
        assert job.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    (tmp_path / "hosts").write_text("localhost\n127.0.0.1:1\n")
    done = finish(job)
    assert done.returncode == 0, done.stderr
    assert "the hosts have changed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--min_np=1"], "--host_discovery_script or --exclude_after"),
        (["--exclude_after=2", "--max_restarts=1"], "needs several hosts"),
        (["--exclude_after=2", "-H=localhost:2"], "is for jobs that are restarted"),
        (["--host_discovery_script=false"], "--host_discovery_script=false"),
        (["--host_discovery_script=echo a:b"], "'a:b'"),
        (["--host_discovery_script=printf '\\377\\376'"], "is not UTF-8 text"),
        (["--host_discovery_script=echo far.invalid:2"], "far.invalid cannot be reached"),
        (["--host_discovery_script=true", "--min_np=3"], "--min_np=3"),
        (["--max_restarts=-1"], "--max_restarts=-1"),
    ],
)
def test_bad_words_about_failures_are_refused(jobs, arguments, said):
    job = jobs.run("-np", "2", "--engine=tensorflow", *arguments, "--", "true")
    assert job.returncode == 2
    (line,) = job.stderr.strip().splitlines()
    assert said in line


def test_a_wrong_setting_ends_the_job_at_once(jobs):
    """What one rank says of a setting is true of the others: none gets time for a verdict."""
    begun = time.monotonic()
    finished = jobs.run("--max_restarts=3", *TWO, *by_rank("exit 2", "exec sleep 60"))
    assert finished.returncode == 2, finished.stderr
    assert "restart" not in finished.stderr
    assert time.monotonic() - begun < 7  # A failure of another kind gets 8 s alone.
