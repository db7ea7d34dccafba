"""The optimal interval between checkpoints."""

from __future__ import annotations

import math

from tfdist.utils import checks


def young_daly(save_seconds: float, failure_seconds: float) -> float:
    """The time between two saves that minimizes the total loss to saving and to failures.

    Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
    Generation Computer Systems 22 (2006), equation 37, which refines Young's `sqrt(2 * save *
    failure)` (1974).

    Args:
        save_seconds: The time by which a save delays the training.
        failure_seconds: The mean time between failures of the whole job.

    Returns:
        Seconds of training between the end of a save and the beginning of the next.

    Raises:
        ValueError: An argument is not a positive number.
    """
    checks.number("save_seconds", save_seconds, above=0)
    checks.number("failure_seconds", failure_seconds, above=0)
    if save_seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = save_seconds / (2 * failure_seconds)
    first = math.sqrt(2 * save_seconds * failure_seconds)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds
