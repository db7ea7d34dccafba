"""What compressors send, keep and get: on real ranks, with made-up gradients."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but

#: A matrix, a bias that is too small, a kernel of a convolution, an odd number of entries.
SHAPES = ((40, 60), (7,), (3, 3, 17, 19), (1237,))
STEPS = 6

COMPRESSORS = {
    "power_sgd": ("PowerSGD", {"rank": 2}),
    "power_sgd_cold": ("PowerSGD", {"rank": 3, "warm_start": False}),
    "top_k": ("TopK", {"ratio": 0.03}),
    "top_k_warmup": ("TopK", {"ratio": 0.01, "warmup_steps": 3}),
    "one_bit": ("OneBit", {"block": 64}),
    "int8": ("Int8", {"block": 128}),
    "int4": ("Int4", {"block": 32}),
    "own": ("own", {}),
    "own_linear": ("own_linear", {}),
}


def gradients_of(rank: int, step: int) -> list[np.ndarray]:
    random = np.random.default_rng([rank, step])
    # Sizes differ by orders, as those of layers do.
    return [
        (random.normal(size=shape) * 10.0 ** (place - 2)).astype("float32")
        for place, shape in enumerate(SHAPES)
    ]


def made(name: str, arguments: dict, start_step: int):
    import tensorflow as tf

    from tfdist.addons import slow_links

    class Half(slow_links.Compressor):
        """The entries at even places."""

        def compress(self, tensor, state, step):
            return {"even": tf.reshape(tensor, [-1])[::2]}

        def decompress(self, payload, shape):
            size = int(np.prod(shape))
            both = tf.stack([payload["even"], tf.zeros_like(payload["even"])], axis=1)
            return tf.reshape(tf.reshape(both, [-1])[:size], shape)

    class Linear(Half):
        is_linear = True

    if name in ("own", "own_linear"):
        return (Linear if name == "own_linear" else Half)(start_step=start_step)
    return getattr(slow_links, name)(**arguments, start_step=start_step)


def exchange(
    name: str, arguments: dict, start_step: int, reduction: str, in_graph: bool, bucket: int
):
    """Of each step what all got, and what is left in the end."""
    import keras
    import tensorflow as tf

    from tfdist.addons.slow_links.state import CompressionState, reduce_compressed
    from tfdist.collectives.p2p import P2PEngine
    from tfdist.step.gradient_options import GradientOptions
    from tfdist.testing import engine
    from tfdist.testing.traffic import traffic

    group = engine().group()
    compressor = made(name, arguments, start_step)
    chosen = [place for place, shape in enumerate(SHAPES) if compressor.selects(shape)]
    variables = [keras.Variable(np.zeros(SHAPES[place], "float32")) for place in chosen]
    state = CompressionState(compressor)
    options = GradientOptions(bucket_bytes=bucket)

    def step(*gradients):
        found = reduce_compressed(list(gradients), variables, state, group, reduction, options)
        state.end_step()
        return found

    if in_graph:
        step = tf.function(step)
    results, sent = [], []
    for number in range(STEPS):
        before = traffic().sent if isinstance(engine(), P2PEngine) else 0
        own = gradients_of(group.rank, number)
        found = step(*[tf.constant(own[place]) for place in chosen])
        results.append([tensor.numpy() for tensor in found])
        sent.append(traffic().sent - before if isinstance(engine(), P2PEngine) else 0)
    slots = [state.slots_of(variable, group) for variable in variables]
    residuals = [slot["residual"].numpy() for slot in slots]
    means = [slot["mean_residual"].numpy() if "mean_residual" in slot else None for slot in slots]
    return chosen, results, residuals, means, sent, state.meter.read()


@on_ranks(("horovod", 3), slow=[("horovod", 2), ("tensorflow", 2)])
@pytest.mark.parametrize("name", slow_but(["power_sgd", "top_k", "own"], list(COMPRESSORS)))
def test_nothing_is_lost(pool, name):
    kind, arguments = COMPRESSORS[name]
    reduction = "sum" if name in ("int8", "top_k") else "mean"
    ranks = pool.run(exchange, kind, arguments, 2, reduction, True, 12_000, timeout=120)
    check(ranks, reduction)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("name", ["power_sgd", "top_k", "int4"])
def test_eagerly(pool, name):
    kind, arguments = COMPRESSORS[name]
    check(pool.run(exchange, kind, arguments, 0, "mean", False, 1 << 20, timeout=120), "mean")


def check(ranks, reduction: str) -> None:
    size = len(ranks)
    chosen = ranks[0][0]
    for index, place in enumerate(chosen):
        for _, results, *_ in ranks:
            for mine, first in zip(results, ranks[0][1], strict=True):
                np.testing.assert_array_equal(mine[index], first[index])
        got = sum(step[index].astype("float64") for step in ranks[0][1])
        got *= 1 if reduction == "sum" else size
        kept = sum(residuals[index].astype("float64") for _, _, residuals, *_ in ranks)
        parts = [means[index] for _, _, _, means, *_ in ranks]
        if parts[0] is not None:
            # The mean's residual is of a mean, and each rank has its part.
            whole = np.concatenate([part.reshape(-1) for part in parts])[: kept.size]
            kept = kept + size * whole.reshape(kept.shape).astype("float64")
        wanted = sum(
            gradients_of(rank, step)[place].astype("float64")
            for rank in range(size)
            for step in range(STEPS)
        )
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(got + kept, wanted, rtol=0, atol=1e-5 * scale)
        # It is compressed: something is left.
        assert np.abs(kept).max() > 1e-3 * scale
