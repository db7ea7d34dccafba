"""`ParallelStrategy`, its kinds and `auto`; `keras_patches/`, the functions of Keras that are patched."""

if __name__ != "tfdist.strategies":
    raise ImportError("This package is imported as `tfdist.strategies`, not as `strategies`.")


from tfdist.step.shares import MeasuredShares
from tfdist.strategies.auto import auto
from tfdist.strategies.horovod import HorovodStrategy
from tfdist.strategies.local import LocalStrategy
from tfdist.strategies.multi_worker import MultiWorkerStrategy
from tfdist.strategies.tpu import tpu

__all__ = [
    "HorovodStrategy",
    "LocalStrategy",
    "MeasuredShares",
    "MultiWorkerStrategy",
    "auto",
    "tpu",
]
