"""Checks of other hosts: names, ssh, versions, clocks, and ports and links in both directions."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, cast

from tfdist.addons.planner import Link, Requirement
from tfdist.addons.planner.machines import BUCKET_BYTES
from tfdist.addons.planner.quantities import as_seconds
from tfdist.addons.planner.requirements import asked_of_link
from tfdist.launch.doctor import far
from tfdist.launch.doctor.findings import Finding, note, ok, problem
from tfdist.launch.doctor.machine import RANK_BYTES
from tfdist.launch.doctor.surroundings import addresses_of
from tfdist.launch.run.hosts import Host
from tfdist.launch.run.processes import start_session
from tfdist.launch.sessions import kill_session
from tfdist.runtime.rendezvous import address_towards
from tfdist.utils.checks import one_line

Shell = Callable[[str, Sequence[str]], list[str]]

#: The largest acceptable difference of clocks in seconds, as shared files and certificates have times.
_MOST_APART = 5.0
_PINGS = 3
#: The most seconds and bytes of the measurement of a link.
_FILL_SECONDS = 0.5
_FILL_BYTES = 64 << 20
_GIB = 1 << 30

#: Patterns of ssh's errors, with the problem and its remedy; {host} is replaced by the host.
_SSH_FAILURES = (
    (
        r"Permission denied",
        "ssh requires a password: no key of this user is authorized there",
        "ssh-copy-id {host} (first ssh-keygen, if there is no key)",
    ),
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION",
        "the host is unknown to ssh, or its key has changed",
        "ssh {host} once, and confirm the key; ssh-keygen -R {host} if it has changed",
    ),
    (
        r"Could not resolve hostname",
        "ssh does not resolve the name",
        "add {host} to the name server, to /etc/hosts or to ~/.ssh/config",
    ),
    (r"Connection refused", "no ssh server answers", "start sshd on {host}"),
    (
        r"Connection timed out|No route to host|Network is unreachable",
        "ssh cannot connect",
        "start {host}; open TCP port 22 in the firewall",
    ),
    (
        r"No module named '?tfdist|ModuleNotFoundError",
        "tfdist, or a dependency of it, is not installed there",
        "install the same environment at the same path on {host}",
    ),
    (
        r"No such file or directory|not found",
        f"{sys.executable} does not exist there",
        "install the same environment at the same path on {host}",
    ),
)


class _FarError(Exception):
    """The other host did not answer as expected."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A data-parallel training, whose gradients are sent over the links.

    Attributes:
        parameters: Number of parameters, in float32.
        step_seconds: Seconds of a step on a single rank.
        ranks: Number of ranks.
    """

    parameters: float
    step_seconds: float
    ranks: int

    def asks(self, bandwidth: float, latency: float) -> Requirement:
        """The requirement on a link with a bandwidth in bytes per second and a latency in seconds."""
        size, seconds = 4 * self.parameters, self.step_seconds
        buckets = math.ceil(size / BUCKET_BYTES)
        link = Link(latency, bandwidth)
        return asked_of_link(size, buckets, self.ranks, link, seconds, seconds)


def examine(
    host: Host, shell: Shell, work_folder: str, seconds: float, job: Job | None = None
) -> list[Finding]:
    """Check a host for ranks.

    Args:
        host: The host, and its number of ranks.
        shell: Function that returns the command line of a command on the host.
        work_folder: The working folder of the ranks.
        seconds: Time limit of an answer.
        job: The training whose gradients the link must carry, or None.
    """
    name = host.name
    found = []
    if shell(name, ["true"])[0] == "ssh" and not _is_alias(name):
        try:
            addresses_of(name.rpartition("@")[2])
        except OSError as error:
            text = f"the name does not resolve: {error.strerror}"
            return [problem(name, text, f"add {name} to the name server or to /etc/hosts")]
    try:
        with _Far(name, shell, seconds) as there:
            found += _compare(host, there)
            found += _compare_clocks(name, there)
            found += _look_at_folder(name, there, work_folder)
            found += _try_links(name, there, job)
    except _FarError as error:
        found.append(_failure(name, str(error)))
    return found


def _is_alias(name: str) -> bool:
    """Whether ssh's configuration maps a name to another host name."""
    try:
        done = subprocess.run(
            ["ssh", "-G", "--", name], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    found = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
    return found is not None and found[1] != name.rpartition("@")[2]


def _failure(host: str, said: str) -> Finding:
    for pattern, text, remedy in _SSH_FAILURES:
        if re.search(pattern, said):
            return problem(host, text, remedy.format(host=host))
    return problem(host, f"it cannot be checked: {one_line(said)}", f"try: ssh {host} true")


def _compare(host: Host, there: _Far) -> list[Finding]:
    """Compare versions, and check the memory."""
    found = []
    here = far.versions()
    theirs = cast(Mapping[str, str | None], there.hello["versions"])
    other = [
        f"{name} {theirs.get(name) or 'none'} (here {version or 'none'})"
        for name, version in here.items()
        if theirs.get(name) != version
    ]
    if other:
        text = f"it has {', '.join(other)}"
        found.append(problem(host.name, text, "install the same environment on all hosts"))
    else:
        found.append(ok(host.name, f"ssh works, the same versions; {there.hello['cores']} cores"))
    free = cast(int, there.hello["free"])
    if free < host.slots * RANK_BYTES:
        text = f"{free / _GIB:.1f} GiB of memory are free for {host.slots} rank(s)"
        fitting = free // RANK_BYTES
        remedy = f"-H {host.name}:{fitting}" if fitting else f"end other programs on {host.name}"
        found.append(problem(host.name, text, remedy))
    return found


def _compare_clocks(name: str, there: _Far) -> list[Finding]:
    """Measure the difference of the clocks as NTP does, from the fastest of several requests."""
    best: tuple[float, float] | None = None
    for _ in range(_PINGS):
        begin = time.time()
        clock = there.ask("clock")["clock"]
        end = time.time()
        if best is None or end - begin < best[0]:
            best = (end - begin, clock - (begin + end) / 2)
    taken, apart = best or (0.0, 0.0)
    if abs(apart) - taken / 2 > _MOST_APART:
        way = "ahead of" if apart > 0 else "behind"
        text = f"its clock is {abs(apart):,.0f} s {way} this one"
        remedy = "timedatectl set-ntp true on both (or chronyc makestep)"
        return [problem(name, text, remedy)]
    return [ok(name, f"clocks agree within {abs(apart) + taken / 2:.2f} s")]


def _look_at_folder(name: str, there: _Far, folder: str) -> list[Finding]:
    answer = there.ask("folder", folder)
    if not answer["folder"]:
        text = f"the working folder {folder} does not exist there"
        return [problem(name, text, "create it there, or share it")]
    if not answer["writable"]:
        text = f"{folder} cannot be written there"
        return [problem(name, text, "make it writable there")]
    return []


def _try_links(name: str, there: _Far, job: Job | None) -> list[Finding]:
    """Connect in both directions, and measure the link."""
    found = []
    # Of an alias only ssh knows the address.
    address = there.hello.get("address") or min(addresses_of(name.rpartition("@")[2]), key=len)
    token = secrets.token_hex(16)
    try:
        port = there.ask("listen", token)["port"]
        rate, latency = _send((address, port), token)
        there.hear()
        text = f"accepts connections from here; {rate / 1e6:,.0f} MB/s on one connection"
        found.append(ok(name, text))
        if job is not None:
            found.append(_compare_needs(name, job, rate, latency))
    except (OSError, _FarError) as error:
        text = f"TCP ports of {name} are blocked from here: {error}"
        found.append(problem(name, text, _open_ports()))
        there.drain()
    own = there.hello["caller"] or address_towards(address)
    token = secrets.token_hex(16)
    with socket.create_server(("", 0)) as server:
        server.settimeout(far.SECONDS)
        caller = threading.Thread(target=_accept, args=(server, token), daemon=True)
        caller.start()
        try:
            received = there.ask("call", str(own), str(server.getsockname()[1]), token)
            if received.get("received", -1) < 0:
                raise _FarError("the data did not arrive")
            found.append(ok(name, "can connect to this machine"))
        except _FarError as error:
            text = f"TCP ports of this machine ({own}) are blocked from {name}: {error}"
            found.append(problem(name, text, _open_ports()))
    return found


def _compare_needs(name: str, job: Job, rate: float, latency: float) -> Finding:
    """Compare the requirements of a job with the measured link."""
    asks = job.asks(rate, latency)
    text = (
        f"gradients require {asks.bandwidth / 1e6:,.0f} MB/s and at most {as_seconds(asks.latency)} per hop; "
        f"the link has {rate / 1e6:,.0f} MB/s and {as_seconds(latency)}"
    )
    return ok(name, text) if asks.is_met else note(name, text, asks.remedy)


def _open_ports() -> str:
    return (
        "open TCP between the hosts in the firewall, ports 12000 to 32000 and ephemeral ports "
        "(sysctl net.ipv4.ip_local_port_range)"
    )


def _accept(server: socket.socket, token: str) -> None:
    """Accept one connection, and send the token."""
    try:
        sock, _ = server.accept()
        with sock:
            sock.sendall(token.encode())
    except OSError:
        return  # The other end reports the problem.


def _send(address: tuple[str, int], token: str) -> tuple[float, float]:
    """Connect, and measure the link: bytes per second, and seconds of latency in one direction."""
    block = bytes(1 << 18)
    called = time.monotonic()
    with socket.create_connection(address, far.SECONDS) as sock:
        # Connecting takes one round trip.
        latency = (time.monotonic() - called) / 2
        sock.settimeout(far.SECONDS)
        sock.sendall(token.encode())
        begin, sent = time.monotonic(), 0
        while sent < _FILL_BYTES and time.monotonic() - begin < _FILL_SECONDS:
            sock.sendall(block)
            sent += len(block)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)  # The other end closes the connection after reading all data.
        return sent / (time.monotonic() - begin), latency


