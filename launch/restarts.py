"""A job that is started again after a failure, on as many ranks as there is room for then."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from tfdist import exit_codes
from tfdist.launch.command import UsageError
from tfdist.launch.supervisor import Supervisor

__all__ = ["HostDiscovery", "run_with_restarts"]

_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0
#: A job that ran for so long has got over what made it fail before.
_HEALTHY_SECONDS = 600.0
_LOOK_SECONDS = 1.0
_SCRIPT_SECONDS = 30.0


class HostDiscovery:
    """Asks a script, again and again, how many ranks there is room for.

    By Horovod's convention the script prints a line for each host that is there: its name, or
    `name:slots`.

    Args:
        script: The command.
        check_host: Called with the name of each host; raises UsageError for one that is unfit.
    """

    def __init__(self, script: str, check_host: Callable[[str], None]):
        self._script, self._check_host = script, check_host
        self._slots = self._ask()
        threading.Thread(target=self._keep_asking, name="host-discovery", daemon=True).start()

    @property
    def slots(self) -> int:
        """How many ranks there is room for, by the last answer."""
        return self._slots

    def _keep_asking(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            try:
                self._slots = self._ask()
            except UsageError as error:
                _say(f"{error} The hosts stay as they were.")

    def _ask(self) -> int:
        try:
            answer = subprocess.run(
                self._script,
                shell=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SCRIPT_SECONDS,
                check=True,
            )
        except subprocess.SubprocessError as error:
            raise UsageError(f"--host_discovery_script={self._script}: {error}") from error
        slots = 0
        for line in answer.stdout.split():
            found = re.fullmatch(r"([^:\s]+)(?::([1-9][0-9]*))?", line)
            if found is None:
                raise UsageError(
                    "The host discovery script prints a host a line, as name or name:slots. "
                    f"Received: {line!r}."
                )
            self._check_host(found[1])
            slots += int(found[2] or 1)
        return slots


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
            _say("the hosts have changed.")
            continue
        if time.monotonic() - begun > _HEALTHY_SECONDS:
            failures, delay = 0, _FIRST_DELAY
        if failures == max_restarts:
            return code
        failures += 1
        _say(f"restart {failures} of {max_restarts} in {delay:g} s.")
        time.sleep(delay)
        delay = min(2 * delay, _LONGEST_DELAY)


def _room(discovery: HostDiscovery, max_ranks: int) -> int:
    return min(discovery.slots, max_ranks)


def _wait_for_room(discovery: HostDiscovery, min_ranks: int, max_ranks: int) -> int:
    said = False
    while _room(discovery, max_ranks) < min_ranks:
        if not said:
            _say(f"waits for room for {min_ranks} ranks; there is some for {discovery.slots}.")
            said = True
        time.sleep(_LOOK_SECONDS)
    return _room(discovery, max_ranks)


def _say(text: str) -> None:
    print(f"tfdist-run: {text}", file=sys.stderr, flush=True)
