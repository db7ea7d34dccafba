"""`ParallelStrategy`, its subclasses and `auto`; `keras_patches/` patches functions of Keras."""

if __name__ != "tfdist.strategies":
    raise ImportError("This package must be imported as `tfdist.strategies`, not as `strategies`.")

from typing import TYPE_CHECKING

from tfdist.strategies.auto import auto
from tfdist.strategies.tpu import tpu
from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.step.shares import MeasuredShares as MeasuredShares
    from tfdist.strategies.horovod import HorovodStrategy as HorovodStrategy
    from tfdist.strategies.local import LocalStrategy as LocalStrategy
    from tfdist.strategies.multi_worker import MultiWorkerStrategy as MultiWorkerStrategy

#: Each imports an engine, of which a program needs one.
_HOMES = {
    "HorovodStrategy": "tfdist.strategies.horovod",
    "LocalStrategy": "tfdist.strategies.local",
    "MeasuredShares": "tfdist.step.shares",
    "MultiWorkerStrategy": "tfdist.strategies.multi_worker",
}

__all__ = ["auto", "tpu", *_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
