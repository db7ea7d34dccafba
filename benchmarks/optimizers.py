"""Muon on shards: the step of two ranks with ZeRO over that of one process, with one thread each.

    python -m benchmarks.optimizers [--engine=horovod|tensorflow] [--rounds=15] [--only=step|update]

Both train a GPT on the same global batch. `step` has 16 rows of 128 tokens; `update` has two short rows, so
that a step is little more than the update.
"""

from __future__ import annotations

import sys

from benchmarks.measuring import (
    ENVIRONMENT,
    HEADER,
    Ratio,
    fit_step_seconds,
    in_turn,
    parser,
    token_batches,
    write_json,
)
from tfdist.testing import RankPool

#: The rows and the length of a batch.
BATCHES = {"step": (16, 128), "update": (2, 8)}
_LIMIT = 0.75
_STEPS = 5
_VOCABULARY = 512


def prepare(part: str) -> float:
    """Builds and warms up the model on this rank; with more than one, under ZeRO-1."""
    import keras

    from tfdist import layers, models
    from tfdist.addons.optimizers import Muon
    from tfdist.testing import engine, rank, strategy

    keras.utils.set_random_seed(0)
    with strategy(zero_stage=int(engine().size > 1)).scope():
        model = models.gpt(_VOCABULARY, num_layers=4, width=512, num_heads=8, max_length=128)
        model.compile(Muon(0.01), layers.VocabParallelCrossEntropy(_VOCABULARY))
    data = token_batches(*BATCHES[part], _VOCABULARY)
    rank._state["muon", part] = model, data
    return step_seconds(part)


def step_seconds(part: str) -> float:
    """The median time of a training step, on this rank."""
    from tfdist.testing import rank

    model, batches = rank._state["muon", part]
    return fit_step_seconds(model, batches, _STEPS)


def measure(part: str, engine: str, rounds: int) -> Ratio:
    """Two ranks over one process."""
    with (
        RankPool(2, engine, environment=ENVIRONMENT) as two,
        RankPool(1, "local", environment=ENVIRONMENT) as one,
    ):
        for pool in (two, one):
            pool.run(prepare, part, timeout=300)
        of_two, of_one = in_turn([two, one], step_seconds, rounds, part)
    return Ratio(f"Muon, {part}: 2 ranks / 1 process", of_two, of_one, _LIMIT)


def main() -> int:
    """Measures and reports; 1 if a ratio is above its limit."""
    flags = parser(__doc__, BATCHES).parse_args()
    print(HEADER)
    found = []
    for part in BATCHES if flags.only is None else [flags.only]:
        found.append(measure(part, flags.engine, flags.rounds))
        print(found[-1].row(), flush=True)
    write_json(flags.json, flags.engine, found)
    return int(any(ratio.is_over for ratio in found))


if __name__ == "__main__":
    sys.exit(main())
