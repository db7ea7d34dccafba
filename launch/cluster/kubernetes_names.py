"""What Kubernetes allows in names, labels, resources and paths, told before a cluster does.

https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/

Each check raises a `UsageError` that names the flag.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from tfdist.launch.cluster.job_flags import key_values
from tfdist.launch.flag_values import UsageError, refuse

_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
#: With the slash behind it.
_DOMAIN = r"(?=[^/]{1,253}/)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/"
#: A host with a port, folders and a name, a tag, a digest; the length is that of OCI's registries.
_IMAGE = (
    r"(?=[^@]{1,255}(@|$))([A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?/)?[a-z0-9][a-z0-9._/-]*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[a-z0-9]+:[0-9a-f]{32,})?"
)
_LABEL_MEANING = "small letters, digits and hyphens, at most 63 of them"
#: By flag, what its value looks like, and how a message says so.
_NAMES = {
    "gpu_resource": (f"{_DOMAIN}{_WORD}", "a domain and a name, as nvidia.com/gpu"),
    "image": (_IMAGE, "the name of an image, registry/name:tag or registry/name@digest"),
    "namespace": (_LABEL, _LABEL_MEANING),
    "queue": (_LABEL, _LABEL_MEANING),
}
_SHARED_MEMORY = "/dev/shm"


def check_name(flag: str, name: str | None) -> None:
    """Checks a name by its flag; None is allowed."""
    pattern, meaning = _NAMES[flag]
    if name is not None and re.fullmatch(pattern, name, re.ASCII) is None:
        raise refuse(flag, name, meaning)


def labels_of(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Reads labels, `KEY=VALUE`."""
    found = key_values(f"--{flag}", texts)
    for key, value in found.items():
        if not re.fullmatch(f"({_DOMAIN})?{_WORD}=({_WORD})?", f"{key}={value}", re.ASCII):
            raise refuse(
                flag,
                f"{key}={value}",
                "a label, KEY=VALUE, of letters, digits and -_. between them, at most 63; the key "
                "may have a domain and a / before it",
            )
    return found


def check_path(flag: str, path: str) -> None:
    """Checks a path in a container: absolute, not the root, without a colon or a `..`."""
    if not path.startswith("/") or ":" in path or ".." in path.split("/") or not path.strip("/"):
        raise refuse(flag, path, "an absolute path in the pods, without : and ..")


def check_mounts(paths: Sequence[str]) -> None:
    """Checks that no two volumes have the same path."""
    seen = {_SHARED_MEMORY}
    for path in map(posixpath.normpath, paths):
        if path in seen:
            raise UsageError(
                f"--volume: each has a path of its own, and {_SHARED_MEMORY} is taken. "
                f"Received: {path}."
            )
        seen.add(path)
