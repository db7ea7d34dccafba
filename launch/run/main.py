"""`tfdist-run`: start ranks on one or several machines."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags

from tfdist.launch.flags import command
from tfdist.launch.flags.completion import SHELLS, script
from tfdist.launch.flags.values import (
    MOST_RANKS,
    MOST_RANKS_OF_A_HOST,
    YEAR,
    FlagDefiner,
    refuse,
    refuse_ignored,
)
from tfdist.launch.run import remote, slurm
from tfdist.launch.run.hosts import Host, HostDiscovery, assign_hosts, is_this_machine, parse_hosts
from tfdist.launch.run.num_ranks import MEANT_RANKS, count_gpus, ranks_of_this_machine
from tfdist.launch.run.processes import RankProcess, signal_name
from tfdist.launch.run.restarts import run_with_restarts
from tfdist.launch.run.supervisor import Supervisor
from tfdist.launch.signals import exit_on_signals
from tfdist.runtime.lock_owner import JOB
from tfdist.runtime.recovery import FAILED_AT, NEWEST
from tfdist.runtime.rendezvous import Endpoint, environments, interface_towards

_VALUES = flags.FlagValues()
_define = FlagDefiner(_VALUES)
_NP = _define.count_or_auto(
    "np", "Number of ranks to start; auto: one for each GPU, else for each core", MOST_RANKS
)
_HOSTS = _define.string(
    "H", "", "Hosts and their slots, host1:2,host2:2 [the Slurm allocation, or this machine]"
)
_ENGINE = _define.enum(
    "engine",
    "auto",
    ["auto", "horovod", "tensorflow"],
    "Library for the collectives; auto uses Horovod if it is installed",
)
_PS = _define.integer(
    "ps",
    0,
    "Parameter servers to start in addition, for asynchronous training",
    lower_bound=0,
    upper_bound=MOST_RANKS_OF_A_HOST,
)
_WATCHDOG = _define.float(
    "watchdog_seconds",
    600.0,
    "Seconds a rank may be stopped before the job ends; 0 for no limit",
    lower_bound=0.0,
    upper_bound=YEAR,
)
_MAX_RESTARTS = _define.integer(
    "max_restarts",
    None,
    "Restarts after failures [0; no limit with --host_discovery_script]",
    lower_bound=0,
)
_RESTART_SECONDS = _define.float(
    "restart_seconds",
    60.0,
    "Longest wait before a restart; starts at 1 s and doubles",
    lower_bound=0.0,
    upper_bound=YEAR,
)
_DISCOVERY = _define.string(
    "host_discovery_script",
    None,
    "Command that prints the available hosts, one name:slots per line",
)
_MIN_NP = _define.integer(
    "min_np", None, "Minimum number of ranks to start [np]", lower_bound=1, upper_bound=MOST_RANKS
)
_MAX_NP = _define.integer(
    "max_np", None, "Maximum number of ranks to start [np]", lower_bound=1, upper_bound=MOST_RANKS
)
_EXCLUDE_AFTER = _define.integer(
    "exclude_after",
    None,
    "Failures after which a host is excluded, as are unreachable hosts [never]",
    lower_bound=1,
)
_SAVE_SECONDS = _define.float(
    "save_seconds",
    30.0,
    "Seconds for the ranks to save after a SIGTERM",
    lower_bound=0.0,
    upper_bound=YEAR,
)
_COMPLETION = _define.enum("completion", None, SHELLS, "Print the completion script for this shell")

#: The command of a parameter server.
_SERVER = [sys.executable, "-m", "tfdist.launch.parameter_server"]


def run() -> None:
    """Run the console script."""
    PROGRAM.run()


@dataclasses.dataclass(frozen=True)
class _Job:
    """A checked command line: the command, the hosts, and the range of the number of ranks."""

    words: list[str]
    #: Only a placeholder for -np if hosts are discovered.
    hosts: list[Host]
    size: int
    least: int
    most: int
    engine: str
    in_slurm: bool
    servers: int


def _check(words: list[str]) -> _Job | str:
    if _COMPLETION.value is not None:
        return script(_COMPLETION.value)
    if not words:
        raise command.UsageError(
            "tfdist-run requires a command: tfdist-run -np N -- command. Received: no command."
        )
    if shutil.which(words[0]) is None:
        raise command.UsageError(f"The command {words[0]!r} was not found on the PATH.")
    in_slurm = not _HOSTS.value and _DISCOVERY.value is None and slurm.in_allocation()
    hosts = slurm.allocated_hosts() if in_slurm else parse_hosts(_HOSTS.value)
    size = sum(host.slots for host in hosts) if _NP.value in (None, "auto") else _NP.value
    if _NP.value == "auto" and not hosts:
        size = _count(words)
    if not size:
        raise command.UsageError(
            "tfdist-run requires the number of ranks: -np N, or -np auto. Received: no -np."
        )
    if size > MOST_RANKS:
        raise command.UsageError(
            f"The number of ranks must be at most {MOST_RANKS:,}. Received: {size:,}."
        )
    if not hosts and _DISCOVERY.value is None and size > MOST_RANKS_OF_A_HOST:
        raise refuse("np", size, f"at most {MOST_RANKS_OF_A_HOST:,} on one machine; see -H")
    if hosts and (slots := len(assign_hosts(hosts, size))) < size:
        whose = "the Slurm allocation" if in_slurm else f"-H {_HOSTS.value}"
        raise command.UsageError(f"-np {size} requires more slots than {whose} has: {slots}.")
    if _DISCOVERY.value is None:
        refuse_ignored(_VALUES, (_MAX_NP,), "requires --host_discovery_script", "alone")
        if _EXCLUDE_AFTER.value is None:
            needs = "requires --host_discovery_script or --exclude_after"
            refuse_ignored(_VALUES, (_MIN_NP,), needs, "alone")
        if not hosts:
            needs = "requires several hosts: -H, --host_discovery_script, or a Slurm allocation"
            refuse_ignored(_VALUES, (_EXCLUDE_AFTER,), needs, "alone")
    else:
        given = "and --host_discovery_script"
        refuse_ignored(_VALUES, (_HOSTS,), "cannot be combined with --host_discovery_script", given)
    hosts = hosts or [Host("localhost", size)]
    if not _restarts():
        given = f"--max_restarts={_MAX_RESTARTS.value or 0}"
        ignored = (
            (_EXCLUDE_AFTER,) if _MAX_RESTARTS.value is None else (_RESTART_SECONDS, _EXCLUDE_AFTER)
        )
        refuse_ignored(_VALUES, ignored, "requires --max_restarts", given)
    least, most = _sizes(size)
    if _PS.value:
        _check_servers(in_slurm)
    return _Job(words, hosts, size, least, most, _engine(), in_slurm, _PS.value)


def _count(words: list[str]) -> int:
    """The number of ranks of -np auto on this machine."""
    if _DISCOVERY.value is not None:
        raise command.UsageError(
            "-np auto cannot be combined with --host_discovery_script. Received: "
            f"-np auto --host_discovery_script={_DISCOVERY.value}. Use a number."
        )
    size, why = ranks_of_this_machine(words)
    command.say("tfdist-run", f"-np auto starts {size} rank{'s' * (size > 1)}: {why}.")
    return size


def _check_servers(in_slurm: bool) -> None:
    """Reject flags that are not supported with parameter servers."""
    if _ENGINE.value == "horovod":
        raise command.UsageError(
            f"--ps is not supported with --engine=horovod. Received: --ps={_PS.value} "
            "--engine=horovod. Use --engine=tensorflow."
        )
    refuse_ignored(
        _VALUES, (_DISCOVERY,), "is not supported with parameter servers", f"--ps={_PS.value}"
    )
    if in_slurm:
        raise command.UsageError(
            f"--ps requires -H in a Slurm allocation. Received: --ps={_PS.value} without -H. Name the "
            "hosts with -H."
        )


def _main(job: _Job | str) -> int:
    if isinstance(job, str):
        print(job, end="")
        return 0
    shell = remote.srun if job.in_slurm else remote.ssh
    token = secrets.token_hex(8)

    def start(
        names: Sequence[str], should_end: Callable[[], bool], failed_at: float | None
    ) -> tuple[Supervisor, int]:
        # Servers share the hosts of the ranks.
        names = [*names, *(names[server % len(names)] for server in range(job.servers))]
        reached = _reach(names, shell)
        with environments(job.engine, _endpoints(names, reached), job.servers) as found:
            starts = []
            for index, (far, environment) in enumerate(zip(reached, found, strict=True)):
                begin = RankProcess.start if far is None else far.start
                environment = {**environment, MEANT_RANKS: str(job.size), JOB: token}
                if far is None:
                    environment[NEWEST] = str(newest)
                if failed_at is not None:
                    environment[FAILED_AT] = repr(failed_at)
                is_server = index >= len(names) - job.servers
                words = _SERVER if is_server else job.words
                starts.append(functools.partial(begin, words, environment))
            supervisor = Supervisor(
                starts,
                servers=job.servers,
                frozen_seconds=_WATCHDOG.value,
                save_seconds=_SAVE_SECONDS.value,
                has_gpu=count_gpus() > 0 or any(far is not None for far in reached),
                should_end=should_end,
                newest_checkpoint=lambda: newest.read_text() if newest.exists() else None,
            )
            return supervisor, supervisor.run()

    try:
        with exit_on_signals(), tempfile.TemporaryDirectory(prefix="tfdist-run-") as folder:
            newest = Path(folder, "newest")
            discovery = None if _DISCOVERY.value is None else HostDiscovery(_DISCOVERY.value)
            return run_with_restarts(
                start,
                job.hosts,
                job.least,
                job.most,
                max_restarts=_restarts(),
                longest_delay=_RESTART_SECONDS.value,
                discovery=discovery,
                exclude_after=_EXCLUDE_AFTER.value,
            )
    except (KeyboardInterrupt, SystemExit) as error:
        # While ranks run, the supervisor handles signals.
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else int(error.code or 0)
        command.say("tfdist-run", f"ended by {signal_name(code - 128)}; no rank was running.")
        return code


def _restarts() -> int:
    if _MAX_RESTARTS.value is None:
        return 0 if _DISCOVERY.value is None else sys.maxsize
    return _MAX_RESTARTS.value


def _reach(names: Sequence[str], shell) -> list[remote.ReachedHost | None]:
    """The connection to the host of each rank; None for this machine."""
    far = [name for name in names if not is_this_machine(name)]
    reached = iter(remote.reach(far, shell))
    return [None if is_this_machine(name) else next(reached) for name in names]


def _endpoints(
    names: Sequence[str], reached: Sequence[remote.ReachedHost | None]
) -> list[Endpoint]:
    """The endpoints of the ranks, as the other ranks reach them."""
    infos = [far.info for far in reached if far is not None]
    if not infos:
        return [Endpoint()] * len(names)
    # The address of this machine as seen from the other hosts.
    here = Endpoint(
        address=infos[0].caller,
        rendezvous_address=infos[0].caller,
        interface=interface_towards(infos[0].address),
    )
    return [
        here
        if far is None
        else Endpoint(name, far.info.address, far.info.caller, None, far.info.port)
        for name, far in zip(names, reached, strict=True)
    ]


def _sizes(size: int) -> tuple[int, int]:
    """The minimum and maximum number of ranks."""
    least, most = _MIN_NP.value or size, _MAX_NP.value or size
    if not least <= size <= most:
        raise command.UsageError(
            f"-np must be between --min_np and --max_np. Received: -np {size} --min_np={least} "
            f"--max_np={most}."
        )
    return least, most


def _engine() -> str:
    has_horovod = importlib.util.find_spec("horovod") is not None
    if _ENGINE.value == "horovod" and not has_horovod:
        raise command.UsageError(
            "--engine=horovod requires Horovod, which is not installed. Run tfdist-install-horovod, or "
            "use --engine=tensorflow."
        )
    if _PS.value:
        return "tensorflow"
    if _ENGINE.value != "auto":
        return _ENGINE.value
    if not has_horovod:
        command.say(
            "tfdist-run",
            "Horovod is not installed, so the ranks use TensorFlow's collectives.",
        )
    return "horovod" if has_horovod else "tensorflow"


PROGRAM = command.Program(
    _main,
    _VALUES,
    usage="tfdist-run -np N|auto [flags] -- command [arguments]",
    summary="Starts a command on N ranks, prints their output prefixed by [rank], and exits with "
    "the code of the first rank that fails.",
    check=_check,
    rest=True,
    folded={
        "for failures": [
            _EXCLUDE_AFTER.name,
            _MAX_RESTARTS.name,
            _RESTART_SECONDS.name,
            _SAVE_SECONDS.name,
            _WATCHDOG.name,
        ],
        "for the shell": [_COMPLETION.name],
        "for elastic jobs": [_DISCOVERY.name, _MIN_NP.name, _MAX_NP.name],
    },
)


if __name__ == "__main__":
    run()
