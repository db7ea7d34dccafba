"""Recompute: step time over that of keeping all activations.

    python -m benchmarks.recompute [--rounds=15]

One process with 2 threads and the GPT of width 256; the policies take turns, and a ratio is that of
one turn.
"""

from __future__ import annotations

import sys

from benchmarks.measuring import (
    HEADER,
    Ratio,
    fit_step_seconds,
    parser,
    token_batches,
    variants_in_turn,
    write_json,
)
from tfdist.testing import RankPool

#: By policy, the most that a step may take of that without recompute.
LIMITS = {"every_layer": 1.40, "sqrt": 1.40, "selective": 1.08}
_STEPS = 6


def prepare(policy: str | None) -> None:
    """Builds and warms up a GPT on this rank."""
    import keras

    from tfdist import layers, models
    from tfdist.recompute import recompute
    from tfdist.testing import rank, strategy

    keras.utils.set_random_seed(0)
    with strategy().scope():
        model = models.gpt(512, num_layers=6, width=256, num_heads=4, max_length=256)
        if policy is not None:
            recompute(model, policy)
        model.compile("adam", layers.VocabParallelCrossEntropy(512))
    rank._state["gpt", policy] = (model, token_batches(16, 256))
    step_seconds(policy)


def step_seconds(policy: str | None) -> float:
    """The median time of a training step."""
    from tfdist.testing import rank

    model, data = rank._state["gpt", policy]
    return fit_step_seconds(model, data, _STEPS)


def measure(rounds: int, policies) -> list[Ratio]:
    """Each policy over none."""
    with RankPool(1, "local", threads=2) as process:
        seconds = variants_in_turn(process, [None, *policies], prepare, step_seconds, rounds)
    found = []
    for policy in policies:
        name = f"GPT of 6 layers: {policy} / kept"
        found.append(Ratio(name, seconds[policy], seconds[None], LIMITS[policy]))
        print(found[-1].row(), flush=True)
    return found


def main() -> int:
    """Prints the table; exit code 1 where a ratio is above its limit."""
    options = parser(__doc__, LIMITS).parse_args()
    print(HEADER)
    found = measure(options.rounds, [options.only] if options.only else list(LIMITS))
    write_json(options.json, "local", found)
    return int(any(ratio.is_over for ratio in found))


if __name__ == "__main__":
    sys.exit(main())
