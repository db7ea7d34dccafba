"""Which checkpoints are kept."""

from __future__ import annotations

from tfdist.checkpoint.manifest import complete_checkpoints, folders, step_of
from tfdist.checkpoint.storage import Storage, StorageError

__all__ = ["Retention"]


class Retention:
    """Drops a training's old checkpoints, once newer ones are complete.

    Args:
        directory: Where they are.
        keep_last: How many of the newest are kept.
        keep_every: Those of each so manieth step are kept for good; None for none.
    """

    def __init__(self, directory: str, keep_last: int, keep_every: int | None):
        self._directory, self._keep_last, self._keep_every = directory, keep_last, keep_every
        self._is_chief = False
        self._known: set[str] = set()
        self._torn: set[str] = set()

    def begin(self, is_chief: bool) -> None:
        """Looks at what is there before the training writes; only the chief does anything."""
        self._is_chief = is_chief
        if is_chief:
            found = folders(self._directory)
            self._known = {folder for folder, is_complete in found.items() if is_complete}
            self._torn = found.keys() - self._known

    def completed(self, path: str) -> None:
        """Drops what a new checkpoint makes superfluous.

        Raises:
            StorageError: Another training writes into the same directory. Nothing is dropped then.
        """
        if not self._is_chief:
            return
        newest = path.rpartition("/")[2]
        self._known.add(newest)
        found = complete_checkpoints(self._directory)
        # An earlier run may have been about to complete one.
        self._known |= self._torn & set(found)
        self._torn -= self._known
        foreign = sorted(set(found) - self._known)
        if foreign:
            raise StorageError(
                f"Another training saves into {self._directory}: {', '.join(foreign)} came from "
                "there. Give each its own directory."
            )
        # What has a later step is of a line that was given up, as of a damaged checkpoint.
        line = [folder for folder in found if step_of(folder) <= step_of(newest)]
        for folder in line[self._keep_last :]:
            if self._keep_every is None or step_of(folder) % self._keep_every:
                Storage(f"{self._directory}/{folder}").delete()
                self._known.discard(folder)
        # What an earlier run of this training left unfinished.
        for folder in self._torn:
            Storage(f"{self._directory}/{folder}").delete()
        self._torn.clear()
