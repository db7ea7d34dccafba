"""Layers of experts: beside KerasHub's block on one rank, and on 2 expert ranks beside one process.

    python -m benchmarks.experts [--engine=horovod|tensorflow] [--rounds=15]

A block is Mixtral's of KerasHub, forward and backward, in one process of 2 threads; `parallelize` makes
it sparse. E experts of which a token takes k are E / k times the work where all are computed. Peak
memory is what a first step adds to a process of its own. The GPT has 8 experts in each block; each
of 2 ranks has 1 thread, the process 2. Both sides take turns; a ratio is that of one turn.
"""

from __future__ import annotations

import sys
import time

from benchmarks.measuring import (
    ENVIRONMENT,
    HEADER,
    Ratio,
    fit_step_seconds,
    in_turn,
    parser,
    peak_above,
    token_batches,
    variants_in_turn,
    write_json,
)
from tfdist.testing import RankPool

#: By case: tokens, width, hidden units, experts, top k.
BLOCKS = {
    "8 experts, top 2": (2048, 256, 512, 8, 2),
    "32 experts, top 4": (1024, 256, 256, 32, 4),
    "64 experts, top 4": (1024, 256, 256, 64, 4),
}
GPT = "GPT, 8 experts, top 2"
#: A block is to be this part of E / k times as fast as KerasHub's.
EFFICIENCY = 0.6
RANKS_LIMIT = 1.1
_STEPS = 8


def prepare_block(variant: tuple[str, bool]) -> None:
    """Traces and warms up a step of a block on this rank."""
    import keras
    import tensorflow as tf
    from keras_hub.src.models.mixtral.mixtral_decoder import MixtralSparseMoeBlock

    from tfdist.tensor_parallel.experts import find_experts, spread_experts
    from tfdist.testing import rank

    case, is_sparse = variant
    tokens, width, hidden, experts, top_k = BLOCKS[case]
    keras.utils.set_random_seed(0)
    block = MixtralSparseMoeBlock(width, hidden, experts, top_k)
    inputs = keras.Input((None, width))
    model = keras.Model(inputs, block(inputs)[0])
    if is_sparse:
        spread_experts(find_experts(model))
    x = tf.random.normal([4, tokens // 4, width])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, _ = block(x, training=True)
            loss = tf.reduce_sum(tf.square(y))
        weights = [weight.value for weight in block.trainable_variables]
        return tape.gradient(loss, [x, *weights])

    rank._state["experts", variant] = (step, x)
    block_seconds(variant)


def block_seconds(variant: tuple[str, bool]) -> float:
    """The time of a step."""
    from tfdist.testing import rank

    step, x = rank._state["experts", variant]
    begin = time.perf_counter()
    step(x)[0].numpy()
    return time.perf_counter() - begin


def peak_bytes(variant: tuple[str, bool]) -> int:
    """What a first step adds to this process's peak of resident memory."""
    BLOCKS["warm-up"] = (8, 8, 8, 2, 1)
    # A small step first: what TensorFlow loads then belongs to neither.
    prepare_block(("warm-up", variant[1]))
    return peak_above(lambda: prepare_block(variant))[0]


def prepare_gpt() -> None:
    """Builds and warms up the GPT on this rank."""
    import keras

    from tfdist import Mesh, layers, models
    from tfdist.testing import rank, strategy

    keras.utils.set_random_seed(0)
    with strategy(Mesh(data=1, expert=-1)).scope():
        model = models.gpt(
            512, num_layers=2, width=512, num_heads=8, max_length=128, num_experts=8, top_k=2
        )
        model.compile("adam", layers.VocabParallelCrossEntropy(512))
    rank._state["gpt"] = (model, token_batches(16, 128))
    gpt_seconds()


def gpt_seconds() -> float:
    """The median time of a training step, on this rank."""
    from tfdist.testing import rank

    model, data = rank._state["gpt"]
    return fit_step_seconds(model, data, _STEPS)


def measure_blocks(rounds: int, cases) -> list[Ratio]:
    """Sparse over KerasHub's, by case."""
    found = []
    with RankPool(1, "local", threads=2) as process:
        for case in cases:
            *_, experts, top_k = BLOCKS[case]
            variants = [(case, True), (case, False)]
            seconds = variants_in_turn(process, variants, prepare_block, block_seconds, rounds)
            limit = round(top_k / (EFFICIENCY * experts), 3)
            own, other = (seconds[variant] for variant in variants)
            found.append(Ratio(f"{case}: sparse / KerasHub", own, other, limit))
            print(found[-1].row(), flush=True)
    return found


def memory(case: str) -> None:
    """Prints what a step of each takes."""
    mib = []
    for is_sparse in (True, False):
        with RankPool(1, "local", threads=2) as process:
            mib.append(process.run(peak_bytes, (case, is_sparse), timeout=300)[0] / 2**20)
    print(f"{case}: peak memory of a step {mib[0]:,.0f} MiB, KerasHub {mib[1]:,.0f} MiB")


def measure_ranks(engine: str, rounds: int) -> Ratio:
    """Two expert ranks over one process of two threads."""
    with (
        RankPool(2, engine, environment=ENVIRONMENT) as ranks,
        RankPool(1, "local", threads=2) as one,
    ):
        for pool in (ranks, one):
            pool.run(prepare_gpt, timeout=300)
        two, single = in_turn([ranks, one], gpt_seconds, rounds)
    return Ratio(f"{GPT}: 2 expert ranks / one process", two, single, RANKS_LIMIT)


def main() -> int:
    """Prints the table; exit code 1 where a ratio is above its limit."""
    options = parser(__doc__, [*BLOCKS, GPT]).parse_args()
    blocks = [case for case in BLOCKS if options.only in (None, case)]
    print(HEADER)
    found = measure_blocks(options.rounds, blocks)
    for case in blocks:
        memory(case)
    if options.only in (None, GPT):
        found.append(measure_ranks(options.engine, options.rounds))
        print(found[-1].row(), flush=True)
    write_json(options.json, options.engine, found)
    return int(any(ratio.is_over for ratio in found))


if __name__ == "__main__":
    sys.exit(main())
