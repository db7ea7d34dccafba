"""Where a worker stands among the updates that the first gradients make: with them, late, or waiting."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tfdist.addons.asynchronous.errors import ParameterServerError
from tfdist.addons.asynchronous.hosted_model import HostedModel
from tfdist.addons.asynchronous.membership import Membership, wait

#: How often a worker that waits looks whether an update is made, and whether enough workers are left.
LONGEST_LOOK_SECONDS = 0.005
MEMBERS_SECONDS = 0.5


class Round:
    """The steps of one worker in one `fit`, by the servers' counts of updates.

    The gradient of a worker's step s counts for the update s alone. Else one whose step others have made
    could be in time for a later update, and there would be updates after the last step.

    Args:
        quorum: How many gradients make an update.
        shard: Whose batches the worker's gradients are of.

    Attributes:
        quorum: See above.
        shard: See above.
        known: Each server's count of updates, as far as this worker knows.
        step: How many of its batches are done with: computed, or left out.
        skipped: How many were left out.
        is_last: Whether so many workers have come to the end of their batches that the others are too
            few for an update. They leave out what they have left.
    """

    def __init__(self, quorum: int, shard: int = 0):
        self.quorum, self.shard = quorum, shard
        self.known: list[int] = []
        self.step = self.skipped = 0
        self.is_last = False

    def is_one_version(self, versions: Sequence[int]) -> bool:
        """Whether a gradient may be computed from what servers held after some counts of updates."""
        del versions
        return True

    def is_enough(self, workers: np.ndarray) -> bool:
        """Whether some workers are enough for an update; [workers]: which take part."""
        return int(workers.sum()) >= self.quorum

    def note_push(self, before: Sequence[int]) -> None:
        """A gradient was sent, and came after each server's count of updates `before`."""
        self.known = list(before)
        self.step += 1

    def is_over(self, versions: Sequence[int]) -> bool:
        """Whether the update of the last step is made, on all servers."""
        self.known = list(versions)
        return min(versions) >= self.step

    def wait(self, hosted: HostedModel, members: Membership, seconds: float) -> None:
        """Returns once the update is made that the last gradient was for, or never will be.

        Args:
            hosted: The model on the servers.
            members: Who takes part.
            seconds: For how long it waits.

        Raises:
            ParameterServerError: Too few workers are left, or none of them sends a gradient.
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
                    f"An update takes {self.quorum} gradients, and {present.sum()} workers are left. "
                    "Start the job again, with more `backup_ranks`, or with the workers that ended."
                )
            if not self.is_enough(fitting) and not self.is_over(hosted.versions()):
                hosted.withdraw([self.step - 1] * len(self.known))
                self.is_last = True
            return self.is_last

        wait(is_over, seconds, "Too few gradients come for an update", LONGEST_LOOK_SECONDS)

    def is_behind(self) -> bool:
        """Whether the update of the next step was made without this worker, or none will be made."""
        return self.is_last or min(self.known, default=0) > self.step

    def skip(self) -> None:
        """Leaves out the next batch."""
        self.step += 1
        self.skipped += 1
