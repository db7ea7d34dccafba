"""What all programs share: their settings, the batch, and what a block of steps tells."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

#: Steps before those of a block that count: a `fit` starts anew with each.
LEAD = 2


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a rank is to train.

    Attributes:
        program: The module of this folder.
        model: "gpt" or "convnet".
        sizes: Of the model and its global batch.
        rank: Which rank this is.
        ranks: How many there are.
        threads: Of this rank.
        options: Of the program.
        without: Packages that are not there for it.
    """

    program: str
    model: str
    sizes: Mapping[str, int]
    rank: int
    ranks: int
    threads: int
    options: Mapping[str, Any]
    without: Sequence[str]


class Training(Protocol):
    """A model that is being trained.

    Attributes:
        parameters: How many are trained, over all ranks.
    """

    parameters: int

    def block(self, steps: int) -> tuple[list[float], float | None]:
        """Trains some steps more.

        Returns:
            The time of each, and their mean loss; None for a rank that does not see it.
        """
        ...


def global_batch(settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """The batch that every step trains on: what can be learned within some steps."""
    sizes = settings.sizes
    random = np.random.default_rng(0)
    if settings.model == "gpt":
        shape = sizes["batch"], sizes["tokens"]
        tokens = random.integers(0, sizes["vocabulary"], shape, "int32")
        return tokens, (7 * tokens + 3) % sizes["vocabulary"]
    side = sizes["side"]
    images = random.normal(size=(sizes["batch"], side, side, 3)).astype("float32")
    return images, random.integers(0, sizes["classes"], sizes["batch"], "int32")


def own_rows(settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """This rank's rows of the batch, where all ranks are data parallel."""
    rows = settings.sizes["batch"] // settings.ranks
    mine = slice(settings.rank * rows, (settings.rank + 1) * rows)
    inputs, labels = global_batch(settings)
    return inputs[mine], labels[mine]


def intervals(begins: list[float]) -> list[float]:
    """The times of a block's steps, from when each of `LEAD` more of them began."""
    return [after - before for before, after in itertools.pairwise(begins)][LEAD - 1 :]


def memory(field: str) -> int:
    """Bytes of this process, as Linux counts them: VmRSS now, VmHWM at the highest."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    raise ValueError(f"This system does not tell {field}.")


class FitTraining:
    """A Keras model, of either Keras, that `fit` trains.

    Args:
        model: The compiled model.
        data: Its data set, which does not end.
        clock: Makes a callback that calls a function when a step begins.
        parameters: How many it trains.
    """

    def __init__(self, model, data, clock: Callable[[Callable], Any], parameters: int):
        self.parameters = parameters
        self._model, self._data, self._clock = model, data, clock

    def block(self, steps: int) -> tuple[list[float], float | None]:
        """Trains some steps more, as `Training` says."""
        begins: list[float] = []
        run = self._model.fit(
            self._data,
            steps_per_epoch=steps + LEAD,
            verbose=0,
            callbacks=[self._clock(begins.append)],
        )
        return intervals(begins), float(run.history["loss"][0])
