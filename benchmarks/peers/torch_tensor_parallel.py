"""PyTorch's tensor parallelism over DTensor: columns, rows, vocabulary, and the loss over its parts."""

from __future__ import annotations

from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from .serving import Settings, Training
from .torch_models import GPT
from .torch_training import (
    StepTraining,
    count,
    make_optimizer,
    meet,
    split_loss_step,
    whole_batch,
)


def prepare(settings: Settings) -> Training:
    """Builds this rank's part of each layer."""
    meet(settings)
    inputs, labels = whole_batch(settings)
    model = GPT(settings.sizes)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for number in range(len(model.blocks)):
        plan |= {
            f"blocks.{number}.qkv": ColwiseParallel(),
            f"blocks.{number}.out": RowwiseParallel(),
            f"blocks.{number}.up": ColwiseParallel(),
            f"blocks.{number}.down": RowwiseParallel(),
        }
    parallelize_module(model, mesh, plan)
    # Both are split by the vocabulary, so they can be one again.
    head, embedding = model.get_submodule("head"), model.get_submodule("embedding")
    head.weight = embedding.weight
    optimizer = make_optimizer(model.parameters())
    step = split_loss_step(model, optimizer, inputs, labels)
    return StepTraining(step, count(model))
