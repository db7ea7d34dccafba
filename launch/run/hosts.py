"""Hosts and their slots, given by flags or discovered by a script."""

from __future__ import annotations

import collections
import re
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from tfdist.launch.flags.command import UsageError, say
from tfdist.launch.flags.values import MOST_RANKS_OF_A_HOST
from tfdist.utils.checks import one_line

#: ssh would treat a name that begins with a hyphen as an option.
_HOST = re.compile(r"([^:\s-][^:\s]*)(?::([1-9][0-9]*))?")
_MOST_DIGITS = len(str(MOST_RANKS_OF_A_HOST))
_LOOK_SECONDS = 1.0
_SCRIPT_SECONDS = 30.0


class Host(NamedTuple):
    """A machine and its number of slots for ranks."""

    name: str
    slots: int


def parse_host(text: str) -> Host | None:
    """Parse `name` (one slot) or `name:slots`; return None for other texts.

    A host has at most `MOST_RANKS_OF_A_HOST` slots.
    """
    found = _HOST.fullmatch(text)
    if found is None or len(found[2] or "") > _MOST_DIGITS:
        return None
    slots = int(found[2] or 1)
    return Host(found[1], slots) if slots <= MOST_RANKS_OF_A_HOST else None


def parse_hosts(text: str) -> list[Host]:
    """Parse the value of -H, which may be empty.

    Raises:
        UsageError: It does not have the form host:slots,host:slots.
    """
    hosts = []
    for part in text.split(",") if text else []:
        host = parse_host(part)
        if host is None:
            raise UsageError(
                f"-H must be host:slots,host:slots with at most {MOST_RANKS_OF_A_HOST:,} slots each. "
                f"Received: {one_line(part, 80)!r} in -H {one_line(text, 200)!r}."
            )
        hosts.append(host)
    return hosts


def is_this_machine(name: str) -> bool:
    """Whether a name is that of this machine."""
    return name in ("localhost", "127.0.0.1", socket.gethostname())


def assign_hosts(hosts: Sequence[Host], num_ranks: int) -> list[str]:
    """The host of each rank, in the order of the hosts, for at most `num_ranks` ranks."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    names = [name for name, count in slots.items() for _ in range(count)]
    return names[:num_ranks]


def should_restart(before: Sequence[str], hosts: Sequence[Host], max_ranks: int) -> bool:
    """Whether to restart a job because a slot in use is gone, or more ranks can be started.

    Without any slots the job continues as long as it can.
    """
    room = sum(host.slots for host in hosts)
    gone = collections.Counter(before) - collections.Counter(assign_hosts(hosts, room))
    return room > 0 and (bool(gone) or min(room, max_ranks) > len(before))


class HostDiscovery:
    """Periodic host discovery by a script that prints the available hosts.

    As in Horovod, it prints one line per host: its name, or `name:slots`.
    """

    def __init__(self, script: str):
        self._script = script
        self._hosts = self._ask()
        threading.Thread(target=self._keep_asking, name="host-discovery", daemon=True).start()

    @property
    def hosts(self) -> list[Host]:
        """The hosts of the last successful call."""
        return self._hosts

    def _keep_asking(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            try:
                self._hosts = self._ask()
            except UsageError as error:
                say("tfdist-run", f"{error} The hosts remain unchanged.")

    def _ask(self) -> list[Host]:
        try:
            answer = subprocess.run(
                self._script,
                shell=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                timeout=_SCRIPT_SECONDS,
                check=True,
            )
        except UnicodeDecodeError as error:
            raise UsageError(
                f"--host_discovery_script={self._script} must print UTF-8 text. Received: "
                f"{error.object[:40]!r}."
            ) from error
        except (subprocess.SubprocessError, OSError) as error:
            raise UsageError(f"--host_discovery_script={self._script} failed: {error}") from error
        hosts = []
        for line in answer.stdout.split():
            host = parse_host(line)
            if host is None:
                raise UsageError(
                    f"--host_discovery_script={self._script} must print one host per line, as name or "
                    f"name:slots with at most {MOST_RANKS_OF_A_HOST} slots. Received: {line[:80]!r}."
                )
            hosts.append(host)
        return hosts
