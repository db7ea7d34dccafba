"""The state of `fit` in addition to the model: its history, its callbacks, its position in the data."""

from __future__ import annotations

import collections
import logging
import random
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.backend.keras import attributes
from tfdist.backend.keras.private import GLOBAL_SEED_GENERATOR, global_state
from tfdist.checkpoint.kept import named_states
from tfdist.data.position import DataPosition
from tfdist.data.random_state import global_seed, random_state, set_random_state
from tfdist.sharding.kept import KeptState

_logger = logging.getLogger("tfdist")
#: The attributes of Keras' callbacks that are saved, without EarlyStopping's best weights.
_COUNTED = (
    "best",
    "best_epoch",
    "cooldown_counter",
    "stopped_epoch",
    "wait",
    attributes.averages_in_model.name,
    attributes.batches_since_save.name,
    attributes.last_batch.name,
)
_COUNTING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)


class FitState:
    """The state of one `fit`: of the model, its position in the data, and the user's callbacks."""

    def __init__(
        self,
        model: keras.Model,
        position: DataPosition,
        callbacks: Sequence,
        states: Sequence[KeptState] = (),
    ):
        self._model, self._position, self._callbacks = model, position, callbacks
        self._seed = global_seed()
        self._kept = named_states(states)

    def collect(self, epoch: int, batch: int) -> dict[str, Any]:
        """The whole state of the chief, JSON-serializable.

        Args:
            epoch: The current or next epoch.
            batch: The number of batches of it that are done.
        """
        history: Any = self._model.history
        keras_seed = _keras_seed()
        return {
            "epoch": epoch,
            "batch": batch,
            "data": self._position.state(batch),
            "random": random_state(),
            "global_seed": self._seed,
            "keras_seed": None if keras_seed is None else _plain(keras_seed.numpy()),
            "history": {
                "epoch": list(history.epoch),
                "logs": {name: [*map(_plain, values)] for name, values in history.history.items()},
            },
            "callbacks": {
                key: {name: _plain(value) for name, value in vars(each).items() if name in _COUNTED}
                for key, each in self._counting().items()
            },
            "kept": {name: each.values(in_epoch=batch > 0) for name, each in self._kept.items()},
        }

    def resume(self, state: dict[str, Any]) -> int:
        """Makes `fit` resume; returns the number of batches of the first epoch that are done."""
        if state["global_seed"] != self._seed:
            _logger.warning(
                "The seed of `tf.random` does not match: it was %s when this training began, and is "
                "%s now, so samples come in a different order. Call `keras.utils.set_random_seed` "
                "with the same seed.",
                state["global_seed"],
                self._seed,
            )
        attributes.initial_epoch.set(self._model, state["epoch"])
        batch = self._position.resume(state["data"], state["batch"])
        set_random_state(state["random"])
        keras_seed = _keras_seed()
        if keras_seed is not None and state["keras_seed"] is not None:
            keras_seed.assign(np.array(state["keras_seed"], keras_seed.dtype))
        kept = state.get("kept", {})
        if isinstance(kept, list):
            # States had no names in early versions, and shares were beside them.
            names = [name for name in self._kept if name != "batch_shares"]
            kept = dict(zip(names, kept, strict=False))
        if state.get("batch_shares") is not None:
            kept = {"batch_shares": state["batch_shares"], **kept}
        for name, each in self._kept.items():
            if name in kept:
                each.restore(kept[name])
        return batch

    def resume_callbacks(self, state: dict[str, Any]) -> None:
        """Restores the counters of callbacks; called after `on_train_begin`, which resets them."""
        history: Any = self._model.history
        history.epoch = list(state["history"]["epoch"])
        history.history = {name: list(values) for name, values in state["history"]["logs"].items()}
        for key, callback in self._counting().items():
            vars(callback).update(state["callbacks"].get(key, {}))

    def _counting(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        numbers: collections.Counter[str] = collections.Counter()
        for callback in self._callbacks:
            if isinstance(callback, _COUNTING):
                name = type(callback).__name__
                found[f"{name}/{numbers[name]}"] = callback
                numbers[name] += 1
        return found


def check_state(state: dict[str, Any]) -> None:
    """Raises ValueError if a state was not made by `FitState.collect`."""
    try:
        data, history = state["data"], state["history"]
        counts = [state["epoch"], state["batch"], data["iterators"], data["more_samples"]]
        optional = [data["taken"], data["batches"], data["batch_size"]]
        _check_random_state(state["random"])
        if data["random"] is not None:
            _check_random_state(data["random"])
        is_right = (
            all(map(_is_count, counts))
            and all(value is None or _is_count(value) for value in optional)
            and (state["global_seed"] is None or isinstance(state["global_seed"], int))
            and (state["keras_seed"] is None or np.shape(state["keras_seed"]) == (2,))
            and isinstance(history["epoch"], list)
            and all(isinstance(values, list) for values in history["logs"].values())
            and all(set(values) <= set(_COUNTED) for values in state["callbacks"].values())
        )
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise ValueError(
            "does not contain the state of a training: it is corrupt, or was not saved by a "
            "Checkpointer. Use `tfdist.checkpoint.restore` to load its weights into a model."
        )


def _check_random_state(state: dict[str, Any]) -> None:
    """Raises if generators do not accept a state."""
    version, python, gauss = state["python"]
    random.Random().setstate((version, tuple(python), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.RandomState().set_state((kind, np.array(keys, np.uint32), *rest))


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _keras_seed() -> keras.Variable | None:
    """The random state of layers without a seed; None if no layer has used it yet.

    Keras' function for it creates one, for which it draws from Python's random state.
    """
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def _plain(value):
    """A number in a JSON-serializable form, without loss of precision."""
    if isinstance(value, (tf.Tensor, np.ndarray, np.generic)):
        return np.asarray(value).tolist()
    return value
