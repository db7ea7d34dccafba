"""The description of a job for any scheduler, and its options of `tfdist-launch`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from tfdist.launch.flags.options import as_given, option
from tfdist.launch.flags.values import MOST_RANKS, YEAR, UsageError, refuse

_SIZE = re.compile(r"([1-9][0-9]*)([MGT])(?:i?B|i)?")
_MIB = {"M": 1, "G": 1024, "T": 1024**2}
_CLOCK = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-5]?[0-9]):([0-5]?[0-9])")
_UNITS = re.compile(r"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Characters with a special meaning in the lines of a batch script or in a shell.
_ODD = re.compile(r"[\s'\"\\#$`;&|<>(){}*?!~]|[^\x20-\x7e]")
_MOST_CHARACTERS = 255
#: The options of failures, which the help lists only by name.
OF_FAILURES = ("max_restarts", "save_seconds")
#: Per rank. The largest machines have about two thousand.
_MOST_CORES = 4096
#: Kubernetes counts the failures of all ranks in 32 bits.
_MOST_RESTARTS = 10_000
#: MiB: a pebibyte.
_MOST_MEMORY = 1024**3


@dataclasses.dataclass(frozen=True)
class Job:
    """A command on many ranks, and the resources of each rank.

    Attributes:
        name: Name of the job.
        nodes: Number of nodes.
        ranks_per_node: Number of ranks on each node.
        cpus: Cores per rank.
        memory: Memory per rank in MiB, or None.
        gpu: Whether each rank has a GPU.
        seconds: Time limit in seconds, or None.
        save_seconds: Seconds for the ranks to save after a SIGTERM.
        max_restarts: Number of restarts after failures.
        directory: Working directory, or None for the scheduler's default.
        environment: Environment variables of each rank.
        command: The command of each rank.
    """

    name: str
    nodes: int
    ranks_per_node: int
    command: tuple[str, ...]
    cpus: int = 1
    memory: int | None = None
    gpu: bool = False
    seconds: int | None = None
    save_seconds: int = 30
    max_restarts: int = 0
    directory: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of each rank, including those that limit its threads.

        Otherwise TensorFlow uses all cores of the machine on each of the ranks that share it.
        """
        cores = str(self.cpus)
        own = {"OMP_NUM_THREADS": cores, "TF_NUM_INTRAOP_THREADS": cores}
        return {**own, **self.environment}


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """The options that all schedulers share; see the flags of the same names."""

    name: str = option("tfdist", "Name of the job")
    np: int | None = option(None, "Number of ranks", least=1, most=MOST_RANKS)
    nodes: int | None = option(None, "Number of nodes [1]", least=1, most=MOST_RANKS)
    ranks_per_node: int | None = option(None, "Ranks on each node", least=1, most=MOST_RANKS)
    cpus: int = option(1, "CPU cores per rank", least=1, most=_MOST_CORES)
    memory: str | None = option(None, "Memory per rank: 16G, 500M")
    gpu: bool = option(False, "Give each rank a GPU")
    time: str | None = option(None, "Time limit: 90m, 12h, 1d12h, 1-12:00:00")
    env: tuple[str, ...] = option((), "Variable of each rank, NAME=VALUE", is_repeated=True)
    chdir: str | None = option(None, "Working directory of the ranks")
    max_restarts: int = option(0, "Restarts after failures", least=0, most=_MOST_RESTARTS)
    save_seconds: int = option(
        30, "Seconds for the ranks to save after a SIGTERM", least=1, most=50_000
    )
    output: str | None = option(None, "File to write to, instead of stdout")

    @property
    def places_ranks(self) -> str:
        """The given options for the placement of ranks on nodes, as text."""
        return as_given(self, ("nodes", "ranks_per_node"))

    def job(self, command: Sequence[str]) -> Job:
        """The job of the options, for a command that each rank runs.

        Raises:
            UsageError: Options are invalid, or the number of ranks is missing.
        """
        if not command:
            raise UsageError(
                "tfdist-launch requires a command: tfdist-launch SCHEDULER [flags] -- command. Received: "
                "no command."
            )
        nodes, per_node = self._layout()
        environment = key_values("--env", self.env)
        for name in environment:
            if _VARIABLE.fullmatch(name) is None:
                raise UsageError(
                    f"--env must be NAME=VALUE. Received: --env={name}={environment[name][:80]}, with "
                    f"the name {name!r}."
                )
        return Job(
            name=self.name,
            nodes=nodes,
            ranks_per_node=per_node,
            command=tuple(command),
            cpus=self.cpus,
            memory=None if self.memory is None else parse_size("memory", self.memory),
            gpu=self.gpu,
            seconds=None if self.time is None else parse_time(self.time),
            save_seconds=self.save_seconds,
            max_restarts=self.max_restarts,
            directory=self.chdir,
            environment=environment,
        )

    def _layout(self) -> tuple[int, int]:
        """The number of nodes and of ranks on each, from one or two of the three flags."""
        ranks, nodes, per_node = self.np, self.nodes, self.ranks_per_node
        if ranks is None and per_node is None:
            raise UsageError(
                "tfdist-launch requires the number of ranks: -np N, or --nodes=N --ranks_per_node=M. "
                "Received: neither -np nor --ranks_per_node."
            )
        found = (nodes or 1) * (per_node or 1)
        if found > MOST_RANKS:
            raise UsageError(
                f"The number of ranks must be at most {MOST_RANKS:,}. Received: {self.places_ranks}, "
                f"which is {found:,}."
            )
        if ranks is None:
            return nodes or 1, per_node or 1
        if nodes is None:
            nodes = 1 if per_node is None else ranks // per_node
        per_node = per_node or ranks // nodes
        if nodes * per_node != ranks:
            raise UsageError(
                "-np must be --nodes times --ranks_per_node. "
                f"Received: -np {ranks} {self.places_ranks}."
            )
        return nodes, per_node


