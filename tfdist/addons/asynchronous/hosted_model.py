"""A model whose parameters and optimizer state live on the servers; the worker holds copies.

A step reads all parameters in one call of each server (`pull`), computes as a single process would,
and sends gradients, which the servers apply (`push`). Reads and updates of a server exclude each
other by a mutex there: no update is half read, none overwrites another.
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
        number: Which of the strategy's models it is.
        model: The model, built, with its optimizer built.
        states: Its other variables that training changes, such as moving averages.
        worker: This worker, and how many there are.
        delay_compensation: lambda of DC-ASGD; 0 for none.
        quorum: How many gradients make an update; None where each does.
        speculative: Whether these are one of each of the first workers' batches.
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
        """All that the servers hold, without the optimizer's."""
        return [*self.parameters, *self.states]

    @property
    def signature(self) -> str:
        """What all workers' models have in common."""
        shapes = [[v.path, list(v.shape), v.dtype] for v in self.variables]
        return json.dumps([type(self.optimizer).__name__, shapes])

    def publish(self) -> None:
        """Sets the servers' variables to this worker's."""
        self._each(lambda part: part.publish())

    def pull(self, indices: Sequence[int]) -> tuple[dict[int, np.ndarray], list[int]]:
        """Values of variables, by their place in `variables`, and each server's count of updates."""
        found: dict[int, np.ndarray] = {}
        versions = []
        for values, version in self._each(lambda part: part.pull(indices)):
            found.update(values)
            versions.append(version)
        return found, versions

    def pull_optimizer(self) -> dict[int, np.ndarray]:
        """Values of the optimizer's variables, by their place there."""
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
            deltas: How much to add to states.
            rate: The learning rate, if the optimizer has it in a variable.
            more: What the first server is to run beside: fetches, feeds and values.
            then: Each server's count of updates when the parameters were read.
            shard: The worker whose batch it is.

        Returns:
            Each server's count of updates before this one, and what the first server fetched.
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
        """Gradients, clipped by their norm over all servers where the optimizer asks for that.

        A server clips once more by the norm of its part, which is no larger.
        """
        limit = self.optimizer.global_clipnorm
        if limit is None or len(self.parts) == 1:
            return grads
        return tf.clip_by_global_norm(list(grads), limit)[0]

    def updates(self) -> np.ndarray:
        """How many updates of each worker each server has applied: [servers, workers]."""
        return np.stack(self._each(lambda part: part.count()))

    def versions(self) -> list[int]:
        """Each server's count of updates, where several gradients make one."""
        return self._each(lambda part: part.version())

    def dropped(self) -> np.ndarray:
        """How many gradients of each worker came too late for each server: [servers, workers]."""
        return np.stack(self._each(lambda part: part.dropped()))

    def redone(self) -> np.ndarray:
        """How many gradients of each worker's batches came from a backup: [servers, workers]."""
        return np.stack(self._each(lambda part: part.redone()))

    def missing(self) -> list[Missing]:
        """How far each server's next update is, where backups redo batches."""
        return self._each(lambda part: part.missing())

    def withdraw(self, then: Sequence[int]) -> None:
        """Counts this worker's last gradient as dropped on each server that has made nothing of it.

        Args:
            then: Each server's count of updates when the gradient came.
        """
        self._each(lambda part: part.withdraw(then[part.number]))

    def _each(self, call):
        if len(self.parts) == 1:
            return [call(self.parts[0])]
        return list(self._threads.map(call, self.parts))
