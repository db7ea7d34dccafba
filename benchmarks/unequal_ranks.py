"""How much unequal ranks gain by shares of the batch that follow their speed.

    python -m benchmarks.unequal_ranks
    python -m benchmarks.unequal_ranks --only=gpt --engine=tensorflow --rounds=3

Two ranks stand on one core each; beside the second a program keeps its core busy, so that the rank has
about half of it. Each round trains a model with equal shares and then, anew, with measured ones, for
100 steps, of which the last 20 count. Of equal shares comes what part of the first rank's speed the
second has, s; the time of a step can become (1 + s) / (2 s) times shorter, no more.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from benchmarks.measuring import ENVIRONMENT, Ratio, parser, write_json
from tfdist.launch.plan.trials import fit_begins, median_interval
from tfdist.testing import RankPool

#: Of the ideal gain.
_LEAST = 0.9
_STEPS, _COUNTED = 100, 21
_PARTS = ("gpt", "convnet")
_ROWS = {"gpt": 32, "convnet": 192}


def main() -> None:
    arguments = parser(__doc__, _PARTS).parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit(f"Two ranks stand on a core each. Received: {len(cores)} core.")
    ratios, missed = [], False
    for part in _PARTS:
        if arguments.only not in (None, part):
            continue
        with RankPool(2, arguments.engine, environment=ENVIRONMENT) as pool:
            pool.run(_stand_on, cores[:2], timeout=300)
            burner = subprocess.Popen([sys.executable, "-c", _BURN, str(cores[1])])
            try:
                ratio, reached = _compare(pool, part, arguments.rounds)
            finally:
                burner.kill()
                burner.wait()
        ratios.append(ratio)
        share = statistics.median(reached)
        missed |= share < _LEAST
        print(
            f"{part:<8} equal {1e3 * statistics.median(ratio.other):7.1f} ms  measured "
            f"{1e3 * statistics.median(ratio.one):7.1f} ms  gain {1 / ratio.median:5.3f}  "
            f"of the ideal {share:5.3f}  at least {_LEAST}",
            flush=True,
        )
    write_json(arguments.json, arguments.engine, ratios)
    if missed:
        sys.exit(1)


#: At a nice value like that of the ranks, which it inherits.
_BURN = "import os, sys\nos.sched_setaffinity(0, [int(sys.argv[1])])\nwhile True: pass"


def _compare(pool: RankPool, part: str, rounds: int) -> tuple[Ratio, list[float]]:
    ratio, reached = Ratio(f"{part}, measured shares and equal ones", [], [], None), []
    for turn in range(rounds):
        equal = pool.run(_train, part, "equal", timeout=500)
        measured = pool.run(_train, part, "measured", timeout=500)
        ratio.other.append(max(result["seconds"] for result in equal))
        ratio.one.append(max(result["seconds"] for result in measured))
        work = [result["work"] for result in equal]
        s = min(work) / max(work)
        ideal = (1 + s) / (2 * s)
        gain = ratio.other[-1] / ratio.one[-1]
        reached.append(gain / ideal)
        print(
            f"  turn {turn}: s {s:.3f}, ideal {ideal:.3f}, gain {gain:.3f}, "
            f"shares {', '.join(f'{share:.3f}' for share in measured[0]['shares'])}",
            file=sys.stderr,
            flush=True,
        )
    return ratio, reached


def _stand_on(cores: list[int]) -> None:
    """Puts this rank, with all its threads, on a core of its own."""
    from tfdist.testing import engine

    core = {cores[engine().rank]}
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), core)


def _train(part: str, shares: str) -> dict:
    """The median time of the last steps on this rank, what it works in one, and the shares."""
    from tfdist.strategies import MeasuredShares
    from tfdist.testing import engine, strategy

    plain = strategy()
    # Equal shares are measured too, but never change.
    how = MeasuredShares(hysteresis=100.0) if shares == "equal" else "measured"
    shared = type(plain)(engine=engine(), batch_shares=how)
    model, data = _make(part, shared)
    begins = fit_begins(model, data, _STEPS)[-_COUNTED - 1 :]
    rows = _ROWS[part] * shared.batch_shares[shared.row_group.rank]
    speed = shared.row_shares.speeds[shared.row_group.rank]
    return {
        "seconds": median_interval(begins),
        "work": rows / speed,
        "shares": shared.batch_shares,
    }


def _make(part: str, shared):
    import keras
    import numpy as np
    import tensorflow as tf

    from benchmarks.measuring import token_batches
    from tfdist import models

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with shared.scope():
        if part == "gpt":
            model = models.gpt(512, num_layers=4, width=256, num_heads=4, max_length=64)
        else:
            model = models.convnet((28, 28, 1), 10)
        model.compile("sgd", loss)
    if part == "gpt":
        return model, token_batches(_ROWS[part], 64)
    images = np.random.default_rng(0).random((_ROWS[part], 28, 28, 1), "float32")
    labels = np.arange(_ROWS[part]) % 10
    return model, tf.data.Dataset.from_tensors((images, labels)).repeat()


if __name__ == "__main__":
    main()
