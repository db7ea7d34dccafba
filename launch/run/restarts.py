"""Restarts of a job after failures, on the ranks that the available hosts have slots for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from tfdist.launch.flags.command import say
from tfdist.launch.run.exclusion import Exclusion
from tfdist.launch.run.hosts import Host, HostDiscovery, assign_hosts, should_restart
from tfdist.launch.run.remote import UnreachableError
from tfdist.launch.run.supervisor import Supervisor
from tfdist.runtime import exit_codes

_FIRST_DELAY = 1.0
#: After this time, earlier failures of a job no longer count.
_HEALTHY_SECONDS = 600.0
_LOOK_SECONDS = 1.0

#: Runs a job on the hosts of its ranks until it ends or the function returns True. The last argument is
#: the time at which the previous run failed, in seconds since the epoch; None at the first start. Returns
#: the supervisor and the exit code.
Start = Callable[[Sequence[str], Callable[[], bool], float | None], tuple[Supervisor, int]]


def run_with_restarts(
    start: Start,
    hosts: Sequence[Host],
    min_ranks: int,
    max_ranks: int,
    *,
    max_restarts: int,
    longest_delay: float,
    discovery: HostDiscovery | None,
    exclude_after: int | None = None,
) -> int:
    """Run a job until it succeeds, is interrupted, or has failed too often.

    Args:
        start: Function that runs the job once.
        hosts: The hosts, if there is no discovery.
        min_ranks: The minimum number of ranks.
        max_ranks: The maximum number of ranks.
        max_restarts: The number of restarts after failures. Restarts after changes of the hosts do not
            count.
        longest_delay: The longest delay of a restart in seconds. The first is 1 s, and each doubles.
        discovery: The discovery of hosts, or None.
        exclude_after: The number of failures after which a host is excluded; None for never.

    Returns:
        The exit code of the last run.

    Raises:
        UnreachableError: A host cannot be reached, at the first start or after the last restart.
    """
    failures, delay, has_run, failed_at = 0, _FIRST_DELAY, False, None
    excluded = Exclusion(exclude_after)
    code = exit_codes.FAILED
    while True:
        if discovery is not None:
            names = _wait_for_room(discovery, excluded, min_ranks, max_ranks)
        else:
            names = assign_hosts(excluded.left(hosts), max_ranks)
            if len(names) < min_ranks:
                say(
                    "tfdist-run",
                    f"the remaining hosts have {len(names)} slots, and at least {min_ranks} ranks are "
                    "required: --min_np lowers the minimum.",
                )
                return code

        def has_changed(names=names) -> bool:
            return discovery is not None and should_restart(
                names, excluded.left(discovery.hosts), max_ranks
            )

        begun = time.monotonic()
        try:
            supervisor, code = start(names, has_changed, failed_at)
        except UnreachableError as error:
            if excluded.is_on:
                say("tfdist-run", str(error))
                excluded.leave_out(error.host, "it cannot be reached")
                continue
            # A host that was never reached has a wrong name or lacks a key, which a restart does not fix.
            if failures == max_restarts or not has_run:
                raise
            say("tfdist-run", str(error))
        else:
            has_run, failed_at = True, supervisor.failed_at
            if code in (0, exit_codes.USAGE) or supervisor.was_told:
                return code
            if supervisor.was_asked:
                say("tfdist-run", "the hosts have changed.")
                continue
            if time.monotonic() - begun > _HEALTHY_SECONDS:
                failures, delay = 0, _FIRST_DELAY
                excluded.forgive()
            if failures == max_restarts or (
                code == exit_codes.PERSISTENT_FAULT and not excluded.is_on
            ):
                return code
            if supervisor.failed is not None:
                rank, failed_code = supervisor.failed
                # Servers share the hosts of the ranks.
                excluded.count(names[rank % len(names)], failed_code)
        failures += 1
        delay = min(delay, longest_delay)
        limit = "" if max_restarts == sys.maxsize else f" of {max_restarts}"
        say("tfdist-run", f"restart {failures}{limit} in {delay:g} s.")
        time.sleep(delay)
        delay *= 2


def _wait_for_room(
    discovery: HostDiscovery, excluded: Exclusion, min_ranks: int, max_ranks: int
) -> list[str]:
    said = False
    while len(found := assign_hosts(excluded.left(discovery.hosts), max_ranks)) < min_ranks:
        if not said:
            said = True
            say(
                "tfdist-run",
                f"waiting for slots for {min_ranks} ranks; there are {len(found)}.",
            )
        time.sleep(_LOOK_SECONDS)
    return found
