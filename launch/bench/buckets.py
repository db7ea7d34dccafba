"""`tfdist-bench buckets`: the size of gradient buckets for this network.

    tfdist-run -np 2 -H host1:1,host2:1 -- tfdist-bench buckets

The time of an all-reduce of s bytes is close to a + s b (Hockney 1994): a per message, b per byte. The
result is the smallest bucket for which a is at most a tenth of the time: the smaller the buckets, the
earlier the first is sent, and the less communication remains after the backward pass.
"""

from __future__ import annotations

from absl import flags
from tabulate import tabulate

from tfdist.launch.bench.collectives import median_seconds
from tfdist.launch.flags import command

_VALUES = flags.FlagValues()
#: The time for bytes is nine times that for messages, if the latter is a tenth of the total.
_BYTES_TO_MESSAGES = 9
_SMALL, _LARGE = 1 << 18, 1 << 22
_LEAST_MIB, _MOST_MIB = 1, 16
_REPEATS = 4


def run() -> None:
    """Run the program."""
    PROGRAM.run()


def bucket_mib_for(small_seconds: float, large_seconds: float) -> int:
    """The size of buckets in MiB, from the times of all-reduces of 256 KiB and of 4 MiB."""
    a_byte = max(large_seconds - small_seconds, 1e-9) / (_LARGE - _SMALL)
    a_message = max(small_seconds - _SMALL * a_byte, 0.0)
    size = _LEAST_MIB
    while size << 20 < min(_BYTES_TO_MESSAGES * a_message / a_byte, _MOST_MIB << 20):
        size *= 2
    return size


def _main(_) -> None:
    from tfdist import strategies

    try:
        strategy = strategies.auto()
    except (ValueError, ImportError) as error:
        raise command.UsageError(f"The rendezvous of the ranks failed: {error}") from error
    group = strategy.gradient_group
    if group.size == 1:
        raise command.UsageError(
            "Gradient buckets require at least two ranks: tfdist-run -np 2 -- tfdist-bench buckets."
        )
    small, large = (seconds_of_a_sum(size, group) for size in (_SMALL, _LARGE))
    if not strategy.is_chief:
        return
    rows = [("256 KiB", f"{1e3 * small:.2f}"), ("4 MiB", f"{1e3 * large:.2f}")]
    print(tabulate(rows, ("sum of", "ms"), disable_numparse=True, colalign=("right", "right")))
    print(f"bucket_mib={bucket_mib_for(small, large)} is recommended for these {group.size} ranks.")


def seconds_of_a_sum(size: int, group) -> float:
    """Seconds of an all-reduce of `size` bytes on the slowest rank, with several in flight."""
    import tensorflow as tf

    from tfdist.collectives import all_reduce

    @tf.function
    def sums(x):
        return [all_reduce(x, group, name=f"buckets/{size}/{n}") for n in range(_REPEATS)]

    x = tf.zeros([size // 4])

    def call() -> None:
        for result in sums(x):
            result[0].numpy()

    return median_seconds(call, group) / _REPEATS


PROGRAM = command.Program(
    _main,
    _VALUES,
    usage="tfdist-bench buckets",
    summary="Measures the best `bucket_mib` for the ranks started by tfdist-run or another launcher.",
)


if __name__ == "__main__":
    run()
