"""The devices of a training run: ranks and their strategy, or a TPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tfdist.launch.flags.batch_shares import check_batch_shares, make_batch_shares
from tfdist.launch.flags.compression import check_compression, make_compressor
from tfdist.launch.flags.mesh import Layout, MeshOptions
from tfdist.launch.flags.options import as_given, names, option, refuse_ignored
from tfdist.launch.flags.values import MOST_RANKS, YEAR, UsageError
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


_OF_SERVERS = ("max_staleness", "backup_ranks", "speculative")
_OF_COLLECTIVES = (
    "communication_dtype",
    "compression",
    "deterministic",
    "bucket_mib",
    "batch_shares",
)
#: The options that describe the ranks, in the order of the help.
OF_RANKS = ("strategy", "tpu", "watchdog_seconds", *_OF_SERVERS, "bucket_mib", "batch_shares")


@dataclasses.dataclass(frozen=True)
class StrategyOptions:
    """The options of the devices and of their strategy; see the flags of the same names."""

    strategy: str = option(
        "auto",
        "Strategy; auto: by the launcher of the ranks",
        choices=("auto", "horovod", "multi_worker", "local", "tpu", "parameter_server"),
    )
    tpu: str = option("local", "Name or address of the TPU; local: this machine's")
    steps_per_execution: int | None = option(
        None,
        "Steps per call of Keras [1; TPU: 32, or an epoch's]",
        least=1,
        most=1 << 20,
        shown=1,
    )
    watchdog_seconds: float = option(
        600.0, "Seconds until a stuck job ends; 0: never", least=0.0, most=YEAR
    )
    communication_dtype: str = option(
        "own", "Dtype of communicated gradients", choices=("own", "bfloat16", "float16")
    )
    compression: str = option("none", "powersgd[:RANK], topk[:RATIO], onebit, int8 or int4")
    deterministic: bool = option(False, "Bitwise identical results in each run")
    max_staleness: int | None = option(
        None,
        "Steps that a worker of parameter servers may be ahead [no limit]",
        least=0,
        most=1 << 20,
    )
    backup_ranks: int | None = option(
        None,
        "Workers of parameter servers that an update does not wait for",
        least=0,
        most=MOST_RANKS,
    )
    speculative: bool = option(False, "Backup ranks repeat the batches of slow workers")
    bucket_mib: int | None = option(
        None, "Size of a gradient bucket in MiB [4, on GPUs 64]", least=1, most=1 << 20
    )
    batch_shares: str = option("equal", "Rows per rank: equal, measured, or shares such as 3,1")

    @property
    def is_tpu(self) -> bool:
        """Whether a TPU is requested."""
        return self.strategy == "tpu"

    @property
    def has_servers(self) -> bool:
        """Whether parameters are on servers, by the flag or by TF_CONFIG."""
        if self.strategy == "auto":
            try:
                config = read_tf_config()
            except ValueError:
                return False  # The strategy reports what is wrong with it.
            return config is not None and bool(config.servers)
        return self.strategy == "parameter_server"

    def planned(self, dtype: str) -> dict[str, Any]:
        """The arguments of `tfdist.addons.planner.Limits` for these options and a dtype policy."""
        found: dict[str, Any] = {}
        if self.compression != "none":
            found["zero_stages"] = (0, 1, 2)
        if self.communication_dtype != "own" and dtype not in ("bfloat16", "float16"):
            found["compression"] = 2.0
        return found

    def check(self, layout: Layout, mesh: MeshOptions) -> None:
        """Reject options that are incompatible."""
        check_compression("compression", self.compression)
        check_batch_shares("batch_shares", self.batch_shares)
        if self.compression != "none" and layout.zero_stage == 3:
            raise UsageError(
                "--compression is not supported with --zero_stage=3. Use --zero_stage=2. Received: "
                f"--compression={self.compression} --zero_stage=3."
            )
        if self.has_servers:
            self._check_servers(layout, mesh)
        else:
            why = "requires --strategy=parameter_server"
            refuse_ignored(self, _OF_SERVERS, why, f"--strategy={self.strategy}")
        if not self.is_tpu:
            received = f"--strategy={self.strategy}"
            refuse_ignored(self, ["tpu"], "requires --strategy=tpu", received)
            return
        for_ranks = ("watchdog_seconds", *_OF_COLLECTIVES)
        refuse_ignored(self, for_ranks, "is not supported on a TPU", "--strategy=tpu")
        split = max(layout.tensor, layout.context, layout.pipeline) > 1
        if split or layout.zero_stage:
            raise UsageError(
                "Model parallelism and ZeRO are not supported on a TPU. Received: --strategy=tpu "
                f"{as_given(mesh, names(mesh))}."
            )

    def _check_servers(self, layout: Layout, mesh: MeshOptions) -> None:
        received = "parameter servers"
        refuse_ignored(self, _OF_COLLECTIVES, f"is not supported with {received}", received)
        if self.speculative and not self.backup_ranks:
            raise UsageError("--speculative requires --backup_ranks. Received: no --backup_ranks.")
        split = max(layout.tensor, layout.context, layout.pipeline, layout.expert) > 1
        if split or layout.zero_stage:
            raise UsageError(
                "Model parallelism and ZeRO are not supported with parameter servers. Received: "
                f"--strategy={self.strategy} {as_given(mesh, names(mesh))}. Omit the latter, or "
                "start the ranks without --ps."
            )

    def make(self, layout: Layout, mesh: MeshOptions) -> World:
        """Connect to the other ranks, or initialize the TPU.

        Raises:
            UsageError: The options do not match the ranks or the TPU.
        """
        if self.is_tpu:
            return self._make_tpu()
        if self.has_servers:
            return self._make_servers()
        strategy = self._make_ranks(layout, mesh)
        ranks = strategy.mesh
        axes = [f"{axis} {n}" for axis, n in ranks.shape.items() if n > 1]
        replicas = len(ranks.group(*ranks.row_axes))
        shown = f", {' x '.join(axes)}" if replicas != ranks.size else ""
        return World(
            strategy,
            ranks.size,
            replicas,
            strategy.is_chief,
            f"{ranks.size} rank(s) of {type(strategy).__name__}{shown}",
            False,
            self.steps_per_execution or 1,
        )

    def _make_tpu(self) -> World:
        from tfdist.strategies import tpu
        from tfdist.strategies.tpu import NoTPUError

        try:
            strategy = tpu(self.tpu)
        except NoTPUError as error:
            raise UsageError(
                f"--strategy=tpu failed: {str(error).rstrip('.')}. Omit --strategy to train without a TPU."
            ) from error
        cores = strategy.num_replicas_in_sync
        steps = self.steps_per_execution or 32
        return World(strategy, cores, cores, True, f"{cores} core(s) of a TPU", True, steps)

    def _make_servers(self) -> World:
        from tfdist.addons.asynchronous import ParameterServerError, ParameterServerStrategy

        try:
            strategy = ParameterServerStrategy(
                max_staleness=self.max_staleness,
                backup_ranks=self.backup_ranks,
                speculative=self.speculative,
                watchdog_seconds=self.watchdog_seconds or YEAR,
            )
        except (ValueError, ParameterServerError) as error:
            raise UsageError(f"--strategy={self.strategy} failed: {error}") from error
        size = strategy.num_workers
        words = f"{size} worker(s) of {type(strategy).__name__}"
        # Each update uses the batch of one worker, so the learning rate is not scaled.
        return World(
            strategy, size, 1, strategy.is_chief, words, False, self.steps_per_execution or 1
        )

    def _make_ranks(self, layout: Layout, mesh: MeshOptions) -> Any:
        from tfdist import strategies

        kinds = {
            "horovod": strategies.HorovodStrategy,
            "multi_worker": strategies.MultiWorkerStrategy,
            "local": strategies.LocalStrategy,
        }
        make = kinds.get(self.strategy, strategies.auto)
        dtype = self.communication_dtype
        try:
            return make(
                layout.mesh,
                zero_stage=layout.zero_stage,
                communication_dtype=None if dtype == "own" else dtype,
                compression=make_compressor(self.compression),
                batch_shares=make_batch_shares(self.batch_shares),
                watchdog_seconds=self.watchdog_seconds,
                deterministic=self.deterministic,
                bucket_mib=self.bucket_mib,
            )
        except (ValueError, ImportError) as error:
            given = as_given(self, ["strategy", "batch_shares"])
            given = (
                f"{given} {as_given(mesh, names(mesh))}".strip() or f"--strategy={self.strategy}"
            )
            raise UsageError(f"{given} cannot be used: {error}") from error
