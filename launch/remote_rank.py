"""The far end of a rank on another host: `python -m tfdist.launch.remote_rank`, over ssh or srun.

It says in one line where it is, reads one line with what to run, and from then on the numbers of
signals to pass on. Its input ends when who started it is gone, and the rank ends with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import NoReturn

from tfdist.launch.processes import kill_session
from tfdist.runtime import exit_codes
from tfdist.runtime.orphan_guard import OrphanGuard
from tfdist.runtime.rendezvous import free_ports, with_interface

#: What the line begins with that says where this is; a login shell may print others before it.
INFO_PREFIX = "tfdist-remote-rank: "


def main() -> NoReturn:
    """Runs what the other end asks for, and ends with its exit code."""
    # By ssh: the caller's address, as it is seen from here, and this host's.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    caller, _, own, _ = connection if len(connection) == 4 else ("", "", "", "")
    (port,) = free_ports(1)
    print(INFO_PREFIX + json.dumps({"caller": caller, "address": own, "port": port}), flush=True)
    line = sys.stdin.readline()
    if not line:
        sys.exit(exit_codes.USAGE)  # The other end has given up.
    order = json.loads(line)
    environment = with_interface({**os.environ, **order["environment"]})
    try:
        os.chdir(order["folder"])
        process = subprocess.Popen(
            order["command"],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        print(f"{error.filename}: {error.strerror}.", file=sys.stderr)
        sys.exit(exit_codes.USAGE)
    with OrphanGuard() as guard:
        guard.watch(process.pid)
        threading.Thread(target=_pass_on, args=(process.pid,), daemon=True).start()
        code = process.wait()
        kill_session(process.pid)
    sys.stdout.flush()
    # As a shell says it: an exit code is all that ssh passes on.
    os._exit(128 - code if code < 0 else code)


def _pass_on(pid: int) -> None:
    """Passes on signals; when there is nobody left to send any, ends the rank."""
    for line in sys.stdin:
        try:
            os.killpg(pid, int(line))
        except ProcessLookupError:
            return
    kill_session(pid)


if __name__ == "__main__":
    # Hang-ups are told by the end of the input.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    main()
