"""A worker's position among updates of the first gradients: in time, late, or waiting."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tfdist.addons.asynchronous.errors import ParameterServerError
from tfdist.addons.asynchronous.hosted_model import HostedModel
from tfdist.addons.asynchronous.membership import Membership, wait

#: How often a waiting worker checks whether an update is made, and whether enough workers are left.
LONGEST_LOOK_SECONDS = 0.005
MEMBERS_SECONDS = 0.5


class Round:
    """The steps of one worker in one `fit`, by the servers' update counts.

    The gradient of a worker's step s counts for update s alone. Otherwise the gradient of a step that
    others have made could count for a later update, and there would be updates after the last step.

    Args:
        quorum: The number of gradients of an update.
        shard: The worker from whose batches the gradients are computed.

    Attributes:
        quorum: See above.
        shard: See above.
        known: Each server's update count, as last read by this worker.
        step: The number of its batches that were computed or skipped.
        skipped: The number of batches that were skipped.
        is_last: Whether too many workers have reached the end of their batches for another update. The
            others skip their remaining batches.
    """

    def __init__(self, quorum: int, shard: int = 0):
        self.quorum, self.shard = quorum, shard
        self.known: list[int] = []
        self.step = self.skipped = 0
        self.is_last = False

    def is_one_version(self, versions: Sequence[int]) -> bool:
        """Whether a gradient may be computed from values of servers with these update counts."""
        del versions
        return True

    def is_enough(self, workers: np.ndarray) -> bool:
        """Whether some workers are enough for an update.

        Args:
            workers: [workers]: whether each takes part.
        """
        return int(workers.sum()) >= self.quorum

    def note_push(self, before: Sequence[int]) -> None:
        """Records that a gradient was sent, and arrived at the update counts `before`."""
        self.known = list(before)
        self.step += 1

    def is_over(self, versions: Sequence[int]) -> bool:
        """Whether all servers have made the update of the last step."""
        self.known = list(versions)
        return min(versions) >= self.step

    def wait(self, hosted: HostedModel, members: Membership, seconds: float) -> None:
        """Waits until the update of the last gradient is made, or can no longer be made.

        Args:
            hosted: The model on the servers.
            members: The participating workers.
            seconds: The longest time to wait.

        Raises:
            ParameterServerError: Too few workers are left, or too few gradients arrive in time.
        """
        if self.is_last:
            return
        looked = time.monotonic()

        def is_over() -> bool:
            nonlocal looked
            if self.is_over(hosted.versions()):
                return True
            if time.monotonic() - looked < MEMBERS_SECONDS:
                return False
            looked = time.monotonic()
            present, fitting = members.present()
            if not self.is_enough(present):
                raise ParameterServerError(
                    f"An update requires {self.quorum} gradients. Received: {present.sum()} workers left. "
                    "Restart the job with more `backup_ranks`, or with the workers that ended."
                )
            if not self.is_enough(fitting) and not self.is_over(hosted.versions()):
                hosted.withdraw([self.step - 1] * len(self.known))
                self.is_last = True
            return self.is_last

        wait(is_over, seconds, "enough gradients for an update", LONGEST_LOOK_SECONDS)

    def is_behind(self) -> bool:
        """Whether the update of the next step was made without this worker, or none will be made."""
        return self.is_last or min(self.known, default=0) > self.step

    def skip(self) -> None:
        """Skips the next batch."""
        self.step += 1
        self.skipped += 1
