"""Models that are split by a `LayoutMap` of Keras or of KerasHub, and maps that are refused."""

from __future__ import annotations

import keras
import numpy as np

from tests.tensor_parallel import families
from tests.tensor_parallel.families import causal_lm, policy, scope, whole, widen_softmax
from tests.tensor_parallel.parallel_programs import mlp, parallelize

__all__ = ["REFUSED", "own_rules", "refused", "train"]


def device_mesh(*more: str):
    """A device mesh of Keras': its devices are any things, since tfdist asks for its names alone."""
    names = ("batch", "model", *more)
    return keras.distribution.DeviceMesh((1, 2, *[1] * len(more)), names, devices=range(2))


def on_mesh(rules: dict[str, tuple]):
    """A map of Keras'."""
    found = keras.distribution.LayoutMap(device_mesh("expert"))
    for pattern, axes in rules.items():
        found[pattern] = axes
    return found


def hub_map(name: str):
    """The map that KerasHub has for a family."""
    import keras_hub

    prefix = families._CLASSES.get(name, name)
    return getattr(keras_hub.models, f"{prefix}Backbone").get_layout_map(device_mesh())


def train(
    name: str, options: dict | None, by_map: bool, dtype: str = "float32"
) -> tuple[list, dict, dict]:
    """Four steps; losses, weights, and the dims that are split."""
    from tfdist.tensor_parallel import report

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    with scope(options):
        with policy(dtype):
            model = causal_lm(name)
        if dtype == "float64":
            widen_softmax(model)
        parallelize(model, hub_map(name) if by_map else None)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype=dtype)
        model.compile(optimizer=keras.optimizers.SGD(0.05), loss=loss, weighted_metrics=None)
    ids = np.random.default_rng(0).integers(1, families.WORDS, (5, families.LENGTH)).astype("int32")
    x, y = {"token_ids": ids, "padding_mask": np.ones_like(ids)}, np.roll(ids, -1, axis=1)
    history = model.fit(x, y, batch_size=5, epochs=4, verbose=0, shuffle=False)
    split = {row.path: row.axis for row in report(model).variables}
    return history.history["loss"], whole(model.weights), split


RULES = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
    "head/kernel": (None, None),
}
TENSOR, DATA = {"data": 1, "tensor": 2}, {"data": 2}

#: By name: the mesh, changes of the rules, of which None drops one, and what the message holds.
REFUSED: dict[str, tuple[dict, dict, tuple[str, ...]]] = {
    "a rule that matches nothing": (
        TENSOR,
        {"upp/kernel": (None, "model")},
        ("'upp/kernel' does not match any variable", "'up/kernel'"),
    ),
    "a part of a path": (
        TENSOR,
        {"p/kernel": (None, None)},
        ("'p/kernel' does not match any variable", "whole paths", "'up/kernel'"),
    ),
    "a large variable without a rule": (
        TENSOR,
        {"down/kernel": None},
        ("A rule", "is missing", "`down/kernel` of shape (16, 6)", "Add a rule for it to the map"),
    ),
    "another axis": (
        TENSOR,
        {"head/kernel": ("expert", None)},
        ("'expert' for `head/kernel`", "model or tensor", "batch or data"),
    ),
    "two rules": (
        TENSOR,
        {"head/kernel": None, "head/k.*": (None, None), "head/.*": (None, None)},
        ("'head/kernel' matches multiple", "'head/k.*'", "'head/.*'"),
    ),
    "the data axis without ZeRO-3": (
        DATA,
        {"head/kernel": ("batch", None)},
        ("`head/kernel` over the data axis", "zero_stage=0", "Create it with zero_stage=3"),
    ),
}


def refused() -> dict[str, str]:
    """What is said of each map."""
    found = {}
    for name, (mesh, changes, _) in REFUSED.items():
        keras.backend.clear_session()
        keras.utils.set_random_seed(2)
        rules = {key: axes for key, axes in (RULES | changes).items() if axes is not None}
        with scope({"mesh": mesh}):
            model = mlp()
            try:
                parallelize(model, on_mesh(rules))
            except ValueError as error:
                found[name] = str(error)
            else:
                found[name] = "accepted"
    return found


def own_rules() -> tuple[np.ndarray, np.ndarray, list]:
    """Outputs before and after a map of one's own, and the dims that it splits."""
    from tfdist.tensor_parallel import report

    keras.backend.clear_session()
    keras.utils.set_random_seed(2)
    x = np.random.default_rng(0).normal(size=(5, 6)).astype("float32")
    with scope({"mesh": TENSOR}):
        model = mlp()
        before = np.array(model(x))
        parallelize(model, on_mesh(RULES))
    return before, np.array(model(x)), [row.axis for row in report(model).variables]
