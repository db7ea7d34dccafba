"""The Kubernetes objects of a job, and the flags specific to Kubernetes."""

from __future__ import annotations

import re

from absl import flags

from tfdist.launch.flags.values import FlagDefiner, UsageError, refuse_ignored
from tfdist.launch.submit.indexed_job import indexed_job
from tfdist.launch.submit.job_flags import JobFlags, parse_size
from tfdist.launch.submit.kubernetes_names import check_mounts, check_name, check_path, labels_of
from tfdist.launch.submit.manifests import to_yaml
from tfdist.launch.submit.mpi_job import mpi_job
from tfdist.launch.submit.pods import Pods

_VOLUME = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?):(/[^:\s]+)(:ro)?")

SUMMARY = "Writes the Kubernetes objects that run a command on many ranks."
#: The command that submits the objects.
SUBMIT = "kubectl apply -f"

VALUES = flags.FlagValues()
_define = FlagDefiner(VALUES)
JOB = JobFlags(_define)
_KIND = _define.enum("kind", "job", ["job", "mpijob"], "A Job, or an MPIJob of the mpi-operator")
_IMAGE = _define.string("image", None, "Container image with tfdist and the command")
_NAMESPACE = _define.string("namespace", None, "Namespace of the job")
_VOLUMES = _define.repeated("volume", "Volume claim to mount, CLAIM:/path[:ro]")
_SHARED_MEMORY = _define.string("shared_memory", "1G", "Size of /dev/shm in each pod")
_GPU_RESOURCE = _define.string("gpu_resource", "nvidia.com/gpu", "Resource name of a GPU")
_NODE_SELECTOR = _define.repeated("node_selector", "Label that the nodes must have, KEY=VALUE")
_QUEUE = _define.string("queue", None, "Kueue queue, which starts all pods together")
_USER = _define.integer("run_as_user", None, "User id in the pods", lower_bound=0)
_LAUNCHER = _define.enum(
    "launcher", "tfdist-run", ["tfdist-run", "mpirun"], "Program that starts the ranks of an MPIJob"
)
_SSH = _define.string("ssh_auth_mount_path", None, "Folder .ssh of the image's user [/root/.ssh]")

FOLDED = {
    "for failures": JobFlags.FAILURES,
    "for pods": [
        _NAMESPACE.name,
        "chdir",
        _SHARED_MEMORY.name,
        _GPU_RESOURCE.name,
        _NODE_SELECTOR.name,
        _QUEUE.name,
        _USER.name,
    ],
    "for an MPIJob": [_LAUNCHER.name, _SSH.name],
}


def from_flags(command: list[str]) -> str:
    """The objects of the flags, as YAML."""
    job = JOB.read(command)
    if _IMAGE.value is None:
        raise UsageError(
            "tfdist-launch kubernetes requires an image: --image=registry/name:tag. Received: none."
        )
    for flag in (_IMAGE, _NAMESPACE, _QUEUE, _GPU_RESOURCE):
        check_name(flag.name, flag.value)
    for name, path in (("chdir", job.directory), ("ssh_auth_mount_path", _SSH.value)):
        if path is not None:
            check_path(name, path)
    if not job.gpu:
        refuse_ignored(VALUES, (_GPU_RESOURCE,), "requires --gpu", "alone")
    volumes = [_volume(text) for text in _VOLUMES.value or ()]
    check_mounts([path for _, path, _ in volumes])
    pods = Pods(
        image=_IMAGE.value,
        namespace=_NAMESPACE.value,
        volumes=volumes,
        shared_memory=parse_size("shared_memory", _SHARED_MEMORY.value),
        gpu_resource=_GPU_RESOURCE.value,
        node_selector=labels_of("node_selector", _NODE_SELECTOR.value or ()),
        queue=_QUEUE.value,
        user=_USER.value,
    )
    if _KIND.value == "mpijob":
        objects = [mpi_job(job, pods, launcher=_LAUNCHER.value, ssh=_SSH.value)]
    else:
        _check_is_for_a_job()
        objects = indexed_job(job, pods)
    return to_yaml("Apply it with: kubectl apply -f FILE", objects)


def _check_is_for_a_job() -> None:
    """Reject flags that do not apply to a Job."""
    if JOB.places_ranks:
        raise UsageError(
            "--nodes and --ranks_per_node require --kind=mpijob, because Kubernetes places the pods of a "
            f"Job. Received: {JOB.places_ranks}. Use -np, or --kind=mpijob."
        )
    refuse_ignored(VALUES, (_LAUNCHER, _SSH), "requires --kind=mpijob", "--kind=job")


def _volume(text: str) -> tuple[str, str, bool]:
    found = _VOLUME.fullmatch(text)
    if found is None:
        raise UsageError(
            "--volume must be CLAIM:/path, or CLAIM:/path:ro for read-only access. Received: "
            f"--volume={text}."
        )
    check_path("volume", found[3])
    return found[1], found[3], found[4] is not None
