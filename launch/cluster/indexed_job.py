"""A job as a Kubernetes Job: each rank a pod, which finds the others by name.

The ranks use TensorFlow's own collectives, so the cluster needs no operator and the image no MPI.
"""

from __future__ import annotations

import json
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
from tfdist.runtime import exit_codes

#: Where TensorFlow's server of each rank listens. Each pod has an address of its own.
_PORT = 2222
_INDEX = "JOB_COMPLETION_INDEX"


def indexed_job(job: Job, pods: Pods) -> list[dict[str, Any]]:
    """Returns the Service that gives the pods their names, and the Job."""
    for name in (_INDEX, "TF_CONFIG"):
        if name in job.environment:
            raise UsageError(
                f"{name} tells each rank which it is, and is set for it. Received: --env={name}=..."
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
    # A pod that failed is kept, for its log; the Job makes another.
    template = pod_template(job, pods, rank, restartPolicy="Never", subdomain=job.name)
    spec: dict[str, Any] = {
        "completions": job.num_ranks,
        "parallelism": job.num_ranks,
        "completionMode": "Indexed",
        # A failure ends all ranks, and each of them counts.
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
    """A headless Service: it forwards nothing, and makes each pod's host name resolve."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, Pods(pods.image, pods.namespace)),
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": job.name},
            # Ranks look for each other while they start.
            "publishNotReadyAddresses": True,
            "ports": [{"name": "tensorflow", "port": _PORT}],
        },
    }


def _index() -> dict[str, Any]:
    """The variable that the Job would add itself, at the end, where TF_CONFIG could not use it."""
    path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return {"name": _INDEX, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _tf_config(job: Job) -> str:
    """TF_CONFIG of every rank: Kubernetes puts each pod's index in the reference's place."""
    hosts = [f"{job.name}-{rank}.{job.name}:{_PORT}" for rank in range(job.num_ranks)]
    index = f"$({_INDEX})"
    task = {"type": "worker", "index": index}
    config = json.dumps({"cluster": {"worker": hosts}, "task": task})
    return config.replace(json.dumps(index), index)


def _failure_rules() -> list[dict[str, Any]]:
    """What is no failure of the program, and failures after which a restart would not help."""

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
