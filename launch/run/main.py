"""`tfdist-run`: start ranks on one or several machines."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tfdist.launch.flags import command
from tfdist.launch.flags.completion import SHELLS, script
from tfdist.launch.flags.options import define_flags, option, refuse_ignored
from tfdist.launch.flags.values import MOST_RANKS, MOST_RANKS_OF_A_HOST, YEAR, refuse
from tfdist.launch.run import remote, slurm
from tfdist.launch.run.hosts import Host, HostDiscovery, assign_hosts, is_this_machine, parse_hosts
from tfdist.launch.run.nodes import environments_on, nodes_of_job
from tfdist.launch.run.num_ranks import MEANT_RANKS, count_gpus, ranks_of_this_machine
from tfdist.launch.run.processes import RankProcess, signal_name
from tfdist.launch.run.restarts import run_with_restarts
from tfdist.launch.run.supervisor import Supervisor
from tfdist.launch.signals import exit_on_signals
from tfdist.runtime.horovod_variables import has_nccl
from tfdist.runtime.lock_owner import JOB
from tfdist.runtime.nodes import Nodes
from tfdist.runtime.recovery import FAILED_AT, NEWEST
from tfdist.runtime.rendezvous import Endpoint, environments, interface_towards

#: The command of a parameter server.
_SERVER = [sys.executable, "-m", "tfdist.launch.parameter_server"]


def run() -> None:
    """Run the console script."""
    PROGRAM.run()


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options of the program; see the flags of the same names."""

    np: int | str | None = option(
        None,
        "Number of ranks to start; auto: one for each GPU, else for each core",
        least=1,
        most=MOST_RANKS,
    )
    H: str = option(
        "", "Hosts and their slots, host1:2,host2:2 [the Slurm allocation, or this machine]"
    )
    engine: str = option(
        "auto",
        "Library for the collectives; auto uses Horovod if it is installed",
        choices=("auto", "horovod", "tensorflow"),
    )
    ps: int = option(
        0,
        "Parameter servers to start in addition, for asynchronous training",
        least=0,
        most=MOST_RANKS_OF_A_HOST,
    )
    watchdog_seconds: float = option(
        600.0,
        "Seconds a rank may be stopped before the job ends; 0 for no limit",
        least=0.0,
        most=YEAR,
    )
    max_restarts: int | None = option(
        None, "Restarts after failures [0; no limit with --host_discovery_script]", least=0
    )
    restart_seconds: float = option(
        60.0, "Longest wait before a restart; starts at 1 s and doubles", least=0.0, most=YEAR
    )
    host_discovery_script: str | None = option(
        None, "Command that prints the available hosts, one name:slots per line"
    )
    min_np: int | None = option(
        None, "Minimum number of ranks to start [np]", least=1, most=MOST_RANKS
    )
    max_np: int | None = option(
        None, "Maximum number of ranks to start [np]", least=1, most=MOST_RANKS
    )
    exclude_after: int | None = option(
        None,
        "Failures after which a host is excluded, as are unreachable hosts [never]",
        least=1,
    )
    save_seconds: float = option(
        30.0, "Seconds for the ranks to save after a SIGTERM", least=0.0, most=YEAR
    )
    completion: str | None = option(
        None, "Print the completion script for this shell", choices=SHELLS
    )

    @property
    def restarts(self) -> int:
        """The most restarts after failures."""
        if self.max_restarts is None:
            return 0 if self.host_discovery_script is None else sys.maxsize
        return self.max_restarts


_FLAGS = define_flags(RunOptions)


