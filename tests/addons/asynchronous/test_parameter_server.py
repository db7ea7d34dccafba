"""Parameter servers: real servers and workers, what they count, and what they survive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.addons.asynchronous import programs
from tests.addons.asynchronous.runs import JOB, ROOT, run, start
from tfdist.addons.asynchronous import ParameterServerStrategy
from tfdist.runtime.rendezvous import free_ports


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", list(programs.CASES))
def test_one_worker_is_one_process(one_process, case):
    difference, updates, steps = one_process.run(programs.compare, case, timeout=100)[0]
    assert difference <= 1e-6
    assert all(count == [steps] for count in updates)


def test_rows_alone_travel_of_a_table(one_process):
    read, rows_read = one_process.run(programs.bytes_read, timeout=100)[0]
    # The table has 5,000 rows, a batch at most 24 different ones.
    assert read < 5_000 and 0 < rows_read <= 24


def test_making_one_starts_nothing():
    def listening():
        return {
            each.laddr for each in psutil.Process().net_connections() if each.status == "LISTEN"
        }

    threads, ports = threading.active_count(), listening()
    strategy = ParameterServerStrategy(2)
    assert strategy.is_chief and strategy.num_workers == 1
    assert (threading.active_count(), listening()) == (threads, ports)


def test_what_cannot_work_is_refused_with_a_way_out(one_process):
    for message, way_out in one_process.run(programs.refusals, timeout=100)[0]:
        assert way_out in message, message


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_workers_one_of_them_slow(tmp_path):
    """No step begins more than s steps ahead, and each update is applied once."""
    code, output, found = run(tmp_path, np=3, staleness=2, epochs=2, slow=1, step_seconds=0.01)
    assert code == 0, output
    assert sorted(found) == [0, 1, 2], output
    assert max(max(each["ahead"]) for each in found.values()) <= 2
    # The fast ones did have to wait for the slow one.
    assert max(found[0]["ahead"]) == 2
    steps = [found[worker]["steps"] for worker in range(3)]
    assert steps == [40, 40, 40]
    for each in found.values():
        assert each["updates"] == [steps]
        assert each["weights"] == pytest.approx(found[0]["weights"], abs=0)
        # In a step of the slow one the others make some.
        assert max(found[1]["history"]["staleness_max"]) >= 2
        assert min(each["history"]["staleness_mean"]) >= 0
    assert found[0]["iterations"] == sum(steps)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_servers_and_delay_compensation(tmp_path):
    code, output, found = run(tmp_path, np=2, ps=2, epochs=3, compensation=0.1)
    assert code == 0, output
    assert found[0]["updates"] == [[90, 90], [90, 90]]
    assert found[0]["history"]["loss"][-1] < found[0]["history"]["loss"][0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_does_not_stop_the_others(tmp_path):
    dies = 1
    code, output, found = run(
        tmp_path, np=3, staleness=2, epochs=2, dies=dies, timeout=270, step_seconds=0.01
    )
    assert code == 0, output
    assert f"rank {dies} was killed by SIGKILL; the others continue" in output
    assert sorted(found) == sorted({0, 1, 2} - {dies}), output
    updates = found[0]["updates"][0]
    for worker in found:
        assert updates[worker] == found[worker]["steps"] == 40
    assert updates[dies] in (8, 9)
    assert found[0]["iterations"] == sum(updates)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_reaches_97_percent_of_the_digits(tmp_path):
    code, output, found = run(
        tmp_path, np=3, staleness=4, epochs=25, digits=True, batch_size=32, timeout=270
    )
    assert code == 0, output
    assert found[0]["accuracy"] >= 0.97


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_beside_a_slow_worker_there_are_more_samples_per_second(tmp_path):
    """One of three workers is slowed four times: the others do not wait, as ranks in step do."""
    rates = {}
    options = {"slow": 1, "step_seconds": 0.05}
    for name, kind in (("sync", {"synchronous": True, "ps": 0}), ("async", {"staleness": None})):
        folder = tmp_path / name
        folder.mkdir()
        # As many samples of a worker's step as of a rank's: 8, out of 24 in step.
        size = 24 if name == "sync" else 8
        code, output, found = run(
            folder, np=3, epochs=2, timeout=280, batch_size=size, **options, **kind
        )
        assert code == 0, output
        # While all are at work: what each did per second until it was done.
        if name == "sync":
            rates[name] = 2 * 960 * 79 / 80 / max(each["seconds"] for each in found.values())
        else:
            rates[name] = sum((each["steps"] - 1) * 8 / each["seconds"] for each in found.values())
    assert rates["async"] >= 1.7 * rates["sync"], rates


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_is_killed_ends_the_job_by_its_name(tmp_path):
    job = start(tmp_path, np=2, ps=2, epochs=1000, step_seconds=0.02)
    try:
        wait_for(lambda: (tmp_path / "steps0").exists(), job)
        servers = [
            child
            for child in psutil.Process(job.pid).children(recursive=True)
            if "tfdist.launch.parameter_server" in child.cmdline()
        ]
        second = min(servers, key=lambda each: '"index": 1' not in each.environ()["TF_CONFIG"])
        begun = time.monotonic()
        second.send_signal(signal.SIGKILL)
        output, _ = job.communicate(timeout=60)
    finally:
        job.terminate()
    assert time.monotonic() - begun < 40
    assert job.returncode == 128 + signal.SIGKILL
    assert "parameter server 1 was killed by SIGKILL; the job was ended." in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_comes_back(tmp_path):
    """One that is held still is left out, the others go on, and it takes part again."""
    job = start(tmp_path, np=2, staleness=1, epochs=12, step_seconds=0.02, timeout=3.0)
    try:
        wait_for(lambda: all((tmp_path / f"steps{worker}").exists() for worker in range(2)), job)
        worker = next(
            child
            for child in psutil.Process(job.pid).children(recursive=True)
            if str(JOB) in child.cmdline() and '"index": 1' in child.environ()["TF_CONFIG"]
        )
        worker.suspend()
        before = steps_of(tmp_path, 0)
        wait_for(lambda: steps_of(tmp_path, 0) > before + 20, job)
        worker.resume()
        output, _ = job.communicate(timeout=200)
    finally:
        job.terminate()
    assert job.returncode == 0, output
    assert "worker 1 has sent no heartbeat" in output and "worker 1 takes part again" in output
    found = json.loads((tmp_path / "worker0.json").read_text())
    assert found["updates"] == [[360, 360]] and max(found["ahead"]) <= 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_is_started_again_goes_on(tmp_path):
    """Without a launcher, from TF_CONFIG alone: the servers too run the script of the workers."""
    ports = iter(free_ports(3))
    addresses = {job: [f"127.0.0.1:{next(ports)}" for _ in range(n)] for job, n in JOBS}
    options = json.dumps({"epochs": 4, "staleness": 3, "dies": 1, "step_seconds": 0.05})

    def begin(job: str, index: int) -> subprocess.Popen:
        config = {"cluster": addresses, "task": {"type": job, "index": index}}
        return subprocess.Popen(
            [sys.executable, str(JOB), str(tmp_path), options],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CONFIG": json.dumps(config)},
        )

    processes = [begin(job, index) for job, n in JOBS for index in range(n)]
    try:
        assert processes[2].wait(150) == -signal.SIGKILL
        processes.append(begin("worker", 1))
        assert [processes[place].wait(200) for place in (3, 1, 0)] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
    found = [json.loads((tmp_path / f"worker{index}.json").read_text()) for index in range(2)]
    # It died in its first epoch of 30 steps, which it makes again.
    assert found[1]["steps"] == found[0]["steps"] == 4 * 30
    assert found[0]["updates"][0][0] == 120
    assert 128 <= found[0]["updates"][0][1] <= 129
    assert max(found[0]["ahead"]) <= 3 and max(found[1]["ahead"]) <= 3


#: How many processes of each kind.
JOBS = (("ps", 1), ("worker", 2))


def steps_of(folder, worker: int) -> int:
    """How many steps a worker has made, as it last wrote down."""
    return int((folder / f"steps{worker}").read_text() or 0)


def wait_for(condition, job, seconds=150.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("sizes", "servers", "most"),
    [([8, 7, 6, 5, 4], 2, 17), ([1], 3, 1), ([], 2, 0), ([5, 5, 5, 5], 4, 5)],
)
def test_bytes_are_balanced(sizes, servers, most):
    from tfdist.addons.asynchronous.placement import balance

    places = balance(sizes, servers)
    loads = [
        sum(size for size, place in zip(sizes, places, strict=True) if place == server)
        for server in range(servers)
    ]
    assert max(loads) == most


@pytest.mark.parametrize(
    "config",
    [
        "{",
        '{"cluster": {"ps": ["a:1"]}, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"ps": ["a:1"], "worker": ["a:2"]}, "task": {"type": "worker", "index": 1}}',
        '{"cluster": {"ps": ["a:1"], "worker": ["a:2"]}, "task": {"type": "ps", "index": 1}}',
        '{"cluster": {"ps": ["a:1"], "worker": ["a:2"]}, "task": {"type": "ps", "index": -1}}',
        '{"cluster": {"ps": ["a:1"], "worker": ["a:2"]}}',
    ],
)
def test_a_wrong_tf_config_is_shown(monkeypatch, config):
    from tfdist.addons.asynchronous.cluster import cluster_from_environment

    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ValueError, match="TF_CONFIG is not of the form"):
        cluster_from_environment()


@pytest.mark.parametrize(
    "flag",
    [
        "--sync_every=20",
        "--save_every=60s",
        "--compression=int8",
        "--communication_dtype=bfloat16",
        "--tensor=2",
        "--zero_stage=1",
    ],
)
def test_the_launcher_refuses_what_servers_do_not_do(flag):
    """In one line that names the flag, before TensorFlow is imported."""
    words = ["-m", "tfdist.launch.train.main", "--model=gpt", "--strategy=parameter_server", flag]
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert flag.partition("=")[0] in done.stderr


@pytest.mark.parametrize(
    ("config", "has_servers"),
    [
        ('{"cluster": {"ps": [], "worker": ["a:2"]}, "task": {"type": "worker", "index": 0}}', 0),
        (
            '{"cluster": {"ps": ["a:1"], "chief": ["a:2"]}, "task": {"type": "chief", "index": 0}}',
            1,
        ),
    ],
)
def test_servers_are_those_that_tf_config_names(monkeypatch, config, has_servers):
    from tfdist.addons.asynchronous.cluster import cluster_from_environment

    monkeypatch.setenv("TF_CONFIG", config)
    found = cluster_from_environment()
    assert (found is not None) == has_servers
    if found is not None:
        assert (found.servers, found.num_workers, found.job, found.index) == (
            ("a:1",),
            1,
            "worker",
            0,
        )
