"""What extensions are made of: see docs/extending.md.

Built-in features use the same interfaces. They may change until the first stable release.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # For editors and the reference; at run time `__getattr__` imports them.
    from tfdist.collectives.engine import Engine as Engine
    from tfdist.collectives.mappings import copy_to_region as copy_to_region
    from tfdist.collectives.mappings import gather_from_region as gather_from_region
    from tfdist.collectives.mappings import reduce_from_region as reduce_from_region
    from tfdist.collectives.mappings import scatter_to_region as scatter_to_region
    from tfdist.gradients.items import GradientItem as GradientItem
    from tfdist.gradients.stage import GradientContext as GradientContext
    from tfdist.gradients.stage import GradientStage as GradientStage
    from tfdist.gradients.stage import Position as Position
    from tfdist.pipeline.schedules import Action as Action
    from tfdist.pipeline.schedules import ActionKind as ActionKind
    from tfdist.pipeline.schedules import Schedule as Schedule
    from tfdist.pipeline.simulation import check_schedule as check_schedule
    from tfdist.sharding.kept import Kept as Kept
    from tfdist.sharding.kept import KeptState as KeptState
    from tfdist.sharding.kept import VariableKey as VariableKey
    from tfdist.sharding.split import LayerSplit as LayerSplit
    from tfdist.sharding.split import Partial as Partial
    from tfdist.sharding.split import Split as Split
    from tfdist.sharding.split import Whole as Whole
    from tfdist.sharding.split import register_split as register_split
    from tfdist.sharding.weights import add_split_weight as add_split_weight
    from tfdist.sharding.weights import axis_group as axis_group
    from tfdist.step.hooks import FitContext as FitContext
    from tfdist.step.hooks import FitHook as FitHook
    from tfdist.strategies.parallel import ParallelStrategy as ParallelStrategy
    from tfdist.strategies.registry import register_strategy as register_strategy

_HOMES = {
    "Action": "pipeline.schedules",
    "ActionKind": "pipeline.schedules",
    "Engine": "collectives.engine",
    "FitContext": "step.hooks",
    "FitHook": "step.hooks",
    "GradientContext": "gradients.stage",
    "GradientItem": "gradients.items",
    "GradientStage": "gradients.stage",
    "Kept": "sharding.kept",
    "KeptState": "sharding.kept",
    "LayerSplit": "sharding.split",
    "ParallelStrategy": "strategies.parallel",
    "Partial": "sharding.split",
    "Position": "gradients.stage",
    "Schedule": "pipeline.schedules",
    "Split": "sharding.split",
    "VariableKey": "sharding.kept",
    "Whole": "sharding.split",
    "add_split_weight": "sharding.weights",
    "axis_group": "sharding.weights",
    "check_schedule": "pipeline.simulation",
    "copy_to_region": "collectives.mappings",
    "gather_from_region": "collectives.mappings",
    "reduce_from_region": "collectives.mappings",
    "register_split": "sharding.split",
    "register_strategy": "strategies.registry",
    "scatter_to_region": "collectives.mappings",
}

__all__ = [
    "Action",
    "ActionKind",
    "Engine",
    "FitContext",
    "FitHook",
    "GradientContext",
    "GradientItem",
    "GradientStage",
    "Kept",
    "KeptState",
    "LayerSplit",
    "ParallelStrategy",
    "Partial",
    "Position",
    "Schedule",
    "Split",
    "VariableKey",
    "Whole",
    "add_split_weight",
    "axis_group",
    "check_schedule",
    "copy_to_region",
    "gather_from_region",
    "reduce_from_region",
    "register_split",
    "register_strategy",
    "scatter_to_region",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"tfdist.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
