"""Which checkpoints are kept."""

from __future__ import annotations

import posixpath

from tfdist.checkpoint.directory import folders, is_folder, is_unfinished
from tfdist.checkpoint.errors import CheckpointError, StorageError
from tfdist.checkpoint.files import regular_size
from tfdist.checkpoint.manifest import Manifest, step_of
from tfdist.checkpoint.storage import Storage
from tfdist.utils import checks


class Retention:
    """Drops a training's old checkpoints, once a newer one was read back whole.

    Args:
        directory: Where they are.
        keep_last: How many of the newest are kept; None for all.
        keep_every: Those of every step that this divides are kept for good; None for none.
    """

    def __init__(self, directory: str, keep_last: int | None, keep_every: int | None):
        checks.integer("keep_last", keep_last, minimum=1, optional=True, also="all of them")
        checks.integer("keep_every", keep_every, minimum=1, optional=True, also="none of them")
        self._directory, self._keep_last, self._keep_every = directory, keep_last, keep_every
        self._is_chief = False
        self._known: set[str] = set()
        self._torn: set[str] = set()
        self._whole: dict[str, bool] = {}

    def begin(self, is_chief: bool) -> None:
        """Looks at what is there before the training writes; only the chief does anything.

        What an earlier run left unfinished is deleted, so that a disk that it filled has room. The
        lock on the directory is to be held: no other run is then about to complete it.

        Raises:
            StorageError: The directory cannot be read.
        """
        self._is_chief = is_chief
        if not is_chief:
            return
        found = folders(self._directory)
        self._known = {folder for folder, is_complete in found.items() if is_complete}
        self._whole.clear()
        self._torn.clear()
        for folder in found.keys() - self._known:
            storage = Storage(self._path(folder))
            if is_unfinished(storage):
                storage.delete()
            elif is_folder(storage.path):
                # It may have lost its manifest: the user may want to look at it until a newer
                # checkpoint is there.
                self._torn.add(folder)

    def completed(self, path: str) -> None:
        """Drops what a new checkpoint, which was read back whole, makes superfluous.

        Raises:
            StorageError: Another training writes into the same directory. Nothing is dropped then.
        """
        if not self._is_chief:
            return
        newest = path.rpartition("/")[2]
        self._known.add(newest)
        self._whole[newest] = True
        found = [folder for folder, is_complete in folders(self._directory).items() if is_complete]
        foreign = sorted(set(found) - self._known - self._torn)
        if foreign:
            raise StorageError(
                f"Another training saves into {self._directory}: {', '.join(foreign)} came from "
                "there. Give each its own directory."
            )
        for folder in self._superfluous(newest, found):
            Storage(self._path(folder)).delete()
            self._known.discard(folder)
        for folder in self._torn - set(found):
            Storage(self._path(folder)).delete()
        self._torn.clear()

    def _superfluous(self, newest: str, found: list[str]) -> list[str]:
        """What is older than as many whole checkpoints as are kept."""
        if self._keep_last is None:
            return []
        last = step_of(newest) or 0
        # What has a later step is of a line that was given up, as of a damaged checkpoint.
        line = [
            (step, folder)
            for folder in found
            if folder != newest and (step := step_of(folder)) is not None and step <= last
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
        """Whether the files of a checkpoint have the sizes that its manifest says.

        What this process wrote it has read back; of an earlier run's, one that lacks a file is not
        to count for one that is kept.
        """
        if folder not in self._whole:
            storage = Storage(self._path(folder))
            try:
                manifest = Manifest.read(storage)
            except CheckpointError:
                manifest = None
            files = {} if manifest is None else manifest.files or {}
            self._whole[folder] = manifest is not None and (
                not storage.is_local
                or all(
                    regular_size(storage.path, name) == size for name, (size, _) in files.items()
                )
            )
        return self._whole[folder]

    def _path(self, folder: str) -> str:
        return posixpath.join(self._directory, folder)