def parse_time(text: str) -> int:
    """Parse a time such as `1d12h`, `90m` or Slurm's `1-12:00:00` into seconds."""
    clock = _CLOCK.fullmatch(text)
    found = clock or (text and _UNITS.fullmatch(text))
    # Longer numbers exceed any limit, and are slow to parse.
    parts = [int((part or "0")[:12]) for part in found.groups()] if found else []
    if clock and clock[1] and parts[1] > 23:
        raise UsageError(
            f"--time must have at most 23 hours after days, 1-12:00:00. Received: --time={text}."
        )
    seconds = sum(part * unit for part, unit in zip(parts, (86_400, 3600, 60, 1), strict=False))
    if not seconds:
        raise UsageError(
            f"--time must have units, 90m, 12h or 1d12h, or the form days-hours:minutes:seconds, "
            f"1-12:00:00. Received: --time={text}."
        )
    if seconds > YEAR:
        raise UsageError(f"--time must be at most {YEAR // 86_400} days. Received: --time={text}.")
    return seconds


def parse_size(flag: str, text: str) -> int:
    """Parse a size such as `16G`, `16Gi` or `500M` into MiB, where 1 G is 1024 M."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise UsageError(f"--{flag} must be a size such as 16G or 500M. Received: --{flag}={text}.")
    size = int(found[1][:12]) * _MIB[found[2]]
    if size > _MOST_MEMORY:
        raise refuse(flag, text, f"at most {_MOST_MEMORY // 1024**2:,}T")
    return size


def in_units(mebibytes: int) -> str:
    """Format a number of MiB as `16G` if it is a whole number of GiB, else as `500M`."""
    whole, rest = divmod(mebibytes, 1024)
    return f"{mebibytes}M" if rest else f"{whole}G"


def key_values(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Parse `KEY=VALUE` texts."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise UsageError(f"{flag} must be KEY=VALUE. Received: {flag}={text}.")
        pairs[key] = value
    return pairs


def refuse_odd(flag: str, text: str) -> None:
    """Reject a value that a scheduler or a shell would misinterpret.

    Such values are empty, too long, begin with a hyphen, or contain blanks, quotes, special characters
    of a shell, or non-ASCII characters.
    """
    if not text or text.startswith("-") or _ODD.search(text) or len(text) > _MOST_CHARACTERS:
        received = text if len(text) <= _MOST_CHARACTERS else f"{text[:80]}... of {len(text)}"
        raise UsageError(
            f"{flag} must be a word of at most {_MOST_CHARACTERS} ASCII characters, without blanks, "
            f"quotes, # and special characters of a shell. Received: {flag}={received!r}."
        )
