"""Hosts that a job goes on without: they failed too often, or cannot be reached."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from tfdist.launch.command import say
from tfdist.launch.hosts import Host
from tfdist.runtime import exit_codes


class Exclusion:
    """Counts the failures of hosts, and leaves some out.

    Args:
        after: After how many failures a host is left out; None for never.
    """

    def __init__(self, after: int | None):
        self._after = after
        self._failures: collections.Counter[str] = collections.Counter()
        self._excluded: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether hosts are left out at all."""
        return self._after is not None

    def count(self, host: str, code: int) -> None:
        """Counts a failure of the rank that failed first.

        Args:
            host: Its host.
            code: Its exit code. A persistent fault is enough by itself.
        """
        if self._after is None:
            return
        self._failures[host] += 1
        if code == exit_codes.PERSISTENT_FAULT:
            self.leave_out(host, "its rank computed something wrong, and did so again")
        elif self._failures[host] >= self._after:
            times = self._failures[host]
            self.leave_out(host, f"its ranks failed {times} time{'s' * (times > 1)}")

    def leave_out(self, host: str, why: str) -> None:
        """Goes on without a host."""
        self._excluded.add(host)
        say("tfdist-run", f"the host {host} is left out from now on: {why}.")

    def forgive(self) -> None:
        """Forgets the failures of hosts that are still there: the job has run for long since."""
        self._failures.clear()

    def left(self, hosts: Iterable[Host]) -> list[Host]:
        """The hosts that are not left out."""
        return [host for host in hosts if host.name not in self._excluded]
