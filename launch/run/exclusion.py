"""Exclusion of hosts that failed too often or cannot be reached."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from tfdist.launch.flags.command import say
from tfdist.launch.run.hosts import Host
from tfdist.runtime import exit_codes


class Exclusion:
    """Counter of the failures of hosts, which excludes some.

    Args:
        after: The number of failures after which a host is excluded; None for never.
    """

    def __init__(self, after: int | None):
        self._after = after
        self._failures: collections.Counter[str] = collections.Counter()
        self._excluded: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether exclusion is enabled."""
        return self._after is not None

    def count(self, host: str, code: int) -> None:
        """Count a failure of the rank that failed first.

        Args:
            host: The host of the rank.
            code: Its exit code. A single persistent fault excludes the host.
        """
        if self._after is None:
            return
        self._failures[host] += 1
        if code == exit_codes.PERSISTENT_FAULT:
            self.leave_out(host, "its rank computed a wrong result repeatedly")
        elif self._failures[host] >= self._after:
            times = self._failures[host]
            self.leave_out(host, f"its ranks failed {times} time{'s' * (times > 1)}")

    def leave_out(self, host: str, why: str) -> None:
        """Exclude a host."""
        self._excluded.add(host)
        say("tfdist-run", f"the host {host} is excluded from now on: {why}.")

    def forgive(self) -> None:
        """Reset the failures of the remaining hosts after the job has run for a long time."""
        self._failures.clear()

    def left(self, hosts: Iterable[Host]) -> list[Host]:
        """The hosts that are not excluded."""
        return [host for host in hosts if host.name not in self._excluded]
