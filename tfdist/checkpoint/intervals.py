"""How often to save."""

from tfdist.runtime.save_interval import young_daly

__all__ = ["young_daly"]
