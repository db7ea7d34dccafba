"""What every scheduler is told of a job, and the flags of `tfdist-launch` that say it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from tfdist.launch.flag_values import MOST_RANKS, YEAR, FlagDefiner, UsageError, refuse

_SIZE = re.compile(r"([1-9][0-9]*)([MGT])(?:i?B|i)?")
_MIB = {"M": 1, "G": 1024, "T": 1024**2}
_CLOCK = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-5]?[0-9]):([0-5]?[0-9])")
_UNITS = re.compile(r"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: What ends a value, or begins something else, in the lines of a batch script, or in a shell that
#: reads the value from there.
_ODD = re.compile(r"[\s'\"\\#$`;&|<>(){}*?!~]|[^\x20-\x7e]")
_MOST_CHARACTERS = 255
#: Of a rank. The machines with most have some two thousand.
_MOST_CORES = 4096
#: Kubernetes counts the failures of all ranks in 32 bits.
_MOST_RESTARTS = 10_000
#: MiB: a pebibyte.
_MOST_MEMORY = 1024**3


@dataclasses.dataclass(frozen=True)
class Job:
    """A command on many ranks, and what each of them needs.

    Attributes:
        name: What the scheduler calls it.
        nodes: How many nodes.
        ranks_per_node: How many ranks on each.
        cpus: Cores of a rank.
        memory: MiB of a rank, or None.
        gpu: Whether a rank has a GPU.
        seconds: How long it may run, or None.
        save_seconds: How long the ranks have to save after a SIGTERM.
        max_restarts: How many failures are followed by another start.
        directory: Where it runs, or None for the scheduler's own.
        environment: Variables of each rank.
        command: What each rank runs.
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
        """How many ranks, on all nodes together."""
        return self.nodes * self.ranks_per_node

    @property
    def variables(self) -> dict[str, str]:
        """The variables of each rank, with those that keep it to its own cores.

        TensorFlow takes all cores of the machine otherwise, on each of the ranks that share it.
        """
        cores = str(self.cpus)
        own = {"OMP_NUM_THREADS": cores, "TF_NUM_INTRAOP_THREADS": cores}
        return {**own, **self.environment}


class JobFlags:
    """The flags that mean the same for every scheduler."""

    #: Those that the help only names.
    FAILURES = ("max_restarts", "save_seconds")

    def __init__(self, define: FlagDefiner):
        self._name = define.string("name", "tfdist", "Name of the job")
        self._np = define.integer(
            "np", None, "Number of ranks", lower_bound=1, upper_bound=MOST_RANKS
        )
        self._nodes = define.integer(
            "nodes", None, "Number of nodes [1]", lower_bound=1, upper_bound=MOST_RANKS
        )
        self._per_node = define.integer(
            "ranks_per_node", None, "Ranks on each node", lower_bound=1, upper_bound=MOST_RANKS
        )
        self._cpus = define.integer(
            "cpus", 1, "CPU cores per rank", lower_bound=1, upper_bound=_MOST_CORES
        )
        self._memory = define.string("memory", None, "Memory per rank: 16G, 500M")
        self._gpu = define.boolean("gpu", False, "Gives each rank a GPU")
        self._time = define.string("time", None, "Time limit: 90m, 12h, 1d12h, 1-12:00:00")
        self._env = define.repeated("env", "Variable of each rank, NAME=VALUE")
        self._directory = define.string("chdir", None, "Working directory of the ranks")
        self._restarts = define.integer(
            "max_restarts", 0, "Restarts after failures", lower_bound=0, upper_bound=_MOST_RESTARTS
        )
        self._save = define.integer(
            "save_seconds",
            30,
            "Seconds that the ranks have to save after a SIGTERM",
            lower_bound=1,
            upper_bound=50_000,
        )
        self.output = define.string("output", None, "File to write to, instead of stdout")

    @property
    def places_ranks(self) -> str:
        """The flags as given that say which ranks share a node."""
        given = {"--nodes": self._nodes, "--ranks_per_node": self._per_node}
        return " ".join(f"{name}={flag.value}" for name, flag in given.items() if flag.value)

    def read(self, command: Sequence[str]) -> Job:
        """Returns the job of the flags, for a command that each rank runs."""
        if not command:
            raise UsageError(
                "Say what to run: tfdist-launch SCHEDULER [flags] -- command. Received: no command."
            )
        nodes, per_node = self._layout()
        seconds = None if self._time.value is None else parse_time(self._time.value)
        environment = key_values("--env", self._env.value or ())
        for name in environment:
            if _VARIABLE.fullmatch(name) is None:
                raise UsageError(
                    f"--env is NAME=VALUE. Received: --env={name}={environment[name][:80]}, with "
                    f"the name {name!r}."
                )
        return Job(
            name=self._name.value,
            nodes=nodes,
            ranks_per_node=per_node,
            command=tuple(command),
            cpus=self._cpus.value,
            memory=None if self._memory.value is None else parse_size("memory", self._memory.value),
            gpu=self._gpu.value,
            seconds=seconds,
            save_seconds=self._save.value,
            max_restarts=self._restarts.value,
            directory=self._directory.value,
            environment=environment,
        )

    def _layout(self) -> tuple[int, int]:
        """How many nodes, and how many ranks on each, where one or two of the three are given."""
        ranks, nodes, per_node = self._np.value, self._nodes.value, self._per_node.value
        if ranks is None and per_node is None:
            raise UsageError(
                "Say how many ranks there are: -np N, or --nodes=N --ranks_per_node=M. Received: "
                "neither -np nor --ranks_per_node."
            )
        found = (nodes or 1) * (per_node or 1)
        if found > MOST_RANKS:
            raise UsageError(
                f"A job has at most {MOST_RANKS:,} ranks. Received: {self.places_ranks}, which is "
                f"{found:,}."
            )
        if ranks is None:
            return nodes or 1, per_node
        if nodes is None:
            nodes = 1 if per_node is None else ranks // per_node
        per_node = per_node or ranks // nodes
        if nodes * per_node != ranks:
            raise UsageError(
                "Each node has the same number of ranks: -np is --nodes times --ranks_per_node. "
                f"Received: -np {ranks} {self.places_ranks}."
            )
        return nodes, per_node


