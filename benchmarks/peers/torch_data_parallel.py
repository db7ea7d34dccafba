"""PyTorch's DistributedDataParallel, with its default buckets of 25 MiB; also compiled."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from .serving import Settings, Training
from .torch_training import StepTraining, count, make_model, make_optimizer, meet, plain_step


def prepare(settings: Settings) -> Training:
    """Builds this rank's replica."""
    meet(settings)
    model, inputs, labels = make_model(settings)
    if settings.options.get("compiled"):
        # Around the replica, `torch.compile` would leave out what it does not see through, as a
        # Sequential, and say nothing. Inside it the graph is still cut at the buckets.
        model = torch.compile(model, fullgraph=True)
    # Without it gradients are copied into the buckets and out of them. Statistics of a
    # normalization are each rank's own.
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer = make_optimizer(model.parameters())
    step = plain_step(replica, optimizer, inputs, labels)
    return StepTraining(step, count(model))
