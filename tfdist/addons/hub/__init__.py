"""Language models of KerasHub: presets that are read into the parts that a rank keeps."""

from tfdist.addons.hub.presets import load_preset as load_preset

#: The function is public as `tfdist.load_preset`.
__all__: list[str] = []
