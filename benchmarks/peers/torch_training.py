"""What PyTorch's programs share: how ranks meet, the optimizer, and the loop of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from .serving import LEAD, Settings, Steps, global_batch, own_rows
from .torch_models import GPT, ConvNet, loss_of


def meet(settings: Settings) -> None:
    """Joins the others over Gloo, with as many threads as are allowed."""
    torch.set_num_threads(settings.threads)
    torch.set_flush_denormal(True)  # As TensorFlow's threads do.
    torch.manual_seed(0)
    distributed.init_process_group("gloo")


def make_model(settings: Settings):
    """The model, and this rank's rows of the batch for it."""
    inputs, labels = (torch.from_numpy(array) for array in own_rows(settings))
    if settings.model == "gpt":
        return GPT(settings.sizes), inputs.long(), labels.long()
    # oneDNN's convolutions are fastest in this order.
    images = inputs.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
    model = ConvNet(settings.sizes).to(memory_format=torch.channels_last)
    return model, images, labels.long()


def whole_batch(settings: Settings):
    """The global batch."""
    return tuple(torch.from_numpy(array).long() for array in global_batch(settings))


def make_optimizer(parameters: Iterable):
    """Adam, with the constant that Keras has, in one kernel."""
    return torch.optim.Adam(_groups(parameters), lr=1e-3, eps=1e-7, fused=True)


def make_decaying_optimizer(model):
    """AdamW of what a model trains, with the constants that Keras has, in one kernel."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return torch.optim.AdamW(_groups(trained), lr=1e-3, eps=1e-7, weight_decay=0.004, fused=True)


def _groups(parameters: Iterable) -> list[dict]:
    """The parameters by kind, since one kernel takes tensors of one kind."""
    split: dict[bool, list] = {True: [], False: []}
    for parameter in parameters:
        split[isinstance(parameter, DTensor)].append(parameter)
    return [{"params": group} for group in split.values() if group]


def plain_step(model, optimizer, inputs, labels) -> Callable:
    """A function that makes a step, where model and optimizer see to the other ranks."""

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def split_loss_step(model, optimizer, inputs, labels) -> Callable:
    """The same where the logits are split over the vocabulary."""

    def step():
        optimizer.zero_grad(set_to_none=True)
        with loss_parallel():
            loss = loss_of(model(inputs), labels)
            loss.backward()
        optimizer.step()
        return loss.detach().full_tensor()

    return step


class StepTraining:
    """A model whose steps a function makes.

    Args:
        step: Makes a step; returns its loss, or None where this rank does not see it.
        parameters: How many the model has, over all ranks, without adapters.
        trained: How many are trained; None for all.
    """

    def __init__(self, step: Callable, parameters: int, trained: int | None = None):
        self.parameters = parameters
        self.trained = parameters if trained is None else trained
        self._step = step

    def block(self, steps: int) -> Steps:
        """Trains some steps more."""
        block, losses = Steps(), []
        for _ in range(steps + LEAD):
            block.begin()
            losses.append(self._step())
        seen = [float(loss) for loss in losses if loss is not None]
        block.loss = sum(seen) / len(seen) if seen else None
        return block


def count(model) -> int:
    """How many parameters a model has, over all ranks where they are in parts."""
    return sum(parameter.numel() for parameter in model.parameters())
