"""Other libraries' names for what tfdist does."""

from tfdist.compat import horovod

__all__ = ["horovod"]
