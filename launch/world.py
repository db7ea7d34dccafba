"""What a training of `tfdist-train` runs on: ranks and their strategy, or a TPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tfdist.launch.batch_shares_flag import check_batch_shares, make_batch_shares
from tfdist.launch.compression_flag import check_compression, make_compressor
from tfdist.launch.flag_values import (
    MOST_RANKS,
    YEAR,
    FlagDefiner,
    UsageError,
    as_given,
    refuse_ignored,
)
from tfdist.launch.mesh_flags import Layout, MeshFlags
from tfdist.runtime.tf_config import read_tf_config

if TYPE_CHECKING:
    import tensorflow as tf


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


class WorldFlags:
    """The flags of a program that say what it runs on.

    Args:
        define: Defines them.
        mesh: How the ranks are laid out.

    Attributes:
        steps_per_execution: The flag of the steps in one call.
        communication_dtype: The flag of the dtype that gradients are sent in.
        compression: The flag of what compresses them.
        deterministic: The flag of runs that repeat bit for bit.
        of_ranks: The others.
    """

    def __init__(self, define: FlagDefiner, mesh: MeshFlags):
        self._values, self._mesh = define.values, mesh
        self._strategy = define.enum(
            "strategy",
            "auto",
            ["auto", "horovod", "multi_worker", "local", "tpu", "parameter_server"],
            "Strategy; auto: by how the ranks were started",
        )
        self._tpu = define.string(
            "tpu", "local", "Name or address of the TPU; local: this machine's"
        )
        self.steps_per_execution = define.integer(
            "steps_per_execution",
            1,
            "Steps per call of Keras [1; TPU: 32, or an epoch's]",
            lower_bound=1,
            upper_bound=1 << 20,
        )
        self._watchdog = define.float(
            "watchdog_seconds",
            600.0,
            "Seconds until a stuck job ends; 0: never",
            lower_bound=0.0,
            upper_bound=YEAR,
        )
        self.communication_dtype = define.enum(
            "communication_dtype",
            "own",
            ["own", "bfloat16", "float16"],
            "Dtype that gradients are sent in",
        )
        self.compression = define.string(
            "compression", "none", "powersgd[:RANK], topk[:RATIO], onebit, int8 or int4"
        )
        self.deterministic = define.boolean(
            "deterministic", False, "The same numbers bit for bit in each run"
        )
        self._max_staleness = define.integer(
            "max_staleness",
            None,
            "Steps that a worker of parameter servers may be ahead [no bound]",
            lower_bound=0,
            upper_bound=1 << 20,
        )
        self._backup_ranks = define.integer(
            "backup_ranks",
            None,
            "Workers of parameter servers that an update does not wait for",
            lower_bound=0,
            upper_bound=MOST_RANKS,
        )
        self._speculative = define.boolean(
            "speculative", False, "Backup ranks redo the batches of slow workers"
        )
        self._bucket_mib = define.integer(
            "bucket_mib",
            4,
            "MiB of gradients that are sent at once",
            lower_bound=1,
            upper_bound=1 << 20,
        )
        self._batch_shares = define.string(
            "batch_shares", "equal", "Rows of a rank: equal, measured, or shares as 3,1"
        )
        self.of_ranks = (
            self._strategy,
            self._tpu,
            self._watchdog,
            self._max_staleness,
            self._backup_ranks,
            self._speculative,
            self._bucket_mib,
            self._batch_shares,
        )
        self._of_servers = (self._max_staleness, self._backup_ranks, self._speculative)
        self._of_collectives = (
            self.communication_dtype,
            self.compression,
            self.deterministic,
            self._bucket_mib,
            self._batch_shares,
        )

    @property
    def is_tpu(self) -> bool:
        """Whether a TPU is asked for."""
        return self._strategy.value == "tpu"

    @property
    def has_servers(self) -> bool:
        """Whether parameters are on servers, by the flag or by how this process was started."""
        if self._strategy.value == "auto":
            try:
                config = read_tf_config()
            except ValueError:
                return False  # The strategy says what is wrong with it.
            return config is not None and bool(config.servers)
        return self._strategy.value == "parameter_server"

    def planned(self, dtype: str) -> dict[str, Any]:
        """What the planner is told: fields of `tfdist.addons.planner.Limits`, for a policy of dtypes."""
        found: dict[str, Any] = {}
        if self.compression.value != "none":
            found["zero_stages"] = (0, 1, 2)
        if self.communication_dtype.value != "own" and dtype not in ("bfloat16", "float16"):
            found["compression"] = 2.0
        return found

    def check(self, layout: Layout) -> None:
        """Refuses flags that do not go together."""
        check_compression(self.compression.name, self.compression.value)
        check_batch_shares(self._batch_shares.name, self._batch_shares.value)
        if self.compression.value != "none" and layout.zero_stage == 3:
            raise UsageError(
                "--compression is for --zero_stage=0 to 2: ZeRO-3 sums gradients layer by layer. Received: "
                f"--compression={self.compression.value} --zero_stage=3."
            )
        if self.has_servers:
            self._check_servers(layout)
        else:
            received = f"--strategy={self._strategy.value}"
            refuse_ignored(
                self._values, self._of_servers, "is for --strategy=parameter_server", received
            )
        if not self.is_tpu:
            received = f"--strategy={self._strategy.value}"
            refuse_ignored(self._values, (self._tpu,), "is for --strategy=tpu", received)
            return
        for_ranks = (self._watchdog, *self._of_collectives)
        refuse_ignored(self._values, for_ranks, "is for ranks", "--strategy=tpu")
        split = max(layout.tensor, layout.context, layout.pipeline) > 1
        if split or layout.zero_stage:
            given = as_given(self._values, (*self._mesh.mesh, self._mesh.zero))
            raise UsageError(f"A TPU's cores are data-parallel. Received: --strategy=tpu {given}.")

    def _check_servers(self, layout: Layout) -> None:
        received = "parameter servers"
        refuse_ignored(self._values, self._of_collectives, "is for ranks", f"with {received}")
        if self._speculative.value and not self._backup_ranks.value:
            raise UsageError("--speculative requires --backup_ranks. Received: no --backup_ranks.")
        split = max(layout.tensor, layout.context, layout.pipeline, layout.expert) > 1
        if split or layout.zero_stage:
            given = as_given(self._values, (*self._mesh.mesh, self._mesh.zero))
            raise UsageError(
                "Workers of parameter servers divide the data alone. Received: "
                f"--strategy={self._strategy.value} {given}. Leave the latter out, or start the ranks "
                "without --ps."
            )

    def make(self, layout: Layout) -> World:
        """Meets the other ranks, or starts the TPU; a `UsageError` if the flags do not fit these."""
        if self.is_tpu:
            return self._make_tpu()
        if self.has_servers:
            return self._make_servers()
        strategy = self._make_ranks(layout)
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
            self.steps_per_execution.value,
        )

    def _make_tpu(self) -> World:
        from tfdist.strategies import tpu
        from tfdist.strategies.tpu import NoTPUError

        try:
            strategy = tpu(self._tpu.value)
        except NoTPUError as error:
            raise UsageError(
                f"--strategy=tpu: {error} Leave --strategy out to train without one."
            ) from error
        cores = strategy.num_replicas_in_sync
        given = self.steps_per_execution
        steps = given.value if given.present else 32
        return World(strategy, cores, cores, True, f"{cores} core(s) of a TPU", True, steps)

    def _make_servers(self) -> World:
        from tfdist.addons.asynchronous import ParameterServerError, ParameterServerStrategy

        try:
            strategy = ParameterServerStrategy(
                max_staleness=self._max_staleness.value,
                backup_ranks=self._backup_ranks.value,
                speculative=self._speculative.value,
                watchdog_seconds=self._watchdog.value or YEAR,
            )
        except (ValueError, ParameterServerError) as error:
            raise UsageError(f"--strategy={self._strategy.value}: {error}") from error
        size = strategy.num_workers
        words = f"{size} worker(s) of {type(strategy).__name__}"
        # Each update has the batch of one worker, and its rate.
        return World(
            strategy, size, 1, strategy.is_chief, words, False, self.steps_per_execution.value
        )

    def _make_ranks(self, layout: Layout) -> Any:
        from tfdist import strategies

        kinds = {
            "horovod": strategies.HorovodStrategy,
            "multi_worker": strategies.MultiWorkerStrategy,
            "local": strategies.LocalStrategy,
        }
        make = kinds.get(self._strategy.value, strategies.auto)
        dtype = self.communication_dtype.value
        try:
            return make(
                layout.mesh,
                zero_stage=layout.zero_stage,
                communication_dtype=None if dtype == "own" else dtype,
                compression=make_compressor(self.compression.value),
                batch_shares=make_batch_shares(self._batch_shares.value),
                watchdog_seconds=self._watchdog.value,
                deterministic=self.deterministic.value,
                bucket_mib=self._bucket_mib.value,
            )
        except (ValueError, ImportError) as error:
            shown = (self._strategy, *self._mesh.mesh, self._mesh.zero, self._batch_shares)
            given = as_given(self._values, shown) or f"--strategy={self._strategy.value}"
            raise UsageError(f"{given}: {error}") from error
