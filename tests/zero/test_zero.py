"""ZeRO against one process that holds everything: weights after 20 steps, whatever is split."""

from __future__ import annotations

import functools
import json
from unittest import mock

import keras
import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tests.models import test_gpt
from tests.parity.test_semantics import PROGRAMS as ALL_PROGRAMS
from tests.pipeline import test_training
from tests.strategies import programs
from tests.strategies.compile_programs import clip_sparse_gradients
from tests.strategies.fit_programs import fit_twice
from tests.strategies.test_saving import interrupted

#: Keras takes the norm of an embedding's gradient over rows, an id that comes twice counting
#: twice. Shards of a gradient have no rows: their norm is that of the gradient.
PROGRAMS = [program for program in ALL_PROGRAMS if program is not clip_sparse_gradients]
STAGES = [1, 2, 3]


def on_rank(stage: int, program, *args):
    from tfdist.testing import strategy

    return program(strategy(zero_stage=stage), *args)


@functools.cache
def expected(one_process, program, *args):
    return one_process.run(programs.in_one_process, program, *args)[0]


@on_ranks(("horovod", 3))
@pytest.mark.parametrize(
    ("stage", "optimizer"),
    slow_but([(1, "adamw"), (3, "adamw")], [(1, "adamw"), (2, "sgd"), (3, "adamw")]),
)
def test_as_one_process(pool, one_process, stage, optimizer):
    check_parity(pool, one_process, stage, optimizer)


