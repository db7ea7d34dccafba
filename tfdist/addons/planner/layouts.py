"""Layouts: how a model and its batch are split over ranks."""

from __future__ import annotations

import dataclasses
import math

from tfdist.mesh import DEFAULT_ORDER, Mesh
from tfdist.pipeline.schedules import SCHEDULES
from tfdist.utils import checks

#: Fastest-varying axis first: its neighbors are closest in rank.
AXES = tuple(reversed(DEFAULT_ORDER))

#: The order of axes in descriptions, code and flags.
_SHOWN = ("data", "expert", "context", "pipeline", "tensor")

RECOMPUTE = ("none", "selective", "sqrt", "every_layer")


@dataclasses.dataclass(frozen=True)
class Precision:
    """Bytes per parameter and activation under a dtype policy.

    Attributes:
        compute: The dtype of matrix products.
        activation: Bytes of an activation.
        parameter: Bytes of a stored parameter.
        gradient: Bytes of its gradient.
        master: Bytes of the optimizer's master copy, sharded with the optimizer state.
        copy: Bytes of a cast copy for products, stored from the forward to the backward pass.
        sent: Bytes of a gradient sent to other ranks.
        state: Bytes of each number of the optimizer state.
    """

    compute: str
    activation: int
    parameter: int
    gradient: int
    master: int
    copy: int
    sent: int
    state: int


#: By name: Keras' policies; and 16-bit parameters with a float32 copy in the optimizer, as in
#: DeepSpeed (Rajbhandari et al. 2020, section 3.1: 2 + 2 + 4 bytes and the moments), and with
#: gradients accumulated in float32, as in Megatron-LM. Keras' optimizers keep their state in the dtype of
#: the parameter.
PRECISIONS: dict[str, Precision] = {
    "float32": Precision("float32", 4, 4, 4, 0, 0, 4, 4),
    "mixed_bfloat16": Precision("bfloat16", 2, 4, 4, 0, 2, 4, 4),
    "mixed_float16": Precision("float16", 2, 4, 4, 0, 2, 4, 4),
    "bfloat16": Precision("bfloat16", 2, 2, 2, 0, 0, 2, 2),
    "float16": Precision("float16", 2, 2, 2, 0, 0, 2, 2),
    "deepspeed": Precision("float16", 2, 2, 2, 4, 0, 2, 4),
    "megatron": Precision("bfloat16", 2, 2, 4, 4, 0, 4, 4),
}

#: Precisions of other systems, which tfdist plans but does not run.
FOREIGN = {"deepspeed": "DeepSpeed", "megatron": "Megatron-LM"}

#: Numbers of optimizer state per parameter; Adafactor's factors for the rows and columns of a matrix are
#: not counted.
OPTIMIZERS = {
    "sgd": 0,
    "adafactor": 0,
    "momentum": 1,
    "rmsprop": 1,
    "lion": 1,
    "adam": 2,
    "adamw": 2,
    "lamb": 2,
}


def state_bytes(optimizer: str, dtype: str, *, ema: bool = False) -> int:
    """Bytes of optimizer state per parameter, including the master copy.

    Args:
        optimizer: A name of `OPTIMIZERS`.
        dtype: A name of `PRECISIONS`.
        ema: Whether the optimizer keeps a moving average of the parameters.
    """
    precision = PRECISIONS[dtype]
    return precision.state * (OPTIMIZERS[optimizer] + ema) + precision.master


