"""Platforms that start one process on each node: what it knows of the others, and its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import skip_without
from tests.launch.processes import BIN
from tfdist.launch.run.nodes import environments_on
from tfdist.runtime.nodes import Nodes, find_nodes
from tfdist.runtime.rendezvous import free_ports
from tfdist.runtime.schedulers import meeting_point, started_by_scheduler

KUBEFLOW = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}
POOLS = {"workerpool0": ["first-0:2222"], "workerpool1": ["second-0:2222", "second-1:2222"]}
VERTEX = {
    "CLUSTER_SPEC": json.dumps(
        {"cluster": POOLS, "environment": "cloud", "task": {"type": "workerpool1", "index": 1}}
    )
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
SAYS = """
import sys
import tfdist, tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(1)
group = tfdist.strategies.auto().group()
total = tfdist.collectives.all_reduce(tf.constant(2.0 ** group.rank), group, name="total")
print(group.rank, group.size, int(total), flush=True)
"""


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (KUBEFLOW, Nodes("Kubeflow Trainer", 2, 3, "job-node-0-0.job", 29400, 4)),
        (
            KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"},
            Nodes("Kubeflow Trainer", 2, 3, "job-node-0-0.job", 29400),
        ),
        (
            KUBEFLOW | {"PET_NNODES": "1", "PET_NODE_RANK": "0"},
            Nodes("Kubeflow Trainer", 0, 1, "job-node-0-0.job", 29400, 4),
        ),
        (SAGEMAKER, Nodes("SageMaker", 1, 2, "algo-1", 7777)),
        (VERTEX, Nodes("Vertex AI", 2, 3, "first-0", 2222)),
        ({"PET_NNODES": "3"}, None),
        ({}, None),
    ],
)
def test_what_a_node_knows(environment, found):
    assert find_nodes(environment) == found


@pytest.mark.parametrize(
    "environment",
    [
        KUBEFLOW | {"PET_NNODES": "1:3"},
        KUBEFLOW | {"PET_NODE_RANK": ""},
        KUBEFLOW | {"PET_NODE_RANK": "3"},
        KUBEFLOW | {"PET_NODE_RANK": "-1"},
        SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"},
        SAGEMAKER | {"SM_HOSTS": "algo-1"},
        {"CLUSTER_SPEC": "{}"},
        {"CLUSTER_SPEC": "[]"},
        {"CLUSTER_SPEC": '{"cluster": {"workerpool0": []}, "task": {"type": "", "index": 0}}'},
        {
            "CLUSTER_SPEC": json.dumps(
                {"cluster": POOLS, "task": {"type": "workerpool3", "index": 0}}
            )
        },
    ],
)
def test_malformed_variables_are_named(environment):
    with pytest.raises(ValueError, match=r"must be valid\. Received: (PET_|SM_|CLUSTER)"):
        find_nodes(environment)
    done = run_node(environment, "true")
    said = done.communicate(timeout=60)[0]
    assert done.returncode == 2 and len(said.splitlines()) == 1, said


def test_ranks_of_a_node():
    nodes = find_nodes(KUBEFLOW)
    assert [each["RANK"] for each in environments_on(nodes, 4)] == ["8", "9", "10", "11"]
    started = [started_by_scheduler(each) for each in environments_on(nodes, 4)]
    assert {(each.launcher, each.size, each.local_size) for each in started} == {
        ("torchrun", 12, 4)
    }
    assert meeting_point(started[0], environments_on(nodes, 4)[0]) == ("job-node-0-0.job", 29400)


def test_a_node_is_a_rank_without_a_launcher():
    started = started_by_scheduler(SAGEMAKER)
    assert (started.rank, started.size, started.local_size) == (1, 2, 1)
    assert meeting_point(started, SAGEMAKER) == ("algo-1", 7777)
    assert meeting_point(started, SAGEMAKER | {"MASTER_PORT": "1234"}) == ("algo-1", 1234)


def test_another_port_than_that_of_the_platform(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1234")
    (rank,) = environments_on(find_nodes(SAGEMAKER), 1)
    assert meeting_point(started_by_scheduler(rank), rank) == ("algo-1", 1234)


ONE_POOL = {"workerpool0": ["first-0:2222"]}


@pytest.mark.parametrize(
    ("environment", "flags", "ranks"),
    [
        (KUBEFLOW | {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"}, [], 2),
        (
            KUBEFLOW | {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "3"},
            ["-np", "2", "--engine=tensorflow"],
            2,
        ),
        (
            {
                "CLUSTER_SPEC": json.dumps(
                    {"cluster": ONE_POOL, "task": {"type": "workerpool0", "index": 0}}
                ),
                "TF_CONFIG": json.dumps(
                    {"cluster": {"chief": ["first-0:2222"]}, "task": {"type": "chief", "index": 0}}
                ),
            },
            ["-np", "2"],
            2,
        ),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, [], os.cpu_count()),
    ],
    ids=["kubeflow", "flags", "vertex", "sagemaker"],
)
def test_the_ranks_of_the_only_node(environment, flags, ranks):
    assert started_by_scheduler(environment) is None
    (said,) = finish([run_node(environment, sys.executable, "-c", SAYS, flags=flags)])
    total = 2**ranks - 1
    for rank in range(ranks):
        assert f"[{rank}] {rank} {ranks} {total}" in said, said


def test_torchrun():
    started = started_by_scheduler(TORCHRUN)
    assert (started.rank, started.size, started.local_size) == (5, 8, 4)
    assert meeting_point(started, TORCHRUN) == ("head", 29500)
    # torchrun's agent listens at the port.
    agent = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    host, port = meeting_point(started, agent)
    assert host == "head" and 12_000 <= port < 20_000
    again = agent | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert meeting_point(started, again)[1] != port
    # Without the address these are not torchrun's.
    assert started_by_scheduler({"RANK": "1", "WORLD_SIZE": "2"}) is None


def run_node(variables: dict[str, str], *command: str, flags=()) -> subprocess.Popen:
    return subprocess.Popen(
        [os.path.join(BIN, "tfdist-run"), *flags, "--", *command],
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(jobs: list[subprocess.Popen]) -> list[str]:
    try:
        return [job.communicate(timeout=120)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()


def at_this_machine(node: int, ranks: int) -> dict[str, str]:
    return KUBEFLOW | {
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(node),
        "PET_NPROC_PER_NODE": str(ranks),
        "PET_MASTER_ADDR": "127.0.0.1",
    }


def test_the_nodes_of_a_train_job_meet():
    """Two nodes of two ranks each, as Kubeflow's runtime for PyTorch starts them."""
    port = {"PET_MASTER_PORT": str(free_ports(1)[0])}
    jobs = [
        run_node(at_this_machine(node, 2) | port, sys.executable, "-c", SAYS) for node in range(2)
    ]
    said = finish(jobs)
    for node, text in enumerate(said):
        assert (
            f"Kubeflow Trainer says node {node} of 2: ranks {2 * node} to {2 * node + 1} of 4."
            in text
        )
        for rank in (2 * node, 2 * node + 1):
            assert f"[{rank}] {rank} 4 15" in text, text


