"""Compatibility: Horovod's names, and the checkpoint format of early versions."""

from typing import TYPE_CHECKING

from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.addons.compat import checkpoint_format1 as checkpoint_format1
    from tfdist.addons.compat import horovod as horovod

__all__ = ["horovod"]
__getattr__, __dir__ = lazy_names(__name__, {}, ("checkpoint_format1", "horovod"))
