"""Gradients of one group, some of which ranks need as shards and others as a whole."""

from __future__ import annotations

import numpy as np

from tests.conftest import on_ranks


def reduced_together() -> list[list[float]]:
    import keras
    import tensorflow as tf

    from tfdist.gradients.items import GradientItem
    from tfdist.gradients.reduce import reduce_items
    from tfdist.sharding.layout import layout_of, update_layout
    from tfdist.sharding.parts import FlatShard
    from tfdist.step.gradient_options import GradientOptions
    from tfdist.testing import engine

    group = engine().group()
    variables = [keras.Variable(np.zeros(size, np.float32)) for size in (4, 3)]
    update_layout(variables[0], state=FlatShard(group, (4,)))
    items = [
        GradientItem(
            tf.range(1.0, 1.0 + variable.shape[0]) * (group.rank + 1),
            variable,
            layout_of(variable),
            group,
            "sum",
        )
        for variable in variables
    ]
    options = GradientOptions(bucket_bytes=1 << 20)
    return [each.numpy().tolist() for each in reduce_items(items, options)]


@on_ranks(("horovod", 2))
def test_a_gradient_without_a_sharded_state_is_reduced_beside_one_with(pool):
    first, second = pool.run(reduced_together, timeout=60)
    assert first == [[3.0, 6.0], [3.0, 6.0, 9.0]]
    assert second == [[9.0, 12.0], [3.0, 6.0, 9.0]]
