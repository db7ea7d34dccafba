"""transformers and peft under PyTorch's tensor parallelism over DTensor."""

from __future__ import annotations

from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from .serving import Settings, Training
from .torch_gpt2 import counts, give_values, logits_of, make_gpt2
from .torch_training import (
    StepTraining,
    make_decaying_optimizer,
    meet,
    split_loss_step,
    whole_batch,
)


def prepare(settings: Settings) -> Training:
    """Builds this rank's part of each layer."""
    meet(settings)
    inputs, labels = whole_batch(settings)
    model = make_gpt2(settings.sizes)
    ranks = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    inner = model.base_model.model
    for block in inner.transformer.h:
        parallelize_module(block, mesh, _plan_of_block())
        block.attn.split_size //= ranks
        for projection in (block.attn.c_attn.query, block.attn.c_attn.value):
            # A is whole on all ranks; the gradient of what enters is summed once for all that it enters.
            distribute_module(projection.lora_A["default"], mesh)
    plan = {
        "transformer.wte": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(inner, mesh, plan)
    give_values(model)
    step = split_loss_step(logits_of(model), make_decaying_optimizer(model), inputs, labels)
    return StepTraining(step, *counts(model))


def _plan_of_block() -> dict:
    return {
        "attn.c_attn": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        ),
        "attn.c_attn.query.base_layer": ColwiseParallel(),
        "attn.c_attn.query.lora_B.default": ColwiseParallel(),
        "attn.c_attn.key": ColwiseParallel(),
        "attn.c_attn.value.base_layer": ColwiseParallel(),
        "attn.c_attn.value.lora_B.default": ColwiseParallel(),
        "attn.c_proj": RowwiseParallel(),
        "mlp.c_fc": ColwiseParallel(),
        "mlp.c_proj": RowwiseParallel(),
    }
