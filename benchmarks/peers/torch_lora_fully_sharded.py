"""transformers and peft under PyTorch's FSDP2: each block's parameters are gathered as one."""

from __future__ import annotations

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .serving import Settings, Training, own_rows
from .torch_gpt2 import counts, give_values, logits_of, make_gpt2
from .torch_training import StepTraining, make_decaying_optimizer, meet, plain_step


def prepare(settings: Settings) -> Training:
    """Builds this rank's shards."""
    meet(settings)
    inputs, labels = (torch.from_numpy(array).long() for array in own_rows(settings))
    model = make_gpt2(settings.sizes)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.base_model.model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    give_values(model)
    step = plain_step(logits_of(model), make_decaying_optimizer(model), inputs, labels)
    return StepTraining(step, *counts(model))
