"""Horovod's callbacks of broadcasts, averages and checkpoints on Keras 3."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.addons.compat.fits import one_weight_model, weight_of
from tfdist.addons.compat.horovod import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
)
from tfdist.testing import RankPool


def test_best_model_checkpoint_keeps_the_best(tmp_path):
    path = tmp_path / "best.keras"
    callback = BestModelCheckpoint(path, monitor="val_loss")
    assert isinstance(callback, keras.callbacks.ModelCheckpoint)
    model = one_weight_model(keras.optimizers.SGD(1.0))
    callback.set_model(model)
    for epoch, loss in enumerate([3.0, 1.0, 2.0]):
        model.set_weights([np.full([1, 1], float(epoch))])
        callback.on_epoch_end(epoch, {"val_loss": loss})
    assert weight_of(keras.models.load_model(path, compile=False)) == 1.0


def test_without_an_engine_nothing_is_moved():
    model = one_weight_model(keras.optimizers.SGD(1.0))
    logs = {"loss": 2.0}
    for callback in (BroadcastGlobalVariablesCallback(5), MetricAverageCallback()):
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_epoch_end(0, logs)
    assert logs == {"loss": 2.0}


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, engine="tensorflow") as pool:
        yield pool


def test_importing_needs_no_horovod_and_defines_no_flag(ranks):
    def imported():
        import sys

        from absl import flags

        before = set(flags.FLAGS)
        import tfdist.addons.compat.horovod  # noqa: F401

        return "horovod" in sys.modules, set(flags.FLAGS) - before

    assert ranks.run(imported, timeout=120) == [(False, set())] * 2


def test_broadcast_gives_all_ranks_the_variables_of_the_root(ranks):
    def broadcast(root_rank):
        import types

        import keras
        import numpy as np

        import tfdist.testing
        from tfdist.addons.compat.horovod import BroadcastGlobalVariablesCallback

        class Mixed(keras.layers.Layer):
            """Holds what layers hold besides float32."""

            def build(self, _):
                kinds = ["bool", "bfloat16", "float16", "float64"]
                kinds += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
                for dtype in kinds:
                    self.add_weight(shape=[3], dtype=dtype, trainable=False, name=dtype)
                self.add_weight(shape=[], dtype="int32", trainable=False, name="scalar")
                self.add_weight(shape=[0], dtype="float32", trainable=False, name="empty")

            def call(self, x):
                return x

        engine = tfdist.testing.engine()
        model = keras.Sequential(
            [
                keras.Input([2]),
                keras.layers.Dense(3),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5, seed=1),
                Mixed(),
            ]
        )
        model.compile(keras.optimizers.Adam(0.1), loss="mse")
        model._distribute_strategy = types.SimpleNamespace(engine=engine, num_replicas_in_sync=2)
        callback = BroadcastGlobalVariablesCallback(root_rank)
        callback.set_model(model)
        try:
            callback.on_train_begin()
        except ValueError as error:
            unbuilt = str(error)
        model.optimizer.build(model.trainable_variables)

        variables = [*model.variables, *model.optimizer.variables]

        def fill(value):
            for variable in variables:
                variable.assign(np.full(variable.shape, value).astype(variable.dtype))

        def values():
            return {v.path: np.asarray(v.value, dtype="float64").tolist() for v in variables}

        fill(engine.rank)
        callback.on_train_begin()
        first = values()
        fill(engine.rank + 5)
        callback.on_train_begin()
        return unbuilt, first, values(), {v.path: v.shape for v in variables}

    for root in (0, 1):
        for rank, (unbuilt, first, second, shapes) in enumerate(
            ranks.run(broadcast, root, timeout=120)
        ):
            assert "The optimizer must be built before its variables are broadcast" in unbuilt
            # Dense 2, normalization 4, dropout's seed 1, Mixed 14; Adam: 2 + 2 for each of 4.
            assert len(shapes) == 21 + 10
            for path, shape in shapes.items():
                assert first[path] == np.full(shape, float(root)).tolist(), path
                again = 1.0 if path.endswith("bool") else rank + 5.0
                assert second[path] == np.full(shape, again).tolist(), path


def test_broadcast_leaves_the_slices_of_tensor_parallel_ranks(ranks):
    def broadcast():
        import types

        import keras
        import numpy as np

        import tfdist.testing
        from tfdist import Mesh
        from tfdist.addons.compat.horovod import BroadcastGlobalVariablesCallback

        engine = tfdist.testing.engine(Mesh(tensor=2))
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
        model.set_weights([np.full([1, 1], engine.rank)])
        model._distribute_strategy = types.SimpleNamespace(engine=engine, num_replicas_in_sync=1)
        callback = BroadcastGlobalVariablesCallback(1)
        callback.set_model(model)
        callback.on_train_begin()
        return float(model.get_weights()[0][0, 0])

    assert ranks.run(broadcast, timeout=120) == [0.0, 1.0]


def test_broadcast_refuses_roots_and_split_variables(ranks):
    def refusals():
        import types

        import keras

        import tfdist.testing
        from tfdist.addons.compat.horovod import BroadcastGlobalVariablesCallback

        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
        messages = []
        for root, more in ((2, {}), (0, {"zero_stage": 1})):
            model._distribute_strategy = types.SimpleNamespace(
                engine=tfdist.testing.engine(), num_replicas_in_sync=2, **more
            )
            callback = BroadcastGlobalVariablesCallback(root)
            callback.set_model(model)
            try:
                callback.on_train_begin()
            except ValueError as error:
                messages.append(str(error))
        return messages

    for root, zero in ranks.run(refusals, timeout=120):
        assert "in [0, 2). Received: root_rank=2." in root
        assert "not supported with ZeRO" in zero and "zero_stage=1" in zero


def test_metrics_are_averaged_over_the_ranks(ranks):
    def average():
        import tfdist.testing
        from tests.addons.compat.fits import averaging_callback

        engine = tfdist.testing.engine()
        callback = averaging_callback(engine)
        logs = {"loss": 1.0 + engine.rank, "count": engine.rank, "note": "rank"}
        # The ranks' dicts are in other orders.
        logs = {"global": 1 / 3, "accuracy": 0.25 * engine.rank, **logs}
        if engine.rank:
            logs = dict(reversed(logs.items()))
        callback.on_epoch_end(0, logs)
        once = dict(logs)
        callback.on_epoch_end(1, logs)
        callback.on_epoch_end(2, None)
        return once, logs

    for rank, (once, twice) in enumerate(ranks.run(average, timeout=120)):
        assert once == {
            "accuracy": 0.125,
            "count": rank,
            "global": 1 / 3,
            "loss": 1.5,
            "note": "rank",
        }
        assert once == twice


def test_logs_of_different_keys_are_an_error_on_all_ranks(ranks):
    def mismatch():
        import tfdist.testing
        from tests.addons.compat.fits import averaging_callback

        engine = tfdist.testing.engine()
        callback = averaging_callback(engine)
        try:
            callback.on_epoch_end(0, {"loss": 1.0, **({"val_loss": 2.0} if engine.rank else {})})
        except ValueError as error:
            return str(error)

    first, second = ranks.run(mismatch, timeout=120)
    assert "on rank 0: ['loss']; other keys on ranks [1]" in first
    assert "on rank 1: ['loss', 'val_loss']; other keys on ranks [0]" in second
