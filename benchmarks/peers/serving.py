"""What all programs share: their settings, the batch, and what a block of steps tells."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

#: Steps before those of a block that count: a `fit` starts anew with each.
LEAD = 2


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a rank is to train.

    Attributes:
        program: The module of this folder.
        model: "gpt", "gpt2", "convnet", "mlp" or "dlrm".
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


@dataclasses.dataclass
class Steps:
    """A block of steps, `LEAD` of which do not count.

    Attributes:
        begins: When each began.
        used: The seconds of processor time that the process had used by then, in all its threads.
        loss: The mean loss of all; None for a rank that does not see it, or where nothing is trained.
    """

    begins: list[float] = dataclasses.field(default_factory=list)
    used: list[float] = dataclasses.field(default_factory=list)
    loss: float | None = None

    def begin(self) -> None:
        """A step begins."""
        self.begins.append(time.perf_counter())
        self.used.append(time.process_time())

    @property
    def seconds(self) -> list[float]:
        """The time of each step that counts: to the beginning of the next."""
        return _differences(self.begins)

    @property
    def processor(self) -> list[float]:
        """The processor time of each."""
        return _differences(self.used)


class Training(Protocol):
    """A model that is being trained.

    Attributes:
        parameters: How many the model has, over all ranks, without adapters.
        trained: How many are trained.
    """

    parameters: int
    trained: int

    def block(self, steps: int) -> Steps:
        """Trains some steps more."""
        ...


def global_batch(settings: Settings) -> tuple[Any, np.ndarray]:
    """The batch that every step trains on: what can be learned within some steps.

    That of "dlrm" has a dict of inputs; ids follow a power law, as those of users and items do.
    """
    sizes = settings.sizes
    random = np.random.default_rng(0)
    if settings.model == "dlrm":
        rows, vocabulary = sizes["batch"], sizes["vocabulary"]
        inputs = {"dense": random.normal(size=(rows, sizes["dense"])).astype("float32")}
        weights = np.arange(1, vocabulary + 1) ** -1.05
        for table in range(sizes["tables"]):
            ids = random.choice(vocabulary, (rows, 1), p=weights / weights.sum())
            inputs[f"id_{table}"] = random.permutation(vocabulary)[ids].astype("int32")
        return inputs, (inputs["dense"][:, :1] > 0).astype("float32")
    if settings.model == "mlp":
        features = random.normal(size=(sizes["batch"], sizes["features"])).astype("float32")
        return features, random.integers(0, sizes["classes"], sizes["batch"], "int32")
    if settings.model != "convnet":
        shape = sizes["batch"], sizes["tokens"]
        tokens = random.integers(0, sizes["vocabulary"], shape, "int32")
        return tokens, (7 * tokens + 3) % sizes["vocabulary"]
    side = sizes["side"]
    images = random.normal(size=(sizes["batch"], side, side, 3)).astype("float32")
    return images, random.integers(0, sizes["classes"], sizes["batch"], "int32")


def own_rows(settings: Settings) -> tuple[Any, np.ndarray]:
    """This rank's rows of the batch, where all ranks are data parallel."""
    rows = settings.sizes["batch"] // settings.ranks
    mine = slice(settings.rank * rows, (settings.rank + 1) * rows)
    inputs, labels = global_batch(settings)
    if isinstance(inputs, dict):
        return {name: part[mine] for name, part in inputs.items()}, labels[mine]
    return inputs[mine], labels[mine]


def conversations(sizes: Mapping[str, int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ids of conversations, and which are trained: lengths are log-normal, as those of chat data.

    Of each, the second half is trained, and can be learned from the token before.
    """
    random, vocabulary, most = np.random.default_rng(0), sizes["vocabulary"], sizes["tokens"]
    lengths = random.lognormal(np.log(most / 5), 0.8, sizes["conversations"])
    found = []
    for length in np.clip(lengths, 8, most).astype(int):
        ids = [int(random.integers(0, vocabulary))]
        while len(ids) < length:
            ids.append((7 * ids[-1] + 3) % vocabulary)
        found.append((np.array(ids, "int32"), np.arange(length) >= length // 2))
    return found


class Padded(NamedTuple):
    """A batch of conversations, padded to the longest of them; each [rows, tokens].

    Attributes:
        ids: The tokens.
        mask: 1 for tokens, 0 for padding.
        targets: The next tokens.
        trained: Which of those are trained.
    """

    ids: np.ndarray
    mask: np.ndarray
    targets: np.ndarray
    trained: np.ndarray


def padded(sizes: Mapping[str, int]) -> list[Padded]:
    """Batches of conversations."""
    found, rows, size = [], conversations(sizes), sizes["batch"]
    for begin in range(0, len(rows), size):
        some = rows[begin : begin + size]
        shape = len(some), max(len(row) for row, _ in some)
        ids, mask, targets = (np.zeros(shape, "int32") for _ in range(3))
        batch = Padded(ids, mask, targets, np.zeros(shape, bool))
        for at, (row, trained) in enumerate(some):
            batch.ids[at, : len(row)] = row
            batch.mask[at, : len(row)] = 1
            batch.targets[at, : len(row) - 1] = row[1:]
            batch.trained[at, : len(row) - 1] = trained[1:]
        found.append(batch)
    return found


def memory(field: str) -> int:
    """Bytes of this process, as Linux counts them: VmRSS now, VmHWM at the highest."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    raise ValueError(f"This system does not report {field}.")


class FitTraining:
    """A Keras model, of either Keras, that `fit` trains.

    Args:
        model: The compiled model.
        data: Its data set, which does not end.
        clock: Makes a callback that calls a function when a step begins.
        parameters: How many it has, over all ranks, without adapters.
        trained: How many are trained; None for all.
        batches: The batches that count as one step.
    """

    def __init__(
        self,
        model,
        data,
        clock: Callable[[Callable], Any],
        parameters: int,
        trained: int | None = None,
        batches: int = 1,
    ):
        self.parameters = parameters
        self.trained = parameters if trained is None else trained
        self._model, self._data, self._clock = model, data, clock
        self._batches = batches

    def block(self, steps: int) -> Steps:
        """Trains some steps more."""
        block, numbers = Steps(), itertools.count()

        def note() -> None:
            if next(numbers) % self._batches == 0:
                block.begin()

        run = self._model.fit(
            self._data,
            steps_per_epoch=(steps + LEAD) * self._batches,
            verbose=0,
            callbacks=[self._clock(note)],
        )
        block.loss = float(run.history["loss"][0])
        return block


def _differences(values: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(values)][LEAD - 1 :]
