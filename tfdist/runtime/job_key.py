"""The key of ranks that share no secret yet, as those that `mpirun` or `srun` started.

Such a launcher tells all ranks the same job number, which strangers can guess. What strangers do
not know is, in this order:

1. `TFDIST_JOB_TOKEN`, where the user has set it for all ranks;
2. where all ranks are on one host, a file in the user's home folder that only the user can read.

On several hosts without a token the ranks cannot prove anything to each other.
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

    A warning is logged where they can be guessed.

    Args:
        job: What the launcher calls the job; the same on all ranks.
        environment: The variables of this rank.
        is_one_host: Whether all ranks are on this host.

    Raises:
        PermissionError: Others can read or write the file that holds the user's secret.
    """
    secret = environment.get(JOB_TOKEN, "").encode()
    if not secret and is_one_host:
        secret = _secret_of_user(Path(_FILE).expanduser())
    if not secret:
        _logger.warning(
            "The ranks cannot prove to each other that they are of one job: who reaches the port "
            "at which they meet can pass for a rank. Set %s to a secret of the job for all ranks.",
            JOB_TOKEN,
        )
    digest = hashlib.sha256()
    for part in (secret, *(name.encode() for name in job)):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def _secret_of_user(path: Path) -> bytes:
    """What the file holds, which is made where it is missing; nothing where it cannot be made."""
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
        _logger.info("There is no %s: %s", path, error)
        return b""
    raise PermissionError(
        f"{path} holds the secret by which ranks of one host know each other. It must be a file of "
        f"{_FILE_BYTES} bytes that only its owner, you, can read and write. Remove it: the next job "
        "makes it anew."
    )


def _make(path: Path) -> None:
    """Makes the file in one step: ranks that start at the same time find the same content."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, made = tempfile.mkstemp(dir=path.parent, prefix="job-key-")  # Of mode 0600.
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_FILE_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
    finally:
        os.unlink(made)
