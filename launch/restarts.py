"""A job that is started again after a failure, on as many ranks as there is room for then."""

from __future__ import annotations

import time
from collections.abc import Callable

from tfdist import exit_codes
from tfdist.launch.command import say
from tfdist.launch.hosts import HostDiscovery
from tfdist.launch.supervisor import Supervisor

__all__ = ["run_with_restarts"]

_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0
#: A job that ran for so long has got over what made it fail before.
_HEALTHY_SECONDS = 600.0
_LOOK_SECONDS = 1.0


def run_with_restarts(
    start: Callable[[int, Callable[[], bool]], tuple[Supervisor, int]],
    num_ranks: int,
    min_ranks: int,
    max_ranks: int,
    *,
    max_restarts: int,
    discovery: HostDiscovery | None,
) -> int:
    """Runs a job until it ends well, is told to end, or has failed too often.

    Args:
        start: Runs the job on so many ranks; it is to end where the function that it is given says
            so. Returns what ran it, and the exit code.
        num_ranks: How many ranks, without a discovery.
        min_ranks: Waits for room for so many.
        max_ranks: Takes room for no more.
        max_restarts: How many failures are followed by another start. Changes of the hosts do not
            count.
        discovery: Who says how much room there is.

    Returns:
        The exit code of the last run.
    """
    failures, delay = 0, _FIRST_DELAY
    while True:
        size = num_ranks if discovery is None else _wait_for_room(discovery, min_ranks, max_ranks)

        def has_changed(size=size) -> bool:
            return discovery is not None and _room(discovery, max_ranks) not in (size, 0)

        begun = time.monotonic()
        supervisor, code = start(size, has_changed)
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
        say("tfdist-run", f"restart {failures} of {max_restarts} in {delay:g} s.")
        time.sleep(delay)
        delay = min(2 * delay, _LONGEST_DELAY)


def _room(discovery: HostDiscovery, max_ranks: int) -> int:
    return min(discovery.slots, max_ranks)


def _wait_for_room(discovery: HostDiscovery, min_ranks: int, max_ranks: int) -> int:
    said = False
    while _room(discovery, max_ranks) < min_ranks:
        if not said:
            say(
                "tfdist-run",
                f"waits for room for {min_ranks} ranks; there is some for {discovery.slots}.",
            )
            said = True
        time.sleep(_LOOK_SECONDS)
    return _room(discovery, max_ranks)
