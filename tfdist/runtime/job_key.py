"""The key of ranks that do not share a secret yet, such as those that `mpirun` or `srun` started.

Such a launcher gives all ranks the same job number, which others can guess. The secret is, in this
order:

1. `TFDIST_JOB_TOKEN`, if the user has set it for all ranks;
2. if all ranks are on one host, a file in the user's home folder that only the user can read.

On several hosts without a token the ranks cannot authenticate each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_logger = logging.getLogger("tfdist")

#: The variable that holds a secret of the job.
JOB_TOKEN = "TFDIST_JOB_TOKEN"
_FILE = "~/.cache/tfdist/job-key"
_FILE_BYTES = 32


def job_key(job: Sequence[str], environment: Mapping[str, str], *, is_one_host: bool) -> bytes:
    """The key of a job: 32 bytes, the same on all ranks.

    A warning is logged if they can be guessed.

    Args:
        job: The launcher's names of the job; the same on all ranks.
        environment: The environment variables of this rank.
        is_one_host: Whether all ranks are on this host.

    Raises:
        PermissionError: Other users can read or write the file with the user's secret.
    """
    secret = environment.get(JOB_TOKEN, "").encode()
    if not secret and is_one_host:
        secret = _secret_of_user(Path(_FILE).expanduser())
    if not secret:
        _logger.warning(
            "The ranks cannot authenticate each other: any process that reaches the port of the "
            "rendezvous can impersonate a rank. Set %s to a secret of the job for all ranks.",
            JOB_TOKEN,
        )
    digest = hashlib.sha256()
    for part in (secret, *(name.encode() for name in job)):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def _secret_of_user(path: Path) -> bytes:
    """The content of the file, which is created if it is missing; b"" if it cannot be created."""
    try:
        if not path.is_symlink() and not path.exists():
            _make(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            is_safe = stat.S_ISREG(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
            if is_safe and found.st_uid == os.geteuid():
                secret = file.read(_FILE_BYTES + 1)
                if len(secret) == _FILE_BYTES:
                    return secret
    except OSError as error:
        _logger.info("Could not read %s: %s", path, error)
        return b""
    raise PermissionError(
        f"{path}, the secret that authenticates ranks on one host, must be a file of {_FILE_BYTES} "
        "bytes that only you, its owner, can read and write. Remove it: the next job creates it."
    )


def _make(path: Path) -> None:
    """Creates the file atomically: ranks that start at the same time read the same content."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, made = tempfile.mkstemp(dir=path.parent, prefix="job-key-")  # Of mode 0600.
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_FILE_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
    finally:
        os.unlink(made)
