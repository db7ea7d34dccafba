"""Long context: time of a step over half of one rank's, and memory of a rank over its part.

    python -m benchmarks.long_context [--rounds=15] [--only=ring_2]

A GPT of 2 layers (of 6 for the memory) on one sequence of 4,096 tokens, one thread a rank, with the
sequence split over 2 or 4 ranks, on as many cores. The rank beside it computes the whole sequence while
the other cores do the same: cores share caches, memory and power, so one that computes alone is faster
than it can be in any parallel program. By how much, a line of its own says.
Peak memory is what a first step of 16,384 tokens adds to the resident memory of a rank, less what one of
8,192 adds: weights, gradients and the graph are then in neither, and with both lengths the blocks of attention
have their full size on each of four ranks.
"""

from __future__ import annotations

import os
import sys

from benchmarks.measuring import (
    HEADER,
    Ratio,
    in_turn,
    parser,
    peak_above,
    token_batches,
    write_json,
)
from tfdist.testing import RankPool

_TOKENS, _WIDTH, _VOCABULARY = 4096, 256, 512
#: By case: how attention spans the ranks, how many there are, and the most that a step may take of one
#: rank's, over their number.
CASES = {
    "ring_2": ("ring", 2, 1.15),
    "all_gather_2": ("all_gather", 2, None),
    "ulysses_2": ("ulysses", 2, None),
    "ring_4": ("ring", 4, None),
    "all_gather_4": ("all_gather", 4, None),
    "ulysses_4": ("ulysses", 4, None),
}
#: The most that a step may add to a rank's memory, of one rank's: its part, and a tenth of the whole.
_SPARE = 0.1


def _gpt(kind: str, num_layers: int, alone: bool = False):
    """A GPT on all ranks, or on each of them one of its own; compiled."""
    import keras

    from tfdist import Mesh, layers, models
    from tfdist.strategies import LocalStrategy
    from tfdist.testing import strategy

    keras.utils.set_random_seed(0)
    with (LocalStrategy() if alone else strategy(Mesh(data=1, context=-1))).scope():
        model = models.gpt(
            _VOCABULARY,
            num_layers=num_layers,
            width=_WIDTH,
            num_heads=4,
            max_length=4 * _TOKENS,
            context_attention=kind,
        )
        loss = layers.VocabParallelCrossEntropy(_VOCABULARY, chunk_size=512)
        model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def prepare(kind: str, tokens: int = _TOKENS, num_layers: int = 2, alone: bool = False) -> None:
    """Builds and warms up a GPT on this rank."""
    from tfdist.testing import rank

    model, data = _gpt(kind, num_layers, alone), token_batches(1, tokens, _VOCABULARY)
    model.fit(data, steps_per_epoch=1, verbose=0)
    rank._state["gpt", kind] = (model, data)


def step_seconds(kind: str) -> float:
    """The time of a step of `fit`, the median of three."""
    from benchmarks.measuring import fit_step_seconds
    from tfdist.testing import rank

    model, data = rank._state["gpt", kind]
    return fit_step_seconds(model, data, 5)


def peak_bytes(kind: str, tokens: int) -> int:
    """What a first step adds to this process's peak of resident memory."""
    # A short one first: what TensorFlow loads then belongs to neither.
    prepare(kind, 64)
    # Of several layers, so that what stands while one is computed is a small part.
    return peak_above(lambda: prepare(kind, tokens, num_layers=6))[0]


def _activations(kind: str, ranks: int, engine: str) -> int:
    """The bytes of 8,192 tokens on the rank with the most."""
    found = []
    for tokens in (4 * _TOKENS, 2 * _TOKENS):
        with RankPool(ranks, engine, threads=1) as pool:
            found.append(max(pool.run(peak_bytes, kind, tokens, timeout=600)))
    return found[0] - found[1]


def time(case: str, engine: str, rounds: int) -> list[Ratio]:
    """A step of a case over one rank's by the number of ranks; and what busy cores cost that one."""
    kind, ranks, limit = CASES[case]
    with (
        RankPool(ranks, engine, threads=1) as some,
        RankPool(ranks, engine, threads=1) as each,
        RankPool(1, "local", threads=1) as one,
    ):
        some.run(prepare, kind, timeout=600)
        for pool in (each, one):
            pool.run(prepare, kind, alone=True, timeout=600)
        pools = [some, each, one]
        own, busy, idle = in_turn(pools, step_seconds, rounds, kind, timeout=600)
    return [
        Ratio(f"{case}: over 1/{ranks}", own, [seconds / ranks for seconds in busy], limit),
        Ratio(f"one rank, {ranks} cores busy: over idle", busy, idle, None),
    ]


def memory(case: str, engine: str) -> bool:
    """Prints what a step adds on a rank and on one rank alone; whether that is too much."""
    kind, ranks, _ = CASES[case]
    whole, own = _activations(kind, 1, "local"), _activations(kind, ranks, engine)
    limit = 1 / ranks + _SPARE
    print(
        f"{case}: activations of {own / 2**20:,.0f} MiB on a rank, {whole / 2**20:,.0f} MiB on one alone: "
        f"{own / whole:.2f}, at most {limit:.2f}",
        flush=True,
    )
    return own / whole > limit


def main() -> int:
    """Prints the table; exit code 1 where a figure is above its limit."""
    options = parser(__doc__, CASES).parse_args()
    cases = [options.only] if options.only else list(CASES)
    over = [memory(case, options.engine) for case in cases]
    print(HEADER)
    found = []
    for case in cases:
        if CASES[case][1] > (os.cpu_count() or 1):
            print(f"{case}: not timed, for there are {os.cpu_count()} cores", flush=True)
            continue
        for ratio in time(case, options.engine, options.rounds):
            found.append(ratio)
            print(ratio.row(), flush=True)
    write_json(options.json, options.engine, found)
    return int(any(ratio.is_over for ratio in found) or any(over))


if __name__ == "__main__":
    sys.exit(main())
