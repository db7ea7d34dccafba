"""The pods of a job in Kubernetes: their names and specifications."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launch.flags.values import UsageError
from tfdist.launch.submit.job_flags import Job, in_units

#: Seconds after saving for the ranks and then their launcher to end.
_MARGIN_SECONDS = 30
_HOST = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MOST_CHARACTERS = 63


@dataclasses.dataclass(frozen=True)
class Pods:
    """The settings of pods.

    Attributes:
        image: The image of all containers.
        namespace: Namespace of all objects, or None for the default of kubectl.
        volumes: For each volume the name of its claim, its mount path, and whether it is read-only.
        shared_memory: Size of /dev/shm in MiB.
        gpu_resource: Resource name of a GPU.
        node_selector: Labels that the nodes of pods must have.
        queue: Queue of Kueue, or None.
        user: User id in the pods, or None for that of the image.
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
    """Reject invalid names of the job, and host names that are too long."""
    if _HOST.fullmatch(job.name) is None:
        raise UsageError(
            "--name must be a host name in Kubernetes: lowercase letters, digits and hyphens, beginning "
            f"with a letter. Received: --name={job.name}."
        )
    if len(longest_host) > _MOST_CHARACTERS:
        raise UsageError(
            f"--name must be shorter: the host name {longest_host} must have at most {_MOST_CHARACTERS} "
            f"characters. Received: {len(longest_host)}."
        )


def metadata(job: Job, pods: Pods) -> dict[str, Any]:
    """The name, namespace and labels of an object of the job."""
    labels = {"app.kubernetes.io/name": job.name, "app.kubernetes.io/managed-by": "tfdist-launch"}
    if pods.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = pods.queue
    place = {} if pods.namespace is None else {"namespace": pods.namespace}
    return {"name": job.name, **place, "labels": labels}


def literal(text: str) -> str:
    """Escape a text, so that Kubernetes does not expand `$(NAME)` in it."""
    return text.replace("$", "$$")


def environment(variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """Environment variables of a container, with literal values."""
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

    Kubernetes expands `$(NAME)` in the command and in the variables: see `literal`. The default
    directory is that of the image.
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
        # Pods whose requests equal their limits are evicted last.
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "volumeMounts": mounts,
    }


def needs(job: Job, pods: Pods, ranks: int) -> dict[str, str]:
    """The resources of a number of ranks."""
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
    """The template of a pod with the container `only`, and the init containers `first`.

    `fields` are further fields of the pod's specification, by their names in Kubernetes.
    """
    grace = job.save_seconds + _MARGIN_SECONDS
    spec = {**fields, "terminationGracePeriodSeconds": grace}
    if pods.user is not None:
        # fsGroup gives the user access to the volumes.
        spec["securityContext"] = {"runAsUser": pods.user, "fsGroup": pods.user}
    if pods.node_selector:
        spec["nodeSelector"] = dict(pods.node_selector)
    memory = {"medium": "Memory", "sizeLimit": f"{in_units(pods.shared_memory)}i"}
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": memory}]
    for place, (claim, _, read_only) in enumerate(pods.volumes):
        source = {"claimName": claim, **({"readOnly": True} if read_only else {})}
        volumes.append({"name": f"volume-{place}", "persistentVolumeClaim": source})
    # The proxy of a service mesh would intercept messages between ranks, and outlive them.
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
