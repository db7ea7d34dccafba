"""The measured time of the segments of a chain of layers, for an even split into pipeline stages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Group
from tfdist.collectives.objects import all_gather_object
from tfdist.pipeline.chain import Chain
from tfdist.pipeline.costs import forward_and_backward
from tfdist.pipeline.segment import Segment
from tfdist.utils import checks

#: Far more than the rows of a micro-batch, and than a median needs.
_MAX_ROWS = 1 << 20
_MAX_REPEATS = 10_000


def measure_seconds(
    chain: Chain, group: Group | None = None, *, rows: int = 8, repeats: int = 5
) -> list[float]:
    """The measured time of a forward and a backward pass of each segment.

    Weights without values are replaced by zeros, so that only the measured segment takes memory.

    Args:
        chain: The chain. Of the inputs of its segments only the number of rows may be undefined.
        group: The ranks that must get the same result, which all call this: the mean over ranks.
        rows: The number of rows of the inputs; that of a micro-batch for an exact result.
        repeats: How many times each segment runs; the result is the median.

    Returns:
        Seconds, for each segment.

    Raises:
        ValueError: An input of a segment has a dim of unknown size.
    """
    checks.instance("chain", chain, Chain, "a Chain")
    checks.instance("group", group, Group, "a Group, as of `strategy.group()`", optional=True)
    rows = checks.integer("rows", rows, minimum=1, maximum=_MAX_ROWS)
    repeats = checks.integer("repeats", repeats, minimum=1, maximum=_MAX_REPEATS)
    chain.check_known_shapes("the measurement of segments")
    specs = chain.specs(rows)
    found = [_seconds(each, each.arguments(specs), repeats) for each in chain.segments]
    if group is None or group.size == 1:
        return found
    every = all_gather_object(found, group, name="pipeline/costs")
    return [statistics.fmean(seconds) for seconds in zip(*every, strict=True)]


def _seconds(segment: Segment, specs: Sequence[tf.TensorSpec], repeats: int) -> float:
    x = [
        (tf.random.normal if spec.dtype.is_floating else tf.zeros)(spec.shape, dtype=spec.dtype)
        for spec in specs
    ]
    values = [tf.zeros(variable.shape, variable.dtype) for variable in segment.deferred_variables]
    step = tf.function(lambda x, values: forward_and_backward(segment, x, values, {}))
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        step(x, values)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
