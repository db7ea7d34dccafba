"""The interfaces for extensions: see docs/extending.md.

Built-in features use the same interfaces. They may change until the first stable release.
"""

from typing import TYPE_CHECKING

from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:  # For editors and the reference; at runtime `__getattr__` imports them.
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
    from tfdist.pipeline.schedules import Schedule as Schedule
    from tfdist.pipeline.simulation import check_schedule as check_schedule
    from tfdist.sharding.kept import Kept as Kept
    from tfdist.sharding.kept import KeptState as KeptState
    from tfdist.sharding.kept import VariableKey as VariableKey
    from tfdist.sharding.split import LayerSplit as LayerSplit
    from tfdist.sharding.split import Split as Split
    from tfdist.sharding.split import register_split as register_split
    from tfdist.sharding.weights import add_split_weight as add_split_weight
    from tfdist.sharding.weights import axis_group as axis_group
    from tfdist.step.hooks import FitContext as FitContext
    from tfdist.step.hooks import FitHook as FitHook
    from tfdist.strategies.parallel import ParallelStrategy as ParallelStrategy
    from tfdist.strategies.registry import register_strategy as register_strategy

_NAMES = {
    "tfdist.collectives.engine": ("Engine",),
    "tfdist.collectives.mappings": (
        "copy_to_region",
        "gather_from_region",
        "reduce_from_region",
        "scatter_to_region",
    ),
    "tfdist.gradients.items": ("GradientItem",),
    "tfdist.gradients.stage": ("GradientContext", "GradientStage", "Position"),
    "tfdist.pipeline.schedules": ("Action", "Schedule"),
    "tfdist.pipeline.simulation": ("check_schedule",),
    "tfdist.sharding.kept": ("Kept", "KeptState", "VariableKey"),
    "tfdist.sharding.weights": ("add_split_weight", "axis_group"),
    "tfdist.step.hooks": ("FitContext", "FitHook"),
    "tfdist.strategies.parallel": ("ParallelStrategy",),
    "tfdist.strategies.registry": ("register_strategy",),
    "tfdist.sharding.split": ("LayerSplit", "Split", "register_split"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
