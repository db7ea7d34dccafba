"""Ranks on other hosts, over ssh or Slurm's srun."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, cast

from tfdist.launch.command import UsageError, say
from tfdist.launch.processes import RankProcess, kill_session, start_session
from tfdist.launch.remote_rank import INFO_PREFIX
from tfdist.runtime.rendezvous import address_towards

_REACH_SECONDS = 60.0
#: What belongs to a host or to who is logged in there, and is no business of the others.
_OF_THE_HOST = re.compile(
    r"BASH_FUNC.*|DBUS_.*|DISPLAY|GPG_.*|HOME|HOSTNAME|KRB5CCNAME|KUBECONFIG|KUBERNETES_.*|LOGNAME|MAIL|"
    r"OLDPWD|PWD|SHELL|SHLVL|SLURM.*|SSH_.*|SUDO_.*|TMPDIR|TERM|USER|XAUTHORITY|XDG_.*|_"
)
#: What looks like a secret by its name. Other users of a far host cannot read a rank's variables,
#: but its administrators, crash reports and logs can.
_SECRET = re.compile(
    r".*(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY).*", re.I
)
#: Lists variables that go to other hosts whatever they are called.
PASS = "TFDIST_PASS"
#: ssh's own exit code, where it does not get through or loses the connection.
_SSH_FAILED = 255


class UnreachableError(UsageError):
    """A host cannot be reached, or cannot run ranks.

    Attributes:
        host: Its name.
    """

    def __init__(self, message: str, host: str):
        super().__init__(message)
        self.host = host


@dataclasses.dataclass(frozen=True)
class HostInfo:
    """What the far end of a rank says of its host.

    Attributes:
        caller: The address of this machine as it is seen from there.
        address: The host's own address, by which it was reached.
        port: A free port.
    """

    caller: str
    address: str
    port: int


def ssh(host: str, command: Sequence[str]) -> list[str]:
    """How a command is run on a host by ssh, which asks for no password."""
    options = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ConnectTimeout=20"]
    return ["ssh", *options, "--", host, shlex.join(command)]


def srun(host: str, command: Sequence[str]) -> list[str]:
    """How a command is run on a host of the Slurm allocation that this process is in."""
    return [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        "--overlap",
        "--cpu-bind=none",
        f"--nodelist={host}",
        *command,
    ]


def reach(
    hosts: Sequence[str], shell: Callable[[str, Sequence[str]], list[str]]
) -> list[ReachedHost]:
    """Reaches a host for each rank, or raises `UnreachableError`; hosts may come more than once."""
    far = [sys.executable, "-m", "tfdist.launch.remote_rank"]
    started: list[tuple[str, subprocess.Popen[bytes]]] = []
    try:
        for host in hosts:
            process = start_session(shell(host, far), os.environ, stdin=subprocess.PIPE)
            started.append((host, process))
        deadline = time.monotonic() + _REACH_SECONDS
        return [
            ReachedHost(host, process, _host_info(host, process, deadline))
            for host, process in started
        ]
    except BaseException:  # Also where Ctrl-C ends the wait for a host.
        for _, process in started:
            kill_session(process.pid)
        raise


def _host_info(host: str, process: subprocess.Popen[bytes], deadline: float) -> HostInfo:
    """What the far end says of itself."""
    output = cast(IO[bytes], process.stdout)
    os.set_blocking(output.fileno(), False)
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if not selector.select(deadline - time.monotonic()):
                break
            part = os.read(output.fileno(), 1)  # What comes after the line is the rank's.
            if not part:
                break
            said += part
            line = said.rpartition(b"\n")[0].rpartition(b"\n")[2].decode(errors="replace")
            if said.endswith(b"\n") and line.startswith(INFO_PREFIX):
                with contextlib.suppress(TypeError, ValueError):
                    return _complete(host, **json.loads(line.removeprefix(INFO_PREFIX)))
    words = " ".join(said.decode(errors="replace").split()) or "it said nothing"
    raise UnreachableError(f"The host {host} cannot be reached, or lacks tfdist: {words}.", host)


def _complete(host: str, caller: str, address: str, port: int) -> HostInfo:
    """The info, with the addresses that only ssh tells looked up where they are missing."""
    try:
        address = address or socket.gethostbyname(host)
        return HostInfo(caller or address_towards(address), address, port)
    except OSError as error:
        raise UnreachableError(f"The host {host} has no address: {error}.", host) from error


@dataclasses.dataclass(frozen=True)
class ReachedHost:
    """A host that waits for what it is to run; `process` is the ssh or srun that leads there."""

    host: str
    process: subprocess.Popen[bytes]
    info: HostInfo

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> RemoteRank:
        """Starts the rank, in a folder of the same path as the one here."""
        order = {
            "command": list(command),
            "environment": {**_passed(), "PYTHONUNBUFFERED": "1", **environment},
            "folder": os.getcwd(),
        }
        rank = RemoteRank(self.host, self.process)
        rank.tell(json.dumps(order))
        return rank


@functools.cache
def _passed() -> dict[str, str]:
    """The variables of this process that its ranks on other hosts get; says which secrets not."""
    chosen = set(os.environ.get(PASS, "").split(","))
    passed, kept = {}, []
    for name, value in os.environ.items():
        if name in chosen or not (_OF_THE_HOST.fullmatch(name) or _SECRET.fullmatch(name)):
            passed[name] = value
        elif not _OF_THE_HOST.fullmatch(name):
            kept.append(name)
    if kept:
        say(
            "tfdist-run",
            f"{', '.join(sorted(kept))} look like secrets and are not sent to other hosts. "
            f"List variables to send all the same in {PASS}=NAME,NAME.",
        )
    return passed


class RemoteRank(RankProcess):
    """A rank on another host; `process` is the ssh or srun that leads there."""

    def __init__(self, host: str, process: subprocess.Popen[bytes]):
        super().__init__(process)
        self.host = host
        self._input = cast(IO[bytes], process.stdin)

    def tell(self, line: str) -> None:
        """Sends a line to the far end; one that is gone is seen by its exit code."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._input.write(f"{line}\n".encode())
            self._input.flush()

    @property
    def code(self) -> int | None:
        """As of a rank here, as far as ssh tells."""
        code = super().code
        if code is not None and 128 < code < _SSH_FAILED:
            return 128 - code
        return code

    def signal(self, number: int) -> None:
        """Has the far end pass on a signal."""
        self.tell(str(int(number)))

    def kill(self) -> None:
        """Ends the rank there and what leads to it."""
        self.tell(str(int(signal.SIGKILL)))
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        super().kill()

    def describe(self, code: int) -> str:
        """As of a rank here; a lost connection is one of the ways to fail."""
        if code == _SSH_FAILED:
            return f"is lost: the connection to {self.host} has ended"
        return f"on {self.host} {super().describe(code)}"

    def is_stopped(self) -> bool:
        """Not known of a rank elsewhere; the watchdog finds one that is frozen."""
        return False