@dataclasses.dataclass(frozen=True)
class _Job:
    """A checked command line: the command, the hosts, and the range of the number of ranks."""

    options: RunOptions
    words: list[str]
    #: Only a placeholder for -np if hosts are discovered.
    hosts: list[Host]
    size: int
    least: int
    most: int
    engine: str
    in_slurm: bool
    nodes: Nodes | None

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all nodes."""
        return self.size * (self.nodes.count if self.nodes else 1)


def _check(words: list[str]) -> _Job | str:
    options = _FLAGS.read()
    if options.completion is not None:
        return script(options.completion)
    if not words:
        raise command.UsageError(
            "tfdist-run requires a command: tfdist-run -np N -- command. Received: no command."
        )
    if shutil.which(words[0]) is None:
        raise command.UsageError(f"The command {words[0]!r} was not found on the PATH.")
    in_slurm = not options.H and options.host_discovery_script is None and slurm.in_allocation()
    hosts = slurm.allocated_hosts() if in_slurm else parse_hosts(options.H)
    nodes = None if hosts or options.host_discovery_script is not None else nodes_of_job()
    size = options.np if isinstance(options.np, int) else sum(host.slots for host in hosts)
    if nodes is not None and nodes.count == 1:  # As elsewhere, but for the number of ranks.
        size = size if options.np is not None else nodes.ranks or _count(words, None)
        nodes = None
    if nodes is not None:
        size = _ranks_of_node(nodes, options, words)
    elif options.np == "auto" and not hosts:
        size = _count(words, options.host_discovery_script)
    if not size:
        raise command.UsageError(
            "tfdist-run requires the number of ranks: -np N, or -np auto. Received: no -np."
        )
    if size > MOST_RANKS:
        raise command.UsageError(
            f"The number of ranks must be at most {MOST_RANKS:,}. Received: {size:,}."
        )
    if not hosts and options.host_discovery_script is None and size > MOST_RANKS_OF_A_HOST:
        raise refuse("np", size, f"at most {MOST_RANKS_OF_A_HOST:,} on one machine; see -H")
    if hosts and (slots := len(assign_hosts(hosts, size))) < size:
        whose = "the Slurm allocation" if in_slurm else f"-H {options.H}"
        raise command.UsageError(f"-np {size} requires more slots than {whose} has: {slots}.")
    if options.host_discovery_script is None:
        refuse_ignored(options, ["max_np"], "requires --host_discovery_script", "alone")
        if options.exclude_after is None:
            needs = "requires --host_discovery_script or --exclude_after"
            refuse_ignored(options, ["min_np"], needs, "alone")
        if not hosts:
            needs = "requires several hosts: -H, --host_discovery_script, or a Slurm allocation"
            refuse_ignored(options, ["exclude_after"], needs, "alone")
    else:
        given = "and --host_discovery_script"
        refuse_ignored(options, ["H"], "cannot be combined with --host_discovery_script", given)
    hosts = hosts or [Host("localhost", size)]
    if not options.restarts:
        given = f"--max_restarts={options.max_restarts or 0}"
        ignored = ["exclude_after"]
        if options.max_restarts is not None:
            ignored.insert(0, "restart_seconds")
        refuse_ignored(options, ignored, "requires --max_restarts", given)
    least, most = _sizes(options, size)
    if options.ps:
        _check_servers(options, in_slurm)
    engine = "auto" if nodes is not None else _engine(options)
    return _Job(options, words, hosts, size, least, most, engine, in_slurm, nodes)


def _ranks_of_node(nodes: Nodes, options: RunOptions, words: list[str]) -> int:
    """The number of ranks of this node of several."""
    why = f"is not supported on the nodes of {nodes.platform}"
    refuse_ignored(options, ["engine", "ps"], why, "alone")
    size = options.np if isinstance(options.np, int) else nodes.ranks
    if size is None or options.np == "auto":
        size = _count(words, None)
    first, total = nodes.node * size, nodes.count * size
    command.say(
        "tfdist-run",
        f"{nodes.platform} says node {nodes.node} of {nodes.count}: ranks {first} to {first + size - 1} of {total}.",
    )
    return size


def _count(words: list[str], discovery: str | None) -> int:
    """The number of ranks of -np auto on this machine."""
    if discovery is not None:
        raise command.UsageError(
            "-np auto cannot be combined with --host_discovery_script. Received: "
            f"-np auto --host_discovery_script={discovery}. Use a number."
        )
    size, why = ranks_of_this_machine(words)
    command.say("tfdist-run", f"-np auto starts {size} rank{'s' * (size > 1)}: {why}.")
    return size


def _check_servers(options: RunOptions, in_slurm: bool) -> None:
    """Reject flags that are not supported with parameter servers."""
    if options.engine == "horovod":
        raise command.UsageError(
            f"--ps is not supported with --engine=horovod. Received: --ps={options.ps} "
            "--engine=horovod. Use --engine=tensorflow."
        )
    why = "is not supported with parameter servers"
    refuse_ignored(options, ["host_discovery_script"], why, f"--ps={options.ps}")
    if in_slurm:
        raise command.UsageError(
            f"--ps requires -H in a Slurm allocation. Received: --ps={options.ps} without -H. Name the "
            "hosts with -H."
        )


def _main(job: _Job | str) -> int:
    if isinstance(job, str):
        print(job, end="")
        return 0
    options = job.options
    shell = remote.srun if job.in_slurm else remote.ssh
    token = secrets.token_hex(8)

    def start(
        names: Sequence[str], should_end: Callable[[], bool], failed_at: float | None
    ) -> tuple[Supervisor, int]:
        # Servers share the hosts of the ranks.
        names = [*names, *(names[server % len(names)] for server in range(options.ps))]
        reached = _reach(names, shell)
        with _environments(job, names, reached) as found:
            starts = []
            for index, (far, environment) in enumerate(zip(reached, found, strict=True)):
                begin = RankProcess.start if far is None else far.start
                environment = {**environment, MEANT_RANKS: str(job.num_ranks), JOB: token}
                if far is None:
                    environment[NEWEST] = str(newest)
                if failed_at is not None:
                    environment[FAILED_AT] = repr(failed_at)
                is_server = index >= len(names) - options.ps
                words = _SERVER if is_server else job.words
                starts.append(functools.partial(begin, words, environment))
            supervisor = Supervisor(
                starts,
                servers=options.ps,
                frozen_seconds=options.watchdog_seconds,
                save_seconds=options.save_seconds,
                has_gpu=count_gpus() > 0 or any(far is not None for far in reached),
                should_end=should_end,
                newest_checkpoint=lambda: newest.read_text() if newest.exists() else None,
                first_rank=job.nodes.node * job.size if job.nodes else 0,
            )
            return supervisor, supervisor.run()

    try:
        with exit_on_signals(), tempfile.TemporaryDirectory(prefix="tfdist-run-") as folder:
            newest = Path(folder, "newest")
            discovers = options.host_discovery_script
            discovery = None if discovers is None else HostDiscovery(discovers)
            return run_with_restarts(
                start,
                job.hosts,
                job.least,
                job.most,
                max_restarts=options.restarts,
                longest_delay=options.restart_seconds,
                discovery=discovery,
                exclude_after=options.exclude_after,
            )
    except (KeyboardInterrupt, SystemExit) as error:
        # While ranks run, the supervisor handles signals.
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else int(error.code or 0)
        command.say("tfdist-run", f"ended by {signal_name(code - 128)}; no rank was running.")
        return code


def _reach(names: Sequence[str], shell) -> list[remote.ReachedHost | None]:
    """The connection to the host of each rank; None for this machine."""
    far = [name for name in names if not is_this_machine(name)]
    reached = iter(remote.reach(far, shell))
    return [None if is_this_machine(name) else next(reached) for name in names]


@contextlib.contextmanager
def _environments(
    job: _Job, names: Sequence[str], reached: Sequence[remote.ReachedHost | None]
) -> Iterator[list[dict[str, str]]]:
    """Yields the variables of each process."""
    if job.nodes is not None:
        yield environments_on(job.nodes, job.size)
        return
    with environments(job.engine, _endpoints(names, reached), job.options.ps) as found:
        # A platform may have set TF_CONFIG for its one process.
        yield [{"TF_CONFIG": "", **variables} for variables in found]


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


def _sizes(options: RunOptions, size: int) -> tuple[int, int]:
    """The minimum and maximum number of ranks."""
    least, most = options.min_np or size, options.max_np or size
    if not least <= size <= most:
        raise command.UsageError(
            f"-np must be between --min_np and --max_np. Received: -np {size} --min_np={least} "
            f"--max_np={most}."
        )
    return least, most


def _engine(options: RunOptions) -> str:
    has_horovod = importlib.util.find_spec("horovod") is not None
    if options.engine == "horovod" and not has_horovod:
        raise command.UsageError(
            "--engine=horovod requires Horovod, which is not installed. Run tfdist-install-horovod, or "
            "use --engine=tensorflow."
        )
    if options.ps:
        return "tensorflow"
    if options.engine != "auto":
        return options.engine
    why = "is not installed"
    if has_horovod:
        if not count_gpus() or has_nccl():
            return "horovod"
        why = (
            "was built without NCCL (`tfdist-install-horovod --gpu_operations=nccl` builds it), and this machine "
            "has GPUs"
        )
    command.say("tfdist-run", f"Horovod {why}, so the ranks use TensorFlow's collectives.")
    return "tensorflow"


PROGRAM = command.Program(
    _main,
    _FLAGS.values,
    usage="tfdist-run -np N|auto [flags] -- command [arguments]",
    summary="Starts a command on N ranks, prints their output prefixed by [rank], and exits with "
    "the code of the first rank that fails.",
    check=_check,
    rest=True,
    folded={
        "for failures": [
            *("exclude_after", "max_restarts", "restart_seconds", "save_seconds"),
            "watchdog_seconds",
        ],
        "for the shell": ["completion"],
        "for elastic jobs": ["host_discovery_script", "min_np", "max_np"],
    },
)


if __name__ == "__main__":
    run()
