"""Language models of KerasHub: presets that are read into the parts that a rank keeps."""

from tfdist.addons.hub.presets import load_preset

__all__ = ["load_preset"]
