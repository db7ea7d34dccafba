"""Ranks that mpirun or srun started: what they know of themselves, and how they meet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.conftest import skip_without
from tfdist.runtime.schedulers import Started, meeting_point, started_by_scheduler

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}
STEP = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "4000"}
SAYS = """
import sys
import tfdist, tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(1)
kind = getattr(tfdist.strategies, sys.argv[1]) if len(sys.argv) > 1 else tfdist.strategies.auto
strategy = kind(watchdog_seconds=60.0)
group = strategy.group()
total = tfdist.collectives.all_reduce(tf.constant(10.0 ** group.rank), group, name="total")
print(type(strategy).__name__, group.rank, group.size, int(total), flush=True)
"""


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (OPEN_MPI, Started("mpirun", 2, 4, 2)),
        (MPICH, Started("mpiexec", 2, 4, 4)),
        (STEP, Started("srun", 2, 4, None)),
        # A step of one task, as an interactive shell is, and the script of a batch job.
        (STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
        ({}, None),
        # Slurm's plugin for PMI-2 sets these, too; processes that start those of hydra have other numbers.
        (STEP | {"PMI_RANK": "2", "PMI_SIZE": "4"}, Started("srun", 2, 4, None)),
        (STEP | MPICH | {"SLURM_PROCID": "1"}, Started("mpiexec", 2, 4, 4)),
        # One rank in a task of another job.
        (STEP | TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, None),
        (STEP | TORCHRUN, Started("torchrun", 1, 2, None)),
    ],
)
def test_what_a_rank_knows_of_itself(environment, found):
    assert started_by_scheduler(environment) == found


def test_where_the_first_rank_waits():
    address, port = meeting_point(started_by_scheduler(STEP), STEP)
    assert address == "node07" and 12_000 <= port < 20_000
    other = STEP | {"SLURM_JOB_ID": "13"}
    assert meeting_point(started_by_scheduler(other), other)[1] != port
    said = OPEN_MPI | {"MASTER_ADDR": "head", "MASTER_PORT": "4000"}
    assert meeting_point(started_by_scheduler(said), said) == ("head", 4000)
    assert meeting_point(started_by_scheduler(MPICH), MPICH)[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("WORLD_SIZE", text) for text in ("", "two", "-1", "0", "1.5", "9" * 30)),
        *(("RANK", text) for text in ("", "2", "-1", "\u0662")),
        *(("LOCAL_WORLD_SIZE", text) for text in ("", "0")),
        *(("MASTER_PORT", text) for text in ("", "auto", "0", "65536")),
    ],
)
def test_malformed_variables_are_named(name, text):
    given = TORCHRUN | {name: text}
    with pytest.raises(ValueError, match=f"`{name}` must be an int .*Received: {name}="):
        meeting_point(started_by_scheduler(given), given)


def test_nobody_says_where_the_first_rank_is():
    with pytest.raises(ValueError, match=r"rank 2 of 4 on several hosts.*Set MASTER_ADDR"):
        meeting_point(started_by_scheduler(OPEN_MPI), OPEN_MPI)


@pytest.mark.parametrize(
    ("engine", "strategy"),
    [
        ("horovod", "HorovodStrategy"),
        pytest.param("tensorflow", "MultiWorkerStrategy", marks=pytest.mark.slow),
    ],
)
def test_ranks_with_the_variables_of_mpirun_meet(engine, strategy):
    skip_without(engine)
    jobs = []
    for rank in range(2):
        variables = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
        environment = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in variables.items()}
        jobs.append(
            subprocess.Popen(
                [sys.executable, "-c", SAYS, *([strategy] if engine == "tensorflow" else [])],
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [job.communicate(timeout=120)[0].strip() for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert said == [f"{strategy} {rank} 2 11" for rank in range(2)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun():
    skip_without("horovod")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    done = subprocess.run(
        [*command, sys.executable, "-c", SAYS], capture_output=True, text=True, timeout=120
    )
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("Horovod"))
    assert lines == [f"HorovodStrategy {rank} 2 11" for rank in range(2)], done.stderr
