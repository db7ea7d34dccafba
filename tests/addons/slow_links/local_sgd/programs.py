"""Programs of local SGD, SlowMo and DiLoCo, and what plain Keras in one process makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tests.strategies import programs
from tfdist.addons import slow_links

FEATURES, CLASSES = 12, 5


def build() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(CLASSES),
        ]
    )


def rows(number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, number)
    x = random.normal(size=(number, FEATURES)).astype("float32") + labels[:, None] / 4
    return x, labels


def inner(name: str) -> keras.optimizers.Optimizer:
    return {
        "sgd": lambda: keras.optimizers.SGD(0.1),
        "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "adamw": lambda: keras.optimizers.AdamW(3e-3, weight_decay=0.01),
        "clipped": lambda: keras.optimizers.Adam(3e-3, global_clipnorm=0.5),
        "accumulated": lambda: keras.optimizers.Adam(3e-3, gradient_accumulation_steps=2),
    }[name]()


def outer(name: str, inner: keras.optimizers.Optimizer, sync_every: int, **options):

    return {
        "local_sgd": slow_links.LocalSGD,
        "slowmo": slow_links.SlowMo,
        "diloco": slow_links.DiLoCo,
    }[name](inner, sync_every, **options)


def weights_of(model) -> list[np.ndarray]:
    return [weight.numpy() for weight in model.weights]


def fit(
    strategy,
    kind: str | None,
    inner_name: str,
    *,
    sync_every: int = 4,
    number: int = 96,
    batch: int = 12,
    epochs: int = 2,
    make: Callable = build,
    data: Callable = rows,
    **options,
) -> tuple[list[np.ndarray], list[float]]:
    """Weights and losses of a `fit`, by local steps or, where `kind` is None, by common ones."""
    programs.start()
    x, y = data(number)
    with programs.scope(strategy):
        model = make()
        optimizer = inner(inner_name)
        if kind is not None:
            optimizer = outer(kind, optimizer, sync_every, **options)
        model.compile(optimizer, programs.cross_entropy())
    history = model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return weights_of(model), history.history["loss"]


def fit_on_rank(mesh: dict, *args, **options):
    from tfdist import Mesh
    from tfdist.testing import strategy

    return fit(strategy(Mesh(**mesh)), *args, **options)


def simulate(
    kind: str,
    inner_name: str,
    ranks: int,
    *,
    sync_every: int = 4,
    number: int = 96,
    batch: int = 12,
    epochs: int = 2,
    make: Callable = build,
    data: Callable = rows,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    slow_momentum: float = 0.7,
    slow_learning_rate: float = 1.0,
    fragments: int = 1,
    overlap: int = 0,
    mixing: float = 0.5,
    cut: Sequence[Sequence[int]] = ((0, 1, 2, 3),),
) -> list[np.ndarray]:
    """The same in one process: a model of plain Keras for each rank, and the formulas in NumPy."""
    programs.start()
    x, y = data(number)
    first = make()
    models = [first]
    for _ in range(ranks - 1):
        models.append(make())
        models[-1].set_weights(first.get_weights())
    local_sgd = [inner(inner_name) for _ in models]
    loss = programs.cross_entropy()
    for model, optimizer in zip(models, local_sgd, strict=True):
        optimizer.build(model.trainable_variables)
    whole = [v.numpy() for v in first.trainable_variables]
    momentum = [np.zeros_like(v) for v in whole]
    steps = 0
    under_way: dict[int, dict[int, np.ndarray]] = {}

    def mean_of(i: int) -> np.ndarray:
        return np.mean([model.trainable_variables[i].numpy() for model in models], axis=0)

    def outer_step(deltas: dict[int, np.ndarray], own: float = 0.0):
        for i, delta in deltas.items():
            if kind == "local_sgd":
                whole[i] = whole[i] - delta
            elif kind == "slowmo":
                rate = float(local_sgd[0].learning_rate)
                momentum[i] = slow_momentum * momentum[i] + delta / rate
                whole[i] = whole[i] - slow_learning_rate * rate * momentum[i]
            else:
                momentum[i] = outer_momentum * momentum[i] + delta
                step = delta + outer_momentum * momentum[i] if nesterov else momentum[i]
                whole[i] = whole[i] - outer_learning_rate * step
            for model in models:
                variable = model.trainable_variables[i]
                variable.assign(own * variable.numpy() + (1 - own) * whole[i])

    def sync(places: Sequence[int]):
        outer_step({i: whole[i] - mean_of(i) for i in places})
        average([model.non_trainable_variables for model in models])

    for _ in range(epochs):
        for begin in range(0, number, batch):
            for rank, (model, optimizer) in enumerate(zip(models, local_sgd, strict=True)):
                own = own_rows(begin, min(begin + batch, number), ranks, rank)
                if len(own):
                    with tf.GradientTape() as tape:
                        value = loss(y[own], model(x[own], training=True))
                    gradients = tape.gradient(value, model.trainable_variables)
                    optimizer.apply(gradients, model.trainable_variables)
            steps += 1
            for part, places in enumerate(cut):
                since = steps - (part + 1) * sync_every // fragments
                if not overlap and since >= 0 and since % sync_every == 0:
                    sync(places)
                elif overlap and since >= 0 and since % sync_every == 0:
                    under_way[part] = {i: whole[i] - mean_of(i) for i in places}
                elif overlap and since >= 0 and since % sync_every == overlap:
                    outer_step(under_way.pop(part), own=mixing)
    for part in sorted(under_way):
        outer_step(under_way.pop(part), own=mixing)
    if fragments > 1 or overlap or steps % sync_every:
        sync(range(len(whole)))
    return weights_of(first)


def average(states: Sequence[Sequence]) -> None:
    for some in zip(*states, strict=True):
        if some[0].dtype == "float32":
            mean = np.mean([each.numpy() for each in some], axis=0)
            for each in some:
                each.assign(mean)


def own_rows(begin: int, end: int, ranks: int, rank: int) -> np.ndarray:
    from tfdist.data.sharding import row_range

    first, last = row_range(end - begin, ranks, rank)
    return np.arange(begin + first, begin + last)
