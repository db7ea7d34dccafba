"""What asynchronous strategies have in common: a scope of one device, and a hook around `fit`."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

__all__ = ["AsynchronousExtended", "AsynchronousStrategy", "asynchronous_strategy_of", "overridden"]


class AsynchronousStrategy(tf.distribute.Strategy, abc.ABC):
    """A strategy whose workers update parameters without waiting for each other.

    `fit` is Keras' own. What it computes in a step goes through `train_step`.
    """

    @abc.abstractmethod
    def fit(self, call: Callable[[dict], Any], arguments: dict) -> Any:
        """Runs a `fit` of Keras.

        Args:
            call: Keras' `fit`.
            arguments: Its arguments by name, with the model as `self`.
        """

    @abc.abstractmethod
    def train_step(self, model: keras.Model, step: Callable, data: tuple) -> Any:
        """Runs a `train_step` of a model, mostly while it is traced.

        Args:
            model: The model.
            step: Its `train_step`.
            data: What it is called with.
        """

    def before_reading(self, model: keras.Model) -> None:
        """Called before `evaluate` and `predict` look at a model."""

    def run(self, fn, args=(), kwargs=None, options=None):
        """Runs `fn` on this worker; a `train_step` of a Keras model reads and updates parameters.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            options: As in `tf.distribute.Strategy.run`.
        """
        model = getattr(fn, "__self__", None)
        name = getattr(fn, "__name__", "")
        if isinstance(model, keras.Model) and name == "train_step":
            step = fn

            def train_step(*data):
                return self.train_step(model, step, data)

            fn = tf.autograph.experimental.do_not_convert(train_step)
        return super().run(fn, args=args, kwargs=kwargs, options=options)


class AsynchronousExtended(OneDeviceExtended):
    """One device in this process, whose variables and tensors are plain."""

    def __init__(self, strategy: AsynchronousStrategy):
        super().__init__(strategy, "/GPU:0" if tf.config.list_logical_devices("GPU") else "/CPU:0")

    def _use_merge_call(self):
        return False

    def _replica_ctx_update(self, var, fn, args=(), kwargs=None, group=True):
        del group
        return fn(var, *args, **(kwargs or {}))

    def _experimental_distribute_dataset(self, dataset, options):
        del options
        return dataset


def asynchronous_strategy_of(model) -> AsynchronousStrategy | None:
    """The strategy that a Keras model was made under, if it is an asynchronous one."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy if isinstance(strategy, AsynchronousStrategy) else None


@contextlib.contextmanager
def overridden(owner: object, name: str, value: object) -> Iterator[None]:
    """Inside, an object has another method than its class."""
    before = vars(owner).get(name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)
