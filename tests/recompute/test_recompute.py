"""Recompute: the same training with fewer bytes, for every policy."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import needs_addon, on_ranks, slow_but
from tfdist import models
from tfdist.recompute import recompute
from tfdist.recompute.policies import Costs, cheapest_within, smallest
from tfdist.testing import RankPool


def chain(length: int, width: int = 32, dropout: float = 0.2):
    parts = [keras.Input((width,))]
    for number in range(length):
        parts.append(keras.layers.Dense(width, activation="tanh", name=f"dense{number}"))
        parts.append(keras.layers.Dropout(dropout, name=f"dropout{number}"))
    return keras.Sequential([*parts, keras.layers.Dense(4, name="out")])


def decoder(**options):
    return models.gpt(31, num_layers=3, width=16, num_heads=2, max_length=8, dropout=0.1, **options)


def trained(make, loss, x, y, policy: str | None, **options):
    """Weights and losses after 6 steps."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(2)
    model = make()
    if policy:
        assert recompute(model, policy, **options) is model
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return [np.asarray(w) for w in model.get_weights()], history.history["loss"]


def train_chain(policy, **options):
    x = np.random.default_rng(0).normal(size=(24, 32)).astype("float32")
    return trained(lambda: chain(6), "mse", x, x[:, :4], policy, **options)


