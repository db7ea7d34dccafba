"""The Kubernetes objects of a job, and the flags specific to Kubernetes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from tfdist.launch.flags.options import define_flags, option, refuse_ignored
from tfdist.launch.flags.values import UsageError
from tfdist.launch.submit.indexed_job import indexed_job
from tfdist.launch.submit.job_flags import OF_FAILURES, Job, JobOptions, parse_size
from tfdist.launch.submit.kubernetes_names import check_mounts, check_name, check_path, labels_of
from tfdist.launch.submit.manifests import to_yaml
from tfdist.launch.submit.mpi_job import mpi_job
from tfdist.launch.submit.pods import Pods
from tfdist.launch.submit.train_job import train_job

_VOLUME = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?):(/[^:\s]+)(:ro)?")

SUMMARY = "Writes the Kubernetes objects that run a command on many ranks."
#: The command that submits the objects.
SUBMIT = "kubectl apply -f"


@dataclasses.dataclass(frozen=True)
class KubernetesOptions:
    """The options specific to Kubernetes, and those of the job; see the flags of the same names."""

    job: JobOptions = dataclasses.field(default_factory=JobOptions)
    kind: str = option(
        "job",
        "A Job, an MPIJob of the mpi-operator, or a TrainJob of Kubeflow Trainer",
        choices=("job", "mpijob", "trainjob"),
    )
    image: str | None = option(None, "Container image with tfdist and the command")
    namespace: str | None = option(None, "Namespace of the job")
    volume: tuple[str, ...] = option(
        (), "Volume claim to mount, CLAIM:/path[:ro]", is_repeated=True
    )
    shared_memory: str = option("1G", "Size of /dev/shm in each pod")
    gpu_resource: str = option("nvidia.com/gpu", "Resource name of a GPU")
    node_selector: tuple[str, ...] = option(
        (), "Label that the nodes must have, KEY=VALUE", is_repeated=True
    )
    queue: str | None = option(None, "Kueue queue, which starts all pods together")
    run_as_user: int | None = option(None, "User id in the pods", least=0)
    launcher: str = option(
        "tfdist-run",
        "Program that starts the ranks of an MPIJob",
        choices=("tfdist-run", "mpirun"),
    )
    ssh_auth_mount_path: str | None = option(None, "Folder .ssh of the image's user [/root/.ssh]")

    def text(self, command: list[str]) -> str:
        """The objects for a command, as YAML.

        Raises:
            UsageError: Options are invalid or incompatible.
        """
        job = self.job.job(command)
        if self.image is None:
            raise UsageError(
                "tfdist-launch kubernetes requires an image: --image=registry/name:tag. Received: none."
            )
        for name in ("image", "namespace", "queue", "gpu_resource"):
            check_name(name, getattr(self, name))
        ssh = self.ssh_auth_mount_path
        for name, path in (("chdir", job.directory), ("ssh_auth_mount_path", ssh)):
            if path is not None:
                check_path(name, path)
        if not job.gpu:
            refuse_ignored(self, ["gpu_resource"], "requires --gpu", "alone")
        volumes = [_volume(text) for text in self.volume]
        check_mounts([path for _, path, _ in volumes])
        pods = Pods(
            image=self.image,
            namespace=self.namespace,
            volumes=volumes,
            shared_memory=parse_size("shared_memory", self.shared_memory),
            gpu_resource=self.gpu_resource,
            node_selector=labels_of("node_selector", self.node_selector),
            queue=self.queue,
            user=self.run_as_user,
        )
        if self.kind == "mpijob":
            objects = [mpi_job(job, pods, launcher=self.launcher, ssh=ssh)]
        else:
            of_mpi = ("launcher", "ssh_auth_mount_path")
            refuse_ignored(self, of_mpi, "requires --kind=mpijob", f"--kind={self.kind}")
            objects = train_job(job, pods) if self.kind == "trainjob" else self._job(job, pods)
        return to_yaml("Apply it with: kubectl apply -f FILE", objects)

    def _job(self, job: Job, pods: Pods) -> list[dict[str, Any]]:
        """The objects of a Job."""
        if placed := self.job.places_ranks:
            raise UsageError(
                "--nodes and --ranks_per_node require --kind=mpijob or --kind=trainjob, because Kubernetes "
                f"places the pods of a Job. Received: {placed}. Use -np, or another kind."
            )
        return indexed_job(job, pods)


FLAGS = define_flags(KubernetesOptions)
FOLDED = {
    "for failures": OF_FAILURES,
    "for pods": [
        *("namespace", "chdir", "shared_memory", "gpu_resource", "node_selector", "queue"),
        "run_as_user",
    ],
    "for an MPIJob": ["launcher", "ssh_auth_mount_path"],
}


def _volume(text: str) -> tuple[str, str, bool]:
    found = _VOLUME.fullmatch(text)
    if found is None:
        raise UsageError(
            "--volume must be CLAIM:/path, or CLAIM:/path:ro for read-only access. Received: "
            f"--volume={text}."
        )
    check_path("volume", found[3])
    return found[1], found[3], found[4] is not None