class _Far:
    """A connection to the doctor's process on another host."""

    def __init__(self, name: str, shell: Shell, seconds: float):
        self._name, self._seconds = name, seconds
        command = shell(name, [sys.executable, "-m", far.__name__])
        self._process = start_session(command, os.environ, stdin=subprocess.PIPE)
        self._output = cast(IO[bytes], self._process.stdout)
        self._input = cast(IO[bytes], self._process.stdin)
        os.set_blocking(self._output.fileno(), False)
        self._read, self._noise = b"", bytearray()
        self.hello: dict[str, Any] = {}

    def __enter__(self) -> _Far:
        try:
            self.hello = self.hear()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._input.close()
        kill_session(self._process.pid)
        self._process.wait()
        self._output.close()

    def ask(self, *order: str) -> dict[str, Any]:
        """Send a command, and return its answer.

        Raises:
            _FarError: There is no answer, or the command failed.
        """
        try:
            self._input.write(json.dumps(order).encode() + b"\n")
            self._input.flush()
        except BrokenPipeError as error:
            raise _FarError("the connection failed") from error
        answer = self.hear()
        if "error" in answer:
            raise _FarError(str(answer["error"]))
        return answer

    def drain(self) -> None:
        """Discard the answer of a command that failed on this side."""
        try:
            self.hear()
        except _FarError:
            return  # The next command reports it.

    def hear(self) -> dict[str, Any]:
        """Read the next answer."""
        deadline = time.monotonic() + self._seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._read.partition(b"\n")
                if newline and line.startswith(far.PREFIX.encode()):
                    self._read = rest
                    return json.loads(line.removeprefix(far.PREFIX.encode()))
                if newline:
                    self._noise += line + b" "
                    self._read = rest
                    continue
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise _FarError(f"it did not answer within {self._seconds:g} s")
                part = os.read(self._output.fileno(), 1 << 16)
                if not part:
                    noise = (self._noise + self._read).decode(errors="replace")
                    said = " ".join(noise.split())[-600:]
                    raise _FarError(said or "it did not print anything")
                self._read += part
