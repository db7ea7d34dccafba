"""The time of the first step of a GPT, whose graphs are made then: compiled by XLA, and not.

    python -m benchmarks.first_step [--only=tensor] [--engine=horovod]

Each case has two processes of its own with one thread each: a GPT of 12 blocks of width 256, a batch of 8 x 128 tokens. The
limits are those of a compiled first step.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from tabulate import tabulate

from tfdist.testing import RankPool

#: By name: the mesh, the micro-batches of a pipeline, and the most seconds of a compiled first step.
CASES: dict[str, tuple[dict[str, int], int | None, float]] = {
    "data": ({}, None, 90.0),
    "tensor": ({"tensor": 2}, None, 40.0),
    "pipeline": ({"pipeline": 2}, 4, 90.0),
}


def first_step(mesh: dict[str, int], microbatches: int | None, compiled: bool) -> tuple[float, str]:
    """Seconds of a `fit` of one step on this rank, and what was said of the parts that XLA compiles."""
    import logging

    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist
    from tfdist.layers import VocabParallelCrossEntropy
    from tfdist.testing import strategy

    tf.config.threading.set_intra_op_parallelism_threads(1)
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tfdist").addHandler(listener)
    logging.getLogger("tfdist").setLevel(logging.INFO)
    axes: dict[str, Any] = dict(mesh)
    with strategy(tfdist.Mesh(**axes)).scope():
        model = tfdist.models.gpt(2048, num_layers=12, width=256, num_heads=8, max_length=128)
        if microbatches is not None:
            model = tfdist.pipeline.PipelineModel(
                model, num_microbatches=microbatches, input_shape=(128,)
            )
        loss = VocabParallelCrossEntropy(2048)
        model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=compiled)
    ids = np.random.default_rng(0).integers(0, 2048, (8, 128))
    begin = time.perf_counter()
    model.fit(ids, ids, batch_size=8, verbose=0)
    found = [line for line in said if line.startswith("XLA compiles")]
    return time.perf_counter() - begin, found[0] if found else ""


def main() -> int:
    """Prints a table; exit code 1 if a compiled first step takes longer than its limit."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--only", choices=list(CASES))
    flags.add_argument("--engine", default="horovod")
    options = flags.parse_args()
    rows, failed = [], False
    for name, (mesh, microbatches, limit) in CASES.items():
        if options.only not in (None, name):
            continue
        seconds = {}
        for compiled in (False, True):
            pool = RankPool(2, options.engine)
            try:
                found = pool.run(first_step, mesh, microbatches, compiled, timeout=600)
            finally:
                pool.close()
            seconds[compiled] = max(took for took, _ in found)
            said = found[0][1]
        # Four times as long as without XLA is allowed where that is more.
        most = max(limit, 4 * seconds[False]) if name == "tensor" else limit
        failed |= seconds[True] > most
        rows.append((name, seconds[False], seconds[True], most, said))
        print(rows[-1], flush=True)
    head = ("", "not compiled, s", "compiled, s", "at most, s", "")
    print(tabulate(rows, head, tablefmt="pipe", floatfmt=".1f"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
