"""A script for ranks on which a second CPU stands for the GPU: trains a GPT, and prints the losses as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.gpu_like.stand_in import pretend

AXES: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
}
AXES |= {"expert": {"expert": 2}, "zero2": {}, "zero3": {}}


def scatter(input, group_size: int, merge_op: str, final_op: str, **keyed):
    """As `CollectiveReduceScatterV2`, which TensorFlow has for NCCL only, in the same group and on the same device."""
    import tensorflow as tf

    parts = tf.reshape(input, [group_size, -1, *input.shape[1:]])
    exchange = tf.raw_ops.CollectiveAllToAllV2(input=parts, group_size=group_size, **keyed)
    return tf.reduce_sum(exchange, axis=0)


def main(layout: str) -> None:
    """Trains two epochs with the layout of the command line."""
    if layout != "one":
        pretend()
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist
    from tfdist.backend.keras.attributes import stored_value
    from tfdist.strategies import devices

    devices._gpu_id = lambda: None
    tf.raw_ops.CollectiveReduceScatterV2 = scatter
    name = layout.removeprefix("one-")
    options = {"zero_stage": int(name[-1])} if name.startswith("zero") else {}
    axes: dict[str, Any] = {} if layout.startswith("one") else AXES[name]
    strategy = tfdist.strategies.auto(tfdist.Mesh(**axes), **options)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        experts = {"num_experts": 4} if name == "expert" else {}
        model = tfdist.models.gpt(
            96, num_layers=2, width=32, num_heads=4, max_length=32, dropout=0.0, **experts
        )
        if name == "pipeline":
            model = tfdist.pipeline.PipelineModel(model, num_microbatches=2, input_shape=(32,))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    ids = np.random.default_rng(0).integers(0, 96, (28, 32)).astype("int32")
    rows = 28 if name == "pipeline" else 8  # The last batch of others has four rows.
    history = model.fit(
        ids, np.roll(ids, -1, 1), batch_size=rows, epochs=3, shuffle=False, verbose=0
    )
    device = {stored_value(variable).device for variable in model.trainable_variables}
    if strategy.is_chief:
        found = {"losses": history.history["loss"], "devices": sorted(device)}
        print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
