"""The pods of a job in Kubernetes: what they are made of, and what they are called."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launch.cluster.job_flags import Job, in_units
from tfdist.launch.flag_values import UsageError

#: Beyond what saving takes: the ranks go, and their launcher after them.
_MARGIN_SECONDS = 30
_HOST = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MOST_CHARACTERS = 63


@dataclasses.dataclass(frozen=True)
class Pods:
    """What only Kubernetes is told.

    Attributes:
        image: The image of all containers.
        namespace: Of all objects, or None for that of whoever applies them.
        volumes: Names of claims, where they are mounted, and whether for reading only.
        shared_memory: MiB that /dev/shm may hold.
        gpu_resource: What the cluster calls a GPU.
        node_selector: Labels of the nodes that pods run on.
        queue: Of Kueue, or None.
        user: The user id in the pods, or None for the image's.
    """

    image: str
    namespace: str | None = None
    volumes: Sequence[tuple[str, str, bool]] = ()
    shared_memory: int = 1024
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    queue: str | None = None
    user: int | None = None


def check_names(job: Job, longest_host: str) -> None:
    """Refuses names that Kubernetes would not take; the last pod has the longest host name."""
    if _HOST.fullmatch(job.name) is None:
        raise UsageError(
            "--name is a host name in Kubernetes: small letters, digits and hyphens, a letter "
            f"first. Received: --name={job.name}."
        )
    if len(longest_host) > _MOST_CHARACTERS:
        raise UsageError(
            f"--name is too long: hosts are named by it, {longest_host}, and a host has at most "
            f"{_MOST_CHARACTERS} characters. Received: {len(longest_host)}."
        )


def metadata(job: Job, pods: Pods) -> dict[str, Any]:
    """Name, namespace and labels of an object of the job."""
    labels = {"app.kubernetes.io/name": job.name, "app.kubernetes.io/managed-by": "tfdist-launch"}
    if pods.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = pods.queue
    place = {} if pods.namespace is None else {"namespace": pods.namespace}
    return {"name": job.name, **place, "labels": labels}


def literal(text: str) -> str:
    """Keeps Kubernetes from reading `$(NAME)` in a command or a value as one of its references."""
    return text.replace("$", "$$")


def environment(variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """Variables of a container, which means just what they say."""
    return [{"name": name, "value": literal(text)} for name, text in variables.items()]


def container(
    pods: Pods,
    name: str,
    command: Sequence[str],
    *,
    env: Sequence[Mapping[str, Any]] = (),
    directory: str | None = None,
    resources: Mapping[str, str],
) -> dict[str, Any]:
    """A container of the pods.

    Kubernetes reads `$(NAME)` in the command and in the variables: see `literal`. Where no
    directory is named, the image's counts.
    """
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    for place, (_, path, _) in enumerate(pods.volumes):
        mounts.append({"name": f"volume-{place}", "mountPath": path})
    return {
        "name": name,
        "image": pods.image,
        "command": list(command),
        **({} if directory is None else {"workingDir": directory}),
        **({"env": list(env)} if env else {}),
        # As much as is asked for and no more: pods of which this is true are evicted last.
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "volumeMounts": mounts,
    }


def needs(job: Job, pods: Pods, ranks: int) -> dict[str, str]:
    """What a number of ranks need."""
    amounts = {"cpu": str(job.cpus * ranks)}
    if job.memory is not None:
        amounts["memory"] = f"{in_units(job.memory * ranks)}i"
    if job.gpu:
        amounts[pods.gpu_resource] = str(ranks)
    return amounts


def pod_template(
    job: Job,
    pods: Pods,
    only: Mapping[str, Any],
    *,
    first: Sequence[Mapping[str, Any]] = (),
    **fields: Any,
) -> dict[str, Any]:
    """The template of a pod with one container, and with others that end `first`.

    More fields of its specification have Kubernetes' names.
    """
    grace = job.save_seconds + _MARGIN_SECONDS
    spec = {**fields, "terminationGracePeriodSeconds": grace}
    if pods.user is not None:
        # The group gets access to the volumes.
        spec["securityContext"] = {"runAsUser": pods.user, "fsGroup": pods.user}
    if pods.node_selector:
        spec["nodeSelector"] = dict(pods.node_selector)
    memory = {"medium": "Memory", "sizeLimit": f"{in_units(pods.shared_memory)}i"}
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": memory}]
    for place, (claim, _, read_only) in enumerate(pods.volumes):
        source = {"claimName": claim, **({"readOnly": True} if read_only else {})}
        volumes.append({"name": f"volume-{place}", "persistentVolumeClaim": source})
    # The proxy of a service mesh would stand between the ranks, and outlive them.
    labels = {"app.kubernetes.io/name": job.name, "sidecar.istio.io/inject": "false"}
    return {
        "metadata": {"labels": labels},
        "spec": {
            **spec,
            **({"initContainers": list(first)} if first else {}),
            "containers": [dict(only)],
            "volumes": volumes,
        },
    }
