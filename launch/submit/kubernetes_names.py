"""Checks of names, labels, resources and paths by the rules of Kubernetes.

https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/

Each check raises a `UsageError` that names the flag.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from tfdist.launch.flags.values import UsageError, refuse
from tfdist.launch.submit.job_flags import key_values

_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
#: Including the slash after it.
_DOMAIN = r"(?=[^/]{1,253}/)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/"
#: A host with a port, folders and a name, a tag, a digest; the length is that of OCI's registries.
_IMAGE = (
    r"(?=[^@]{1,255}(@|$))([A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?/)?[a-z0-9][a-z0-9._/-]*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[a-z0-9]+:[0-9a-f]{32,})?"
)
_LABEL_MEANING = "lowercase letters, digits and hyphens, at most 63 characters"
#: By flag, the pattern of its value, and its description in messages.
_NAMES = {
    "gpu_resource": (f"{_DOMAIN}{_WORD}", "a domain and a name, such as nvidia.com/gpu"),
    "image": (_IMAGE, "the name of an image, registry/name:tag or registry/name@digest"),
    "namespace": (_LABEL, _LABEL_MEANING),
    "queue": (_LABEL, _LABEL_MEANING),
}
_SHARED_MEMORY = "/dev/shm"


def check_name(flag: str, name: str | None) -> None:
    """Check a name by the pattern of its flag; None is allowed."""
    pattern, meaning = _NAMES[flag]
    if name is not None and re.fullmatch(pattern, name, re.ASCII) is None:
        raise refuse(flag, name, meaning)


def labels_of(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Parse labels of the form `KEY=VALUE`."""
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
    """Check a path in a container: absolute, not the root, without a colon or `..`."""
    if not path.startswith("/") or ":" in path or ".." in path.split("/") or not path.strip("/"):
        raise refuse(flag, path, "an absolute path in the pods, without : and ..")


def check_mounts(paths: Sequence[str]) -> None:
    """Check that all volumes have different paths."""
    seen = {_SHARED_MEMORY}
    for path in map(posixpath.normpath, paths):
        if path in seen:
            raise UsageError(
                f"--volume must have a unique path other than {_SHARED_MEMORY}. Received: {path}."
            )
        seen.add(path)
