"""KerasHub's presets, read into the parts that ranks keep."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from tfdist import checks
from tfdist.context import current_strategy
from tfdist.keras_internals.functional import deferred_weights, initialize_weights
from tfdist.tensor_parallel import parallelize
from tfdist.tensor_parallel.experts import find_experts
from tfdist.tensor_parallel.layout_map import is_layout_map
from tfdist.tensor_parallel.plan import check_plan

__all__ = ["load_preset"]

#: How KerasHub calls the files of a preset: one file of weights, or a list of several.
_WEIGHTS = ("model.weights.h5", "model.weights.json")
_TASK_WEIGHTS = "task.weights.h5"
_CONFIG = "config.json"


def load_preset(
    preset: str | os.PathLike[str],
    cls: Any = None,
    *,
    plan: Mapping[str, str] | Any | None = None,
    **kwargs: Any,
) -> keras.Model:
    """Loads a preset of KerasHub, of which each rank reads what it keeps.

    ```python
    with HorovodStrategy(Mesh(tensor=2), zero_stage=3).scope():
        model = tfdist.load_preset("llama3-local/", dtype="bfloat16")
        model.backbone.enable_lora(8)
    ```

    `model.save_to_preset`, called by every rank, saves one that plain KerasHub loads.

    The model is that of `cls.from_preset(preset)`. On a tensor axis it is split by `parallelize`, and
    so are experts on theirs; a rank reads its slices from the files, one weight at a time. Under ZeRO stage 3 it reads a weight
    whole, and keeps its shard. On a pipeline axis the model has no values yet: `PipelineModel` reads
    those of this rank's stages. Without a strategy in scope this is `from_preset`.

    Args:
        preset: The folder of a preset, as `save_to_preset` makes it.
        cls: A task or backbone of KerasHub; None for `keras_hub.models.CausalLM`.
        plan: As for `parallelize`; None to find one.
        **kwargs: For `from_preset`, as `dtype` or `preprocessor`.

    Raises:
        ImportError: KerasHub is not installed.
        ValueError: The folder holds no preset, or what `parallelize` raises.
    """
    folder = Path(checks.path("preset", preset))
    if cls is not None and not (inspect.isclass(cls) and hasattr(cls, "from_preset")):
        raise checks.refuse("cls", cls, "a task or a backbone of KerasHub, or None")
    if plan is not None and not is_layout_map(plan):
        check_plan(plan)
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if not (folder / _CONFIG).is_file() or weights is None:
        raise ValueError(
            f"A `preset` is a folder with {_CONFIG} and {' or '.join(_WEIGHTS)}, as "
            f"`save_to_preset` makes it. Received: {str(preset)!r}. Others are loaded by KerasHub's "
            "`from_preset` and saved by `save_to_preset` once."
        )
    models = _hub().models
    cls = models.CausalLM if cls is None else cls
    strategy = current_strategy()
    if strategy is None:
        return cls.from_preset(str(folder), **kwargs)
    is_task = issubclass(cls, models.Task)
    # An optimizer's variables cannot be deferred.
    compiles = is_task and kwargs.pop("compile", True)
    if is_task:
        kwargs["compile"] = False
    with deferred_weights():
        model = cls.from_preset(str(folder), load_weights=False, **kwargs)
    mesh = strategy.mesh
    if strategy.group(*mesh.weight_axes).size > 1 or find_experts(model):
        parallelize(model, plan)
    backbone = getattr(model, "backbone", model)
    if backbone is not model and (folder / _TASK_WEIGHTS).is_file():
        model.load_task_weights(str(folder / _TASK_WEIGHTS))
    backbone.load_weights(str(weights))
    if strategy.group(*mesh.stage_axes).size == 1:
        initialize_weights(model.variables)
    if compiles:
        model.compile()
    return model


def _hub():
    try:
        import keras_hub
    except ImportError as error:
        raise ImportError(
            "Presets are those of KerasHub, which is not installed: pip install keras-hub."
        ) from error
    return keras_hub
