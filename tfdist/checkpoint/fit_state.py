"""What `fit` knows beside the model: its history, its callbacks, where it stands in the data."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.backend.keras.attributes import batches_since_save, initial_epoch, last_batch
from tfdist.backend.keras.private import GLOBAL_SEED_GENERATOR, global_state
from tfdist.checkpoint.kept import named_states
from tfdist.data.position import DataPosition
from tfdist.data.random_state import global_seed, random_state, set_random_state
from tfdist.sharding.kept import KeptState
from tfdist.step.context import strategy_of
from tfdist.step.shares import are_shares

_logger = logging.getLogger("tfdist")
#: What Keras' callbacks count. The best weights that EarlyStopping keeps are not among it.
_COUNTED = (
    "best",
    "best_epoch",
    "cooldown_counter",
    "stopped_epoch",
    "wait",
    batches_since_save.name,
    last_batch.name,
)
_COUNTING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
)


class FitState:
    """The state of one `fit`: of the model, its place in the data, and the user's callbacks."""

    def __init__(
        self,
        model: keras.Model,
        position: DataPosition,
        callbacks: Sequence,
        states: Sequence[KeptState] = (),
    ):
        self._model, self._position, self._callbacks = model, position, callbacks
        self._seed = global_seed()
        strategy = strategy_of(model)
        self._shares = None if strategy is None else strategy.row_shares
        self._kept = named_states(states)

    def collect(self, epoch: int, batch: int) -> dict[str, Any]:
        """All of it, as JSON can hold it; of the chief's.

        `epoch` is the one that goes on or begins, of which `batch` batches are done.
        """
        history = getattr(self._model, "history", None)
        keras_seed = _keras_seed()
        return {
            "epoch": epoch,
            "batch": batch,
            "data": self._position.state(in_epoch=batch > 0),
            "random": random_state(),
            "global_seed": self._seed,
            "keras_seed": None if keras_seed is None else _plain(keras_seed.numpy()),
            "history": {
                "epoch": list(getattr(history, "epoch", [])),
                "logs": {
                    name: [_plain(value) for value in values]
                    for name, values in getattr(history, "history", {}).items()
                },
            },
            "callbacks": {key: _counted(each) for key, each in self._counting().items()},
            "batch_shares": None if self._shares is None else self._shares.state(),
            "kept": {name: each.values(in_epoch=batch > 0) for name, each in self._kept.items()},
        }

    def resume(self, state: dict[str, Any]) -> int:
        """Lets `fit` go on; returns how many batches of the first epoch are done."""
        if state["global_seed"] != self._seed:
            _logger.warning(
                "The seed of `tf.random` was %s when this training began, and is %s now: its samples "
                "come in another order. Call `keras.utils.set_random_seed` with the same seed.",
                state["global_seed"],
                self._seed,
            )
        initial_epoch.set(self._model, state["epoch"])
        batch = self._position.resume(state["data"], state["batch"])
        set_random_state(state["random"])
        keras_seed = _keras_seed()
        if keras_seed is not None and state["keras_seed"] is not None:
            keras_seed.assign(np.array(state["keras_seed"], keras_seed.dtype))
        if self._shares is not None:
            self._shares.restore(state.get("batch_shares"))
        kept = state.get("kept", {})
        if isinstance(kept, list):  # Files of before states had names.
            kept = dict(zip(self._kept, kept, strict=False))
        for name, each in self._kept.items():
            if name in kept:
                each.restore(kept[name])
        return batch

    def resume_callbacks(self, state: dict[str, Any]) -> None:
        """Gives callbacks what they had counted; after `on_train_begin`, where they begin anew."""
        history: Any = self._model.history
        history.epoch = list(state["history"]["epoch"])
        history.history = {name: list(values) for name, values in state["history"]["logs"].items()}
        counting = self._counting()
        for key, values in state["callbacks"].items():
            if key in counting:
                vars(counting[key]).update(values)

    def _counting(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for callback in self._callbacks:
            if isinstance(callback, _COUNTING):
                name = type(callback).__name__
                number = sum(key.partition("/")[0] == name for key in found)
                found[f"{name}/{number}"] = callback
        return found


def check_state(state: dict[str, Any]) -> None:
    """Raises ValueError where a state is not one that `FitState.collect` has made."""
    try:
        data, history = state["data"], state["history"]
        right = (
            _counts(state["epoch"], state["batch"], data["iterators"], data["more_samples"])
            and all(data[name] is None or _counts(data[name]) for name in ("taken", "batches"))
            and (data["batch_size"] is None or _counts(data["batch_size"]))
            and _is_random_state(state["random"])
            and (data["random"] is None or _is_random_state(data["random"]))
            and (state["global_seed"] is None or isinstance(state["global_seed"], int))
            and (state["keras_seed"] is None or np.shape(state["keras_seed"]) == (2,))
            and isinstance(history["epoch"], list)
            and all(isinstance(values, list) for values in history["logs"].values())
            and all(set(values) <= set(_COUNTED) for values in state["callbacks"].values())
            # Checkpoints of before there were any have none.
            and are_shares(state.get("batch_shares"))
        )
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        right = False
    if not right:
        raise ValueError(
            "does not say where a training stands: it is damaged, or was not saved by a "
            "Checkpointer. `tfdist.checkpoint.restore` gives its weights to a model."
        )


def _is_random_state(state: dict[str, Any]) -> bool:
    """Whether generators take a state; raises where they do not."""
    version, python, gauss = state["python"]
    random.Random().setstate((version, tuple(python), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.RandomState().set_state((kind, np.array(keys, np.uint32), *rest))
    return True


def _counts(*values) -> bool:
    return all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
        for value in values
    )


def _keras_seed() -> keras.Variable | None:
    """The state from which layers without a seed draw, where one has drawn yet.

    Keras' function for it makes one, and draws for that from Python's random state.
    """
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def _counted(callback) -> dict[str, Any]:
    return {name: _plain(vars(callback)[name]) for name in _COUNTED if name in vars(callback)}


def _plain(value):
    """A number as JSON can hold it, to the last bit."""
    if isinstance(value, (tf.Tensor, np.ndarray, np.generic)):
        return np.asarray(value).tolist()
    return value
