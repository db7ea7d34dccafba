"""A model whose parameters and optimizer state are on the servers; the worker holds copies.

A step reads all parameters with one call per server (`pull`), computes as a single process would,
and sends gradients, which the servers apply (`push`). A mutex on each server makes reads and updates
mutually exclusive: no read sees half an update, and no update overwrites another.
"""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.addons.asynchronous.connection import ServerConnection
from tfdist.addons.asynchronous.placement import balance
from tfdist.addons.asynchronous.quorum_part import QuorumPart
from tfdist.addons.asynchronous.server_part import ModelVariables, ServerPart, bytes_of
from tfdist.addons.asynchronous.speculative_part import Missing, SpeculativePart


class HostedModel:
    """The variables of one model on all servers.

    Args:
        connections: The servers.
        number: The index of the model in the strategy.
        model: The model, built, with its optimizer built.
        states: Its other variables that training changes, such as moving averages.
        worker: The index of this worker, and the number of workers.
        delay_compensation: lambda of DC-ASGD; 0 for none.
        quorum: The number of gradients of an update; None where each gradient makes an update.
        speculative: Whether an update uses one gradient of each of the first workers' batches.
    """

    def __init__(
        self,
        connections: Sequence[ServerConnection],
        number: int,
        model: keras.Model,
        states: Sequence[keras.Variable],
        worker: tuple[int, int],
        delay_compensation: float,
        quorum: int | None = None,
        speculative: bool = False,
    ):
        self.model, self.optimizer = model, model.optimizer
        self.parameters, self.states = list(model.trainable_variables), list(states)
        held = ModelVariables(
            self.optimizer, self.parameters, self.states, *worker, delay_compensation, quorum
        )
        places = balance([bytes_of(variable) for variable in held.variables], len(connections))
        kind = ServerPart if quorum is None else SpeculativePart if speculative else QuorumPart
        self.parts = [
            kind(held, connection, number, [i for i, place in enumerate(places) if place == k])
            for k, connection in enumerate(connections)
        ]
        self._threads = concurrent.futures.ThreadPoolExecutor(len(connections))

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables on the servers, without the optimizer's."""
        return [*self.parameters, *self.states]

    @property
    def signature(self) -> str:
        """A description of the variables and the optimizer that must be equal on all workers."""
        shapes = [[v.path, list(v.shape), v.dtype] for v in self.variables]
        return json.dumps([type(self.optimizer).__name__, shapes])

    def publish(self) -> None:
        """Sets the servers' variables to this worker's values."""
        self._each(lambda part: part.publish())

    def pull(self, indices: Sequence[int]) -> tuple[dict[int, np.ndarray], list[int]]:
        """The values of variables by their place in `variables`, and each server's update count."""
        found: dict[int, np.ndarray] = {}
        versions = []
        for values, version in self._each(lambda part: part.pull(indices)):
            found.update(values)
            versions.append(version)
        return found, versions

    def pull_optimizer(self) -> dict[int, np.ndarray]:
        """The values of the optimizer's variables, by their place in the optimizer."""
        found: dict[int, np.ndarray] = {}
        for values in self._each(lambda part: part.pull_optimizer()):
            for place, value in values.items():
                found.setdefault(place, value)
        return found

    def pull_rows(self, index: int, ids: np.ndarray) -> np.ndarray:
        """Rows of a parameter."""
        part = next(part for part in self.parts if index in part.indices)
        return part.pull_rows(index, ids)

    def push(
        self,
        kinds: Sequence[str],
        grads: dict[int, tuple[np.ndarray, ...]],
        deltas: dict[int, np.ndarray],
        rate: np.ndarray,
        more: Sequence,
        then: Sequence[int],
        shard: int,
    ) -> tuple[list[int], list]:
        """Sends gradients for the servers to apply.

        Args:
            kinds: How each parameter's gradient is sent.
            grads: The gradients' tensors, by the parameter.
            deltas: The amounts to add to states.
            rate: The learning rate, if the optimizer has it in a variable.
            more: Additional fetches, feeds and values for the first server.
            then: Each server's update count when the parameters were read.
            shard: The worker whose batch it is.

        Returns:
            Each server's update count before this one, and the additional fetches of the first server.
        """
        results = self._each(
            lambda part: part.push(
                kinds,
                grads,
                deltas,
                rate,
                more if part.number == 0 else None,
                then[part.number],
                shard,
            )
        )
        return [before for before, _ in results], results[0][1]

    def clipped(self, grads: Sequence) -> Sequence:
        """Clips gradients by their norm over all servers, if the optimizer has `global_clipnorm`.

        Each server then clips by the norm of its part, which has no effect: that norm is not larger.
        """
        limit = self.optimizer.global_clipnorm
        if limit is None or len(self.parts) == 1:
            return grads
        return tf.clip_by_global_norm(list(grads), limit)[0]

    def updates(self) -> np.ndarray:
        """The number of updates of each worker that each server has applied: [servers, workers]."""
        return np.stack(self._each(lambda part: part.count()))

    def versions(self) -> list[int]:
        """Each server's update count, where several gradients make one update."""
        return self._each(lambda part: part.version())

    def dropped(self) -> np.ndarray:
        """The number of gradients of each worker that each server dropped: [servers, workers]."""
        return np.stack(self._each(lambda part: part.dropped()))

    def redone(self) -> np.ndarray:
        """The number of gradients of each worker's batches from a backup: [servers, workers]."""
        return np.stack(self._each(lambda part: part.redone()))

    def missing(self) -> list[Missing]:
        """The state of each server's next update, where backups redo batches."""
        return self._each(lambda part: part.missing())

    def withdraw(self, then: Sequence[int]) -> None:
        """Counts this worker's last gradient as dropped on each server that has not used it.

        Args:
            then: Each server's update count when the gradient arrived.
        """
        self._each(lambda part: part.withdraw(then[part.number]))

    def _each(self, call):
        if len(self.parts) == 1:
            return [call(self.parts[0])]
        return list(self._threads.map(call, self.parts))
