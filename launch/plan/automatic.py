"""`tfdist-train --plan=auto`: the layout that the planner chooses for the model and the ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.launch.flags.mesh import Layout
from tfdist.launch.flags.values import UsageError, input_file
from tfdist.runtime.horovod_variables import started_by_horovod
from tfdist.runtime.tf_config import read_tf_config

if TYPE_CHECKING:
    from tfdist.addons import planner

#: The default output of `tfdist-plan calibrate`.
_FILE = "machine.json"


@dataclasses.dataclass(frozen=True)
class Automatic:
    """The choice of the planner.

    Attributes:
        layout: The layout, as of the flags of the mesh.
        recompute: The recompute policy.
        words: A description of the layout, its cost, and the file of the machine.
    """

    layout: Layout
    recompute: str
    words: str


def machine_file(value: str) -> Path:
    """The file of `--plan=auto[:FILE]`.

    Raises:
        UsageError: The value is malformed, or the file cannot be read.
    """
    word, colon, name = value.partition(":")
    if word != "auto" or (colon and not name.strip()):
        raise UsageError(
            f"--plan must be auto, or auto:FILE with a file of `tfdist-plan calibrate`. Received: --plan={value}."
        )
    path = Path(os.path.expanduser(name or _FILE))
    if not path.exists():
        raise UsageError(
            f"--plan={value} requires {path}, which does not exist. Run `tfdist-plan calibrate --output={path}`."
        )
    input_file("plan", str(path), f"{word}:" if colon else "")
    return path


def number_of_ranks() -> int:
    """The number of ranks that the launcher has started, from environment variables.

    Raises:
        UsageError: The variables are malformed.
    """
    try:
        if (started := started_by_horovod()) is not None:
            return started[1]
        config = read_tf_config()
    except ValueError as error:
        raise UsageError(str(error)) from None
    return 1 if config is None else max(len(config.workers), 1)


def chosen(
    value: str,
    transformer: planner.Transformer,
    batch: int,
    ranks: int,
    limits: Mapping[str, Any],
) -> Automatic:
    """Choose the fastest layout of a model that the other flags allow.

    Args:
        value: The value of the flag.
        transformer: The model.
        batch: Samples of an update.
        ranks: Number of ranks.
        limits: Arguments of `tfdist.addons.planner.Limits` from other flags.

    Raises:
        UsageError: The file is not a calibration, or no layout fits.
    """
    # Imported only for this flag, because the import takes a while.
    from tfdist.addons import planner
    from tfdist.addons.planner.calibration import read_machine

    path = machine_file(value)
    try:
        machine = read_machine(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plan={value} cannot be used: {error}") from None
    try:
        found = planner.plan(
            transformer,
            machine,
            global_batch=batch,
            ranks=ranks,
            limits=planner.Limits(**limits),
            best=1,
        )
    except ValueError as error:  # The machine has no rate for the dtype.
        raise UsageError(f"--plan={value} cannot be used: {error}") from None
    if not found.best:
        raise UsageError(
            f"--plan={value} did not find a layout that fits an update of {batch} samples on {ranks} ranks."
        )
    best = found.best[0]
    layout = best.layout
    return Automatic(
        Layout(
            layout.mesh,
            num_microbatches=layout.num_microbatches,
            schedule=layout.schedule,
            chunks=layout.chunks if layout.chunks > 1 else None,
            zero_stage=layout.zero_stage,
        ),
        layout.recompute,
        f"{best} (by {path})",
    )
