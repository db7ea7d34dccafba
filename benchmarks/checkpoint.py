"""What saving costs a training: step time with one save per 20 steps over that without, and memory.

    python -m benchmarks.checkpoint [--engine=horovod|tensorflow] [--rounds=5]

The wide GPT on 2 data-parallel ranks with 1 thread each. Both take turns on the same ranks, and a ratio is
that of one turn; the time is that from the second step to the last, with two saves in it, of which the
first is written to its end and the second at least begun. Memory is the most that a rank's process has
in use during a save beyond what it has during steps without one.
"""

from __future__ import annotations

import sys
import tempfile

from benchmarks.measuring import (
    ENVIRONMENT,
    HEADER,
    Ratio,
    parser,
    variants_in_turn,
    wide_gpt,
    write_json,
)
from tfdist.launch.plan.trials import fit_begins
from tfdist.testing import RankPool

LIMIT, MEMORY_LIMIT = 1.05, 1.0
VARIANTS = ("without", "one save in 20 steps")
_EVERY, _STEPS = 20, 46
_MIB = 1 << 20


def prepare(variant: str) -> None:
    """Builds and warms up the wide GPT on this rank."""
    from tfdist.testing import rank

    model, data = rank._state["saved gpt", variant] = wide_gpt()
    model.fit(data, steps_per_epoch=2, verbose=0)


def seconds(variant: str) -> float:
    """The mean time of a step, saves included, on this rank."""
    from tfdist.callbacks import Checkpointer
    from tfdist.collectives.objects import broadcast_object
    from tfdist.testing import rank

    model, data = rank._state["saved gpt", variant]
    callbacks = []
    with tempfile.TemporaryDirectory() as folder:
        folder = broadcast_object(folder, model.distribute_strategy.group(), name="folder")
        if variant != "without":
            callbacks.append(Checkpointer(folder, every_steps=_EVERY, resume=False))
        begins = fit_begins(model, data, _STEPS, callbacks)
    return (begins[-1] - begins[1]) / (len(begins) - 2)


def memory() -> tuple[float, float]:
    """MiB beyond those of a step, while a checkpoint is written; and of this rank's variables."""
    import keras

    from tfdist.addons.monitoring.memory import PeakMemory
    from tfdist.checkpoint.saving import Saver
    from tfdist.collectives.objects import broadcast_object
    from tfdist.testing import rank

    model, data = rank._state["saved gpt", VARIANTS[1]]
    variables = [*model.variables, *model.optimizer.variables]
    held = sum(variable.numpy().nbytes for variable in variables)

    class SaveOnce(keras.callbacks.Callback):
        def __init__(self, saver):
            super().__init__()
            self._saver, self._save = saver, None

        def on_train_batch_begin(self, batch, logs=None):
            if self._saver is not None and batch == 1:
                self._save = self._saver.begin(1)

        def on_train_end(self, logs=None):
            if self._save is not None:
                self._save.wait()

    peaks = []
    with tempfile.TemporaryDirectory() as folder:
        folder = broadcast_object(folder, model.distribute_strategy.group(), name="folder")
        for saver in (None, Saver(folder, model)):
            with PeakMemory() as peak:
                model.fit(data, steps_per_epoch=8, verbose=0, callbacks=[SaveOnce(saver)])
            peaks.append(peak.bytes)
    return (peaks[1] - peaks[0]) / _MIB, held / _MIB


def main() -> int:
    """Prints the figures; exit code 1 where one is above its limit."""
    flags = parser(__doc__, ["steps", "memory"])
    options = flags.parse_args()
    ratios: list[Ratio] = []
    rows: list[tuple[float, float]] = []
    if options.only != "memory":
        print(HEADER)
        with RankPool(2, options.engine, environment=ENVIRONMENT) as ranks:
            found = variants_in_turn(ranks, VARIANTS, prepare, seconds, options.rounds)
        name = "wide GPT: one save in 20 steps / without"
        ratios.append(Ratio(name, found[VARIANTS[1]], found[VARIANTS[0]], LIMIT))
        print(ratios[0].row(), flush=True)
    if options.only != "steps":
        # Without oneDNN TensorFlow keeps no pool, and the C library counts all that is in use.
        counted = {**ENVIRONMENT, "TF_ENABLE_ONEDNN_OPTS": "0"}
        with RankPool(2, options.engine, environment=counted) as ranks:
            ranks.run(prepare, VARIANTS[1], timeout=300)
            rows = ranks.run(memory, timeout=300)
        for rank, (more, held) in enumerate(rows):
            print(
                f"rank {rank}: {more:.0f} MiB more while saving; its variables are {held:.0f} MiB: "
                f"{more / held:.2f}  at most {MEMORY_LIMIT:g}"
            )
    write_json(options.json, options.engine, ratios, memory=rows)
    is_over = any(ratio.is_over for ratio in ratios)
    return int(is_over or any(more > MEMORY_LIMIT * held for more, held in rows))


if __name__ == "__main__":
    sys.exit(main())
