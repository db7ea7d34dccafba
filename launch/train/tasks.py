"""The interface of the tasks of `tfdist-train`: data, model and results."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfdist.launch.flags.mesh import Layout


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that all tasks share.

    `whole_batches` requires batches of one size, so that incomplete batches are dropped. `is_chief` is
    whether this rank prints results.
    """

    model: str
    dataset: str
    batch_size: int
    epochs: int
    learning_rate: float
    seed: int
    layout: Layout
    data_dir: str | None = None
    whole_batches: bool = False
    is_chief: bool = True


@dataclasses.dataclass(frozen=True)
class Data:
    """The datasets for training and validation.

    Attributes:
        train: Global batches, shuffled in each epoch.
        validation: Global batches.
        steps: Number of batches of `train`.
        items: Number of items in these batches, the unit of speed.
    """

    train: tf.data.Dataset
    validation: tf.data.Dataset
    steps: int
    items: int


class Task(abc.ABC):
    """A kind of model and its training task.

    Methods are called in the order of their definition. Modules of tasks import TensorFlow only in the
    methods that require it, because `check` runs before its import.

    Attributes:
        models: The values of `--model` that belong to the task.
        dataset: The default dataset.
        batch_size: The default number of samples per step.
        epochs: The default number of epochs.
        learning_rate: The default learning rate of one rank.
        item: The unit of speed.
        divides_tables: Whether embedding tables are sharded over the data axis.
    """

    models: tuple[str, ...]
    dataset: str
    batch_size: int
    epochs: int
    learning_rate: float
    item: str
    divides_tables: bool = False

    @abc.abstractmethod
    def check(self, settings: Settings) -> None:
        """Check the settings before the rendezvous of the ranks.

        Raises:
            UsageError: Options are not supported by the task.
        """

    @abc.abstractmethod
    def load(self, settings: Settings) -> Data:
        """Load the data, which are the same on all ranks; the strategy selects each rank's rows.

        Raises:
            UsageError: The data cannot be loaded, or do not match the settings.
        """

    @abc.abstractmethod
    def build(self, settings: Settings) -> keras.Model:
        """Build the model, in the strategy's scope."""

    def schedule(self, rate: float, steps: int):
        """The learning rate of one rank over all steps: a number, or a Keras schedule."""
        del steps
        return rate

    @abc.abstractmethod
    def compile(self, model: keras.Model, rate, make_optimizer: Callable, **options) -> None:
        """Compile the model with an optimizer, a loss and metrics.

        Args:
            model: The model.
            rate: The learning rate: a number, or a Keras schedule.
            make_optimizer: Function that creates the optimizer from the class and the arguments of the
                task's default one; see `OptimizerOptions.make`.
            **options: Further arguments of the model's `compile`.
        """

    def callbacks(self) -> list:
        """Callbacks specific to the task."""
        return []

    @abc.abstractmethod
    def verdict(self, logs: Mapping[str, float]) -> str:
        """A description of the model's quality, from the logs of the last epoch."""

    def show(self, model: keras.Model) -> str | None:
        """A sample of the model's output, or None; called on all ranks."""
        del model
        return None
