"""A job as an MPIJob of Kubeflow's mpi-operator: pods that wait, and a launcher that starts ranks.

The operator gives all pods a key for ssh, and the launcher a file with the hosts and their slots.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launch.cluster.job_flags import Job
from tfdist.launch.cluster.pods import (
    Pods,
    check_names,
    container,
    environment,
    literal,
    metadata,
    needs,
    pod_template,
)
from tfdist.launch.flag_values import UsageError

_HOSTFILE = "/etc/mpi/hostfile"
_ROOT_SSH = "/root/.ssh"
#: Of what starts the ranks, and is none.
_LAUNCHER_RESOURCES = {"cpu": "1", "memory": "2Gi"}
_WAIT = 'for host; do until getent hosts "$host" > /dev/null; do sleep 1; done; done'


def mpi_job(
    job: Job, pods: Pods, *, launcher: str = "tfdist-run", ssh: str | None = None
) -> dict[str, Any]:
    """Returns the MPIJob; what the job calls a node is a pod.

    Args:
        job: The job.
        pods: Its pods.
        launcher: What starts the ranks: "tfdist-run", or "mpirun" of Open MPI.
        ssh: Where the key is mounted: the folder .ssh of the user of the pods; root's by default.
    """
    check_names(job, f"{job.name}-worker-{job.nodes - 1}")
    if ssh is None:
        if pods.user:
            raise UsageError(
                "Say where the key for ssh goes, --ssh_auth_mount_path=/home/NAME/.ssh of the user "
                f"that the image has. Received: --run_as_user={pods.user} alone."
            )
        ssh = _ROOT_SSH
    as_root = ssh == _ROOT_SSH
    start = _by_mpirun(job, as_root) if launcher == "mpirun" else _by_tfdist_run(job)
    run_policy: dict[str, Any] = {"cleanPodPolicy": "Running", "backoffLimit": job.max_restarts}
    if job.seconds is not None:
        run_policy["activeDeadlineSeconds"] = job.seconds
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": metadata(job, pods),
        "spec": {
            "slotsPerWorker": job.ranks_per_node,
            "mpiImplementation": "OpenMPI",
            "sshAuthMountPath": ssh,
            # Before the workers are there it could only fail to reach them.
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": run_policy,
            "mpiReplicaSpecs": {
                "Launcher": _launcher(job, pods, *start),
                "Worker": _worker(job, pods, ssh),
            },
        },
    }


def _hosts(job: Job) -> list[str]:
    """The workers' names, as the operator gives them; ranks are put on them in this order."""
    return [f"{job.name}-worker-{index}.{job.name}" for index in range(job.nodes)]


def _worker(job: Job, pods: Pods, ssh: str) -> dict[str, Any]:
    command = ["/usr/sbin/sshd", "-De"]
    if ssh != _ROOT_SSH:
        # A user other than root has settings of its own; the operator's images keep them here.
        command += ["-f", posixpath.join(posixpath.dirname(ssh), ".sshd_config")]
    room = needs(job, pods, job.ranks_per_node)
    worker = container(pods, "worker", command, resources=room)
    template = pod_template(job, pods, worker)
    return {"replicas": job.nodes, "restartPolicy": "OnFailure", "template": template}


def _launcher(
    job: Job, pods: Pods, command: Sequence[str], variables: Mapping[str, str]
) -> dict[str, Any]:
    launcher = container(
        pods,
        "launcher",
        [literal(word) for word in [*command, *job.command]],
        env=environment(variables),
        directory=job.directory,
        resources=_LAUNCHER_RESOURCES,
    )
    # ssh to a host that has no name yet fails at once.
    waiting = container(
        pods,
        "wait-for-workers",
        ["sh", "-c", literal(_WAIT), "wait-for-workers", *_hosts(job)],
        resources=_LAUNCHER_RESOURCES,
    )
    template = pod_template(job, pods, launcher, first=[waiting])
    # Each start is a pod with a log of its own.
    return {"replicas": 1, "restartPolicy": "Never", "template": template}


def _by_tfdist_run(job: Job) -> tuple[list[str], dict[str, str]]:
    """The beginning of the command that starts the ranks, and its variables, which they get."""
    hosts = ",".join(f"{host}:{job.ranks_per_node}" for host in _hosts(job))
    words = ["tfdist-run", "-np", str(job.num_ranks), "-H", hosts]
    return [*words, f"--save_seconds={job.save_seconds}", "--"], job.variables


def _by_mpirun(job: Job, as_root: bool) -> tuple[list[str], dict[str, str]]:
    """The same with Open MPI's mpirun, which gives ranks no time to save after a SIGTERM."""
    # Where ranks meet that have no MPI of their own: mpirun puts the first on the first host.
    variables = {"MASTER_ADDR": _hosts(job)[0], **job.variables}
    words = ["mpirun", *(["--allow-run-as-root"] if as_root else [])]
    words += ["-np", str(job.num_ranks), "--hostfile", _HOSTFILE]
    # A rank uses more than one core; what it prints comes behind its number.
    words += ["--map-by", "slot", "--bind-to", "none", "--tag-output"]
    for name in dict.fromkeys(["PATH", "LD_LIBRARY_PATH", *variables]):
        words += ["-x", name]
    return words + (["--wdir", job.directory] if job.directory is not None else []), variables
