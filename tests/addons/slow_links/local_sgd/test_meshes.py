"""Local steps of ranks that share a model: the axes beside that of the data reduce what they must."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.addons.slow_links.local_sgd import programs
from tests.conftest import on_ranks
from tests.strategies import programs as training
from tfdist.addons import recommenders
from tfdist.experts import MixtureOfExperts


def split_layers() -> keras.Model:
    from tfdist import layers

    return keras.Sequential(
        [
            keras.Input((programs.FEATURES,)),
            layers.ColumnParallelDense(16, activation="tanh"),
            layers.RowParallelDense(8),
            keras.layers.Dense(programs.CLASSES),
        ]
    )


def run(mesh: dict, kind: str, inner: str, **options):
    """The global arrays of the weights after a `fit`."""
    from tfdist import Mesh
    from tfdist.pipeline import PipelineModel
    from tfdist.sharding import whole_value
    from tfdist.testing import strategy

    training.start()
    x, y = programs.rows(96)
    with strategy(Mesh(**mesh)).scope():
        model = split_layers()
        if "pipeline" in mesh:
            model = PipelineModel(model, num_microbatches=2, cut=[2, 1])
        optimizer = programs.outer(kind, programs.inner(inner), 3, **options)
        model.compile(optimizer, training.cross_entropy())
    model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    every = model.chain_variables[0] if "pipeline" in mesh else model.weights
    return [whole_value(variable).numpy() for variable in every]


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"pipeline": 2}], ids=["tensor", "pipeline"])
@pytest.mark.parametrize(
    ("kind", "inner", "options"),
    [("diloco", "clipped", {}), ("local_sgd", "accumulated", {})],
    ids=["clipped", "accumulated"],
)
def test_ranks_that_share_a_model_train_as_one(pool, one_process, mesh, kind, inner, options):
    found = pool.run(run, mesh, kind, inner, timeout=600, **options)
    expected = one_process.run(
        programs.simulate,
        kind,
        inner,
        2,
        sync_every=3,
        make=split_layers,
        cut=(tuple(range(6)),),
        timeout=600,
        **options,
    )[0]
    for weights in found:
        for own, right in zip(weights, expected, strict=True):
            np.testing.assert_allclose(own, right, rtol=0, atol=2e-5)


def own_axis(within: str | None):
    """Two sites of two ranks; the parameters after seven steps, of which the fourth ends in a sync."""
    from tfdist import Axis, Mesh
    from tfdist.addons.slow_links import LocalSGD
    from tfdist.testing import strategy

    training.start()
    mesh = Mesh(axes={Axis("site", "rows"): 2}, order=("site", "data"))
    with strategy(mesh).scope():
        model = programs.build()
        optimizer = LocalSGD(keras.optimizers.SGD(0.1), 4, within=within)
        model.compile(optimizer, training.cross_entropy())
    x, y = programs.rows(87)
    for step in range(7):
        model.train_on_batch(x[12 * step : 12 * step + 12], y[12 * step : 12 * step + 12])
    return model.get_weights()


@pytest.mark.slow
@on_ranks(("horovod", 4), ("tensorflow", 4))
def test_every_step_along_an_axis_of_ones_own(pool, one_process):
    from tests.addons.slow_links.local_sgd.test_training import seven_batches

    expected = one_process.run(seven_batches, timeout=600)[0]
    results = pool.run(own_axis, "data", timeout=600)
    for rank, weights in enumerate(results):
        for own, right in zip(weights, expected[rank // 2], strict=True):
            np.testing.assert_allclose(own, right, rtol=0, atol=1e-5)


def experts(sync_every: int, options: dict):
    """A model with experts that two ranks divide, in two replicas; checks it after each step."""
    from tfdist import Mesh
    from tfdist.callbacks import VerifyModelSync
    from tfdist.sharding import whole_value
    from tfdist.testing import strategy

    training.start()
    x, y = programs.rows(96)
    with strategy(Mesh(data=2, expert=2)).scope():
        model = keras.Sequential(
            [
                keras.Input((programs.FEATURES,)),
                MixtureOfExperts(4, 16, top_k=2),
                keras.layers.Dense(programs.CLASSES),
            ]
        )
        optimizer = keras.optimizers.SGD(0.1)
        if sync_every:
            optimizer = programs.outer("local_sgd", optimizer, sync_every, **options)
        model.compile(optimizer, training.cross_entropy())
    callbacks = [VerifyModelSync(1)]
    model.fit(x, y, batch_size=12, verbose=0, shuffle=False, callbacks=callbacks)
    return [whole_value(variable).numpy() for variable in model.trainable_variables]


@pytest.mark.slow
@on_ranks(("horovod", 4))
def test_experts_are_shared_and_replicas_apart(pool):
    common = pool.run(experts, 0, {}, timeout=600)
    each = pool.run(experts, 1, {}, timeout=600)
    apart = pool.run(experts, 4, {}, timeout=600)
    # A balance loss looks at the rows that step together, so it differs by which these are.
    for own, right in zip(each[0], common[0], strict=True):
        np.testing.assert_allclose(own, right, rtol=0, atol=1e-2)
    for weights in apart:
        for own, chief in zip(weights, apart[0], strict=True):
            np.testing.assert_array_equal(own, chief)


def refusals() -> list[str]:
    from tfdist.addons.slow_links import DiLoCo
    from tfdist.testing import strategy

    said = []

    def expect(make, **options):
        training.start()
        with strategy(**options).scope():
            try:
                model, x, y = make()
                model.fit(x, y, batch_size=12, verbose=0)
            except ValueError as error:
                said.append(str(error))

    def plain(**options):
        model = programs.build()
        model.compile(DiLoCo("adamw", 4, **options), training.cross_entropy())
        return model, *programs.rows(24)

    def tables():
        inputs = {"t": keras.Input((), dtype="int32", name="t")}
        table = recommenders.TableConfig("t", 4000, 8, placement="rows")
        vectors = recommenders.ShardedEmbedding([recommenders.FeatureConfig("t", table)])(inputs)
        model = keras.Model(inputs, keras.layers.Dense(programs.CLASSES)(vectors["t"]))
        model.compile(DiLoCo("adamw", 4), training.cross_entropy())
        return model, {"t": np.zeros(24, "int32")}, np.zeros(24, "int32")

    expect(plain, zero_stage=1)
    expect(lambda: plain(within="tensor"))
    expect(lambda: plain(within="rack"))
    expect(tables)
    return said


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_what_cannot_be_is_refused_in_one_line(pool):
    for said in pool.run(refusals, timeout=600):
        words = ("zero_stage=1", "within='tensor'", "within='rack'", "is split over the data axis")
        for line, word in zip(said, words, strict=True):
            assert word in line
        assert all("\n" not in line for line in said)
