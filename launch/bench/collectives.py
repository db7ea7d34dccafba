"""`tfdist-bench collectives`: time and bandwidth of collectives, compared with the link and two models.

    tfdist-run -np 4 -- tfdist-bench collectives
    tfdist-run -np 2 -H host1:1,host2:1 -- tfdist-bench collectives --operations=all_reduce

Bandwidths are defined as in nccl-tests (PERFORMANCE.md there). The algorithm bandwidth is the bytes of the
operation divided by its time; for an all-gather and a reduce-scatter these are the total bytes. The bus
bandwidth is the algorithm bandwidth times the bytes that each rank has to send per byte: 2 (n - 1) / n in
an all-reduce, 1 in a broadcast, (n - 1) / n in the others; on n equal links it cannot exceed that of the
link. The link between the first and the last rank is measured first: its latency is half of the round-trip
time of a small message, its rate is that of a message of 64 MiB.

The models are those of Thakur, Rabenseifner and Gropp (2005), with the latency a and the seconds per
byte b: a ring costs 2 (n - 1) a + 2 (n - 1) / n S b for an all-reduce of S bytes, a binary tree
2 log2(n) (a + S b). Neither includes the time of summation.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from tabulate import tabulate

from tfdist.launch.flags import command
from tfdist.launch.flags.options import define_flags, option
from tfdist.launch.flags.values import output_file

_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
#: The largest tensor, of which several copies must fit into memory.
_MOST_BYTES = 1 << 34


@dataclasses.dataclass(frozen=True)
class CollectivesOptions:
    """The options of the program; see the flags of the same names."""

    operations: tuple[str, ...] = option(_OPERATIONS, "Operations, separated by commas")
    min_bytes: int = option(4096, "Smallest size", least=64, most=_MOST_BYTES)
    max_bytes: int = option(64 << 20, "Largest size", least=64, most=_MOST_BYTES)
    factor: int = option(16, "Factor between sizes", least=2, most=_MOST_BYTES)
    seconds: float = option(1.0, "Seconds per measurement", least=0.01, most=3600.0)
    bulk: bool = option(False, "Use the engine for all operations, not peer to peer")
    json: str | None = option(None, "File for the measurements")


_FLAGS = define_flags(CollectivesOptions)

_LINK_BYTES = 64 << 20
_WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Link:
    """The link between two ranks.

    Attributes:
        latency: Seconds for a small message to arrive.
        rate: Bytes per second of a large message.
    """

    latency: float
    rate: float


@dataclasses.dataclass(frozen=True)
class Line:
    """A measured operation.

    Attributes:
        operation: Name of the operation.
        bytes: Size, as defined by nccl-tests.
        ranks: Number of ranks.
        seconds: Median seconds on the slowest rank.
    """

    operation: str
    bytes: int
    ranks: int
    seconds: float

    @property
    def algorithm_rate(self) -> float:
        """Algorithm bandwidth in bytes per second."""
        return self.bytes / self.seconds

    @property
    def bus_rate(self) -> float:
        """Bus bandwidth in bytes per second: the minimum traffic of each rank's link."""
        return self.algorithm_rate * self.carried

    @property
    def carried(self) -> float:
        """The minimum traffic of each rank's link, relative to the operation's bytes.

        A pipelined broadcast sends all bytes once over each link.
        """
        n = self.ranks
        return {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(self.operation, (n - 1) / n)


def ring_seconds(line: Line, link: Link) -> float:
    """Seconds of a ring, by the model."""
    rounds = (line.ranks - 1) * (2 if line.operation == "all_reduce" else 1)
    return rounds * link.latency + line.carried * line.bytes / link.rate


def tree_seconds(line: Line, link: Link) -> float | None:
    """Seconds of a binary tree, by the model; None for operations that do not use one."""
    levels = {"all_reduce": 2, "broadcast": 1}.get(line.operation)
    if levels is None:
        return None
    return levels * math.log2(line.ranks) * (link.latency + line.bytes / link.rate)


def run(arguments: list[str] | None = None) -> None:
    """Run the program; `arguments` begins with the program's name."""
    PROGRAM.run(arguments)


def _check(_: list[str]) -> CollectivesOptions:
    options = _FLAGS.read()
    for name in options.operations:
        if name not in _OPERATIONS:
            raise command.UsageError(
                f"--operations must be some of {', '.join(_OPERATIONS)}. Received: {name!r}."
            )
    if options.min_bytes > options.max_bytes:
        raise command.UsageError(
            f"--min_bytes must be at most --max_bytes. Received: --min_bytes={options.min_bytes} "
            f"--max_bytes={options.max_bytes}."
        )
    if options.json is not None:
        output_file("json", options.json)
    return options


def _main(options: CollectivesOptions) -> None:
    sizes = [options.min_bytes]
    while sizes[-1] * options.factor <= options.max_bytes:
        sizes.append(sizes[-1] * options.factor)
    from tfdist import strategies
    from tfdist.collectives.p2p import P2PEngine

    try:
        strategy = strategies.auto()
    except (ValueError, ImportError) as error:
        raise command.UsageError(f"The rendezvous of the ranks failed: {error}") from error
    group = strategy.group()
    if group.size == 1:
        raise command.UsageError(
            "Collectives require at least two ranks: tfdist-run -np 2 -- tfdist-bench collectives."
        )
    link = measure_link(group)
    if options.bulk and isinstance(strategy.engine, P2PEngine):
        strategy.engine.enabled = False
    lines = [measure(operation, size, group) for operation in options.operations for size in sizes]
    if not strategy.is_chief:
        return
    print(report(link, lines))
    if options.json:
        found: dict[str, Any] = {
            "link": dataclasses.asdict(link),
            "lines": [dataclasses.asdict(line) for line in lines],
        }
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


def measure_link(group) -> Link:
    """Measure latency and rate of the link from the group's first rank to its last.

    Messages are sent like tensors of a pipeline; an engine without point-to-point messages uses a group
    of these two ranks.
    """
    there_and_back = median_seconds(_ping(group, 64), group)
    large = median_seconds(_ping(group, _LINK_BYTES, back=64), group)
    return Link(there_and_back / 2, _LINK_BYTES / max(large - there_and_back / 2, 1e-9))


def measure(operation: str, size: int, group) -> Line:
    """Measure an operation on tensors of float32."""
    return Line(
        operation, size, group.size, median_seconds(_operation(operation, size, group), group)
    )


def report(link: Link, lines: Sequence[Line]) -> str:
    """A table as of nccl-tests, with additional columns for the models."""
    rows = []
    for line in lines:
        tree = tree_seconds(line, link)
        rows.append(
            (
                line.operation,
                f"{line.bytes:,}",
                f"{1e6 * line.seconds:,.0f}",
                f"{line.algorithm_rate / 1e9:.3f}",
                f"{line.bus_rate / 1e9:.3f}",
                f"{line.bus_rate / link.rate:.0%}",
                f"{1e6 * ring_seconds(line, link):,.0f}",
                "" if tree is None else f"{1e6 * tree:,.0f}",
            )
        )
    head = ("operation", "bytes", "us", "alg GB/s", "bus GB/s", "of link", "ring us", "tree us")
    table = tabulate(rows, head, disable_numparse=True, colalign=("left",) + ("right",) * 7)
    return (
        f"{lines[0].ranks} ranks; the link between ranks has {1e6 * link.latency:,.0f} us and "
        f"{link.rate / 1e9:.3f} GB/s.\n{table}"
    )


def _operation(name: str, size: int, group) -> Callable[[], Any]:
    """A compiled function that runs one operation."""
    import tensorflow as tf

    from tfdist import collectives

    # The size is that of the output of an all-gather, and of the input of the others.
    elements = max(size // 4, group.size) // group.size * group.size
    own = tf.ones([elements // group.size if name == "all_gather" else elements])
    call = getattr(collectives, name)

    @tf.function
    def function(x):
        # Returns a single number, which is available when the whole result is.
        return call(x, group, name=f"bench/{name}/{size}")[0]

    return lambda: function(own).numpy()


def _ping(group, size: int, back: int | None = None) -> Callable[[], Any]:
    """A function that sends bytes from the first rank to the last, and some back."""
    import tensorflow as tf

    from tfdist import collectives

    out = tf.ones([size // 4])
    answer = tf.ones([(size if back is None else back) // 4])
    last = group.size - 1

    @tf.function
    def function(out, answer):
        if group.rank == 0:
            sent = collectives.send(out, group, last, name=f"bench/ping/{size}")
            with tf.control_dependencies([sent]):
                return collectives.recv(answer, group, last, name=f"bench/pong/{size}")[0]
        came = collectives.recv(out, group, 0, name=f"bench/ping/{size}")
        with tf.control_dependencies([came]):
            return collectives.send(tf.identity(answer), group, 0, name=f"bench/pong/{size}")[0]

    if group.rank in (0, last):
        return lambda: function(out, answer).numpy()
    return lambda: None


def median_seconds(function: Callable[[], Any], group) -> float:
    """Median seconds of a call on the slowest rank; the first rank determines the number of calls."""
    import tensorflow as tf

    from tfdist import collectives
    from tfdist.collectives.objects import broadcast_object

    for _ in range(_WARM_UP):
        function()
    collectives.barrier(group, name="bench")
    begun = time.perf_counter()
    function()
    once = max(time.perf_counter() - begun, 1e-6)
    seconds = _FLAGS.read().seconds
    count = broadcast_object(min(max(int(seconds / once), 5), 2000), group, name="bench/count")
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    own = tf.constant(statistics.median(times), tf.float64)
    return float(collectives.all_reduce(own, group, "max", name="bench/slowest"))


PROGRAM = command.Program(
    _main,
    _FLAGS.values,
    usage="tfdist-bench collectives [flags]",
    summary="Measures collectives on the ranks started by tfdist-run or another launcher.",
    check=_check,
)


if __name__ == "__main__":
    run()
