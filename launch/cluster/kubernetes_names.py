"""What Kubernetes allows in names, labels, resources and paths, told before a cluster does.

https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from tfdist.launch.cluster.job_flags import key_values
from tfdist.launch.flag_values import UsageError, refuse

__all__ = [
    "check_image",
    "check_mounts",
    "check_path",
    "check_queue",
    "check_resource",
    "labels_of",
]

_MOST_OF_A_LABEL = 63
_MOST_OF_A_DOMAIN = 253
_WORD = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
_MOST_OF_AN_IMAGE = 255
#: A host with a port, folders and a name, a tag, a digest.
_IMAGE = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?/)?[a-z0-9][a-z0-9._/-]*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[a-z0-9]+:[0-9a-f]{32,})?",
    re.ASCII,
)
_SHARED_MEMORY = "/dev/shm"


def labels_of(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Reads labels, `KEY=VALUE`.

    Raises:
        UsageError: A key or a value is none.
    """
    found = key_values(f"--{flag}", texts)
    for key, value in found.items():
        if not _is_qualified(key) or (value and _WORD.fullmatch(value) is None):
            raise refuse(
                flag,
                f"{key}={value}",
                f"a label, KEY=VALUE, of letters, digits and -_. between them, at most "
                f"{_MOST_OF_A_LABEL}; the key may have a domain and a / before it",
            )
    return found


def check_resource(name: str) -> None:
    """Checks what the cluster calls a GPU.

    Raises:
        UsageError: It is no name of a resource, which has a domain.
    """
    if "/" not in name or not _is_qualified(name):
        raise refuse("gpu_resource", name, "a domain and a name, as nvidia.com/gpu")


def check_image(name: str) -> None:
    """Checks the name of an image.

    Raises:
        UsageError: It is none.
    """
    if _IMAGE.fullmatch(name) is None:
        raise refuse(
            "image", name, "the name of an image, registry/name:tag or registry/name@digest"
        )


def check_queue(name: str | None) -> str | None:
    """Checks the name of a queue of Kueue.

    Raises:
        UsageError: It is none.
    """
    if name is not None and (
        _DOMAIN.fullmatch(name) is None or "." in name or len(name) > _MOST_OF_A_LABEL
    ):
        raise refuse(
            "queue", name, f"small letters, digits and hyphens, at most {_MOST_OF_A_LABEL} of them"
        )
    return name


def check_path(flag: str, path: str) -> None:
    """Checks a path in a container.

    Raises:
        UsageError: It is relative, the root, or has a colon or a `..`.
    """
    if not path.startswith("/") or ":" in path or ".." in path.split("/") or not path.strip("/"):
        raise refuse(flag, path, "an absolute path in the pods, without : and ..")


def check_mounts(paths: Sequence[str]) -> None:
    """Checks that no two volumes have the same place.

    Raises:
        UsageError: Two have.
    """
    seen = {_SHARED_MEMORY}
    for path in paths:
        place = posixpath.normpath(path)
        if place in seen:
            raise UsageError(
                f"--volume: each has a path of its own, and {_SHARED_MEMORY} is taken. "
                f"Received: {path}."
            )
        seen.add(place)


def _is_qualified(name: str) -> bool:
    domain, slash, word = name.rpartition("/")
    if slash and (_DOMAIN.fullmatch(domain) is None or len(domain) > _MOST_OF_A_DOMAIN):
        return False
    return _WORD.fullmatch(word) is not None
