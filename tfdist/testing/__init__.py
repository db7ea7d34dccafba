"""Real ranks for tests: run a function on N processes and get what each returned.

```pycon
>>> from tfdist.testing import run_ranks
>>> def rank_and_size():
...     from tfdist.testing import engine
...     return engine().rank, engine().size
>>> run_ranks(rank_and_size, num_ranks=2, engine="tensorflow")
[(0, 2), (1, 2)]
```
"""

import importlib
from typing import TYPE_CHECKING, Any

from tfdist.testing.pool import RankError, RankPool, run_ranks
from tfdist.testing.rank import engine, strategy

if TYPE_CHECKING:  # For editors and the reference; at run time `__getattr__` imports them.
    from tfdist.testing.engines import check_engine as check_engine
    from tfdist.testing.faults import FlipBit as FlipBit

__all__ = ["FlipBit", "RankError", "RankPool", "check_engine", "engine", "run_ranks", "strategy"]

#: They need TensorFlow, without which a pool of ranks is started.
_LATER = {"FlipBit": "faults", "check_engine": "engines"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"tfdist.testing.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
