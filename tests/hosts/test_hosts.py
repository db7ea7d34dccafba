"""Jobs on hosts that share nothing: their network, their folders and their ssh are their own."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time

import pytest

from tests.conftest import skip_without
from tests.hosts.cluster import SCRIPTS, Cluster, why_not

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=f"Hosts cannot be played: {why_not()}."),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

ENGINES = ["horovod", "tensorflow"]
HOSTS = ["-np", "4", "-H", "host1:2,host2:2"]
TRAIN = [
    SCRIPTS / "tfdist-train",
    "--model=mlp",
    "--dataset=digits",
    "--threads=1",
    "--verbose=2",
]
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "PATH": f"{SCRIPTS}:/usr/sbin:/usr/bin:/sbin:/bin"}


@pytest.fixture(scope="module")
def cluster():
    with Cluster(2) as found:
        yield found


def tfdist_run(engine: str, *flags) -> list:
    return [SCRIPTS / "tfdist-run", f"--engine={engine}", *HOSTS, *flags, "--"]


def losses(said: str) -> list[float]:
    """The chief's, by epoch."""
    return [float(n) for n in re.findall(r"^\[0\].* - loss: ([0-9.]+)", said, re.MULTILINE)]


def of_one_process(*flags: str) -> list[float]:
    """The losses of one process."""
    command = [str(word) for word in [*TRAIN, *flags]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [float(n) for n in re.findall(r" - loss: ([0-9.]+)", done.stdout)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return of_one_process()


@pytest.mark.parametrize("engine", ENGINES)
def test_tfdist_run_trains_as_one_process(cluster, alone, engine):
    skip_without(engine)
    done = cluster.hosts[0].run(*tfdist_run(engine), *TRAIN, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stdout
    assert losses(done.stdout) == pytest.approx(alone, abs=2e-4)
    assert "4 rank(s)" in done.stdout


def test_horovodrun_trains_as_one_process(cluster, alone):
    skip_without("horovod")
    horovodrun = [SCRIPTS / "horovodrun", "--gloo", *HOSTS]
    done = cluster.hosts[0].run(*horovodrun, *TRAIN, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stdout
    said = re.findall(r"\[0\]<stdout>:.* - loss: ([0-9.]+)", done.stdout)
    assert [float(n) for n in said] == pytest.approx(alone, abs=2e-4)


def test_each_rank_is_where_it_was_sent(cluster):
    where = ["sh", "-c", "echo $(hostname) $(pwd) $(ls)"]
    for host in cluster.hosts:
        (host.folder / f"of-{host.name}").touch()
    done = cluster.hosts[0].run(*tfdist_run("tensorflow"), *where, environment=ENVIRONMENT)
    lines = sorted(done.stdout.splitlines())
    assert done.returncode == 0, done.stdout
    for rank, line in enumerate(lines):
        name = f"host{1 + rank // 2}"
        assert line.startswith(f"[{rank}] {name} ") and line.endswith(f" of-{name}"), done.stdout


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("exit 5", 5, "rank 2 on host2 failed first, with exit code 5"),
        ("kill -9 $$", 137, "rank 2 on host2 was killed by SIGKILL"),
    ],
)
def test_a_rank_elsewhere_that_fails_is_named(cluster, script, code, words):
    rank = "${TF_CONFIG##*'\"index\": '}"
    ranks = ["sh", "-c", f"rank={rank}; [ ${{rank%%\\}}*}} = 2 ] || sleep 100; sleep 1; {script}"]
    done = cluster.hosts[0].run(*tfdist_run("tensorflow"), *ranks, environment=ENVIRONMENT)
    assert (done.returncode, words in done.stdout) == (code, True), done.stdout
    assert no_rank_is_left(cluster)


def test_a_signal_reaches_the_ranks_elsewhere(cluster):
    script = "trap 'echo told; exit 7' TERM; echo up; while :; do sleep 0.1; done"
    job = cluster.hosts[0].start(
        *tfdist_run("tensorflow"), "sh", "-c", script, environment=ENVIRONMENT
    )
    said = [job.stdout.readline() for _ in range(4)]
    assert sorted(said) == [f"[{rank}] up\n" for rank in range(4)]
    cluster.hosts[0].run("pkill", "-TERM", "-f", "bin/tfdist-run")
    rest, _ = job.communicate(timeout=60)
    assert sorted(re.findall(r"\[(\d)\] told", rest)) == list("0123"), rest
    assert job.returncode == 128 + signal.SIGTERM
    assert no_rank_is_left(cluster)


def test_ranks_elsewhere_end_with_their_launcher(cluster):
    job = cluster.hosts[0].start(
        *tfdist_run("tensorflow"), "sh", "-c", "echo up; exec sleep 1000", environment=ENVIRONMENT
    )
    for _ in range(4):
        job.stdout.readline()
    cluster.hosts[0].run("pkill", "-KILL", "-f", "bin/tfdist-run")
    job.wait(60)
    assert no_rank_is_left(cluster)


def test_a_host_that_is_not_there_is_one_line(cluster):
    command = [SCRIPTS / "tfdist-run", "-np=2", "-H", "host1:1,host9:1", "--", "true"]
    done = cluster.hosts[0].run(*command, environment=ENVIRONMENT)
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert line.startswith("tfdist-run: The host host9 cannot be reached"), line


def training(cluster, engine: str, *flags):
    """Starts a long training on both hosts, and waits until it is under way."""
    long = [*TRAIN, "--epochs=400", "--watchdog_seconds=20", *flags]
    job = cluster.hosts[0].start(
        *tfdist_run(engine, "--watchdog_seconds=20"), *long, environment=ENVIRONMENT
    )
    return job, read_until(job, "Epoch 5/")


def rest_of(job, seconds: float) -> str:
    """What a job says until it ends, which it does within so many seconds."""
    timer = threading.Timer(seconds, job.kill)
    timer.start()
    try:
        return job.communicate()[0]
    finally:
        timer.cancel()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cable_that_is_out_for_five_seconds(cluster, engine):
    skip_without(engine)
    job, said = training(cluster, engine, "--epochs=60")
    cluster.cut(cluster.hosts[1])
    time.sleep(5)
    cluster.mend(cluster.hosts[1])
    text = said + rest_of(job, 200)
    assert job.returncode == 0, text
    assert "Epoch 60/60" in text


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cable_that_stays_out_ends_the_job(cluster, engine):
    skip_without(engine)
    job, said = training(cluster, engine)
    begun = time.monotonic()
    cluster.cut(cluster.hosts[1])
    try:
        text = said + rest_of(job, 120)
    finally:
        cluster.mend(cluster.hosts[1])
    assert job.returncode not in (0, None, -9), text
    assert time.monotonic() - begun < 60, text
    assert re.search(r"ranks? (2|3|2, 3|\[2, 3\])", text) or "host2" in text, text
    assert no_rank_is_left(cluster)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_slow_cable_loses_nothing(cluster, alone, engine):
    skip_without(engine)
    cluster.shape("50mbit")
    try:
        done = cluster.hosts[0].run(*tfdist_run(engine), *TRAIN, environment=ENVIRONMENT)
    finally:
        cluster.shape(None)
    assert done.returncode == 0, done.stdout
    assert losses(done.stdout) == pytest.approx(alone, abs=2e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_host_that_dies_ends_the_job(engine):
    skip_without(engine)
    with Cluster(2) as cluster:
        job, said = training(cluster, engine)
        cluster.hosts[1].kill()
        text = said + rest_of(job, 120)
        assert job.returncode not in (0, None, -9), text
        assert re.search(r"[Rr]ank [23]", text) and "host2" in text, text


@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_goes_on_after_ranks_elsewhere_were_killed(cluster, alone, engine, tmp_path):
    skip_without(engine)
    job = cluster.hosts[0].start(
        *tfdist_run(engine, "--max_restarts=1", "--restart_seconds=1"),
        *TRAIN,
        f"--workdir={tmp_path}",
        "--save_every=10",
        environment=ENVIRONMENT,
    )
    said = read_until(job, "Epoch 8/")
    cluster.hosts[1].run("pkill", "-KILL", "-f", "bin/tfdist-train")
    text = said + rest_of(job, 200)
    assert job.returncode == 0, text
    assert re.search(r"rank [23] on host2 was killed by SIGKILL", text), text
    _, restarted, rest = text.partition("restart 1 of 1")
    assert restarted and "Epoch 15/15" in rest and "Epoch 1/" not in rest, text
    assert losses(rest) == pytest.approx(alone[-len(losses(rest)) :], abs=2e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_host_joins_a_job_and_dies(engine, tmp_path):
    skip_without(engine)
    hosts, length = tmp_path / "hosts", "--epochs=60"
    hosts.write_text("host1:2\n")
    elastic = [f"--host_discovery_script=cat {hosts}", "--min_np=2", "-np=4"]
    with Cluster(2) as cluster:
        job = cluster.hosts[0].start(
            *[SCRIPTS / "tfdist-run", f"--engine={engine}", *elastic, "--"],
            *[*TRAIN, length, f"--workdir={tmp_path}/saved", "--save_every=10"],
            environment=ENVIRONMENT,
        )
        said = read_until(job, "Epoch 5/")
        hosts.write_text("host1:2\nhost2:2\n")
        said += read_until(job, "the hosts have changed") + read_until(job, "Epoch ")
        cluster.hosts[1].kill()
        hosts.write_text("host1:2\n")
        rest = rest_of(job, 200)
    assert job.returncode == 0, said + rest
    assert "[3] " in said, said
    assert "restart 1" in rest and "2 rank(s)" in rest and "Epoch 1/" not in rest, said + rest
    expected = of_one_process(length)
    for part in (said, rest):
        for epoch, loss in re.findall(r"\[0\] Epoch (\d+)/60\n\[0\].* - loss: ([0-9.]+)", part):
            assert float(loss) == pytest.approx(expected[int(epoch) - 1], abs=2e-4), said + rest
    assert losses(rest)[-1] == pytest.approx(expected[-1], abs=2e-4)


def read_until(job, words: str) -> str:
    """What a job says up to the line with these words."""
    said = []
    for line in job.stdout:
        said.append(line)
        if words in line:
            return "".join(said)
    raise AssertionError("".join(said))


def no_rank_is_left(cluster, seconds: float = 15) -> bool:
    """Whether no process of a job runs on any host, or soon will not."""
    end = time.monotonic() + seconds
    looked = ["pgrep", "-f", "remote_rank|tfdist-train|sleep 1000|sleep 100$"]
    while time.monotonic() < end:
        if all(host.run(*looked).returncode for host in cluster.hosts):
            return True
        time.sleep(0.3)
    return False
