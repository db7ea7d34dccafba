"""KerasHub: presets loaded in parts by ranks, files and exports of split models, and generation.

The core imports this module if a program has imported KerasHub.
"""

from typing import TYPE_CHECKING

from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.addons.hub.patches import install_hub as install_hub
    from tfdist.addons.hub.pipeline_generation import TextGenerator as TextGenerator
    from tfdist.addons.hub.presets import load_preset as load_preset

_HOMES = {
    "TextGenerator": "tfdist.addons.hub.pipeline_generation",
    "install_hub": "tfdist.addons.hub.patches",
    "load_preset": "tfdist.addons.hub.presets",
}

#: `load_preset` is public as `tfdist.load_preset`.
__all__: list[str] = []
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
