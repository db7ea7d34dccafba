"""A job as an indexed Kubernetes Job, in which each rank is a pod that connects to the others by name.

The ranks use TensorFlow's collectives, so that the cluster requires no operator and the image no MPI.
"""

from __future__ import annotations

import json
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
from tfdist.runtime import exit_codes

#: The port of each rank's TensorFlow server; pods have separate addresses.
_PORT = 2222
_INDEX = "JOB_COMPLETION_INDEX"


def indexed_job(job: Job, pods: Pods) -> list[dict[str, Any]]:
    """The Service that gives the pods their names, and the Job."""
    for name in (_INDEX, "TF_CONFIG"):
        if name in job.environment:
            raise UsageError(
                f"{name} cannot be set by --env, because the job sets it for each rank. Received: "
                f"--env={name}=..."
            )
    check_names(job, f"{job.name}-{job.num_ranks - 1}")
    rank = container(
        pods,
        "rank",
        [literal(word) for word in job.command],
        env=[
            _index(),
            {"name": "TF_CONFIG", "value": _tf_config(job)},
            *environment(job.variables),
        ],
        directory=job.directory,
        resources=needs(job, pods, ranks=1),
    )
    # A failed pod is kept for its log, and the Job creates another.
    template = pod_template(job, pods, rank, restartPolicy="Never", subdomain=job.name)
    spec: dict[str, Any] = {
        "completions": job.num_ranks,
        "parallelism": job.num_ranks,
        "completionMode": "Indexed",
        # A failure ends all ranks, each of which counts.
        "backoffLimit": job.max_restarts * job.num_ranks,
        "podFailurePolicy": {"rules": _failure_rules()},
    }
    if job.seconds is not None:
        spec["activeDeadlineSeconds"] = job.seconds
    return [
        _service(job, pods),
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata(job, pods),
            "spec": {**spec, "template": template},
        },
    ]


def _service(job: Job, pods: Pods) -> dict[str, Any]:
    """The headless Service, which makes the pods' host names resolvable."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, Pods(pods.image, pods.namespace)),
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": job.name},
            # Ranks resolve each other's names before they are ready.
            "publishNotReadyAddresses": True,
            "ports": [{"name": "tensorflow", "port": _PORT}],
        },
    }


def _index() -> dict[str, Any]:
    """The variable of the index, defined before TF_CONFIG, which refers to it."""
    path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return {"name": _INDEX, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _tf_config(job: Job) -> str:
    """The TF_CONFIG of all ranks, with a reference that Kubernetes replaces by the pod's index."""
    hosts = [f"{job.name}-{rank}.{job.name}:{_PORT}" for rank in range(job.num_ranks)]
    index = f"$({_INDEX})"
    task = {"type": "worker", "index": index}
    config = json.dumps({"cluster": {"worker": hosts}, "task": task})
    return config.replace(json.dumps(index), index)


def _failure_rules() -> list[dict[str, Any]]:
    """Rules that ignore disruptions, and fail the Job for errors that a restart would not fix."""

    def on(code: int) -> dict[str, Any]:
        return {"containerName": "rank", "operator": "In", "values": [code]}

    return [
        {"action": "FailJob", "onExitCodes": on(exit_codes.USAGE)},
        {"action": "Ignore", "onExitCodes": on(exit_codes.PREEMPTED)},
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
    ]
