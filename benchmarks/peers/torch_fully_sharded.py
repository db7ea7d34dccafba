"""PyTorch's FSDP2: each block's parameters are gathered as one."""

from __future__ import annotations

from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .serving import Settings, Training
from .torch_training import StepTraining, count, make_model, make_optimizer, meet, plain_step


def prepare(settings: Settings) -> Training:
    """Builds this rank's shards."""
    meet(settings)
    model, inputs, labels = make_model(settings)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())
    step = plain_step(model, optimizer, inputs, labels)
    return StepTraining(step, count(model))
