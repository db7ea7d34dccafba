"""Split layers against their unsplit selves in float64: outputs, input and weight gradients."""

from __future__ import annotations

import pytest

from tests.conftest import on_ranks
from tfdist import models

KINDS = [("horovod", 2), ("tensorflow", 3)]
SLOW_KINDS = [("horovod", 3), ("horovod", 4), ("tensorflow", 2), ("tensorflow", 4)]


def pairs() -> list[str]:
    """Each conjugate pair alone; returns what is wrong."""
    import numpy as np
    import tensorflow as tf

    from tfdist import Mesh
    from tfdist.collectives import all_gather, mappings, reduce_scatter
    from tfdist.testing import engine

    group = engine(Mesh(data=1, tensor=-1)).group("tensor")
    n, me = group.size, group.rank
    random = np.random.default_rng(0)
    parts = random.normal(size=(n, 3, 2 * n, 5 * n))
    upstream = random.normal(size=(n, 3, 2 * n, 5 * n))
    wrong: list[str] = []

    def mine(whole, axis):
        return np.split(whole, n, axis)[me]

    def check(what, function, x, y, dy, dx):
        for mode in ("eager", "graph"):

            def derive(x, dy):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = function(x)
                return y, tape.gradient(y, x, output_gradients=dy)

            call = derive if mode == "eager" else tf.function(derive)
            got = call(tf.constant(x), tf.constant(dy))
            for part, value, right in zip(("forward", "backward"), got, (y, dx), strict=True):
                if value.shape != right.shape or not np.allclose(value, right, rtol=0, atol=1e-12):
                    wrong.append(f"{what} {mode} {part}")

    whole, whole_dy = parts[0], upstream[0]
    total, total_dy = parts.sum(0), upstream.sum(0)
    c = mappings
    check("copy", lambda x: c.copy_to_region(x, group), whole, whole, upstream[me], total_dy)
    check(
        "reduce",
        lambda x: c.reduce_from_region(x, group),
        parts[me],
        total,
        whole_dy,
        whole_dy,
    )
    for axis in (1, 2, -1):
        check(
            f"split {axis}",
            lambda x, axis=axis: c.scatter_to_region(x, group, axis),
            whole,
            mine(whole, axis),
            mine(whole_dy, axis),
            whole_dy,
        )
        check(
            f"gather {axis}",
            lambda x, axis=axis: c.gather_from_region(x, group, axis),
            mine(whole, axis),
            whole,
            whole_dy,
            mine(whole_dy, axis),
        )
        check(
            f"gather_sequence {axis}",
            lambda x, axis=axis: all_gather(x, group, axis),
            mine(whole, axis),
            whole,
            upstream[me],
            mine(total_dy, axis),
        )
        check(
            f"scatter_sequence {axis}",
            lambda x, axis=axis: reduce_scatter(x, group, axis=axis),
            parts[me],
            mine(total, axis),
            mine(whole_dy, axis),
            whole_dy,
        )
    return wrong