def parse_time(text: str) -> int:
    """Reads a time as `1d12h`, `90m` or Slurm's `1-12:00:00`, in seconds."""
    clock = _CLOCK.fullmatch(text)
    found = clock or (text and _UNITS.fullmatch(text))
    # Longer numbers are above any limit, and Python takes its time to read them.
    parts = [int((part or "0")[:12]) for part in found.groups()] if found else []
    if clock and clock[1] and parts[1] > 23:
        raise UsageError(
            f"--time has days and at most 23 hours, 1-12:00:00. Received: --time={text}."
        )
    seconds = sum(part * unit for part, unit in zip(parts, (86_400, 3600, 60, 1), strict=False))
    if not seconds:
        raise UsageError(
            f"--time is written with its units, 90m, 12h or 1d12h, or as days-hours:minutes:"
            f"seconds, 1-12:00:00. Received: --time={text}."
        )
    if seconds > YEAR:
        raise UsageError(f"--time is at most {YEAR // 86_400} days. Received: --time={text}.")
    return seconds


def parse_size(flag: str, text: str) -> int:
    """Reads a size as `16G`, `16Gi` or `500M`, in MiB: a G is 1024 M everywhere."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise UsageError(f"--{flag} is a size such as 16G or 500M. Received: --{flag}={text}.")
    size = int(found[1][:12]) * _MIB[found[2]]
    if size > _MOST_MEMORY:
        raise refuse(flag, text, f"at most {_MOST_MEMORY // 1024**2:,}T")
    return size


def in_units(mebibytes: int) -> str:
    """Writes a number of MiB as `16G` where it is whole, else as `500M`."""
    whole, rest = divmod(mebibytes, 1024)
    return f"{mebibytes}M" if rest else f"{whole}G"


def key_values(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Reads `KEY=VALUE` texts."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise UsageError(f"{flag} is written KEY=VALUE. Received: {flag}={text}.")
        pairs[key] = value
    return pairs


def refuse_odd(flag: str, text: str) -> None:
    """Refuses a value that a scheduler would read as something else.

    It is refused where it is empty, too long, begins with a hyphen, or holds blanks, quotes, what
    a shell reads as something else, or what is no ASCII.
    """
    if not text or text.startswith("-") or _ODD.search(text) or len(text) > _MOST_CHARACTERS:
        received = text if len(text) <= _MOST_CHARACTERS else f"{text[:80]}... of {len(text)}"
        raise UsageError(
            f"{flag} is a word of at most {_MOST_CHARACTERS} characters in ASCII, without blanks, "
            f"quotes, # and what is special to a shell. Received: {flag}={received!r}."
        )
