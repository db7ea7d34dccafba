"""`tfdist-doctor`: its flags and its list of checks.

tfdist-doctor -H host1:4,host2:4
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Sequence

from tfdist.launch.doctor import engines, hosts, machine, page, software, surroundings
from tfdist.launch.doctor.findings import Check, run_checks
from tfdist.launch.flags import command
from tfdist.launch.flags.options import define_flags, option, refuse_ignored
from tfdist.launch.flags.values import MOST_RANKS_OF_A_HOST, refuse
from tfdist.launch.run import remote, slurm
from tfdist.launch.run.hosts import Host, is_this_machine, parse_hosts
from tfdist.runtime import exit_codes

_RANKS = 2


def run() -> None:
    """Run the console script."""
    PROGRAM.run()


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """The options of the program; see the flags of the same names."""

    H: str = option("", "Other hosts to check, host1:2,host2:2 [the Slurm allocation]")
    np: int | None = option(
        None, "Number of ranks for this machine [2]", least=1, most=MOST_RANKS_OF_A_HOST
    )
    folder: str = option(".", "Working folder of the ranks")
    engines: bool = option(False, "Test each engine on two ranks, which takes 20 s", former="meet")
    imports: bool = option(True, "Import TensorFlow and its dependents")
    seconds: float = option(
        30.0, "Seconds for all checks except the test of engines", least=1.0, most=3600.0
    )
    parameters: float | None = option(
        None,
        "Parameters of a training, to check the links for its gradients",
        least=1.0,
        most=1e15,
    )
    step_seconds: float | None = option(
        None, "Seconds of its step on a single rank, for --parameters", least=1e-6, most=1e6
    )


_FLAGS = define_flags(DoctorOptions)


@dataclasses.dataclass(frozen=True)
class _Request:
    """A checked command line: other hosts, their shell, this machine's ranks, and the job."""

    options: DoctorOptions
    far: Sequence[Host]
    shell: hosts.Shell
    num_ranks: int
    job: hosts.Job | None


def _check(_: list[str]) -> _Request:
    options = _FLAGS.read()
    if not os.path.isdir(os.path.expanduser(options.folder)):
        raise refuse("folder", options.folder, "an existing folder")
    in_slurm = not options.H and slurm.in_allocation()
    named = slurm.allocated_hosts() if in_slurm else parse_hosts(options.H)
    here = sum(host.slots for host in named if is_this_machine(host.name))
    far = [host for host in named if not is_this_machine(host.name)]
    if not options.imports:
        refuse_ignored(options, ["engines"], "cannot be combined with --noimports", "--noimports")
    num_ranks = options.np or here or _RANKS
    size = num_ranks + sum(host.slots for host in far)
    shell = remote.srun if in_slurm else remote.ssh
    return _Request(options, far, shell, num_ranks, _job(options, size, bool(far)))


def _job(options: DoctorOptions, ranks: int, has_hosts: bool) -> hosts.Job | None:
    """The training that --parameters and --step_seconds describe."""
    parameters, seconds = options.parameters, options.step_seconds
    if parameters is None and seconds is None:
        return None
    if parameters is None or seconds is None:
        raise command.UsageError(
            "--parameters and --step_seconds must be given together. Received: "
            f"--parameters={parameters} --step_seconds={seconds}."
        )
    if not has_hosts:
        needs = "requires other hosts: -H host1:4,host2:4"
        refuse_ignored(options, ["parameters", "step_seconds"], needs, "no other host")
    return hosts.Job(parameters, seconds, ranks)


def _main(request: _Request) -> int:
    options, seconds = request.options, request.options.seconds
    # Checks that wait have a shorter limit than the page, so that they can report a timeout.
    patience = seconds * 0.8
    folder = os.path.abspath(os.path.expanduser(options.folder))
    trials = software.Trials(patience) if options.imports else None
    ranks = request.num_ranks
    checks: dict[str, list[tuple[str, Check]]] = {
        "Installed": [
            ("Python", software.python),
            ("Packages", software.packages),
            ("Horovod", software.horovod),
            ("Compiler", software.compiler),
            ("Keras", software.settings),
        ],
        "Engines": [] if trials is None else [("Imports", trials.imports)],
        "Machine": [
            ("Cores", functools.partial(machine.processor, ranks)),
            ("Kernels", functools.partial(machine.kernels, trials)),
            ("Memory", functools.partial(machine.memory, ranks)),
            ("Work folder", functools.partial(machine.folders, folder)),
            ("GPUs", functools.partial(machine.gpus, trials, ranks, patience)),
            ("TPU", machine.tpus),
        ],
        "Network": [
            ("Links", surroundings.links),
            ("Ports", surroundings.loopback),
            ("Launcher", surroundings.launcher),
            ("TF_CONFIG", surroundings.cluster),
        ],
        "Hosts": [
            (
                host.name,
                functools.partial(
                    hosts.examine, host, request.shell, folder, patience, request.job
                ),
            )
            for host in request.far
        ],
    }
    sections = run_checks(checks, seconds)
    if options.engines:
        sections.append(engines.section())
    page.print_page(sections, sys.stdout)
    return exit_codes.FAILED if page.has_problems(sections) else 0


PROGRAM = command.Program(
    _main,
    _FLAGS.values,
    usage="tfdist-doctor [flags]",
    summary="Checks the installation, the engines, the machine and the network for known problems, "
    "and prints remedies. Exits with 0 without problems, else with 1.",
    check=_check,
)


if __name__ == "__main__":
    run()
