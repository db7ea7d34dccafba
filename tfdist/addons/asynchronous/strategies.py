"""The common base of asynchronous strategies: a scope of one device, and a hook around `fit`."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

from tfdist.step.hooks import FitHook


class AsynchronousStrategy(tf.distribute.Strategy, FitHook, abc.ABC):
    """A strategy whose workers update parameters without waiting for each other.

    `fit` is Keras' own, with the strategy as a hook around it. `train_step` computes each step.
    """

    @property
    def fit_hooks(self) -> Sequence[FitHook]:
        """The hooks around calls of its models: the strategy itself."""
        return (self,)

    @abc.abstractmethod
    def train_step(self, model: keras.Model, step: Callable, data: tuple) -> Any:
        """Runs a `train_step` of a model, usually while it is traced.

        Args:
            model: The model.
            step: Its `train_step`.
            data: The arguments of `step`.
        """

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


@contextlib.contextmanager
def overridden(owner: object, name: str, value: object) -> Iterator[None]:
    """Overrides a method or attribute of one object in its context."""
    before = vars(owner).get(name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)