def train_decoder(policy, **options):
    tokens = np.random.default_rng(0).integers(0, 31, (24, 9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return trained(decoder, loss, tokens[:, :-1], tokens[:, 1:], policy, **options)


CASES = [
    (train_chain, "every_layer", {}),
    (train_chain, "sqrt", {}),
    (train_chain, "optimal", {"rows": 8}),
    (train_chain, "budget", {"rows": 8, "budget": 9_000}),
    (train_chain, "budget", {"rows": 8, "budget": 9_000, "costs": "seconds"}),
    (train_decoder, "every_layer", {}),
    (train_decoder, "sqrt", {}),
    (train_decoder, "selective", {}),
    (train_decoder, "optimal", {"rows": 8, "input_shape": (8,)}),
]
#: Runs of whole layers, and parts of the inside of a layer.
QUICK = [(train_chain, "optimal", {"rows": 8}), (train_decoder, "selective", {})]


@pytest.mark.parametrize(
    ("train", "policy", "options"),
    slow_but(QUICK, CASES),
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_training_is_the_same(train, policy, options):
    weights, losses = train(None)
    found, found_losses = train(policy, **options)
    # Where a tensor has several uses, TensorFlow may add up its gradients in another order.
    np.testing.assert_allclose(found_losses, losses, rtol=1e-6)
    for one, other in zip(weights, found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-7)


def step_graph(model, x):
    """The graph of a training step on some inputs."""
    model.compile("sgd", "mse")
    step = tf.function(lambda data: model.train_step(data))
    return step.get_concrete_function((x, x)).graph


def test_the_backward_pass_runs_a_part_again():
    keras.backend.clear_session()
    x = tf.zeros([8, 32])
    counts = []
    for policy in (None, "every_layer"):
        model = keras.Sequential(
            [keras.Input((32,)), *[keras.layers.Dense(32, activation="gelu") for _ in range(5)]]
        )
        if policy:
            recompute(model, policy)
        operations = [o.type for o in step_graph(model, x).get_operations()]
        counts.append(operations.count("Erfc"))
    # All but the last part once more: that has only just run.
    assert counts == [5, 9]


def activation_mebibytes(length: int, policy: str | None) -> float:
    """The peak of a step over that of what the step begins with: layers of 1 MiB an activation."""
    keras.backend.clear_session()
    width, rows = 256, 1024
    model = keras.Sequential(
        [
            keras.Input((width,)),
            *[keras.layers.Dense(width, activation="tanh") for _ in range(length)],
        ]
    )
    if policy:
        recompute(model, policy)
    weights = [v.value for v in model.trainable_variables]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-3 * gradient)

    from tfdist.addons.monitoring.memory import PeakMemory

    x = tf.random.normal([rows, width])
    found = []
    for _ in range(6):
        with PeakMemory(0.0001) as peak:
            step(x)
        found.append(peak.bytes)
    return min(found[1:]) / (1 << 20)


@pytest.fixture(scope="module")
def curves():
    """MiB by policy and number of layers, in a process that does nothing else."""
    found = {}
    with RankPool(1, "local", threads=1) as pool:
        for policy, length in itertools.product((None, "every_layer", "sqrt"), (4, 16, 64)):
            (found[policy, length],) = pool.run(activation_mebibytes, length, policy, timeout=120)
    for key, mebibytes in found.items():
        print(*key, f"{mebibytes:.1f} MiB")
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_addon("monitoring")
def test_activations_follow_the_square_root(curves):
    # Each layer of the plain model keeps its output, 1 MiB.
    assert curves[None, 64] > 60
    for length in (4, 16, 64):
        root = int(length**0.5)
        # What runs begin with and the inside of one, and at most four tensors under way.
        assert curves["sqrt", length] < 2 * root + 5, curves
        assert curves["every_layer", length] < length + 5, curves
    assert curves["sqrt", 64] < 0.4 * curves[None, 64]


def test_smallest_is_as_good_as_any_cut():
    random = np.random.default_rng(0)
    for count in range(1, 8):
        inputs, inside = random.integers(1, 9, (2, count)).tolist()
        costs = Costs(inputs, inside, [1.0] * count)

        def peak(ends, inputs=inputs, inside=inside):
            begins = (0, *ends[:-1])
            most = max(sum(inside[b:e]) for b, e in zip(begins, ends, strict=True))
            return sum(inputs[b] for b in begins) + most

        cuts = [
            (*cut, count)
            for size in range(count)
            for cut in itertools.combinations(range(1, count), size)
        ]
        found = tuple(end for _, end in smallest(costs)[1])
        assert peak(found) == min(map(peak, cuts))


def test_within_a_budget_the_least_time_is_taken():
    costs = Costs([1] * 6, [10, 10, 10, 10, 10, 10], [5, 1, 5, 1, 5, 1])
    assert cheapest_within(costs, 60) == []
    # One run is recomputed: 50 bytes stay, of which 10 are where the run is made again.
    runs = cheapest_within(costs, 52)
    assert sum(costs.forward[b] for begin, end in runs for b in range(begin, end)) <= 2
    with pytest.raises(ValueError, match="the least is"):
        cheapest_within(costs, 12)


def test_what_cannot_be_is_refused():
    dense = keras.layers.Dense(2)
    with pytest.raises(ValueError, match="policy='sqrt' requires a model"):
        recompute(dense, "sqrt")
    with pytest.raises(ValueError, match="Received: policy='all'"):
        recompute(chain(2), "all")
    with pytest.raises(ValueError, match="budget=None"):
        recompute(chain(2), "budget")
    with pytest.raises(ValueError, match="attention layers with a known core"):
        recompute(chain(2), "selective")
    with pytest.raises(ValueError, match="within budget=8"):
        recompute(chain(2), "budget", budget=8)


def on_rank(policy, pipeline: bool, zero_stage: int = 0):
    from tfdist import Mesh
    from tfdist.pipeline import PipelineModel
    from tfdist.testing import strategy

    keras.backend.clear_session()
    keras.utils.set_random_seed(2)
    mesh = Mesh(data=1, pipeline=-1) if pipeline else Mesh()
    with strategy(mesh, zero_stage=zero_stage).scope():
        model = decoder()
        if policy:
            recompute(model, policy)
        if pipeline:
            model = PipelineModel(model, num_microbatches=2)
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    tokens = np.random.default_rng(0).integers(0, 31, (24, 9))
    history = model.fit(
        tokens[:, :-1], tokens[:, 1:], batch_size=8, epochs=2, verbose=0, shuffle=False
    )
    return history.history["loss"]


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    ("policy", "pipeline", "zero_stage"),
    [
        ("every_layer", True, 0),
        pytest.param("selective", False, 3, marks=pytest.mark.slow),
        pytest.param("selective", True, 0, marks=pytest.mark.slow),
        pytest.param("every_layer", False, 3, marks=pytest.mark.slow),
    ],
)
def test_on_ranks_too(pool, policy, pipeline, zero_stage):
    expected = pool.run(on_rank, None, pipeline, zero_stage, timeout=120)
    found = pool.run(on_rank, policy, pipeline, zero_stage, timeout=120)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
