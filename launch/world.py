"""What a training of `tfdist-train` runs on: ranks and their strategy, or a TPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tfdist.launch.flag_values import YEAR, UsageError, as_given, refuse_ignored
from tfdist.launch.mesh_flags import MESH, ZERO, Layout
from tfdist.launch.tasks import DEFINE, VALUES

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = [
    "COMMUNICATION_DTYPE",
    "FLAGS",
    "STEPS_PER_EXECUTION",
    "STRATEGY",
    "World",
    "check_flags",
    "make_world",
]

STRATEGY = DEFINE.enum(
    "strategy",
    "auto",
    ["auto", "horovod", "multi_worker", "local", "tpu"],
    "Strategy; auto: by how the ranks were started",
)
_TPU = DEFINE.string("tpu", "local", "Name or address of the TPU; local: this machine's")
STEPS_PER_EXECUTION = DEFINE.integer(
    "steps_per_execution",
    1,
    "Steps per call of Keras [1; TPU: 32]",
    lower_bound=1,
    upper_bound=1 << 20,
)
_WATCHDOG = DEFINE.float(
    "watchdog_seconds",
    600.0,
    "Seconds until a stuck job ends; 0: never",
    lower_bound=0.0,
    upper_bound=YEAR,
)
COMMUNICATION_DTYPE = DEFINE.enum(
    "communication_dtype", "own", ["own", "bfloat16", "float16"], "Dtype that gradients are sent in"
)
FLAGS = (STRATEGY, _TPU, _WATCHDOG)


@dataclasses.dataclass(frozen=True)
class World:
    """What a training runs on.

    Attributes:
        strategy: Its strategy.
        size: How many ranks, or cores of a TPU.
        data: How many of them see samples of their own.
        is_chief: Whether this process talks to the user.
        words: What it is, in words.
        is_tpu: Whether it is a TPU: that wants batches of one size, and bfloat16.
        steps_per_execution: How many steps run without a look from Keras.
    """

    strategy: tf.distribute.Strategy
    size: int
    data: int
    is_chief: bool
    words: str
    is_tpu: bool
    steps_per_execution: int


def check_flags(layout: Layout) -> None:
    """Refuses flags that do not go together."""
    if STRATEGY.value != "tpu":
        refuse_ignored(VALUES, (_TPU,), "is for --strategy=tpu", f"--strategy={STRATEGY.value}")
        return
    refuse_ignored(VALUES, (_WATCHDOG, COMMUNICATION_DTYPE), "is for ranks", "--strategy=tpu")
    if layout.tensor > 1 or layout.pipeline > 1 or layout.zero_stage:
        given = as_given(VALUES, (*MESH, ZERO))
        raise UsageError(f"A TPU's cores are data-parallel. Received: --strategy=tpu {given}.")


def make_world(layout: Layout) -> World:
    """Meets the other ranks, or starts the TPU; a `UsageError` if the flags do not fit these."""
    if STRATEGY.value == "tpu":
        from tfdist.strategies import tpu
        from tfdist.strategies.tpu import NoTPUError

        try:
            strategy = tpu(_TPU.value)
        except NoTPUError as error:
            raise UsageError(
                f"--strategy=tpu: {error} Leave --strategy out to train without one."
            ) from error
        cores = strategy.num_replicas_in_sync
        steps = STEPS_PER_EXECUTION.value if STEPS_PER_EXECUTION.present else 32
        return World(strategy, cores, cores, True, f"{cores} core(s) of a TPU", True, steps)
    strategy = _ranks(layout)
    mesh = strategy.mesh
    axes = [f"{axis} {n}" for axis, n in mesh.shape.items() if n > 1]
    replicas = len(mesh.group(*mesh.row_axes))
    shown = f", {' x '.join(axes)}" if replicas != mesh.size else ""
    return World(
        strategy,
        mesh.size,
        replicas,
        strategy.is_chief,
        f"{mesh.size} rank(s) of {type(strategy).__name__}{shown}",
        False,
        STEPS_PER_EXECUTION.value,
    )


def _ranks(layout: Layout) -> Any:
    from tfdist import strategies

    kinds = {
        "horovod": strategies.HorovodStrategy,
        "multi_worker": strategies.MultiWorkerStrategy,
        "local": strategies.LocalStrategy,
    }
    make = kinds.get(STRATEGY.value, strategies.auto)
    try:
        return make(
            layout.mesh,
            zero_stage=layout.zero_stage,
            communication_dtype=None
            if COMMUNICATION_DTYPE.value == "own"
            else COMMUNICATION_DTYPE.value,
            watchdog_seconds=_WATCHDOG.value,
        )
    except (ValueError, ImportError) as error:
        given = as_given(VALUES, (STRATEGY, *MESH, ZERO)) or f"--strategy={STRATEGY.value}"
        raise UsageError(f"{given}: {error}") from error
