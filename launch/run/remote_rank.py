"""The remote end of a rank on another host: `python -m tfdist.launch.run.remote_rank`, over ssh or srun.

It prints one line with its addresses, reads one line with the command to run, and then the numbers of
signals to forward. When its input ends, the launcher is gone, and the rank is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import NoReturn

from tfdist.launch.run.processes import kill_session
from tfdist.runtime import exit_codes
from tfdist.runtime.orphan_guard import OrphanGuard
from tfdist.runtime.rendezvous import free_ports, with_interface

#: The prefix of the line with the addresses; a login shell may print other lines before it.
INFO_PREFIX = "tfdist-remote-rank: "


def main() -> NoReturn:
    """Run the requested command, and exit with its exit code."""
    # With ssh: the caller's address as seen from here, and the address of this host.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    caller, _, own, _ = connection if len(connection) == 4 else ("", "", "", "")
    (port,) = free_ports(1)
    print(INFO_PREFIX + json.dumps({"caller": caller, "address": own, "port": port}), flush=True)
    line = sys.stdin.readline()
    if not line:
        sys.exit(exit_codes.USAGE)  # The launcher has given up.
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
    # As in a shell, because ssh forwards only an exit code.
    os._exit(128 - code if code < 0 else code)


def _pass_on(pid: int) -> None:
    """Forward signals, and kill the rank when the input ends."""
    for line in sys.stdin:
        try:
            os.killpg(pid, int(line))
        except ProcessLookupError:
            return
    kill_session(pid)


if __name__ == "__main__":
    # Hang-ups are detected by the end of the input.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Slurm's `scancel` signals the processes of all nodes: the launcher, too, which has the ranks save and end.
    # Not ignored, because the rank would inherit that.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    main()
