"""`tfdist-bench peak`: the peak compute rate and bandwidth of a rank, the reference of a `Monitor`.

    tfdist-run -np 2 -- tfdist-bench peak --output=peak.json

All ranks multiply matrices at the same time, as in training, because ranks of a machine share it. The
bandwidth is measured by all-reduces of 64 MiB.
"""

from __future__ import annotations

import statistics
import time

from absl import flags

from tfdist.launch.flags import command
from tfdist.launch.flags.quiet import quiet_start
from tfdist.launch.flags.values import FlagDefiner, output_file

_VALUES = flags.FlagValues()
_define = FlagDefiner(_VALUES)
_OUTPUT = _define.string("output", None, "File for `Monitor(peak=...)` and `tfdist-train --peak`")
_DTYPE = _define.enum(
    "dtype", "float32", ["float32", "bfloat16", "float16"], "Dtype of the products"
)
_SIZE = _define.integer(
    "size", 2048, "Rows and columns of a matrix", lower_bound=16, upper_bound=1 << 15
)
_SECONDS = _define.float(
    "seconds", 5.0, "Seconds to measure products", lower_bound=0.1, upper_bound=3600.0
)
_THREADS = _define.integer(
    "threads", 0, "Threads per rank; 0: TensorFlow's choice", lower_bound=0, upper_bound=4096
)

_SUM_BYTES = 64 << 20
_SUMS = 9


def run() -> None:
    """Run the program."""
    PROGRAM.run()


def _check(_: list[str]) -> None:
    if _OUTPUT.value is not None:
        output_file("output", _OUTPUT.value)


def _main(_: None) -> None:
    with quiet_start():
        import tensorflow as tf

        from tfdist import strategies
        from tfdist.addons.monitoring.monitor.peaks import Peak
        from tfdist.addons.monitoring.monitor.words import big
        from tfdist.collectives import all_reduce

        tf.config.list_physical_devices()
    if _THREADS.value:
        tf.config.threading.set_intra_op_parallelism_threads(_THREADS.value)
    try:
        strategy = strategies.auto()
    except (ValueError, ImportError) as error:
        raise command.UsageError(f"The rendezvous of the ranks failed: {error}") from error
    world = strategy.group()
    own = measured_flops(_SIZE.value, _DTYPE.value, _SECONDS.value)
    flops = float(all_reduce(tf.constant(own, tf.float64), world, "mean", name="peak/flops"))
    rate = measured_bandwidth(world) if world.size > 1 else None
    if not strategy.is_chief:
        return
    peak = Peak(flops, rate)
    print(
        f"peak={flops:.4g}: {big(flops)}FLOP/s per rank on {world.size} ranks, in products of "
        f"{_SIZE.value} x {_SIZE.value} {_DTYPE.value}."
    )
    if rate is not None:
        print(f"{big(rate)}B/s per rank, in all-reduces of 64 MiB over {world.size} ranks.")
    if _OUTPUT.value is not None:
        peak.write(_OUTPUT.value, ranks=world.size, dtype=_DTYPE.value, size=_SIZE.value)


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
    _VALUES,
    usage="tfdist-bench peak [flags]",
    summary="Measures the peak FLOP/s and bandwidth of the ranks started by tfdist-run or another "
    "launcher. Without a launcher it measures one process.",
    check=_check,
)


if __name__ == "__main__":
    run()