@dataclasses.dataclass(frozen=True)
class Layout:
    """A combination of parallelism, ZeRO, recompute and precision.

    Attributes:
        data: Size of the data axis.
        expert: Size of the expert axis.
        context: Size of the context axis.
        pipeline: Size of the pipeline axis.
        tensor: Size of the tensor axis.
        zero_stage: ZeRO stage, 0 to 3; see docs/memory.md.
        recompute: "none"; "selective": the attention core; "sqrt": segments of sqrt(L) blocks;
            "every_layer": each block.
        schedule: Pipeline schedule; see `tfdist.pipeline.make_schedule`.
        chunks: Stages per rank, for the interleaved schedule.
        num_microbatches: Micro-batches that a rank's batch is split into.
        accumulation: Steps whose gradients are accumulated before an update.
        dtype: A name of `PRECISIONS`.
        optimizer: A name of `OPTIMIZERS`: "adam", "momentum", "sgd" and others.
        ema: Whether the optimizer keeps a moving average of the parameters.
        sequence_parallel: Whether activations that the tensor axis does not split are split along
            the sequence.
        compression: Compression ratio of gradients; 1 for no compression.
        recompute_messages: Whether recompute repeats the collectives of the tensor axis. tfdist
            stores their results and skips the product before them; Megatron-LM repeats the whole
            block.
        gathers_again: Whether the backward pass repeats the all-gather of inputs that sequence
            parallelism splits, as Megatron-LM does. tfdist stores the gathered inputs.
        split_messages: Whether a pipeline's messages are split over the tensor ranks and gathered
            by the receivers (Narayanan et al. 2021, section 4.1: scatter/gather).

    Raises:
        ValueError: A size is not positive, a name is unknown, or two values are incompatible.
    """

    data: int = 1
    expert: int = 1
    context: int = 1
    pipeline: int = 1
    tensor: int = 1
    zero_stage: int = 0
    recompute: str = "none"
    schedule: str = "1f1b"
    chunks: int = 1
    num_microbatches: int = 1
    accumulation: int = 1
    dtype: str = "float32"
    optimizer: str = "adam"
    ema: bool = False
    sequence_parallel: bool = False
    compression: float = 1.0
    recompute_messages: bool = False
    gathers_again: bool = False
    split_messages: bool = False

    def __post_init__(self):
        sizes = ("data", "expert", "context", "pipeline", "tensor", "chunks")
        for name in (*sizes, "num_microbatches", "accumulation"):
            checks.integer(name, getattr(self, name), minimum=1)
        checks.integer("zero_stage", self.zero_stage, minimum=0, maximum=3)
        checks.one_of("recompute", self.recompute, RECOMPUTE)
        checks.one_of("schedule", self.schedule, SCHEDULES)
        checks.one_of("dtype", self.dtype, PRECISIONS)
        checks.one_of("optimizer", self.optimizer, OPTIMIZERS)
        switches = (
            "ema",
            "sequence_parallel",
            "recompute_messages",
            "gathers_again",
            "split_messages",
        )
        for name in switches:
            checks.boolean(name, getattr(self, name))
        checks.number("compression", self.compression, minimum=1)
        if self.chunks > 1 and self.schedule != "interleaved":
            raise ValueError(
                "`chunks` above 1 requires the interleaved schedule. Received: "
                f"schedule={self.schedule!r}, chunks={self.chunks}."
            )
        if self.pipeline > 1 and self.schedule == "interleaved":
            if self.chunks < 2:
                raise ValueError(
                    "The interleaved schedule requires at least 2 `chunks`. Received: "
                    f"chunks={self.chunks}."
                )
            if self.num_microbatches % self.pipeline:
                raise ValueError(
                    "The interleaved schedule requires `num_microbatches` to be a multiple of the "
                    f"pipeline size. Received: num_microbatches={self.num_microbatches}, "
                    f"pipeline={self.pipeline}."
                )
        if self.pipeline == 1 and self.num_microbatches > 1:
            raise ValueError(
                "`num_microbatches` above 1 requires a pipeline. Received: pipeline=1, "
                f"num_microbatches={self.num_microbatches}. Use `accumulation` instead."
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.data * self.expert * self.context * self.pipeline * self.tensor

    @property
    def mesh(self) -> Mesh:
        """The mesh of its axes."""
        return Mesh(**{axis: getattr(self, axis) for axis in AXES})

    @property
    def precision(self) -> Precision:
        """Bytes per parameter and activation."""
        return PRECISIONS[self.dtype]

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state per parameter, including the master copy."""
        return state_bytes(self.optimizer, self.dtype, ema=self.ema)

    @property
    def kind(self) -> str:
        """The axes with more than one rank, as text."""
        return " x ".join(self.used_axes) or "one rank"

    @property
    def used_axes(self) -> dict[str, int]:
        """The axes of several ranks, and how many these are."""
        sizes = {axis: getattr(self, axis) for axis in _SHOWN}
        return {axis: size for axis, size in sizes.items() if size > 1}

    def microbatch_rows(self, global_batch: int) -> int:
        """Rows of a micro-batch on a rank.

        Raises:
            ValueError: The batch is not divisible by the number of its parts.
        """
        parts = self.data * self.expert * self.num_microbatches * self.accumulation
        rows, left = divmod(global_batch, parts)
        if left or not rows:
            raise ValueError(
                "`global_batch` must be divisible by data x expert x num_microbatches x accumulation. "
                f"Received: global_batch={global_batch}, {self.data} x {self.expert} x "
                f"{self.num_microbatches} x {self.accumulation}."
            )
        return rows

    def stride(self, axis: str) -> int:
        """Difference in rank between neighbors on an axis."""
        return math.prod(getattr(self, name) for name in AXES[: AXES.index(axis)])

    def members_per_host(self, axes: tuple[str, ...], ranks_per_host: int) -> int:
        """The largest number of ranks of a group over some axes that share a host."""
        found = stride = 1
        for axis in AXES:
            size = getattr(self, axis)
            if axis in axes and stride < ranks_per_host:
                found *= min(size, max(ranks_per_host // stride, 1))
            stride *= size
        return found

    def words(self) -> str:
        """A short description of the layout."""
        axes = [f"{axis} {size}" for axis, size in self.used_axes.items()]
        more = []
        if self.pipeline > 1:
            chunks = f" v{self.chunks}" if self.chunks > 1 else ""
            more.append(f"{self.schedule}{chunks} m{self.num_microbatches}")
        if self.accumulation > 1:
            more.append(f"accumulate {self.accumulation}")
        if self.zero_stage:
            more.append(f"ZeRO-{self.zero_stage}")
        if self.recompute != "none":
            more.append(f"recompute {self.recompute}")
        if self.sequence_parallel and self.tensor > 1:
            more.append("sequence parallel")
        return ", ".join([" x ".join(axes) or "one rank", *more])
