"""`tfdist-doctor`: its flags and its list of checks.

tfdist-doctor -H host1:4,host2:4
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Sequence

from absl import flags

from tfdist.launch.doctor import engines, hosts, machine, page, software, surroundings
from tfdist.launch.doctor.findings import Check, run_checks
from tfdist.launch.flags import command
from tfdist.launch.flags.values import MOST_RANKS_OF_A_HOST, FlagDefiner, refuse, refuse_ignored
from tfdist.launch.run import remote, slurm
from tfdist.launch.run.hosts import Host, is_this_machine, parse_hosts
from tfdist.runtime import exit_codes

_VALUES = flags.FlagValues()
_define = FlagDefiner(_VALUES)
_HOSTS = _define.string("H", "", "Other hosts to check, host1:2,host2:2 [the Slurm allocation]")
_NP = _define.integer(
    "np",
    None,
    "Number of ranks for this machine [2]",
    lower_bound=1,
    upper_bound=MOST_RANKS_OF_A_HOST,
)
_FOLDER = _define.string("folder", ".", "Working folder of the ranks")
_ENGINES = _define.boolean("engines", False, "Test each engine on two ranks, which takes 20 s")
# Its former name.
flags.DEFINE_alias("meet", "engines", flag_values=_VALUES)
_IMPORTS = _define.boolean("imports", True, "Import TensorFlow and its dependents")
_SECONDS = _define.float(
    "seconds",
    30.0,
    "Seconds for all checks except the test of engines",
    lower_bound=1.0,
    upper_bound=3600.0,
)

_PARAMETERS = _define.float(
    "parameters",
    None,
    "Parameters of a training, to check the links for its gradients",
    lower_bound=1.0,
    upper_bound=1e15,
)
_STEP_SECONDS = _define.float(
    "step_seconds",
    None,
    "Seconds of its step on a single rank, for --parameters",
    lower_bound=1e-6,
    upper_bound=1e6,
)

_RANKS = 2


def run() -> None:
    """Run the console script."""
    PROGRAM.run()


@dataclasses.dataclass(frozen=True)
class _Request:
    """A checked command line: other hosts, their shell, this machine's ranks, and the job."""

    far: Sequence[Host]
    shell: hosts.Shell
    num_ranks: int
    job: hosts.Job | None


def _check(_: list[str]) -> _Request:
    if not os.path.isdir(os.path.expanduser(_FOLDER.value)):
        raise refuse("folder", _FOLDER.value, "an existing folder")
    in_slurm = not _HOSTS.value and slurm.in_allocation()
    named = slurm.allocated_hosts() if in_slurm else parse_hosts(_HOSTS.value)
    here = sum(host.slots for host in named if is_this_machine(host.name))
    far = [host for host in named if not is_this_machine(host.name)]
    if not _IMPORTS.value:
        refuse_ignored(_VALUES, (_ENGINES,), "cannot be combined with --noimports", "--noimports")
    num_ranks = _NP.value or here or _RANKS
    size = num_ranks + sum(host.slots for host in far)
    return _Request(far, remote.srun if in_slurm else remote.ssh, num_ranks, _job(size, bool(far)))


def _job(ranks: int, has_hosts: bool) -> hosts.Job | None:
    """The training that --parameters and --step_seconds describe."""
    given = (_PARAMETERS.value, _STEP_SECONDS.value)
    if given == (None, None):
        return None
    if None in given:
        raise command.UsageError(
            "--parameters and --step_seconds must be given together. Received: "
            f"--parameters={given[0]} --step_seconds={given[1]}."
        )
    if not has_hosts:
        needs = "requires other hosts: -H host1:4,host2:4"
        refuse_ignored(_VALUES, (_PARAMETERS, _STEP_SECONDS), needs, "no other host")
    return hosts.Job(*given, ranks)


def _main(request: _Request) -> int:
    seconds = _SECONDS.value
    # Checks that wait have a shorter limit than the page, so that they can report a timeout.
    patience = seconds * 0.8
    folder = os.path.abspath(os.path.expanduser(_FOLDER.value))
    trials = software.Trials(patience) if _IMPORTS.value else None
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
    if _ENGINES.value:
        sections.append(engines.section())
    page.print_page(sections, sys.stdout)
    return exit_codes.FAILED if page.has_problems(sections) else 0


PROGRAM = command.Program(
    _main,
    _VALUES,
    usage="tfdist-doctor [flags]",
    summary="Checks the installation, the engines, the machine and the network for known problems, "
    "and prints remedies. Exits with 0 without problems, else with 1.",
    check=_check,
)


if __name__ == "__main__":
    run()
