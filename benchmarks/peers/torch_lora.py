"""transformers and peft in one process: equal rows, or conversations that are padded to the longest of a batch."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from .serving import Settings, Training, padded
from .torch_gpt2 import counts, give_values, logits_of, make_gpt2
from .torch_training import StepTraining, make_decaying_optimizer, plain_step, whole_batch

#: Targets without a loss.
_LEFT_OUT = -100


def prepare(settings: Settings) -> Training:
    """Builds the model."""
    torch.set_num_threads(settings.threads)
    torch.set_flush_denormal(True)  # As TensorFlow's threads do.
    torch.manual_seed(0)
    model = make_gpt2(settings.sizes)
    give_values(model)
    optimizer = make_decaying_optimizer(model)
    if settings.options["measure"] == "conversations":
        step = _pass_over(padded(settings.sizes), model, optimizer)
    else:
        step = plain_step(logits_of(model), optimizer, *whole_batch(settings))
    return StepTraining(step, *counts(model))


def _pass_over(batches, model, optimizer):
    """A function that trains on each batch, and returns the mean of the losses."""
    found = []
    for each in batches:
        ids, mask, labels = (torch.from_numpy(array).long() for array in each[:3])
        labels[torch.from_numpy(~each.trained)] = _LEFT_OUT
        found.append((ids, mask, labels))

    def step():
        total = torch.zeros(())
        for ids, mask, labels in found:
            optimizer.zero_grad(set_to_none=True)
            logits = model(input_ids=ids, attention_mask=mask).logits
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_LEFT_OUT)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return total / len(found)

    return step
