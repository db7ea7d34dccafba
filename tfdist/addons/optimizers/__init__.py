"""Optimizers that use norms, means or factors of whole parameters, where ranks hold only parts of them."""

from typing import TYPE_CHECKING

from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.addons.optimizers.adafactor import Adafactor as Adafactor
    from tfdist.addons.optimizers.lamb import Lamb as Lamb
    from tfdist.addons.optimizers.muon import ATTENTION_MATRICES as ATTENTION_MATRICES
    from tfdist.addons.optimizers.muon import Muon as Muon
    from tfdist.addons.optimizers.schedule_free import ScheduleFreeAdamW as ScheduleFreeAdamW

_HOMES = {
    "ATTENTION_MATRICES": "tfdist.addons.optimizers.muon",
    "Adafactor": "tfdist.addons.optimizers.adafactor",
    "Lamb": "tfdist.addons.optimizers.lamb",
    "Muon": "tfdist.addons.optimizers.muon",
    "ScheduleFreeAdamW": "tfdist.addons.optimizers.schedule_free",
}

__all__ = [*_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
