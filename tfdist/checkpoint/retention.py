"""Which checkpoints are kept."""

from __future__ import annotations

import posixpath

from tfdist.checkpoint.directory import folders, is_folder, is_unfinished
from tfdist.checkpoint.errors import CheckpointError, StorageError
from tfdist.checkpoint.files import regular_size
from tfdist.checkpoint.manifest import Manifest, step_of
from tfdist.checkpoint.storage import Storage
from tfdist.runtime.directories import is_address
from tfdist.utils import checks


class Retention:
    """Deletes a training's old checkpoints after a newer one was written and verified.

    Only the chief uses it.

    Args:
        directory: The directory of the checkpoints.
        keep_last: The number of the newest checkpoints to keep; None for all.
        keep_every: Checkpoints of steps that are multiples of this are never deleted; None for none.
    """

    def __init__(self, directory: str, keep_last: int | None, keep_every: int | None):
        checks.integer("keep_last", keep_last, minimum=1, optional=True, also="all of them")
        checks.integer("keep_every", keep_every, minimum=1, optional=True, also="none of them")
        self._directory, self._keep_last, self._keep_every = directory, keep_last, keep_every
        self._known: set[str] = set()
        self._torn: set[str] = set()
        self._whole: dict[str, bool] = {}

    def begin(self) -> None:
        """Records which checkpoints there are before the training writes any.

        Deletes those that an earlier run left unfinished, which may have filled the disk. Requires the
        lock on the directory, so that no other run is about to complete them.

        Raises:
            StorageError: The directory cannot be read.
        """
        found = folders(self._directory)
        self._known = {folder for folder, is_complete in found.items() if is_complete}
        self._whole.clear()
        self._torn.clear()
        for folder in found.keys() - self._known:
            storage = self._storage(folder)
            if is_unfinished(storage):
                storage.delete()
            elif is_folder(storage.path):
                # It may have lost its manifest: the user may want to inspect it until there is a
                # newer checkpoint.
                self._torn.add(folder)

    def completed(self, path: str) -> None:
        """Deletes the checkpoints that a new one, which was verified, replaces.

        Raises:
            StorageError: Another training writes into the same directory. Nothing is deleted then.
        """
        newest = path.rpartition("/")[2]
        self._known.add(newest)
        self._whole[newest] = True
        found = {folder for folder, is_complete in folders(self._directory).items() if is_complete}
        if foreign := sorted(found - self._known - self._torn):
            raise StorageError(
                f"Another training saves into {self._directory}, which must not be shared. Received: "
                f"its checkpoints {', '.join(foreign)}. Use a separate directory for each training."
            )
        for folder in [*self._superfluous(newest, found), *(self._torn - found)]:
            self._storage(folder).delete()
            self._known.discard(folder)
        self._torn.clear()

    def _superfluous(self, newest: str, found: set[str]) -> list[str]:
        """Checkpoints older than the intact ones that are kept."""
        if self._keep_last is None:
            return []
        last = step_of(newest) or 0
        # A later step belongs to an abandoned run, as after a return to an older checkpoint.
        line = [
            (step, folder)
            for folder in found - {newest}
            if (step := step_of(folder)) is not None and step <= last
        ]
        kept, dropped = 1, []
        for step, folder in sorted(line, reverse=True):
            if kept >= self._keep_last:
                if self._keep_every is None or step % self._keep_every:
                    dropped.append(folder)
            elif self._is_whole(folder):
                kept += 1
        return dropped

    def _is_whole(self, folder: str) -> bool:
        """Whether the files of a checkpoint have the sizes in its manifest.

        This process has verified its own checkpoints. One of an earlier run that lacks a file must not
        count as one that is kept.
        """
        if folder not in self._whole:
            storage = self._storage(folder)
            try:
                manifest = Manifest.read(storage)
            except CheckpointError:
                manifest = None
            files = {} if manifest is None or is_address(storage.path) else manifest.files
            self._whole[folder] = manifest is not None and all(
                regular_size(storage.path, name) == size for name, (size, _) in files.items()
            )
        return self._whole[folder]

    def _storage(self, folder: str) -> Storage:
        return Storage(posixpath.join(self._directory, folder))
