"""Hosts that share nothing but this machine's kernel, and a network between them.

Each is a set of Linux namespaces: processes, network, host name and mounts of its own, with its own
address, its own sshd, and its own content of the working folder, which has the same path on all. A
switch, one more network namespace, joins them by pairs of virtual network cards.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import IO

__all__ = ["SCRIPTS", "Cluster", "Host", "environment", "why_not"]

#: The programs of this environment.
SCRIPTS = Path(sysconfig.get_path("scripts"))

_SECONDS = 20
_SSHD_CONFIG = """\
Port 22
HostKey {ssh}/key
AuthorizedKeysFile {ssh}/key.pub
PermitRootLogin yes
PermitUserEnvironment no
StrictModes no
UsePAM no
PrintMotd no
MaxStartups 100
"""
_SSH_CONFIG = """\
Host *
  IdentityFile {ssh}/key
  UserKnownHostsFile {ssh}/known_hosts
  StrictHostKeyChecking accept-new
  LogLevel ERROR
"""
#: What a host does when it comes up; then it lives until it is killed.
_BOOT = """\
set -e
hostname {name}
mount --bind {root}/hosts /etc/hosts
mount --bind {root}/{name} {root}/work
mount -t tmpfs tmpfs /run && mkdir /run/sshd
ip link set lo up
echo up && read -r _
ip address add {address}/24 dev eth0 && ip link set eth0 up
/usr/sbin/sshd -f {ssh}/sshd_config -E {root}/{name}.log
echo ready && exec sleep infinity
"""


def why_not() -> str | None:
    """Why this machine cannot play several; None where it can."""
    for program in ("ip", "tc", "unshare", "nsenter", "ssh-keygen", "ssh"):
        if shutil.which(program) is None:
            return f"`{program}` is not installed (packages iproute2, util-linux, openssh-client)"
    if not os.path.exists("/usr/sbin/sshd"):
        return "sshd is not installed (package openssh-server)"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "ip", "link", "add", "one",
         "type", "veth", "peer", "name", "two"],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )  # fmt: skip
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    return None


def environment() -> dict[str, str]:
    """What a program on a host finds its tools by; it does not say much."""
    return {"TF_CPP_MIN_LOG_LEVEL": "3", "PATH": f"{SCRIPTS}:{os.environ['PATH']}"}


class Host:
    """A host of the cluster.

    Attributes:
        name: Its name.
        address: Its address.
        pid: Its first process.
    """

    def __init__(self, name: str, address: str, pid: int, process: subprocess.Popen, root: Path):
        self.name, self.address, self.pid = name, address, pid
        self._process, self._root = process, root

    @property
    def folder(self) -> Path:
        """The content of its working folder, as it is seen from outside."""
        return self._root / self.name

    def start(self, *command, environment=None, **options) -> subprocess.Popen:
        """Starts a command in the working folder."""
        work = self._root / "work"
        enter = ["nsenter", f"--target={self.pid}", "--all", f"--wdns={work}", *map(str, command)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
        return subprocess.Popen(
            enter,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            **options,
        )

    def run(self, *command, seconds: float = 300, **options) -> subprocess.CompletedProcess:
        """Runs a command to its end; kills it when the time is over."""
        with self.start(*command, **options) as process:
            try:
                said, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said, _ = process.communicate()
                raise AssertionError(f"{command} did not end in {seconds} s:\n{said}") from None
        return subprocess.CompletedProcess(command, process.returncode, said)

    def kill(self) -> None:
        """Ends all its processes at once; the kernel still says goodbye for them."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait(_SECONDS)


class Cluster:
    """A context with some hosts: host1, host2, ...

    Args:
        size: How many.
    """

    def __init__(self, size: int = 2):
        self._size = size
        self.hosts: list[Host] = []

    def __enter__(self) -> Cluster:
        self._undo = contextlib.ExitStack()
        try:
            self._begin()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._undo.close()

    def _begin(self) -> None:
        self._root = Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-")))
        ssh = self._root / "ssh"
        ssh.mkdir()
        (self._root / "work").mkdir()
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ssh / "key")
        for name, text in (("sshd_config", _SSHD_CONFIG), ("ssh_config", _SSH_CONFIG)):
            (ssh / name).write_text(text.format(ssh=ssh))
        addresses = {f"host{i}": f"10.99.0.{i}" for i in range(1, self._size + 1)}
        lines = ["127.0.0.1 localhost", *(f"{ip} {name}" for name, ip in addresses.items())]
        (self._root / "hosts").write_text("\n".join(lines) + "\n")
        self._switch = self._namespaces(["--net"], "echo up && exec sleep infinity")
        self.on_switch("ip", "link", "add", "bridge", "type", "bridge")
        self.on_switch("ip", "link", "set", "bridge", "up")
        for name, address in addresses.items():
            self.hosts.append(self._boot(name, address, ssh))

    def _boot(self, name: str, address: str, ssh: Path) -> Host:
        (self._root / name).mkdir()
        boot = f"mount --bind {ssh}/ssh_config /etc/ssh/ssh_config\n" + _BOOT
        script = boot.format(name=name, root=self._root, address=address, ssh=ssh)
        kinds = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        process = self._namespaces(kinds, script)
        (pid,) = map(
            int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        )
        self.on_switch("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0",
                       "netns", pid)  # fmt: skip
        self.on_switch("ip", "link", "set", name, "master", "bridge", "up")
        stdin, _ = pipes_of(process)
        stdin.write("go\n")
        stdin.flush()
        expect(process, "ready")
        host = Host(name, address, pid, process, self._root)
        end = time.monotonic() + _SECONDS
        while host.run("ssh", name, "true", seconds=_SECONDS).returncode:
            if time.monotonic() > end:
                raise RuntimeError((self._root / f"{name}.log").read_text())
            time.sleep(0.1)
        return host

    def _namespaces(self, kinds: list[str], script: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["unshare", *kinds, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._undo.callback(_end, process)
        expect(process, "up")
        return process

    def on_switch(self, *command) -> None:
        """Runs a command where the virtual cables end."""
        run("nsenter", f"--target={self._switch.pid}", "--net", *command)

    def cut(self, host: Host) -> None:
        """Pulls a host's cable."""
        self.on_switch("ip", "link", "set", host.name, "down")

    def mend(self, host: Host) -> None:
        """Puts it back."""
        self.on_switch("ip", "link", "set", host.name, "up")

    def shape(self, rate: str | None) -> None:
        """Limits what each host sends and receives, as "1gbit"; None lifts it."""
        for host in self.hosts:
            for enter, card in ((host.pid, "eth0"), (self._switch.pid, host.name)):
                inside = ["nsenter", f"--target={enter}", "--net", "tc", "qdisc"]
                if rate is None:
                    run(*inside, "del", "dev", card, "root")
                else:
                    run(*inside, "replace", "dev", card, "root", "tbf", "rate", rate, "burst",
                        "256kb", "latency", "50ms")  # fmt: skip


def run(*command) -> None:
    """Runs a command of the system; its own words are the error."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=_SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


def pipes_of(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """The pipes to and from a process."""
    if process.stdin is None or process.stdout is None:
        raise ValueError("The process was started without pipes.")
    return process.stdin, process.stdout


def expect(process: subprocess.Popen[str], word: str) -> None:
    """Waits for a line of a process."""
    _, stdout = pipes_of(process)
    line = stdout.readline().strip()
    if line != word:
        raise RuntimeError(f"A host did not come up. Expected: {word!r}. Received: {line!r}.")


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait(_SECONDS)
