"""Wrote the archives beside it: `python -m tests.checkpoint.golden.write VERSION`.

It ran once for each folder: for `v1` with the last tfdist that wrote format 1, for `v2` with the first
that wrote format 2. KIND.tar.xz has a directory of checkpoints, and KIND.npz what one process then had,
for each variable in Keras' order.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.checkpoint.golden.models import KINDS, trained, values_of
from tfdist.testing import RankPool

HERE = Path(__file__).parent


def write(kind: str, folder: str) -> None:
    """Trains and saves, on the ranks of a mesh."""
    from tfdist import checkpoint

    saver = checkpoint.Checkpointer(folder, every_steps=2, asynchronous=False)
    trained(kind, KINDS[kind][1], [saver])


def write_alone(kind: str, folder: str) -> dict[str, np.ndarray]:
    """The same in one process without a strategy; and what the model has then."""
    from tfdist import checkpoint

    model = trained(kind, None)
    checkpoint.save(folder, model, step=2, state={"epoch": 1})
    return values_of(model)


def read(kind: str, folder: str) -> dict[str, np.ndarray]:
    """What one process has that restores it."""
    from tfdist import checkpoint

    model = trained(kind, None, seed=8)
    checkpoint.restore(folder, model)
    return values_of(model)


def main(version: str) -> None:
    archives = HERE / version
    archives.mkdir()
    with RankPool(1, "local") as one, RankPool(2, "tensorflow") as two:
        for kind, (_, mesh) in KINDS.items():
            with tempfile.TemporaryDirectory() as folder:
                if mesh is None:
                    values = one.run(write_alone, kind, folder, timeout=300)[0]
                else:
                    two.run(write, kind, folder, timeout=300)
                    values = one.run(read, kind, folder, timeout=300)[0]
                shutil.make_archive(str(archives / kind), "xztar", folder)
            np.savez_compressed(archives / f"{kind}.npz", **values)


if __name__ == "__main__":
    main(*sys.argv[1:])
