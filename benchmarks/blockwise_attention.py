"""Attention by blocks: time and peak memory over those of Keras' attention.

    python -m benchmarks.blockwise_attention [--rounds=15]

One process with 2 threads; forward and backward pass, in a step of a strategy, of
`blockwise_attention` and of `keras.ops.dot_product_attention`, which stock layers call. They take turns, and a ratio is that of one
turn. Peak memory is what a step adds to the resident memory of a process of its own.
"""

from __future__ import annotations

import sys

from benchmarks.measuring import HEADER, Ratio, parser, peak_above, variants_in_turn, write_json
from tfdist.testing import RankPool

#: By case: batch, heads, tokens, causal, and the most that a step may take of Keras'.
CASES = {
    "full_1k": (1, 8, 1024, False, 1.05),
    "causal_1k": (1, 8, 1024, True, 1.0),
    "full_1k_large": (4, 12, 1024, False, 1.05),
    "causal_1k_large": (4, 12, 1024, True, 1.0),
    "full_4k": (1, 8, 4096, False, None),
    "causal_4k": (1, 8, 4096, True, 1.0),
}
#: The most that a step of 4,096 tokens may add to the memory, of what Keras' does.
MEMORY_LIMIT = 0.5
_SIZE = 64


def prepare(variant: tuple[str, bool]) -> None:
    """Traces and warms up a step on this rank."""
    import keras
    import tensorflow as tf

    from tfdist.layers import blockwise_attention
    from tfdist.testing import rank

    case, in_blocks = variant
    batch, heads, tokens, causal, _ = CASES[case]

    def stock(query, key, value):
        return keras.ops.dot_product_attention(query, key, value, is_causal=causal)

    def blocks(query, key, value):
        query, key, value = (tf.transpose(x, [0, 2, 1, 3]) for x in (query, key, value))
        out = blockwise_attention(query, key, value, causal=causal)
        return tf.transpose(out, [0, 2, 1, 3])

    class Attention(keras.Model):
        def train_step(self, data):
            inputs, gradient = data
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                out = (blocks if in_blocks else stock)(*inputs)
            return tape.gradient(out, inputs, gradient)

    # Layers take the compiled library in steps of strategies alone.
    with rank.strategy().scope():
        model = Attention()
        model.compile(jit_compile=False)

    @tf.function
    def step(*tensors):
        return model.distribute_strategy.run(model.train_step, ((tensors[:3], tensors[3]),))

    tensors = [tf.random.normal([batch, tokens, heads, _SIZE]) for _ in range(4)]
    rank._state["attention", variant] = (step, tensors)
    step_seconds(variant)


def step_seconds(variant: tuple[str, bool]) -> float:
    """The time of a step."""
    import time

    from tfdist.testing import rank

    step, tensors = rank._state["attention", variant]
    begin = time.perf_counter()
    step(*tensors)[0].numpy()
    return time.perf_counter() - begin


def peak_bytes(variant: tuple[str, bool]) -> int:
    """What a first step adds to this process's peak of resident memory."""
    # A small step first: what TensorFlow loads then belongs to neither.
    prepare((next(iter(CASES)), variant[1]))
    return peak_above(lambda: prepare(variant))[0]


def measure(rounds: int, cases) -> list[Ratio]:
    """Blocks over Keras, by case."""
    found = []
    with RankPool(1, "local", threads=2) as process:
        for case in cases:
            variants = [(case, True), (case, False)]
            seconds = variants_in_turn(process, variants, prepare, step_seconds, rounds)
            name = f"{case}: blocks / Keras"
            own, other = (seconds[variant] for variant in variants)
            found.append(Ratio(name, own, other, CASES[case][-1]))
            print(found[-1].row(), flush=True)
    return found


def memory(case: str) -> float:
    """Prints the peaks of a case, and returns the ratio."""
    peaks = []
    for in_blocks in (True, False):
        with RankPool(1, "local", threads=2) as process:
            peaks.append(process.run(peak_bytes, (case, in_blocks), timeout=300)[0])
    mib = [peak / 2**20 for peak in peaks]
    ratio = peaks[0] / peaks[1]
    print(f"{case}: peak memory of a step {mib[0]:,.0f} MiB, Keras {mib[1]:,.0f} MiB: {ratio:.2f}")
    return ratio


def main() -> int:
    """Prints the table; exit code 1 where a ratio is above its limit."""
    options = parser(__doc__, CASES).parse_args()
    cases = [options.only] if options.only else list(CASES)
    print(HEADER)
    found = measure(options.rounds, cases)
    over = [memory(case) > MEMORY_LIMIT for case in cases if CASES[case][2] >= 4096]
    write_json(options.json, "local", found)
    return int(any(ratio.is_over for ratio in found) or any(over))


if __name__ == "__main__":
    sys.exit(main())
