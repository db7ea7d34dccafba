"""torch.distributed.pipelining: one stage a rank, half of the blocks each."""

from __future__ import annotations

import torch
from torch import distributed
from torch.distributed import pipelining

from .serving import Settings, Training
from .torch_models import GPT, loss_of
from .torch_training import StepTraining, count, make_optimizer, meet, whole_batch


def prepare(settings: Settings) -> Training:
    """Builds this rank's stage."""
    meet(settings)
    inputs, labels = whole_batch(settings)
    layers, ranks, rank = settings.sizes["layers"], settings.ranks, settings.rank
    blocks = range(rank * layers // ranks, (rank + 1) * layers // ranks)
    model = GPT(settings.sizes, blocks, tied=False)
    stage = pipelining.PipelineStage(model, rank, ranks, torch.device("cpu"))
    kind = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}
    schedule = kind[settings.options["schedule"]](
        stage, settings.options["microbatches"], loss_fn=loss_of
    )
    optimizer = make_optimizer(model.parameters())

    def step():
        optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        given = (inputs,) if rank == 0 else ()
        if rank == ranks - 1:
            schedule.step(*given, target=labels, losses=losses)
        else:
            schedule.step(*given)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else None

    whole = torch.tensor(count(model))
    distributed.all_reduce(whole)
    return StepTraining(step, int(whole))