def layers_cases(n: int) -> dict:
    """By name: how to make the layer, the input's shape, and where input and output are split."""
    from tfdist import layers

    def column(**options):
        return lambda: layers.ColumnParallelDense(
            3 * n, activation="tanh", dtype="float64", bias_initializer="random_normal", **options
        )

    def row(**options):
        return lambda: layers.RowParallelDense(
            5, activation="tanh", dtype="float64", bias_initializer="random_normal", **options
        )

    def attention(**options):
        return lambda: layers.ParallelMultiHeadAttention(2 * n, 6, dtype="float64", **options)

    def mlp(**options):
        return lambda: layers.ParallelMLP(3 * n, dtype="float64", **options)

    def block(**options):
        return lambda: models.TransformerDecoderBlock(
            2 * n, 3 * n, dtype="float64", initializer_stddev=0.3, **options
        )

    return {
        "column": (column(), (2, 7), None, -1),
        "column without bias": (column(use_bias=False), (2, 3, 7), None, -1),
        "column gathered": (column(gather_output=True), (2, 7), None, None),
        "column on a slice": (column(sequence_parallel=True), (2, 3 * n, 7), 1, -1),
        "row": (row(), (2, 3 * n), -1, None),
        "row without bias": (row(use_bias=False), (1, 3, 5 * n), -1, None),
        "row of a whole input": (row(input_is_parallel=False), (2, 3 * n), None, None),
        "row to a slice": (row(sequence_parallel=True), (2, 3 * n, n), -1, 1),
        "attention": (attention(), (2, 5, 7), None, None),
        "attention, causal": (attention(causal=True, use_bias=False), (2, 5, 7), None, None),
        "attention, grouped and rotary": (
            attention(causal=True, num_key_value_heads=n, rotary_base=100.0),
            (1, 5, 7),
            None,
            None,
        ),
        "attention on a slice": (attention(sequence_parallel=True), (2, 3 * n, 7), 1, 1),
        "mlp": (mlp(), (2, 3, 7), None, None),
        "mlp, swiglu": (mlp(activation="swiglu", use_bias=False), (2, 3, 7), None, None),
        "mlp on a slice": (mlp(sequence_parallel=True), (2, 3 * n, 7), 1, 1),
        "block": (block(), (2, 3, 4 * n), None, None),
        "block on a slice": (block(sequence_parallel=True), (2, 3 * n, 4 * n), 1, 1),
        "normalization on a slice": (
            lambda: layers.LayerNormalization(sequence_parallel=True, dtype="float64"),
            (2, 3 * n, 7),
            1,
            1,
        ),
        "positions on a slice": (
            lambda: layers.PositionEmbedding(4 * n, sequence_parallel=True, dtype="float64"),
            (2, 3 * n, 7),
            1,
            1,
        ),
        "head": (
            lambda: layers.VocabParallelHead(2 * n + 1, dtype="float64"),
            (2, 3, 7),
            None,
            None,
        ),
    }


