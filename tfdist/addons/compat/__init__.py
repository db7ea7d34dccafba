"""Other libraries' names for what tfdist does."""

from tfdist.addons.compat import horovod

__all__ = ["horovod"]