def test_one_process_for_several_ranks_is_refused():
    job = subprocess.Popen(
        [sys.executable, "-c", SAYS],
        env={**os.environ, **at_this_machine(0, 2)},
        stderr=subprocess.PIPE,
        text=True,
    )
    said = job.communicate(timeout=120)[1]
    assert job.returncode == 1 and "Each node must have 2 ranks" in said and "tfdist-run" in said


@pytest.mark.slow
@pytest.mark.parametrize("way", ["engine", "ps"])
def test_flags_that_a_node_cannot_follow(way):
    job = subprocess.Popen(
        [
            os.path.join(BIN, "tfdist-run"),
            f"--{way}={'horovod' if way == 'engine' else 1}",
            "--",
            "true",
        ],
        env={**os.environ, **at_this_machine(0, 2)},
        stderr=subprocess.PIPE,
        text=True,
    )
    said = job.communicate(timeout=60)[1]
    assert job.returncode == 2 and "is not supported on the nodes of Kubeflow Trainer" in said


@pytest.mark.slow
def test_real_torchrun():
    torchrun = Path(__file__).parents[2] / ".peers" / "torch" / "bin" / "torchrun"
    if not torchrun.exists():
        pytest.skip("torchrun is not installed: `make peers` makes its environment.")
    skip_without("horovod")
    command = [torchrun, "--nproc-per-node=2", f"--master-port={free_ports(1)[0]}", "--no-python"]
    job = subprocess.Popen(
        [*command, sys.executable, "-c", SAYS], stdout=subprocess.PIPE, text=True
    )
    (said,) = finish([job])
    assert sorted(said.split("\n"))[-2:] == ["0 2 3", "1 2 3"], said
