"""The positions of workers and backups among updates of one gradient of each worker's batch."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tfdist.addons.asynchronous.errors import ParameterServerError
from tfdist.addons.asynchronous.hosted_model import HostedModel
from tfdist.addons.asynchronous.membership import Membership
from tfdist.addons.asynchronous.round import LONGEST_LOOK_SECONDS, MEMBERS_SECONDS, Round
from tfdist.addons.asynchronous.speculative_part import SELDOM, Missing


def round_of(worker: int, quorum: int | None, speculative: bool) -> Round:
    """The steps of a worker in one `fit`.

    Args:
        worker: The index of the worker.
        quorum: The number of gradients of an update; None where each gradient makes an update.
        speculative: Whether the workers from `quorum` on redo the others' batches.
    """
    quorum = quorum or 1
    if not speculative:
        return Round(quorum)
    if worker < quorum:
        return SpeculativeRound(quorum, worker)
    return BackupRound(quorum, worker - quorum)


class SpeculativeRound(Round):
    """The steps of a worker with batches, each of which contributes one gradient."""

    def is_one_version(self, versions: Sequence[int]) -> bool:
        """See `Round`."""
        return len(set(versions)) == 1

    def is_enough(self, workers: np.ndarray) -> bool:
        """See `Round`: one backup is enough for all batches whose workers have ended."""
        return bool(workers[: self.quorum].all() or workers[self.quorum :].any())


class BackupRound(SpeculativeRound):
    """The steps of a backup, which redoes in each step the batches that are most likely to be late.

    First it redoes the batch of the slowest worker, at once. When that gradient is sent and others are
    still missing, it also redoes at once those of workers that are seldom in time. The others soon arrive,
    so a backup waits for them for the time that it takes to redo one.

    Args:
        quorum: The number of workers that have batches.
        number: The index of this backup: several backups begin with batches of different workers.
    """

    def __init__(self, quorum: int, number: int):
        super().__init__(quorum, number % quorum)
        self._number = number
        self._has_sent = False
        self._begun: float | None = None
        self._patience = 0.0
        self._looked = time.monotonic()

    def note_push(self, before: Sequence[int]) -> None:
        """See `Round`: a backup may send several gradients in a step."""
        self.known = list(before)

    def wait(self, hosted: HostedModel, members: Membership, seconds: float) -> None:
        """See `Round`: a backup continues until the update is made, so there is nothing to wait for."""

    def next_shard(self, hosted: HostedModel | None, members: Membership) -> int | None:
        """The worker whose batch of this step to redo next; None once the update is made.

        Args:
            hosted: The model on the servers; None before this worker's first gradient, which shows
                what a step returns.
            members: The participating workers.

        Raises:
            ParameterServerError: All workers with batches have ended.
        """
        now = time.monotonic()
        if self._begun is not None:
            self._patience, self._begun = now - self._begun, None
        if hosted is None:
            return None if self._has_sent else self._redo(self.shard)
        delay = 0.001
        while True:
            found = hosted.missing()
            self.known = [each.version for each in found]
            if min(self.known) > self.step or self._is_at_end(hosted, members, found):
                self.step += 1
                self.skipped += not self._has_sent
                self._has_sent = False
                return None
            shard = self._choose(found, time.monotonic() - now >= self._patience)
            if shard is not None:
                return self._redo(shard)
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_LOOK_SECONDS)

    def _redo(self, shard: int) -> int:
        self.shard, self._has_sent, self._begun = shard, True, time.monotonic()
        return shard

    def _choose(self, found: Sequence[Missing], is_overdue: bool) -> int | None:
        behind = [each for each in found if each.version == self.step]
        missing = np.any([each.missing for each in behind], axis=0)
        slowness = np.max([each.slowness for each in behind], axis=0)
        if self._has_sent and not is_overdue:
            missing &= slowness > SELDOM
        slowest = [shard for shard in np.argsort(-slowness, kind="stable") if missing[shard]]
        return int(slowest[self._number % len(slowest)]) if slowest else None

    def _is_at_end(
        self, hosted: HostedModel, members: Membership, found: Sequence[Missing]
    ) -> bool:
        """Whether the workers with batches have ended their `fit`, and wait for no update."""
        if self.is_last or time.monotonic() - self._looked < MEMBERS_SECONDS:
            return self.is_last
        self._looked = time.monotonic()
        present, fitting = (each[: self.quorum] for each in members.present())
        if fitting.any():
            return False
        # Gradients that they sent before they ended have arrived by now.
        found = hosted.missing()
        self.known = [each.version for each in found]
        if min(self.known) > self.step:
            return True
        if not present.any():
            raise ParameterServerError(
                f"The {self.quorum} workers with batches did not finish `fit` before they ended. "
                "Restart the job."
            )
        self.is_last = all(each.missing.all() for each in found)
        return self.is_last
