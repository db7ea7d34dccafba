"""The options of `tfdist-train`, and their checks."""

from __future__ import annotations

import dataclasses
import functools
import os

from tfdist.launch.flags.checkpoint import CheckpointOptions
from tfdist.launch.flags.local_sgd import LocalSGDOptions
from tfdist.launch.flags.mesh import Layout, MeshOptions
from tfdist.launch.flags.monitor import MonitorOptions
from tfdist.launch.flags.optimizer import OptimizerOptions, read_recompute
from tfdist.launch.flags.options import names, option, refuse_ignored
from tfdist.launch.flags.values import UsageError
from tfdist.launch.plan.automatic import Automatic, machine_file, number_of_ranks
from tfdist.launch.run.num_ranks import MEANT_RANKS
from tfdist.launch.train.curves import check_plot
from tfdist.launch.train.images import Images
from tfdist.launch.train.language import Language, LanguageOptions
from tfdist.launch.train.recommendation import Recommendation
from tfdist.launch.train.tasks import Settings, Task
from tfdist.launch.train.world import StrategyOptions, World

_MODELS = [model for task in (Images, Language, Recommendation) for model in task.models]


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """The options of the program; see the flags of the same names, and the options of each subject."""

    language: LanguageOptions = dataclasses.field(default_factory=LanguageOptions)
    model: str = option("convnet", "Model to train", choices=_MODELS)
    dataset: str | None = option(None, "digits or from TFDS; gpt: pydoc, text:FILE; dlrm: clicks")
    batch_size: int | None = option(
        None, "Samples per step on all ranks [128; gpt: 4; dlrm: 256]", least=1, most=1 << 20
    )
    epochs: int | None = option(None, "Epochs to train [15; gpt: 5; dlrm: 1]", least=1)
    learning_rate: float | None = option(
        None, "Learning rate per rank [0.001; gpt: 0.003; dlrm: 0.002]", least=1e-9, most=1000.0
    )
    lr_scaling: str = option(
        "none", "Scaling of the rate with the ranks", choices=("none", "linear", "sqrt")
    )
    warmup_epochs: float = option(
        0.0, "Epochs to warm up to the scaled rate", least=0.0, most=10_000.0
    )
    recompute: str = option(
        "none", "none, selective, sqrt, every_layer, optimal, or bytes to store: budget:2GiB"
    )
    seed: int = option(0, "Seed of weights and data order", least=0, most=2**32 - 1)
    data_dir: str | None = option(None, "Folder of the datasets")
    checkpoints: CheckpointOptions = dataclasses.field(default_factory=CheckpointOptions)
    elastic: str = option(
        "keep",
        "Global batch and rate when the number of ranks changes",
        choices=("keep", "scale"),
    )
    threads: int = option(0, "Threads per rank; 0: TensorFlow's choice", least=0, most=4096)
    verbose: int = option(2, "0: silent, 1: progress bar, 2: one line per epoch", least=0, most=2)
    plot: str | None = option(None, "File for a plot of the learning curves: curves.png")
    mesh: MeshOptions = dataclasses.field(default_factory=MeshOptions)
    plan: str | None = option(None, "auto[:FILE]: choose the mesh; see tfdist-plan calibrate")
    world: StrategyOptions = dataclasses.field(default_factory=StrategyOptions)
    local: LocalSGDOptions = dataclasses.field(default_factory=LocalSGDOptions)
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    monitor: MonitorOptions = dataclasses.field(default_factory=MonitorOptions)

    def check(self) -> tuple[Task, Settings]:
        """Check the options before the rendezvous of the ranks.

        Returns:
            The task of the model, and the settings that all tasks share.

        Raises:
            UsageError: Options are incompatible, or the task does not support them.
        """
        tasks: tuple[Task, ...] = (Images(), Language(self.language), Recommendation())
        task = next(task for task in tasks if self.model in task.models)
        if not isinstance(task, Language):
            why, received = "requires --model=gpt", f"--model={self.model}"
            refuse_ignored(self.language, names(LanguageOptions), why, received)
        settings = Settings(
            model=self.model,
            dataset=self.dataset or task.dataset,
            batch_size=self.batch_size or task.batch_size,
            epochs=self.epochs or task.epochs,
            learning_rate=self.learning_rate or task.learning_rate,
            seed=self.seed,
            layout=self.mesh.layout() if self.plan is None else self.planned.layout,
            data_dir=self.data_dir,
        )
        if self.lr_scaling == "none":
            refuse_ignored(self, ["warmup_epochs"], "requires --lr_scaling", "--lr_scaling=none")
        is_tpu, has_servers = self.world.is_tpu, self.world.has_servers
        self.world.check(settings.layout, self.mesh)
        self.local.check(
            settings.model,
            zero_stage=settings.layout.zero_stage,
            is_tpu=is_tpu,
            has_servers=has_servers,
            divides_tables=task.divides_tables,
        )
        self.optimizer.check(is_tpu=is_tpu, has_sync=self.local.is_given)
        read_recompute("recompute", self.recompute)
        check_plot("plot", self.plot)
        self.monitor.check(is_in_step=not (is_tpu or has_servers))
        task.check(settings)
        self.checkpoints.check(is_tpu=is_tpu, has_servers=has_servers)
        return task, settings

    @functools.cached_property
    def planned(self) -> Automatic:
        """The layout that `--plan` chooses.

        Raises:
            UsageError: The layout is set manually, or the plan is not supported.
        """
        value = self.plan or ""
        given = f"--plan={value}"
        why = "cannot be combined with --plan, which chooses it"
        refuse_ignored(self, [*names(MeshOptions), "recompute"], why, given)
        machine_file(value)
        if self.model not in Language.models:
            raise UsageError(
                f"--plan requires --model=gpt. Received: {given} --model={self.model}."
            )
        if self.world.is_tpu or self.world.has_servers:
            raise UsageError(
                "--plan is not supported on a TPU or with parameter servers. Received: "
                f"{given} with one of them."
            )
        ranks = number_of_ranks()
        batch = (self.batch_size or Language.batch_size) * self.optimizer.accumulate
        limits = self.optimizer.planned("AdamW")
        limits |= self.world.planned(limits["dtype"])
        if self.local.is_given:
            limits["zero_stages"] = (0,)
        return self.language.planned(value, batch, ranks, limits)

    def make_optimizer(self, own: str, rate, **arguments):
        """The optimizer of the task or the options, wrapped for local steps and loss scaling."""
        return self.optimizer.scaled(self.local.around(self.optimizer.make(own, rate, **arguments)))

    def replicas_and_batch(self, default: int, layout: Layout, on: World) -> tuple[int, int]:
        """The replicas that the learning rate is scaled for, and the global batch.

        An elastic job may run on more or fewer ranks than requested by `tfdist-run -np`.

        Args:
            default: The task's number of samples per step.
            layout: The layout of the ranks.
            on: The devices.

        Raises:
            UsageError: The batch cannot be split.
        """
        data = on.data
        meant = int(os.environ.get(MEANT_RANKS, on.size)) * data // on.size
        if on.is_tpu:
            batch_size = self.batch_size or -(-default // data) * data
            if batch_size % data:
                raise UsageError(
                    f"--batch_size must be a multiple of the {data} cores of the TPU. Received: "
                    f"--batch_size={batch_size}."
                )
            return data, batch_size
        if self.world.has_servers:
            return 1, layout.batch_size(self.batch_size, default, 1)
        if self.elastic == "keep":
            return meant, layout.batch_size(self.batch_size, default, data)
        batch_size = layout.batch_size(self.batch_size, default, meant)
        if batch_size * data % meant:
            raise UsageError(
                f"--batch_size must be a multiple of the requested data axis of {meant} with "
                f"--elastic=scale. Received: --batch_size={batch_size}."
            )
        return data, batch_size * data // meant