@pytest.mark.slow
@on_ranks(*[(engine, n) for engine in ("horovod", "tensorflow") for n in (2, 3, 4)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", STAGES)
def test_as_one_process_on_all_ranks(pool, one_process, stage, optimizer):
    check_parity(pool, one_process, stage, optimizer)


def check_parity(pool, one_process, stage, optimizer):
    args = (programs.train_images, "convnet", optimizer, programs.UNEVEN_ROWS)
    results = pool.run(on_rank, stage, *args, timeout=120)
    accuracy = 1e-5 if optimizer == "sgd" else 1e-4
    programs.assert_same(results, expected(one_process, *args), weights=accuracy, logs=accuracy)


@pytest.mark.slow
@on_ranks(("horovod", 2), ("horovod", 4), ("tensorflow", 3))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_what_keras_offers(pool, one_process, stage, program):
    results = pool.run(on_rank, stage, program, timeout=120)
    programs.assert_same(results, expected(one_process, program))


@pytest.mark.slow
@on_ranks(("horovod", 3))
@pytest.mark.parametrize("stage", STAGES)
def test_a_second_fit_goes_on(pool, one_process, stage):
    results = pool.run(on_rank, stage, fit_twice, timeout=120)
    programs.assert_same(results, expected(one_process, fit_twice))


@on_ranks(("horovod", 3))
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_run_resumes(pool, one_process, tmp_path, stage):
    program = functools.partial(interrupted, save_freq=3, double_checkpoint=True)
    (right,) = one_process.run(programs.in_one_process, program, tmp_path / "one")
    results = pool.run(on_rank, stage, program, tmp_path / "many", timeout=200)
    assert results[0].extra == right.extra
    programs.assert_same(results, right)


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("stage", STAGES)
def test_with_split_layers(pool, one_process, stage, optimizer):
    mesh = {"data": 2, "tensor": 2, "zero_stage": stage}
    options = {"optimizer": optimizer, "evaluate": False}
    test_gpt.check_parity(pool, one_process, mesh, True, "gpt2", **options)


@on_ranks(("horovod", 4))
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_in_a_pipeline(pool, one_process, stage):
    mesh = {"data": 2, "pipeline": 2, "zero_stage": stage}
    test_training.check(pool, one_process, mesh, pipeline={})


def refusal(optimizer) -> str:
    from tfdist.testing import strategy

    programs.start()
    x, y = programs.images(12)
    with strategy(zero_stage=1).scope():
        model = programs.mlp()
        model.compile(optimizer, programs.cross_entropy())
    try:
        model.fit(x, y, verbose=0)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


@on_ranks(("horovod", 3))
def test_an_optimizer_that_looks_at_whole_parameters_is_refused_by_name(pool):
    for said in pool.run(refusal, keras.optimizers.Lamb()):
        assert "Received: Lamb" in said


def state_elements(stage: int) -> list[tuple[int, int]]:
    """For each parameter its elements, and those of its momentum on this rank."""
    from tfdist.testing import strategy

    programs.start()
    x, y = programs.images(12)
    with strategy(zero_stage=stage).scope():
        model = programs.mlp()
        model.compile(programs.optimizer("sgd"), programs.cross_entropy())
    model.fit(x, y, verbose=0)
    return [
        (int(np.prod(v.shape)), int(np.prod(m.shape)))
        for v, m in zip(model.trainable_variables, model.optimizer.momentums, strict=True)
    ]


@on_ranks(("horovod", 3))
@pytest.mark.parametrize("stage", slow_but([2], STAGES))
def test_the_state_is_split(pool, stage):
    for rank in pool.run(state_elements, stage):
        assert [state for _, state in rank] == [-(-size // 3) for size, _ in rank]


ROWS_OF_A_RANK = 20_000


def reported(stage: int) -> str:
    from tfdist.callbacks import MemoryReporter
    from tfdist.testing import strategy

    programs.start()
    # TensorFlow's pool on CPUs counts arrays from 256 KiB on; where there is no pool, the peak is
    # looked for every half millisecond, so that a step must be longer than that, and there are six.
    rows = 3 * ROWS_OF_A_RANK
    x, y = programs.images(7 * rows)
    with strategy(zero_stage=stage).scope():
        model = programs.mlp()
        model.compile("adam", programs.cross_entropy())
    reporter = MemoryReporter(quiet=True)
    model.fit(x, y, batch_size=rows, epochs=1, verbose=0, callbacks=[reporter])
    return reporter.report.to_json()


@on_ranks(("horovod", 3))
@pytest.mark.parametrize("stage", slow_but([3], [0, *STAGES]))
def test_the_report_says_what_is_held(pool, stage):
    elements = 64 * 16 + 16 + 16 * 4 + 4
    shares = sum(-(-size // 3) for size in (64 * 16, 16, 16 * 4, 4))
    for rank, text in enumerate(pool.run(reported, stage)):
        report = json.loads(text)
        rows = {row["what"]: row for row in report["rows"]}
        assert report["rank"] == rank
        parameters, state = rows["parameters"], rows["optimizer state"]
        assert parameters["whole"] == 4 * elements
        held = 4 * (shares if stage == 3 else elements)
        assert parameters["planned"] == parameters["measured"] == held
        # Adam has two numbers a parameter, and two scalars.
        moments = 2 * 4 * (shares if stage else elements)
        assert abs(state["measured"] - moments) <= 16
        assert state["planned"] == state["measured"]
        # Of all gradients together, a third: they are reduced in buckets.
        assert rows["gradients"]["planned"] == (1478 if stage else 4 * elements)
        # At least what the hidden layer gives for this rank's rows.
        assert rows["additional peak of a step"]["measured"] > ROWS_OF_A_RANK * 16 * 4


def reduced_layers() -> set[str]:
    """The layers whose gradients are reduced in a step of a model of which one is frozen."""
    import tensorflow as tf

    from tfdist.testing import strategy
    from tfdist.zero import sharded_gradients as module

    keras.backend.clear_session()
    with strategy(zero_stage=3).scope():
        model = keras.Sequential(
            [keras.Input((4,))] + [keras.layers.Dense(4, name=name) for name in "abc"]
        )
        model.get_layer("b").trainable = False
    stock = module.reduce_scatter_arrays
    with mock.patch.object(module, "reduce_scatter_arrays", side_effect=stock) as reduce:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones([2, 4])))
        gradients = tape.gradient(loss, model.trainable_variables)
    if any(gradient is None for gradient in gradients):
        raise AssertionError("A parameter that is trained has no gradient.")
    names = [call.args[-1] for call in reduce.call_args_list]
    return {name for name in "abc" if any(f"/{name}/gradients" in found for found in names)}


@on_ranks(("horovod", 2))
def test_gradients_of_frozen_parameters_do_not_travel(pool):
    assert pool.run(reduced_layers, timeout=60) == [{"a", "c"}] * 2


@keras.saving.register_keras_serializable(package="tests")
class FarParameters(keras.layers.Dense):
    """X W and, many operations away from what comes out, b."""

    def call(self, inputs):
        far = self.bias
        for _ in range(12):
            far = keras.ops.tanh(far + 0.1)
        return keras.ops.matmul(inputs, self.kernel) + far


def train_far_parameters(strategy):
    programs.start()
    x, y = programs.images(12)
    with programs.scope(strategy):
        hidden = [layer(8) for layer in (keras.layers.Dense, FarParameters, FarParameters)]
        model = keras.Sequential([keras.layers.Flatten(), *hidden, keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(programs.optimizer("sgd"), loss)
    history = model.fit(x, y, batch_size=6, epochs=2, verbose=0, shuffle=False)
    return programs.finish(model, history, x, y)


@on_ranks(("tensorflow", 2))
def test_a_layer_that_is_through_after_the_one_before_it(pool, one_process):
    # The backward pass is traced breadth-first: it comes to the layer before earlier than to b.
    results = pool.run(on_rank, 3, train_far_parameters, timeout=120)
    programs.assert_same(results, expected(one_process, train_far_parameters))
