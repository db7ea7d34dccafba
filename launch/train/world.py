"""The devices of a training run: ranks and their strategy, or a TPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tfdist.launch.flags import options
from tfdist.launch.flags.batch_shares import check_batch_shares, make_batch_shares
from tfdist.launch.flags.compression import check_compression, make_compressor
from tfdist.launch.flags.mesh import Layout, MeshOptions
from tfdist.launch.flags.options import Flags, names
from tfdist.launch.flags.values import (
    MOST_RANKS,
    YEAR,
    FlagDefiner,
    UsageError,
    as_given,
    refuse_ignored,
)
from tfdist.runtime.tf_config import read_tf_config

if TYPE_CHECKING:
    import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class World:
    """The devices of a training run.

    Attributes:
        strategy: The strategy.
        size: Number of ranks, or of cores of a TPU.
        data: Number of ranks or cores that receive different samples.
        is_chief: Whether this process prints results.
        words: A description.
        is_tpu: Whether it is a TPU, which requires batches of one size and bfloat16.
        steps_per_execution: Steps per call of Keras.
    """

    strategy: tf.distribute.Strategy
    size: int
    data: int
    is_chief: bool
    words: str
    is_tpu: bool
    steps_per_execution: int


class WorldFlags:
    """The flags of a program for its devices and strategy.

    Args:
        define: The definer of the program's flags.
        mesh: The flags of the mesh.

    Attributes:
        steps_per_execution: The flag for the steps per call.
        communication_dtype: The flag for the dtype of communicated gradients.
        compression: The flag for gradient compression.
        deterministic: The flag for bitwise reproducible runs.
        of_ranks: The other flags.
    """

    def __init__(self, define: FlagDefiner, mesh: Flags[MeshOptions]):
        self._values, self._mesh = define.values, mesh
        self._strategy = define.enum(
            "strategy",
            "auto",
            ["auto", "horovod", "multi_worker", "local", "tpu", "parameter_server"],
            "Strategy; auto: by the launcher of the ranks",
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
            "Dtype of communicated gradients",
        )
        self.compression = define.string(
            "compression", "none", "powersgd[:RANK], topk[:RATIO], onebit, int8 or int4"
        )
        self.deterministic = define.boolean(
            "deterministic", False, "Bitwise identical results in each run"
        )
        self._max_staleness = define.integer(
            "max_staleness",
            None,
            "Steps that a worker of parameter servers may be ahead [no limit]",
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
            "speculative", False, "Backup ranks repeat the batches of slow workers"
        )
        self._bucket_mib = define.integer(
            "bucket_mib",
            4,
            "Size of a gradient bucket in MiB",
            lower_bound=1,
            upper_bound=1 << 20,
        )
        self._batch_shares = define.string(
            "batch_shares", "equal", "Rows per rank: equal, measured, or shares such as 3,1"
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
        """Whether a TPU is requested."""
        return self._strategy.value == "tpu"

    @property
    def has_servers(self) -> bool:
        """Whether parameters are on servers, by the flag or by TF_CONFIG."""
        if self._strategy.value == "auto":
            try:
                config = read_tf_config()
            except ValueError:
                return False  # The strategy reports what is wrong with it.
            return config is not None and bool(config.servers)
        return self._strategy.value == "parameter_server"

    def planned(self, dtype: str) -> dict[str, Any]:
        """The arguments of `tfdist.addons.planner.Limits` for these flags and a dtype policy."""
        found: dict[str, Any] = {}
        if self.compression.value != "none":
            found["zero_stages"] = (0, 1, 2)
        if self.communication_dtype.value != "own" and dtype not in ("bfloat16", "float16"):
            found["compression"] = 2.0
        return found

    def check(self, layout: Layout) -> None:
        """Reject flags that are incompatible."""
        check_compression(self.compression.name, self.compression.value)
        check_batch_shares(self._batch_shares.name, self._batch_shares.value)
        if self.compression.value != "none" and layout.zero_stage == 3:
            raise UsageError(
                "--compression is not supported with --zero_stage=3. Use --zero_stage=2. Received: "
                f"--compression={self.compression.value} --zero_stage=3."
            )
        if self.has_servers:
            self._check_servers(layout)
        else:
            received = f"--strategy={self._strategy.value}"
            refuse_ignored(
                self._values, self._of_servers, "requires --strategy=parameter_server", received
            )
        if not self.is_tpu:
            received = f"--strategy={self._strategy.value}"
            refuse_ignored(self._values, (self._tpu,), "requires --strategy=tpu", received)
            return
        for_ranks = (self._watchdog, *self._of_collectives)
        refuse_ignored(self._values, for_ranks, "is not supported on a TPU", "--strategy=tpu")
        split = max(layout.tensor, layout.context, layout.pipeline) > 1
        if split or layout.zero_stage:
            given = options.as_given(self._mesh.read(), names(MeshOptions))
            raise UsageError(
                "Model parallelism and ZeRO are not supported on a TPU. Received: --strategy=tpu "
                f"{given}."
            )

    def _check_servers(self, layout: Layout) -> None:
        received = "parameter servers"
        refuse_ignored(
            self._values, self._of_collectives, f"is not supported with {received}", received
        )
        if self._speculative.value and not self._backup_ranks.value:
            raise UsageError("--speculative requires --backup_ranks. Received: no --backup_ranks.")
        split = max(layout.tensor, layout.context, layout.pipeline, layout.expert) > 1
        if split or layout.zero_stage:
            given = options.as_given(self._mesh.read(), names(MeshOptions))
            raise UsageError(
                "Model parallelism and ZeRO are not supported with parameter servers. Received: "
                f"--strategy={self._strategy.value} {given}. Omit the latter, or start the ranks without "
                "--ps."
            )

    def make(self, layout: Layout) -> World:
        """Connect to the other ranks, or initialize the TPU.

        Raises:
            UsageError: The flags do not match the ranks or the TPU.
        """
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
                f"--strategy=tpu failed: {error} Omit --strategy to train without a TPU."
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
            raise UsageError(f"--strategy={self._strategy.value} failed: {error}") from error
        size = strategy.num_workers
        words = f"{size} worker(s) of {type(strategy).__name__}"
        # Each update uses the batch of one worker, so the learning rate is not scaled.
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
            given = as_given(self._values, (self._strategy, self._batch_shares))
            given = (
                f"{given} {options.as_given(self._mesh.read(), names(MeshOptions))}".strip()
                or f"--strategy={self._strategy.value}"
            )
            raise UsageError(f"{given} cannot be used: {error}") from error