def layers_wrong() -> list[str]:
    """Every layer, eagerly and in a graph; returns what differs from the unsplit one."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tests.layers.test_algebra import layers_cases
    from tfdist import Mesh
    from tfdist.collectives import all_reduce
    from tfdist.sharding.layout import layout_of
    from tfdist.testing import strategy

    parallel = strategy(Mesh(data=1, tensor=-1))
    group = parallel.group("tensor")
    n, me = group.size, group.rank
    wrong: list[str] = []

    def mine(whole, axis):
        return whole if axis is None else np.split(whole, n, axis)[me]

    def build(make, shape):
        keras.utils.set_random_seed(5)
        layer = make()
        layer.build(shape)
        return layer

    def derive(layer, x, dy):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        sources = [x, *(variable.value for variable in layer.trainable_variables)]
        return y, tape.gradient(y, sources, output_gradients=dy)

    random = np.random.default_rng(0)
    for what, (make, shape, split_in, split_out) in layers_cases(n).items():
        single = build(make, shape)
        x = random.normal(size=shape)
        dy = random.normal(size=single(x).shape)
        right_y, right = derive(single, tf.constant(x), tf.constant(dy))
        local_shape = mine(np.zeros(shape, "bool"), split_in).shape
        with parallel.scope():
            split = build(make, local_shape)
        for variable, other in zip(split.variables, single.variables, strict=True):
            sharding = layout_of(variable).slice
            slice_of = sharding.slice_of if sharding is not None else lambda value: value
            if not np.array_equal(variable.numpy(), slice_of(other.numpy())):
                wrong.append(f"{what}: initial {variable.path}")
        args = tf.constant(mine(x, split_in)), tf.constant(mine(dy, split_out))
        for mode in ("eager", "graph"):
            call = lambda x, dy, split=split: derive(split, x, dy)  # noqa: E731
            y, got = (tf.function(call) if mode == "graph" else call)(*args)
            pairs = [("output", y, mine(right_y.numpy(), split_out))]
            pairs.append(("input gradient", got[0], mine(right[0].numpy(), split_in)))
            for variable, gradient, whole in zip(
                split.trainable_variables, got[1:], right[1:], strict=True
            ):
                sharding, whole = layout_of(variable).slice, whole.numpy()
                if layout_of(variable).partial_over is not None:
                    gradient = all_reduce(gradient, group)
                if sharding is not None:
                    whole = sharding.slice_of(whole)
                pairs.append((f"gradient of {variable.path}", gradient, whole))
            for part, value, expected in pairs:
                if value.shape != expected.shape:
                    wrong.append(f"{what} {mode} {part}: {value.shape}, not {expected.shape}")
                elif not np.allclose(value, expected, rtol=1e-10, atol=1e-10):
                    off = np.abs(value - expected).max()
                    wrong.append(f"{what} {mode} {part}: off by {off}")
    return wrong


def vocabulary_wrong() -> list[str]:
    """Embedding and loss over a vocabulary that does not divide."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist import Mesh, layers
    from tfdist.collectives.mappings import own_slice
    from tfdist.sharding.layout import layout_of
    from tfdist.testing import strategy

    parallel = strategy(Mesh(data=1, tensor=-1))
    group = parallel.group("tensor")
    n = group.size
    wrong: list[str] = []
    random = np.random.default_rng(0)

    def same(what, value, right):
        if value.shape != right.shape or not np.allclose(value, right, rtol=1e-10, atol=1e-10):
            wrong.append(what)

    for size in (4 * n, 4 * n + 1, 5 * n - 1):
        ids = random.integers(0, size, (3, 7)).astype("int32")
        dy = random.normal(size=(3, 7, 5))
        results = []
        for scope in (None, parallel.scope()):
            keras.utils.set_random_seed(2)
            if scope is None:
                layer = layers.VocabParallelEmbedding(size, 5, dtype="float64")
                layer.build((3, 7))
            else:
                with scope:
                    layer = layers.VocabParallelEmbedding(size, 5, dtype="float64")
                    layer.build((3, 7))
            with tf.GradientTape() as tape:
                rows = layer(ids)
            table = layer.trainable_variables[0]
            gradient = tf.convert_to_tensor(tape.gradient(rows, table.value, dy))
            results.append((rows, gradient, layer(rows, reverse=True), table))
        (rows, gradient, logits, _), (own_rows, own_gradient, own_logits, table) = results
        same(f"embedding of {size}", own_rows, rows)
        same(f"tied logits of {size}", own_logits, logits)
        whole = layout_of(table).slice.all_gather(own_gradient)
        same(f"embedding gradient of {size}", whole, gradient)

        logits = random.normal(size=(3, 7, size)) * 30
        padding = -size % n
        # The padding's logits are wild on purpose: they count for nothing.
        padded = np.concatenate([logits, np.full((3, 7, padding), 1e3)], -1)
        with parallel.scope():
            loss = layers.VocabParallelCrossEntropy(size, reduction="none", dtype="float64")
        scale = tf.constant(random.normal(size=(3, 7)))
        right = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none", dtype="float64"
        )
        x = tf.constant(logits)
        with tf.GradientTape() as tape:
            tape.watch(x)
            expected = right(ids, x)
        expected_gradient = tape.gradient(expected, x, scale)
        own = own_slice(tf.constant(padded), group, 2)
        with tf.GradientTape() as tape:
            tape.watch(own)
            value = loss(ids, own)
        gradient = sharding_like(own, group).all_gather(tape.gradient(value, own, scale))
        same(f"loss of {size}", value, expected)
        same(f"loss gradient of {size}", gradient[..., :size], expected_gradient)
        if not np.array_equal(gradient[..., size:], np.zeros((3, 7, padding))):
            wrong.append(f"the padding of {size} has a gradient")
    return wrong


def sharding_like(local, group):
    """The sharding of a tensor split along its last dim."""
    from tfdist.sharding.parts import Slice

    shape = (*local.shape[:-1], local.shape[-1] * group.size)
    return Slice(group, len(shape) - 1, tuple(shape))


CHECKS = {"pairs": pairs, "layers": layers_wrong, "vocabulary": vocabulary_wrong}


def check(pool, what):
    for rank, wrong in enumerate(pool.run(CHECKS[what], timeout=200)):
        assert not wrong, f"rank {rank}: {wrong[:12]}"


@on_ranks(KINDS[0], slow=KINDS[1:])
@pytest.mark.parametrize("what", CHECKS)
def test_split_equals_unsplit(pool, what):
    check(pool, what)


@pytest.mark.slow
@on_ranks(*SLOW_KINDS)
@pytest.mark.parametrize("what", CHECKS)
def test_split_equals_unsplit_on_other_ranks(pool, what):
    check(pool, what)
