"""The doctor's process on another host: `python -m tfdist.launch.doctor.far`, over ssh or srun.

It prints one line about the host, and then runs the commands that it reads: "clock" returns the time,
"folder PATH" checks a folder, "call HOST PORT TOKEN" connects and reads until the connection is closed,
"listen TOKEN" waits for one connection. It ends with its input.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from typing import Any

import psutil

from tfdist import __version__
from tfdist.launch.install_horovod.prerequisites import installed_version

#: The prefix of its lines; a login shell may print others before them.
PREFIX = "tfdist-doctor: "
#: The timeout of a connection in seconds.
SECONDS = 3.0
_CHUNK = 1 << 16


def versions() -> dict[str, str | None]:
    """The versions that must be the same on all hosts."""
    return {
        "Python": platform.python_version(),
        "tfdist": __version__,
        **{name: installed_version(name) for name in ("tensorflow", "keras", "horovod")},
    }


def receive_all(sock: socket.socket, token: bytes) -> int:
    """Receive a token and then data; return the number of bytes after it, or -1 for a wrong token."""
    sock.settimeout(SECONDS)
    said, count = b"", 0
    while len(said) < len(token):
        part = sock.recv(len(token) - len(said))
        if not part:
            return -1
        said += part
    if said != token:
        return -1
    while part := sock.recv(_CHUNK):
        count += len(part)
    return count


def _answer(order: list[str]) -> dict[str, Any]:
    if order[0] == "clock":
        return {"clock": time.time()}
    if order[0] == "folder":
        return {"folder": os.path.isdir(order[1]), "writable": os.access(order[1], os.W_OK)}
    if order[0] == "call":
        with socket.create_connection((order[1], int(order[2])), SECONDS) as sock:
            return {"received": receive_all(sock, order[3].encode())}
    if order[0] == "listen":
        with socket.create_server(("", 0)) as server:
            server.settimeout(SECONDS)
            _say({"port": server.getsockname()[1]})
            sock, _ = server.accept()
            with sock:
                return {"received": receive_all(sock, order[1].encode())}
    raise ValueError(f"A command must be clock, folder, call or listen. Received: {order[0]!r}.")


def _say(message: dict[str, Any]) -> None:
    print(PREFIX + json.dumps(message), flush=True)


def main() -> None:
    """Print information about the host, and run the commands of stdin."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    caller, _, own, _ = connection if len(connection) == 4 else ("", "", "", "")
    _say(
        {
            "versions": versions(),
            "caller": caller,
            "address": own,
            "free": psutil.virtual_memory().available,
            "cores": os.cpu_count(),
        }
    )
    for line in sys.stdin:
        try:
            _say(_answer(json.loads(line)))
        except OSError as error:
            _say({"error": error.strerror or str(error) or type(error).__name__})


if __name__ == "__main__":
    main()
