"""All parameter servers together, as one worker uses them in `fit`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.addons.asynchronous.cluster import Cluster
from tfdist.addons.asynchronous.connection import ServerConnection
from tfdist.addons.asynchronous.errors import ParameterServerError
from tfdist.addons.asynchronous.hosted_model import HostedModel
from tfdist.addons.asynchronous.membership import Membership, wait
from tfdist.addons.asynchronous.server_part import DENSE, NONE, SPARSE
from tfdist.addons.asynchronous.speculation import BackupRound, round_of
from tfdist.addons.asynchronous.statistics import Staleness
from tfdist.data.random_state import global_seed, random_state, set_random_state
from tfdist.utils.checks import one_line

#: How long a read waits until all servers have made the same update, where a gradient requires that. One
#: server is behind while a gradient is being sent, and permanently if its worker dies then.
_MIXED_SECONDS = 10.0


class ParameterStore:
    """The servers, the other workers, and the models that are trained.

    Args:
        cluster: The servers and workers.
        max_staleness: The number of steps that a worker may be ahead of the slowest; None for any.
        delay_compensation: lambda of DC-ASGD; 0 for none.
        silent_seconds: The time without a heartbeat after which a worker is left out.
        watchdog_seconds: The longest time of a call of a server, and of a wait for the chief.
        backup_ranks: The number of gradients of a step that may come too late; None where each gradient
            makes an update.
        speculative: Whether the last workers redo the others' batches.

    Attributes:
        staleness: The staleness counted since the epoch began.
        failure: The error that ended a step in a call of a server.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        max_staleness: int | None,
        delay_compensation: float,
        silent_seconds: float,
        watchdog_seconds: float,
        backup_ranks: int | None = None,
        speculative: bool = False,
    ):
        self.cluster = cluster
        self._max_staleness, self._delay_compensation = max_staleness, delay_compensation
        self._seconds = watchdog_seconds
        self._quorum = None if backup_ranks is None else cluster.num_workers - backup_ranks
        self._speculative = speculative
        self.connections = [
            ServerConnection(index, address, watchdog_seconds)
            for index, address in enumerate(cluster.servers)
        ]
        self.members = Membership(
            self.connections[0],
            cluster.num_workers,
            cluster.index,
            silent_seconds,
            watchdog_seconds,
        )
        self.members.join()
        self._announcements = {
            name: self._make_announcement(name) for name in ("random-state", "model")
        }
        self._hosted: list[HostedModel] = []
        self._versions: list[int] = []
        self._then: dict[int, np.ndarray] = {}
        self._ahead = 0
        self._round = round_of(cluster.index, self._quorum, speculative)
        self._pushed: HostedModel | None = None
        self._is_fitting = False
        self.staleness = Staleness()
        self.failure: Exception | None = None

    @property
    def has_backup(self) -> bool:
        """Whether an update uses the gradients of the first workers."""
        return self._quorum is not None

    @property
    def shards(self) -> int | None:
        """The number of batches of a step among which a backup chooses; None for other workers."""
        return self._round.quorum if isinstance(self._round, BackupRound) else None

    @property
    def is_chief(self) -> bool:
        """Whether this worker initializes the servers' variables and writes files."""
        return self.cluster.index == 0

    def close(self) -> None:
        """Leaves the cluster."""
        self.members.leave()
        for connection in self.connections:
            connection.close()

    # -- announcements of the chief --------------------------------------------------------

    def _make_announcement(self, name: str):
        """Functions that read and write a variable of the first server, set by the chief."""
        connection = self.connections[0]
        with connection.building():
            handle = connection.variable(f"announcement/{name}", tf.string, [])
            feed = tf.compat.v1.placeholder(tf.string, [])
            exists = tf.raw_ops.VarIsInitializedOp(resource=handle)
            write = tf.raw_ops.AssignVariableOp(resource=handle, value=feed)
            read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.string)
        found, said = connection.function([exists], []), connection.function([read], [])
        tell = connection.function([write], [feed])

        def ask() -> tuple[int, Any]:
            """The `fit` of the announcement, 0 for none, and its value."""
            # JSON, because any client of TensorFlow's servers can write there, and pickles run code.
            return tuple(json.loads(bytes(said()[0]))) if found()[0] else (0, None)

        return ask, lambda fit, value: tell(json.dumps((fit, value)))

    def _agree(self, name: str, make: Callable[[], Any]) -> Any:
        """The value that the chief has made for this `fit`; the other workers wait for it.

        Returns:
            None on the chief that has made it, and on a worker that joins late.
        """
        ask, tell = self._announcements[name]
        fit = self.members.fit
        if self.is_chief:
            # A chief that was restarted finds its earlier announcement.
            said, value = ask()
            if said >= fit:
                return value if said == fit else None
            tell(fit, make())
            return None

        def is_said() -> bool:
            if ask()[0] >= fit:
                return True
            if self.members.is_gone(0):
                raise ParameterServerError(
                    "Worker 0, which initializes the parameters on the servers, is not running any more. "
                    "Restart the job."
                )
            return False

        wait(
            is_said,
            self._seconds,
            "worker 0, which initializes the parameters, to begin `fit`",
        )
        said, value = ask()
        return value if said == fit else None

    # -- fit --------------------------------------------------------------------------------

    def begin_fit(self) -> None:
        """Synchronizes the workers: all draw the same random numbers from here on."""
        self.failure = None
        self._round = round_of(self.cluster.index, self._quorum, self._speculative)
        self._pushed = None
        self._is_fitting = True
        self.members.start_fit()
        found = self._agree("random-state", lambda: (random_state(), global_seed()))
        if found is not None:
            state, seed = found
            if seed is not None and seed != global_seed():
                tf.random.set_seed(seed)
            set_random_state(state)

    def publish(self, hosted: HostedModel, initial_epoch: int) -> int | None:
        """Publishes the chief's variables to the servers; the others check that theirs match.

        Args:
            hosted: The model.
            initial_epoch: The initial epoch of the chief's `fit`.

        Returns:
            The chief's initial epoch on other workers, and on a restarted chief; None on a chief that
            has just begun.

        Raises:
            ValueError: This worker's model differs from the chief's.
        """

        def make() -> tuple[str, int]:
            hosted.publish()
            return hosted.signature, initial_epoch

        found = self._agree("model", make)
        if found is not None and found[0] != hosted.signature:
            raise ValueError(
                "All workers must create the same model with the same optimizer. Received: on worker "
                f"{self.cluster.index} {one_line(hosted.signature)}, on worker 0 {one_line(found[0])}."
            )
        self.refresh(hosted, with_optimizer=self.is_chief)
        return None if found is None else found[1]

    def host(self, model: keras.Model, states: Sequence[keras.Variable]) -> HostedModel:
        """The model on the servers, once it has all its variables."""
        for hosted in self._hosted:
            if hosted.model is model and hosted.optimizer is model.optimizer:
                return hosted
        hosted = HostedModel(
            self.connections,
            len(self._hosted),
            model,
            states,
            (self.cluster.index, self.cluster.num_workers),
            self._delay_compensation,
            self._quorum,
            self._speculative,
        )
        self._hosted.append(hosted)
        return hosted

    def refresh(self, hosted: HostedModel, *, with_optimizer: bool) -> None:
        """Copies the servers' values to this worker's variables."""
        variables = hosted.variables
        values, self._versions = hosted.pull(range(len(variables)))
        for index, value in values.items():
            variables[index].assign(value)
        if with_optimizer:
            state = hosted.optimizer.variables
            for place, value in hosted.pull_optimizer().items():
                state[place].assign(value)

    @property
    def is_fitting(self) -> bool:
        """Whether this worker is in a `fit`."""
        return self._is_fitting

    def start_counting(self) -> None:
        """Resets the staleness counts."""
        self.staleness = Staleness()

    def logs(self, hosted: HostedModel) -> dict[str, float]:
        """The entries that are added to Keras' logs of an epoch."""
        counts = {"steps": hosted.updates()}
        found = {
            "staleness_mean": self.staleness.mean,
            "staleness_max": float(self.staleness.largest),
        }
        if self._quorum is not None:
            counts["dropped"] = hosted.dropped()
            found["skipped_batches"] = float(self._round.skipped)
        if self._speculative:
            counts["redone"] = hosted.redone()
        return found | {
            f"{what}_of_worker_{i}": int(count)
            for what, each in counts.items()
            for i, count in enumerate(each.max(axis=0))
        }

    def stop_fit(self) -> None:
        """Records that this worker's `fit` has ended, also after an error."""
        if self._is_fitting:
            self._is_fitting = False
            if not isinstance(self.failure, ParameterServerError):
                self.members.write(finished=self.members.fit)

    def finish_fit(self, hosted: HostedModel) -> None:
        """Waits for the other live workers, and copies the final values."""
        self._wait_for_update()
        self.members.finish_fit(self._seconds)
        self.refresh(hosted, with_optimizer=self.is_chief)

    # -- a step ------------------------------------------------------------------------------

    def read_op(self, hosted: HostedModel, indices: Sequence[int]) -> None:
        """Adds to the step under construction: wait for this worker's turn, and read variables."""
        variables = hosted.variables
        dtypes = [tf.as_dtype(variables[index].dtype) for index in indices]

        def read():
            return self._guarded(self._read, hosted, indices)

        values = tf.numpy_function(read, [], dtypes)
        for index, value in zip(indices, values, strict=True):
            value.set_shape(tuple(variables[index].shape))
            variables[index].value.assign(value)

    def _read(self, hosted: HostedModel, indices: Sequence[int]) -> list[np.ndarray]:
        self._ahead = self.members.wait_for_turn(self._max_staleness)
        end = time.monotonic() + _MIXED_SECONDS
        values, self._versions = hosted.pull(indices)
        while not self._round.is_one_version(self._versions) and time.monotonic() < end:
            time.sleep(0.001)
            values, self._versions = hosted.pull(indices)
        first_state = len(hosted.parameters)
        self._then = {index: value for index, value in values.items() if index >= first_state}
        return [values[index] for index in indices]

    def read_rows_op(self, hosted: HostedModel, index: int, ids: tf.Tensor) -> None:
        """Adds to the step under construction: read the rows of a table that it looks up."""
        variable = hosted.parameters[index]

        def read(unique):
            return self._guarded(hosted.pull_rows, index, unique)

        unique = tf.unique(tf.reshape(tf.cast(ids, tf.int64), [-1])).y
        rows = tf.numpy_function(read, [unique], tf.as_dtype(variable.dtype))
        rows.set_shape([None, *tuple(variable.shape)[1:]])
        variable.value.scatter_update(tf.IndexedSlices(rows, unique))

    def write_op(self, hosted: HostedModel, grads: Sequence, parameters: Sequence) -> None:
        """Adds to the step under construction: send gradients, and the changes of the states."""
        places = {id(variable): index for index, variable in enumerate(hosted.parameters)}
        grads = hosted.clipped(grads)
        kinds = [NONE] * len(hosted.parameters)
        tensors: list[tf.Tensor] = []
        given: list[int] = []
        for gradient, variable in zip(grads, parameters, strict=True):
            index = places.get(id(variable))
            if index is None:
                raise NotImplementedError(
                    "ParameterServerStrategy does not support updates of variables other than the model's "
                    f"trainable ones. Received: {getattr(variable, 'path', variable)!r}."
                )
            if gradient is None:
                continue
            given.append(index)
            if isinstance(gradient, tf.IndexedSlices):
                kinds[index] = SPARSE
                tensors += [gradient.values, tf.cast(gradient.indices, tf.int64)]
            else:
                kinds[index] = DENSE
                tensors.append(tf.convert_to_tensor(gradient))
        rate = tf.cast(hosted.optimizer.learning_rate, tf.float32)
        states = [variable.value for variable in hosted.states]

        def write(rate, *values):
            return self._guarded(self._write, hosted, kinds, given, rate, values)

        tf.numpy_function(write, [rate, *tensors, *states], tf.int64)

    def _write(self, hosted: HostedModel, kinds, given, rate, values) -> np.int64:
        left = list(values)
        grads = {}
        for index in given:
            size = 2 if kinds[index] == SPARSE else 1
            grads[index] = tuple(left[:size])
            del left[:size]
        deltas = {}
        for index, value in enumerate(left, len(hosted.parameters)):
            if index in self._then and not np.array_equal(value, self._then[index]):
                deltas[index] = value - self._then[index]
        more = ([self.members.table_after], self.members.feeds, [*self.members.tick()])
        then, shard = [self._round.step] * len(self._versions), self._round.shard
        before, (table,) = hosted.push(kinds, grads, deltas, rate, more, then, shard)
        self._round.note_push(before)
        self._pushed = hosted
        self.members.see(table)
        self.staleness.count(
            max(now - then for now, then in zip(before, self._versions, strict=True))
        )
        return np.int64(0)

    # -- backup ranks ------------------------------------------------------------------------

    def begin_late(self, hosted: HostedModel, steps_per_epoch: int) -> int:
        """The number of epochs that this worker has missed, if it begins later than the others.

        Args:
            hosted: The model.
            steps_per_epoch: The number of batches of each worker.
        """
        if self._quorum is None:
            steps = int(hosted.updates()[0, self.cluster.index])
        else:
            # The step counts over all workers: its dataset must be at the position of the others'.
            steps = 0 if self._speculative else min(hosted.versions())
        epochs = steps // steps_per_epoch
        self._round.step = epochs * steps_per_epoch
        return epochs

    def is_behind(self) -> bool:
        """Whether this worker must skip its next batch, because the others have made that step.

        It returns once the update of its last step is made.
        """
        self._wait_for_update()
        return self._round.is_behind()

    def _wait_for_update(self) -> None:
        if self._quorum is not None and self._pushed is not None:
            self._guarded(self._round.wait, self._pushed, self.members, self._seconds)

    def skip(self) -> None:
        """Skips this worker's next batch."""
        self._round.skip()

    def next_shard(self) -> int | None:
        """The worker whose batch of this step a backup redoes next; None once the step is made.

        Raises:
            ParameterServerError: All workers have ended.
        """
        if not isinstance(self._round, BackupRound):
            raise RuntimeError("A worker that is not a backup cannot redo batches of others.")
        return self._round.next_shard(self._pushed, self.members)

    def _guarded(self, call, *arguments):
        """Stores errors of a call: TensorFlow does not pass on Python exceptions."""
        try:
            return call(*arguments)
        except Exception as error:
            self.failure = self.failure or error
            raise
