"""A job as a TrainJob of Kubeflow Trainer, whose runtime for PyTorch starts `tfdist-run` on each node.

Trainer has no runtime for TensorFlow. That for PyTorch sets the variables of torchrun, which `tfdist-run` reads.
"""

from __future__ import annotations

from typing import Any

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

_VERSION = "trainer.kubeflow.org/v1alpha1"
#: The name that Trainer gives the variables to, of the Job and of its container.
_NODE = "node"
#: Marks the Job whose pods are the nodes.
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def train_job(job: Job, pods: Pods) -> list[dict[str, Any]]:
    """The TrainingRuntime, in which each node of the job is a pod, and the TrainJob."""
    check_names(job, f"{job.name}-{_NODE}-0-{job.nodes - 1}")
    words = ["tfdist-run", f"--save_seconds={job.save_seconds}", "--", *job.command]
    node = container(
        pods,
        _NODE,
        [literal(word) for word in words],
        env=environment(job.variables),
        directory=job.directory,
        resources=needs(job, pods, job.ranks_per_node),
    )
    spec: dict[str, Any] = {
        # A failed pod ends all nodes, and the JobSet starts all again.
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [_fails(exit_codes.USAGE)]},
        "template": pod_template(job, pods, node, restartPolicy="Never"),
    }
    if job.seconds is not None:
        spec["activeDeadlineSeconds"] = job.seconds
    jobs = [{"name": _NODE, "template": {"metadata": {"labels": _STEP}, "spec": spec}}]
    failures = {
        "maxRestarts": job.max_restarts,
        # A restart does not fix wrong settings, and would begin another time limit.
        "rules": [
            {
                "name": "wrong_settings",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
            }
        ],
    }
    return [
        {
            "apiVersion": _VERSION,
            "kind": "TrainingRuntime",
            "metadata": metadata(job, Pods(pods.image, pods.namespace)),
            "spec": {
                "mlPolicy": {"numNodes": job.nodes, "torch": {}},
                "template": {"spec": {"failurePolicy": failures, "replicatedJobs": jobs}},
            },
        },
        {
            "apiVersion": _VERSION,
            "kind": "TrainJob",
            "metadata": metadata(job, pods),
            "spec": {
                "runtimeRef": {"kind": "TrainingRuntime", "name": job.name},
                "trainer": {"numNodes": job.nodes, "numProcPerNode": job.ranks_per_node},
            },
        },
    ]


def _fails(code: int) -> dict[str, Any]:
    """A rule that fails the Job for an exit code."""
    found = {"containerName": _NODE, "operator": "In", "values": [code]}
    return {"action": "FailJob", "onExitCodes": found}
