"""Second gatherings on an engine whose collectives run in the order in which they were traced.

The story: T5 in half precision on TensorFlow's collectives, under ZeRO-3, ended in "nodes in a cycle". The
backward pass is traced breadth-first, so some collectives come between the backward pass of a layer and
the second gathering of its parameters. Those that need what is made of the parameters, as their casts
to half precision are, cannot wait for it.
"""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest

from tests.bugs.comparing import check, outcome
from tests.conftest import every_case, on_ranks
from tests.parity.families import classifier, rows_for
from tests.strategies.programs import cross_entropy, scope, start
from tfdist.backend.keras.private import all_layers

ROWS, BATCH = 7, 4  # The last batch has three rows.


def train(strategy, family: str, policy: str):
    start()
    x, y = rows_for(family, ROWS), np.arange(ROWS) % 3
    keras.config.set_dtype_policy(policy)
    try:
        with scope(strategy):
            model = classifier(family)
            for layer in all_layers(model):
                if isinstance(layer, keras.layers.Dropout):
                    layer.rate = 0.0
            rule = keras.optimizers.SGD(0.05, momentum=0.9)
            # Without a loss scale, whose first steps overflow and change nothing.
            model.compile(rule, cross_entropy(), auto_scale_loss=False)
        history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history
    finally:
        keras.config.set_dtype_policy("float32")
    return outcome(model, history)


@pytest.mark.slow
@every_case
@on_ranks(("tensorflow", 2), ("horovod", 2))
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("family", ["T5", "Whisper"])
def test_as_one_process(pool, one_process, family, policy):
    program = functools.partial(train, family=family, policy=policy)
    tolerance = 1e-5 if policy == "float32" else 5e-3
    check(pool, one_process, program, tolerance=tolerance, zero_stage=3, timeout=300)
