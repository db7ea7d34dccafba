"""The balance of a model's experts, for the logs, and the number of parameters active per token."""

from __future__ import annotations

import math
from collections.abc import Mapping

import keras
import numpy as np

from tfdist.backend.keras.private import all_layers
from tfdist.collectives.objects import all_gather_object
from tfdist.experts import MixtureOfExperts
from tfdist.experts.usage import ExpertUsage
from tfdist.sharding.layout import global_shape
from tfdist.step.context import DistributedStrategy, strategy_of
from tfdist.utils import checks


class ExpertLoad(keras.callbacks.Callback):
    """Adds the balance of the experts of all layers to the logs of each epoch.

    It counts the training tokens of all ranks:

    - `expert_load`: the tokens of the busiest expert of a layer over the mean of its experts,
      averaged over layers; 1 is even.
    - `expert_max_violation`: the excess of the busiest expert of any layer over the mean, relative to
      the mean (MaxVio of Wang et al. 2024); 0 is even.
    - `expert_dropped`: the share of choices that were dropped; 0 without a capacity factor.

    Args:
        verbose: Whether the chief prints at the start the numbers of parameters and of those active
            per token.

    Raises:
        ValueError: `verbose` is not a boolean.
    """

    def __init__(self, verbose: bool = False):
        super().__init__()
        self._verbose = checks.boolean("verbose", verbose)

    def on_train_begin(self, logs=None):
        """Resets the counts."""
        for usage in _usages_of(self.model).values():
            usage.take()
        counts = parameter_counts(self.model)
        strategy = strategy_of(self.model)
        if self._verbose and (strategy is None or strategy.is_chief):
            print(f"{counts['active']:,} of {counts['total']:,} parameters are active per token.")

    def on_epoch_end(self, epoch, logs=None):
        """Reads the counts of all ranks, and resets them."""
        own = {path: usage.take() for path, usage in _usages_of(self.model).items()}
        if logs is not None:
            logs |= load_logs(_of_all_ranks(own, strategy_of(self.model)))


def _usages_of(model: keras.Model) -> dict[str, ExpertUsage]:
    """The counts of each layer of experts of a model, by the layer's path."""
    found = {layer.path: getattr(layer, "expert_usage", None) for layer in all_layers(model)}
    return {path: usage for path, usage in found.items() if isinstance(usage, ExpertUsage)}


def load_logs(counts: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The figures that are logged for counts of choices.

    Args:
        counts: By layer, the number of times each expert was chosen; last, the number of dropped choices.

    Returns:
        The figures by name; an empty dict without counts.
    """
    busiest, chosen, dropped = [], 0.0, 0.0
    for each in counts.values():
        total = float(each[:-1].sum())
        if total:
            busiest.append(float(each[:-1].max()) * (len(each) - 1) / total)
            chosen, dropped = chosen + total, dropped + float(each[-1])
    if not busiest:
        return {}
    return {
        "expert_load": float(np.mean(busiest)),
        "expert_max_violation": max(busiest) - 1,
        "expert_dropped": dropped / chosen,
    }


def _of_all_ranks(own: dict, strategy: DistributedStrategy | None) -> dict[str, np.ndarray]:
    if strategy is None or strategy.mesh.size == 1:
        return own
    mesh = strategy.mesh
    group = strategy.group(*mesh.gradient_axes, *mesh.stage_axes)
    found: dict[str, np.ndarray] = {}
    for counts in all_gather_object(own, group, name="expert-load"):
        for path, each in counts.items():
            found[path] = found.get(path, 0) + each
    return found


def parameter_counts(model: keras.Model) -> dict[str, int]:
    """The number of trainable parameters of a model, and of those active per token.

    In a pipeline they are those of this rank's stages.

    Args:
        model: A built model.

    Returns:
        "total" and "active": the latter includes `top_k` of the experts of each layer.
    """
    checks.instance("model", model, keras.Model, "a Keras model")
    weights = {id(weight): weight for weight in model.trainable_variables}
    total = sum(math.prod(global_shape(weight)) for weight in weights.values())
    idle = 0
    for layer in all_layers(model):
        if isinstance(layer, MixtureOfExperts):
            found = layer.num_parameters
            idle += found["total"] - found["active"]
    return {"total": total, "active": total - idle}
