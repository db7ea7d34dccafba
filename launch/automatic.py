"""`tfdist-train --plan=auto`: the layout that the planner finds for the model and the ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.launch.flag_values import UsageError, input_file
from tfdist.launch.mesh_flags import Layout
from tfdist.runtime.horovod_variables import started_by_horovod
from tfdist.runtime.tf_config import read_tf_config

if TYPE_CHECKING:
    from tfdist.addons import planner

#: What `tfdist-plan calibrate` writes where no flag says otherwise.
_FILE = "machine.json"


@dataclasses.dataclass(frozen=True)
class Automatic:
    """What was chosen.

    Attributes:
        layout: As flags would say it.
        recompute: The policy of recompute.
        words: The layout, what it takes, and by which file.
    """

    layout: Layout
    recompute: str
    words: str


def machine_file(value: str) -> Path:
    """The file that `--plan=auto[:FILE]` names.

    Raises:
        UsageError: It names none that can be read.
    """
    word, colon, name = value.partition(":")
    if word != "auto" or (colon and not name.strip()):
        raise UsageError(
            f"--plan must be auto, or auto:FILE with a file of `tfdist-plan calibrate`. Received: --plan={value}."
        )
    path = Path(os.path.expanduser(name or _FILE))
    if not path.exists():
        raise UsageError(
            f"--plan={value}: {path} does not exist; `tfdist-plan calibrate --output={path}` writes it."
        )
    input_file("plan", str(path), f"{word}:" if colon else "")
    return path


def number_of_ranks() -> int:
    """How many ranks the launcher has started, by the variables of this process.

    Raises:
        UsageError: They are malformed.
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
    """The fastest layout of a model that this program can run, of what its flags leave open.

    Args:
        value: The flag's.
        transformer: The model.
        batch: Samples of an update.
        ranks: Ranks that were started.
        limits: What is not open, as `tfdist.addons.planner.Limits` has it.

    Raises:
        UsageError: The file is no calibration, or no layout fits.
    """
    # The planner takes a while to import, which only this flag needs.
    from tfdist.addons import planner
    from tfdist.addons.planner.calibration import read_machine

    path = machine_file(value)
    try:
        machine = read_machine(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plan={value}: {error}") from None
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
        raise UsageError(f"--plan={value}: {error}") from None
    if not found.best:
        raise UsageError(
            f"--plan={value}: no layout on {ranks} ranks divides an update of {batch} samples and fits."
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
