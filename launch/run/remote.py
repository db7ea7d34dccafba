"""Ranks on other hosts, over ssh or Slurm's srun."""

from __future__ import annotations

import collections
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

from tfdist.launch.flags.command import UsageError, say
from tfdist.launch.run.processes import RankProcess, kill_session, start_session
from tfdist.launch.run.remote_rank import INFO_PREFIX
from tfdist.runtime.rendezvous import address_towards

_REACH_SECONDS = 60.0
#: The most connections to a host that are opened at once: sshd refuses some from the eleventh on.
_MOST_AT_ONCE = 8
#: Variables that are specific to a host or its user, and are not sent to others.
_OF_THE_HOST = re.compile(
    r"BASH_FUNC.*|DBUS_.*|DISPLAY|GPG_.*|HOME|HOSTNAME|KRB5CCNAME|KUBECONFIG|KUBERNETES_.*|LOGNAME|MAIL|"
    r"OLDPWD|PWD|SHELL|SHLVL|SLURM.*|SSH_.*|SUDO_.*|TMPDIR|TERM|USER|XAUTHORITY|XDG_.*|_"
)
#: Names of variables that look like secrets. Other users of a remote host cannot read a rank's variables,
#: but its administrators, crash reports and logs can.
_SECRET = re.compile(
    r".*(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY).*", re.I
)
#: A variable whose numbers are meant for each host, and whose names are those of this host's GPUs.
_GPUS = "CUDA_VISIBLE_DEVICES"
#: The variable that lists names to send to other hosts regardless of these patterns.
PASS = "TFDIST_PASS"
#: ssh's exit code if it cannot connect or loses the connection.
_SSH_FAILED = 255


class UnreachableError(UsageError):
    """A host cannot be reached or cannot run ranks.

    Attributes:
        host: Name of the host.
    """

    def __init__(self, message: str, host: str):
        super().__init__(message)
        self.host = host


@dataclasses.dataclass(frozen=True)
class HostInfo:
    """Information that the remote end of a rank reports about its host.

    Attributes:
        caller: The address of this machine as seen from the host.
        address: The address of the host, by which it was reached.
        port: A free port.
    """

    caller: str
    address: str
    port: int


def ssh(host: str, command: Sequence[str]) -> list[str]:
    """The command line that runs a command on a host by ssh, without a password prompt."""
    options = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ConnectTimeout=20"]
    return ["ssh", *options, "--", host, shlex.join(command)]


def srun(host: str, command: Sequence[str]) -> list[str]:
    """The command line that runs a command on a host of the current Slurm allocation."""
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
    """Connect to a host for each rank; hosts may be repeated.

    Raises:
        UnreachableError: A host cannot be reached.
    """
    far = [sys.executable, "-m", "tfdist.launch.run.remote_rank"]
    counts: collections.Counter[str] = collections.Counter()
    rounds: dict[int, list[int]] = {}
    for place, host in enumerate(hosts):
        rounds.setdefault(counts[host] // _MOST_AT_ONCE, []).append(place)
        counts[host] += 1
    started: dict[int, subprocess.Popen[bytes]] = {}
    reached: dict[int, ReachedHost] = {}
    try:
        for places in rounds.values():
            for place in places:
                command = shell(hosts[place], far)
                started[place] = start_session(command, os.environ, stdin=subprocess.PIPE)
            deadline = time.monotonic() + _REACH_SECONDS
            for place in places:
                info = _host_info(hosts[place], started[place], deadline)
                reached[place] = ReachedHost(hosts[place], started[place], info)
        return [reached[place] for place in range(len(hosts))]
    except BaseException:  # Including Ctrl-C while waiting for a host.
        for process in started.values():
            kill_session(process.pid)
        raise


def _host_info(host: str, process: subprocess.Popen[bytes], deadline: float) -> HostInfo:
    """Read the information from the remote end."""
    output = cast(IO[bytes], process.stdout)
    os.set_blocking(output.fileno(), False)
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if not selector.select(deadline - time.monotonic()):
                break
            part = os.read(output.fileno(), 1)  # Output after the line belongs to the rank.
            if not part:
                break
            said += part
            line = said.rpartition(b"\n")[0].rpartition(b"\n")[2].decode(errors="replace")
            if said.endswith(b"\n") and line.startswith(INFO_PREFIX):
                with contextlib.suppress(TypeError, ValueError):
                    return _complete(host, **json.loads(line.removeprefix(INFO_PREFIX)))
    words = " ".join(said.decode(errors="replace").split()) or "no output"
    raise UnreachableError(f"The host {host} cannot be reached, or lacks tfdist: {words}.", host)


def _complete(host: str, caller: str, address: str, port: int) -> HostInfo:
    """The information, with missing addresses looked up; only ssh reports them."""
    try:
        address = address or socket.gethostbyname(host)
        return HostInfo(caller or address_towards(address), address, port)
    except OSError as error:
        raise UnreachableError(
            f"The host {host} does not have an address: {error}.", host
        ) from error


@dataclasses.dataclass(frozen=True)
class ReachedHost:
    """A connected host that waits for a command; `process` is the local ssh or srun."""

    host: str
    process: subprocess.Popen[bytes]
    info: HostInfo

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> RemoteRank:
        """Start the rank, in a folder of the same path as the current one."""
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
    """The variables to send to ranks on other hosts; report the omitted secrets."""
    chosen = set(os.environ.get(PASS, "").split(","))
    passed, kept = {}, []
    for name, value in os.environ.items():
        if name == _GPUS and name not in chosen and not re.fullmatch(r"[\d,\s-]*", value):
            continue  # Names of GPUs are those of this host.
        if name in chosen or not (_OF_THE_HOST.fullmatch(name) or _SECRET.fullmatch(name)):
            passed[name] = value
        elif not _OF_THE_HOST.fullmatch(name):
            kept.append(name)
    if kept:
        say(
            "tfdist-run",
            f"{', '.join(sorted(kept))} look like secrets and are not sent to other hosts. "
            f"List variables to send anyway in {PASS}=NAME,NAME.",
        )
    return passed


class RemoteRank(RankProcess):
    """A rank on another host; the local process is ssh or srun."""

    def __init__(self, host: str, process: subprocess.Popen[bytes]):
        super().__init__(process)
        self.host = host
        self._input = cast(IO[bytes], process.stdin)

    def tell(self, line: str) -> None:
        """Send a line to the remote end; a closed connection is detected by the exit code."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._input.write(f"{line}\n".encode())
            self._input.flush()

    @property
    def code(self) -> int | None:
        """As for a local rank, as far as ssh reports it."""
        code = super().code
        if code is not None and 128 < code < _SSH_FAILED:
            return 128 - code
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the rank through the remote end."""
        self.tell(str(int(number)))

    def kill(self) -> None:
        """Kill the rank and the local ssh or srun."""
        self.tell(str(int(signal.SIGKILL)))
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        super().kill()

    def describe(self, code: int) -> str:
        """As for a local rank; a lost connection counts as a failure."""
        if code == _SSH_FAILED:
            return f"was lost: the connection to {self.host} was closed"
        return f"on {self.host} {super().describe(code)}"

    def is_stopped(self) -> bool:
        """Always False, because the state is unknown; the watchdog detects frozen ranks."""
        return False
