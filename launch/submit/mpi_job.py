"""A job as an MPIJob of Kubeflow's mpi-operator: worker pods, and a launcher that starts ranks.

The operator gives all pods an ssh key, and the launcher a file with the hosts and their slots.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launch.flags.values import UsageError
from tfdist.launch.submit.job_flags import Job
from tfdist.launch.submit.pods import (
    Pods,
    check_names,
    container,
    environment,
    literal,
    metadata,
    needs,
    pod_template,
)

_HOSTFILE = "/etc/mpi/hostfile"
_ROOT_SSH = "/root/.ssh"
#: Resources of the launcher, which is not a rank.
_LAUNCHER_RESOURCES = {"cpu": "1", "memory": "2Gi"}
_WAIT = 'for host; do until getent hosts "$host" > /dev/null; do sleep 1; done; done'


def mpi_job(
    job: Job, pods: Pods, *, launcher: str = "tfdist-run", ssh: str | None = None
) -> dict[str, Any]:
    """The MPIJob, in which each node of the job is a pod.

    Args:
        job: The job.
        pods: The settings of its pods.
        launcher: The program that starts the ranks: "tfdist-run", or "mpirun" of Open MPI.
        ssh: The path at which the key is mounted: the folder .ssh of the pods' user; root's by default.
    """
    check_names(job, f"{job.name}-worker-{job.nodes - 1}")
    if ssh is None:
        if pods.user:
            raise UsageError(
                "--run_as_user requires --ssh_auth_mount_path=/home/NAME/.ssh of the image's user. "
                f"Received: --run_as_user={pods.user} alone."
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
            # Earlier, the launcher could not connect to the workers.
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": run_policy,
            "mpiReplicaSpecs": {
                "Launcher": _launcher(job, pods, *start),
                "Worker": _worker(job, pods, ssh),
            },
        },
    }


def _hosts(job: Job) -> list[str]:
    """The workers' host names, as assigned by the operator, in the order of ranks."""
    return [f"{job.name}-worker-{index}.{job.name}" for index in range(job.nodes)]


def _worker(job: Job, pods: Pods, ssh: str) -> dict[str, Any]:
    command = ["/usr/sbin/sshd", "-De"]
    if ssh != _ROOT_SSH:
        # Users other than root require separate settings, which the operator's images have here.
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
    # ssh fails immediately if a host name does not resolve yet.
    waiting = container(
        pods,
        "wait-for-workers",
        ["sh", "-c", literal(_WAIT), "wait-for-workers", *_hosts(job)],
        resources=_LAUNCHER_RESOURCES,
    )
    template = pod_template(job, pods, launcher, first=[waiting])
    # Each start is a new pod with a separate log.
    return {"replicas": 1, "restartPolicy": "Never", "template": template}


def _by_tfdist_run(job: Job) -> tuple[list[str], dict[str, str]]:
    """The beginning of the command that starts the ranks, and its environment variables."""
    hosts = ",".join(f"{host}:{job.ranks_per_node}" for host in _hosts(job))
    words = ["tfdist-run", "-np", str(job.num_ranks), "-H", hosts]
    return [*words, f"--save_seconds={job.save_seconds}", "--"], job.variables


def _by_mpirun(job: Job, as_root: bool) -> tuple[list[str], dict[str, str]]:
    """The same for Open MPI's mpirun, which gives ranks no time to save after a SIGTERM."""
    # The rendezvous address of ranks without MPI; mpirun starts the first rank on the first host.
    variables = {"MASTER_ADDR": _hosts(job)[0], **job.variables}
    words = ["mpirun", *(["--allow-run-as-root"] if as_root else [])]
    words += ["-np", str(job.num_ranks), "--hostfile", _HOSTFILE]
    # Ranks use several cores; their output is prefixed by their number.
    words += ["--map-by", "slot", "--bind-to", "none", "--tag-output"]
    for name in dict.fromkeys(["PATH", "LD_LIBRARY_PATH", *variables]):
        words += ["-x", name]
    return words + (["--wdir", job.directory] if job.directory is not None else []), variables
