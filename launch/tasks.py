"""What `tfdist-train` asks of a task: data, a model, and a last word."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from absl import flags

from tfdist.launch.flag_values import FlagDefiner

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfdist.launch.mesh_flags import Layout

#: The flags of `tfdist-train`: its own, and those of the tasks.
VALUES = flags.FlagValues()
DEFINE = FlagDefiner(VALUES)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags that mean the same in every task.

    `whole_batches` asks for batches of one size only: what fills none is left out. `is_chief` says
    whether this rank talks to the user.
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
    """What is learned from, and what is tested on.

    Attributes:
        train: Global batches, in an order that is another one in each epoch.
        validation: Global batches.
        steps: How many batches `train` has.
        items: How many items they hold: the unit of speed.
    """

    train: tf.data.Dataset
    validation: tf.data.Dataset
    steps: int
    items: int


class Task(abc.ABC):
    """A kind of model and what it is trained for.

    A task is asked from the top to the bottom. The modules of tasks import TensorFlow in the
    methods that need it: `check` runs before it is there.

    Attributes:
        models: The values of `--model` that belong to the task.
        dataset: The data set, where no flag names one.
        batch_size: Samples a step, likewise.
        epochs: Epochs, likewise.
        learning_rate: The rate of one rank, likewise.
        item: What speed is counted in.
        flags: The flags that no other task has.
        divides_tables: Whether parameters lie in parts on the ranks of the data axis.
    """

    models: tuple[str, ...]
    dataset: str
    batch_size: int
    epochs: int
    learning_rate: float
    item: str
    flags: tuple[flags.FlagHolder, ...] = ()
    divides_tables: bool = False

    @abc.abstractmethod
    def check(self, settings: Settings) -> None:
        """Looks at what can be known before the ranks meet.

        Raises:
            UsageError: Flags that do not fit.
        """

    @abc.abstractmethod
    def load(self, settings: Settings) -> Data:
        """Reads the data, the same on every rank: the strategy keeps each rank's rows.

        Raises:
            UsageError: There is no such data, or it does not fit.
        """

    @abc.abstractmethod
    def build(self, settings: Settings) -> keras.Model:
        """Makes the model, under the strategy's scope."""

    def schedule(self, rate: float, steps: int):
        """The learning rate of one rank over all steps: a number, or a Keras schedule."""
        del steps
        return rate

    @abc.abstractmethod
    def compile(self, model: keras.Model, rate, make_optimizer: Callable, **options) -> None:
        """Gives the model an optimizer of that rate, a loss, metrics, and other options.

        Args:
            model: The model.
            rate: The learning rate: a number, or a Keras schedule.
            make_optimizer: Makes the optimizer that trains from the class and the arguments of the
                task's own; see `OptimizerFlags.make`.
            **options: For the model's `compile`.
        """

    def callbacks(self) -> list:
        """Callbacks of the task's own."""
        return []

    @abc.abstractmethod
    def verdict(self, logs: Mapping[str, float]) -> str:
        """Says how good the model is, from what `fit` logged in the last epoch."""

    def show(self, model: keras.Model) -> str | None:
        """Something that the model makes, or None; every rank calls this."""
        del model
        return None
