"""What `compile` and `fit` offer, each against plain Keras in one process on uneven batches."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tests.strategies import compile_programs, fit_programs, programs
from tests.strategies.compile_programs import compiled
from tests.strategies.programs import UNEVEN_ROWS, images, mlp, scope, start

PROGRAMS = [
    compile_programs.clip_by_norm,
    compile_programs.clip_by_global_norm,
    compile_programs.clip_by_value,
    compile_programs.gradient_accumulation,
    compile_programs.moving_average_of_weights,
    compile_programs.regularizers,
    compile_programs.sample_weights,
    compile_programs.loss_over_sum_of_weights,
    compile_programs.loss_summed_over_batch,
    compile_programs.loss_of_each_sample,
    fit_programs.batches_of_a_known_size_that_does_not_divide,
    fit_programs.own_function,
    compile_programs.class_weights,
    compile_programs.masks,
    compile_programs.clip_sparse_gradients,
    fit_programs.custom_train_step,
    fit_programs.eager,
    fit_programs.steps_per_execution,
    fit_programs.data_set_with_static_batches,
    fit_programs.py_dataset,
    fit_programs.generator,
    fit_programs.validation_split,
    compile_programs.metrics_of_many_states,
    fit_programs.on_batch_methods,
    compile_programs.frozen_layers,
    fit_programs.fit_twice,
]

#: Each in another part of the step: gradients, weights of samples, the loop.
QUICK = [
    compile_programs.clip_by_global_norm,
    compile_programs.gradient_accumulation,
    compile_programs.sample_weights,
    fit_programs.py_dataset,
]


@on_ranks(("horovod", 3), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("program", slow_but(QUICK, PROGRAMS), ids=lambda p: p.__name__)
def test_as_in_one_process(pool, one_process, program):
    expected = programs.reference(one_process, program)
    programs.assert_same(pool.run(programs.on_rank, program, timeout=120), expected)


def overflow_on_one_rank(strategy):
    """Under float16 with a loss scale, a gradient that overflows on one rank only."""
    start()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x, y = images(24)
        x[8] = np.inf  # In the second half of the first batch: the second rank's rows.
        with scope(strategy):
            model = mlp()
            model.compile(programs.optimizer("sgd"), programs.cross_entropy())
        model.fit(x, y, batch_size=12, epochs=3, verbose=0, shuffle=False)
    finally:
        keras.config.set_dtype_policy("float32")
    scale = model.optimizer
    return float(scale.dynamic_scale), int(scale.iterations), [w.numpy() for w in model.weights]


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
def test_one_rank_that_overflows_skips_the_step_everywhere(pool, one_process):
    expected = one_process.run(programs.in_one_process, overflow_on_one_rank)[0]
    results = pool.run(programs.on_rank, overflow_on_one_rank)
    assert expected[0] < 2.0**15, "the planned overflow did not happen"
    for scale, iterations, weights in results:
        assert (scale, iterations) == expected[:2]
        for got, right in zip(weights, expected[2], strict=True):
            np.testing.assert_allclose(got, right, atol=2e-3)


class StopOnChief(keras.callbacks.Callback):
    def __init__(self, is_chief):
        super().__init__()
        self._is_chief = is_chief

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = self._is_chief and epoch == 1


def stop_on_one_rank(strategy):
    x, y = images(UNEVEN_ROWS)
    with strategy.scope():
        model = mlp()
        model.compile(**compiled())
    callbacks = [StopOnChief(strategy.is_chief)]
    return len(model.fit(x, y, epochs=5, verbose=0, callbacks=callbacks).epoch)


@on_ranks(("tensorflow", 2))
def test_one_rank_that_stops_stops_all(pool):
    assert pool.run(programs.on_rank, stop_on_one_rank) == [2, 2]
