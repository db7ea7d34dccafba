"""A job that is started again after a failure, on as many ranks as there is room for then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tfdist.launch.command import say
from tfdist.launch.hosts import HostDiscovery, assign_hosts, should_restart
from tfdist.launch.remote import UnreachableError
from tfdist.launch.supervisor import Supervisor
from tfdist.runtime import exit_codes

__all__ = ["Start", "run_with_restarts"]

_FIRST_DELAY = 1.0
#: A job that ran for so long has got over what made it fail before.
_HEALTHY_SECONDS = 600.0
_LOOK_SECONDS = 1.0

#: Runs a job on the hosts of its ranks; it is to end where the function says so. Returns what ran
#: it, and the exit code.
Start = Callable[[Sequence[str], Callable[[], bool]], tuple[Supervisor, int]]


def run_with_restarts(
    start: Start,
    hosts: Sequence[str],
    min_ranks: int,
    max_ranks: int,
    *,
    max_restarts: int,
    longest_delay: float,
    discovery: HostDiscovery | None,
) -> int:
    """Runs a job until it ends well, is told to end, or has failed too often.

    Args:
        start: Runs the job once.
        hosts: The host of each rank, without a discovery.
        min_ranks: The ranks that there must be room for.
        max_ranks: The ranks that are started at most.
        max_restarts: How many failures are followed by a restart. Changes of the hosts do not count.
        longest_delay: Seconds. The first restart waits for 1, the next twice as long, up to this.
        discovery: Who says which hosts there are.

    Returns:
        The exit code of the last run.

    Raises:
        UnreachableError: A host cannot be reached, at the first start or when no other is left.
    """
    failures, delay, has_run = 0, _FIRST_DELAY, False
    while True:
        if discovery is not None:
            hosts = _wait_for_room(discovery, min_ranks, max_ranks)

        def has_changed(hosts=hosts) -> bool:
            return discovery is not None and should_restart(hosts, discovery.hosts, max_ranks)

        begun = time.monotonic()
        try:
            supervisor, code = start(hosts, has_changed)
        except UnreachableError as error:
            # A host that was never reached has a wrong name or lacks a key: a restart does not help.
            if failures == max_restarts or not has_run:
                raise
            say("tfdist-run", str(error))
        else:
            has_run = True
            if code in (0, exit_codes.USAGE) or supervisor.was_told:
                return code
            if supervisor.was_asked:
                say("tfdist-run", "the hosts have changed.")
                continue
            if time.monotonic() - begun > _HEALTHY_SECONDS:
                failures, delay = 0, _FIRST_DELAY
            if failures == max_restarts:
                return code
        failures += 1
        delay = min(delay, longest_delay)
        say("tfdist-run", f"restart {failures} of {max_restarts} in {delay:g} s.")
        time.sleep(delay)
        delay *= 2


def _wait_for_room(discovery: HostDiscovery, min_ranks: int, max_ranks: int) -> list[str]:
    said = False
    while len(found := assign_hosts(discovery.hosts, max_ranks)) < min_ranks:
        if not said:
            said = True
            say(
                "tfdist-run",
                f"waiting for slots for {min_ranks} ranks; there are {len(found)}.",
            )
        time.sleep(_LOOK_SECONDS)
    return found
