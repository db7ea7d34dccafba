"""The DLRM: by its equations, on ranks as in one process, and near the floor of its data."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.conftest import on_ranks
from tests.strategies.programs import in_one_process, scope, start
from tfdist import Mesh
from tfdist.addons import recommenders
from tfdist.addons.recommenders import make_clicks

SIZES = [300, 40, 7]


def on_mesh(mesh):
    from tfdist.testing import strategy

    return train(strategy(mesh))


def train(strategy, rows: int = 250, epochs: int = 4):
    """The losses, and the predictions in the end."""
    start()
    inputs, clicks, _ = make_clicks(rows, 4, SIZES)
    with scope(strategy):
        model = recommenders.dlrm(4, SIZES, embedding_dim=4, bottom_widths=(8,), top_widths=(8,))
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adagrad(0.05), loss)
    history = model.fit(inputs, clicks, batch_size=48, epochs=epochs, shuffle=False, verbose=0)
    return history.history["loss"], model.predict(inputs, batch_size=48, verbose=0)


@pytest.mark.slow
@on_ranks(("horovod", 2), ("tensorflow", 3))
def test_trains_on_ranks_as_in_one_process(pool, one_process):
    (wanted,) = one_process.run(in_one_process, train)
    for found in pool.run(on_mesh, Mesh(), timeout=400):
        for own, reference in zip(found, wanted, strict=True):
            np.testing.assert_allclose(own, reference, rtol=1e-5, atol=1e-5)


def test_is_the_model_of_naumov_and_others():
    model = recommenders.dlrm(
        2, [5, 6], embedding_dim=3, bottom_widths=(), top_widths=(), bag_sizes=[1, 2]
    )
    x, ids = np.array([[1.0, -2.0]], np.float32), (np.array([[4]]), np.array([[1, -1]]))
    weights = {w.path: np.asarray(w) for w in model.weights}
    bottom = np.maximum(x @ weights["bottom_0/kernel"] + weights["bottom_0/bias"], 0)[0]
    one, two = weights["embeddings/table_0"][4], weights["embeddings/table_1"][1]
    joined = np.concatenate([bottom, [one @ bottom, two @ bottom, two @ one]])
    wanted = joined @ weights["logits/kernel"] + weights["logits/bias"]
    found = model.predict({"dense": x, "id_0": ids[0], "id_1": ids[1]}, verbose=0)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5)


def test_learns_the_rule_of_its_data():
    start()
    inputs, clicks, _ = make_clicks(16_000, 4, SIZES, strength=3.0)
    others, other_clicks, other_floor = make_clicks(4_000, 4, SIZES, seed=1, strength=3.0)
    model = recommenders.dlrm(4, SIZES, embedding_dim=8, bottom_widths=(32,), top_widths=(64, 32))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(5e-3), loss)
    model.fit(inputs, clicks, batch_size=250, epochs=4, verbose=0)
    found = model.evaluate(others, other_clicks, verbose=0, batch_size=1000)
    share = other_clicks.mean()
    known = -share * np.log(share) - (1 - share) * np.log(1 - share)
    print(f"{found:.4f}, the floor {other_floor:.4f}, without inputs {known:.4f}")
    # Of what the inputs tell at best, it has learned most.
    assert other_floor < found < other_floor + 0.4 * (known - other_floor)
