"""`tfdist-bench peak`: the peak compute rate and bandwidth of a rank, the reference of a `Monitor`.

    tfdist-run -np 2 -- tfdist-bench peak --output=peak.json

All ranks multiply matrices at the same time, as in training, because ranks of a machine share it. The
bandwidth is measured by all-reduces of 64 MiB.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

from tfdist.launch.flags import command
from tfdist.launch.flags.options import define_flags, option
from tfdist.launch.flags.quiet import quiet_start
from tfdist.launch.flags.values import output_file

_SUM_BYTES = 64 << 20
_SUMS = 9


@dataclasses.dataclass(frozen=True)
class PeakOptions:
    """The options of the program; see the flags of the same names."""

    output: str | None = option(None, "File for `Monitor(peak=...)` and `tfdist-train --peak`")
    dtype: str = option(
        "float32", "Dtype of the products", choices=("float32", "bfloat16", "float16")
    )
    size: int = option(2048, "Rows and columns of a matrix", least=16, most=1 << 15)
    seconds: float = option(5.0, "Seconds to measure products", least=0.1, most=3600.0)
    threads: int = option(0, "Threads per rank; 0: TensorFlow's choice", least=0, most=4096)


_FLAGS = define_flags(PeakOptions)


def run() -> None:
    """Run the program."""
    PROGRAM.run()


def _check(_: list[str]) -> PeakOptions:
    options = _FLAGS.read()
    if options.output is not None:
        output_file("output", options.output)
    return options


def _main(options: PeakOptions) -> None:
    with quiet_start():
        import tensorflow as tf

        from tfdist import strategies
        from tfdist.addons.monitoring.monitor.peaks import Peak
        from tfdist.addons.monitoring.monitor.words import big
        from tfdist.collectives import all_reduce

        tf.config.list_physical_devices()
    if options.threads:
        tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    try:
        strategy = strategies.auto()
    except (ValueError, ImportError) as error:
        raise command.UsageError(f"The rendezvous of the ranks failed: {error}") from error
    world = strategy.group()
    own = measured_flops(options.size, options.dtype, options.seconds)
    flops = float(all_reduce(tf.constant(own, tf.float64), world, "mean", name="peak/flops"))
    rate = measured_bandwidth(world) if world.size > 1 else None
    if not strategy.is_chief:
        return
    peak = Peak(flops, rate)
    print(
        f"peak={flops:.4g}: {big(flops)}FLOP/s per rank on {world.size} ranks, in products of "
        f"{options.size} x {options.size} {options.dtype}."
    )
    if rate is not None:
        print(f"{big(rate)}B/s per rank, in all-reduces of 64 MiB over {world.size} ranks.")
    if options.output is not None:
        peak.write(options.output, ranks=world.size, dtype=options.dtype, size=options.size)


def measured_flops(size: int, dtype: str, seconds: float) -> float:
    """Measure the median FLOP/s of products of square matrices."""
    import tensorflow as tf

    one, other = (tf.cast(tf.random.normal([size, size]), dtype) for _ in range(2))

    @tf.function
    def product(a, b):
        return tf.reduce_sum(tf.cast(tf.matmul(a, b), tf.float32))

    product(one, other).numpy()
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(rates) < 3:
        begun = time.perf_counter()
        product(one, other).numpy()
        rates.append(2 * size**3 / (time.perf_counter() - begun))
    return statistics.median(rates)


def measured_bandwidth(group) -> float:
    """Measure the bytes per second that a rank sends in an all-reduce of a large array."""
    import tensorflow as tf

    from tfdist.collectives import all_reduce

    @tf.function
    def total(x):
        return all_reduce(x, group, name="peak/sum")[0]

    array = tf.zeros([_SUM_BYTES // 4])
    total(array).numpy()
    times = []
    for _ in range(_SUMS):
        begun = time.perf_counter()
        total(array).numpy()
        times.append(time.perf_counter() - begun)
    slowest = all_reduce(
        tf.constant(statistics.median(times), tf.float64), group, "max", name="peak/slowest"
    )
    return 2 * (group.size - 1) / group.size * _SUM_BYTES / float(slowest)


PROGRAM = command.Program(
    _main,
    _FLAGS.values,
    usage="tfdist-bench peak [flags]",
    summary="Measures the peak FLOP/s and bandwidth of the ranks started by tfdist-run or another "
    "launcher. Without a launcher it measures one process.",
    check=_check,
)


if __name__ == "__main__":
    run()
